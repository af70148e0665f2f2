// Whole codes: how many each group keeps.
#include "cuda/device/reduce.cuh"
#include "cuda/select/codes.h"
#include "cuda/select/sample.cuh"

namespace scope::cuda {

namespace {

constexpr int kThreads = 512;  // with more, registers would spill

// One argument: of three smaller ones, the compiler would hold more in registers.
struct KeepLaunch : CodesOrder, CodesRule, CodesSpace {};

// One head's groups, all of whose orders are known.
struct Keeper {
  const ProxyLaunch& p;
  const KeepLaunch& a;
  int64_t head;
  int always;       // codes that all keep
  int64_t queries;  // of all groups
  int floor;        // codes that alpha keeps

  // A share of whole codes may come back from floating point a hair below its integer.
  __device__ int whole_codes(double share) const { return static_cast<int>(share * p.codes + 1e-6); }

  // How many of a group's ranks past what all keep have at most `bound` of the weight; known to be in [from, to].
  __device__ int within(int group, double bound, int from, int to) const {
    const double* mass = a.mass[head] + int64_t{group} * p.codes + always;
    while (from < to) {
      const int middle = (from + to) / 2;
      if (mass[middle] <= bound) {
        from = middle + 1;
      } else {
        to = middle;
      }
    }
    return from;
  }
  // How many codes of its order a group keeps when the rule compares with `bound`, and `inside` of them are within it.
  __device__ int codes_kept(int group, double bound, int inside) const {
    const int rest = p.codes - always;
    if (a.keeps_all(head, group) || bound >= 1.0) return p.codes;
    int kept = a.bound == Bound::share_of_codes ? whole_codes(bound) : inside;
    if (a.bound == Bound::mass_reaching || a.bound == Bound::keys_reaching) kept = max(inside + 1, floor);
    if (a.bound == Bound::keys_reaching) kept = a.reaching[head][int64_t{group} * p.codes + min(kept, p.codes) - 1];
    return always + min(max(kept, min(1, rest)), rest);
  }
  __device__ int32_t keys_kept(int group, int codes) const { return a.keys[head][int64_t{group} * p.codes + codes - 1]; }
  // A bound on the mass is looked up among the ranks.
  __device__ bool searches() const { return a.bound != Bound::share_of_codes; }

  // Pairs of queries and keys kept at low + (i + 1) * quarter. A thread with one group says where its ranks can be, and is
  // told where they are.
  __device__ void pairs_at(double low, double quarter, int from, int to, int (&inside)[3], int64_t (&pairs)[3]) const {
    const bool one_each = p.groups <= kThreads;
    for (int c = threadIdx.x; c < p.groups; c += kThreads) {
      const int64_t size = a.sizes[head][c];
      if (size == 0) continue;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const double bound = low + (i + 1) * quarter;
        if (searches()) inside[i] = within(c, bound, one_each ? from : 0, one_each ? to : p.codes - always);
        pairs[i] += size * keys_kept(c, codes_kept(c, bound, inside[i]));
      }
    }
    block_sums<kThreads>(pairs);
  }
  // A share of codes is one of whole codes, at least 1.
  __device__ double settled(double bound) const {
    return searches() ? bound : static_cast<double>(max(1, whole_codes(bound))) / p.codes;
  }

