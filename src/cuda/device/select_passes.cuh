// What the passes that recompute the proxy share: work among blocks, histograms, words, and candidates.
#pragma once

#include "cuda/select.h"

namespace scope::cuda {

// Shared memory by 32-bit address: the compiler would add the base of a pointer anew for each of these.
__device__ inline uint32_t address_of(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(address));
  return result;
}

// Counts a key in its column of a histogram [bins, 32].
__device__ inline void count_key(uint32_t column_address, uint32_t depth, int sub_bits) {
  constexpr uint32_t kOne = 1u << kCountShift, kMask = kMostMoment;
  uint32_t word;  // (depth >> …) & kMask | kOne
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(word) : "r"(depth >> (sub_bits - kMomentBits)), "r"(kMask), "r"(kOne));
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(column_address + (depth >> sub_bits) * (kLanes * 4)), "r"(word));
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

// Adds a block's histogram to the one in memory and clears it.
__device__ inline void flush(uint32_t* histogram, int n, unsigned long long* to) {
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t word = histogram[i];
    if (word == 0) continue;
    histogram[i] = 0;
    atomicAdd(to + i, (static_cast<unsigned long long>(word >> kCountShift) << 32) | (word & ((1u << kCountShift) - 1)));
  }
  __syncthreads();
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

// A warp's candidates on their way to memory. An atomic there takes as long as hundreds of products, so that many go at
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
