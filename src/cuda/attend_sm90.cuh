// What the warps of attend on Hopper share: sizes, and the shared memory through which they hand on tiles, keys and rows.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/attend.h"
#include "cuda/device/softmax_sm90.cuh"

namespace scope::cuda::attend90 {

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
  static constexpr int kWords = kByteValues && kDim == 128 ? 2 : 4;  // of a mask, that a lane lists at a time
  static_assert(kListKeys / 2 >= std::max(32 * kWords, kKeys), "what a lane can list, and a block begun");
};

inline constexpr int kAhead = 4;  // pieces of 32 kWords words of a mask under way: memory is far
inline constexpr int kTiles = 4;  // tiles announced to the consumers
inline constexpr int kLoaderWarps = 3, kLoaders = 32 * kLoaderWarps;
inline constexpr int32_t kExtraKey = std::numeric_limits<int32_t>::min();  // flag: an extra key
inline constexpr int32_t kNoKey = -1;

// Words of a mask that follow one another.
template <int kCount>
struct alignas(4 * kCount) Words {
  uint32_t at[kCount];
};

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
  float unit[C::kConsumers][64];          // of each query's logits, with bytes
  AttendTile tiles[kTiles];               // rows == 0: no more
  int32_t keys[C::kListKeys];             // a ring of blocks: a key, kExtraKey | an extra key, or kNoKey
  Words<C::kWords> ahead[kAhead][2][32];  // words of the mask and of the keys that every query sees, as they arrive
  float bias[C::kStages][C::kKeys];       // over scale; of extra keys only
  float2 parts[64];                       // a warpgroup's maximum and sum for each row of a shared tile
  uint64_t tile_full[kTiles], tile_empty[kTiles];
  uint64_t list_full[C::kLists], list_empty[C::kLists];
  uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
  uint64_t have_read[4 * C::kConsumers];  // a warp's lanes, before one of them releases what they read
};

// A tile with no key has one empty block.
template <class C>
__device__ int block_count(const AttendTile& tile) {
  return max(1, (tile.keys + tile.extra + C::kKeys - 1) / C::kKeys);
}

}  // namespace scope::cuda::attend90
