// The first-order tail on CUDA: for each group, the softmax-weighted means of the keys and values that it drops.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/device/ptx_sm80.cuh"
#include "cuda/proxy.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

// A block has 32 groups and a part of the keys, 64 at a time. Each of its warps takes 16 of the groups and 16 of the 64
// keys, computes their weights where its multiplication wants them, and sums all channels of keys and values.
constexpr int kGroups = 32, kKeys = 64, kQuarters = 4, kThreads = 256, kMeanThreads = 128;
// The highest logit seen may lag this far behind the true one, which saves most of the rescaling.
constexpr float kLag = 6, kLog2E = 1.44269504f;
// Bytes of shared memory beside the dynamic part.
constexpr int kStaticShared = 2 * kGroups * kKeys / 32 * 4 + 2 * kQuarters * kGroups * 4;

constexpr int kTailParts = 8;  // of the keys; a constant, so that the sums do not depend on the chunk

struct TailLaunch {
  HeadRows<const uint16_t> v;
  PerHead<float> k, value, bias;
  PerHead<const int32_t> sizes;
  PerHead<float> parts;  // scratch [groups, kTailParts, 2 + 2 dim]
};

// The keys that each group keeps.
struct KeptLaunch {
  PerHead<const uint32_t> rows;  // [groups, words]
  int64_t words;
};

int64_t parts_size(int64_t groups, int64_t dim) { return groups * kTailParts * (2 + 2 * dim); }

// Where logits come from. Shared tables are [groups / 8][subspaces, codes][8 groups]: four keys' codes fall into
// different banks more often than not.
enum class Source { exact, shared_tables, tables };

// Dynamic shared memory in bytes: two stages of keys and values, their codes, then tables or centroids.
template <int kDim>
struct Space {
  static constexpr int kRows = kKeys * kDim * 2, kStage = 2 * kRows;
  static constexpr int kCodes = 2 * kStage;
  __host__ __device__ static int source(const ProxyLaunch& p) {
    return kCodes + (p.exact ? 0 : 2 * p.subspaces * kKeys * 4);
  }
  static int64_t bytes(const ProxyLaunch& p, Source from) {
    if (from == Source::exact) return source(p) + int64_t{2} * kGroups * kDim * 2;
    return source(p) + (from == Source::tables ? 0 : int64_t{kGroups} * p.subspaces * p.codes * 4);
  }
};

// Where channel 8 * chunk of a row lies: rows of eight 16-byte chunks or more, dealt out so that a column of eight rows
// uses all banks.
template <int kDim>
__device__ uint32_t chunk_place(int row, int chunk) {
  return row * kDim * 2 + (chunk ^ (row % 8)) * 16;
}

// Bits of keys [first, first + 32) in a row of the mask.
__device__ uint32_t kept_bits(const ProxyLaunch& p, const uint32_t* row, int32_t first) {
  if (p.rows == nullptr) return row[first / 32];
  const int32_t last = min(first + 31, p.count - 1), start = p.rows[first], end = p.rows[last];
  if (end - start == last - first) {
    const uint32_t word = row[start / 32] >> (start % 32);
    return end / 32 == start / 32 ? word : word | row[end / 32] << (32 - start % 32);
  }
  uint32_t word = 0;
  for (int32_t key = first; key <= last; ++key) word |= (row[p.rows[key] / 32] >> (p.rows[key] % 32) & 1) << (key - first);
  return word;
}

// Which of keys [first, first + 32) a group drops, as bits.
__device__ uint32_t dropped_bits(const ProxyLaunch& p, const KeptLaunch& mask, const TailLaunch& tail, int64_t head,
                                 int group, int64_t first, int64_t end) {
  if (group >= p.groups || first >= end || tail.sizes[head][group] == 0) return 0;
  const uint32_t valid = end - first >= 32 ? ~0u : (1u << (end - first)) - 1;
  return valid & ~kept_bits(p, mask.rows[head] + group * mask.words, static_cast<int32_t>(first));
}

