// Between the files of score and select on CUDA: the proxy, logits as fixed-point depths, and what is known of each row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.h"
#include "stages/select.h"

namespace scope::cuda {

// A warp's lanes are 32 groups: tables and histograms have 32 columns, and lane l uses bank l.
inline constexpr int kLanes = 32;

// A key's depth is how far its logit lies below its row's upper bound, in bins with kSubBits of fraction: integers from
// here on, so that histograms add up in any order and equal logits stay equal. 23 bits come out of one f32 addition.
inline constexpr int kBins = 640, kSubBits = 13;
inline constexpr uint32_t kDepths = uint32_t{kBins} << kSubBits;
inline constexpr float kUsedDepths = kDepths - 64;  // what a row's range is mapped to; the rest is for rounding
static_assert(kDepths <= 1u << 23);
// Where tables leave little shared memory, fewer and wider bins.
struct Bins {
  int count = kBins, sub_bits = kSubBits;
};
// Beyond this range a depth is too coarse for the tolerance of 2e-3: the row is done from its f32 logits.
inline constexpr float kMostRange = 1500.0f;

// A histogram word in shared memory: keys, and the sum of the top bits of their fractions. Blocks flush in time.
inline constexpr int kMomentBits = 6, kCountShift = 19, kFlushKeys = 8'000;
inline constexpr int kMostMoment = (1 << kMomentBits) - 1;
static_assert(kFlushKeys * kMostMoment < 1 << kCountShift && kFlushKeys < 1 << (32 - kCountShift));
// In memory: keys << 32 | the sum, so this many keys at most.
inline constexpr int64_t kMostKeys = 1 << 26;
static_assert(kMostKeys * kMostMoment < int64_t{1} << 32);

// A chunk of heads.
struct ProxyLaunch {
  bool exact, f16;
  int32_t heads, groups, count, dim, subspaces, codes;
  float scale;
  PerHead<const float> centroids;  // [groups, dim]
  PerHead<const float> tables;     // [groups, subspaces, codes]
  PerHead<const int32_t> labels;   // [subspaces, count]
  HeadRows<const uint16_t> k;
  const int32_t* rows;  // null: 0, 1, …

