// tail on CUDA: for each group, softmax-weighted sums of the values (and keys) that it drops, and what is made of them.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/device/ptx_sm80.cuh"
#include "cuda/stages.h"
#include "cuda/tail.h"
#include "cuda/tail_merge.cuh"

namespace scope::cuda {

namespace {

// Keys and values pass through shared memory 64 at a time. A warp has a tile of 16 groups and some of the 64 keys, computes
// their weights where its multiplication wants them, and sums all channels.
constexpr int kTile = 16, kKeys = kTailKeys, kMostDim = 128;
// The highest logit seen may lag this far behind the true one, which saves most of the rescaling.
constexpr float kLag = 6, kLog2E = 1.44269504f;
constexpr float kMostShare = 1 - 0x1p-10f;

// Where logits come from. Shared tables are [groups / 8][subspaces, codes][8 groups]: four keys' codes fall into
// different banks more often than not.
enum class Source { exact, shared_tables, tables };

// How the work is cut: constants of the proxy and the tail, so that sums do not depend on the chunk. Where tables leave room
// for few groups in a block, or sums leave few registers, several warps share a tile's keys.
struct Cut {
  int splits;      // warps that share a tile
  int parts;       // of the keys, each for one block
  int most_tiles;  // of a block

  __host__ __device__ constexpr int partials() const { return splits * parts; }
  __host__ __device__ constexpr int most_threads() const { return 32 * most_tiles * splits; }
};
__host__ __device__ constexpr Cut cut_of(bool exact, bool mean) {
  if (exact) return mean ? Cut{1, 8, 10} : Cut{2, 4, 4};
  return mean ? Cut{4, 4, 3} : Cut{4, 4, 2};
}
constexpr int kCentreParts = 8;

bool uses_wgmma(const Exec& exec, bool exact, bool mean) { return exec.wgmma && exact && mean; }

// Partial results of a row by wgmma. Of 300 groups 13 fill 132 multiprocessors with 20 and with 40 heads to 98 %; parts of
// groups are more rows, which need fewer.
constexpr int wgmma_partials(int64_t each) { return each == 1 ? 13 : each == 2 ? 8 : 4; }
static_assert(wgmma_partials(1) <= kMostPartials && cut_of(false, true).partials() <= kMostPartials &&
              cut_of(false, false).partials() <= kMostPartials && cut_of(true, true).partials() <= kMostPartials &&
              cut_of(true, false).partials() <= kMostPartials);

// Dynamic shared memory in bytes: two stages of values and keys, their codes, then tables or centroids.
template <int kDim, Source kSource, bool kMean>
struct Space {
  static constexpr bool kExact = kSource == Source::exact, kLoadsKeys = kExact || !kMean;
  static constexpr int kRows = kKeys * kDim * 2, kStage = (kLoadsKeys ? 2 : 1) * kRows;
  static constexpr int kCodes = 2 * kStage;
  __host__ __device__ static int source(const ProxyLaunch& p) { return kCodes + (kExact ? 0 : 2 * p.subspaces * kKeys * 4); }
  static int64_t bytes(const ProxyLaunch& p, int tiles) {
    const int64_t group = kExact ? kDim * 2 : kSource == Source::tables ? 0 : int64_t{p.subspaces} * p.codes * 4;
    return source(p) + tiles * kTile * group;
  }
};

// Where channel 8 * chunk of a row lies: rows of eight 16-byte chunks or more, dealt out so that a column of eight rows
// uses all banks.
template <int kDim>
__device__ uint32_t chunk_place(int row, int chunk) {
  return row * kDim * 2 + (chunk ^ (row % 8)) * 16;
}

template <class T, int kDim, Source kSource, bool kMean>
__global__ void __launch_bounds__(cut_of(kSource == Source::exact, kMean).most_threads(), 1)
    tail_sums(ProxyLaunch p, TailLaunch tail, int tiles, int group_blocks) {
  using At = Space<kDim, kSource, kMean>;
  constexpr Cut kCut = cut_of(At::kExact, kMean);
  constexpr int kSums = kMean ? 1 : 2, kParts = kCut.parts, kOwn = kKeys / kCut.splits;
  extern __shared__ __align__(256) char shared[];                       // places are XORed with channel offsets
  auto* const codes = reinterpret_cast<int32_t*>(shared + At::kCodes);  // [2 stages][subspaces][kKeys]
  char* const source = shared + At::source(p);
  auto* const tables = reinterpret_cast<float*>(source);

  const int64_t head = blockIdx.x / kParts / group_blocks;
  const int group0 = static_cast<int>(blockIdx.x) / kParts % group_blocks * tiles * kTile, part = blockIdx.x % kParts;
  const TailKeys all(p, tail);
  const auto [begin, end] = keys_of_part(all.count, part, kParts);
  const int thread = threadIdx.x, threads = blockDim.x, warp = warp_index(), lane = thread % 32;
  const int tile = warp % tiles, own = warp / tiles * kOwn;  // its first key of 64
  const int tile0 = group0 + tile * kTile;                   // the tile's first group
  const int all_codes = p.subspaces * p.codes;

  if constexpr (kSource == Source::shared_tables) {
    for (int i = thread; i < tiles * kTile * all_codes; i += threads) {
      const int group = i / all_codes, at = i % all_codes;
      const int from = min(group0 + group, p.groups - 1);
      tables[(group / 8 * all_codes + at) * 8 + group % 8] = p.tables[head][int64_t{from} * all_codes + at];
    }
  }
  if constexpr (At::kExact) {
    for (int i = thread; i < tiles * kTile * kDim / 2; i += threads) {
      const int group = i / (kDim / 2), channel = i % (kDim / 2) * 2;
      float2 x{0, 0};
      if (group0 + group < p.groups && channel < p.dim) {
        x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group0 + group} * p.dim + channel);
      }
      char* const to = source + chunk_place<kDim>(group, channel / 8) + channel % 8 * 2;
      *reinterpret_cast<uint32_t*>(to) = pack<T>(x.x, x.y);
    }
  }

