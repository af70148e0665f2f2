// The exact proxy: products by tensor cores.
#pragma once

#include "core/numeric.h"
#include "cuda/device/ptx_sm80.cuh"
#include "cuda/select/depth.cuh"

namespace scope::cuda {

inline constexpr int kEmitGroups = 320;

// Products of a block of kWarps warps with keys of type T and up to 32 kGroups channels.
template <class T, int kGroups, int kWarps_>
struct Products {
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kTile = 32 * kWarps;
  static constexpr int kSteps = 2 * kGroups;          // of 16 channels
  static constexpr int kPairWords = 2 * kSteps * 32;  // uint4 for 32 centroids
  static constexpr int64_t kPairBytes = kPairWords * int64_t{sizeof(uint4)};

  // Fragments in the order in which lanes read them: [16 groups][16 channels][lane]. A thread of a quad has eight
  // consecutive channels of a key in one load, which serve two steps; the centroids' channels are dealt out alike.
  // group_at(i): which group centroid i is; negative: none.
  template <class GroupAt>
  static __device__ void load_centroids(const ProxyLaunch& p, int64_t head, int groups, const GroupAt& group_at,
                                        uint4* fragments) {
    for (int i = threadIdx.x; i < groups / 16 * kSteps * 32; i += kThreads) {
      const int lane = i % 32, step = i / 32 % kSteps, tile = i / 32 / kSteps;
      const int channel = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
      uint32_t part[4];
      for (int at = 0; at < 4; ++at) {  // rows +0, +8, +0, +8; channels +0, +0, +2, +2
        const int group = group_at(tile * 16 + lane / 4 + at % 2 * 8), from = channel + at / 2 * 2;
        float2 x{0, 0};
        if (group >= 0 && from < p.dim)
          x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group} * p.dim + from);
        part[at] = pack<T>(x.x, x.y);
      }
      fragments[i] = {part[0], part[1], part[2], part[3]};
    }
  }

  struct KeyTile {
    uint4 part[4][kGroups];  // [8 keys][32 channels]
  };

  // 32 keys, key_at(0) to key_at(31); negative: none. A thread's products are with keys 8 quad to 8 quad + 7.
  template <class KeyAt>
  static __device__ void load_keys(const ProxyLaunch& p, int64_t head, const KeyAt& key_at, KeyTile& keys) {
    const int lane = threadIdx.x % 32, column = lane / 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int32_t key = key_at(8 * (column / 2) + 2 * n + column % 2);
      const uint16_t* row = key >= 0 ? p.k.row(head, p.token(key)) + lane % 4 * 8 : nullptr;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        keys.part[n][g] = row != nullptr && g * 32 + lane % 4 * 8 < p.dim ? *reinterpret_cast<const uint4*>(row + 32 * g)
                                                                          : uint4{0, 0, 0, 0};
      }
    }
  }

  // 32 groups x 32 keys: sum[t][n][e] is group 16 t + 8 (e / 2) + lane / 4 and key 8 (lane % 4) + 2 n + e % 2.
  static __device__ void multiply(const uint4* fragments, const KeyTile& keys, float (&sum)[2][4][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[t][n][e] = 0;
      }
    }
    // The upper 16 groups first, so that what follows can begin with them while the others are multiplied.
#pragma unroll
    for (int t = 1; t >= 0; --t) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 f = fragments[(t * kSteps + step) * 32 + lane];
        const uint32_t a[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint4& k = keys.part[n][step / 2];
          mma_16x8x16<T>(sum[t][n], a, step % 2 == 0 ? k.x : k.z, step % 2 == 0 ? k.y : k.w);
        }
      }
    }
  }
};

// Calls f with the Products that suit the keys.
template <int kWarps, class F>
void with_products(const ProxyLaunch& p, const F& f) {
  if (p.f16) {
    p.dim <= 64 ? f(Products<__half, 2, kWarps>()) : f(Products<__half, 4, kWarps>());
  } else {
    p.dim <= 64 ? f(Products<__nv_bfloat16, 2, kWarps>()) : f(Products<__nv_bfloat16, 4, kWarps>());
  }
}

}  // namespace scope::cuda
