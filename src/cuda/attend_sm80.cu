// The portable attend kernel: FlashAttention-2's loop with mma.sync over keys gathered by cp.async, for sm_80 and later, in
// 16 bits or with queries and keys in bytes.
#include <algorithm>
#include <type_traits>

#include "cuda/attend.h"
#include "cuda/device/bundle.cuh"

namespace scope::cuda {

namespace {

// Four warps; warp w has rows 16 w .. 16 w + 15 of each half of 64 rows. A block waits for each load at once: what hides
// the wait is the other block, or two, on the same multiprocessor.
constexpr int kThreads = 128;
constexpr int kHalf = 64;  // query rows
static_assert(kTileRows80 == 2 * kHalf);
constexpr int kKeys = 64;       // keys per step
constexpr int kRing = 2048;     // key indices listed ahead: at most 1024 at a time, and the keys of two steps
constexpr float kSlack = 8.0f;  // a row's maximum may lag by this much (log2), which spares nearly all rescaling

// A tile and the indices of its keys, first the selected ones, then the extra ones.
struct KeyList {
  alignas(16) int32_t ring[kRing];
  uint32_t words[32], kept[32];  // the next ones, of mask and keep
  AttendTile tile;
  const char *k, *v;  // rows of the tile's head; with bytes, extra keys follow the real ones in k
  int32_t made;       // positions so far
  int32_t taken;      // mask words so far; the words of the extra mask follow at a multiple of 32

  __device__ int32_t& operator[](int position) { return ring[static_cast<unsigned>(position) % kRing]; }
  __device__ const int32_t& operator[](int position) const { return ring[static_cast<unsigned>(position) % kRing]; }
};

// Bytes of a row in shared memory. Chunk c (16 bytes) of row r is stored at chunk c xor (r mod 8), which spares every access
// bank conflicts, and wants 8 chunks or more.
template <int kDim, bool kBytes>
inline constexpr int kRow = kBytes ? 128 : 2 * kDim;

template <int kDim, int kHalves, bool kBytes>
struct Shared {
  uint8_t q[kHalves * kHalf][kRow<kDim, kBytes>];
  uint8_t k[kKeys][kRow<kDim, kBytes>], v[kKeys][kRow<kDim, false>];
  float unit[kBytes ? kHalves * kHalf : 1];  // with bytes: of each query's sums
  KeyList list;
};

// threadIdx.x, read anew. What follows from it is then computed where it is used: the accumulators leave no registers to
// keep it in.
__device__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  __builtin_assume(thread >= 0 && thread < kThreads);
  return thread;
}

// Starts copying a warp's next 32 words, one per lane.
template <bool kDense>
__device__ void fetch_words(const AttendLaunch& at, KeyList& list) {
  const AttendTile& tile = list.tile;
  const int words = kDense ? 0 : static_cast<int>(at.words), extra_words = (at.extra_count + 31) / 32;
  const int lane = thread_index() % 32, mine = list.taken + lane, extra = mine - (words + 31) / 32 * 32;
  const bool selected = mine < words;
  const uint32_t* from = selected ? at.mask[tile.head] + tile.group * at.words + mine
                                  : at.extra_mask[tile.head] + int64_t{tile.group} * extra_words + extra;
  copy_async_4(shared_address(&list.words[lane]), from, selected || (extra >= 0 && extra < extra_words));
  copy_async_4(shared_address(&list.kept[lane]), at.keep + mine, selected && at.keep != nullptr);
}

// One warp lists the first `needed` keys or more, as far as there are any, 32 words at a time. The words that a call
// fetches last are here by the next call, because every step waits for all copies.
template <bool kDense>
__device__ void extend(const AttendLaunch& at, KeyList& list, int needed) {
  const int rounded = kDense ? 0 : (static_cast<int>(at.words) + 31) / 32 * 32;
  const int lane = thread_index() % 32;
  needed = min(needed, list.tile.keys + list.tile.extra);
  for (bool here = true; list.made < needed && list.taken < rounded + (at.extra_count + 31) / 32; here = false) {
    if (!here) copy_async_wait();
    const int made = list.made, taken = list.taken;
    uint32_t bits = list.words[lane] | list.kept[lane];
    const int count = __popc(bits);
    int end = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += below;
    }
    const int base = 32 * (lane + (taken < rounded ? taken : taken - rounded));
    for (int p = made + end - count; bits != 0; bits &= bits - 1) list[p++] = base + __ffs(bits) - 1;
    __syncwarp();
    if (lane == 31) {
      list.taken = taken + 32;
      list.made = made + end;
    }
    __syncwarp();
    fetch_words<kDense>(at, list);
  }
}

