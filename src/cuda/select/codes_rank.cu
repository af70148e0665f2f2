// Whole codes: the keys of each code, and each group's order of the codes.
#include "core/numeric.h"
#include "cuda/device/reduce.cuh"
#include "cuda/select/codes.h"

namespace scope::cuda {

namespace {

// ---- keys of each code ----

constexpr int kTallyThreads = 512, kTallyKeys = 8192;

__global__ void __launch_bounds__(kTallyThreads) tally_codes(ProxyLaunch p, CodesFloors floors, CodesSpace s, int parts) {
  extern __shared__ int32_t counts[];  // [codes]
  const int64_t head = blockIdx.x / parts;
  const int begin = static_cast<int>(blockIdx.x % parts) * kTallyKeys, end = min(begin + kTallyKeys, p.count);
  if (begin == 0 && threadIdx.x == 0) *s.floors[head] = floors;
  for (int r = threadIdx.x; r < p.codes; r += kTallyThreads) counts[r] = 0;
  __syncthreads();
  for (int j = begin + threadIdx.x; j < end; j += kTallyThreads) atomicAdd(counts + p.labels[head][j], 1);
  __syncthreads();
  for (int r = threadIdx.x; r < p.codes; r += kTallyThreads) {
    if (counts[r] > 0) atomicAdd(s.code_sizes[head] + r, counts[r]);
  }
}

// ---- each group's order ----

constexpr int kRankThreads = 256, kRankWarps = kRankThreads / 32;
constexpr int kMostEach = static_cast<int>(kMostRankedCodes) / kRankThreads;

// A weight, and below its first 40 fraction bits the code: descending keys are descending weights, and equal weights in
// ascending code.
constexpr uint64_t kCodeMask = kMostRankedCodes - 1;
static_assert((kMostRankedCodes & static_cast<int64_t>(kCodeMask)) == 0);
__device__ uint64_t key_of(double weight, int code) {
  return (static_cast<uint64_t>(__double_as_longlong(weight)) & ~kCodeMask) | (kCodeMask - static_cast<uint64_t>(code));
}
__device__ int code_of(uint64_t key) { return static_cast<int>(kCodeMask - (key & kCodeMask)); }
// In sums, what all keep weighs nothing.
__device__ double weight_of(uint64_t key) {
  const double weight = __longlong_as_double(static_cast<int64_t>(key & ~kCodeMask));
  return weight < INFINITY ? weight : 0.0;
}

// An error, and below it the code, in the same order. What is guaranteed comes before all errors, and what is no code after
// them.
__device__ uint64_t error_key(float error, bool guaranteed, bool real, int code) {
  const uint32_t bits = __float_as_uint(error == 0 ? 0.0f : error);  // one zero
  const uint32_t ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  const uint32_t high = !real ? 0 : guaranteed ? ~0u : ascending;
  return uint64_t{high} << 32 | (kCodeMask - static_cast<uint64_t>(code));
}

// Sorts kRankThreads x kEach keys, descending; thread t has number t x kEach and those that follow. Bitonic: neighbours
// within a thread, then within a warp, and what is further apart through shared memory [kRankThreads x kEach].
// cub::BlockRadixSort would take 16 passes over the 64 bits, with several barriers each; only six exchanges here have any.
template <int kEach>
__device__ void sort_keys(uint64_t (&key)[kEach], uint64_t* shared) {
  const int first = static_cast<int>(threadIdx.x) * kEach;
  for (int run = 2; run <= kRankThreads * kEach; run *= 2) {
    for (int distance = run / 2; distance >= kEach; distance /= 2) {
      const bool larger = ((first & distance) == 0) == ((first & run) == 0);
      const int lanes = distance / kEach;
      uint64_t other[kEach];
      if (lanes < 32) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) other[e] = __shfl_xor_sync(~0u, key[e], lanes);
      } else {
        __syncthreads();  // everyone has read what was there
#pragma unroll
        for (int e = 0; e < kEach; ++e) shared[e * kRankThreads + threadIdx.x] = key[e];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < kEach; ++e) other[e] = shared[e * kRankThreads + (threadIdx.x ^ lanes)];
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((other[e] > key[e]) == larger) key[e] = other[e];
      }
    }
#pragma unroll
    for (int distance = kEach / 2; distance > 0; distance /= 2) {
      if (distance >= run) continue;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((e & distance) != 0) continue;
        const uint64_t x = key[e], y = key[e + distance];
        const bool swap = (y > x) == (((first + e) & run) == 0);
        key[e] = swap ? y : x;
        key[e + distance] = swap ? x : y;
      }
    }
  }
}