// The same sums for one group, key by key: a kept key or value that is not finite must not reach them, and products with
// a weight of zero would let it.
__device__ float plain_sum(const ProxyLaunch& p, const KeptLaunch& mask, const TailLaunch& tail, int64_t head, int group,
                           int64_t begin, int64_t end, float top, int channel, float& total) {
  float sum = 0;
  total = 0;
  for (int64_t first = begin; first < end; first += 32) {
    for (uint32_t bits = dropped_bits(p, mask, tail, head, group, first, end); bits != 0; bits &= bits - 1) {
      const auto key = static_cast<int32_t>(first) + __ffs(static_cast<int>(bits)) - 1, token = p.token(key);
      const float logit = p.score(static_cast<int32_t>(head), group, key);
      if (isnan(logit)) continue;
      const float weight = expf(logit - top);
      total += weight;
      sum = fmaf(weight,
                 p.element(channel < p.dim ? p.k.row(head, token)[channel] : tail.v.row(head, token)[channel - p.dim]), sum);
    }
  }
  return sum;
}

// A part's result for one group: about its highest dropped logit, the sum of weights relative to it, and two weighted sums.
template <class T, int kDim, Source kSource>
__global__ void __launch_bounds__(kThreads, 1) tail_sums(ProxyLaunch p, KeptLaunch mask, TailLaunch tail, int group_blocks) {
  extern __shared__ __align__(256) char shared[];  // places are XORed with channel offsets
  __shared__ uint32_t dropped[2][kGroups][kKeys / 32];
  __shared__ float tops[kQuarters][kGroups], totals[kQuarters][kGroups];
  auto* const codes = reinterpret_cast<int32_t*>(shared + Space<kDim>::kCodes);  // [2 stages][subspaces][kKeys]
  char* const source = shared + Space<kDim>::source(p);
  auto* const tables = reinterpret_cast<float*>(source);

  const int64_t head = blockIdx.x / kTailParts / group_blocks;
  const int group0 = blockIdx.x / kTailParts % group_blocks * kGroups, part = blockIdx.x % kTailParts;
  const int64_t steps = (p.count + kKeys - 1) / kKeys;
  const int64_t begin = steps * part / kTailParts * kKeys;
  const int64_t end = min(steps * (part + 1) / kTailParts * kKeys, int64_t{p.count});
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tile = warp % 2, quarter = warp / 2;
  const int all_codes = p.subspaces * p.codes;

  if constexpr (kSource == Source::shared_tables) {
    for (int i = thread; i < kGroups * all_codes; i += kThreads) {
      const int group = i / all_codes, at = i % all_codes;
      const int from = min(group0 + group, p.groups - 1);
      tables[(group / 8 * all_codes + at) * 8 + group % 8] = p.tables[head][int64_t{from} * all_codes + at];
    }
  }
  if constexpr (kSource == Source::exact) {  // centroids in two 16-bit parts
    for (int i = thread; i < kGroups * kDim / 2; i += kThreads) {
      const int group = i / (kDim / 2), channel = i % (kDim / 2) * 2;
      float2 x{0, 0};
      if (group0 + group < p.groups && channel < p.dim) {
        x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group0 + group} * p.dim + channel);
      }
      const uint32_t high = pack<T>(x.x, x.y);
      char* const to = source + chunk_place<kDim>(group, channel / 8) + channel % 8 * 2;
      *reinterpret_cast<uint32_t*>(to) = high;
      *reinterpret_cast<uint32_t*>(to + kGroups * kDim * 2) =
          pack<T>(x.x - p.element(static_cast<uint16_t>(high)), x.y - p.element(static_cast<uint16_t>(high >> 16)));
    }
  }

  const auto fetch = [&](int64_t first, int stage) {
    constexpr int kChunks = kDim / 8;
    const int chunk = thread % kChunks;
    const uint32_t to = shared_address(shared) + stage * Space<kDim>::kStage;
#pragma unroll
    for (int row = thread / kChunks; row < kKeys; row += kThreads / kChunks) {
      const bool valid = first + row < end && 8 * chunk < p.dim;
      const int32_t token = valid ? p.token(static_cast<int32_t>(first) + row) : 0;
      const uint32_t place = to + chunk_place<kDim>(row, chunk);
      copy_async_16(place, valid ? p.k.row(head, token) + 8 * chunk : p.k.base, valid);
      copy_async_16(place + Space<kDim>::kRows, valid ? tail.v.row(head, token) + 8 * chunk : tail.v.base, valid);
    }
    if constexpr (kSource != Source::exact) {
      for (int i = thread; i < p.subspaces * kKeys; i += kThreads) {
        const int64_t key = first + i % kKeys;
        const int32_t* labels = p.labels[head];
        copy_async_4(shared_address(codes + stage * p.subspaces * kKeys + i),
                     key < end ? labels + int64_t{i / kKeys} * p.count + key : labels, key < end);
      }
    }
  };
  const auto dropped_word = [&](int64_t first) {
    return thread >= kGroups * kKeys / 32
               ? 0
               : dropped_bits(p, mask, tail, head, group0 + thread / (kKeys / 32), first + thread % (kKeys / 32) * 32, end);
  };
  const auto set_dropped = [&](int stage, uint32_t word) {
    if (thread < kGroups * kKeys / 32) dropped[stage][0][thread] = word;
  };

  // Entry 2 r + e of a fragment is row lane / 4 + 8 r, column 2 (lane % 4) + e.
  float sum[2][kDim / 8][4] = {};  // of keys, of values; [8 channels]
  float high[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  if (begin < end) {
    fetch(begin, 0);
    set_dropped(0, dropped_word(begin));
  }
  for (int64_t first = begin; first < end; first += kKeys) {
    const int stage = static_cast<int>((first - begin) / kKeys % 2);
    copy_async_wait();
    __syncthreads();
    uint32_t next = 0;
    if (first + kKeys < end) {
      fetch(first + kKeys, stage ^ 1);
      next = dropped_word(first + kKeys);
    }
    const uint32_t rows = shared_address(shared) + stage * Space<kDim>::kStage + quarter * 16 * kDim * 2;

    float logit[2][4] = {};  // [8 keys]
    if constexpr (kSource == Source::exact) {
      const int q_row = lane % 16, k_row = lane % 8 + lane / 16 * 8;
      const uint32_t q = shared_address(source) + chunk_place<kDim>(tile * 16 + q_row, lane / 16);
      const uint32_t k = rows + chunk_place<kDim>(k_row, lane / 8 % 2);
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        uint32_t a[4], b[4];
        load_matrix_x4(b, k ^ (c * 32));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          load_matrix_x4(a, (q ^ (c * 32)) + half * kGroups * kDim * 2);
          mma_16x8x16<T>(logit[0], a, b[0], b[1]);
          mma_16x8x16<T>(logit[1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) logit[i / 4][i % 4] *= p.scale;
    } else {
      const int32_t* code = codes + stage * p.subspaces * kKeys + quarter * 16 + lane % 4 * 2;
      const int row = lane / 4;
      for (int m = 0; m < p.subspaces; ++m, code += kKeys) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // keys +0, +1, +8, +9, each in two groups
          const int column = i / 2 % 2 + i / 4 * 8, r = i % 2;
          const int at = m * p.codes + code[column];
          if constexpr (kSource == Source::shared_tables) {
            logit[i / 4][2 * r + i / 2 % 2] += tables[((2 * tile + r) * all_codes + at) * 8 + row];
          } else {
            const int group = min(group0 + tile * 16 + row + 8 * r, p.groups - 1);
            logit[i / 4][2 * r + i / 2 % 2] += p.tables[head][int64_t{group} * all_codes + at];
          }
        }
      }
    }

    float factor[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t bits = dropped[stage][tile * 16 + lane / 4 + 8 * r][quarter / 2] >> (quarter % 2 * 16 + lane % 4 * 2);
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = logit[i / 2][2 * r + i % 2];
        if ((bits >> (i / 2 * 8 + i % 2) & 1) == 0 || isnan(x)) x = -INFINITY;
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
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) sum[i / (kDim / 4)][i / 2 % (kDim / 8)][2 * r + i % 2] *= factor[r];
      }
    }

    uint32_t weight[4];  // rounded to 16 bits, and summed as rounded: the means are means of what is multiplied
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2;
      const float base = high[r] == -INFINITY ? 0 : high[r];
      const auto weigh = [&](int e) { return exp2_fast((logit[i / 2][2 * r + e] - base) * kLog2E); };
      weight[i] = pack<T>(weigh(0), weigh(1));
      total[r] += p.element(static_cast<uint16_t>(weight[i])) + p.element(static_cast<uint16_t>(weight[i] >> 16));
    }
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
      const uint32_t x = rows + tensor * Space<kDim>::kRows + chunk_place<kDim>(lane % 16, lane / 16);
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t b[4];
        load_matrix_x4_transposed(b, x ^ (d * 32));
        mma_16x8x16<T>(sum[tensor][2 * d], weight, b[0], b[1]);
        mma_16x8x16<T>(sum[tensor][2 * d + 1], weight, b[2], b[3]);
      }
    }
    set_dropped(stage ^ 1, next);
  }

  // The four quarters add up in their order, in memory that the stages no longer need.
  constexpr int kPitch = 2 * kDim + 4;
  auto* const sums = reinterpret_cast<float*>(shared);  // [kGroups][kPitch]
  static_assert(kGroups * kPitch * 4 <= 2 * Space<kDim>::kStage);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    const int group = tile * 16 + lane / 4 + 8 * r;
    if (lane % 4 == 0) tops[quarter][group] = high[r], totals[quarter][group] = total[r];
  }
  __syncthreads();
  const auto top_of = [&](int group) {
    return fmaxf(fmaxf(tops[0][group], tops[1][group]), fmaxf(tops[2][group], tops[3][group]));
  };
  const auto share = [&](int q, int group) {
    return tops[q][group] == -INFINITY ? 0 : exp2_fast((tops[q][group] - top_of(group)) * kLog2E);
  };
  for (int q = 0; q < kQuarters; ++q) {
    if (quarter == q) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int group = tile * 16 + lane / 4 + 8 * r;
        const float factor = share(q, group);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) {
          const int tensor = i / (kDim / 4), d = i / 2 % (kDim / 8), e = i % 2;
          float& to = sums[group * kPitch + tensor * kDim + 8 * d + lane % 4 * 2 + e];
          const float x = sum[tensor][d][2 * r + e];
          to = q == 0 ? x * factor : fmaf(x, factor, to);
        }
      }
    }
    __syncthreads();
  }

  bool bad = false;
  for (int i = thread; i < kGroups * 2 * kDim; i += kThreads)
    bad |= !isfinite(sums[i / (2 * kDim) * kPitch + i % (2 * kDim)]);
  bad = __syncthreads_or(bad);
  for (int i = thread; i < kGroups * (2 * p.dim); i += kThreads) {
    const int g = i / (2 * p.dim), channel = i % (2 * p.dim), group = group0 + g;
    if (group >= p.groups) break;
    const float top = top_of(g);
    float all = 0, x = sums[g * kPitch + (channel < p.dim ? channel : kDim + channel - p.dim)];
    for (int q = 0; q < kQuarters; ++q) all = fmaf(totals[q][g], share(q, g), all);
    if (bad) x = plain_sum(p, mask, tail, head, group, begin, end, top, channel, all);
    float* out = tail.parts[head] + (int64_t{group} * kTailParts + part) * (2 + 2 * p.dim);
    if (channel == 0) out[0] = top, out[1] = all;
    out[2 + channel] = x;
  }
}

