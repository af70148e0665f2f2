// Sums, extremes and scans over a warp or a block: by CUB where any order gives the same bits, by hand where it does not.
#pragma once

#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>

namespace scope::cuda {

// ---- by CUB: integers, whose sums and extremes have one value ----

// Inclusive sum over the lanes of a warp.
__device__ inline uint32_t warp_scan(uint32_t x) {
  using Scan = cub::WarpScan<uint32_t>;
  __shared__ typename Scan::TempStorage space;  // empty: lanes pass their sums on by shuffles
  Scan(space).InclusiveSum(x, x);
  return x;
}

// Inclusive sum over the threads of a block.
template <int kThreads>
__device__ uint64_t block_scan(uint64_t x) {
  using Scan = cub::BlockScan<uint64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage space;
  Scan(space).InclusiveSum(x, x);
  __syncthreads();
  return x;
}

// reduce(…) over a block, known to thread 0.
template <int kThreads, class Reduce>
__device__ int64_t block_reduce(int64_t x, Reduce reduce) {
  using Block = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Block::TempStorage space;
  x = Block(space).Reduce(x, reduce);
  __syncthreads();
  return x;
}

// ---- by hand: integers on every thread ----

// CUB leaves a sum with one thread. The searches that use these wait for nothing else, round after round: all of a round's
// sums share two barriers, and the second one also hands them to everyone.
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
    x[i] = threadIdx.x % 32 < kThreads / 32 ? parts[threadIdx.x % 32][i] : 0;
    for (int offset = 16; offset > 0; offset /= 2) x[i] += __shfl_xor_sync(~0u, x[i], offset);
  }
}
template <int kThreads>
__device__ uint32_t block_sum(uint32_t x) {
  __shared__ uint32_t parts[kThreads / 32];
  x = __reduce_add_sync(~0u, x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (const uint32_t part : parts) x += part;
  return x;
}

// ---- by hand: floating point, in an order that is part of the results and no library's to change ----

// Over kWidth lanes that stand together.
template <int kWidth>
__device__ float lanes_sum(float x) {
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Passes over NaN, which a maximum by comparison does not.
__device__ inline float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

// On every thread; one fixed tree.
template <int kThreads>
__device__ double block_sum(double x) {
  __shared__ double shared[kThreads];
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) shared[threadIdx.x] += shared[threadIdx.x + step];
    __syncthreads();
  }
  const double sum = shared[0];
  __syncthreads();
  return sum;
}

// Masses and keys before this thread's, in the order of the threads; `total` of all masses. The keys share the masses'
// shuffles and barrier.
template <int kThreads>
__device__ void exclusive_scan(double& mass, int32_t& keys, double& total) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double masses[kWarps];
  __shared__ int32_t counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double sum = mass;
  int32_t count = keys;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(~0u, sum, offset);
    const int32_t others = __shfl_up_sync(~0u, count, offset);
    if (lane >= offset) sum += other, count += others;
  }
  if (lane == 31) masses[warp] = sum, counts[warp] = count;
  const double up_to_last = __shfl_up_sync(~0u, sum, 1);
  mass = lane == 0 ? 0.0 : up_to_last;
  keys = count - keys;
  __syncthreads();
  double first = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) first = total;
    if (w < warp) keys += counts[w];
    total += masses[w];
  }
  mass += first;
}

}  // namespace scope::cuda