// Starts copying step `block` of K or V to the shared address `to`: each thread a chunk of some consecutive keys.
template <int kDim, bool kDense, bool kValues, bool kBytes>
__device__ void load(const AttendLaunch& at, const KeyList& list, int block, uint32_t to) {
  constexpr int kWide = kRow<kDim, kBytes>, kChunks = kWide / 16, kRows = kKeys * kChunks / kThreads;
  const AttendTile& tile = list.tile;
  const int thread = thread_index(), row = thread / kChunks * kRows, chunk = thread % kChunks;
  const int first = block * kKeys + row;
  const bool used = kBytes ? 16 * chunk < kDim : 8 * chunk < at.dim;
  const char* rows = (kValues ? list.v : list.k) + 16 * chunk;
  const int64_t pitch = kBytes ? at.eight.k.row_step : (kValues ? at.v.row_step : at.k.row_step) * 2;
  to += row * kWide + (chunk ^ (row % 8)) * 16;
  const auto copy = [&](int j, const void* from, bool valid) { copy_async_16((to ^ (j * 16)) + j * kWide, from, valid); };
  if (kKeys * (block + 1) <= tile.keys) {
    const auto copy_key = [&](int j, int key) { copy(j, rows + pitch * static_cast<uint32_t>(key), used); };
#pragma unroll
    for (int j = 0; j < kRows; j += 4) {
      int4 key{first + j, first + j + 1, first + j + 2, first + j + 3};
      if (!kDense) key = *reinterpret_cast<const int4*>(&list[first + j]);
      copy_key(j, key.x);
      copy_key(j + 1, key.y);
      copy_key(j + 2, key.z);
      copy_key(j + 3, key.w);
    }
  } else {
    const char* extra = kBytes ? rows + at.k_tokens * pitch
                               : reinterpret_cast<const char*>((kValues ? at.extra_v : at.extra_k)[tile.head] + 8 * chunk);
    const int64_t extra_pitch = kBytes ? pitch : at.dim * 2;
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      const int p = first + j;
      const int64_t key = kDense && p < tile.keys ? p : list[p];
      const char* from = p < tile.keys ? rows + key * pitch : extra + key * extra_pitch;
      const bool valid = used && p < tile.keys + tile.extra;
      copy(j, valid ? from : rows, valid);
    }
  }
}

// Fragments: a warp's 16 x 8 tile of f32 is float[4] per lane, entry 2 r + e being row lane / 4 + 8 r, column
// 2 (lane % 4) + e.

// s += q k^T for this warp's 16 rows of each half. Fragments of bytes are those of 16 bits with two channels in the place of
// one, so both load alike.
template <class T, int kDim, int kHalves, class Sum>
__device__ void multiply_keys(Sum (&s)[kHalves][kKeys / 8][4], uint32_t q, uint32_t k) {
  constexpr bool kBytes = std::is_same_v<Sum, int32_t>;
  constexpr int kWide = kRow<kDim, kBytes>;
  const int thread = thread_index(), lane = thread % 32, q_row = lane % 16, k_row = lane % 8 + lane / 16 * 8;
  q += (thread / 32 * 16 + q_row) * kWide + ((lane / 16) ^ (q_row % 8)) * 16;
  k += k_row * kWide + ((lane / 8 % 2) ^ (k_row % 8)) * 16;
#pragma unroll
  for (int c = 0; c < kDim / (kBytes ? 32 : 16); ++c) {
    uint32_t a[kHalves][4];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) load_matrix_x4(a[h], (q ^ (c * 32)) + h * kHalf * kWide);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrix_x4(b, (k ^ (c * 32)) + n * 16 * kWide);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kBytes) {
            mma_16x8x32(s[h][2 * n + i], a[h], b[2 * i], b[2 * i + 1]);
          } else {
            mma_16x8x16<T>(s[h][2 * n + i], a[h], b[2 * i], b[2 * i + 1]);
          }
        }
      }
    }
  }
}