  const auto fetch = [&](int32_t first, int stage) {
    constexpr int kChunks = kDim / 8;
    const uint32_t to = shared_address(shared) + stage * At::kStage;
    for (int i = thread; i < kKeys * kChunks; i += threads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = first + row < end && 8 * chunk < p.dim;
      const int32_t token = valid ? all.token(p, tail, first + row) : 0;
      const uint32_t place = to + chunk_place<kDim>(row, chunk);
      copy_async_16(place, valid ? tail.v.row(head, token) + 8 * chunk : tail.v.base, valid);
      if constexpr (At::kLoadsKeys) {
        copy_async_16(place + At::kRows, valid ? p.k.row(head, token) + 8 * chunk : p.k.base, valid);
      }
    }
    if constexpr (!At::kExact) {
      for (int i = thread; i < p.subspaces * kKeys; i += threads) {
        const int32_t key = first + i % kKeys;
        const int32_t* labels = p.labels[head];
        copy_async_4(shared_address(codes + stage * p.subspaces * kKeys + i),
                     key < end ? labels + int64_t{i / kKeys} * p.count + key : labels, key < end);
      }
    }
  };
  // A lane has one of the two words of one of the tile's groups.
  const uint32_t* const kept = kept_row(p, tail, head, tile0 + lane / 2);
  const auto dropped_word = [&](int32_t first) { return dropped_bits(p, tail, kept, first + lane % 2 * 32, end); };