__global__ void __launch_bounds__(kMeanThreads) tail_means(ProxyLaunch p, TailLaunch tail) {
  __shared__ float products[kMeanThreads];
  const int64_t head = blockIdx.x / p.groups;
  const int group = blockIdx.x % p.groups, channel = threadIdx.x;
  const float* parts = tail.parts[head] + int64_t{group} * kTailParts * (2 + 2 * p.dim);
  const int step = 2 + 2 * p.dim;
  float top = -INFINITY, total = 0, k = 0, v = 0;
  for (int i = 0; i < kTailParts; ++i) top = fmaxf(top, parts[i * step]);
  for (int i = 0; i < kTailParts; ++i) {
    if (parts[i * step + 1] == 0) continue;
    const float scale = expf(parts[i * step] - top);
    total += parts[i * step + 1] * scale;
    if (channel >= p.dim) continue;
    k = fmaf(parts[i * step + 2 + channel], scale, k);
    v = fmaf(parts[i * step + 2 + p.dim + channel], scale, v);
  }
  const bool any = total > 0;
  k = any ? k / total : 0;
  v = any ? v / total : 0;
  const int64_t at = int64_t{group} * p.dim + channel;
  products[threadIdx.x] = channel < p.dim ? p.centroids[head][at] * k : 0;
  if (channel < p.dim) tail.k[head][at] = k, tail.value[head][at] = v;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float centre = 0;
  for (const float x : products) centre += x;
  tail.bias[head][group] = any ? top + logf(total) - p.scale * centre : -INFINITY;
}

