// attend on Hopper: one warp expands selections into lists of keys, three gather their rows, and three warpgroups multiply.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "cuda/attend.h"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/device/softmax_sm90.cuh"

namespace scope::cuda {

namespace {

// A block: warpgroup 0 feeds, the others each multiply 64 queries with a block of kKeys keys at a time.
template <DType kType_, int kDim_, int kKeys_, int kLists_, Products kProducts = Products::bf16>
struct Config {
  static constexpr DType kType = kType_;
  static constexpr int kDim = kDim_, kKeys = kKeys_;
  static constexpr int kLists = kLists_;  // blocks of keys that are listed ahead of the copies
  static constexpr bool kByteKeys = kProducts != Products::bf16, kByteValues = kProducts == Products::qkv8;
  static constexpr int kStages = kByteValues ? 3 : 4;  // blocks of keys and values in shared memory
  static constexpr int kRaw = 2;                       // blocks of values before they are transposed
  static constexpr int kConsumers = kTileRows90 / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // A panel: 128 bytes of each row, which are 64 channels, or in bytes all of them.
  static constexpr int kKeyPanels = kByteKeys ? 1 : kDim / 64, kValuePanels = kByteValues ? 1 : kDim / 64;
  static constexpr int kPanelBytes = kKeys * 128, kKeyBytes = kKeyPanels * kPanelBytes;
  static constexpr int kValueBytes = kByteValues ? kKeys * kDim : kValuePanels * kPanelBytes;
  static constexpr int kQueryPanelBytes = 64 * 128, kQueryBytes = kKeyPanels * kQueryPanelBytes;
  static constexpr int kSums = kDim / 2 * 128;  // floats of a warpgroup's outputs
  static constexpr int kListKeys = kLists * kKeys;
  static constexpr int kFeederRegisters = 56, kConsumerRegisters = 152;
  static_assert(kDim % 64 == 0 && kKeys % 16 == 0);
  static_assert(kListKeys >= 32 * 32 + kKeys, "what 32 words of a mask can hold, behind a block begun");
};

constexpr int kAhead = 8;  // 32-word pieces of a mask under way: at low density they are used up faster than memory answers
constexpr int kTiles = 4;  // tiles announced to the consumers
constexpr int kLoaderWarps = 3, kLoaders = 32 * kLoaderWarps;
constexpr int32_t kExtraKey = std::numeric_limits<int32_t>::min();  // flag: an extra key
constexpr int32_t kNoKey = -1;

// What values in bytes need besides: rows before they are transposed, and totals, because a product of e4m3 keeps 13 bits of
// a sum.
template <class C, bool = C::kByteValues>
struct ForByteValues {};
template <class C>
struct ForByteValues<C, true> {
  alignas(1024) uint8_t raw[C::kRaw][C::kPanelBytes];
  float4 totals[C::kConsumers][C::kDim / 8][128];
};

template <class C>
struct Shared : ForByteValues<C> {
  // The queries, and between two tiles, where there are no totals, the sums of a warpgroup that shares one.
  static constexpr int kQueries = C::kConsumers * C::kQueryBytes;
  alignas(1024) uint8_t q[C::kByteValues ? kQueries : std::max(kQueries, 4 * C::kSums)];
  alignas(1024) uint8_t k[C::kStages][C::kKeyBytes];
  alignas(1024) uint8_t v[C::kStages][C::kValueBytes];
  float unit[C::kConsumers][64];     // of each query's logits, with bytes
  AttendTile tiles[kTiles];          // rows == 0: no more
  int32_t keys[C::kListKeys];        // a ring of blocks: a key, kExtraKey | an extra key, or kNoKey
  uint32_t ahead[kAhead][2][32];     // words of the mask and of the keys that every query sees, as they arrive
  float bias[C::kStages][C::kKeys];  // over scale; of extra keys only
  float2 parts[64];                  // a warpgroup's maximum and sum for each row of a shared tile
  uint64_t tile_full[kTiles], tile_empty[kTiles];
  uint64_t list_full[C::kLists], list_empty[C::kLists];
  uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
};

// A tile with no key has one empty block.
template <class C>
__device__ int block_count(const AttendTile& tile) {
  return max(1, (tile.keys + tile.extra + C::kKeys - 1) / C::kKeys);
}

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
      for (; opened < blocks; ++opened, opening.next()) {
        barrier_wait(shared_address(&shared.list_empty[opening.slot()]), opening.parity() ^ 1);
      }
    };
    const auto close = [&](int blocks) {
      __syncwarp();
      for (; closed < blocks; ++closed, closing.next()) {
        barrier_arrive(shared_address(&shared.list_full[closing.slot()]));
      }
    };
    const auto wrap = [&](int i) { return i < C::kListKeys ? i : i - C::kListKeys; };
    const auto walk = [&](const uint32_t* mask, const uint32_t* also, int words, int bits, int32_t flag, int until) {
      const auto fetch = [&](int first) {
        const int i = first + lane, slot = first / 32 % kAhead;
        if (mask != nullptr && i < words) {
          copy_4(shared_address(&shared.ahead[slot][0][lane]), mask + i);
          if (also != nullptr) copy_4(shared_address(&shared.ahead[slot][1][lane]), also + i);
        }
        commit_copies();
      };
      const auto fetched = [&](int first) {  // each lane reads only what it copied itself
        const int i = first + lane, slot = first / 32 % kAhead;
        wait_copies<kAhead - 1>();
        if (i >= words) return 0u;
        if (mask == nullptr) return bits - 32 * i >= 32 ? ~0u : (1u << (bits - 32 * i)) - 1;
        return shared.ahead[slot][0][lane] | (also == nullptr ? 0u : shared.ahead[slot][1][lane]);
      };
      for (int i = 0; i < kAhead - 1; ++i) fetch(32 * i);
      for (int first = 0; done < until && first < words; first += 32) {
        fetch(first + 32 * (kAhead - 1));
        const uint32_t mine = fetched(first);
        int through = __popc(mine);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(~0u, through, step);
          if (lane >= step) through += before;
        }
        const int total = __shfl_sync(~0u, through, 31);
        if (total == 0) continue;
        open((done + total + C::kKeys - 1) / C::kKeys);
        // Each lane lists its own word, bit by bit: as many turns as the fullest has bits, which are few where little is
        // kept.
        const int32_t key = flag | 32 * (first + lane);
        const int turns = __reduce_max_sync(~0u, __popc(mine));
        uint32_t left = mine;
        int to = wrap(place + through - __popc(mine));
#pragma unroll 2
        for (int i = 0; i < turns; ++i) {
          store_if(left != 0, shared_address(shared.keys) + 4 * to, key + __ffs(left) - 1);
          left &= left - 1;
          to = wrap(to + 1);
        }
        done += total;
        place = wrap(place + total);
        close(done / C::kKeys);
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

// Writes a row's part that a quad holds: after a transpose each lane has eight consecutive channels of every 32.
// `mixed`: what is added, times `share`; null: nothing.
template <DType kType, int kCount>
__device__ void store_row(const float (&o)[kCount], int h, float scale, const float* mixed, float share, uint16_t* row,
                          int dim) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kCount / 16; ++g) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 16 * g + 4 * j + 2 * h;
      const int channel = 32 * g + 8 * j + 2 * lane;
      float2 x{o[i] * scale, o[i + 1] * scale};
      if (mixed != nullptr && channel < dim) {
        const float2 added = *reinterpret_cast<const float2*>(mixed + channel);
        x = {fmaf(share, added.x, x.x), fmaf(share, added.y, x.y)};
      }
      w[j] = pack<kType>(x.x, x.y);
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = lane & bit;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & bit) continue;
        const uint32_t got = __shfl_xor_sync(~0u, upper ? w[j] : w[j | bit], bit);
        (upper ? w[j] : w[j | bit]) = got;
      }
    }
    const int channel = 32 * g + 8 * lane;
    if (row != nullptr && channel < dim) *reinterpret_cast<uint4*>(row + channel) = {w[0], w[1], w[2], w[3]};
  }
}