  // Entry 2 r + e of a fragment is row lane / 4 + 8 r, column 2 (lane % 4) + e.
  float sum[kSums][kDim / 8][4] = {};  // of values, of keys; [8 channels]
  float high[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, others[2] = {0, 0};
  uint32_t word = 0;
  if (begin < end) {
    fetch(begin, 0);
    word = dropped_word(begin);
  }
  for (int32_t first = begin; first < end; first += kKeys) {
    const int stage = (first - begin) / kKeys % 2;
    copy_async_wait();
    __syncthreads();
    uint32_t next = 0;
    if (first + kKeys < end) {
      fetch(first + kKeys, stage ^ 1);
      next = dropped_word(first + kKeys);
    }
    const uint32_t values = shared_address(shared) + stage * At::kStage + own * kDim * 2;

    float logit[kOwn / 8][4] = {};  // [8 keys]
    if constexpr (At::kExact) {
      const int q_row = lane % 16, k_row = lane % 8 + lane / 16 * 8;
      const uint32_t q = shared_address(source) + chunk_place<kDim>(tile * kTile + q_row, lane / 16);
      const uint32_t k = values + At::kRows + chunk_place<kDim>(k_row, lane / 8 % 2);
#pragma unroll 2  // all at once spills registers on sm_80
      for (int c = 0; c < kDim / 16; ++c) {
        uint32_t a[4];
        load_matrix_x4(a, q ^ (c * 32));
#pragma unroll
        for (int n = 0; n < kOwn / 16; ++n) {
          uint32_t b[4];
          load_matrix_x4(b, (k ^ (c * 32)) + n * 16 * kDim * 2);
          mma_16x8x16<T>(logit[2 * n], a, b[0], b[1]);
          mma_16x8x16<T>(logit[2 * n + 1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kOwn / 2; ++i) logit[i / 4][i % 4] *= p.scale;
    } else {
      const int32_t* code = codes + stage * p.subspaces * kKeys + own + lane % 4 * 2;
      const int row = lane / 4;
      for (int m = 0; m < p.subspaces; ++m, code += kKeys) {
#pragma unroll
        for (int i = 0; i < kOwn / 2; ++i) {  // keys +0, +1, +8, +9, …, each in two groups
          const int n = i / 4, e = i / 2 % 2, r = i % 2;
          const int at = m * p.codes + code[8 * n + e];
          if constexpr (kSource == Source::shared_tables) {
            logit[n][2 * r + e] += tables[((2 * tile + r) * all_codes + at) * 8 + row];
          } else {
            const int group = min(tile0 + row + 8 * r, p.groups - 1);
            logit[n][2 * r + e] += p.tables[head][int64_t{group} * all_codes + at];
          }
        }
      }
    }

    // Keys that do not weigh: those past the end, and under the first order those that are kept.
    uint32_t drops[2][2];  // [row][word]
    float factor[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      for (int w = 0; w < 2; ++w) drops[r][w] = __shfl_sync(~0u, word, 2 * (lane / 4 + 8 * r) + w) >> (lane % 4 * 2);
    }
    const auto is_dropped = [&](int r, int n, int e) {
      const int at = own + 8 * n;
      return (drops[r][at / 32] >> (at % 32 + e) & 1) != 0;
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < kOwn / 4; ++i) {
        const int n = i / 2, e = i % 2;
        float& x = logit[n][2 * r + e];
        const bool weighs = kMean ? first + own + 8 * n + lane % 4 * 2 + e < end : is_dropped(r, n, e);
        if (!weighs || isnan(x)) x = -INFINITY;
        top = fmaxf(top, x);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      factor[r] = 1;
      if (top > high[r] + kLag) {
        factor[r] = exp2_fast((high[r] - top) * kLog2E);
        high[r] = top;
        grown = true;
      }
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[r] *= factor[r];
        others[r] *= factor[r];
#pragma unroll
        for (int i = 0; i < kSums * kDim / 4; ++i) sum[i / (kDim / 4)][i / 2 % (kDim / 8)][2 * r + i % 2] *= factor[r];
      }
    }

#pragma unroll
    for (int j = 0; j < kOwn / 16; ++j) {
      uint32_t weight[4];  // rounded to 16 bits, and summed as rounded: the means are means of what is multiplied
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2, n = 2 * j + i / 2;
        const float base = high[r] == -INFINITY ? 0 : high[r];
        float w[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          w[e] = exp2_fast((logit[n][2 * r + e] - base) * kLog2E);
          if (kMean && !is_dropped(r, n, e)) {
            others[r] += w[e];
            w[e] = 0;
          }
        }
        weight[i] = pack<T>(w[0], w[1]);
        total[r] += p.element(static_cast<uint16_t>(weight[i])) + p.element(static_cast<uint16_t>(weight[i] >> 16));
      }
#pragma unroll
      for (int tensor = 0; tensor < kSums; ++tensor) {
        const uint32_t x = values + tensor * At::kRows + j * 16 * kDim * 2 + chunk_place<kDim>(lane % 16, lane / 16);
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t b[4];
          load_matrix_x4_transposed(b, x ^ (d * 32));
          mma_16x8x16<T>(sum[tensor][2 * d], weight, b[0], b[1]);
          mma_16x8x16<T>(sum[tensor][2 * d + 1], weight, b[2], b[3]);
        }
      }
    }
    word = next;
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int step = 1; step <= 2; step *= 2) {
      total[r] += __shfl_xor_sync(~0u, total[r], step);
      others[r] += __shfl_xor_sync(~0u, others[r], step);
    }
    const int group = tile0 + lane / 4 + 8 * r;
    if (group >= p.groups) continue;
    float* out = tail.sums[head] + (int64_t{group} * tail.partials + part * kCut.splits + own / kOwn) * tail.width;
    if (lane % 4 == 0) *reinterpret_cast<float4*>(out) = {high[r], total[r], others[r], 0};
#pragma unroll
    for (int i = 0; i < kSums * kDim / 8; ++i) {
      const int tensor = i / (kDim / 8), d = i % (kDim / 8), channel = 8 * d + lane % 4 * 2;
      if (channel >= p.dim) continue;
      *reinterpret_cast<float2*>(out + kTailHeader + tensor * p.dim + channel) = {sum[tensor][d][2 * r],
                                                                                  sum[tensor][d][2 * r + 1]};
    }
  }
}

