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

// A sample has every kStride-th key of a head, at places that no width of a frame divides. Few logits of a row are past the
// sample's extremes by these shares of its range: rows that have such keys are done again with all of them.
constexpr int kStride = 8, kFewestSampled = 4096;
struct Margins {
  float above, below;
};
constexpr Margins kOfSample = {0.25f, 0.1f}, kOfAll = {0x1p-10f, 0x1p-10f};  // of all: for rounding

int stride_of(const ProxyLaunch& p) {
  return int64_t{p.count} * p.stride >= kFewestSampled ? std::max(1, kStride / p.stride) : 1;
}

// The highest logit of each row and the lowest, negated, as ordered integers in `high` and `range`. A bound from norms
// would save this pass, but on peaked heads it is many times too wide for the histogram.
template <class Products>
__global__ void __launch_bounds__(Products::kThreads, 1)
    exact_range(ProxyLaunch p, SelectSpace s, RowSet rows, int chunk, int stride) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  auto* row = reinterpret_cast<uint32_t*>(shared + chunk / kLanes * Products::kPairWords);  // [2, chunk]
  const int sampled = (p.count + stride - 1) / stride, tiles = (sampled + Products::kTile - 1) / Products::kTile;
  const auto raise = [](uint32_t* to, uint32_t value) {
    if (value > *to) atomicMax(to, value);  // seldom, once a few tiles have passed
  };
  for (Share share(p.heads, rows, chunk, tiles); share.next();) {
    const int head = share.head;
    const int row0 = share.section * chunk, n = min(chunk, rows.count(head) - row0);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * chunk; i += Products::kThreads) row[i] = 0;
    Products::load_centroids(
        p, head, chunk, [&](int i) { return rows.at(head, row0 + i); }, shared);
    __syncthreads();
    for (int tile = share.begin; tile < share.end; ++tile) {
      const int first = tile * Products::kTile + warp * 32;
      if (first >= sampled) continue;
      typename Products::KeyTile keys;
      Products::load_keys(
          p, head,
          [&](int i) {  // past the last key it again
            const auto at = static_cast<uint32_t>(first + i);
            const uint32_t phase = __umulhi(at * 0x9e3779b1u, static_cast<uint32_t>(stride));
            return min((first + i) * stride + static_cast<int>(phase), p.count - 1);
          },
          keys);
      for (int pair = 0; pair * kLanes < n; ++pair) {
        float sum[2][4][4];
        Products::multiply(shared + pair * Products::kPairWords, keys, sum);
        float my_high = 0, my_low = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {  // groups 8 c + lane / 4
          float high = -INFINITY, low = INFINITY;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
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
    for (int i = threadIdx.x; i < n; i += Products::kThreads) {
      const int group = rows.at(head, row0 + i);
      atomicMax(reinterpret_cast<uint32_t*>(s.high[head]) + group, row[i]);
      atomicMax(reinterpret_cast<uint32_t*>(s.range[head]) + group, row[chunk + i]);
    }
  }
}

// A row that is constant, or has no finite range, is in the first bin.
__global__ void exact_bounds(ProxyLaunch p, SelectSpace s, RowSet rows, Margins margins) {
  const int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (at >= int64_t{p.heads} * p.groups) return;
  const int64_t head = at / p.groups;
  const int group = rows.at(head, static_cast<int>(at % p.groups));
  if (group < 0) return;
  const float high = from_ordered(__float_as_uint(s.high[head][group]));
  const float found = high + from_ordered(__float_as_uint(s.range[head][group]));
  const float range = found * (1 + margins.above + margins.below), unit = 1 / range;
  const bool one_bin = !(range > 0) || !isfinite(range) || !isfinite(unit);
  s.high[head][group] = one_bin ? 1.0f : (found * (1 + margins.below) - high) * unit;
  s.unit[head][group] = one_bin ? 0.0f : unit;
  s.range[head][group] = range * p.scale;
  s.step[head][group] = one_bin ? 0.0f : range * p.scale / (kTop * (1 << kSubBits));
}

constexpr int kLeaverThreads = 256;

// Lists the rows of a head that a sample's range does not hold, and clears their histograms. The last bin may have keys
// below it: each weighs less than any other, so that few of them cannot hold more than their share.
__global__ void __launch_bounds__(kLeaverThreads) find_leavers(ProxyLaunch p, SelectSpace s, Bins bins) {
  __shared__ int n;
  const int64_t head = blockIdx.x;
  const auto column = [&](int group) {
    return s.histogram[head] + int64_t{group / kLanes} * bins.count * kLanes + group % kLanes;
  };
  if (threadIdx.x == 0) n = 0;
  __syncthreads();
  for (int group = threadIdx.x; group < p.groups; group += kLeaverThreads) {
    const unsigned long long* words = column(group);
    if (words[0] == 0 && words[(bins.count - 1) * kLanes] >> 32 <= static_cast<uint32_t>(p.count) / 2048) continue;
    s.again[head][atomicAdd(&n, 1)] = group;
    s.high[head][group] = s.range[head][group] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n * bins.count; i += kLeaverThreads) {
    column(s.again[head][i / bins.count])[i % bins.count * kLanes] = 0;
  }
  if (threadIdx.x == 0) *s.again_size[head] = n;
}

void range_of(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, const RowSet& rows, int most, int stride) {
  with_products<12>(p, [&](auto products) {
    using P = decltype(products);
    const auto bytes = [&](int64_t chunk) { return chunk / kLanes * P::kPairBytes + chunk * int64_t{2 * sizeof(uint32_t)}; };
    int chunk = static_cast<int>(std::min<int64_t>(most, round_up(p.groups, kLanes)));
    while (bytes(chunk) > exec.device->shared_bytes) chunk -= kLanes;
    const int64_t tiles = ceil_div(ceil_div(p.count, stride), P::kTile);
    const int64_t parts = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * tiles);
    launch(exec, "exact_range", exact_range<P>, parts, P::kThreads, bytes(chunk), p, space, rows, chunk, stride);
  });
  launch(exec, "exact_bounds", exact_bounds, ceil_div(int64_t{p.heads} * p.groups, 256), 256, 0, p, space, rows,
         stride == 1 ? kOfAll : kOfSample);
}

}  // namespace

void bounds_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space) {
  if (p.exact) {
    fill(exec, space.high.base, space.high.step, 0, p.groups, p.heads);
    fill(exec, space.range.base, space.range.step, 0, p.groups, p.heads);
    range_of(exec, p, space, RowSet{p.groups}, kEmitGroups, stride_of(p));
  } else {
    const int64_t blocks = ceil_div(int64_t{p.heads} * p.groups, 8);
    launch(exec, "codes_bounds", codes_bounds, blocks, 256, 0, p, space);
  }
}

void leavers_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins) {
  if (!p.exact || stride_of(p) == 1) return;
  const RowSet rows{p.groups, space.again, space.again_size};
  launch(exec, "find_leavers", find_leavers, p.heads, kLeaverThreads, 0, p, space, bins);
  range_of(exec, p, space, rows, kLanes, 1);
  histogram_pass(exec, p, space, bins, rows);
}

}  // namespace scope::cuda