// Group c sees virtual key c, unless it dropped nothing. A block per row of a head.
__global__ void __launch_bounds__(kMeanThreads) tail_mask(TailLaunch tail, PerHead<uint32_t> mask, int groups, int rows) {
  const int head = blockIdx.x / rows, c = blockIdx.x % rows, words = (groups + 31) / 32;
  const bool sees = c < groups && tail.sizes[head][c] > 0 && isfinite(tail.bias[head][c]);
  for (int w = threadIdx.x; w < words; w += kMeanThreads) {
    mask[head][int64_t{c} * words + w] = sees && w == c / 32 ? 1u << (c % 32) : 0u;
  }
}

}  // namespace

int64_t tail_scratch(const Exec&, const Sizes& sizes) {
  return sizes.extra == 0 ? 0 : sizes.heads * parts_size(sizes.groups, sizes.dim) * 4;
}

void tail(const Exec& exec, const TailArgs& args) {
  switch (args.tail) {
    case Tail::none:
      return;
    case Tail::first_order:
      break;
    case Tail::centroids:
    case Tail::mean:
      fail(Status::unsupported, "tail: cuda has none but first_order");
  }
  const ProxyLaunch p = proxy_launch(args.proxy, args.heads);
  const int64_t room = parts_size(p.groups, p.dim);
  require(args.heads * room * 4 <= args.scratch.bytes, Status::internal, "tail: scratch is smaller than its plan");
  const TailLaunch tail{head_rows(args.v), args.k,     args.value,
                        args.bias,         args.sizes, {static_cast<float*>(args.scratch.data), room}};
  const KeptLaunch kept{args.kept, mask_words(args.proxy.k.tokens)};
  const int64_t group_blocks = ceil_div(p.groups, kGroups);
  const auto sums = [&]<class T, int kDim, Source kSource>() {
    launch(exec, "tail_sums", tail_sums<T, kDim, kSource>, p.heads * group_blocks * kTailParts, kThreads,
           Space<kDim>::bytes(p, kSource), p, kept, tail, static_cast<int>(group_blocks));
  };
  const auto from = [&]<class T, int kDim>() {
    if (p.exact) {
      sums.template operator()<T, kDim, Source::exact>();
    } else if (Space<kDim>::bytes(p, Source::shared_tables) <= exec.device->shared_bytes - kStaticShared) {
      sums.template operator()<T, kDim, Source::shared_tables>();
    } else {
      sums.template operator()<T, kDim, Source::tables>();
    }
  };
  const auto of = [&]<class T>() { p.dim <= 64 ? from.template operator()<T, 64>() : from.template operator()<T, 128>(); };
  p.f16 ? of.template operator()<__half>() : of.template operator()<__nv_bfloat16>();
  launch(exec, "tail_means", tail_means, int64_t{p.heads} * p.groups, kMeanThreads, 0, p, tail);
  launch(exec, "tail_mask", tail_mask, args.heads * args.rows, kMeanThreads, 0, tail, args.mask, p.groups,
         static_cast<int>(args.rows));
}

}  // namespace scope::cuda
