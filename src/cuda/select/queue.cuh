// A warp's candidates on their way to memory.
#pragma once

#include "cuda/select/depth.cuh"

namespace scope::cuda {

// An atomic in memory takes as long as hundreds of products, so that many go at once. A tile's heights pass through shared
// memory, where a thread finds those that it wants by number.
struct Queue {
  static constexpr int kSize = 96, kBytes = 32 * 32 * 4 + kSize * 8;  // of one warp
  float4* heights;                                                    // [8, 32 lanes]
  uint2* entries;                                                     // [kSize] group, value
  int n = 0;                                                          // entries

  __device__ explicit Queue(void* shared)
      : heights(static_cast<float4*>(shared)), entries(reinterpret_cast<uint2*>(heights + 8 * 32)) {}

  // By the whole warp: bit 8 c + i of `wanted` is tile[c / 2][i / 2][2 (c % 2) + i % 2] and becomes decode(bit, height), an
  // entry of a group and a value.
  template <class Decode>
  __device__ void add(const SelectSpace& s, int64_t head, uint32_t wanted, const float (&tile)[2][4][4],
                      const Decode& decode) {
    const int lane = threadIdx.x % 32;
    if (wanted != 0) {  // few lanes have any
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* x = tile[i / 4][i % 4];
        heights[i * 32 + lane] = {x[0], x[1], x[2], x[3]};
      }
    }
    while (const uint32_t lanes = __ballot_sync(~0u, wanted != 0)) {
      if (n + __popc(lanes) > kSize) flush(s, head);
      if (wanted != 0) {
        const int bit = __ffs(static_cast<int>(wanted)) - 1;
        const auto* mine = reinterpret_cast<const float*>(heights + (bit / 16 * 4 + bit / 2 % 4) * 32 + lane);
        entries[n + __popc(lanes & ((1u << lane) - 1))] = decode(bit, mine[bit / 8 % 2 * 2 + bit % 2]);
      }
      wanted &= wanted - 1;
      n += __popc(lanes);
    }
  }
  __device__ void flush(const SelectSpace& s, int64_t head) {
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < n; i += 32) {
      const uint2 entry = entries[i];
      const uint32_t at = atomicAdd(s.found[head] + entry.x, 1u);
      s.candidates[head][int64_t{entry.x} * s.most_candidates + at] = entry.y;
    }
    __syncwarp();
    n = 0;
  }
};

}  // namespace scope::cuda
