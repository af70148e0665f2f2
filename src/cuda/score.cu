// score on CUDA: tables of centroid products, and the two passes of select that recompute the proxy's logits.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/device/ptx_sm80.cuh"
#include "cuda/device/select_passes.cuh"
#include "cuda/select.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

// ---- tables ----

constexpr int kGroupTile = 64, kCodeTile = 128, kDepth = 32;  // of a block; channels at a time

struct Channels {
  uint8_t channel[128];
  uint8_t begin[129];  // of each subspace
};

struct TablesLaunch {
  PerHead<const float> centroids, codebooks;
  PerHead<float> tables;
  int32_t groups, dim, subspaces, codes;
  float scale;
};

__global__ void __launch_bounds__(256) build_tables(TablesLaunch a, Channels partition, int group_tiles, int code_tiles) {
  __shared__ float q[kDepth][kGroupTile + 1], u[kDepth][kCodeTile + 1];
  int64_t block = blockIdx.x;
  const int code0 = static_cast<int>(block % code_tiles) * kCodeTile;
  block /= code_tiles;
  const int group0 = static_cast<int>(block % group_tiles) * kGroupTile;
  block /= group_tiles;
  const int m = static_cast<int>(block % a.subspaces);
  const int64_t head = block / a.subspaces;
  const int begin = partition.begin[m], depth = partition.begin[m + 1] - begin;
  const float* centroids = a.centroids[head];
  const float* codebook = a.codebooks[head] + int64_t{begin} * a.codes;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;

  float sum[4][8] = {};
  for (int i0 = 0; i0 < depth; i0 += kDepth) {
    const int n = min(kDepth, depth - i0), i = threadIdx.x % kDepth, first = threadIdx.x / kDepth;
    constexpr int kRows = 256 / kDepth;  // that are loaded at a time
    if (i < n) {
      const int channel = partition.channel[begin + i0 + i];
#pragma unroll
      for (int r = 0; r < kCodeTile; r += kRows) {
        const int64_t code = code0 + r + first;
        u[i][r + first] = code < a.codes ? codebook[code * depth + i0 + i] : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kGroupTile; r += kRows) {
        const int64_t group = group0 + r + first;
        q[i][r + first] = group < a.groups ? centroids[group * a.dim + channel] : 0.0f;
      }
    }
    __syncthreads();
    for (int k = 0; k < n; ++k) {
      float left[4], right[8];
      for (int r = 0; r < 4; ++r) left[r] = q[k][y + 16 * r];
      for (int c = 0; c < 8; ++c) right[c] = u[k][x + 16 * c];
      for (int r = 0; r < 4; ++r) {
        for (int c = 0; c < 8; ++c) sum[r][c] = fmaf(left[r], right[c], sum[r][c]);
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 8; ++c) {
      const int group = group0 + y + 16 * r, code = code0 + x + 16 * c;
      if (group >= a.groups || code >= a.codes) continue;
      a.tables[head][(int64_t{group} * a.subspaces + m) * a.codes + code] = sum[r][c] * a.scale;
    }
  }
}

__global__ void write_scores(ProxyLaunch proxy, int32_t first, int32_t n, float* out, int64_t stride) {
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < int64_t{n} * proxy.count;
       at += int64_t{gridDim.x} * blockDim.x) {
    const auto row = static_cast<int32_t>(at / proxy.count), key = static_cast<int32_t>(at % proxy.count);
    out[row * stride + key] = proxy.score(0, first + row, key);
  }
}

// ---- bounds of each row ----

__device__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}
__device__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// A row that is constant, or has no finite range, is one bin. Few bits of the unit are kept, so that logits of few bits
// have exact depths, and sums that are equal in f32 stay equal.
__device__ void set_bounds(const SelectSpace& s, int64_t head, int group, float high, float range, float scale) {
  const float exact_unit = kUsedDepths / range;
  const bool one_bin = !(range > 0) || !isfinite(range) || !isfinite(exact_unit);
  const float unit = one_bin ? 0.0f : __uint_as_float(__float_as_uint(exact_unit) & 0xffff0000u);
  s.high[head][group] = high;
  s.range[head][group] = range * scale;
  s.unit[head][group] = unit;
  s.step[head][group] = one_bin ? 0.0f : scale / unit;
}

// A warp for each row: the sums of each subspace's extremes.
__global__ void codes_bounds(ProxyLaunch p, SelectSpace s) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= int64_t{p.heads} * p.groups) return;
  const int64_t head = row / p.groups;
  const int group = static_cast<int>(row % p.groups);
  const float* table = p.tables[head] + int64_t{group} * p.subspaces * p.codes;
  float high = 0, range = 0, bad = 0;
  for (int m = 0; m < p.subspaces; ++m, table += p.codes) {
    float top = -INFINITY, bottom = INFINITY;
    for (int r = lane; r < p.codes; r += 32) {
      const float x = table[r];
      top = fmaxf(top, x);
      bottom = fminf(bottom, x);
      bad += x * 0.0f;  // not a number unless x is finite
    }
    top = warp_max(top);
    high += top;
    range += top + warp_max(-bottom);
  }
  bad = warp_sum(bad);
  if (lane == 0) set_bounds(s, head, group, high, range + bad, 1.0f);
}