// o += weights v.
template <class T, int kDim, int kHalves>
__device__ void multiply_values(float (&o)[kHalves][kDim / 8][4], const uint32_t (&weights)[kHalves][kKeys / 16][4],
                                uint32_t v) {
  const int lane = thread_index() % 32, row = lane % 16;
  v += row * kDim * 2 + ((lane / 16) ^ (row % 8)) * 16;
#pragma unroll
  for (int c = 0; c < kKeys / 16; ++c) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, (v ^ (d * 32)) + c * 16 * kDim * 2);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        mma_16x8x16<T>(o[h][2 * d], weights[h][c], b[0], b[1]);
        mma_16x8x16<T>(o[h][2 * d + 1], weights[h][c], b[2], b[3]);
      }
    }
  }
}

// The step with the end of the selected keys, and those after it: extra keys have a bias, and padding has no weight.
template <int kHalves>
__device__ void add_bias(float (&s)[kHalves][kKeys / 8][4], const AttendLaunch& at, const KeyList& list, int block) {
  const AttendTile& tile = list.tile;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int p = block * kKeys + 8 * n + 2 * (thread_index() % 4) + e;
      const bool padding = p >= tile.keys + tile.extra;
      float bias = 0;
      if (p >= tile.keys && !padding) bias = __fdividef(at.extra_bias[tile.head][list[p]], at.scale);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        s[h][n][e] = padding ? -INFINITY : s[h][n][e] + bias;
        s[h][n][2 + e] = padding ? -INFINITY : s[h][n][2 + e] + bias;
      }
    }
  }
}

// One half's scores become weights, exp2 of their distance from the row's maximum, packed as fragments of A.
template <class T, int kDim>
__device__ void softmax(const float (&s)[kKeys / 8][4], float unit, float (&top)[2], float (&sum)[2],
                        uint32_t (&weights)[kKeys / 16][4], float (&o)[kDim / 8][4]) {
  float factor[2] = {1, 1};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = s[0][2 * r];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if ((most - top[r]) * unit > kSlack) {
      factor[r] = exp2_fast((top[r] - most) * unit);
      top[r] = most;
    }
  }
  if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] *= factor[r];
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[d][e] *= factor[e / 2];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float base = top[r] == -INFINITY ? 0 : top[r] * unit;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float x = exp2_fast(fmaf(s[n][2 * r], unit, -base));
      const float y = exp2_fast(fmaf(s[n][2 * r + 1], unit, -base));
      sum[r] += x + y;
      weights[n / 2][n % 2 * 2 + r] = pack<T>(x, y);
    }
  }
}

