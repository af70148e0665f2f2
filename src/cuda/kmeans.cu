// K-means on CUDA: assignment on tensor cores with the argmax fused, update by a counting sort and ordered sums.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>

#include "core/numeric.h"
#include "cuda/kmeans.h"

namespace scope::cuda {

namespace {

// ---- configuration ----

constexpr int kMostDim = 128;
constexpr int kMostSteps = kMostDim / 16;  // k-steps of an mma: 16 channels each
constexpr int kMostChunks = kMostDim / 8;  // 16-byte pieces of a row
constexpr int kPair = 16;                  // centroids that one shared load brings to the tensor cores: two tiles of 8
constexpr int kAssignWarps = 12;           // 168 registers each
constexpr int kKeyBits = 9;                // of a column within an argmax key
constexpr int kKeyColumns = 1 << kKeyBits;
constexpr int kMostWide = 152;  // centroids that one wgmma multiplies
constexpr int kPrepareThreads = 1024, kPrepareBlocks = 2;
constexpr int kScanThreads = 512;
constexpr int kBins = 1024;     // labels that one pass of the sort tells apart
constexpr int kStretch = 1024;  // tokens that one warp places
constexpr int kTallyThreads = 256;
constexpr int kPlaceWarps = 4, kUpdateWarps = 4;
constexpr int kPiece = 128;      // members that one warp adds up
constexpr int kBad = INT32_MIN;  // in `order`: the row is not finite and has no weight

// 16-row tiles that a warp holds in registers: up to 64 registers of rows.
__host__ __device__ constexpr int row_tiles(int steps) { return steps <= 3 ? 4 : steps == 4 ? 3 : 2; }

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

// ---- shared by the kernels ----

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

__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
template <class T>
__device__ T rounded(float x);
template <>
__device__ __nv_bfloat16 rounded(float x) {
  return __float2bfloat16_rn(x);
}
template <>  // a difference of two halves may pass the largest half
__device__ __half rounded(float x) {
  return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

template <class T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

__device__ void copy_async(void* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}
__device__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Token number i of this iteration: one from each of `seen` equal stretches, or simply the i-th.
__device__ int32_t token_at(const Work& w, int m, int64_t i) {
  if (w.seen < w.count) {
    const uint64_t draw = splitmix(w.subset[m].key, static_cast<uint64_t>(i)) >> 32;
    const uint64_t jitter = draw * static_cast<uint64_t>(w.count) >> 32;
    i = (i * w.count + static_cast<int64_t>(jitter)) / w.seen;
  }
  return w.rows == nullptr ? static_cast<int32_t>(i) : w.rows[i];
}

// Inclusive sum over the threads of a block; `sums` [warps] is free again on return.
__device__ uint64_t block_scan(uint64_t x, uint64_t* sums) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (unsigned step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  for (unsigned i = 0; i < warp; ++i) x += sums[i];
  __syncthreads();
  return x;
}

// ---- start: rows drawn by Philox ----

// The tables that threads read at different places.
__global__ void tables_kernel(const __grid_constant__ Work w) {
  for (int m = 0; m < w.subsets; ++m) w.column[m * kMostDim + threadIdx.x] = w.subset[m].column[threadIdx.x];
}

template <class T>
__global__ void start_kernel(const __grid_constant__ Work w, RandomStream random) {
  const int64_t problem = blockIdx.x / w.clusters, c = blockIdx.x % w.clusters;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const Subset& subset = w.subset[m];
  random.subspace += static_cast<uint32_t>(m);
  const int64_t i = random.index(static_cast<uint64_t>(c), w.count);
  const auto* row = reinterpret_cast<const T*>(w.points.row(head, w.rows == nullptr ? i : w.rows[i]));
  float* centroid = w.centroids[head] + subset.offset + c * subset.depth;
  for (int channel = static_cast<int>(threadIdx.x); channel < w.dim; channel += static_cast<int>(blockDim.x)) {
    const int column = w.column[m * kMostDim + channel];
    if (column < 0) continue;
    const float x = to_float(row[channel]);
    centroid[column] = isfinite(x) ? x : 0;
  }
}

// ---- prepare: centroids less their mean, rounded, in the order the tensor cores read them ----

// x.c - |c|^2 / 2 over c = mu + d is x.d - (mu.d + |d|^2 / 2) and a term that all c share. The bias is made of the
// rounded d, so the labels are the nearest among the rounded centroids.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ Work w) {
  constexpr int kLanes = kPrepareThreads / kMostDim;
  __shared__ float sums[kLanes][kMostDim];
  __shared__ float mu[kMostDim];
  __shared__ unsigned largest[2];  // bits of floats that are not negative order like the floats
  const int64_t problem = blockIdx.x / kPrepareBlocks, part = blockIdx.x % kPrepareBlocks;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const Subset& subset = w.subset[m];
  const float* centroids = w.centroids[head] + subset.offset;
  const auto safe = [](float x) { return isfinite(x) ? x : 0.0f; };

  const int k = static_cast<int>(threadIdx.x) % kMostDim, first = static_cast<int>(threadIdx.x) / kMostDim;
  const float share = 1.0f / static_cast<float>(w.clusters);  // first, since a sum might overflow
  float sum = 0;
  if (k < subset.depth) {
#pragma unroll 16
    for (int c = first; c < static_cast<int>(w.clusters); c += kLanes)
      sum += safe(centroids[int64_t{c} * subset.depth + k]) * share;
  }
  sums[first][k] = sum;
  __syncthreads();
  if (first == 0) {
    for (int i = 1; i < kLanes; ++i) sum += sums[i][k];
    mu[k] = sum;
  }
  if (threadIdx.x < 2) largest[threadIdx.x] = 0;
  __syncthreads();

  const unsigned lane = threadIdx.x % 32;
  const int row = static_cast<int>(lane / 4), quarter = static_cast<int>(lane % 4);
  constexpr int kWarps = kPrepareThreads / 32;
  for (int64_t pair = part + kPrepareBlocks * (threadIdx.x / 32); pair < w.pairs; pair += kPrepareBlocks * kWarps) {
    float bias[2] = {}, norm[2] = {};
    for (int s = 0; s < subset.steps; ++s) {
      T d[2][4];
      for (int tile = 0; tile < 2; ++tile) {
        const int64_t c = pair * kPair + tile * 8 + row;
        for (int i = 0; i < 4; ++i) {
          const int column = w.column[m * kMostDim + subset.step[s] * 16 + quarter * 4 + i];
          const bool real = c < w.clusters && column >= 0;
          d[tile][i] = rounded<T>(real ? safe(centroids[c * subset.depth + column]) - mu[column] : 0.0f);
          const float x = to_float(d[tile][i]);
          if (real) bias[tile] += x * (mu[column] + 0.5f * x);
          norm[tile] += x * x;
        }
      }
      const uint4 bits = reinterpret_cast<const uint4&>(d);
      uint4* fragments = w.fragments[head] + m * w.pairs * kMostSteps * 32;
      if (subset.wide > 0) {  // core matrices of 8 centroids x 16 bytes
        auto* to = reinterpret_cast<uint32_t*>(fragments) + (pair * 2 * subset.steps + s) * 64 + lane;
        to[0] = bits.x;
        to[32] = bits.y;
        to[subset.steps * 64] = bits.z;
        to[subset.steps * 64 + 32] = bits.w;
      } else {
        fragments[(pair * subset.steps + s) * 32 + lane] = bits;
      }
    }
    for (int tile = 0; tile < 2; ++tile) {
      for (int step = 1; step < 4; step *= 2) {
        bias[tile] += __shfl_xor_sync(~0u, bias[tile], step);
        norm[tile] += __shfl_xor_sync(~0u, norm[tile], step);
      }
      if (quarter != 0) continue;
      const bool real = pair * kPair + tile * 8 + row < w.clusters;
      const float value = fminf(-bias[tile] >= -FLT_MAX ? -bias[tile] : -FLT_MAX, FLT_MAX);
      auto* to = reinterpret_cast<float*>(w.bias[head] + (m * w.pairs + pair) * 4);
      to[subset.wide > 0 ? tile * 8 + row : row / 2 * 4 + tile * 2 + row % 2] = real ? value : -INFINITY;
      if (real) {
        atomicMax(&largest[0], __float_as_uint(fminf(sqrtf(norm[tile]), FLT_MAX)));
        atomicMax(&largest[1], __float_as_uint(fabsf(value)));
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    w.limits[head][m * kPrepareBlocks + part] = {__uint_as_float(largest[0]), __uint_as_float(largest[1])};
  }
}

// ---- assign ----

// The argmax of a row is one unsigned maximum: |x.d + bias| <= |x| max|d| + max|bias| scales a score into [1, 2), where
// 23 bits of a float are its fraction, and the column goes below them. A step of the fraction is a rounding of the sum
// in f32, no more; the lower column wins within one. Three instructions a score, of which one is a comparison.
__device__ uint32_t argmax_key(float score, float scale, uint32_t key_scale, int column) {
  return __float_as_uint(fmaf(score, scale, 1.5f)) * key_scale + static_cast<uint32_t>(kKeyColumns - 1 - column);
}

// Eight bytes that nothing writes. The compiler keeps such loads in order, and together.
__device__ void load_early(uint32_t& x, uint32_t& y, const void* from) {
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(from) : "memory");
}

// What a warp knows of its rows: 16-row tiles, of which each thread holds a quarter of rows lane / 4 and lane / 4 + 8.
// In every k-step, the four threads that share a row take four consecutive channels each, and the centroids are stored
// in the same order: so rows go straight from global memory to registers.
template <class T, int kSteps, int kTiles>
struct TileRows {
  uint32_t bits[kTiles][kSteps][4];
  float scale[kTiles][2];  // of argmax_key; 0: the row is not finite

  __device__ void load(const Work& w, int head, int m, int base) {
    const Subset& subset = w.subset[m];
    const int lane = static_cast<int>(threadIdx.x) % 32, quarter = lane % 4;
    int32_t token[(kTiles + 1) / 2];
#pragma unroll
    for (int i = 0; i < (kTiles + 1) / 2; ++i) {
      token[i] = token_at(w, m, min(base + i * 32 + lane, static_cast<int>(w.seen) - 1));
    }
    int offset[kSteps];  // where the last k-step ends early, a valid place instead
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int channel = subset.step[s] * 16 + quarter * 4;
      offset[s] = channel < w.dim ? channel : 0;
    }
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {  // row i * 8 + lane / 4
      const int32_t t = __shfl_sync(~0u, token[i / 4], i % 4 * 8 + lane / 4);
      const uint16_t* row = w.points.row(head, t);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load_early(bits[i / 2][s][i % 2], bits[i / 2][s][i % 2 + 2], row + offset[s]);
    }
    __syncwarp();  // every load is under way before the first is used
    if (w.dim % 16 == 0) return;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (subset.step[s] * 16 + quarter * 4 < w.dim) continue;
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) bits[i / 4][s][i % 4] = 0;
    }
  }

