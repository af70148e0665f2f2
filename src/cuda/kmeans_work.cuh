// What the kernels of K-means share: the problems of one launch, and how a row is found and read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/numeric.h"
#include "cuda/kmeans.h"

namespace scope::cuda::clustering {

inline constexpr int kMostDim = 128;
inline constexpr int kMostSteps = kMostDim / 16;  // k-steps of an mma: 16 channels each
inline constexpr int kPair = 16;                  // centroids side by side in `fragments`: two tiles of 8
inline constexpr int kMostWide = 152;             // centroids that one wgmma multiplies
inline constexpr int kPrepareBlocks = 2;          // per problem
inline constexpr int kBins = 1024;                // labels that one pass of the sort tells apart
inline constexpr int kStretch = 1024;             // tokens that one warp places
inline constexpr int kPiece = 128;                // members that one warp adds up

// One channel subset, as kernels see it.
struct Subset {
  int depth;
  int steps, chunks;         // how many of the next two
  uint8_t step[kMostSteps];  // k-steps with a channel of this subset
  uint64_t chunk;            // 8-channel chunks with a channel of this subset, 4 bits each
  int8_t column[kMostDim];   // channel -> its column among the centroids; -1: not in this subset
  int resident;              // pairs of centroid tiles in shared memory at a time
  int wide;                  // columns of one wgmma; 0: mma.sync
  int64_t offset;            // of its centroids
  uint64_t key;              // of this iteration's sample
};

struct Item {
  int32_t cluster, begin, rows, slot;  // slot: of the partial sum; -1: this is the whole cluster
};

struct Work {
  HeadRows<const uint16_t> points;
  const int32_t* rows;
  int heads, subsets, dim;
  int64_t count, clusters, pairs;
  int64_t seen;  // tokens of this iteration: count, or the sample
  bool last;     // the final results are wanted
  PerHead<float> centroids;
  // [clusters, depth] of one subset: a token goes to the highest product with one of these, and not to the nearest
  // centroid; null: to that.
  PerHead<const float> directions;
  uint32_t* status;
  PerHead<int32_t> labels, token_labels, sizes, order;  // [subsets, …] but token_labels
  PerHead<int64_t> offsets, empty;
  int8_t* column;  // [subsets, kMostDim] as in Subset: threads that differ in their channel read it faster from memory
  // scratch, [subsets, …] each
  PerHead<uint4> fragments;  // [pairs, steps, lane] centroids as the tensor cores take them
  PerHead<float4> bias;      // [pairs, lane % 4] of columns 2 l, 2 l + 1, 2 l + 8, 2 l + 9; for wgmma column by column
  PerHead<float2> limits;    // [kPrepareBlocks] largest |d| and |bias|
  PerHead<Item> items;       // [most_items]
  PerHead<int32_t> item_count;
  PerHead<int32_t> first_slot, arrived;  // [clusters]
  PerHead<float> partial;                // [most_slots, depth], depths add up to kMostDim at most
  PerHead<int32_t> partial_rows;         // [most_slots]
  PerHead<int32_t> tally;                // [stretches, bins] tokens per stretch and label; then where they go
  PerHead<int32_t> positions;            // [count] between two passes of the sort
  int64_t most_items, most_slots, most_stretches;
  int bins;  // labels are sorted in one pass if they are fewer than kBins
  // 2^kKeyBits where the compiler cannot see it: a multiply-add runs beside the comparisons, a shift does not.
  uint32_t key_scale;
  Subset subset[kMostSubsets];
};

template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ float2 floats(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
};
template <>
struct Pair<__half> {
  static __device__ float2 floats(uint32_t bits) { return __half22float2(reinterpret_cast<const __half2&>(bits)); }
};

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
// Token number i of this iteration: one from each of `seen` equal stretches, or simply the i-th.
__device__ inline int32_t token_at(const Work& w, int m, int64_t i) {
  if (w.seen < w.count) {
    const uint64_t draw = splitmix(w.subset[m].key, static_cast<uint64_t>(i)) >> 32;
    const uint64_t jitter = draw * static_cast<uint64_t>(w.count) >> 32;
    i = (i * w.count + static_cast<int64_t>(jitter)) / w.seen;
  }
  return w.rows == nullptr ? static_cast<int32_t>(i) : w.rows[i];
}

// The problems of a batch, laid out in its scratch, where nothing outlasts the next `plan_work`; kmeans.cu.
Work plan_work(const Exec& exec, const KMeansBatch& batch);
// What every kernel but the sort's finds in the scratch.
void write_tables(const Exec& exec, const Work& w);
void start_from_random_rows(const Exec& exec, const KMeansBatch& batch, const Work& w);
// Tokens outside `rows` have label -1.
void clear_labels(const Exec& exec, const KMeansBatch& batch);

// Chooses the instruction and the shared memory of each subset, once their k-steps are known; kmeans_assign.cu.
void plan_assign(const Exec& exec, Work& w);
// The labels of the tokens that this iteration sees.
void assign(const Exec& exec, DType dtype, const Work& w);
// Tokens by label, and what the update has to do; kmeans_update.cu.
void sort(const Exec& exec, const Work& w);
// The same for contiguous blocks of positions.
void list_blocks(const Exec& exec, DType dtype, const Work& w);
// The means of what was sorted.
void update(const Exec& exec, DType dtype, const Work& w);

}  // namespace scope::cuda::clustering
