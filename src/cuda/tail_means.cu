// Means of parts of groups on CUDA: masks over the sampled keys, the sums that every mean has, and a row for each part.
#include "core/numeric.h"
#include "cuda/tail_merge.cuh"

namespace scope::cuda {

namespace {

// What one head needs, beside the sums.
struct Layout {
  TailSpace space;
  int64_t words;   // of a group's mask over the sampled keys
  int64_t groups;  // of these masks
  int64_t floats;  // of it all: 32-bit words

  Layout(const Exec& exec, int64_t groups_, int64_t each, int64_t keys, int64_t dim, int64_t stride)
      : space(exec, groups_ * each, dim, true, true, each),
        words(mask_words(ceil_div(keys, stride))),
        groups(groups_),
        floats(round_up(space.floats + groups * words + groups, 4)) {}
};

struct SampleLaunch {
  PerHead<const uint32_t> kept;  // [groups, words] by token
  int64_t words;
  PerHead<uint32_t> mask;    // [groups, TailLaunch::words] out: the same by sampled key; bits past the last are 0
  PerHead<int32_t> dropped;  // [groups] out: how many of the sample a group drops
  int32_t groups;
};

constexpr int kSampleThreads = 256;

// Bits `start`, `start` + kStride, and so on of a mask, 32 of them; those past the word of bit `last` are 0.
template <int kStride>
__device__ uint32_t every_bit(const uint32_t* mask, int32_t start, int32_t last) {
  uint32_t source[kStride + 1];  // read before the first is used
#pragma unroll
  for (int j = 0; j <= kStride; ++j) source[j] = start / 32 + j <= last / 32 ? mask[start / 32 + j] : 0;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int bit = i * kStride;
    word |= (__funnelshift_r(source[bit / 32], source[bit / 32 + 1], start % 32) >> (bit % 32) & 1) << i;
  }
  return word;
}

// A warp for each group of a head; a lane has a word at a time. kStride: the tail's; 0: any.
template <int kStride>
__global__ void __launch_bounds__(kSampleThreads) sample_masks(ProxyLaunch p, TailLaunch tail, SampleLaunch to) {
  const int64_t at = (blockIdx.x * int64_t{kSampleThreads} + threadIdx.x) / 32, head = at / to.groups;
  const auto group = static_cast<int32_t>(at % to.groups), lane = static_cast<int32_t>(threadIdx.x % 32);
  if (head >= p.heads) return;
  const TailKeys all(p, tail);
  const uint32_t* kept = to.kept[head] + group * to.words;
  int32_t kept_keys = 0;
  for (int64_t w = lane; w < tail.words; w += 32) {
    uint32_t word = 0;
    const int32_t first = static_cast<int32_t>(w) * 32, n = min(32, all.count - first);
    const int32_t start = n > 0 ? all.token(p, tail, first) : 0, last = n > 0 ? all.token(p, tail, first + n - 1) : 0;
    if (kStride > 0 && n > 0 && last - start == (n - 1) * kStride) {  // all tokens between are keys
      word = every_bit<kStride>(kept, start, last) & ~0u >> (32 - n);
    } else {
#pragma unroll 8
      for (int32_t i = 0; i < n; ++i) {
        const int32_t token = all.token(p, tail, first + i);
        word |= (kept[token / 32] >> (token % 32) & 1) << i;
      }
    }
    to.mask[head][group * tail.words + w] = word;
    kept_keys += __popc(word);
  }
  kept_keys = __reduce_add_sync(~0u, kept_keys);
  if (lane == 0) to.dropped[head][group] = all.count - kept_keys;
}

struct RowsLaunch {
  SampleLaunch sample;
  PerHead<const float> share;  // [groups] of what a group drops; 0: nothing
  PerHead<float> value;        // [rows, dim] out
};

// Of all the keys that a group drops, for one channel; for a group whose sample has none of them. By the whole block.
__device__ Merged mean_of_all(const ProxyLaunch& p, const TailLaunch& tail, const uint32_t* kept, int32_t head,
                              int32_t row) {
  __shared__ float shared[kMeanThreads];
  const int channel = threadIdx.x;
  // The logit of the thread's key of those from `first` on; -inf: the key is kept, or there is none.
  const auto logit = [&](int32_t first) {
    const int32_t key = first + channel, token = key < p.count ? p.token(key) : 0;
    const bool dropped = key < p.count && (kept[token / 32] >> (token % 32) & 1) == 0;
    const float x = dropped ? p.product(head, row, token) : -INFINITY;
    return isnan(x) ? -INFINITY : x;
  };
  Merged all;
  for (int32_t first = 0; first < p.count; first += kMeanThreads) all.top = fmaxf(all.top, logit(first));
  shared[channel] = all.top;
  __syncthreads();
  for (const float x : shared) all.top = fmaxf(all.top, x);
  for (int32_t first = 0; first < p.count && all.top > -INFINITY; first += kMeanThreads) {
    const float x = expf(logit(first) - all.top);
    __syncthreads();
    shared[channel] = x;
    __syncthreads();
    for (int32_t i = 0; i < min(kMeanThreads, p.count - first); ++i) {
      if (shared[i] == 0) continue;
      all.dropped += shared[i];
      if (channel < p.dim) all.v = fmaf(shared[i], p.element(tail.v.row(head, p.token(first + i))[channel]), all.v);
    }
  }
  all.v = all.dropped > 0 ? all.v / all.dropped : 0;
  return all;
}

// Of a row whose sums are not all finite; by the whole block.
__device__ Merged plain_mean(const ProxyLaunch& p, const TailLaunch& tail, int32_t head, int32_t row) {
  const float* parts = tail.sums[head] + int64_t{row} * tail.partials * tail.width;
  float top = -INFINITY;
  for (int i = 0; i < tail.partials; ++i) top = fmaxf(top, parts[i * tail.width]);
  Merged all = merge_plainly<true>(p, tail, head, row, top);
  all.v = all.dropped > 0 ? all.v / all.dropped : 0;
  return all;
}

// A row's mean for the lane's four channels, by a warp: what merge() has for them, in the same order. finite: of all the
// row's sums; else the mean means nothing. kMost: as many partial results as there are, or more.
template <int kMost>
__device__ float4 mean_of_row(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, int row, bool& finite) {
  const int lane = static_cast<int>(threadIdx.x) % 32, channel = 4 * lane;
  const float* parts = tail.sums[head] + int64_t{row} * tail.partials * tail.width;
  float4 sums[kMost];  // read before the first is added
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const bool real = i < tail.partials && channel < p.dim;
    sums[i] = real ? *reinterpret_cast<const float4*>(parts + i * tail.width + kTailHeader + channel) : float4{};
  }
  float4 about{-INFINITY, 0, 0, 0};  // of the lane's partial result, what stands before its sums
  if (lane < tail.partials) about = *reinterpret_cast<const float4*>(parts + lane * tail.width);
  float top = about.x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float own = expf(about.x - top);
  const uint32_t weighs = __ballot_sync(~0u, about.y != 0 || about.z != 0);
  float dropped = 0;
  float4 mean{};
  finite = true;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float scale = __shfl_sync(~0u, own, i), here = __shfl_sync(~0u, about.y, i);
    if ((weighs >> i & 1) == 0) continue;
    dropped += here * scale;
    const float4 x = sums[i];
    finite = finite && isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
    mean = {fmaf(x.x, scale, mean.x), fmaf(x.y, scale, mean.y), fmaf(x.z, scale, mean.z), fmaf(x.w, scale, mean.w)};
  }
  finite = __all_sync(~0u, finite);
  if (!(dropped > 0)) return {0, 0, 0, 0};
  return {mean.x / dropped, mean.y / dropped, mean.z / dropped, mean.w / dropped};
}