  __device__ void measure(float2 limit) {
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      float norm = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const float2 x = Pair<T>::floats(bits[i / 2][s][i % 2]), y = Pair<T>::floats(bits[i / 2][s][i % 2 + 2]);
        norm += x.x * x.x + x.y * x.y + y.x * y.x + y.y * y.y;
      }
      norm += __shfl_xor_sync(~0u, norm, 1);
      norm += __shfl_xor_sync(~0u, norm, 2);
      scale[i / 2][i % 2] = norm < INFINITY ? fmaxf(0.49f / fmaxf(sqrtf(norm) * limit.x + limit.y, 1e-36f), FLT_MIN) : 0;
    }
  }
};

// The best of a row so far, over blocks of kKeyColumns columns.
struct Best {
  uint32_t fraction = 0;
  int label = 0;

  __device__ void take(uint32_t key, int first_column) {
    if (key >> kKeyBits > fraction) {
      fraction = key >> kKeyBits;
      label = first_column + kKeyColumns - 1 - static_cast<int>(key % kKeyColumns) + static_cast<int>(threadIdx.x) % 4 * 2;
    }
  }
  // Over the four threads of a row, into its label.
  __device__ void write(const Work& w, int head, int m, int position, bool bad) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const uint32_t other = __shfl_xor_sync(~0u, fraction, step);
      const int other_label = __shfl_xor_sync(~0u, label, step);
      if (other > fraction || (other == fraction && other_label < label)) {
        fraction = other;
        label = other_label;
      }
    }
    if (threadIdx.x % 4 != 0 || position >= w.seen) return;
    w.labels[head][m * w.count + position] = bad ? -1 : min(label, static_cast<int>(w.clusters) - 1);
    if (bad && w.status != nullptr) atomicOr(w.status, 1u);
  }
};

__device__ float2 limit_of(const Work& w, int head, int m) {
  float2 limit = {0, 0};
  for (int i = 0; i < kPrepareBlocks; ++i) {
    const float2 part = w.limits[head][m * kPrepareBlocks + i];
    limit = {fmaxf(limit.x, part.x), fmaxf(limit.y, part.y)};
  }
  return limit;
}