// The same where a lane has four consecutive channels of every 16, and values are centre + unit * byte: no transpose.
// kept: how much of the row is not mixed in.
template <DType kType, int kCount>
__device__ void store_row_of_bytes(const float (&o)[kCount], int h, float scale, float kept, const float* unit,
                                   const float* centre, const float* mixed, float share, uint16_t* row, int dim) {
  if (row == nullptr) return;
#pragma unroll
  for (int g = 0; g < kCount / 8; ++g) {
    const int channel = 16 * g + 4 * (threadIdx.x % 4), i = 8 * g + 2 * h;
    if (channel >= dim) return;
    const float4 times = *reinterpret_cast<const float4*>(unit + channel);
    const float4 middle = *reinterpret_cast<const float4*>(centre + channel);
    float4 x{fmaf(o[i] * scale, times.x, kept * middle.x), fmaf(o[i + 4] * scale, times.y, kept * middle.y),
             fmaf(o[i + 1] * scale, times.z, kept * middle.z), fmaf(o[i + 5] * scale, times.w, kept * middle.w)};
    if (mixed != nullptr) {
      const float4 added = *reinterpret_cast<const float4*>(mixed + channel);
      x = {fmaf(share, added.x, x.x), fmaf(share, added.y, x.y), fmaf(share, added.z, x.z), fmaf(share, added.w, x.w)};
    }
    *reinterpret_cast<uint2*>(row + channel) = {pack<kType>(x.x, x.y), pack<kType>(x.z, x.w)};
  }
}

