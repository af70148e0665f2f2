// The first-order tail on CUDA: for each group, the softmax-weighted means of the keys and values that it drops.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/select.h"

namespace scope::cuda {

namespace {

// Of a block. A thread owns two channels and, with its neighbour 64 threads on, half of the keys.
constexpr int kGroups = 16, kKeys = 64, kThreads = 128;

// Logits of 64 keys in 16 groups; -inf where a group keeps the key. A thread has one key and every other group, so that
// what it reads for the key serves eight logits, and their loads are under way together.
__device__ void set_logits(const ProxyLaunch& p, const MaskLaunch& mask, const TailLaunch& tail, int64_t head, int group0,
                           int64_t first, int n, float (&logits)[kGroups][kKeys]) {
  constexpr int kEach = kGroups * kKeys / kThreads;
  const int j = threadIdx.x % kKeys, side = threadIdx.x / kKeys;
  const auto key = static_cast<int32_t>(first + min(j, n - 1));
  const int32_t token = p.token(key);
  int group[kEach];
  bool dropped[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    group[i] = min(group0 + side + 2 * i, p.groups - 1);
    const uint32_t word = mask.rows[head][group[i] * mask.words + token / 32];
    dropped[i] =
        (word >> (token % 32) & 1) == 0 && j < n && group0 + side + 2 * i < p.groups && tail.sizes[head][group[i]] > 0;
  }
  float sum[kEach] = {};
  if (p.exact) {
    const uint16_t* row = p.k.row(head, token);
    for (int c = 0; c < p.dim; c += 8) {
      const uint4 x = *reinterpret_cast<const uint4*>(row + c);
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float* q = p.centroids[head] + int64_t{group[i]} * p.dim + c;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[i] = fmaf(q[2 * e], p.element(static_cast<uint16_t>(pairs[e])), sum[i]);
          sum[i] = fmaf(q[2 * e + 1], p.element(static_cast<uint16_t>(pairs[e] >> 16)), sum[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum[i] *= p.scale;
  } else {
    for (int m = 0; m < p.subspaces; ++m) {
      const int64_t code = int64_t{m} * p.codes + p.labels[head][int64_t{m} * p.count + key];
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum[i] += p.tables[head][int64_t{group[i]} * p.subspaces * p.codes + code];
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) logits[side + 2 * i][j] = dropped[i] && !isnan(sum[i]) ? sum[i] : -INFINITY;
}

// A part's result for one group: its highest dropped logit, the sum of weights relative to it, and two weighted sums.
__global__ void __launch_bounds__(kThreads)
    tail_sums(ProxyLaunch p, SelectSpace s, MaskLaunch mask, TailLaunch tail, int group_blocks) {
  __shared__ float weight[kGroups][kKeys];
  __shared__ float top[kGroups], rescale[kGroups], total[kGroups];
  const int64_t head = blockIdx.x / kTailParts / group_blocks;
  const int group0 = blockIdx.x / kTailParts % group_blocks * kGroups, part = blockIdx.x % kTailParts;
  const int channel = 2 * (threadIdx.x % 64), side = threadIdx.x / 64;
  const int64_t begin = int64_t{p.count} * part / kTailParts, end = int64_t{p.count} * (part + 1) / kTailParts;
  if (threadIdx.x < kGroups) top[threadIdx.x] = -INFINITY, total[threadIdx.x] = 0;
  float sum[kGroups][4] = {};  // of both channels of the keys, then of the values
  for (int64_t first = begin; first < end; first += kKeys) {
    const int n = static_cast<int>(min(int64_t{kKeys}, end - first));
    __syncthreads();
    set_logits(p, mask, tail, head, group0, first, n, weight);
    __syncthreads();
    for (int g = threadIdx.x / 32; g < kGroups; g += kThreads / 32) {
      const int lane = threadIdx.x % 32;
      float high = fmaxf(weight[g][lane], weight[g][lane + 32]);
      for (int offset = 16; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
      const float before = top[g], now = fmaxf(before, high);
      const auto weigh = [&](float logit) { return logit == -INFINITY ? 0.0f : expf(logit - now); };
      const float a = weigh(weight[g][lane]), b = weigh(weight[g][lane + 32]);
      weight[g][lane] = a;
      weight[g][lane + 32] = b;
      float sum = a + b;
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      __syncwarp();
      if (lane == 0) {
        rescale[g] = weigh(before);
        total[g] = total[g] * rescale[g] + sum;
        top[g] = now;
      }
    }
    __syncthreads();
    if (channel >= p.dim) continue;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[g][i] *= rescale[g];
    }
#pragma unroll 4
    for (int j = side; j < n; j += 2) {
      const int32_t token = p.token(static_cast<int32_t>(first + j));
      const uint32_t k = *reinterpret_cast<const uint32_t*>(p.k.row(head, token) + channel);
      const uint32_t v = *reinterpret_cast<const uint32_t*>(tail.v.row(head, token) + channel);
      const float x[4] = {p.element(static_cast<uint16_t>(k)), p.element(static_cast<uint16_t>(k >> 16)),
                          p.element(static_cast<uint16_t>(v)), p.element(static_cast<uint16_t>(v >> 16))};
      if (isfinite(x[0] + x[1] + x[2] + x[3])) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[g][i] = fmaf(weight[g][j], x[i], sum[g][i]);
        }
      } else {  // a kept key that is not finite must not reach the mean
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (weight[g][j] == 0) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[g][i] = fmaf(weight[g][j], x[i], sum[g][i]);
        }
      }
    }
  }
  __shared__ float4 other[kGroups][kThreads / 2];
  __syncthreads();
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (side == 1) other[g][channel / 2] = {sum[g][0], sum[g][1], sum[g][2], sum[g][3]};
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (side == 1 || group0 + g >= p.groups) break;
    float* out = s.tail[head] + (int64_t{group0 + g} * kTailParts + part) * (2 + 2 * p.dim);
    if (threadIdx.x == 0) out[0] = top[g], out[1] = total[g];
    if (channel >= p.dim) continue;
    const float4 more = other[g][channel / 2];
    out[2 + channel] = sum[g][0] + more.x;
    out[3 + channel] = sum[g][1] + more.y;
    out[2 + p.dim + channel] = sum[g][2] + more.z;
    out[3 + p.dim + channel] = sum[g][3] + more.w;
  }
}

__global__ void __launch_bounds__(kThreads) tail_means(ProxyLaunch p, SelectSpace s, TailLaunch tail) {
  __shared__ float products[kThreads];
  const int64_t head = blockIdx.x / p.groups;
  const int group = blockIdx.x % p.groups, channel = threadIdx.x;
  const float* parts = s.tail[head] + int64_t{group} * kTailParts * (2 + 2 * p.dim);
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

}  // namespace

void tail_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, const MaskLaunch& mask,
               const TailLaunch& tail) {
  const int64_t group_blocks = ceil_div(p.groups, kGroups), rows = int64_t{p.heads} * p.groups;
  tail_sums<<<static_cast<unsigned>(p.heads * group_blocks * kTailParts), kThreads, 0, stream(exec)>>>(
      p, space, mask, tail, static_cast<int>(group_blocks));
  check_launch("tail_sums");
  tail_means<<<static_cast<unsigned>(rows), kThreads, 0, stream(exec)>>>(p, space, tail);
  check_launch("tail_means");
}

}  // namespace scope::cuda