// Pairs [from, from + pairs) of a problem's centroids into shared memory, biases after them.
template <int kThreads>
__device__ void stage_centroids(const Work& w, int head, int m, int from, int pairs, uint4* shared, float4* shared_bias) {
  const int steps = w.subset[m].steps;
  const uint4* fragments = w.fragments[head] + m * w.pairs * kMostSteps * 32 + int64_t{from} * steps * 32;
  const float4* bias = w.bias[head] + (m * w.pairs + from) * 4;
  for (int i = static_cast<int>(threadIdx.x); i < pairs * steps * 32; i += kThreads) copy_async(shared + i, fragments + i);
  for (int i = static_cast<int>(threadIdx.x); i < pairs * 4; i += kThreads) copy_async(shared_bias + i, bias + i);
  wait_copies();
}

// Tiles [first, last) of one problem.
template <class T, int kSteps>
__device__ void assign_tiles(const Work& w, int head, int m, int first, int last, uint4* shared) {
  constexpr int kTiles = row_tiles(kSteps), kRows = kTiles * 16;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int all_pairs = static_cast<int>(w.pairs), resident = w.subset[m].resident;
  const int block = min(resident, kKeyColumns / kPair);
  auto* shared_bias = reinterpret_cast<float4*>(shared + resident * kSteps * 32);
  const float2 limit = limit_of(w, head, m);

  for (int block_tile = first; block_tile < last; block_tile += kAssignWarps) {
    const int base = (block_tile + warp) * kRows;
    const bool idle = block_tile + warp >= last;
    TileRows<T, kSteps, kTiles> rows;
    Best best[kTiles][2];
    if (!idle) {
      rows.load(w, head, m, base);
      rows.measure(limit);
    }
    for (int from = 0; from < all_pairs; from += block) {
      const int pairs = min(block, all_pairs - from);
      const bool all = resident == all_pairs;
      if (all ? block_tile == first && from == 0 : true) {
        __syncthreads();  // everyone is done with what was there
        stage_centroids<kAssignWarps * 32>(w, head, m, from, all ? all_pairs : pairs, shared, shared_bias);
        __syncthreads();
      }
      if (idle) continue;
      const uint4* fragment = shared + (all ? from : 0) * kSteps * 32 + lane;
      const float4* bias = shared_bias + (all ? from : 0) * 4 + lane % 4;
      uint32_t key[kTiles][2] = {};
#pragma unroll 1
      for (int pair = 0; pair < pairs; ++pair) {
        const float4 z = bias[pair * 4];
        float score[kTiles][2][4];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint4 b = fragment[s * 32];
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            if (s == 0) {
              mma<T>(score[i][0], rows.bits[i][s], b.x, b.y, {z.x, z.y, z.x, z.y});
              mma<T>(score[i][1], rows.bits[i][s], b.z, b.w, {z.z, z.w, z.z, z.w});
            } else {
              mma<T>(score[i][0], rows.bits[i][s], b.x, b.y, score[i][0]);
              mma<T>(score[i][1], rows.bits[i][s], b.z, b.w, score[i][1]);
            }
          }
        }
        fragment += kSteps * 32;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int half = e % 4 / 2, column = pair * kPair + e / 4 * 8 + e % 2;
            const uint32_t candidate = argmax_key(score[i][e / 4][e % 4], rows.scale[i][half], w.key_scale, column);
            key[i][half] = max(key[i][half], candidate);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles * 2; ++i) best[i / 2][i % 2].take(key[i / 2][i % 2], from * kPair);
    }
    if (idle) continue;
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      best[i / 2][i % 2].write(w, head, m, base + i * 8 + lane / 4, rows.scale[i / 2][i % 2] == 0);
    }
  }
}

// Blocks share the work of all problems with kSteps k-steps evenly: each takes one stretch of it, problem after problem.
template <int kSteps, class Tiles>
__device__ void share_tiles(const Work& w, int subsets, int rows_per_tile, Tiles tiles_of) {
  const int tiles = static_cast<int>((w.seen + rows_per_tile - 1) / rows_per_tile);
  const int64_t total = int64_t{tiles} * subsets * w.heads;
  int64_t begin = total * blockIdx.x / gridDim.x;
  const int64_t end = total * (blockIdx.x + 1) / gridDim.x;
  while (begin < end) {
    const auto problem = static_cast<int>(begin / tiles);
    int m = 0;  // the subset number problem % subsets of those with kSteps
    for (int before = problem % subsets; w.subset[m].steps != kSteps || before > 0; ++m) {
      before -= w.subset[m].steps == kSteps;
    }
    const auto first = static_cast<int>(begin % tiles);
    const auto last = static_cast<int>(min(int64_t{tiles}, first + end - begin));
    tiles_of(problem / subsets, m, first, last);
    begin += last - first;
  }
}

template <class T, int kSteps>
__global__ void __launch_bounds__(kAssignWarps * 32, 1) assign_kernel(const __grid_constant__ Work w, int subsets) {
  extern __shared__ uint4 shared[];
  share_tiles<kSteps>(w, subsets, row_tiles(kSteps) * 16, [&](int head, int m, int first, int last) {
    assign_tiles<T, kSteps>(w, head, m, first, last, shared);
  });
}

// ---- assign with wgmma: a warpgroup takes 64 rows and kColumns centroids at a time ----

// Warpgroups: while one compares, the others multiply; as many as registers allow.
#ifdef KM_GROUPS4
__host__ __device__ constexpr int warpgroups(int steps, int columns) { return steps <= 4 && columns <= 112 ? 4 : 3; }
#else
__host__ __device__ constexpr int warpgroups(int steps, int columns) { return steps <= 4 && columns <= 112 ? 3 : 3; }
#endif

// 8 x 16-byte core matrices without swizzle: 128 bytes from one to the next along the channels, `stride` along the
// centroids.
[[maybe_unused]] __device__ uint64_t core_descriptor(uint32_t address, uint32_t stride) {
  return (address & 0x3ffff) >> 4 | uint64_t{128 >> 4} << 16 | uint64_t{stride >> 4} << 32;
}

#define SCOPE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SCOPE_D8(i) SCOPE_D4(i), SCOPE_D4(i + 4)
#define SCOPE_D56 SCOPE_D8(0), SCOPE_D8(8), SCOPE_D8(16), SCOPE_D8(24), SCOPE_D8(32), SCOPE_D8(40), SCOPE_D8(48)
#define SCOPE_D76 SCOPE_D56, SCOPE_D8(56), SCOPE_D8(64), SCOPE_D4(72)
#define SCOPE_T56                                                                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define SCOPE_T76 SCOPE_T56 ",%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75"
#define SCOPE_WGMMA(columns, type, text, operands, a_at, b_at)                                                      \
  asm volatile("{ .reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type \
               "." type " {" text "}, {" a_at "}, " b_at ", add, 1, 1, 0; }"                                        \
               : operands                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define SCOPE_WGMMA_56(type) SCOPE_WGMMA("112", type, SCOPE_T56, SCOPE_D56, "%56,%57,%58,%59", "%60")
