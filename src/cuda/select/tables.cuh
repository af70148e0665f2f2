// The proxy by codes: 32 groups' tables in shared memory, as depths.
#pragma once

#include "core/numeric.h"
#include "cuda/device/reduce.cuh"
#include "cuda/select/depth.cuh"

namespace scope::cuda {

// Rows of 32 groups are 33 words apart: the store by rows of one group and the lookup by groups of one row both touch
// 32 banks.
inline constexpr int kTableStride = 33 * 4;

// The tables of 32 groups as depths; subspace 0 less what `minus` says.
template <int kSubspaces>
__device__ inline void load_tables(const ProxyLaunch& p, const SelectSpace& s, int64_t head, int group0,
                                   const uint32_t* minus, char* table) {
  const int lane = threadIdx.x % 32;
  for (int g = warp_index(); g < kLanes; g += blockDim.x / 32) {
    const bool valid = group0 + g < p.groups;
    const float unit = valid ? s.unit[head][group0 + g] : 0.0f;
    const float* from = p.tables[head] + int64_t{valid ? group0 + g : 0} * kSubspaces * p.codes;
    for (int m = 0; m < kSubspaces; ++m, from += p.codes) {
      float top = -INFINITY;
      for (int r = lane; r < p.codes; r += 32) top = fmaxf(top, from[r]);
      top = warp_max(top);
      const uint32_t less = m == 0 && minus != nullptr && valid ? minus[group0 + g] : 0;
      for (int r = lane; r < p.codes; r += 32) {
        const uint32_t depth = unit > 0 ? __float2uint_rn((top - from[r]) * unit) : 0;
        *reinterpret_cast<uint32_t*>(table + (m * p.codes + r) * kTableStride + 4 * g) = depth - less;
      }
    }
  }
}

// A key's codes in as few words as possible: passing one from lane to lane costs as much as a lookup.
template <int kSubspaces>
struct Codes {
  static constexpr int kWords = kSubspaces <= 3 ? 1 : 2, kBits = kSubspaces <= 3 ? 10 : 16;
  uint32_t word[kWords] = {};

  Codes() = default;
  __device__ Codes(const ProxyLaunch& p, int64_t head, int64_t key) {
    if (key >= p.count) return;
    const int32_t* labels = p.labels[head] + key;
#pragma unroll
    for (int m = 0; m < kSubspaces; ++m) {
      word[m * kBits / 32] |= static_cast<uint32_t>(labels[m * int64_t{p.count}]) << (m * kBits % 32);
    }
  }
  __device__ Codes of_lane(int lane) const {
    Codes result;
#pragma unroll
    for (int w = 0; w < kWords; ++w) result.word[w] = __shfl_sync(~0u, word[w], lane);
    return result;
  }
  // The sum over the subspaces; `column` is the address of this lane's column of the table.
  __device__ uint32_t lookup(uint32_t column, uint32_t subspace_bytes) const {
    uint32_t sum = 0;
#pragma unroll
    for (int m = 0; m < kSubspaces; ++m) {
      uint32_t code = word[m * kBits / 32] >> (m * kBits % 32);
      if (m * kBits % 32 + kBits < 30) code &= (1u << kBits) - 1;  // above the last one there is nothing
      sum += load_shared(column + m * subspace_bytes + code * kTableStride);
    }
    return sum;
  }
};

inline int64_t table_bytes(const ProxyLaunch& p) { return round_up(int64_t{p.subspaces} * p.codes * kTableStride, 16); }
inline int64_t histogram_bytes(Bins bins) { return int64_t{bins.count} * kLanes * 4; }

// Warps of codes_emit: words to be written and candidates, beside the tables.
inline constexpr int kWordStride = 9, kListSize = 8;
inline constexpr int kWordsBytes = 32 * kWordStride * 4, kListBytes = 32 * kListSize * 4;  // of a warp

// Whether 32 groups' tables fit shared memory beside their histograms and the words to be written.
inline bool tables_fit(const Exec& exec, const ProxyLaunch& p, Bins bins) {
  return !p.exact && p.subspaces <= 4 && p.codes <= 1024 &&
         table_bytes(p) + std::max<int64_t>(histogram_bytes(bins), 8 * (kWordsBytes + kListBytes)) <=
             exec.device->shared_bytes;
}

// Calls f with the number of subspaces as a constant.
template <class F>
void with_subspaces(int n, const F& f) {
  if (n == 1) f(std::integral_constant<int, 1>());
  if (n == 2) f(std::integral_constant<int, 2>());
  if (n == 3) f(std::integral_constant<int, 3>());
  if (n == 4) f(std::integral_constant<int, 4>());
}

}  // namespace scope::cuda