// Moves sums that have grown long into the totals, each with the maximum that it was made under.
template <class C, bool = C::kByteValues>
struct Promotion {
  __device__ void after_block(float (&)[C::kDim / 2], const float (&)[2], const float (&)[2], Shared<C>&, int) {}
  __device__ void finish(float (&)[C::kDim / 2], const float (&)[2], const float (&)[2], Shared<C>&, int) {}
  __device__ float* sums(Shared<C>& shared) const { return reinterpret_cast<float*>(shared.q); }
};
template <class C>
struct Promotion<C, true> {
  static constexpr int kSpan = 4;  // blocks after which a sum is long: what it loses, always towards zero, grows with it
  int blocks = 0;
  float high[2];  // that the totals were made under

  __device__ void after_block(float (&o)[C::kDim / 2], const float (&now)[2], const float (&unit)[2], Shared<C>& shared,
                              int group) {
    if (++blocks % kSpan != 0) return;
    if (blocks > kSpan) add(o, now, unit, shared, group);
    float4(*totals)[128] = shared.totals[group];
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
      totals[i][threadIdx.x % 128] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
      for (int j = 0; j < 4; ++j) o[4 * i + j] = 0;
    }
    high[0] = now[0], high[1] = now[1];
  }
  __device__ void finish(float (&o)[C::kDim / 2], const float (&now)[2], const float (&unit)[2], Shared<C>& shared,
                         int group) {
    if (blocks >= kSpan) add(o, now, unit, shared, group);
  }
  // The warpgroups that share a tile hand their sums over where their totals were.
  __device__ float* sums(Shared<C>& shared) const { return reinterpret_cast<float*>(shared.totals); }

 private:
  __device__ void add(float (&o)[C::kDim / 2], const float (&now)[2], const float (&unit)[2], const Shared<C>& shared,
                      int group) const {
    float factor[2];
    for (int h = 0; h < 2; ++h) factor[h] = high[h] == -kInfinity ? 0.0f : exp2_approx((high[h] - now[h]) * unit[h]);
    const float4(*totals)[128] = shared.totals[group];
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
      const float4 four = totals[i][threadIdx.x % 128];
      o[4 * i] = fmaf(four.x, factor[0], o[4 * i]), o[4 * i + 1] = fmaf(four.y, factor[0], o[4 * i + 1]);
      o[4 * i + 2] = fmaf(four.z, factor[1], o[4 * i + 2]), o[4 * i + 3] = fmaf(four.w, factor[1], o[4 * i + 3]);
    }
  }
};