// ---- a logit as a depth ----

__device__ uint32_t depth_of(float high, float unit, float logit) {
  const float x = fmaxf(fminf((high - logit) * unit, static_cast<float>(kDepths - 1)), 0.0f);  // NaN is the lowest
  return __float_as_uint(x + 8388608.0f) & 0x7fffffu;
}

// ---- codes: tables in shared memory ----

constexpr int kHistogramThreads = 1024, kHistogramTile = kHistogramThreads;  // a lane's key at a time
constexpr int kMostEmitThreads = 768, kEmitKeys = 256;                       // of a warp at a time
constexpr int kWordStride = 9, kListSize = 8;
constexpr int kWordsBytes = 32 * kWordStride * 4, kListBytes = 32 * kListSize * 4;  // of a warp

// Rows of 32 groups are 33 words apart: the store by rows of one group and the lookup by groups of one row both touch
// 32 banks.
constexpr int kTableStride = 33 * 4;

// The tables of 32 groups as depths; subspace 0 less what `minus` says.
template <int kSubspaces>
__device__ void load_tables(const ProxyLaunch& p, const SelectSpace& s, int64_t head, int group0, const uint32_t* minus,
                            char* table) {
  const int lane = threadIdx.x % 32;
  for (int g = warp_index(); g < kLanes; g += blockDim.x / 32) {
    const bool valid = group0 + g < p.groups;
    const float unit = valid ? s.unit[head][group0 + g] : 0.0f;
    const float* from = p.tables[head] + int64_t{valid ? group0 + g : 0} * kSubspaces * p.codes;
    for (int m = 0; m < kSubspaces; ++m, from += p.codes) {
      float top = -INFINITY;
      for (int r = lane; r < p.codes; r += 32) top = fmaxf(top, from[r]);
      top = warp_max(top);
      const uint32_t less = m == 0 && minus != nullptr && valid ? minus[group0 + g] : 0;
      for (int r = lane; r < p.codes; r += 32) {
        const uint32_t depth = unit > 0 ? __float2uint_rn((top - from[r]) * unit) : 0;
        *reinterpret_cast<uint32_t*>(table + (m * p.codes + r) * kTableStride + 4 * g) = depth - less;
      }
    }
  }
}

// A key's codes in as few words as possible: passing one from lane to lane costs as much as a lookup.
template <int kSubspaces>
struct Codes {
  static constexpr int kWords = kSubspaces <= 3 ? 1 : 2, kBits = kSubspaces <= 3 ? 10 : 16;
  uint32_t word[kWords] = {};

  Codes() = default;
  __device__ Codes(const ProxyLaunch& p, int64_t head, int64_t key) {
    if (key >= p.count) return;
    const int32_t* labels = p.labels[head] + key;
#pragma unroll
    for (int m = 0; m < kSubspaces; ++m) {
      word[m * kBits / 32] |= static_cast<uint32_t>(labels[m * int64_t{p.count}]) << (m * kBits % 32);
    }
  }
  __device__ Codes of_lane(int lane) const {
    Codes result;
#pragma unroll
    for (int w = 0; w < kWords; ++w) result.word[w] = __shfl_sync(~0u, word[w], lane);
    return result;
  }
  // The sum over the subspaces; `column` is the address of this lane's column of the table.
  __device__ uint32_t lookup(uint32_t column, uint32_t subspace_bytes) const {
    uint32_t sum = 0;
#pragma unroll
    for (int m = 0; m < kSubspaces; ++m) {
      uint32_t code = word[m * kBits / 32] >> (m * kBits % 32);
      if (m * kBits % 32 + kBits < 30) code &= (1u << kBits) - 1;  // above the last one there is nothing
      sum += load_shared(column + m * subspace_bytes + code * kTableStride);
    }
    return sum;
  }
};

template <int kSubspaces>
__global__ void __launch_bounds__(kHistogramThreads, 1) codes_histogram(ProxyLaunch p, SelectSpace s, Bins bins) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, subspace_bytes = p.codes * kTableStride;
  char* table = reinterpret_cast<char*>(shared);
  auto* histogram = reinterpret_cast<uint32_t*>(table + kSubspaces * subspace_bytes);
  const uint32_t column = address_of(table) + 4 * lane, counts = address_of(histogram) + 4 * lane;
  const int words = bins.count * kLanes, blocks = (p.groups + kLanes - 1) / kLanes;
  for (int i = threadIdx.x; i < words; i += kHistogramThreads) histogram[i] = 0;

  const int64_t tiles = (p.count + kHistogramTile - 1) / kHistogramTile;
  for (Share share(p.heads, blocks, tiles); share.next();) {
    const int64_t head = share.head;
    auto* to = s.histogram[head] + int64_t{share.section} * words;
    load_tables<kSubspaces>(p, s, head, share.section * kLanes, nullptr, table);
    __syncthreads();
    Codes<kSubspaces> next(p, head, share.begin * kHistogramTile + threadIdx.x);
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const Codes<kSubspaces> codes = next;
      const int64_t first = tile * kHistogramTile + warp * 32;
      if (tile + 1 < share.end) next = Codes<kSubspaces>(p, head, first + kHistogramTile + lane);
      const int n = static_cast<int>(min(int64_t{32}, p.count - first));
      // Lookups first: none of them would overtake an addition.
#pragma unroll
      for (int i0 = 0; i0 < 32; i0 += 8) {
        uint32_t depth[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) depth[i] = codes.of_lane(i0 + i).lookup(column, subspace_bytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i0 + i < n) count_key(counts, depth[i], bins.sub_bits);
        }
      }
      if (counted * kHistogramTile + kHistogramTile > kFlushKeys) {
        flush(histogram, words, to);
        counted = 0;
      }
    }
    flush(histogram, words, to);
  }
}

