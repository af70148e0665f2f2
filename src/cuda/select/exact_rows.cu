// Rows that the histograms cannot settle, from their f32 logits: right, and rare.
#include "cuda/select/mask.cuh"
#include "cuda/select/passes.h"
#include "cuda/select/rows.cuh"

namespace scope::cuda {

namespace {

constexpr int kRowThreads = 1024;

// Ascending with the logit; NaN is the lowest, and both zeros are one.
__device__ uint32_t order_of(float logit) {
  if (isnan(logit)) return 0;
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float logit_of(uint32_t order) {
  return order == 0 ? NAN : __uint_as_float((order >> 31) != 0 ? order & 0x7fffffffu : ~order);
}

// exp(logit - top) in integers, so that sums do not depend on their order.
__device__ unsigned long long weight_of(float logit, float top) {
  if (logit == top) return 1ull << 34;
  return logit < top ? static_cast<unsigned long long>(exp(static_cast<double>(logit) - static_cast<double>(top)) * 0x1p34)
                     : 0;
}

struct Descent {
  uint32_t order;           // of the logit at which the goal is reached
  int32_t before, equal;    // keys above it, and at it
  unsigned long long mass;  // of the keys above it
};

// Walks down the four bytes of `order`: keys in descending order until `goal` keys, or with kMass their weights, are
// reached.
template <bool kMass>
__device__ Descent descend(const ProxyLaunch& p, int32_t head, int32_t group, float top, double goal) {
  __shared__ uint32_t counts[256];
  __shared__ unsigned long long masses[256];
  __shared__ Descent found;
  Descent at{0, 0, 0, 0};
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) counts[threadIdx.x] = 0, masses[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t key = threadIdx.x; key < p.count; key += kRowThreads) {
      const float logit = p.score(head, group, static_cast<int32_t>(key));
      const uint32_t order = order_of(logit);
      if (shift < 24 && order >> (shift + 8) != at.order >> (shift + 8)) continue;
      atomicAdd(counts + (order >> shift & 255), 1u);
      if (kMass) atomicAdd(masses + (order >> shift & 255), weight_of(logit, top));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int digit = 255;; --digit) {
        const double reached = kMass ? static_cast<double>(at.mass + masses[digit]) : at.before + double(counts[digit]);
        if (digit == 0 || (reached >= goal && counts[digit] > 0)) {
          at.order |= static_cast<uint32_t>(digit) << shift;
          at.equal = static_cast<int32_t>(counts[digit]);
          break;
        }
        at.before += static_cast<int32_t>(counts[digit]);
        at.mass += masses[digit];
      }
      found = at;
    }
    __syncthreads();
    at = found;
  }
  return at;
}

__global__ void __launch_bounds__(kRowThreads) exact_top_p(ProxyLaunch p, SelectSpace s, RuleLaunch a) {
  __shared__ uint32_t top_order;
  __shared__ unsigned long long total;
  for_rows(p, s, kExactTopP, [&](int32_t head, int32_t group) {
    if (threadIdx.x == 0) top_order = 0, total = 0;
    __syncthreads();
    uint32_t order = 0;
    for (int64_t key = threadIdx.x; key < p.count; key += kRowThreads) {
      order = max(order, order_of(p.score(head, group, static_cast<int32_t>(key))));
    }
    atomicMax(&top_order, order);
    __syncthreads();
    const float top = logit_of(top_order);
    unsigned long long mass = 0;
    for (int64_t key = threadIdx.x; key < p.count; key += kRowThreads) {
      mass += weight_of(p.score(head, group, static_cast<int32_t>(key)), top);
    }
    atomicAdd(&total, mass);
    __syncthreads();
    const double goal = *a.rho_used[head] * static_cast<double>(total);
    const Descent at = descend<true>(p, head, group, top, goal);
    if (threadIdx.x == 0) {
      const auto each = static_cast<double>(weight_of(logit_of(at.order), top));
      const double more = each > 0 ? ceil((goal - static_cast<double>(at.mass)) / each) : at.equal;
      const double count = at.before + fmin(fmax(more, 1.0), static_cast<double>(max(at.equal, 1)));
      a.top_p[head][group] = static_cast<int32_t>(fmin(count, static_cast<double>(p.count)));
    }
    __syncthreads();
  });
}

__global__ void __launch_bounds__(kRowThreads) exact_select(ProxyLaunch p, SelectSpace s, RuleLaunch a, MaskLaunch mask) {
  __shared__ int32_t parts[kRowThreads / 32];
  const int warp = warp_index(), lane = threadIdx.x % 32;
  for_rows(p, s, kExactSelect, [&](int32_t head, int32_t group) {
    const int32_t count = a.counts[head][group];
    const Descent last = descend<false>(p, head, group, 0, count);
    uint32_t* row = mask.rows[head] + group * mask.words;
    int32_t left = count - last.before;  // of the equal ones, in ascending order of the keys
    for (int64_t first = 0; first < p.count; first += kRowThreads) {
      const int64_t key = first + threadIdx.x;
      const bool inside = key < p.count;
      const uint32_t order = inside ? order_of(p.score(head, group, static_cast<int32_t>(key))) : 0;
      const uint32_t equal = __ballot_sync(~0u, inside && order == last.order);
      if (lane == 0) parts[warp] = __popc(equal);
      __syncthreads();
      int32_t rank = __popc(equal & ((1u << lane) - 1)), all = 0;
      for (int w = 0; w < kRowThreads / 32; ++w) {
        if (w < warp) rank += parts[w];
        all += parts[w];
      }
      const bool keep = inside && (order > last.order || (order == last.order && rank < left));
      const uint32_t word = __ballot_sync(~0u, keep);
      if (lane == 0 && inside) add_bits(p, row, static_cast<int32_t>(key), word);
      left = max(0, left - all);
      __syncthreads();
    }
  });
}

}  // namespace

void exact_top_p_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, const RuleLaunch& a) {
  launch(exec, "exact_top_p", exact_top_p, blocks_for(exec, 2, int64_t{p.heads} * p.groups), kRowThreads, 0, p, s, a);
}

void exact_select_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, const RuleLaunch& a,
                       const MaskLaunch& mask) {
  launch(exec, "exact_select", exact_select, blocks_for(exec, 2, int64_t{p.heads} * p.groups), kRowThreads, 0, p, s, a,
         mask);
}

}  // namespace scope::cuda