// Copies a warpgroup's queries, rows first .. first + 63 of the tile; those past its end are zero.
template <class C>
__device__ void load_queries(const AttendLaunch& at, const AttendTile& tile, int first, uint32_t to, float* unit) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
  to += thread / 8 * 128 + ((chunk ^ thread / 8 % 8) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = first + thread / 8 + 16 * i;
    const bool real = r < tile.rows;
    if constexpr (C::kByteKeys) {
      const int place = tile.begin + (real ? r : 0);
      copy_16(to + i * 2048, at.eight.q.row(tile.head, place) + 16 * chunk, real && 16 * chunk < C::kDim ? 16 : 0);
      if (chunk == 0) copy_4(shared_address(unit + thread / 8 + 16 * i), at.eight.q_unit[tile.head] + place);
    } else {
      const int64_t token = !real ? 0 : at.order ? at.order[tile.head][tile.begin + r] : tile.begin + r;
      const uint16_t* from = at.q.row(tile.head, token) + 8 * chunk;
#pragma unroll
      for (int p = 0; p < C::kKeyPanels; ++p) {
        copy_16(to + p * C::kQueryPanelBytes + i * 2048, from + 64 * p, real && 64 * p + 8 * chunk < at.dim ? 16 : 0);
      }
    }
  }
}