// Candidates of a lane's group until there are many: an atomic in memory takes as long as many lookups.
struct LaneList {
  uint32_t address;  // of [kListSize, 32 lanes], at this lane
  uint32_t n = 0;

  // By the whole warp.
  __device__ void flush(const SelectSpace& s, int64_t head, int group) {
    if (n > 0) {
      const uint32_t at = atomicAdd(s.found[head] + group, n);
      uint32_t* list = s.candidates[head] + int64_t{group} * s.most_candidates + at;
      for (uint32_t i = 0; i < n; ++i) list[i] = load_shared(address + i * 32 * 4);
    }
    n = 0;
  }
};

// A warp takes 256 keys at a time, 32 groups: eight words of each lane's row.
template <int kSubspaces>
__global__ void __launch_bounds__(kMostEmitThreads, 1)
    codes_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int subspace_bytes = p.codes * kTableStride;
  auto* kept_words = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + warp * kWordsBytes);
  char* lists = reinterpret_cast<char*>(shared) + warps * kWordsBytes;
  char* table = lists + warps * kListBytes;
  const uint32_t column = address_of(table) + 4 * lane;
  LaneList list{address_of(lists) + (warp * kListSize * 32 + lane) * 4};
  const int blocks = (p.groups + kLanes - 1) / kLanes;
  const int shift = max(0, bins.sub_bits - (32 - key_bits));  // of a fraction that does not fit beside its key

  for (Share share(p.heads, blocks, (p.count + kEmitKeys - 1) / kEmitKeys); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * kLanes, group = group0 + lane;
    const bool valid = group < p.groups;
    // Depths are relative to the limit from here on: the sign bit says that a key is kept, or before the end.
    const uint32_t width = valid ? s.end[head][group] - s.limit[head][group] : 0;
    if (!mask.rows && !__any_sync(~0u, width > 0)) continue;
    __syncthreads();
    load_tables<kSubspaces>(p, s, head, group0, s.limit[head], table);
    __syncthreads();
    for (int64_t tile = share.begin + warp; tile < share.end; tile += warps) {
      const int64_t first = tile * kEmitKeys;
      const int parts = static_cast<int>(min(int64_t{8}, (p.count - first + 31) / 32));
      Codes<kSubspaces> next(p, head, first + lane);
      for (int part = 0; part < parts; ++part) {
        const Codes<kSubspaces> codes = next;
        if (part + 1 < parts) next = Codes<kSubspaces>(p, head, first + (part + 1) * 32 + lane);
        uint32_t kept = 0, before_end = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const uint32_t depth = codes.of_lane(i).lookup(column, subspace_bytes);
          kept = __funnelshift_l(depth, kept, 1);
          before_end = __funnelshift_l(depth - width, before_end, 1);
        }
        const int64_t left = p.count - first - part * 32;
        const uint32_t inside = !valid ? 0 : left >= 32 ? ~0u : (1u << left) - 1;
        kept = __brev(kept) & inside;
        kept_words[lane * kWordStride + part] = kept;
        uint32_t candidates = __brev(before_end) & inside & ~kept;
        while (__any_sync(~0u, candidates != 0)) {
          const int at = __ffs(static_cast<int>(candidates)) - 1;
          const uint32_t depth = codes.of_lane(max(at, 0)).lookup(column, subspace_bytes);
          if (candidates != 0) {
            const auto key = static_cast<uint32_t>(first + part * 32 + at);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(list.address + list.n * 32 * 4),
                         "r"((depth >> shift) << key_bits | key));
            ++list.n;
          }
          candidates &= candidates - 1;
          if (__any_sync(~0u, list.n == kListSize)) list.flush(s, head, group);
        }
      }
      __syncwarp();
      if (mask.direct) {
        for (int i = 0; i < 8; ++i) {  // four rows at a time, eight words of each
          const int row = 4 * i + lane / 8, part = lane % 8;
          if (group0 + row < p.groups && part < parts) {
            mask.rows[head][(group0 + row) * mask.words + first / 32 + part] = kept_words[row * kWordStride + part];
          }
        }
      } else if (mask.rows && valid) {
        for (int part = 0; part < parts; ++part) {
          add_bits(p, mask.rows[head] + group * mask.words, static_cast<int32_t>(first) + part * 32,
                   kept_words[lane * kWordStride + part]);
        }
      }
      __syncwarp();
    }
    list.flush(s, head, group);
  }
}

