// Bits of keys into rows of the mask.
#pragma once

#include "cuda/select/space.h"

namespace scope::cuda {

// Adds the bits of keys [first, first + 32) to a row.
__device__ inline void add_bits(const ProxyLaunch& proxy, uint32_t* row, int32_t first, uint32_t word) {
  if (word == 0) return;
  if (proxy.rows == nullptr) {
    atomicOr(row + first / 32, word);
    return;
  }
  const int32_t last = min(first + 31, proxy.count - 1), start = proxy.rows[first];
  if (proxy.rows[last] - start == last - first) {
    atomicOr(row + start / 32, word << (start % 32));
    const uint32_t rest = start % 32 == 0 ? 0 : word >> (32 - start % 32);
    if (rest != 0) atomicOr(row + start / 32 + 1, rest);
    return;
  }
  for (; word != 0; word &= word - 1) {
    const int32_t token = proxy.rows[first + __ffs(static_cast<int>(word)) - 1];
    atomicOr(row + token / 32, 1u << (token % 32));
  }
}

// The word of keys [first, first + 32) into a row.
__device__ inline void put_word(const ProxyLaunch& p, const MaskLaunch& mask, int64_t head, int64_t group, int64_t first,
                                uint32_t word) {
  uint32_t* row = mask.rows[head] + group * mask.words;
  if (mask.direct) {
    row[first / 32] = word;
  } else {
    add_bits(p, row, static_cast<int32_t>(first), word);
  }
}

}  // namespace scope::cuda