// Multiplies: 64 queries of each tile with all its keys, or, where a tile has no more queries, with a share of them.
template <class C>
__device__ void consume(const AttendLaunch& at, Shared<C>& shared) {
  constexpr int kKeys = C::kKeys;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float unit[2] = {at.scale * kLog2e, at.scale * kLog2e};
  const uint64_t q_at = panel_descriptor(shared_address(shared.q) + group * C::kQueryBytes, 16);
  const uint64_t k_at = panel_descriptor(shared_address(shared.k), 16);
  const uint64_t v_at = C::kByteValues ? core_descriptor(shared_address(shared.v), 16 * C::kDim)
                                       : panel_descriptor(shared_address(shared.v), C::kPanelBytes);
  Ring<C::kStages> k;
  Ring<kTiles> ring;

  const auto await_tile = [&] { barrier_wait(shared_address(&shared.tile_full[ring.slot()]), ring.parity()); };
  const auto last_slot = [&] { return ring.slot() == 0 ? kTiles - 1 : ring.slot() - 1; };
  const auto release_tile = [&] { barrier_arrive(shared_address(&shared.tile_empty[last_slot()])); };
  // Queries for one warpgroup alone are shared: the warpgroups take blocks of keys in turn, and the first adds up.
  const auto is_split = [&](const AttendTile& tile) { return tile.rows <= 64; };
  const auto fetch_queries = [&](const AttendTile& tile) {
    const int first = is_split(tile) ? 0 : 64 * group;
    if (first < tile.rows) {
      load_queries<C>(at, tile, first, shared_address(shared.q) + group * C::kQueryBytes, shared.unit[group]);
    }
  };
  await_tile();
  fetch_queries(shared.tiles[0]);

  for (;;) {
    if (shared.tiles[ring.slot()].rows == 0) return;
    ring.next();
    const AttendTile& tile = shared.tiles[last_slot()];
    const bool split = is_split(tile);
    const int blocks = block_count<C>(tile);
    const auto release = [&](uint64_t* barrier) {
      if (lane == 0) barrier_arrive(shared_address(barrier), split ? C::kConsumers : 1);
    };
    if (!split && 64 * group >= tile.rows) {  // idle, but in step: parities tell only neighbouring phases apart
      for (int b = 0; b < blocks; ++b, k.next()) {
        barrier_wait(shared_address(&shared.k_full[k.slot()]), k.parity());
        release(&shared.k_empty[k.slot()]);
        barrier_wait(shared_address(&shared.v_full[k.slot()]), k.parity());
        release(&shared.v_empty[k.slot()]);
      }
      release_tile();
      await_tile();
      fetch_queries(shared.tiles[ring.slot()]);
      continue;
    }
    wait_all_copies();
    fence_async_proxy();
    named_sync(1 + group, 128);

    Ring<C::kStages> v = k;
    float o[C::kDim / 2], s[kKeys / 2];
    int32_t bytes[kKeys / 2];  // logits before they are floats
    uint32_t p[C::kByteValues ? kKeys / 32 : kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) o[i] = 0;
    using Range = std::conditional_t<C::kByteValues, E4m3, SixteenBits>;
    Softmax<Range> softmax;
    if constexpr (C::kByteKeys) {
      for (int h = 0; h < 2; ++h) unit[h] = shared.unit[group][16 * warp + 8 * h + lane / 4] * (at.scale * kLog2e);
    }
    Promotion<C> promotion;

    const auto start_qk = [&] {
      if constexpr (C::kByteKeys) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) bytes[i] = __float_as_int(kWhole);
      }
      barrier_wait(shared_address(&shared.k_full[k.slot()]), k.parity());
      fence_async_proxy();
      wgmma_begin();
      const uint64_t b = k_at + k.slot() * (C::kKeyBytes >> 4);
      if constexpr (C::kByteKeys) {
#pragma unroll
        for (int i = 0; i < C::kDim / 32; ++i) wgmma_s8(bytes, q_at + (i * 32 >> 4), b + (i * 32 >> 4));
      } else {
        multiply_rows<C::kType, C::kDim, C::kQueryPanelBytes, C::kPanelBytes>(s, q_at, b);
      }
      wgmma_commit();
    };
    const auto start_pv = [&] {
      barrier_wait(shared_address(&shared.v_full[v.slot()]), v.parity());
      fence_async_proxy();
      wgmma_begin();
      const uint64_t b = v_at + v.slot() * (C::kValueBytes >> 4);
      if constexpr (C::kByteValues) {
#pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) wgmma_e4m3(o, p[i], b + (i * 32 * C::kDim >> 4));
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) wgmma_rs<C::kType>(o, p[i], b + (i * 2048 >> 4));
      }
      wgmma_commit();
    };
    const auto finish_qk = [&](int b) {
      if constexpr (C::kByteKeys) {
        pin(bytes);
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = __int_as_float(bytes[i]);
      } else {
        pin(s);
      }
      if (b * kKeys + kKeys > tile.keys) {  // extra keys and padding
        const int column = 2 * (lane % 4), left = tile.keys - b * kKeys;
        float per_unit[2] = {1, 1};
        if constexpr (C::kByteKeys) {
          for (int h = 0; h < 2; ++h) per_unit[h] = __fdividef(at.scale * kLog2e, unit[h]);
        }
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int j = i / 4 * 8 + i % 2 + column;
          if (j >= left + tile.extra) {
            s[i] = -kInfinity;
          } else if (j >= left) {
            s[i] = fmaf(shared.bias[k.slot()][j], per_unit[i / 2 % 2], s[i]);
          }
        }
        __syncwarp();
      }
      release(&shared.k_empty[k.slot()]);
      split ? k.skip(C::kConsumers) : k.next();
      softmax.block(s, unit);
    };
    const auto pack_p = [&] {
      if constexpr (C::kByteValues) {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          const int j = i / 2 * 8 + i % 2 * 2;  // of every 16 keys a thread has four, and two rows
          p[i / 4][i % 4] = pack_e4m3(s[j], s[j + 1], s[j + 4], s[j + 5]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) p[i / 4][i % 4] = pack<C::kType>(s[2 * i], s[2 * i + 1]);
      }
    };
    const auto finish_pv = [&] {
      wgmma_wait<0>();
      pin(o);
      release(&shared.v_empty[v.slot()]);
      split ? v.skip(C::kConsumers) : v.next();
    };

    const int first = split ? group : 0, step = split ? C::kConsumers : 1;
    if (split) k.skip(group), v.skip(group);
    if (first < blocks) {
      start_qk();
      wgmma_wait<0>();
      finish_qk(first);
      pack_p();
    }
    for (int b = first + step; b < blocks; b += step) {
      start_qk();
      start_pv();
      wgmma_wait<1>();
      finish_qk(b);
      finish_pv();
      if (__any_sync(~0u, softmax.factor[0] != 1.0f || softmax.factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) o[i] *= softmax.factor[i / 2 % 2];
      }
      pack_p();
      promotion.after_block(o, softmax.high, unit, shared, group);
    }

    // The next queries and this tile's places arrive while the last product runs.
    await_tile();
    if (!split) {
      named_sync(1 + group, 128);  // all four warps have read their queries
      fetch_queries(shared.tiles[ring.slot()]);
    }
    int32_t token[2];
    for (int h = 0; h < 2; ++h) {
      const int row = (split ? 0 : 64 * group) + 16 * warp + 8 * h + lane / 4;
      token[h] = row >= tile.rows ? kNoKey : at.order ? at.order[tile.head][tile.begin + row] : tile.begin + row;
    }
    if (first < blocks) {
      start_pv();
      finish_pv();
      promotion.finish(o, softmax.high, unit, shared, group);
    }
    for (int h = 0; h < 2; ++h) softmax.sum[h] = quad_sum(softmax.sum[h]);

    if (split) {
      // From the block after this warpgroup's last to the next tile's first, which may be behind it.
      const int taken = (blocks - group + C::kConsumers - 1) / C::kConsumers;
      k.skip(2 * C::kStages + blocks - group - C::kConsumers * taken);
      float* sums = promotion.sums(shared);  // [kDim / 2][128]
      float2* parts = shared.parts + 16 * warp + lane / 4;
      named_sync(8, 128 * C::kConsumers);  // the queries have been read
      for (int other = 1; other < C::kConsumers; ++other) {
        if (group == other) {
#pragma unroll
          for (int i = 0; i < C::kDim / 2; ++i) sums[128 * i + threadIdx.x % 128] = o[i];
          if (lane % 4 == 0) {
            for (int h = 0; h < 2; ++h) parts[8 * h] = {softmax.high[h], softmax.sum[h]};
          }
        }
        named_sync(8, 128 * C::kConsumers);
        if (group == 0) {
          float ours[2], theirs[2];
          for (int h = 0; h < 2; ++h) {
            const float2 part = parts[8 * h];
            const float high = fmaxf(softmax.high[h], part.x), base = high == -kInfinity ? 0.0f : high;
            ours[h] = exp2_approx((softmax.high[h] - base) * unit[h]);
            theirs[h] = exp2_approx((part.x - base) * unit[h]);
            softmax.high[h] = high;
            softmax.sum[h] = softmax.sum[h] * ours[h] + part.y * theirs[h];
          }
#pragma unroll
          for (int i = 0; i < C::kDim / 2; ++i) {
            o[i] = o[i] * ours[i / 2 % 2] + sums[128 * i + threadIdx.x % 128] * theirs[i / 2 % 2];
          }
        }
        named_sync(8, 128 * C::kConsumers);
      }
      fetch_queries(shared.tiles[ring.slot()]);
    }
    const float share = at.mix_share ? at.mix_share[tile.head][tile.group] : 0.0f;
    const float* mixed = share > 0 ? at.mix_row[tile.head] + int64_t{tile.group} * at.dim : nullptr;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (split && group != 0) break;
      const float sum = softmax.sum[h];
      uint16_t* row = token[h] == kNoKey ? nullptr : at.out.row(tile.head, token[h]);
      const float scale = sum == 0.0f ? 0.0f : (1 - share) / sum;
      if constexpr (C::kByteValues) {
        store_row_of_bytes<C::kType>(o, h, scale, sum == 0.0f ? 0.0f : 1 - share, at.eight.v_unit[tile.head],
                                     at.eight.v_centre[tile.head], mixed, share, row, at.dim);
      } else {
        store_row<C::kType>(o, h, scale, mixed, share, row, at.dim);
      }
      if (at.lse && row != nullptr && lane % 4 == 0) {
        float high = softmax.high[h];
        if constexpr (C::kByteKeys) {
          high -= kWhole;
          const int place = tile.begin + (split ? 0 : 64 * group) + 16 * warp + 8 * h + lane / 4;
          high = fmaf(high, at.eight.q_unit[tile.head][place], at.eight.q_shift[tile.head][place]);
        }
        at.lse[tile.head][token[h]] = high * at.scale + (logf(sum) - Range::kLift / kLog2e) - log1pf(-share);
      }
    }
    release_tile();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attend_kernel(const __grid_constant__ AttendLaunch at) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTiles; ++i) {
      // Every thread arrives for what it wrote or read: it costs nothing here, and race checkers can follow it.
      barrier_init(shared_address(&shared.tile_full[i]), 1);
      barrier_init(shared_address(&shared.tile_empty[i]), kLoaders + 128 * C::kConsumers);
    }
    for (int i = 0; i < C::kLists; ++i) {
      barrier_init(shared_address(&shared.list_full[i]), 32);
      barrier_init(shared_address(&shared.list_empty[i]), kLoaders);
    }
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), kLoaders);
      barrier_init(shared_address(&shared.v_full[i]), kLoaders);
      barrier_init(shared_address(&shared.k_empty[i]), 4 * C::kConsumers);
      barrier_init(shared_address(&shared.v_empty[i]), 4 * C::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    shrink_registers<C::kFeederRegisters>();
    threadIdx.x < 32 ? expand<C>(at, shared) : load<C>(at, shared);
  } else {
    grow_registers<C::kConsumerRegisters>();
    consume<C>(at, shared);
  }
}