#define SCOPE_WGMMA_76(type) SCOPE_WGMMA("152", type, SCOPE_T76, SCOPE_D76, "%76,%77,%78,%79", "%80")
// d[64, N] += a[64, 16] b[16, N]: rows in registers, centroids in shared memory.
template <class T, int kRegisters>
__device__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kRegisters == 56 || kRegisters == 76);
  if constexpr (kRegisters == 56 && kHalf) SCOPE_WGMMA_56("f16");
  if constexpr (kRegisters == 56 && !kHalf) SCOPE_WGMMA_56("bf16");
  if constexpr (kRegisters == 76 && kHalf) SCOPE_WGMMA_76("f16");
  if constexpr (kRegisters == 76 && !kHalf) SCOPE_WGMMA_76("bf16");
}

template <class T, int kSteps, int kColumns>
__global__ void __launch_bounds__(warpgroups(kSteps, kColumns) * 128, 1)
    assign_wide_kernel(const __grid_constant__ Work w, int subsets) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kGroups = warpgroups(kSteps, kColumns);
  extern __shared__ uint4 shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  auto* shared_bias = reinterpret_cast<float4*>(shared + w.pairs * kSteps * 32);
  const float2* bias = reinterpret_cast<const float2*>(shared_bias) + lane % 4;
  const auto centroids = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto columns = static_cast<int>(w.pairs) * kPair / kColumns * kColumns;
  share_tiles<kSteps>(w, subsets, 64, [&](int head, int m, int first, int last) {
    __syncthreads();
    stage_centroids<kGroups * 128>(w, head, m, 0, static_cast<int>(w.pairs), shared, shared_bias);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what was copied
    __syncthreads();
    const float2 limit = limit_of(w, head, m);
    for (int tile = first + warp / 4; tile < last; tile += kGroups) {
      const int base = tile * 64 + warp % 4 * 16;
      TileRows<T, kSteps, 1> rows;
      rows.load(w, head, m, base);
#ifdef KM_PREFETCH
      if (tile + kGroups < last) {
        const int next = min(base + kGroups * 64 + lane % 16, static_cast<int>(w.seen) - 1);
        const uint16_t* row = w.points.row(head, token_at(w, m, next)) + w.subset[m].step[lane < 16 ? 0 : kSteps - 1] * 16;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
      }
#endif
      rows.measure(limit);
      uint32_t key[2] = {};
#pragma unroll 1
      for (int from = 0; from < columns; from += kColumns) {
        float score[kColumns / 2];
        uint32_t block_key[2] = {};  // its columns count from `from`, so that they are constants
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const float2 z = bias[from / 2 + j * 4];
          score[j * 4] = score[j * 4 + 2] = z.x;
          score[j * 4 + 1] = score[j * 4 + 3] = z.y;
        }
        const uint64_t block = core_descriptor(centroids + static_cast<uint32_t>(from / 8 * kSteps * 256), kSteps * 256);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < kSteps; ++s) wgmma<T>(score, rows.bits[0][s], block + static_cast<uint64_t>(s * (256 >> 4)));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int e = 0; e < kColumns / 2; ++e) {
          asm volatile("" : "+f"(score[e])::"memory");  // not before the wait
          const int half = e % 4 / 2, column = e / 4 * 8 + e % 2;
          block_key[half] = max(block_key[half], argmax_key(score[e], rows.scale[0][half], w.key_scale, column));
        }
        for (int half = 0; half < 2; ++half) key[half] = max(key[half], block_key[half] - static_cast<uint32_t>(from));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Best best;
        best.take(key[half], 0);
        best.write(w, head, m, base + half * 8 + lane / 4, rows.scale[0][half] == 0);
      }
    }
  });
#endif
}

// ---- sort: a stable counting sort of the tokens by label ----

// Offsets are known: what the update has to do. Every thread of the block takes part.
__device__ void list_items(const Work& w, int head, int m, uint64_t* sums) {
  const int64_t* offsets = w.offsets[head] + m * (w.clusters + 1);
  uint64_t before = 0;  // items << 32 | slots
  __shared__ uint64_t total;
  int empty = 0;
  for (int64_t c0 = 0; c0 < w.clusters; c0 += blockDim.x) {
    const int64_t c = c0 + threadIdx.x;
    int64_t begin = 0, size = 0;
    if (c < w.clusters) {
      begin = offsets[c];
      size = offsets[c + 1] - begin;
      empty += size == 0;
    }
    const int64_t pieces = (size + kPiece - 1) / kPiece, slots = pieces > 1 ? pieces : 0;
    const uint64_t mine = static_cast<uint64_t>(pieces) << 32 | static_cast<uint64_t>(slots);
    const uint64_t up_to = before + block_scan(mine, sums);
    if (c < w.clusters) {
      w.sizes[head][m * w.clusters + c] = static_cast<int32_t>(size);
      const auto item = static_cast<int64_t>((up_to - mine) >> 32),
                 slot = static_cast<int64_t>((up_to - mine) & 0xffffffffu);
      w.first_slot[head][m * w.clusters + c] = static_cast<int32_t>(slot);
      w.arrived[head][m * w.clusters + c] = 0;
      for (int64_t i = 0; i < pieces; ++i) {
        w.items[head][m * w.most_items + item + i] = {static_cast<int32_t>(c), static_cast<int32_t>(begin + i * kPiece),
                                                      static_cast<int32_t>(min(int64_t{kPiece}, size - i * kPiece)),
                                                      slots > 0 ? static_cast<int32_t>(slot + i) : -1};
      }
    }
    if (threadIdx.x == blockDim.x - 1) total = up_to;
    __syncthreads();
    before = total;
    __syncthreads();
  }
  if (threadIdx.x == 0) w.item_count[head][m] = static_cast<int32_t>(before >> 32);
  const uint64_t all_empty = block_scan(static_cast<uint64_t>(empty), sums);
  if (w.last && w.empty && threadIdx.x == blockDim.x - 1) w.empty[head][m] = static_cast<int64_t>(all_empty);
}

// A digit of a label, for labels that need more than one pass.
struct Pass {
  int shift;
  bool only;            // the labels are the digits: offsets follow from the tally
  bool from_positions;  // sorted by the lower digit already
  bool to_positions;    // the higher digit follows
};

__device__ int digit_of(const Pass& pass, int32_t label) { return (max(label, 0) >> pass.shift) % kBins; }

