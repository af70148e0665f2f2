// The exact proxy: centroids in two 16-bit parts, products by tensor cores.
#pragma once

#include "core/numeric.h"
#include "cuda/device/ptx_sm80.cuh"
#include "cuda/select/depth.cuh"

namespace scope::cuda {

inline constexpr int kExactThreads = 384, kExactWarps = kExactThreads / 32, kExactTile = kExactWarps * 32;
inline constexpr int kEmitGroups = 320;

// Fragments in the order in which lanes read them: [16 groups][16 channels][high, low][lane]. A thread of a quad has
// eight consecutive channels of a key in one load, which serve two steps; the centroids' channels are dealt out alike.
template <class T>
__device__ inline void load_centroids(const ProxyLaunch& p, int64_t head, int group0, int groups, uint4* fragments) {
  const int steps = (p.dim + 31) / 32 * 2;
  for (int i = threadIdx.x; i < groups / 16 * steps * 32; i += kExactThreads) {
    const int lane = i % 32, step = i / 32 % steps, tile = i / 32 / steps;
    const int channel = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
    uint32_t high[4], low[4];
    for (int part = 0; part < 4; ++part) {  // rows +0, +8, +0, +8; channels +0, +0, +2, +2
      const int group = group0 + tile * 16 + lane / 4 + part % 2 * 8, at = channel + part / 2 * 2;
      float2 x{0, 0};
      if (group < p.groups && at < p.dim)
        x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group} * p.dim + at);
      high[part] = pack<T>(x.x, x.y);
      low[part] = pack<T>(x.x - p.element(static_cast<uint16_t>(high[part])),
                          x.y - p.element(static_cast<uint16_t>(high[part] >> 16)));
    }
    fragments[((tile * steps + step) * 2) * 32 + lane] = {high[0], high[1], high[2], high[3]};
    fragments[((tile * steps + step) * 2 + 1) * 32 + lane] = {low[0], low[1], low[2], low[3]};
  }
}

struct KeyTile {
  uint4 part[4][4];  // [8 keys][32 channels]
};

__device__ inline void load_keys(const ProxyLaunch& p, int64_t head, int64_t first, KeyTile& keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int64_t key = first + 8 * n + lane / 4;
    const uint16_t* row = key < p.count ? p.k.row(head, p.token(static_cast<int32_t>(key))) + lane % 4 * 8 : nullptr;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      keys.part[n][g] = row != nullptr && g * 32 + lane % 4 * 8 < p.dim ? *reinterpret_cast<const uint4*>(row + 32 * g)
                                                                        : uint4{0, 0, 0, 0};
    }
  }
}

// 32 groups x 32 keys: sum[t][n][e] is group 16 t + 8 (e / 2) + lane / 4 and key 8 n + 2 (lane % 4) + e % 2.
template <class T>
__device__ inline void multiply(const uint4* fragments, const KeyTile& keys, int dim, float (&sum)[2][4][4]) {
  const int lane = threadIdx.x % 32, steps = (dim + 31) / 32 * 2;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[t][n][e] = 0;
    }
  }
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    if (32 * g >= dim) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint4 f = fragments[((t * steps + 2 * g + half) * 2 + part) * 32 + lane];
          const uint32_t a[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const uint4& k = keys.part[n][g];
            mma_16x8x16<T>(sum[t][n], a, half == 0 ? k.x : k.z, half == 0 ? k.y : k.w);
          }
        }
      }
    }
  }
}

inline int64_t fragment_bytes(const ProxyLaunch& p, int64_t groups) {
  return groups / 16 * (round_up(p.dim, 32) / 16) * 1024;
}

}  // namespace scope::cuda