template <class C>
void launch_kernel(const Exec& exec, const AttendLaunch& at) {
  static_assert(sizeof(Shared<C>) <= 227 * 1024);
  const int blocks = std::min(exec.device->multiprocessors, at.most_tiles);
  if (blocks > 0) launch(exec, "attend_sm90", attend_kernel<C>, blocks, C::kThreads, sizeof(Shared<C>), at);
}

template <DType kType>
void launch_type(const Exec& exec, const AttendLaunch& at) {
  // Blocks of as many keys as the registers hold: spilled accumulators would also serialise the products.
  const bool narrow = at.dim <= 64;
  switch (at.products) {
    case Products::bf16:
      return narrow ? launch_kernel<Config<kType, 64, 96, 14>>(exec, at)
                    : launch_kernel<Config<kType, 128, 80, 16>>(exec, at);
    case Products::qk8:
      return narrow ? launch_kernel<Config<kType, 64, 96, 14, Products::qk8>>(exec, at)
                    : launch_kernel<Config<kType, 128, 80, 16, Products::qk8>>(exec, at);
    case Products::qkv8:
      return narrow ? launch_kernel<Config<kType, 64, 96, 14, Products::qkv8>>(exec, at)
                    : launch_kernel<Config<kType, 128, 96, 14, Products::qkv8>>(exec, at);
  }
}

}  // namespace

void attend_sm90(const Exec& exec, const AttendLaunch& at) {
  if (at.dtype == DType::bf16) {
    launch_type<DType::bf16>(exec, at);
  } else {
    launch_type<DType::f16>(exec, at);
  }
}

}  // namespace scope::cuda