// ---- any proxy, from memory: tables that do not fit ----

constexpr int kPlainThreads = 256, kPlainTile = kPlainThreads;

__global__ void __launch_bounds__(kPlainThreads) plain_histogram(ProxyLaunch p, SelectSpace s, Bins bins) {
  extern __shared__ uint4 shared[];
  auto* histogram = reinterpret_cast<uint32_t*>(shared);
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int words = bins.count * kLanes, blocks = (p.groups + kLanes - 1) / kLanes;
  for (int i = threadIdx.x; i < words; i += kPlainThreads) histogram[i] = 0;
  const int64_t tiles = (p.count + kPlainTile - 1) / kPlainTile;
  for (Share share(p.heads, blocks, tiles); share.next();) {
    const int64_t head = share.head;
    const int group = share.section * kLanes + lane;
    auto* to = s.histogram[head] + int64_t{share.section} * words;
    __syncthreads();
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int64_t first = tile * kPlainTile + warp * 32;
      for (int64_t key = first; key < min(first + 32, int64_t{p.count}) && group < p.groups; ++key) {
        const float logit = p.score(static_cast<int32_t>(head), group, static_cast<int32_t>(key));
        count_key(address_of(histogram + lane), depth_of(s.high[head][group], s.unit[head][group], logit), bins.sub_bits);
      }
      if (counted * kPlainTile + kPlainTile > kFlushKeys) {
        flush(histogram, words, to);
        counted = 0;
      }
    }
    flush(histogram, words, to);
  }
}

__global__ void __launch_bounds__(kPlainThreads)
    plain_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits) {
  const int warp = warp_index(), lane = threadIdx.x % 32, blocks = (p.groups + kLanes - 1) / kLanes;
  const int shift = max(0, bins.sub_bits - (32 - key_bits));
  const int64_t tiles = (p.count + kPlainTile - 1) / kPlainTile;
  for (Share share(p.heads, blocks, tiles); share.next();) {
    const int64_t head = share.head;
    const int group = share.section * kLanes + lane;
    if (group >= p.groups) continue;
    const float high = s.high[head][group], unit = s.unit[head][group];
    const uint32_t limit = s.limit[head][group], end = s.end[head][group];
    uint32_t* list = s.candidates[head] + int64_t{group} * s.most_candidates;
    if (!mask.rows && limit == end) continue;
    for (int64_t first = share.begin * kPlainTile + warp * 32; first < min(share.end * kPlainTile, int64_t{p.count});
         first += kPlainTile) {
      uint32_t kept = 0;
      for (int i = 0; i < min(int64_t{32}, p.count - first); ++i) {
        const auto key = static_cast<int32_t>(first) + i;
        const uint32_t depth = depth_of(high, unit, p.score(static_cast<int32_t>(head), group, key));
        if (depth < limit) kept |= 1u << i;
        if (depth < limit || depth >= end) continue;
        list[atomicAdd(s.found[head] + group, 1u)] = ((depth - limit) >> shift) << key_bits | static_cast<uint32_t>(key);
      }
      if (mask.rows) put_word(p, mask, head, group, first, kept);
    }
  }
}

// ---- exact: centroids in two 16-bit parts, products by tensor cores ----

constexpr int kExactThreads = 384, kExactWarps = kExactThreads / 32, kExactTile = kExactWarps * 32;
constexpr int kEmitGroups = 320;

// Fragments in the order in which lanes read them: [16 groups][16 channels][high, low][lane]. A thread of a quad has
// eight consecutive channels of a key in one load, which serve two steps; the centroids' channels are dealt out alike.
template <class T>
__device__ void load_centroids(const ProxyLaunch& p, int64_t head, int group0, int groups, uint4* fragments) {
  const int steps = (p.dim + 31) / 32 * 2;
  for (int i = threadIdx.x; i < groups / 16 * steps * 32; i += kExactThreads) {
    const int lane = i % 32, step = i / 32 % steps, tile = i / 32 / steps;
    const int channel = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
    uint32_t high[4], low[4];
    for (int part = 0; part < 4; ++part) {  // rows +0, +8, +0, +8; channels +0, +0, +2, +2
      const int group = group0 + tile * 16 + lane / 4 + part % 2 * 8, at = channel + part / 2 * 2;
      float2 x{0, 0};
      if (group < p.groups && at < p.dim)
        x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group} * p.dim + at);
      high[part] = pack<T>(x.x, x.y);
      low[part] = pack<T>(x.x - p.element(static_cast<uint16_t>(high[part])),
                          x.y - p.element(static_cast<uint16_t>(high[part] >> 16)));
    }
    fragments[((tile * steps + step) * 2) * 32 + lane] = {high[0], high[1], high[2], high[3]};
    fragments[((tile * steps + step) * 2 + 1) * 32 + lane] = {low[0], low[1], low[2], low[3]};
  }
}