__global__ void __launch_bounds__(kTallyThreads) tally_kernel(const __grid_constant__ Work w, Pass pass, int64_t stretches) {
  extern __shared__ int32_t counts[];  // [bins]
  const int64_t problem = blockIdx.x / stretches, stretch = blockIdx.x % stretches;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const int32_t* labels = w.labels[head] + m * w.count;
  const int32_t* from = pass.from_positions ? w.positions[head] + m * w.count : nullptr;
  const auto begin = static_cast<int>(stretch * kStretch), end = static_cast<int>(min(w.seen, (stretch + 1) * kStretch));
  int32_t label[kStretch / kTallyThreads];  // read before the first is counted
#pragma unroll
  for (int k = 0; k < kStretch / kTallyThreads; ++k) {
    const int i = begin + k * kTallyThreads + static_cast<int>(threadIdx.x);
    if (i < end) label[k] = labels[from == nullptr ? i : from[i]];
  }
  for (int c = static_cast<int>(threadIdx.x); c < w.bins; c += kTallyThreads) counts[c] = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kStretch / kTallyThreads; ++k) {
    if (begin + k * kTallyThreads + static_cast<int>(threadIdx.x) >= end) break;
    atomicAdd(counts + digit_of(pass, label[k]), 1);
    if (!pass.only && from == nullptr) atomicAdd(&w.sizes[head][m * w.clusters + max(label[k], 0)], 1);
  }
  __syncthreads();
  int32_t* tally = w.tally[head] + (m * w.most_stretches + stretch) * w.bins;
  for (int c = static_cast<int>(threadIdx.x); c < w.bins; c += kTallyThreads) tally[c] = counts[c];
}

// One block per problem turns the tally into places: a label's tokens after those of lower labels, and within a label
// stretch after stretch.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ Work w, Pass pass) {
  __shared__ uint64_t sums[kScanThreads / 32], carry;
  const auto head = static_cast<int>(blockIdx.x / w.subsets), m = static_cast<int>(blockIdx.x % w.subsets);
  const int stretches = static_cast<int>((w.seen + kStretch - 1) / kStretch);
  int32_t* tally = w.tally[head] + m * w.most_stretches * w.bins;
  int64_t* offsets = w.offsets[head] + m * (w.clusters + 1);
  uint64_t before = 0;
  for (int c0 = 0; c0 < w.bins; c0 += kScanThreads) {
    const int c = c0 + static_cast<int>(threadIdx.x);
    int total = 0;
    if (c < w.bins) {
#pragma unroll 8
      for (int i = 0; i < stretches; ++i) total += tally[i * w.bins + c];
    }
    const uint64_t up_to = before + block_scan(static_cast<uint64_t>(total), sums);
    if (c < w.bins) {
      auto next = static_cast<int32_t>(up_to - static_cast<uint64_t>(total));
      if (pass.only) offsets[c] = next;
      constexpr int kAhead = 8;
      for (int i0 = 0; i0 < stretches; i0 += kAhead) {
        int32_t count[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) count[i] = i0 + i < stretches ? tally[(i0 + i) * w.bins + c] : 0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (i0 + i < stretches) tally[(i0 + i) * w.bins + c] = next;
          next += count[i];
        }
      }
    }
    if (threadIdx.x == kScanThreads - 1) carry = up_to;
    __syncthreads();
    before = carry;
    __syncthreads();
  }
  if (!pass.only) return;
  if (threadIdx.x == 0) offsets[w.clusters] = w.seen;
  __syncthreads();
  list_items(w, head, m, sums);
}

// A warp places the tokens of one stretch, in order.
__global__ void __launch_bounds__(kPlaceWarps * 32) place_kernel(const __grid_constant__ Work w, Pass pass, int64_t blocks) {
  extern __shared__ int32_t places[];  // [kPlaceWarps, bins]
  const int64_t problem = blockIdx.x / blocks;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto stretch = static_cast<int>(blockIdx.x % blocks * kPlaceWarps + warp), seen = static_cast<int>(w.seen);
  const int begin = stretch * kStretch, end = min(begin + kStretch, seen);
  if (begin >= end) return;
  int32_t* labels = w.labels[head] + m * w.count;
  const int32_t* from = pass.from_positions ? w.positions[head] + m * w.count : nullptr;
  int32_t* to = (pass.to_positions ? w.positions : w.order)[head] + m * w.count;
  const int32_t* tally = w.tally[head] + (m * w.most_stretches + stretch) * w.bins;
  int32_t* next = places + warp * w.bins;
#pragma unroll 4
  for (int c = lane; c < w.bins; c += 32) next[c] = tally[c];
  __syncwarp();
  constexpr int kAhead = 8;  // labels read before the first is placed
  for (int i0 = begin; i0 < end; i0 += 32 * kAhead) {
    int32_t position[kAhead], label[kAhead], token[kAhead];
    unsigned same[kAhead];  // lanes with the same digit
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = min(i0 + k * 32 + lane, end - 1);
      position[k] = from == nullptr ? i : from[i];
      label[k] = labels[position[k]];
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) token[k] = pass.to_positions ? position[k] : token_at(w, m, position[k]);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int d = digit_of(pass, label[k]);
      same[k] = __ballot_sync(~0u, i0 + k * 32 + lane < end);
#pragma unroll
      for (int bit = 1; bit < kBins; bit *= 2) {
        const unsigned set = __ballot_sync(~0u, (d & bit) != 0);
        same[k] &= (d & bit) != 0 ? set : ~set;
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool active = i0 + k * 32 + lane < end;
      const int d = digit_of(pass, label[k]);
      const int32_t rank = __popc(same[k] & ((1u << lane) - 1));
      const int32_t place = active ? next[d] : 0;
      __syncwarp();
      if (active && rank == 0) next[d] = place + __popc(same[k]);
      __syncwarp();
      if (!active) continue;
      to[place + rank] = label[k] < 0 && !pass.to_positions ? token[k] | kBad : token[k];
      if (pass.to_positions || !w.last) continue;
      if (w.token_labels) w.token_labels[head][token[k]] = max(label[k], 0);
      if (label[k] < 0) labels[position[k]] = 0;
    }
  }
}