  // The bound whose density is nearest to the target; 0 if even that keeps more. Three points of the interval at a time:
  // what a round costs is latency.
  __device__ double solve() const {
    double low = 0, high = 1, at_low = 0, at_high = 1;
    int from = 0, to = p.codes - always;
    for (int round = 0; round < 31; ++round) {  // the first looks at 0 alone
      const double quarter = round == 0 ? 0.0 : 0.25 * (high - low);
      int inside[3] = {};
      int64_t pairs[3] = {};
      pairs_at(low, quarter, from, to, inside, pairs);
      double density[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        density[i] = queries == 0 ? 0.0 : static_cast<double>(pairs[i]) / static_cast<double>(queries) / p.count;
      }
      if (round == 0) {
        if (density[0] >= a.target) return low;
        at_low = density[0];
        continue;
      }
      const double start = low;
#pragma unroll
      for (int i = 2; i >= 0; --i) {
        if (density[i] < a.target) continue;
        high = start + (i + 1) * quarter;
        at_high = density[i];
        to = inside[i];
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (density[i] >= a.target) break;
        low = start + (i + 1) * quarter;
        at_low = density[i];
        from = inside[i];
      }
    }
    const double bound = a.target - at_low < at_high - a.target ? low : high;
    return settled(bound);
  }
};

__device__ Keeper keeper_of(const ProxyLaunch& p, const KeepLaunch& a, int64_t head) {
  int64_t sums[2] = {};  // codes that all keep, queries
  for (int r = threadIdx.x; r < p.codes; r += kThreads) sums[0] += a.always(head, r) ? 1 : 0;
  for (int c = threadIdx.x; c < p.groups; c += kThreads) sums[1] += a.sizes[head][c];
  block_sums<kThreads>(sums);
  return {p, a, head, static_cast<int>(sums[0]), sums[1], a.floors[head]->floor};
}

// A round of the search for one bound of all heads; after the last, the bound whose density is nearest to the target, 0 if
// even that keeps more.
__global__ void __launch_bounds__(kThreads, 1) solve_codes(ProxyLaunch p, KeepLaunch a, SampleSpace sample, int round) {
  const auto keeper = keeper_of(p, a, blockIdx.x);
  if (round == kCodeRounds) {
    const Bracket b = narrowed<kThreads>(sample, p.heads, p.count, a.target, round);
    const double below = a.target - density_of(b.at_low, b.queries, p.count);
    const double above = density_of(b.at_high, b.queries, p.count) - a.target;
    if (threadIdx.x == 0) *sample.bound = b.high == 0 ? 0 : keeper.settled(below < above ? b.low : b.high);
    return;
  }
  look<kThreads>(sample, p.heads, p.count, a.target, round, keeper.head, keeper.queries,
                 [&](double low, double quarter, int64_t(&pairs)[3]) {
                   int inside[3] = {};
                   keeper.pairs_at(low, quarter, 0, p.codes - keeper.always, inside, pairs);
                 });
}

__global__ void __launch_bounds__(kThreads) keep_codes(ProxyLaunch p, KeepLaunch a) {
  const int64_t head = blockIdx.x;
  const auto keeper = keeper_of(p, a, head);
  const double bound = a.target == 0 ? a.given : a.solved != nullptr ? *a.solved : keeper.solve();
  for (int c = threadIdx.x; c < p.groups; c += kThreads) {
    int kept = 0;
    if (a.sizes[head][c] > 0) {
      kept = keeper.codes_kept(c, bound, keeper.searches() ? keeper.within(c, bound, 0, p.codes - keeper.always) : 0);
    }
    a.kept[head][c] = kept;
    a.counts[head][c] = kept > 0 ? keeper.keys_kept(c, kept) : 0;
    a.top_p[head][c] = 0;
  }
  if (threadIdx.x != 0) return;
  *a.head_budget[head] = 0;
  *a.rho_used[head] = a.target > 0 ? bound : a.rho;
  *a.alpha_used[head] = a.floors[head]->alpha;
}

}  // namespace

void solve_codes_pass(const Exec& exec, const ProxyLaunch& p, const CodesOrder& order, const CodesRule& rule,
                      const CodesSpace& space, const SampleSpace& sample) {
  for (int round = 0; round <= kCodeRounds; ++round) {
    launch(exec, "solve_codes", solve_codes, round < kCodeRounds ? p.heads : 1, kThreads, 0, p,
           KeepLaunch{order, rule, space}, sample, round);
  }
}

void keep_codes_pass(const Exec& exec, const ProxyLaunch& p, const CodesOrder& order, const CodesRule& rule,
                     const CodesSpace& space) {
  launch(exec, "keep_codes", keep_codes, p.heads, kThreads, 0, p, KeepLaunch{order, rule, space});
}

}  // namespace scope::cuda
