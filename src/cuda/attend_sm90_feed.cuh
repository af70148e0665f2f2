// The warps of attend on Hopper that feed: one lists the keys of tiles, three copy their rows.
#pragma once

#include <type_traits>

#include "cuda/attend_sm90.cuh"

namespace scope::cuda::attend90 {

// Takes tiles and writes each one's keys, in ascending order, into the ring of blocks.
template <class C>
__device__ void expand(const AttendLaunch& at, Shared<C>& shared) {
  const int lane = threadIdx.x % 32;
  Ring<C::kLists> opening, closing;  // the next blocks to take from and to hand to the loading warps
  Ring<kTiles> ring;
  for (;; ring.next()) {
    int number = 0;
    if (lane == 0) number = atomicAdd(at.next_tile, 1);
    number = __shfl_sync(~0u, number, 0);
    AttendTile tile{};
    if (number < *at.tile_count) tile = at.tiles[number];
    barrier_wait(shared_address(&shared.tile_empty[ring.slot()]), ring.parity() ^ 1);
    if (lane == 0) {
      shared.tiles[ring.slot()] = tile;
      barrier_arrive(shared_address(&shared.tile_full[ring.slot()]));
    }
    if (tile.rows == 0) return;

    int done = 0, opened = 0, closed = 0;   // keys and blocks of this tile
    int place = closing.slot() * C::kKeys;  // in the ring, of the next key

    const auto open = [&](int blocks) {
#pragma unroll 1
      for (; opened < blocks; ++opened, opening.next()) {
        barrier_wait(shared_address(&shared.list_empty[opening.slot()]), opening.parity() ^ 1);
      }
    };
    const auto close = [&](int blocks) {
      __syncwarp();
#pragma unroll 1
      for (; closed < blocks; ++closed, closing.next()) {
        barrier_arrive(shared_address(&shared.list_full[closing.slot()]));
      }
    };
    const auto wrap = [&](int i) { return i < C::kListKeys ? i : i - C::kListKeys; };
    // 32 * kWords words of a mask at a time; each lane lists kWords of them that follow one another.
    const auto walk = [&](const uint32_t* mask, const uint32_t* also, int words, int bits, int32_t flag, int until) {
      constexpr int kPiece = 32 * C::kWords;
      const auto fetch = [&](int first) {
        const auto& to = shared.ahead[first / kPiece % kAhead];
        if (mask != nullptr) {
#pragma unroll
          for (int i = 0; i < kPiece; i += 32) {
            const int word = first + i + lane, bytes = word < words ? 4 : 0;
            copy_4(shared_address(to[0]) + 4 * (i + lane), mask + word, bytes);
            if (also != nullptr) copy_4(shared_address(to[1]) + 4 * (i + lane), also + word, bytes);
          }
        }
        commit_copies();
      };
      const auto fetched = [&](int first) {
        Words<C::kWords> found;
        if (mask == nullptr) {
#pragma unroll
          for (int w = 0; w < C::kWords; ++w) {
            const int left = bits - 32 * (first + C::kWords * lane + w);
            found.at[w] = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
          }
          return found;
        }
        const auto& from = shared.ahead[first / kPiece % kAhead];
        found = from[0][lane];
        if (also != nullptr) {
          const auto more = from[1][lane];
#pragma unroll
          for (int w = 0; w < C::kWords; ++w) found.at[w] |= more.at[w];
        }
        return found;
      };
#pragma unroll 1
      for (int i = 0; i < kAhead - 1; ++i) fetch(kPiece * i);
      for (int first = 0; done < until && first < words; first += kPiece) {
        fetch(first + kPiece * (kAhead - 1));  // over words that every lane has read: their sums were exchanged since
        wait_copies<kAhead - 1>();
        __syncwarp();
        const Words<C::kWords> own = fetched(first);
        int mine = 0;
#pragma unroll
        for (int w = 0; w < C::kWords; ++w) mine += __popc(own.at[w]);
        int through = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(~0u, through, step);
          if (lane >= step) through += before;
        }
        const int total = __shfl_sync(~0u, through, 31);
        for (int listed = 0; listed < total;) {  // once, unless half the ring is too little: the other half is being read
          const bool fits = through - listed <= C::kListKeys / 2, now = fits && through - mine >= listed;
          const int count = __reduce_max_sync(~0u, fits ? through : 0) - listed;
          open((done + count + C::kKeys - 1) / C::kKeys);
          // Each lane lists its words bit by bit, two words at a time: as many turns as the fullest has bits, which are few
          // where little is kept.
          const uint32_t list = shared_address(shared.keys), end = list + 4 * C::kListKeys;
          int behind = place + through - mine - listed;
#pragma unroll
          for (int w = 0; w < C::kWords; w += 2) {
            const int32_t key = flag | 32 * (first + C::kWords * lane + w);
            uint32_t left[2], to[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              left[i] = now ? own.at[w + i] : 0;
              to[i] = list + 4 * wrap(behind);
              behind += __popc(left[i]);
            }
            const int turns = __reduce_max_sync(~0u, max(__popc(left[0]), __popc(left[1])));
            const auto put = [&]<bool kWraps>(std::bool_constant<kWraps>) {
#pragma unroll 2
              for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  const uint32_t below = left[i] - 1;
                  store_if(left[i] != 0, to[i], key + 32 * i + __popc(below & ~left[i]));
                  left[i] &= below;
                  to[i] += 4;
                  if (kWraps && to[i] == end) to[i] = list;
                }
              }
            };
            place + count <= C::kListKeys ? put(std::false_type()) : put(std::true_type());
          }
          done += count;
          listed += count;
          place = wrap(place + count);
          close(done / C::kKeys);
        }
      }
      wait_all_copies();
    };
    const int64_t row = tile.group;
    const uint32_t* mask = at.mask ? at.mask[tile.head] + row * at.words : nullptr;
    walk(mask, at.keep, static_cast<int>(at.words), at.k_tokens, 0, tile.keys);
    if (tile.extra > 0) {
      const int words = (at.extra_count + 31) / 32;
      walk(at.extra_mask[tile.head] + row * words, nullptr, words, 0, kExtraKey, tile.keys + tile.extra);
    }
    const int blocks = block_count<C>(tile);
    if (closed < blocks) {
      open(blocks);
      for (int i = done + lane; i < blocks * C::kKeys; i += 32) shared.keys[wrap(place + i - done)] = kNoKey;
      close(blocks);
    }
  }
}

