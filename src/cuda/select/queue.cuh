// A warp's candidates on their way to memory.
#pragma once

#include "cuda/select/depth.cuh"

namespace scope::cuda {

// An atomic in memory takes as long as hundreds of products, so that many go at
// once; and while a tile's depths are in registers, a thread only notes those that it wants.
struct Queue {
  static constexpr int kNotes = 16, kSize = 96, kBytes = (kNotes * 32 + 2 * kSize) * 4;  // of one warp
  uint32_t* notes;                                                                       // [kNotes, 32 lanes]
  uint2* entries;                                                                        // [kSize] group, value
  int n = 0;                                                                             // entries
  uint32_t note_address, next_note;

  __device__ explicit Queue(void* shared)
      : notes(static_cast<uint32_t*>(shared)), entries(reinterpret_cast<uint2*>(notes + kNotes * 32)) {
    next_note = note_address = address_of(notes + threadIdx.x % 32);
  }
  // At most kNotes of them before the next drain.
  __device__ void note(bool wanted, uint32_t word) {
    if (wanted) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(next_note), "r"(word));
      next_note += 32 * 4;
    }
  }
  // By the whole warp: each note becomes decode(note), an entry of a group and a value.
  template <class Decode>
  __device__ void drain(const SelectSpace& s, int64_t head, const Decode& decode) {
    for (uint32_t at = note_address;; at += 32 * 4) {
      const bool left = at != next_note;
      const uint32_t lanes = __ballot_sync(~0u, left);
      if (lanes == 0) break;
      if (n + __popc(lanes) > kSize) flush(s, head);
      if (left) entries[n + __popc(lanes & ((1u << threadIdx.x % 32) - 1))] = decode(load_shared(at));
      if (!left) at -= 32 * 4;
      n += __popc(lanes);
    }
    next_note = note_address;
  }
  __device__ void flush(const SelectSpace& s, int64_t head) {
    __syncwarp();
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
