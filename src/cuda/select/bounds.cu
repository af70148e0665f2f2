// Bounds of each row's logits: between them lie the bins.
#include <algorithm>

#include "cuda/device/reduce.cuh"
#include "cuda/select/passes.h"
#include "cuda/select/products.cuh"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

// A row that is constant, or has no finite range, is one bin. Few bits of the unit are kept, so that logits of few bits
// have exact depths, and sums that are equal in f32 stay equal.
__device__ void set_bounds(const SelectSpace& s, int64_t head, int group, float high, float range, float scale) {
  const float exact_unit = kUsedDepths / range;
  const bool one_bin = !(range > 0) || !isfinite(range) || !isfinite(exact_unit);
  const float unit = one_bin ? 0.0f : __uint_as_float(__float_as_uint(exact_unit) & 0xffff0000u);
  s.high[head][group] = high;
  s.range[head][group] = range * scale;
  s.unit[head][group] = unit;
  s.step[head][group] = one_bin ? 0.0f : scale / unit;
}

// A warp for each row: the sums of each subspace's extremes.
__global__ void codes_bounds(ProxyLaunch p, SelectSpace s) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= int64_t{p.heads} * p.groups) return;
  const int64_t head = row / p.groups;
  const int group = static_cast<int>(row % p.groups);
  const float* table = p.tables[head] + int64_t{group} * p.subspaces * p.codes;
  float high = 0, range = 0, bad = 0;
  for (int m = 0; m < p.subspaces; ++m, table += p.codes) {
    float top = -INFINITY, bottom = INFINITY;
    for (int r = lane; r < p.codes; r += 32) {
      const float x = table[r];
      top = fmaxf(top, x);
      bottom = fminf(bottom, x);
      bad += x * 0.0f;  // not a number unless x is finite
    }
    top = warp_max(top);
    high += top;
    range += top + warp_max(-bottom);
  }
  bad = lanes_sum<32>(bad);
  if (lane == 0) set_bounds(s, head, group, high, range + bad, 1.0f);
}

// Floats as integers of the same order, so that atomicMax finds extremes; 0 is below all of them.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float from_ordered(uint32_t bits) {
  return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}

// The highest logit of each row and the lowest, negated, as ordered integers in `high` and `range`. A bound from norms
// would save this pass, but on peaked heads it is many times too wide for the histogram.
template <class T>
__global__ void __launch_bounds__(kExactThreads, 1) exact_range(ProxyLaunch p, SelectSpace s, int chunk) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  const int fragment_words = chunk / 16 * ((p.dim + 31) / 32 * 2) * 2 * 32;
  auto* row = reinterpret_cast<uint32_t*>(shared + fragment_words);  // [2, chunk]
  const int sections = (p.groups + chunk - 1) / chunk;
  const int64_t tiles = (p.count + kExactTile - 1) / kExactTile;
  const auto raise = [](uint32_t* to, uint32_t value) {
    if (value > *to) atomicMax(to, value);  // seldom, once a few tiles have passed
  };
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, pairs = (min(chunk, p.groups - group0) + kLanes - 1) / kLanes;
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * chunk; i += kExactThreads) row[i] = 0;
    load_centroids<T>(p, head, group0, chunk, shared);
    __syncthreads();
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      const int64_t first = tile * kExactTile + warp * 32;
      if (first >= p.count) continue;
      KeyTile keys;
      load_keys(p, head, first, keys);
      const int left = static_cast<int>(min(int64_t{32}, p.count - first));
      for (int pair = 0; pair < pairs; ++pair) {
        float sum[2][4][4];
        multiply<T>(shared + pair * (fragment_words / (chunk / kLanes)), keys, p.dim, sum);
        float my_high = 0, my_low = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {  // groups 8 c + lane / 4
          float high = -INFINITY, low = INFINITY;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (8 * (i / 2) + 2 * quad + i % 2 >= left) continue;
            const float x = sum[c / 2][i / 2][2 * (c % 2) + i % 2];
            high = fmaxf(high, x == x ? x : INFINITY);  // a row with NaN has no finite range
            low = fminf(low, x);
          }
#pragma unroll
          for (int offset = 1; offset < 4; offset *= 2) {
            high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
            low = fminf(low, __shfl_xor_sync(~0u, low, offset));
          }
          if (quad == c) my_high = high, my_low = low;
        }
        uint32_t* mine = row + pair * kLanes + 8 * quad + lane / 4;
        raise(mine, ordered(my_high));
        raise(mine + chunk, ordered(-my_low));
      }
    }
    __syncthreads();
    for (int g = threadIdx.x; g < min(chunk, p.groups - group0); g += kExactThreads) {
      atomicMax(reinterpret_cast<uint32_t*>(s.high[head]) + group0 + g, row[g]);
      atomicMax(reinterpret_cast<uint32_t*>(s.range[head]) + group0 + g, row[chunk + g]);
    }
  }
}

__global__ void exact_bounds(ProxyLaunch p, SelectSpace s) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= int64_t{p.heads} * p.groups) return;
  const int64_t head = row / p.groups;
  const int group = static_cast<int>(row % p.groups);
  const float high = from_ordered(__float_as_uint(s.high[head][group]));
  set_bounds(s, head, group, high, high + from_ordered(__float_as_uint(s.range[head][group])), p.scale);
}

}  // namespace

void bounds_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space) {
  const int64_t blocks = ceil_div(int64_t{p.heads} * p.groups, 8);
  if (p.exact) {
    fill(exec, space.high.base, space.high.step, 0, p.groups, p.heads);
    fill(exec, space.range.base, space.range.step, 0, p.groups, p.heads);
    const auto bytes = [&](int64_t chunk) { return fragment_bytes(p, chunk) + chunk * int64_t{2 * sizeof(uint32_t)}; };
    int chunk = static_cast<int>(std::min<int64_t>(kEmitGroups, round_up(p.groups, kLanes)));
    while (bytes(chunk) > exec.device->shared_bytes) chunk -= kLanes;
    const int64_t parts = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kExactTile));
    const auto kernel = p.f16 ? exact_range<__half> : exact_range<__nv_bfloat16>;
    launch(exec, "exact_range", kernel, parts, kExactThreads, bytes(chunk), p, space, chunk);
    launch(exec, "exact_bounds", exact_bounds, ceil_div(int64_t{p.heads} * p.groups, 256), 256, 0, p, space);
  } else {
    launch(exec, "codes_bounds", codes_bounds, blocks, 256, 0, p, space);
  }
}

}  // namespace scope::cuda
