// Partial sums over the keys that a row drops, added up in order: by a block of kMeanThreads for each row.
#pragma once

#include "cuda/tail_sums.cuh"

namespace scope::cuda {

inline constexpr int kMeanThreads = 128, kMostPartials = 16;

// One channel's sum over the keys of a partial result, key by key and so without those that are kept.
__device__ __forceinline__ float plain_sum(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, int group,
                                           int partial, float top, int channel) {
  const TailKeys all(p, tail);
  const KeyRange keys = keys_of_part(all.count, partial / tail.splits, tail.partials / tail.splits);
  const uint32_t* kept = kept_row(p, tail, head, group);
  const int own = kTailKeys / tail.splits;
  float sum = 0;
  for (int32_t first = keys.begin + partial % tail.splits * own; first < keys.end; first += kTailKeys) {
    for (int32_t key = first; key < min(first + own, keys.end); ++key) {
      const int32_t word = key / 32 * 32;
      if ((dropped_bits(p, tail, kept, word, keys.end) >> (key - word) & 1) == 0) continue;
      const int32_t token = all.token(p, tail, key);
      const float logit = p.score(static_cast<int32_t>(head), group, all.place(tail, key));
      if (isnan(logit)) continue;
      const uint16_t* row = channel < p.dim ? tail.v.row(head, token) + channel : p.k.row(head, token) + channel - p.dim;
      sum = fmaf(expf(logit - top), p.element(*row), sum);
    }
  }
  return sum;
}

// A group's partial results together, for one channel; a block of kMeanThreads per group.
struct Merged {
  float top = -INFINITY, dropped = 0, others = 0, v = 0, k = 0;  // v and k: means; 0 where nothing is dropped
};
// The same sums where some are not finite: these are made again. Seldom.
template <bool kMean>
__device__ __forceinline__ Merged merge_plainly(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, int group,
                                                float top) {
  const float* parts = tail.sums[head] + int64_t{group} * tail.partials * tail.width;
  Merged all{.top = top};
#pragma unroll 1
  for (int i = 0; i < tail.partials; ++i) {
    const float* part = parts + i * tail.width;
    if (part[1] == 0 && part[2] == 0) continue;
    const float scale = expf(part[0] - top);
    all.dropped += part[1] * scale;
    all.others += part[2] * scale;
#pragma unroll 1
    for (int of = static_cast<int>(threadIdx.x); of < (kMean ? 1 : 2) * p.dim; of += p.dim) {
      float x = part[kTailHeader + of];
      if (!isfinite(x)) x = plain_sum(p, tail, head, group, i, part[0], of);
      float& sum = of < p.dim ? all.v : all.k;
      sum = fmaf(x, scale, sum);
    }
  }
  return all;
}

template <bool kMean>
__device__ Merged merge(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, int group) {
  __shared__ float4 about[kMostPartials];  // of each, what stands before its sums
  constexpr int kSums = kMean ? 1 : 2;
  const float* parts = tail.sums[head] + int64_t{group} * tail.partials * tail.width;
  const int channel = threadIdx.x;
  float sums[kMostPartials][kSums];  // read before the first is added
#pragma unroll
  for (int i = 0; i < kMostPartials; ++i) {
    for (int of = 0; of < kSums; ++of) {
      const bool real = i < tail.partials && channel < p.dim;
      sums[i][of] = real ? parts[i * tail.width + kTailHeader + of * p.dim + channel] : 0;
    }
  }
  if (channel < tail.partials) about[channel] = *reinterpret_cast<const float4*>(parts + channel * tail.width);
  __syncthreads();
  Merged all;
  for (int i = 0; i < tail.partials; ++i) all.top = fmaxf(all.top, about[i].x);
  const auto add = [&](int i, float v, float k) {
    const float scale = expf(about[i].x - all.top);
    all.dropped += about[i].y * scale;
    all.others += about[i].z * scale;
    all.v = fmaf(v, scale, all.v);
    if constexpr (!kMean) all.k = fmaf(k, scale, all.k);
  };
  const auto weighs = [&](int i) { return i < tail.partials && (about[i].y != 0 || about[i].z != 0); };
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kMostPartials; ++i) {
    if (!weighs(i)) continue;
    for (int of = 0; of < kSums; ++of) finite = finite && isfinite(sums[i][of]);
    add(i, sums[i][0], sums[i][kSums - 1]);
  }
  if (!finite) all = merge_plainly<kMean>(p, tail, head, group, all.top);
  all.v = all.dropped > 0 ? all.v / all.dropped : 0;
  all.k = all.dropped > 0 ? all.k / all.dropped : 0;
  return all;
}

// A block's sum, in order.
__device__ inline float block_total(float x) {
  __shared__ float all[kMeanThreads];
  all[threadIdx.x] = x;
  __syncthreads();
  float sum = 0;
  for (const float y : all) sum += y;
  __syncthreads();
  return sum;
}

}  // namespace scope::cuda