enum class Ranking { weight, error, score };
// On a multiprocessor at a time, as far as the registers go.
template <int kEach, Ranking kBy>
constexpr int kRankBlocks = kEach > 4               ? 1
                            : kBy == Ranking::error ? 3
                                                    : 4;

// One argument: of two smaller ones, the compiler would hold more in registers.
struct RankLaunch : CodesOrder, CodesSpace {};

// A block for each group: what a code weighs in it, and where that places the code.
template <int kEach, Ranking kBy>
__global__ void __launch_bounds__(kRankThreads, kRankBlocks<kEach, kBy>) rank_codes(ProxyLaunch p, RankLaunch a) {
  __shared__ uint64_t shared[kRankThreads * kEach];
  __shared__ float highs[kRankWarps];
  const int64_t head = blockIdx.x / p.groups, group = blockIdx.x % p.groups;
  if (a.sizes[head][group] == 0) return;
  const float* scores = p.tables[head] + group * p.codes;
  const int32_t* code_sizes = a.code_sizes[head];
  const auto weighs = [&](int r) { return a.by_similarity ? !a.always(head, r) : code_sizes[r] > 0; };

  const auto beside = [&](int r) { return abs(r - static_cast<int>(group)) <= 1; };
  uint64_t key[kEach];
  double mean = 0, deviation = 0;  // of the scores
  if constexpr (kBy == Ranking::score) {
    for (int r = threadIdx.x; r < p.codes; r += kRankThreads) mean += static_cast<double>(scores[r]);
    mean = block_sum<kRankThreads>(mean) / p.codes;
    for (int r = threadIdx.x; r < p.codes; r += kRankThreads) {
      const double apart = static_cast<double>(scores[r]) - mean;
      deviation += apart * apart;
    }
    deviation = sqrt(block_sum<kRankThreads>(deviation) / p.codes);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = e * kRankThreads + static_cast<int>(threadIdx.x);
      const bool real = r < p.codes;
      key[e] = error_key(real ? scores[r] : 0.0f, beside(r), real, r);
    }
  } else {
    float high = -INFINITY;  // without NaN
    for (int r = threadIdx.x; r < p.codes; r += kRankThreads) {
      if (weighs(r)) high = fmaxf(high, scores[r]);
    }
    high = warp_max(high);
    if (threadIdx.x % 32 == 0) highs[threadIdx.x / 32] = high;
    __syncthreads();
    for (const float other : highs) high = fmaxf(high, other);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = e * kRankThreads + static_cast<int>(threadIdx.x);
      double weight = 0;  // of what is no code, too: it has a higher number than all that are, and so comes last
      if (r < p.codes && a.always(head, r)) {
        weight = INFINITY;
      } else if (r < p.codes && weighs(r)) {
        weight = exp(static_cast<double>(scores[r]) - static_cast<double>(high)) * (a.by_similarity ? 1 : code_sizes[r]);
        if (!(weight < INFINITY)) weight = 0;
      }
      key[e] = key_of(weight, r);
    }
  }
  sort_keys<kEach>(key, shared);

  double mass = 0, total = 0;
  int32_t keys = 0;
  const int first = static_cast<int>(threadIdx.x) * kEach;
  const auto keys_of = [&](int e) { return first + e < p.codes ? code_sizes[code_of(key[e])] : 0; };
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if constexpr (kBy != Ranking::score) mass += weight_of(key[e]);
    keys += keys_of(e);
  }
  exclusive_scan<kRankThreads>(mass, keys, total);
  int32_t by_weight[kEach];  // keys up to and with each
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    by_weight[e] = keys += keys_of(e);
    if constexpr (kBy == Ranking::score) {
      if (first + e >= p.codes) continue;
      const int code = code_of(key[e]);
      const double above = static_cast<double>(scores[code]) - mean;
      mass = beside(code) ? 0.0 : deviation > 0 ? 0.5 * erfc(above / deviation * M_SQRT1_2) : 1.0;
      a.mass[head][group * p.codes + first + e] = mass;
    } else {
      mass += weight_of(key[e]);
      if (first + e < p.codes) a.mass[head][group * p.codes + first + e] = total > 0 ? mass / total : 0.0;
    }
  }
  if constexpr (kBy == Ranking::error) {
    const float* errors = a.errors[head] + group * p.codes;
    const int guaranteed = a.floors[head]->guaranteed;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const bool real = first + e < p.codes;
      const int code = code_of(key[e]);
      key[e] = error_key(real ? errors[code] : 0.0f, first + e < guaranteed, real, code);
    }
    sort_keys<kEach>(key, shared);
    mass = 0;
    keys = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) keys += keys_of(e);
    exclusive_scan<kRankThreads>(mass, keys, total);
  }
  // In use since the scan waited for everyone.
  auto* up_to = reinterpret_cast<int32_t*>(shared);                        // [codes] keys up to and with each rank
  auto* rank = reinterpret_cast<uint16_t*>(up_to + kRankThreads * kEach);  // [codes]
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (first + e >= p.codes) break;
    if constexpr (kBy == Ranking::error) {
      keys += keys_of(e);
      up_to[first + e] = keys;
    } else {
      keys = by_weight[e];
    }
    a.keys[head][group * p.codes + first + e] = keys;
    rank[code_of(key[e])] = static_cast<uint16_t>(first + e);
  }
  __syncthreads();
  if constexpr (kBy == Ranking::error) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (first + e >= p.codes) break;
      int from = 0, to = p.codes - 1;  // all codes have all keys
      while (from < to) {
        const int middle = (from + to) / 2;
        if (up_to[middle] < by_weight[e]) {
          from = middle + 1;
        } else {
          to = middle;
        }
      }
      a.reaching[head][group * p.codes + first + e] = static_cast<uint16_t>(from + 1);
    }
  }
  for (int r = threadIdx.x; r < p.codes; r += kRankThreads) a.rank[head][group * p.codes + r] = rank[r];
}