template <class T, int kDim, int kHalves, bool kDense, bool kBytes>
__device__ void attend_tile(const AttendLaunch& at, Shared<kDim, kHalves, kBytes>& shared) {
  constexpr int kWide = kRow<kDim, kBytes>;
  KeyList& list = shared.list;
  const AttendTile& tile = list.tile;
  const uint32_t q = shared_address(shared.q), k = shared_address(shared.k), v = shared_address(shared.v);
  const auto query = [&](int row) -> int64_t { return at.order ? at.order[tile.head][tile.begin + row] : tile.begin + row; };
  for (int i = thread_index(); i < kHalves * kHalf * kWide / 16; i += kThreads) {
    const int row = i / (kWide / 16), chunk = i % (kWide / 16);
    const bool valid = row < tile.rows && (kBytes ? 16 * chunk < kDim : 8 * chunk < at.dim);
    const void* from = at.q.base;
    if constexpr (kBytes) {
      if (valid) from = at.eight.q.row(tile.head, tile.begin + row) + 16 * chunk;
      if (chunk == 0) shared.unit[row] = valid ? at.eight.q_unit[tile.head][tile.begin + row] : 0;
    } else if (valid) {
      from = at.q.row(tile.head, query(row)) + 8 * chunk;
    }
    copy_async_16(q + row * kWide + (chunk ^ (row % 8)) * 16, from, valid);
  }
  const int blocks = (tile.keys + tile.extra + kKeys - 1) / kKeys;
  if (thread_index() < 32) {
    fetch_words<kDense>(at, list);
    copy_async_wait();
    extend<kDense>(at, list, kKeys);
  }
  __syncthreads();
  if (blocks > 0) load<kDim, kDense, false, kBytes>(at, list, 0, k);

  const float unit = at.scale * 1.44269504088896f;  // scores in units of log 2
  const auto row_of = [](int h, int r) {
    const int thread = thread_index();
    return h * kHalf + thread / 32 * 16 + 8 * r + thread % 32 / 4;
  };
  float o[kHalves][kDim / 8][4] = {}, sum[kHalves][2] = {}, top[kHalves][2];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) top[h][0] = top[h][1] = -INFINITY;
  for (int block = 0; block < blocks; ++block) {
    copy_async_wait();
    __syncthreads();  // K is here, and V's place is free
    load<kDim, kDense, true, false>(at, list, block, v);
    if (thread_index() < 32) extend<kDense>(at, list, (block + 2) * kKeys);
    const bool active = kHalves == 2 || thread_index() / 32 * 16 < tile.rows;  // this warp has rows
    uint32_t weights[kHalves][kKeys / 16][4];
    if (active) {
      float s[kHalves][kKeys / 8][4] = {};
      if constexpr (kBytes) {
        int32_t sums[kHalves][kKeys / 8][4] = {};
        multiply_keys<T, kDim>(sums, q, k);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const float units[2] = {shared.unit[row_of(h, 0)], shared.unit[row_of(h, 1)]};
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) {
            s[h][i / 4][i % 4] = static_cast<float>(sums[h][i / 4][i % 4]) * units[i / 2 % 2];
          }
        }
      } else {
        multiply_keys<T, kDim>(s, q, k);
      }
      if (kKeys * (block + 1) > tile.keys) add_bias(s, at, list, block);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) softmax<T, kDim>(s[h], unit, top[h], sum[h], weights[h], o[h]);
    }

    copy_async_wait();
    __syncthreads();  // V is here, and K's place is free
    if (block + 1 < blocks) load<kDim, kDense, false, kBytes>(at, list, block + 1, k);
    if (active) multiply_values<T, kDim>(o, weights, v);
  }
  copy_async_wait();  // a tile without keys has only waited for them, not for Q

  const int lane = thread_index() % 32;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    float all[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      all[r] = sum[h][r];
      all[r] += __shfl_xor_sync(0xffffffffu, all[r], 1);
      all[r] += __shfl_xor_sync(0xffffffffu, all[r], 2);
    }
    const Bundle<T> bundle(at, Mixed(at, tile, -1).share, all, row_of(h, 0) < tile.rows, row_of(h, 1) < tile.rows);
    uint16_t* out[2];  // null: there is no such query
    const float* added[2];
    float scale[2], share = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(h, r);
      const int64_t token = row < tile.rows ? query(row) : -1;
      const Mixed mixed(at, tile, static_cast<int32_t>(token));
      share = mixed.share;
      out[r] = token < 0 ? nullptr : at.out.row(tile.head, token) + 2 * (lane % 4);
      added[r] = mixed.row == nullptr ? nullptr : mixed.row + 2 * (lane % 4);
      scale[r] = all[r] == 0 ? 0 : bundle.kept[r] / all[r];
      if (at.lse && token >= 0 && lane % 4 == 0) {
        const float shift = kBytes ? at.eight.q_shift[tile.head][tile.begin + row] : 0;
        at.lse[tile.head][token] = (top[h][r] + shift) * at.scale + logf(all[r]) - log1pf(-share);
      }
    }
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      if (8 * d >= at.dim) break;
      const float2 column = bundle.columns(o[h][d][0], o[h][d][1], o[h][d][2], o[h][d][3]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2 x{o[h][d][2 * r] * scale[r] - bundle.of(r, column.x), o[h][d][2 * r + 1] * scale[r] - bundle.of(r, column.y)};
        if (added[r] != nullptr) x = {fmaf(share, added[r][8 * d], x.x), fmaf(share, added[r][8 * d + 1], x.y)};
        if (out[r] != nullptr) *reinterpret_cast<uint32_t*>(out[r] + 8 * d) = pack<T>(x.x, x.y);
      }
    }
  }
}

