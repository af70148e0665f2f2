// r_c, and where each row's selection ends.
#include "cuda/device/reduce.cuh"
#include "cuda/select/passes.h"
#include "cuda/select/scanned.cuh"

namespace scope::cuda {

namespace {

// The logit at the top of a bin, of an exact proxy's row.
__device__ float top_of(const ProxyLaunch& p, const SelectSpace& s, int64_t head, int group, int bin) {
  const float unit = s.unit[head][group], height = 1 - static_cast<float>(bin) / kBins;
  if (unit == 0) return p.score(static_cast<int32_t>(head), group, 0);  // all logits are one
  return p.scale * (height - s.high[head][group]) / unit;
}

__global__ void __launch_bounds__(kSolveThreads)
    set_budgets(ProxyLaunch p, SelectSpace s, Bins bins, RuleLaunch a, int key_bits) {
  const int64_t head = blockIdx.x;
  const int32_t* sizes = a.sizes[head];
  const int32_t* top_p = a.top_p[head];
  const bool fixed = a.fixed > 0;
  int64_t budget = 0;
  if (a.shares_budget) {
    int64_t sums[2] = {};  // pairs of queries and keys, queries
    for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
      if (sizes[c] > 0) sums[0] += int64_t{sizes[c]} * max(top_p[c], a.floor);
      sums[1] += sizes[c];
    }
    block_sums<kSolveThreads>(sums);
    budget = sums[1] == 0 ? 0 : (sums[0] + sums[1] - 1) / sums[1];
  }
  const auto of_all = [&](int64_t kept) { return a.all == 0 ? kept : (kept * a.all + p.count - 1) / p.count; };
  if (threadIdx.x == 0) {
    *a.head_budget[head] = of_all(budget);
    if (fixed) *a.rho_used[head] = a.rho, *a.alpha_used[head] = a.alpha;
  }
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
    int32_t count = 0, need = 0;
    uint32_t limit = 0, end = 0, todo = 0;
    float dropped = 0, log_mass = -INFINITY;
    if (sizes[c] > 0) {
      const int32_t least = max(a.floor, static_cast<int32_t>(budget));
      count = fixed ? a.fixed : max(top_p[c], least);
      const Scanned row(s, bins, head, c);
      const int bin = row.search(0, bins.count - 1, [&](int b) { return row.keys(b) >= count; });
      const int32_t n = row.keys(bin) - row.keys(bin - 1);
      need = count - row.keys(bin - 1);
      if (a.dropped) {  // of the last bin's mass, the share of its keys
        const float inside = row.below(bin - 1) - row.below(bin);
        const float left = row.below(bin) + inside * static_cast<float>(n - need) / static_cast<float>(n);
        if (count < p.count) dropped = fminf(left / row.mass, 1.0f);
        const int first = row.search(0, bins.count - 1, [&](int b) { return row.keys(b) > 0; });
        const float weight = a.all == 0 ? 1 : static_cast<float>(a.all) / static_cast<float>(p.count);  // of a sampled key
        log_mass = logf(row.mass * weight) + top_of(p, s, head, c, first);
      }
      limit = static_cast<uint32_t>(bin) << bins.sub_bits;
      end = limit + (1u << bins.sub_bits);
      const int dropped_bits = max(0, bins.sub_bits - (32 - key_bits));
      const float resolution = row.width / static_cast<float>(1 << (bins.sub_bits - dropped_bits));
      if (a.all > 0) {  // as if the bin's keys were evenly spread, of which few are not
        if (count == p.count || bin == bins.count - 1) {
          limit = static_cast<uint32_t>(bins.count) << bins.sub_bits;
        } else if (need == count) {  // the whole bin, or nothing might be kept
          limit += 1u << bins.sub_bits;
        } else {
          limit += static_cast<uint32_t>((int64_t{need} << bins.sub_bits) / n);
        }
        end = limit;
        if (need < n && n > p.count / 8 && count < p.count) todo = kExactSelect;
        need = 0;
      } else if (need == n) {
        limit = end;
        need = 0;
      } else if (n > s.most_candidates || resolution > 1e-3f ||
                 (p.exact && bin == bins.count - 1)) {  // of keys below the range
        todo = kExactSelect;
      }
      if (!(s.range[head][c] <= kMostRange)) todo = kExactSelect;
      if (todo != 0) limit = end = 0, need = 0;
    }
    // Of a sample, the pass that makes the masks counts.
    a.counts[head][c] = a.all == 0 ? count : todo != 0 ? static_cast<int32_t>(of_all(count)) : 0;
    if (fixed) a.top_p[head][c] = 0;
    if (a.dropped) a.dropped[head][c] = dropped, a.log_mass[head][c] = log_mass;
    s.limit[head][c] = limit;
    s.end[head][c] = end;
    s.need[head][c] = need;
    s.todo[head][c] = todo;
  }
}

}  // namespace

void budgets_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a) {
  launch(exec, "set_budgets", set_budgets, p.heads, kSolveThreads, 0, p, s, bins, a, index_bits(p.count));
}

}  // namespace scope::cuda