constexpr int kRowsOfBlock = kMeanThreads / 32;
// Blocks of a multiprocessor: as many as the registers of what is seldom leave room for.
constexpr int row_blocks(int most) { return most == 4 ? 6 : most == 8 ? 5 : 4; }

// A warp per row of a head: its mean. The block together makes what is seldom: rows whose group's sample has nothing, and
// those with sums that are not finite.
template <int kMost>
__global__ void __launch_bounds__(kMeanThreads, row_blocks(kMost)) part_rows(ProxyLaunch p, TailLaunch tail, RowsLaunch to) {
  enum Left { kNothing, kPlainly, kOfAll };
  __shared__ Left left[kRowsOfBlock];
  const int warp = warp_index(), channel = static_cast<int>(threadIdx.x) % 32 * 4;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kRowsOfBlock, head = (first + warp) / p.groups;
  Left mine = kNothing;
  if (head < p.heads) {
    const int32_t row = (first + warp) % p.groups, group = row / tail.each;
    bool finite = true;
    float4 mean = mean_of_row<kMost>(p, tail, head, row, finite);  // read before it is known whether the row lives
    if (tail.sizes[head][row] == 0 || !(to.share[head][group] > 0)) {
      mean = {0, 0, 0, 0};
    } else if (to.sample.dropped[head][group] == 0) {
      mine = kOfAll;
    } else if (!finite) {
      mine = kPlainly;
    }
    if (channel < p.dim) *reinterpret_cast<float4*>(to.value[head] + int64_t{row} * p.dim + channel) = mean;
  }
  left[warp] = mine;
  if (!__syncthreads_or(mine != kNothing)) return;
#pragma unroll 1
  for (int w = 0; w < kRowsOfBlock; ++w) {
    if (left[w] == kNothing) continue;
    const int32_t its = (first + w) / p.groups, row = (first + w) % p.groups;  // its head
    const uint32_t* kept = to.sample.kept[its] + row / tail.each * to.sample.words;
    const float v = left[w] == kPlainly ? plain_mean(p, tail, its, row).v : mean_of_all(p, tail, kept, its, row).v;
    if (static_cast<int>(threadIdx.x) < p.dim) to.value[its][int64_t{row} * p.dim + threadIdx.x] = v;
    __syncthreads();  // shared memory has been read, and may be another row's
  }
}

}  // namespace

