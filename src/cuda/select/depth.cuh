// What the passes that recompute the proxy share: logits as depths, shared memory by address, and work among blocks.
#pragma once

#include "cuda/select/space.h"

namespace scope::cuda {

// A logit as a depth.
__device__ inline uint32_t depth_of(float high, float unit, float logit) {
  const float x = fmaxf(fminf((high - logit) * unit, static_cast<float>(kDepths - 1)), 0.0f);  // NaN is the lowest
  return __float_as_uint(x + 8388608.0f) & 0x7fffffu;
}

// The exact proxy: a logit as its height in its row's range, 0 to 1; NaN is the lowest.
struct Height {
  float unit, bias;

  __device__ float of(float logit) const { return __saturatef(fmaf(logit, unit, bias)); }
};
// Heights become depths by one rounding down, to the fractions of a bin that fit beside 10 bits: so bins are the same
// whatever the fraction. kTop keeps the highest inside the first bin, and 1024 - kBins is what the complement adds.
inline constexpr float kTop = kBins - 1.0f / 128, kLowest = 1024 - kBins;
__device__ inline uint32_t depth_of(float height) {
  return ~__float_as_uint(__fmaf_rd(height, kTop, 1024.0f + kLowest)) & 0x7fffffu;
}
// The lowest height whose depth is less than this; below all of them, so that the sign of a zero does not matter.
__device__ inline float lowest_above(uint32_t depth) {
  return depth == kDepths ? -1.0f : __fdiv_ru(static_cast<float>(kDepths - depth) * (1.0f / (1 << kSubBits)), kTop);
}

// Shared memory by 32-bit address: the compiler would add the base of a pointer anew for each of these.
__device__ inline uint32_t address_of(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(address));
  return result;
}

// Blocks share the tiles of all heads evenly. A section is the rows that one load of tables serves; a block works on
// tiles [begin, end) of one section of one head after the other. side_by_side: neighbouring blocks have the same tiles of
// neighbouring sections, so that keys come from memory once; the grid is a multiple of the sections.
struct Share {
  int64_t at, last;
  int tiles, begin = 0, end = 0, head = 0, section = 0, chunk;
  bool side_by_side;
  RowSet rows;

  __device__ Share(int heads, const RowSet& of, int rows_each, int tiles_each, bool beside = false)
      : tiles(tiles_each), chunk(rows_each), side_by_side(beside), rows(of) {
    int64_t all = heads;
    int part = static_cast<int>(blockIdx.x), parts = static_cast<int>(gridDim.x);
    if (side_by_side) {
      section = part % sections(0);
      part /= sections(0);
      parts /= sections(0);
    } else if (!rows.list) {
      all *= sections(0);
    } else {
      all = 0;
      for (int h = 0; h < heads; ++h) all += sections(h);
    }
    at = all * tiles * part / parts;
    last = all * tiles * (part + 1) / parts;
  }
  __device__ int sections(int of) const { return (rows.count(of) + chunk - 1) / chunk; }
  __device__ bool next() {
    if (at >= last) return false;
    int row = static_cast<int>(at / tiles);
    begin = static_cast<int>(at - int64_t{row} * tiles);
    end = static_cast<int>(min(int64_t{tiles}, begin + last - at));
    at += end - begin;
    if (side_by_side) {
      head = row;
      return true;
    }
    if (!rows.list) {
      head = row / sections(0);
      row -= head * sections(0);
    } else {
      for (head = 0; row >= sections(head); ++head) row -= sections(head);
    }
    section = row;
    return true;
  }
};

}  // namespace scope::cuda