// Turns a slab of 16 keys' values, rows of kDim bytes, into columns: those 16 keys of every channel lie together, as
// (0, 1, 8, 9), (2, 3, 10, 11), …, which is how a thread holds its probabilities, and of every 16 channels the even ones
// come before the odd ones.
template <int kDim>
__device__ void transpose_slab(uint32_t from, uint32_t to) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  from += row * 128;
  to += lane * 16;
#pragma unroll
  for (int i = 0; i < kDim / 32; i += 2) {
    uint32_t x[2][4];  // both read before either is written, so that they wait once
#pragma unroll
    for (int j = 0; j < 2; ++j) load_transposed(x[j], from + (((2 * (i + j) + lane / 16) ^ (row % 8)) << 4));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      store_rows(to + 512 * (i + j), __byte_perm(x[j][0], x[j][1], 0x6420), __byte_perm(x[j][0], x[j][1], 0x7531),
                 __byte_perm(x[j][2], x[j][3], 0x6420), __byte_perm(x[j][2], x[j][3], 0x7531));
    }
  }
}

// Copies the keys and values of each block to shared memory. Eight lanes take 128 bytes of a row, a warp four rows at a
// time: every third four, or, where it is to transpose them, those of every third slab of 16.
template <class C>
__device__ void load(const AttendLaunch& at, Shared<C>& shared) {
  constexpr bool kSlabs = C::kByteValues;
  constexpr int kFours = kSlabs ? C::kKeys / 16 * 4 : C::kKeys / 4, kMine = (kFours + kLoaderWarps - 1) / kLoaderWarps;
  static_assert(!kSlabs || kFours % (4 * kLoaderWarps) == 0);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - 1, 0), lane = threadIdx.x % 32;
  const int chunk = lane % 8, row_in_four = lane / 8;
  const int first = (kSlabs ? 16 : 4) * warp;  // row of this warp
  constexpr auto kRow = [](int i) {
    return kSlabs ? i / 4 * 16 * kLoaderWarps + i % 4 * 4 : 4 * kLoaderWarps * i;
  };                                                                       // from there
  const auto is_mine = [&](int i) { return first + kRow(i) < C::kKeys; };  // true but for the last of some warps
  // Where the lane's chunk of the first row goes; every other four rows flip bit 6.
  const uint32_t place = (first + row_in_four) * 128 + ((chunk ^ row_in_four ^ (first & 4)) << 4);
  constexpr int kMostPanels = C::kDim / 64;
  int bytes[kMostPanels];  // read of this lane's chunk: none past dim
  for (int p = 0; p < kMostPanels; ++p) bytes[p] = 64 * p + 8 * chunk < at.dim ? 16 : 0;
  const bool whole = at.dim == C::kDim;

  Ring<kTiles> ring;
  Ring<C::kLists> list;
  Ring<C::kStages> stage;
  int head = 0, block = 0, blocks = 0, plain = 0;  // of the tile: blocks in all, and those of real keys alone
  bool extra_keys = false;
  const uint8_t *k = nullptr, *v = nullptr;
  Ring<C::kRaw> raw;        // blocks of values as they are copied
  Ring<C::kStages> turned;  // and transposed
  int copied = 0;           // blocks that are not yet
  // A warp transposes what it copied itself.
  const auto transpose = [&] {
    if constexpr (C::kByteValues) {
      __syncwarp();
      barrier_wait(shared_address(&shared.v_empty[turned.slot()]), turned.parity() ^ 1);
      Ring<C::kRaw> oldest = raw;
      oldest.skip(2 * C::kRaw - copied);
#pragma unroll 1
      for (int slab = warp; slab < C::kKeys / 16; slab += kLoaderWarps) {
        transpose_slab<C::kDim>(shared_address(shared.raw[oldest.slot()]) + slab * 2048,
                                shared_address(shared.v[turned.slot()]) + slab * 16 * C::kDim);
      }
      fence_async_proxy();
      barrier_arrive(shared_address(&shared.v_full[turned.slot()]));
      __syncwarp();  // before the next copies
      turned.next();
      --copied;
    }
  };
  for (;; list.next()) {
    if (block == blocks) {
      barrier_wait(shared_address(&shared.tile_full[ring.slot()]), ring.parity());
      const AttendTile tile = shared.tiles[ring.slot()];
      barrier_arrive(shared_address(&shared.tile_empty[ring.slot()]));
      ring.next();
      if (tile.rows == 0) break;
      head = tile.head, extra_keys = tile.extra > 0;
      block = 0, blocks = block_count<C>(tile), plain = tile.keys / C::kKeys;
      k = C::kByteKeys ? at.eight.k.row(tile.head, 0) + 16 * chunk
                       : reinterpret_cast<const uint8_t*>(at.k.row(tile.head, 0) + 8 * chunk);
      v = C::kByteValues ? at.eight.v.row(tile.head, 0) + 16 * chunk
                         : reinterpret_cast<const uint8_t*>(at.v.row(tile.head, 0) + 8 * chunk);
    }
    barrier_wait(shared_address(&shared.list_full[list.slot()]), list.parity());
    const int32_t* keys = shared.keys + list.slot() * C::kKeys;
    int32_t key[kMine];  // read before any copy, behind which the compiler would leave them, each to be waited for
#pragma unroll
    for (int i = 0; i < kMine; ++i) key[i] = is_mine(i) ? keys[first + kRow(i) + row_in_four] : kNoKey;
    __syncwarp();
    barrier_arrive(shared_address(&shared.list_empty[list.slot()]));

    // `rows`: the block's keys or values, `step` bytes apart. Extra keys and padding can only be in the last blocks; with
    // bytes the extra keys' rows follow the real ones.
    const auto gather = [&]<bool kBytes>(std::bool_constant<kBytes>, uint32_t to, const uint8_t* rows, uint32_t step,
                                         const PerHead<const uint16_t>& extra) {
      to += place;
      const uint32_t flipped = to ^ 64;
      constexpr int kPanels = kBytes ? 1 : kMostPanels;
      if (block < plain && (kBytes ? C::kDim == 128 : whole)) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          if (!is_mine(i)) continue;
          const uint8_t* from = rows + uint64_t{step} * static_cast<uint32_t>(key[i]);
#pragma unroll
          for (int p = 0; p < kPanels; ++p) {
            copy_16((i % 2 == 0 ? to : flipped) + kRow(i) * 128 + p * C::kPanelBytes, from + 128 * p);
          }
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (!is_mine(i)) continue;
        const uint32_t row = kBytes && key[i] < 0 ? at.k_tokens + (key[i] ^ kExtraKey) : key[i];
        const uint8_t* from = rows + uint64_t{step} * row;
        if (!kBytes && key[i] < 0) {
          from = reinterpret_cast<const uint8_t*>(extra[head] + int64_t{key[i] ^ kExtraKey} * at.dim + 8 * chunk);
        }
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          copy_16((i % 2 == 0 ? to : flipped) + kRow(i) * 128 + p * C::kPanelBytes, key[i] == kNoKey ? rows : from + 128 * p,
                  key[i] == kNoKey ? 0
                  : kBytes         ? (16 * chunk < C::kDim ? 16 : 0)
                                   : bytes[p]);
        }
      }
    };
    using Bytes = std::true_type;
    using Halves = std::false_type;
    barrier_wait(shared_address(&shared.k_empty[stage.slot()]), stage.parity() ^ 1);
    const uint32_t to_keys = shared_address(shared.k[stage.slot()]);
    if constexpr (C::kByteKeys) {
      gather(Bytes(), to_keys, k, C::kDim, {});
    } else {
      gather(Halves(), to_keys, k, 2 * at.k.row_step, at.extra_k);
    }
    if (block >= plain && extra_keys) {
      if (chunk == 0) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          if (key[i] < 0 && key[i] != kNoKey) {
            shared.bias[stage.slot()][first + kRow(i) + row_in_four] = at.extra_bias[head][key[i] ^ kExtraKey] / at.scale;
          }
        }
      }
      wait_all_copies();  // ordinary stores are ordered by ordinary arrivals alone
      barrier_arrive(shared_address(&shared.k_full[stage.slot()]));
    } else {
      barrier_arrive_after_copies(shared_address(&shared.k_full[stage.slot()]));
    }
    if constexpr (C::kByteValues) {
      gather(Bytes(), shared_address(shared.raw[raw.slot()]), v, C::kDim, {});
      commit_copies();
      raw.next();
      if (++copied == C::kRaw) {
        wait_copies<C::kRaw - 1>();
        transpose();
      }
    } else {
      barrier_wait(shared_address(&shared.v_empty[stage.slot()]), stage.parity() ^ 1);
      gather(Halves(), shared_address(shared.v[stage.slot()]), v, 2 * at.v.row_step, at.extra_v);
      barrier_arrive_after_copies(shared_address(&shared.v_full[stage.slot()]));
    }
    stage.next();
    ++block;
  }
  wait_all_copies();
  while (copied > 0) transpose();
}

}  // namespace scope::cuda::attend90