int64_t part_means_scratch(const Exec& exec, const Sizes& sizes) {
  const Layout layout(exec, sizes.groups, sizes.parts, sizes.k_tokens, sizes.dim, sizes.part_stride);
  return sizes.heads * layout.floats * 4;
}

void part_means(const Exec& exec, const TailArgs& args) {
  const Parts& parts = args.parts;
  Proxy proxy = args.proxy;  // of the keys themselves, whatever selected them
  proxy.kind = ProxyKind::exact;
  proxy.groups *= parts.each;
  proxy.centroids = parts.centroids;
  const ProxyLaunch p = proxy_launch(proxy, args.heads);
  const Layout layout(exec, args.proxy.groups, parts.each, p.count, p.dim, parts.stride);
  require(args.heads * layout.floats * 4 <= args.scratch.bytes, Status::internal, "means: scratch is smaller than its plan");
  auto* const scratch = static_cast<float*>(args.scratch.data);
  auto* const masks = reinterpret_cast<uint32_t*>(scratch + layout.space.floats);
  auto* const dropped = reinterpret_cast<int32_t*>(masks + layout.groups * layout.words);
  const TailLaunch tail{.v = head_rows(args.v),
                        .sizes = parts.sizes,
                        .each = static_cast<int32_t>(parts.each),
                        .kept = {masks, layout.floats},
                        .words = layout.words,
                        .by_key = true,
                        .stride = static_cast<int32_t>(parts.stride),
                        .phase = static_cast<int32_t>(parts.phase % parts.stride),
                        .partials = layout.space.partials,
                        .splits = layout.space.splits,
                        .width = layout.space.width,
                        .sums = {scratch, layout.floats},
                        .centre = {}};
  const SampleLaunch sample{.kept = args.kept,
                            .words = mask_words(args.proxy.k.tokens),
                            .mask = {masks, layout.floats},
                            .dropped = {dropped, layout.floats},
                            .groups = static_cast<int32_t>(args.proxy.groups)};
  const auto masks_of = [&]<int kStride>() {
    launch(exec, "sample_masks", sample_masks<kStride>, ceil_div(args.heads * args.proxy.groups, kSampleThreads / 32),
           kSampleThreads, 0, p, tail, sample);
  };
  switch (parts.stride) {
    case 4:
      masks_of.template operator()<4>();
      break;
    case 8:
      masks_of.template operator()<8>();
      break;
    case 16:
      masks_of.template operator()<16>();
      break;
    default:
      masks_of.template operator()<0>();
  }
  tail_sums_pass(exec, p, tail, true);
  const RowsLaunch to{sample, args.share, args.value};
  const auto rows = [&]<int kMost>() {
    launch(exec, "part_rows", part_rows<kMost>, ceil_div(args.heads * p.groups, kRowsOfBlock), kMeanThreads, 0, p, tail, to);
  };
  if (tail.partials <= 4) return rows.template operator()<4>();
  tail.partials <= 8 ? rows.template operator()<8>() : rows.template operator()<kMostPartials>();
}

}  // namespace scope::cuda
