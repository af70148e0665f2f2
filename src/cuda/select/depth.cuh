// What the passes that recompute the proxy share: logits as depths, shared memory by address, and work among blocks.
#pragma once

#include "cuda/select/space.h"

namespace scope::cuda {

// A logit as a depth.
__device__ inline uint32_t depth_of(float high, float unit, float logit) {
  const float x = fmaxf(fminf((high - logit) * unit, static_cast<float>(kDepths - 1)), 0.0f);  // NaN is the lowest
  return __float_as_uint(x + 8388608.0f) & 0x7fffffu;
}

// Shared memory by 32-bit address: the compiler would add the base of a pointer anew for each of these.
__device__ inline uint32_t address_of(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(address));
  return result;
}

// Blocks share the tiles of all heads evenly. A section is the groups that one load of tables serves; a block works on
// tiles [begin, end) of one section of one head after the other.
struct Share {
  int64_t at, last, tiles, begin = 0, end = 0, head = 0;
  int sections, section = 0;

  __device__ Share(int heads, int sections_each, int64_t tiles_each) : tiles(tiles_each), sections(sections_each) {
    const int64_t all = int64_t{heads} * sections * tiles;
    at = all * blockIdx.x / gridDim.x;
    last = all * (blockIdx.x + 1) / gridDim.x;
  }
  __device__ bool next() {
    if (at >= last) return false;
    const int64_t row = at / tiles;
    head = row / sections;
    section = static_cast<int>(row - head * sections);
    begin = at - row * tiles;
    end = min(tiles, begin + last - at);
    at += end - begin;
    return true;
  }
};

}  // namespace scope::cuda