template <int kEach, Ranking kBy>
void launch_rank(const Exec& exec, const ProxyLaunch& p, const CodesOrder& order, const CodesSpace& space) {
  if constexpr (kEach < kMostEach) {
    if (p.codes > kRankThreads * kEach) return launch_rank<2 * kEach, kBy>(exec, p, order, space);
  }
  launch(exec, "rank_codes", rank_codes<kEach, kBy>, int64_t{p.heads} * p.groups, kRankThreads, 0, p,
         RankLaunch{order, space});
}

}  // namespace

void tally_pass(const Exec& exec, const ProxyLaunch& p, const CodesFloors& floors, const CodesSpace& space) {
  const int64_t bytes = int64_t{p.codes} * 4, parts = ceil_div(p.count, kTallyKeys);
  check(cudaMemset2DAsync(space.code_sizes.base, static_cast<size_t>(space.bytes), 0, static_cast<size_t>(bytes),
                          static_cast<size_t>(p.heads), stream(exec)),
        "select: sizes of codes");
  launch(exec, "tally_codes", tally_codes, p.heads * parts, kTallyThreads, bytes, p, floors, space, static_cast<int>(parts));
}

void rank_pass(const Exec& exec, const ProxyLaunch& p, const CodesOrder& order, const CodesSpace& space) {
  if (order.by_score) return launch_rank<1, Ranking::score>(exec, p, order, space);
  if (order.errors) return launch_rank<1, Ranking::error>(exec, p, order, space);
  launch_rank<1, Ranking::weight>(exec, p, order, space);
}

}  // namespace scope::cuda
