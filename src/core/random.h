// Philox4x32-10: a counter-based generator, so that draw i is the same on every thread, device and rank.
#pragma once

#include <array>
#include <cstdint>

#include "core/host_device.h"

namespace scope {

struct PhiloxBlock {
  uint32_t x, y, z, w;
};

SCOPE_HOST_DEVICE inline PhiloxBlock philox(PhiloxBlock counter, uint32_t key_x, uint32_t key_y) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.x;
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.z;
    counter = {static_cast<uint32_t>(b >> 32) ^ counter.y ^ key_x, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter.w ^ key_y, static_cast<uint32_t>(a)};
    key_x += 0x9E3779B9u;
    key_y += 0xBB67AE85u;
  }
  return counter;
}

inline std::array<uint32_t, 4> philox(const std::array<uint32_t, 4>& counter, const std::array<uint32_t, 2>& key) {
  const PhiloxBlock block = philox(PhiloxBlock{counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  return {block.x, block.y, block.z, block.w};
}

// A cheap second step where one Philox draw per item would cost more than the work on it: mixes a key and a counter.
SCOPE_HOST_DEVICE inline uint64_t splitmix(uint64_t key, uint64_t i) {
  uint64_t x = key + (i + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// A stream of draws named by what it is for: (seed, tensor, subspace) and a purpose.
struct RandomStream {
  uint64_t seed = 0;
  uint32_t tensor = 0;  // 0: queries, 1: keys
  uint32_t subspace = 0;
  uint32_t purpose = 0;  // 0: starting rows, 1: token sample, 2: channel order, 3: synthetic data, 4: noise, 5: weights

  SCOPE_HOST_DEVICE uint64_t bits(uint64_t i) const {
    const PhiloxBlock block =
        philox(PhiloxBlock{static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), tensor | (purpose << 8), subspace},
               static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return uint64_t{block.y} << 32 | block.x;
  }
  // Uniform in [0, n): the high half of a 64 x 64 product; the bias is below n / 2^64.
  SCOPE_HOST_DEVICE int64_t index(uint64_t i, int64_t n) const {
#ifdef __CUDA_ARCH__
    return static_cast<int64_t>(__umul64hi(bits(i), static_cast<uint64_t>(n)));
#else
    return static_cast<int64_t>((static_cast<unsigned __int128>(bits(i)) * static_cast<uint64_t>(n)) >> 64);
#endif
  }
  // Uniform in [0, 1).
  double uniform(uint64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }
};

}  // namespace scope
