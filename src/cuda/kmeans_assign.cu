// K-means on CUDA: the nearest centroid of every row, on tensor cores with the argmax fused.
#include <algorithm>
#include <cfloat>

#include "cuda/kmeans_work.cuh"

namespace scope::cuda::clustering {

namespace {

constexpr int kAssignWarps = 12;  // 168 registers each
constexpr int kPrepareThreads = 1024;
constexpr int kKeyBits = 9;  // of a column within an argmax key
constexpr int kKeyColumns = 1 << kKeyBits;

// 16-row tiles that a warp holds in registers: up to 64 registers of rows.
__host__ __device__ constexpr int row_tiles(int steps) { return steps <= 3 ? 4 : steps == 4 ? 3 : 2; }

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

// ---- prepare: centroids less their mean, rounded, in the order the tensor cores read them ----

// x.c - |c|^2 / 2 over c = mu + d is x.d - (mu.d + |d|^2 / 2) and a term that all c share. The bias is made of the
// rounded d, so the labels are the nearest among the rounded centroids. A highest product x.c is that of x.d, without bias.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ Work w) {
  constexpr int kLanes = kPrepareThreads / kMostDim;
  __shared__ float sums[kLanes][kMostDim];
  __shared__ float mu[kMostDim];
  __shared__ unsigned largest[2];  // bits of floats that are not negative order like the floats
  const int64_t problem = blockIdx.x / kPrepareBlocks, part = blockIdx.x % kPrepareBlocks;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const Subset& subset = w.subset[m];
  const bool nearest = !w.directions;
  const float* centroids = (nearest ? PerHead<const float>(w.centroids) : w.directions)[head] + subset.offset;
  const auto safe = [](float x) { return isfinite(x) ? x : 0.0f; };

  const int k = static_cast<int>(threadIdx.x) % kMostDim, first = static_cast<int>(threadIdx.x) / kMostDim;
  const float share = 1.0f / static_cast<float>(w.clusters);  // first, since a sum might overflow
  float sum = 0;
  if (k < subset.depth) {
#pragma unroll 16
    for (int c = first; c < static_cast<int>(w.clusters); c += kLanes) {
      sum += safe(__ldg(centroids + int64_t{c} * subset.depth + k)) * share;
    }
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
  for (int64_t pair = part + kPrepareBlocks * warp_index(); pair < w.pairs; pair += kPrepareBlocks * kWarps) {
    float bias[2] = {}, norm[2] = {};
#pragma unroll 4
    for (int s = 0; s < subset.steps; ++s) {
      T d[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int64_t c = pair * kPair + tile * 8 + row;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = __ldg(w.column + m * kMostDim + subset.step[s] * 16 + quarter * 4 + i);
          const bool real = c < w.clusters && column >= 0;
          d[tile][i] = rounded<T>(real ? safe(__ldg(centroids + c * subset.depth + column)) - mu[column] : 0.0f);
          const float x = to_float(d[tile][i]);
          if (real && nearest) bias[tile] += x * (mu[column] + 0.5f * x);
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
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = warp_index();
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
  for (int done = 0;;) {
    int block;  // read anew, and all that follows from it: the rows of a tile leave no registers to keep it in
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int64_t begin = total * block / gridDim.x + done, end = total * (block + 1) / gridDim.x;
    if (begin == end) return;
    const auto problem = static_cast<int>(begin / tiles);
    int m = 0;  // the subset number problem % subsets of those with kSteps
    for (int before = problem % subsets; w.subset[m].steps != kSteps || before > 0; ++m) {
      before -= w.subset[m].steps == kSteps;
    }
    const auto first = static_cast<int>(begin % tiles);
    const auto last = static_cast<int>(min(int64_t{tiles}, first + end - begin));
    done += last - first;
    tiles_of(problem / subsets, m, first, last);
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
__host__ __device__ constexpr int warpgroups(int steps, int columns) { return steps <= 4 && columns <= 112 ? 4 : 3; }

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
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = warp_index();
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
      if (tile + kGroups < last) {  // the rows after these, from memory into L2
        const int next = min(base + kGroups * 64 + lane % 16, static_cast<int>(w.seen) - 1);
        const uint16_t* row = w.points.row(head, token_at(w, m, next)) + w.subset[m].step[lane < 16 ? 0 : kSteps - 1] * 16;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
      }
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

// ---- host ----

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
  const auto start = [&](auto* kernel, int64_t rows, int threads, int per_block) {
    const int64_t tiles = ceil_div(w.seen, rows) * subsets * w.heads;
    launch(exec, "K-means assign", kernel, blocks_for(exec, 1, ceil_div(tiles, per_block)), threads, shared, w, subsets);
  };
  if constexpr (kSteps == 3 || kSteps == 4 || kSteps == 8) {
    constexpr int kGroups112 = warpgroups(kSteps, 112), kGroups152 = warpgroups(kSteps, 152);
    if (wide == 112) return start(assign_wide_kernel<T, kSteps, 112>, 64, kGroups112 * 128, kGroups112);
    if (wide == 152) return start(assign_wide_kernel<T, kSteps, 152>, 64, kGroups152 * 128, kGroups152);
  }
  start(assign_kernel<T, kSteps>, row_tiles(kSteps) * 16, kAssignWarps * 32, kAssignWarps);
}

template <class T>
void prepare_and_assign(const Exec& exec, const Work& w) {
  launch(exec, "K-means prepare", prepare_kernel<T>, w.heads * w.subsets * kPrepareBlocks, kPrepareThreads, 0, w);
  assign_steps<T, 1>(exec, w);
  assign_steps<T, 2>(exec, w);
  assign_steps<T, 3>(exec, w);
  assign_steps<T, 4>(exec, w);
  assign_steps<T, 5>(exec, w);
  assign_steps<T, 6>(exec, w);
  assign_steps<T, 7>(exec, w);
  assign_steps<T, 8>(exec, w);
}

}  // namespace

void plan_assign(const Exec& exec, Work& w) {
  w.key_scale = kKeyColumns;
  const int wide = exec.wgmma ? wide_columns(w.clusters) : 0;
  w.pairs = ceil_div(wide > 0 ? round_up(w.clusters, wide) : w.clusters, kPair);
  for (int m = 0; m < w.subsets; ++m) {
    Subset& subset = w.subset[m];
    subset.resident = static_cast<int>(resident_pairs(exec, w, subset.steps));
    subset.wide = subset.resident == w.pairs && has_wide_kernel(subset.steps) ? wide : 0;
  }
}

void assign(const Exec& exec, DType dtype, const Work& w) {
  dtype == DType::f16 ? prepare_and_assign<__half>(exec, w) : prepare_and_assign<__nv_bfloat16>(exec, w);
}

}  // namespace scope::cuda::clustering