struct KeyTile {
  uint4 part[4][4];  // [8 keys][32 channels]
};

__device__ void load_keys(const ProxyLaunch& p, int64_t head, int64_t first, KeyTile& keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int64_t key = first + 8 * n + lane / 4;
    const uint16_t* row = key < p.count ? p.k.row(head, p.token(static_cast<int32_t>(key))) + lane % 4 * 8 : nullptr;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      keys.part[n][g] = row != nullptr && g * 32 + lane % 4 * 8 < p.dim ? *reinterpret_cast<const uint4*>(row + 32 * g)
                                                                        : uint4{0, 0, 0, 0};
    }
  }
}

// 32 groups x 32 keys: sum[t][n][e] is group 16 t + 8 (e / 2) + lane / 4 and key 8 n + 2 (lane % 4) + e % 2.
template <class T>
__device__ void multiply(const uint4* fragments, const KeyTile& keys, int dim, float (&sum)[2][4][4]) {
  const int lane = threadIdx.x % 32, steps = (dim + 31) / 32 * 2;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[t][n][e] = 0;
    }
  }
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    if (32 * g >= dim) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint4 f = fragments[((t * steps + 2 * g + half) * 2 + part) * 32 + lane];
          const uint32_t a[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const uint4& k = keys.part[n][g];
            mma_16x8x16<T>(sum[t][n], a, half == 0 ? k.x : k.z, half == 0 ? k.y : k.w);
          }
        }
      }
    }
  }
}

// Floats as integers of the same order, so that atomicMax finds extremes; 0 is below all of them.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float from_ordered(uint32_t bits) {
  return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}

// The highest logit of each row and the lowest, negated, as ordered integers in `high` and `range`. A bound from norms
// would save this pass, but on peaked heads it is many times too wide for the histogram.
template <class T>
__global__ void __launch_bounds__(kExactThreads, 1) exact_range(ProxyLaunch p, SelectSpace s, int chunk) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  const int fragment_words = chunk / 16 * ((p.dim + 31) / 32 * 2) * 2 * 32;
  auto* row = reinterpret_cast<uint32_t*>(shared + fragment_words);  // [2, chunk]
  const int sections = (p.groups + chunk - 1) / chunk;
  const int64_t tiles = (p.count + kExactTile - 1) / kExactTile;
  const auto raise = [](uint32_t* to, uint32_t value) {
    if (value > *to) atomicMax(to, value);  // seldom, once a few tiles have passed
  };
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, pairs = (min(chunk, p.groups - group0) + kLanes - 1) / kLanes;
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * chunk; i += kExactThreads) row[i] = 0;
    load_centroids<T>(p, head, group0, chunk, shared);
    __syncthreads();
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      const int64_t first = tile * kExactTile + warp * 32;
      if (first >= p.count) continue;
      KeyTile keys;
      load_keys(p, head, first, keys);
      const int left = static_cast<int>(min(int64_t{32}, p.count - first));
      for (int pair = 0; pair < pairs; ++pair) {
        float sum[2][4][4];
        multiply<T>(shared + pair * (fragment_words / (chunk / kLanes)), keys, p.dim, sum);
        float my_high = 0, my_low = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {  // groups 8 c + lane / 4
          float high = -INFINITY, low = INFINITY;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (8 * (i / 2) + 2 * quad + i % 2 >= left) continue;
            const float x = sum[c / 2][i / 2][2 * (c % 2) + i % 2];
            high = fmaxf(high, x == x ? x : INFINITY);  // a row with NaN has no finite range
            low = fminf(low, x);
          }
#pragma unroll
          for (int offset = 1; offset < 4; offset *= 2) {
            high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
            low = fminf(low, __shfl_xor_sync(~0u, low, offset));
          }
          if (quad == c) my_high = high, my_low = low;
        }
        uint32_t* mine = row + pair * kLanes + 8 * quad + lane / 4;
        raise(mine, ordered(my_high));
        raise(mine + chunk, ordered(-my_low));
      }
    }
    __syncthreads();
    for (int g = threadIdx.x; g < min(chunk, p.groups - group0); g += kExactThreads) {
      atomicMax(reinterpret_cast<uint32_t*>(s.high[head]) + group0 + g, row[g]);
      atomicMax(reinterpret_cast<uint32_t*>(s.range[head]) + group0 + g, row[chunk + g]);
    }
  }
}

__global__ void exact_bounds(ProxyLaunch p, SelectSpace s) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= int64_t{p.heads} * p.groups) return;
  const int64_t head = row / p.groups;
  const int group = static_cast<int>(row % p.groups);
  const float high = from_ordered(__float_as_uint(s.high[head][group]));
  set_bounds(s, head, group, high, high + from_ordered(__float_as_uint(s.range[head][group])), p.scale);
}