struct VirtualLaunch {
  PerHead<float> k, value, bias;
  PerHead<uint32_t> mask;  // [rows, words of the groups]
  int32_t rows;
};

// A block per row of a head. Group c sees virtual key c, unless it dropped nothing.
__global__ void __launch_bounds__(kMeanThreads, 4) virtual_keys(ProxyLaunch p, TailLaunch tail, VirtualLaunch to) {
  const int64_t head = blockIdx.x / to.rows;
  const int group = blockIdx.x % to.rows, channel = threadIdx.x, words = (p.groups + 31) / 32;
  bool sees = false;
  if (group < p.groups) {
    const Merged all = merge<false>(p, tail, head, group);
    const int64_t at = int64_t{group} * p.dim + channel;
    const float centre = block_total(channel < p.dim ? p.centroids[head][at] * all.k : 0);
    if (channel < p.dim) to.k[head][at] = all.k, to.value[head][at] = all.v;
    const float bias = all.dropped > 0 ? all.top + logf(all.dropped) - p.scale * centre : -INFINITY;
    if (channel == 0) to.bias[head][group] = bias;
    sees = tail.sizes[head][group] > 0 && isfinite(bias);
  }
  for (int w = threadIdx.x; w < words; w += kMeanThreads) {
    to.mask[head][int64_t{group} * words + w] = sees && w == group / 32 ? 1u << (group % 32) : 0u;
  }
}

// A part's share of the mean of the keys that take part.
__global__ void __launch_bounds__(kMostDim) key_means(ProxyLaunch p, TailLaunch tail, int parts) {
  const int64_t head = blockIdx.x / parts;
  const int part = blockIdx.x % parts, channel = threadIdx.x;
  if (channel >= p.dim) return;
  double sum = 0;
  const auto begin = static_cast<int32_t>(int64_t{p.count} * part / parts);
  const auto end = static_cast<int32_t>(int64_t{p.count} * (part + 1) / parts);
#pragma unroll 8
  for (int32_t key = begin; key < end; ++key) sum += static_cast<double>(p.element(p.k.row(head, p.token(key))[channel]));
  tail.centre[head][part * p.dim + channel] = static_cast<float>(sum / p.count);
}

struct MixLaunch {
  PerHead<float> value, share;  // [rows, dim], [rows]
  int32_t rows, values;
  double weight;
  const uint32_t* keep;  // [words] keys that every query sees beside the others; null: none
  int32_t centre_parts;  // 0: codes stand for the keys themselves
};

// What the always-kept keys weigh for a group, relative to exp(top). By the whole block.
__device__ float text_mass(const ProxyLaunch& p, const uint32_t* keep, int64_t words, int64_t head, int group, float centre,
                           float top) {
  if (keep == nullptr) return 0;
  const float* centroid = p.centroids[head] + int64_t{group} * p.dim;
  float text = 0;
  for (int64_t w = threadIdx.x; w < words; w += kMeanThreads) {
    for (uint32_t bits = keep[w]; bits != 0; bits &= bits - 1) {
      const uint16_t* key = p.k.row(head, 32 * w + __ffs(static_cast<int>(bits)) - 1);
      float dot = -centre;
      for (int c = 0; c < p.dim; ++c) dot = fmaf(centroid[c], p.element(key[c]), dot);
      text += expf(dot * p.scale - top);
    }
  }
  return block_total(text);
}

