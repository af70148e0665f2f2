// Between attend's two halves on CUDA: the tile list that attend.cu prepares, and the kernels that work it off.
#pragma once

#include "cuda/launch.h"
#include "cuda/quantise.h"
#include "stages/attend.h"

namespace scope::cuda {

// Queries of one group that a block works on at a time: as many as the kernel's warpgroups or warps hold.
inline constexpr int kTileRows80 = 128, kTileRows90 = 192;
struct AttendTile {
  int32_t head, group;
  int32_t begin, rows;  // queries order[begin .. begin + rows), 1 <= rows <= the kernel's kTileRows
  int32_t keys;         // set bits of mask OR keep in this group's row (k_tokens when dense)
  int32_t extra;        // set bits of its row of the extra keys' mask
};

// What both kernels take. Element type T of q, k, v, out and the extra keys: bf16 or f16, as `dtype` says.
struct AttendLaunch {
  DType dtype;
  int dim;  // a multiple of 8, up to 128; channels past it are zero in the kernel and never read or written
  HeadRows<const uint16_t> q, k, v;
  HeadRows<uint16_t> out;
  PerHead<float> lse;            // [q_tokens] natural log; may be null
  PerHead<const int32_t> order;  // [q_tokens]; null: identity
  PerHead<const uint32_t> mask;  // [groups, words]; null: dense, keys 0 .. k_tokens - 1
  const uint32_t* keep;          // [words], the same for every head; may be null
  int64_t words;                 // mask_words(k_tokens)
  int32_t k_tokens;
  float scale;
  int32_t extra_count;                       // E; 0: none
  PerHead<const uint16_t> extra_k, extra_v;  // [E, dim] in T
  PerHead<const float> extra_bias;           // [E]
  PerHead<const uint32_t> extra_mask;        // [groups, mask_words(E)]
  PerHead<const float> mix_share, mix_row;   // [groups], [groups, dim]; null: nothing is mixed in
  PerHead<const int32_t> mix_part;           // [q_tokens] a query's row of mix_row; null: its group's
  float follow;                              // as Mix has it
  const AttendTile* tiles;                   // in the order in which blocks should take them
  const int32_t* tile_count;                 // [1] on the device
  int32_t* next_tile;                        // [1] on the device, 0 at launch: blocks take tiles by atomicAdd
  int32_t most_tiles;                        // upper bound of *tile_count, known on the host
  Products products;
  EightBits eight;  // in the place of q and k, and with qkv8 of v
};

// How much of which row a query mixes in.
struct Mixed {
  float share;
  const float* row;  // null: nothing is mixed in

  // token: negative where there is no query.
  __device__ Mixed(const AttendLaunch& at, const AttendTile& tile, int32_t token)
      : share(at.mix_share ? at.mix_share[tile.head][tile.group] : 0.0f), row(nullptr) {
    if (!(share > 0) || token < 0) return;
    row = at.mix_row[tile.head] + int64_t{at.mix_part ? at.mix_part[tile.head][token] : tile.group} * at.dim;
  }
};

void attend_sm80(const Exec& exec, const AttendLaunch& at);  // portable: mma.sync, cp.async; no qkv8
void attend_sm90(const Exec& exec, const AttendLaunch& at);  // wgmma, warp-specialised, persistent

}  // namespace scope::cuda