// Offsets from sizes, where one pass does not tell all labels apart.
__global__ void __launch_bounds__(kScanThreads) offsets_kernel(const __grid_constant__ Work w) {
  __shared__ uint64_t sums[kScanThreads / 32], carry;
  const auto head = static_cast<int>(blockIdx.x / w.subsets), m = static_cast<int>(blockIdx.x % w.subsets);
  const int32_t* sizes = w.sizes[head] + m * w.clusters;
  int64_t* offsets = w.offsets[head] + m * (w.clusters + 1);
  uint64_t before = 0;
  for (int64_t c0 = 0; c0 < w.clusters; c0 += kScanThreads) {
    const int64_t c = c0 + threadIdx.x;
    const uint64_t up_to = before + block_scan(c < w.clusters ? static_cast<uint64_t>(sizes[c]) : 0, sums);
    if (c < w.clusters) offsets[c + 1] = static_cast<int64_t>(up_to);
    if (threadIdx.x == kScanThreads - 1) carry = up_to;
    __syncthreads();
    before = carry;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[0] = 0;
  __syncthreads();
  list_items(w, head, m, sums);
}
__global__ void clear_sizes_kernel(const __grid_constant__ Work w, int64_t blocks) {
  const int64_t problem = blockIdx.x / blocks, i = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  if (i < w.clusters) w.sizes[problem / w.subsets][problem % w.subsets * w.clusters + i] = 0;
}

// ---- update: means in a fixed order ----

// A warp adds up to kPiece members of one cluster. Every 16-byte chunk of a row belongs to one thread, so the warp works on
// 32 / chunks rows at a time; f32 runs are short, and what follows them is f64.
template <class T>
__global__ void __launch_bounds__(kUpdateWarps * 32, 7) update_kernel(const __grid_constant__ Work w, int64_t blocks) {
  __shared__ __align__(16) float shared[kUpdateWarps][32 * 8];
  const int64_t problem = blockIdx.x / blocks;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto number = static_cast<int>(blockIdx.x % blocks * kUpdateWarps + warp);
  if (number >= w.most_items) return;
  const Item item = w.items[head][m * w.most_items + number];  // of any value where there is none
  if (number >= w.item_count[head][m]) return;
  const Subset& subset = w.subset[m];
  int32_t* order = w.order[head] + m * w.count + item.begin;
  const int chunks = subset.chunks, at_once = 32 / chunks;
  const int run = lane / chunks, piece = lane % chunks;
  const uint16_t* points = w.points.row(head, 0) + (subset.chunk >> (4 * piece) & 15) * 8;

  int32_t tokens[kPiece / 32];
#pragma unroll
  for (int j = 0; j < kPiece / 32; ++j) tokens[j] = j * 32 + lane < item.rows ? order[j * 32 + lane] : kBad;
  float sum[8] = {};
  int rows = 0;
#pragma unroll
  for (int j = 0; j < kPiece / 32; ++j) {
    if (j * 32 >= item.rows) break;
    rows += __popc(__ballot_sync(~0u, tokens[j] >= 0));
    if (w.last && tokens[j] < 0 && j * 32 + lane < item.rows) order[j * 32 + lane] = tokens[j] & ~kBad;
    const int here = min(32, item.rows - j * 32);
    constexpr int kAhead = 4;
    for (int r0 = 0; r0 < here; r0 += kAhead * at_once) {
      uint4 bits[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int r = r0 + k * at_once + run;
        const int32_t token = __shfl_sync(~0u, tokens[j], r);
        const auto* row = reinterpret_cast<const uint4*>(points + token * w.points.row_step);
        bits[k] = run < at_once && r < here && token >= 0 ? __ldg(row) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const uint32_t words[4] = {bits[k].x, bits[k].y, bits[k].z, bits[k].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = Pair<T>::floats(words[i]);
          sum[i * 2] += x.x;
          sum[i * 2 + 1] += x.y;
        }
      }
    }
  }
  auto* mine = reinterpret_cast<float4*>(shared[warp] + lane * 8);
  mine[0] = {sum[0], sum[1], sum[2], sum[3]};
  mine[1] = {sum[4], sum[5], sum[6], sum[7]};
  __syncwarp();

  const int width = chunks * 8;
  const int64_t cluster = m * w.clusters + item.cluster;
  float* partial = w.partial[head] + w.most_slots * (subset.offset / w.clusters);
  int32_t* partial_rows = w.partial_rows[head] + m * w.most_slots;
  float* centroid = w.centroids[head] + subset.offset + int64_t{item.cluster} * subset.depth;
  for (int at = lane; at < width; at += 32) {
    const int column = w.column[m * kMostDim + static_cast<int>(subset.chunk >> (at / 8 * 4) & 15) * 8 + at % 8];
    if (column < 0) continue;
    double total = 0;
    for (int i = 0; i < at_once; ++i) total += static_cast<double>(shared[warp][i * width + at]);
    if (item.slot >= 0) {
      partial[int64_t{item.slot} * subset.depth + column] = static_cast<float>(total);
    } else if (rows > 0) {
      centroid[column] = static_cast<float>(total / rows);
    }
  }
  if (item.slot < 0) return;

  // One of several pieces: the last to arrive adds them all, in order.
  const int pieces = (w.sizes[head][cluster] + kPiece - 1) / kPiece;
  if (lane == 0) partial_rows[item.slot] = rows;
  __threadfence();
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = atomicAdd(&w.arrived[head][cluster], 1);
  if (__shfl_sync(~0u, arrived, 0) != pieces - 1) return;
  __threadfence();
  const int64_t first = w.first_slot[head][cluster];
  rows = 0;
  for (int i = lane; i < pieces; i += 32) rows += __ldcg(partial_rows + first + i);
  rows = __reduce_add_sync(~0u, rows);
  for (int k = lane; k < subset.depth && rows > 0; k += 32) {
    double total = 0;
#pragma unroll 4
    for (int i = 0; i < pieces; ++i) total += static_cast<double>(__ldcg(partial + (first + i) * subset.depth + k));
    centroid[k] = static_cast<float>(total / rows);
  }
}

// ---- raster: contiguous blocks of positions ----

// A warp looks at one row; the update follows as after a sort.
template <class T>
__global__ void raster_kernel(const __grid_constant__ Work w, int64_t blocks) {
  const int64_t head = blockIdx.x / blocks;
  const int64_t i = (blockIdx.x % blocks * blockDim.x + threadIdx.x) / 32;
  if (i >= w.count) return;
  const int32_t token = w.rows == nullptr ? static_cast<int32_t>(i) : w.rows[i];
  const auto* row = reinterpret_cast<const T*>(w.points.row(head, token));
  bool bad = false;
  for (int k = static_cast<int>(threadIdx.x) % 32; k < w.dim; k += 32) bad |= !isfinite(to_float(row[k]));
  bad = __any_sync(~0u, bad);
  if (threadIdx.x % 32 != 0) return;
  w.order[head][i] = bad ? token | kBad : token;
  w.token_labels[head][token] = static_cast<int32_t>(((i + 1) * w.clusters - 1) / w.count);
  if (bad && w.status != nullptr) atomicOr(w.status, 1u);
}
__global__ void __launch_bounds__(kScanThreads) raster_items_kernel(const __grid_constant__ Work w) {
  __shared__ uint64_t sums[kScanThreads / 32];
  int64_t* offsets = w.offsets[blockIdx.x];
  for (int64_t c = threadIdx.x; c <= w.clusters; c += kScanThreads) offsets[c] = c * w.count / w.clusters;
  __syncthreads();
  list_items(w, static_cast<int>(blockIdx.x), 0, sums);
}

// ---- host ----

// One head's scratch; also fills `w` when there is memory.
int64_t lay_out(Arena arena, int64_t count, int64_t clusters, bool for_group, Work& w) {
  const int subsets = for_group ? 1 : kMostSubsets;
  w.pairs = ceil_div(clusters, kPair) + kMostWide / kPair;  // wgmma may round up to one more of its blocks
  w.most_items = clusters + count / kPiece;                 // every piece but a cluster's last is full
  w.most_slots = 2 * (count / kPiece) + 1;  // a cluster of p >= 2 pieces has more than (p - 1) x kPiece members
  w.most_stretches = ceil_div(count, kStretch);
  w.bins = static_cast<int>(std::min<int64_t>(clusters, kBins));
  w.column = arena.take<int8_t>(subsets * kMostDim);
  w.fragments.base = arena.take<uint4>(subsets * w.pairs * kMostSteps * 32);
  w.bias.base = arena.take<float4>(subsets * w.pairs * 4);
  w.limits.base = arena.take<float2>(subsets * kPrepareBlocks);
  w.items.base = arena.take<Item>(subsets * w.most_items);
  w.item_count.base = arena.take<int32_t>(subsets);
  w.first_slot.base = arena.take<int32_t>(subsets * clusters);
  w.arrived.base = arena.take<int32_t>(subsets * clusters);
  w.partial.base = arena.take<float>(w.most_slots * kMostDim);
  w.partial_rows.base = arena.take<int32_t>(subsets * w.most_slots);
  w.tally.base = arena.take<int32_t>(subsets * w.most_stretches * w.bins);
  w.positions.base = arena.take<int32_t>(clusters > kBins ? subsets * count : 0);
  if (for_group) {
    w.labels.base = arena.take<int32_t>(count);
  } else {
    w.sizes.base = arena.take<int32_t>(subsets * clusters);
    w.order.base = arena.take<int32_t>(subsets * count);
    w.offsets.base = arena.take<int64_t>(subsets * (clusters + 1));
  }
  return round_up(arena.used(), Arena::kAlignment);
}

int64_t pair_bytes(int steps) { return steps * 32 * 16 + 4 * 16; }
// All, or what fits, and then no more than one key tells apart.
int64_t resident_pairs(const Exec& exec, const Work& w, int steps) {
  const int64_t fit = exec.device->shared_bytes / pair_bytes(steps);
  return fit >= w.pairs ? w.pairs : std::min<int64_t>(fit, kKeyColumns / kPair);
}

// The wgmma that pads the centroids least; 0: too many for one key.
int wide_columns(int64_t clusters) {
  if (round_up(clusters, 152) > kKeyColumns) return 0;
  return round_up(clusters, 152) <= round_up(clusters, 112) ? 152 : 112;
}
bool has_wide_kernel(int steps) { return steps == 3 || steps == 4 || steps == 8; }

Subset plan_subset(std::span<const int32_t> channels) {
  Subset s{};
  s.depth = static_cast<int>(channels.size());
  std::fill_n(s.column, kMostDim, int8_t{-1});
  for (int k = 0; k < s.depth; ++k) s.column[channels[static_cast<size_t>(k)]] = static_cast<int8_t>(k);
  const auto touched = [&](int from, int n) {
    return std::any_of(s.column + from, s.column + from + n, [](int8_t c) { return c >= 0; });
  };
  for (int i = 0; i < kMostSteps; ++i) {
    if (touched(i * 16, 16)) s.step[s.steps++] = static_cast<uint8_t>(i);
  }
  for (int i = 0; i < kMostChunks; ++i) {
    if (touched(i * 8, 8)) s.chunk |= static_cast<uint64_t>(i) << (4 * s.chunks++);
  }
  return s;
}

Work plan_work(const Exec& exec, const KMeansBatch& batch) {
  require(batch.dim <= kMostDim && batch.dim % 8 == 0, Status::unsupported,
          "K-means on CUDA takes head dimensions up to 128, multiples of 8");
  require(batch.count < INT32_MAX - 1024, Status::size_limit, "K-means on CUDA takes up to 2^31 - 1025 tokens");
  require(batch.clusters <= int64_t{kBins} * kBins, Status::size_limit, "K-means on CUDA takes up to 2^20 clusters");
  Work w{};
  const bool for_group = !batch.labels;
  w.labels = batch.labels;
  w.sizes = batch.sizes;
  w.order = batch.order;
  w.offsets = batch.offsets;
  const Arena arena(batch.scratch.data, batch.scratch.bytes);
  const int64_t bytes = lay_out(arena, batch.count, batch.clusters, for_group, w);
  require(bytes * batch.heads <= batch.scratch.bytes, Status::internal, "workspace layout exceeds its plan");
  const auto step = [&](auto&... arrays) { ((arrays.step = bytes / static_cast<int64_t>(sizeof(*arrays.base))), ...); };
  step(w.fragments, w.bias, w.limits, w.items, w.item_count, w.first_slot, w.arrived, w.partial, w.partial_rows, w.tally,
       w.positions);
  if (for_group) {
    step(w.labels);
  } else {
    step(w.sizes, w.order, w.offsets);
  }
  w.points = batch.points;
  w.rows = batch.rows;
  w.heads = batch.heads;
  w.subsets = batch.subsets;
  w.dim = static_cast<int>(batch.dim);
  w.count = w.seen = batch.count;
  w.clusters = batch.clusters;
  w.centroids = batch.centroids;
  w.status = batch.status;
  w.token_labels = batch.token_labels;
  w.empty = batch.empty;
  w.key_scale = kKeyColumns;
  const int wide = exec.wgmma ? wide_columns(w.clusters) : 0;
  w.pairs = ceil_div(wide > 0 ? round_up(w.clusters, wide) : w.clusters, kPair);
  int64_t offset = 0;
  for (int m = 0; m < batch.subsets; ++m) {
    w.subset[m] = plan_subset(batch.channels[m]);
    w.subset[m].offset = offset;
    w.subset[m].resident = static_cast<int>(resident_pairs(exec, w, w.subset[m].steps));
    const bool fits = w.subset[m].resident == w.pairs;
    w.subset[m].wide = fits && has_wide_kernel(w.subset[m].steps) ? wide : 0;
    offset += batch.clusters * w.subset[m].depth;
  }
  return w;
}

unsigned grid(int64_t blocks) {
  require(blocks <= INT32_MAX, Status::size_limit, "K-means: too many blocks for one launch");
  return static_cast<unsigned>(blocks);
}

template <class Kernel>
void allow_shared(Kernel* kernel, int64_t bytes) {
  const cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  check(cudaFuncSetAttribute(kernel, attribute, static_cast<int>(bytes)), "shared memory");
}

template <class T, int kSteps>
void assign_steps(const Exec& exec, const Work& w) {
  int subsets = 0, wide = 0;
  for (int m = 0; m < w.subsets; ++m) {
    if (w.subset[m].steps != kSteps) continue;
    ++subsets;
    wide = w.subset[m].wide;  // the same for all with kSteps
  }
  if (subsets == 0) return;
  const int64_t shared = resident_pairs(exec, w, kSteps) * pair_bytes(kSteps);
  const auto launch = [&](auto* kernel, int64_t rows, int threads, int per_block) {
    const int64_t tiles = ceil_div(w.seen, rows) * subsets * w.heads;
    const int64_t blocks = std::min<int64_t>(exec.device->multiprocessors, ceil_div(tiles, per_block));
    allow_shared(kernel, shared);
    kernel<<<grid(blocks), threads, static_cast<size_t>(shared), stream(exec)>>>(w, subsets);
    check_launch("K-means assign");
  };
  if constexpr (kSteps == 3 || kSteps == 4 || kSteps == 8) {
    constexpr int kGroups112 = warpgroups(kSteps, 112), kGroups152 = warpgroups(kSteps, 152);
    if (wide == 112) return launch(assign_wide_kernel<T, kSteps, 112>, 64, kGroups112 * 128, kGroups112);
    if (wide == 152) return launch(assign_wide_kernel<T, kSteps, 152>, 64, kGroups152 * 128, kGroups152);
  }
  launch(assign_kernel<T, kSteps>, row_tiles(kSteps) * 16, kAssignWarps * 32, kAssignWarps);
}

template <class T>
void assign(const Exec& exec, const Work& w) {
  assign_steps<T, 1>(exec, w);
  assign_steps<T, 2>(exec, w);
  assign_steps<T, 3>(exec, w);
  assign_steps<T, 4>(exec, w);
  assign_steps<T, 5>(exec, w);
  assign_steps<T, 6>(exec, w);
  assign_steps<T, 7>(exec, w);
  assign_steps<T, 8>(exec, w);
}

void sort(const Exec& exec, const Work& w) {
  const int64_t problems = w.heads * w.subsets;
  const int64_t stretches = ceil_div(w.seen, kStretch), blocks = ceil_div(stretches, kPlaceWarps);
  const auto bins = static_cast<size_t>(w.bins) * sizeof(int32_t);
  const auto pass = [&](const Pass& p) {
    tally_kernel<<<grid(problems * stretches), kTallyThreads, bins, stream(exec)>>>(w, p, stretches);
    scan_kernel<<<grid(problems), kScanThreads, 0, stream(exec)>>>(w, p);
    place_kernel<<<grid(problems * blocks), kPlaceWarps * 32, kPlaceWarps * bins, stream(exec)>>>(w, p, blocks);
    check_launch("K-means sort");
  };
  if (w.clusters <= kBins) return pass({.shift = 0, .only = true, .from_positions = false, .to_positions = false});
  const int64_t clear_blocks = ceil_div(w.clusters, 256);
  clear_sizes_kernel<<<grid(problems * clear_blocks), 256, 0, stream(exec)>>>(w, clear_blocks);
  pass({.shift = 0, .only = false, .from_positions = false, .to_positions = true});
  offsets_kernel<<<grid(problems), kScanThreads, 0, stream(exec)>>>(w);
  pass({.shift = 10, .only = false, .from_positions = true, .to_positions = false});
}

template <class T>
void update(const Exec& exec, const Work& w) {
  const int64_t blocks = ceil_div(w.clusters + w.seen / kPiece, kUpdateWarps);
  update_kernel<T><<<grid(w.heads * w.subsets * blocks), kUpdateWarps * 32, 0, stream(exec)>>>(w, blocks);
  check_launch("K-means update");
}

void write_tables(const Exec& exec, const Work& w) {
  tables_kernel<<<1, kMostDim, 0, stream(exec)>>>(w);
  check_launch("K-means tables");
}

// Tokens outside `rows` have label -1.
void clear_labels(const Exec& exec, const KMeansBatch& batch) {
  if (!batch.token_labels || (batch.rows == nullptr && batch.count == batch.tokens)) return;
  const auto bytes = static_cast<size_t>(batch.tokens) * sizeof(int32_t);
  const size_t pitch = batch.heads == 1 ? bytes : static_cast<size_t>(batch.token_labels.step) * sizeof(int32_t);
  const auto heads = static_cast<size_t>(batch.heads);
  check(cudaMemset2DAsync(batch.token_labels.base, pitch, 0xff, bytes, heads, stream(exec)), "clear labels");
}

template <class T>
void kmeans(const Exec& exec, const KMeansBatch& batch) {
  Work w = plan_work(exec, batch);
  write_tables(exec, w);
  clear_labels(exec, batch);
  const int64_t problems = w.heads * w.subsets;
  if (!batch.warm) {
    start_kernel<T><<<grid(problems * w.clusters), kMostDim, 0, stream(exec)>>>(w, batch.random);
    check_launch("K-means start");
  }
  const bool sampled = batch.sample < batch.count && batch.iterations > 2;
  for (int i = 0; i < batch.iterations; ++i) {
    w.seen = sampled && i < batch.iterations - 2 ? batch.sample : batch.count;
    w.last = i == batch.iterations - 1;
    for (int m = 0; m < w.subsets; ++m) {
      RandomStream random = batch.random;
      random.subspace += static_cast<uint32_t>(m);
      random.purpose = 1;
      w.subset[m].key = random.bits(static_cast<uint64_t>(i));
    }
    prepare_kernel<T><<<grid(problems * kPrepareBlocks), kPrepareThreads, 0, stream(exec)>>>(w);
    check_launch("K-means prepare");
    assign<T>(exec, w);
    sort(exec, w);
    update<T>(exec, w);
  }
}

template <class T>
void raster(const Exec& exec, const KMeansBatch& batch) {
  Work w = plan_work(exec, batch);
  w.last = true;
  write_tables(exec, w);
  clear_labels(exec, batch);
  const int64_t blocks = ceil_div(w.count * 32, 256);
  raster_kernel<T><<<grid(w.heads * blocks), 256, 0, stream(exec)>>>(w, blocks);
  raster_items_kernel<<<grid(w.heads), kScanThreads, 0, stream(exec)>>>(w);
  check_launch("raster");
  update<T>(exec, w);
}

}  // namespace

void kmeans(const Exec& exec, const KMeansBatch& batch) {
  batch.dtype == DType::f16 ? kmeans<__half>(exec, batch) : kmeans<__nv_bfloat16>(exec, batch);
}

void raster(const Exec& exec, const KMeansBatch& batch) {
  batch.dtype == DType::f16 ? raster<__half>(exec, batch) : raster<__nv_bfloat16>(exec, batch);
}

int64_t kmeans_scratch(int64_t count, int64_t clusters, bool for_group) {
  Work w{};
  return lay_out(Arena(), count, clusters, for_group, w);
}

}  // namespace scope::cuda