// A block per row of a head: what it mixes in, of the share that keep found.
__global__ void __launch_bounds__(kMeanThreads)
    mixed_shares(ProxyLaunch p, MixLaunch to, PerHead<const float> log_mass, int64_t words) {
  const int64_t head = blockIdx.x / to.rows;
  const int group = blockIdx.x % to.rows;
  const float dropped = group < p.groups ? to.share[head][group] : 0;
  float text = 0;
  if (dropped > 0) text = text_mass(p, to.keep, words, head, group, 0, log_mass[head][group]);
  if (threadIdx.x == 0) to.share[head][group] = fminf(static_cast<float>(to.weight) * dropped / (1 + text), kMostShare);
}

// A block per row of a head: its mean, and how much of it is mixed in.
__global__ void __launch_bounds__(kMeanThreads, 4) mixed_rows(ProxyLaunch p, TailLaunch tail, MixLaunch to) {
  const int64_t head = blockIdx.x / to.rows;
  const int group = blockIdx.x % to.rows, channel = threadIdx.x;
  Merged all;
  float text = 0;
  if (group < p.groups) {
    all = merge<true>(p, tail, head, group);
    if (to.keep != nullptr) {
      const float* centroid = p.centroids[head] + int64_t{group} * p.dim;
      float moved = 0;
      for (int i = 0; i < to.centre_parts && channel < p.dim; ++i) moved += tail.centre[head][i * p.dim + channel];
      const float centre = block_total(channel < p.dim ? centroid[channel] * moved : 0);
      text = text_mass(p, to.keep, tail.words, head, group, centre, all.top);
    }
  }
  if (channel < p.dim && group < to.values) to.value[head][int64_t{group} * p.dim + channel] = all.v;
  if (channel != 0) return;
  const double mass = static_cast<double>(all.dropped) + static_cast<double>(all.others) + static_cast<double>(text);
  const double share = all.dropped > 0 ? to.weight * static_cast<double>(all.dropped) / mass : 0;
  to.share[head][group] = fminf(static_cast<float>(share), kMostShare);
}

}  // namespace

TailSpace::TailSpace(const Exec& exec, int64_t rows, int64_t dim, bool exact, bool mean, int64_t each) {
  const Cut cut = cut_of(exact, mean);
  const bool wgmma = uses_wgmma(exec, exact, mean);
  partials = wgmma ? wgmma_partials(each) : cut.partials();
  splits = wgmma ? 1 : cut.splits;
  width = static_cast<int>(kTailHeader + (mean ? 1 : 2) * dim);
  floats = rows * partials * width;
}

void tail_sums_pass(const Exec& exec, const ProxyLaunch& p, const TailLaunch& tail, bool mean) {
  if (uses_wgmma(exec, p.exact, mean)) return mean_sums_sm90(exec, p, tail);
  const auto tiles = static_cast<int>(ceil_div(p.groups, kTile));
  const auto fits = [&]<int kDim, Source kSource, bool kMean>(int of) {
    return Space<kDim, kSource, kMean>::bytes(p, of) <= exec.device->shared_bytes;
  };
  const auto sums = [&]<class T, int kDim, Source kSource, bool kMean>() {
    constexpr Cut kCut = cut_of(kSource == Source::exact, kMean);
    int most = kCut.most_tiles;
    while (most > 1 && !fits.template operator()<kDim, kSource, kMean>(most)) --most;
    const int64_t blocks = ceil_div(tiles, most);
    const auto of = static_cast<int>(ceil_div(tiles, blocks));  // tiles of a block, as even as can be
    launch(exec, "tail_sums", tail_sums<T, kDim, kSource, kMean>, p.heads * blocks * kCut.parts, 32 * of * kCut.splits,
           Space<kDim, kSource, kMean>::bytes(p, of), p, tail, of, static_cast<int>(blocks));
  };
  const auto from = [&]<class T, int kDim, bool kMean>() {
    if (p.exact) {
      sums.template operator()<T, kDim, Source::exact, kMean>();
    } else if (fits.template operator()<kDim, Source::shared_tables, kMean>(1)) {
      sums.template operator()<T, kDim, Source::shared_tables, kMean>();
    } else {
      sums.template operator()<T, kDim, Source::tables, kMean>();
    }
  };
  const auto of = [&]<class T, bool kMean>() {
    p.dim <= 64 ? from.template operator()<T, 64, kMean>() : from.template operator()<T, 128, kMean>();
  };
  const auto with = [&]<class T>() { mean ? of.template operator()<T, true>() : of.template operator()<T, false>(); };
  p.f16 ? with.template operator()<__half>() : with.template operator()<__nv_bfloat16>();
}