  __device__ int32_t token(int32_t key) const { return rows == nullptr ? key : rows[key]; }
  __device__ float element(uint16_t bits) const {
    return f16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
  }
  // One logit in f32, for everything that need not be fast.
  __device__ float score(int32_t head, int32_t group, int32_t key) const {
    float sum = 0;
    if (exact) {
      const float* q = centroids[head] + int64_t{group} * dim;
      const uint16_t* x = k.row(head, token(key));
      for (int i = 0; i < dim; i += 8) {
        const uint4 eight = *reinterpret_cast<const uint4*>(x + i);
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
        for (int p = 0; p < 4; ++p) {
          sum = fmaf(q[i + 2 * p], element(static_cast<uint16_t>(pairs[p])), sum);
          sum = fmaf(q[i + 2 * p + 1], element(static_cast<uint16_t>(pairs[p] >> 16)), sum);
        }
      }
      return sum * scale;
    }
    const float* table = tables[head] + int64_t{group} * subspaces * codes;
    for (int m = 0; m < subspaces; ++m) sum += table[m * codes + labels[head][int64_t{m} * count + key]];
    return sum;
  }
};

// What a row still needs after the fast passes.
inline constexpr uint32_t kRefineTopP = 1;   // t_c from the depths in its bin
inline constexpr uint32_t kExactTopP = 2;    // t_c from the f32 logits
inline constexpr uint32_t kExactSelect = 4;  // the whole mask row from the f32 logits

// Scratch of a chunk. The histograms are dead once the budgets are known: the candidates take their place, then the tail.
struct SelectSpace {
  int64_t bytes = 0;  // per head
  int32_t most_candidates = 0;
  PerHead<uint32_t> found;                // [groups] candidates so far
  PerHead<unsigned long long> histogram;  // [groups / 32, bins, 32]; scanned: keys up to the bin << 32 | mass below it
  PerHead<uint32_t> candidates;           // [groups, most_candidates] fraction of the depth << index bits | key
  PerHead<float> tail;                    // [groups, kTailParts, 2 + 2 dim]
  PerHead<uint32_t> few;                  // [groups, kFewCandidates] the same beside the histograms, for t_c
  PerHead<float> step;                    // [groups] nats per depth; 0: the row is one bin
  PerHead<float> range;                   // [groups] upper minus lower bound, in nats; not finite when the logits are not
  PerHead<float> high;                    // [groups] upper bound; exact: without the scale
  PerHead<float> unit;                    // [groups] depths per unit of the logit; exact: without the scale
  PerHead<float> mass;                    // [groups] of all keys, relative to the top of the first bin that has any
  PerHead<float> blur;      // [groups] how much the fractions' rounding can move a share of the mass, per bin width
  PerHead<uint32_t> todo;   // [groups] kExact flags
  PerHead<uint32_t> limit;  // [groups] keys above this depth are kept
  PerHead<uint32_t> end;    // [groups] keys from limit up to here are candidates
  PerHead<int32_t> need;    // [groups] how many of the candidates are kept
  PerHead<float> part;      // [groups] what share of the mass of t_c's bin is needed
};
inline constexpr int kFewCandidates = 1024;

inline constexpr int kTailParts = 8;  // of the keys; a constant, so that the sums do not depend on the chunk

struct MaskLaunch {
  PerHead<uint32_t> rows;  // [groups, words]; null: only candidates are wanted
  int64_t words;
  bool direct;  // key j is token j and there are no others: words are stored; else bits are added to zeros
};

struct TailLaunch {
  HeadRows<const uint16_t> v;
  PerHead<float> k, value, bias;
  PerHead<const int32_t> sizes;
};

// score.cu: the passes that recompute the proxy.
Bins select_bins(const Exec& exec, const ProxyLaunch& proxy);
void row_bounds(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins);
void histogram_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins);
void emit_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const MaskLaunch& mask);
// tail.cu
void tail_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, const MaskLaunch& mask,
               const TailLaunch& tail);

// Sums over a block of kThreads, on every thread.
template <int kThreads, int kN>
__device__ void block_sums(int64_t (&x)[kN]) {
  __shared__ int64_t parts[kThreads / 32][kN];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    for (int offset = 16; offset > 0; offset /= 2) x[i] += __shfl_xor_sync(~0u, x[i], offset);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][i] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    x[i] = 0;
    for (int w = 0; w < kThreads / 32; ++w) x[i] += parts[w][i];
  }
}

// A candidate's lower bits hold its key.
inline int index_bits(int64_t count) {
  int bits = 1;
  while ((int64_t{1} << bits) < count) ++bits;
  return bits;
}

// Adds the bits of keys [first, first + 32) to a row.
__device__ inline void add_bits(const ProxyLaunch& proxy, uint32_t* row, int32_t first, uint32_t word) {
  if (word == 0) return;
  if (proxy.rows == nullptr) {
    atomicOr(row + first / 32, word);
    return;
  }
  const int32_t last = min(first + 31, proxy.count - 1), start = proxy.rows[first];
  if (proxy.rows[last] - start == last - first) {
    atomicOr(row + start / 32, word << (start % 32));
    const uint32_t rest = start % 32 == 0 ? 0 : word >> (32 - start % 32);
    if (rest != 0) atomicOr(row + start / 32 + 1, rest);
    return;
  }
  for (; word != 0; word &= word - 1) {
    const int32_t token = proxy.rows[first + __ffs(static_cast<int>(word)) - 1];
    atomicOr(row + token / 32, 1u << (token % 32));
  }
}

}  // namespace scope::cuda