template <class T>
__global__ void __launch_bounds__(kExactThreads, 1) exact_histogram(ProxyLaunch p, SelectSpace s, Bins bins, int chunk) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  const int fragment_words = chunk / 16 * ((p.dim + 31) / 32 * 2) * 2 * 32;
  auto* row = reinterpret_cast<float2*>(shared + fragment_words);  // [chunk] high, unit
  auto* histogram = reinterpret_cast<uint32_t*>(row + chunk);      // [chunk / 32, bins, 32]
  const uint32_t counts = address_of(histogram + lane / 4);
  const int words = bins.count * kLanes, sections = (p.groups + chunk - 1) / chunk;
  for (int i = threadIdx.x; i < words * (chunk / kLanes); i += kExactThreads) histogram[i] = 0;

  const int64_t tiles = (p.count + kExactTile - 1) / kExactTile;
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, pairs = (min(chunk, p.groups - group0) + kLanes - 1) / kLanes;
    auto* to = s.histogram[head] + int64_t{group0 / kLanes} * words;
    load_centroids<T>(p, head, group0, chunk, shared);
    for (int g = threadIdx.x; g < chunk; g += kExactThreads) {
      row[g] = group0 + g < p.groups ? float2{s.high[head][group0 + g], s.unit[head][group0 + g]} : float2{0, 0};
    }
    __syncthreads();
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int64_t first = tile * kExactTile + warp * 32;
      if (first < p.count) {
        KeyTile keys;
        load_keys(p, head, first, keys);
        const int left = static_cast<int>(min(int64_t{32}, p.count - first));
        for (int pair = 0; pair < pairs; ++pair) {
          float sum[2][4][4];
          multiply<T>(shared + pair * (fragment_words / (chunk / kLanes)), keys, p.dim, sum);
          // The quad's four threads hold the same groups. In round u thread t takes the (u + t mod 4)th of its four, so
          // that the 32 lanes count 32 groups.
          float2 bounds[4];
#pragma unroll
          for (int u = 0; u < 4; ++u) bounds[u] = row[pair * kLanes + 8 * ((u + quad) % 4) + lane / 4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float x[4] = {sum[0][n][e], sum[0][n][e + 2], sum[1][n][e], sum[1][n][e + 2]}, y[4], z[4];
#pragma unroll
              for (int u = 0; u < 4; ++u) y[u] = (quad & 1) != 0 ? x[(u + 1) % 4] : x[u];
#pragma unroll
              for (int u = 0; u < 4; ++u) z[u] = (quad & 2) != 0 ? y[(u + 2) % 4] : y[u];
              if (8 * n + 2 * quad + e < left) {
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                  count_key(counts + (pair * words + 8 * ((u + quad) % 4)) * 4, depth_of(bounds[u].x, bounds[u].y, z[u]),
                            bins.sub_bits);
                }
              }
            }
          }
        }
      }
      if (counted * kExactTile + kExactTile > kFlushKeys) {
        flush(histogram, words * pairs, to);
        counted = 0;
      }
    }
    flush(histogram, words * pairs, to);
  }
}

struct EmitRow {
  float high, unit;
  uint32_t limit, end;
};

template <class T>
__global__ void __launch_bounds__(kExactThreads, 1)
    exact_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits, int chunk) {
  extern __shared__ uint4 shared[];
  __shared__ __align__(8) char queues[kExactWarps][Queue::kBytes];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  const int fragment_words = chunk / 16 * ((p.dim + 31) / 32 * 2) * 2 * 32;
  auto* row = reinterpret_cast<EmitRow*>(shared + fragment_words);  // [chunk]
  const int sections = (p.groups + chunk - 1) / chunk, shift = max(0, bins.sub_bits - (32 - key_bits));
  const int64_t tiles = (p.count + kExactTile - 1) / kExactTile;
  Queue queue(queues[warp]);
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, pairs = (min(chunk, p.groups - group0) + kLanes - 1) / kLanes;
    __syncthreads();
    bool any = false;
    for (int g = threadIdx.x; g < chunk; g += kExactThreads) {
      const int group = group0 + g;
      row[g] = group < p.groups ? EmitRow{s.high[head][group], s.unit[head][group], s.limit[head][group], s.end[head][group]}
                                : EmitRow{0, 0, 0, 0};
      any = any || row[g].limit < row[g].end;
    }
    if (__syncthreads_or(any) == 0 && !mask.rows) continue;
    load_centroids<T>(p, head, group0, chunk, shared);
    __syncthreads();
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      const int64_t first = tile * kExactTile + warp * 32;
      if (first >= p.count) continue;
      KeyTile keys;
      load_keys(p, head, first, keys);
      const uint32_t inside = p.count - first >= 32 ? ~0u : (1u << (p.count - first)) - 1;
      for (int pair = 0; pair < pairs; ++pair) {
        if (!mask.rows) {
          const EmitRow& mine = row[pair * kLanes + lane];
          if (!__any_sync(~0u, mine.limit < mine.end)) continue;
        }
        float sum[2][4][4];
        multiply<T>(shared + pair * (fragment_words / (chunk / kLanes)), keys, p.dim, sum);
        uint32_t kept = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {  // groups 8 c + lane / 4
          const EmitRow at = row[pair * kLanes + 8 * c + lane / 4];
          uint32_t word = 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int bit = 8 * (i / 2) + 2 * quad + i % 2;
            const uint32_t depth = depth_of(at.high, at.unit, sum[c / 2][i / 2][2 * (c % 2) + i % 2]);
            word |= (depth < at.limit ? 1u : 0u) << bit;
            queue.note(depth >= at.limit && depth < at.end && (inside >> bit & 1) != 0, depth | (8 * c + i) << 23);
          }
          word |= __shfl_xor_sync(~0u, word, 1);
          word |= __shfl_xor_sync(~0u, word, 2);
          if (quad == c) kept = word & inside;
          if (c % 2 == 1) {
            queue.drain(s, head, [&](uint32_t note) {
              const int c = static_cast<int>(note >> 26), i = static_cast<int>(note >> 23 & 7);
              const int in_pair = 8 * c + lane / 4, bit = 8 * (i / 2) + 2 * quad + i % 2;
              const uint32_t fraction = (note & 0x7fffff) - row[pair * kLanes + in_pair].limit;
              return uint2{static_cast<uint32_t>(group0 + pair * kLanes + in_pair),
                           (fraction >> shift) << key_bits | static_cast<uint32_t>(first + bit)};
            });
          }
        }
        const int group = group0 + pair * kLanes + 8 * quad + lane / 4;
        if (mask.rows && group < p.groups) put_word(p, mask, head, group, first, kept);
      }
    }
    queue.flush(s, head);
  }
}