namespace {

// What one head needs: the sums, and where codes are about their mean that mean, in kCentreParts.
int64_t floats_of_head(const TailSpace& space, int64_t dim) { return round_up(space.floats + kCentreParts * dim, 4); }

}  // namespace

int64_t tail_scratch(const Exec& exec, const Sizes& sizes) {
  if (sizes.whole_codes && sizes.extra > 0) return mask_dropped_codes_scratch(sizes);
  const TailSpace space(exec, sizes.groups, sizes.dim, sizes.codes == 0, sizes.extra == 0, 1);
  const int64_t bytes = sizes.heads * floats_of_head(space, sizes.dim) * 4;
  return sizes.parts == 0 ? bytes : std::max(bytes, part_means_scratch(exec, sizes));
}

void tail(const Exec& exec, const TailArgs& args) {
  bool mean = false;
  switch (args.tail) {
    case Tail::none:
      return;
    case Tail::first_order:
      break;
    case Tail::mean:
      mean = true;
      break;
    case Tail::centroids:
      return mask_dropped_codes(exec, args);
    case Tail::means:
      if (args.parts.log_mass) {
        const MixLaunch to{args.value, args.share, static_cast<int32_t>(args.rows), 0, args.weight, args.keep, 0};
        launch(exec, "mixed_shares", mixed_shares, args.heads * args.rows, kMeanThreads, 0,
               proxy_launch(args.proxy, args.heads), to, args.parts.log_mass, mask_words(args.proxy.k.tokens));
        return part_means(exec, args);
      }
      mean = true;  // for its shares
      break;
  }
  const ProxyLaunch p = proxy_launch(args.proxy, args.heads);
  const TailSpace space(exec, p.groups, p.dim, p.exact, mean, 1);
  const int64_t floats = floats_of_head(space, p.dim);
  require(args.heads * floats * 4 <= args.scratch.bytes, Status::internal, "tail: scratch is smaller than its plan");
  auto* const scratch = static_cast<float*>(args.scratch.data);
  const TailLaunch tail{.v = head_rows(args.v),
                        .sizes = args.sizes,
                        .kept = args.kept,
                        .words = mask_words(args.proxy.k.tokens),
                        .partials = space.partials,
                        .splits = space.splits,
                        .width = space.width,
                        .sums = {scratch, floats},
                        .centre = {scratch + space.floats, floats}};
  tail_sums_pass(exec, p, tail, mean);
  const auto rows = static_cast<int32_t>(args.rows);
  if (!mean) {
    const VirtualLaunch to{args.k, args.value, args.bias, args.mask, rows};
    return launch(exec, "virtual_keys", virtual_keys, args.heads * args.rows, kMeanThreads, 0, p, tail, to);
  }
  const bool centred = args.centred && args.keep != nullptr;
  const int32_t values = args.tail == Tail::means ? p.groups : rows;  // means have no row for other queries
  const MixLaunch to{args.value, args.share, rows, values, args.weight, args.keep, centred ? kCentreParts : 0};
  if (centred)
    launch(exec, "key_means", key_means, int64_t{p.heads} * to.centre_parts, kMostDim, 0, p, tail, to.centre_parts);
  launch(exec, "mixed_rows", mixed_rows, args.heads * args.rows, kMeanThreads, 0, p, tail, to);
  if (args.tail == Tail::means) part_means(exec, args);
}

}  // namespace scope::cuda