// Takes the tiles of this many halves and leaves the others to another launch: one kernel for both spills registers.
template <class T, int kDim, int kHalves, bool kDense, bool kBytes>
__global__ void __launch_bounds__(kThreads, kHalves == 2 ? 2 : 3) attend_kernel(const __grid_constant__ AttendLaunch at) {
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<Shared<kDim, kHalves, kBytes>*>(memory);
  while (true) {
    __syncthreads();  // every warp is done with the tile before
    if (threadIdx.x == 0) {
      AttendTile tile{};
      do {
        const int next = atomicAdd(at.next_tile, 1);
        tile.rows = 0;
        if (next < *at.tile_count) tile = at.tiles[next];
      } while (tile.rows > 0 && (tile.rows > kHalf) != (kHalves == 2));
      KeyList& list = shared.list;
      list.tile = tile;
      list.k = kBytes ? reinterpret_cast<const char*>(at.eight.k.row(tile.head, 0))
                      : reinterpret_cast<const char*>(at.k.row(tile.head, 0));
      list.v = reinterpret_cast<const char*>(at.v.row(tile.head, 0));
      list.made = kDense ? tile.keys : 0;
      list.taken = 0;
    }
    __syncthreads();
    if (shared.list.tile.rows == 0) return;
    attend_tile<T, kDim, kHalves, kDense, kBytes>(at, shared);
  }
}

template <class T, int kDim, int kHalves, bool kDense, bool kBytes>
void launch(const Exec& exec, const AttendLaunch& at) {
  const auto kernel = attend_kernel<T, kDim, kHalves, kDense, kBytes>;
  constexpr int kShared = sizeof(Shared<kDim, kHalves, kBytes>);
  static_assert(kShared <= kLeastSharedBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "attend_sm80");
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, kShared), "attend_sm80");
  blocks = std::min(at.most_tiles, std::max(blocks, 1) * exec.device->multiprocessors);
  check(cudaMemsetAsync(at.next_tile, 0, sizeof(int32_t), stream(exec)), "attend_sm80");
  kernel<<<blocks, kThreads, kShared, stream(exec)>>>(at);
  check_launch("attend_sm80");
}

template <class T, int kDim, bool kDense, bool kBytes>
void launch(const Exec& exec, const AttendLaunch& at) {
  launch<T, kDim, 2, kDense, kBytes>(exec, at);
  launch<T, kDim, 1, kDense, kBytes>(exec, at);
}

template <class T, bool kBytes>
void launch(const Exec& exec, const AttendLaunch& at) {
  if (at.dim > 64) {
    at.mask ? launch<T, 128, false, kBytes>(exec, at) : launch<T, 128, true, kBytes>(exec, at);
  } else {
    at.mask ? launch<T, 64, false, kBytes>(exec, at) : launch<T, 64, true, kBytes>(exec, at);
  }
}

template <class T>
void launch(const Exec& exec, const AttendLaunch& at) {
  at.products == Products::bf16 ? launch<T, false>(exec, at) : launch<T, true>(exec, at);
}

}  // namespace

void attend_sm80(const Exec& exec, const AttendLaunch& at) {
  at.dtype == DType::bf16 ? launch<__nv_bfloat16>(exec, at) : launch<__half>(exec, at);
}

}  // namespace scope::cuda