// ---- launches ----

int64_t table_bytes(const ProxyLaunch& p) { return round_up(int64_t{p.subspaces} * p.codes * kTableStride, 16); }
int64_t histogram_bytes(Bins bins) { return int64_t{bins.count} * kLanes * 4; }

// Whether 32 groups' tables fit shared memory beside their histograms and the words to be written.
bool tables_fit(const Exec& exec, const ProxyLaunch& p, Bins bins) {
  return !p.exact && p.subspaces <= 4 && p.codes <= 1024 &&
         table_bytes(p) + std::max<int64_t>(histogram_bytes(bins), 8 * (kWordsBytes + kListBytes)) <=
             exec.device->shared_bytes;
}

int64_t fragment_bytes(const ProxyLaunch& p, int64_t groups) { return groups / 16 * (round_up(p.dim, 32) / 16) * 1024; }

// Calls f with the number of subspaces as a constant.
template <class F>
void with_subspaces(int n, const F& f) {
  if (n == 1) f(std::integral_constant<int, 1>());
  if (n == 2) f(std::integral_constant<int, 2>());
  if (n == 3) f(std::integral_constant<int, 3>());
  if (n == 4) f(std::integral_constant<int, 4>());
}

}  // namespace

Bins select_bins(const Exec& exec, const ProxyLaunch& proxy) {
  Bins bins;
  for (int halvings = 0; halvings <= 2; ++halvings) {
    bins = {kBins >> halvings, kSubBits + halvings};
    if (proxy.exact || tables_fit(exec, proxy, bins)) return bins;
  }
  return Bins();
}

void row_bounds(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins) {
  const int64_t blocks = ceil_div(int64_t{p.heads} * p.groups, 8);
  if (p.exact) {
    fill(exec, space.high.base, space.high.step, 0, p.groups, p.heads);
    fill(exec, space.range.base, space.range.step, 0, p.groups, p.heads);
    const auto bytes = [&](int64_t chunk) { return fragment_bytes(p, chunk) + chunk * int64_t{2 * sizeof(uint32_t)}; };
    int chunk = static_cast<int>(std::min<int64_t>(kEmitGroups, round_up(p.groups, kLanes)));
    while (bytes(chunk) > exec.device->shared_bytes) chunk -= kLanes;
    const int64_t parts = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kExactTile));
    const auto kernel = p.f16 ? exact_range<__half> : exact_range<__nv_bfloat16>;
    launch(exec, "exact_range", kernel, parts, kExactThreads, bytes(chunk), p, space, chunk);
    launch(exec, "exact_bounds", exact_bounds, ceil_div(int64_t{p.heads} * p.groups, 256), 256, 0, p, space);
  } else {
    launch(exec, "codes_bounds", codes_bounds, blocks, 256, 0, p, space);
  }
}

void histogram_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins) {
  const int64_t lane_blocks = int64_t{p.heads} * ceil_div(p.groups, kLanes);
  if (p.exact) {
    const auto bytes = [&](int chunk) {
      return fragment_bytes(p, chunk) + chunk * int64_t{sizeof(float2)} + chunk / kLanes * histogram_bytes(bins);
    };
    const int chunk = p.groups > kLanes && bytes(64) <= exec.device->shared_bytes ? 64 : 32;
    const int64_t blocks = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kExactTile));
    const auto kernel = p.f16 ? exact_histogram<__half> : exact_histogram<__nv_bfloat16>;
    launch(exec, "exact_histogram", kernel, blocks, kExactThreads, bytes(chunk), p, space, bins, chunk);
  } else if (tables_fit(exec, p, bins)) {
    const int64_t blocks = blocks_for(exec, 1, lane_blocks * ceil_div(p.count, kHistogramTile));
    with_subspaces(p.subspaces, [&](auto n) {
      launch(exec, "codes_histogram", codes_histogram<n()>, blocks, kHistogramThreads,
             table_bytes(p) + histogram_bytes(bins), p, space, bins);
    });
  } else {
    const int64_t blocks = blocks_for(exec, 2, lane_blocks * ceil_div(p.count, kPlainTile));
    launch(exec, "plain_histogram", plain_histogram, blocks, kPlainThreads, histogram_bytes(bins), p, space, bins);
  }
}

void emit_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins, const MaskLaunch& mask) {
  const int64_t lane_blocks = int64_t{p.heads} * ceil_div(p.groups, kLanes);
  const int key_bits = index_bits(p.count);
  if (p.exact) {
    const auto bytes = [&](int64_t chunk) { return fragment_bytes(p, chunk) + chunk * int64_t{sizeof(EmitRow)}; };
    const int64_t queues = kExactWarps * Queue::kBytes;
    int chunk = static_cast<int>(std::min<int64_t>(kEmitGroups, round_up(p.groups, kLanes)));
    while (bytes(chunk) + queues > exec.device->shared_bytes) chunk -= kLanes;
    const int64_t blocks = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kExactTile));
    const auto kernel = p.f16 ? exact_emit<__half> : exact_emit<__nv_bfloat16>;
    launch(exec, "exact_emit", kernel, blocks, kExactThreads, bytes(chunk), p, space, bins, mask, key_bits, chunk);
  } else if (tables_fit(exec, p, bins)) {
    const int64_t blocks = blocks_for(exec, 1, lane_blocks * ceil_div(p.count, kEmitKeys));
    const int64_t left = exec.device->shared_bytes - table_bytes(p), warp_bytes = kWordsBytes + kListBytes;
    const auto warps = static_cast<int>(std::min<int64_t>(kMostEmitThreads / 32, left / warp_bytes));
    with_subspaces(p.subspaces, [&](auto n) {
      launch(exec, "codes_emit", codes_emit<n()>, blocks, 32 * warps, warps * warp_bytes + table_bytes(p), p, space, bins,
             mask, key_bits);
    });
  } else {
    const int64_t blocks = blocks_for(exec, 8, lane_blocks * ceil_div(p.count, kPlainTile));
    launch(exec, "plain_emit", plain_emit, blocks, kPlainThreads, 0, p, space, bins, mask, key_bits);
  }
}

void score(const Exec& exec, std::span<const ScoreArgs> heads) {
  const ScoreArgs& first = heads[0];
  require(first.dim <= 128 && first.partition->size() <= 128, Status::unsupported, "score: more than 128 channels");
  Channels channels{};
  int n = 0;
  for (size_t m = 0; m < first.partition->size(); ++m) {
    for (const int32_t channel : (*first.partition)[m]) channels.channel[n++] = static_cast<uint8_t>(channel);
    channels.begin[m + 1] = static_cast<uint8_t>(n);
  }
  const TablesLaunch args{per_head(heads, [](const ScoreArgs& a) { return a.centroids; }),
                          per_head(heads, [](const ScoreArgs& a) { return a.codebooks; }),
                          per_head(heads, [](const ScoreArgs& a) { return a.tables; }),
                          static_cast<int32_t>(first.groups),
                          static_cast<int32_t>(first.dim),
                          static_cast<int32_t>(first.partition->size()),
                          static_cast<int32_t>(first.codes),
                          first.scale};
  const int64_t group_tiles = ceil_div(first.groups, kGroupTile), code_tiles = ceil_div(first.codes, kCodeTile);
  const int64_t blocks = static_cast<int64_t>(heads.size()) * args.subspaces * group_tiles * code_tiles;
  require(blocks < INT32_MAX, Status::size_limit, "score: too many tiles for one launch");
  launch(exec, "build_tables", build_tables, blocks, 256, 0, args, channels, static_cast<int>(group_tiles),
         static_cast<int>(code_tiles));
}

void score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride) {
  const ProxyLaunch p{proxy.kind == ProxyKind::exact,
                      proxy.k.dtype == DType::f16,
                      1,
                      static_cast<int32_t>(proxy.groups),
                      static_cast<int32_t>(proxy.count),
                      static_cast<int32_t>(proxy.k.dim),
                      static_cast<int32_t>(proxy.subspaces),
                      static_cast<int32_t>(proxy.codes),
                      proxy.scale,
                      {proxy.centroids, 0},
                      {proxy.tables, 0},
                      {proxy.labels, 0},
                      {static_cast<const uint16_t*>(proxy.k.data), 0, proxy.k.row_stride},
                      proxy.rows};
  launch(exec, "write_scores", write_scores, blocks_for(exec, 8, ceil_div(n * proxy.count, 256)), 256, 0, p,
         static_cast<int32_t>(first), static_cast<int32_t>(n), out, stride);
}

}  // namespace scope::cuda
