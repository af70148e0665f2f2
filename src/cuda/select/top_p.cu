// t_c: how many of a row's keys reach rho of its mass; under a target, rho too.
#include <cooperative_groups.h>

#include "cuda/device/reduce.cuh"
#include "cuda/select/passes.h"
#include "cuda/select/rows.cuh"
#include "cuda/select/sample.cuh"
#include "cuda/select/scanned.cuh"

namespace scope::cuda {

namespace {

// How much of the mass the fractions' rounding and a bin's unknown order may move, together; the tolerance is 1e-3.
constexpr float kMostDoubt = 9e-4f;

// Pairs of queries and keys that the rule keeps at low + (i + 1) * quarter. A thread with one group says in which bins its
// crossings can be, and is told where they are.
__device__ void kept_at(const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a, int64_t head,
                        int64_t queries, double low, double quarter, int from, int to, int (&bin)[3], int64_t (&kept)[3]) {
  const int32_t* sizes = a.sizes[head];
  const bool one_each = p.groups <= kSolveThreads;
  const int32_t floor = max(1, a.floor);
  int32_t base[3] = {};
  const auto set_bases = [&](int c) {
    const Scanned row(s, bins, head, c);
    Scanned::Crossing at[3];
    row.cross(low + quarter, quarter, one_each ? from : 0, one_each ? to : bins.count - 1, at);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      bin[i] = at[i].bin;
      base[i] = max(at[i].count, floor);
    }
  };
  int64_t total[3] = {}, budget[3];
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
    if (sizes[c] == 0) continue;
    set_bases(c);
#pragma unroll
    for (int i = 0; i < 3; ++i) total[i] += int64_t{sizes[c]} * base[i];
  }
  block_sums<kSolveThreads>(total);
#pragma unroll
  for (int i = 0; i < 3; ++i) budget[i] = a.shares_budget ? (total[i] + queries - 1) / queries : 0;
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
    if (sizes[c] == 0) continue;
    if (!one_each) set_bases(c);
#pragma unroll
    for (int i = 0; i < 3; ++i) kept[i] += sizes[c] * max(int64_t{base[i]}, budget[i]);
  }
  block_sums<kSolveThreads>(kept);
}

__device__ int64_t queries_of(const ProxyLaunch& p, const int32_t* sizes) {
  int64_t queries[1] = {0};
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) queries[0] += sizes[c];
  block_sums<kSolveThreads>(queries);
  return queries[0];
}

__device__ double within_bounds(double rho) { return fmin(fmax(rho, 1e-9), 1.0 - 1e-12); }

// The rho at which the rule keeps `goal` of the keys. Three points of the interval at a time: what a round
// costs is latency.
__device__ double solve_rho(const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a, int64_t head) {
  if (a.goal >= 1) return 1.0;
  const int64_t queries = queries_of(p, a.sizes[head]);
  double low = 0, high = 1;
  int from = 0, to = bins.count - 1;
  for (int round = 0; round < 20 && queries > 0; ++round) {
    const double quarter = 0.25 * (high - low);
    int bin[3] = {};
    int64_t kept[3] = {};
    kept_at(p, s, bins, a, head, queries, low, quarter, from, to, bin, kept);
    const double goal = a.goal * static_cast<double>(queries) * p.count;
    const double start = low;
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      if (static_cast<double>(kept[i]) < goal) continue;
      high = start + (i + 1) * quarter;
      to = bin[i];
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (static_cast<double>(kept[i]) >= goal) break;
      low = start + (i + 1) * quarter;
      from = bin[i];
    }
  }
  return within_bounds(0.5 * (low + high));
}

// The search for one rho of all heads: a block looks at its heads, and all of them wait for what the others found.
__global__ void __launch_bounds__(kSolveThreads, 1)
    solve_sample(ProxyLaunch p, SelectSpace s, Bins bins, RuleLaunch a, SampleSpace sample) {
  const auto first = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const bool one_head = p.heads <= blocks;  // so that a thread knows where the crossings of the round before were
  const int64_t first_queries = queries_of(p, a.sizes[first]);
  int bin[3] = {}, from = 0, to = bins.count - 1;
  double before = 0, before_quarter = 0;
#pragma unroll 1
  for (int round = 0; round < kKeyRounds && a.goal < 1; ++round) {
    for (int head = first; head < p.heads; head += blocks) {
      const int64_t queries = head == first ? first_queries : queries_of(p, a.sizes[head]);
      const auto pairs_at = [&](double low, double quarter, int64_t(&pairs)[3]) {
#pragma unroll
        for (int i = 0; i < 3 && one_head && round > 0; ++i) {
          const double at = before + (i + 1) * before_quarter;
          if (at <= low) from = bin[i];
          if (at == low + 4 * quarter) to = bin[i];
        }
        before = low;
        before_quarter = quarter;
        if (queries > 0) kept_at(p, s, bins, a, head, queries, low, quarter, from, to, bin, pairs);
      };
      look<kSolveThreads>(sample, p.heads, p.count, a.goal, round, head, queries, pairs_at);
    }
    cooperative_groups::this_grid().sync();
  }
  if (blockIdx.x != 0) return;
  double rho = 1;
  if (a.goal < 1) {
    const Bracket b = narrowed<kSolveThreads>(sample, p.heads, p.count, a.goal, kKeyRounds);
    rho = within_bounds(0.5 * (b.low + b.high));
  }
  if (threadIdx.x == 0) *sample.bound = rho;
}

__global__ void __launch_bounds__(kSolveThreads, 1) solve_top_p(ProxyLaunch p, SelectSpace s, Bins bins, RuleLaunch a) {
  const int64_t head = blockIdx.x;
  const double rho = a.goal == 0 ? a.rho : a.solved != nullptr ? *a.solved : solve_rho(p, s, bins, a, head);
  __shared__ int again;
  if (threadIdx.x == 0) {
    again = 0;
    *a.rho_used[head] = rho;
    *a.alpha_used[head] = a.alpha;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
    uint32_t todo = 0, limit = 0, end = 0;
    int32_t top_p = 0;
    float part = 0;
    if (a.sizes[head][c] > 0 && rho >= 1) {
      top_p = p.count;
    } else if (a.sizes[head][c] > 0) {
      const Scanned row(s, bins, head, c);
      Scanned::Crossing found[1];
      row.cross(rho, 0, 0, bins.count - 1, found);
      const Scanned::Crossing& at = found[0];
      top_p = min(at.count, p.count);
      const float step = row.width / (1 << kMomentBits);  // fractions are within half of this
      const float blur = fminf(static_cast<float>(rho * (1 - rho)) * step, 4 * s.blur[head][c] * step * 0.29f);
      const bool doubtful = blur + at.doubt > kMostDoubt;
      if (!(s.range[head][c] <= kMostRange) || 2 * blur > kMostDoubt || (doubtful && at.n > kFewCandidates)) {
        todo = kExactTopP;
      } else if (doubtful) {
        todo = kRefineTopP;
        s.again[head][atomicAdd(&again, 1)] = c;
        limit = static_cast<uint32_t>(at.bin) << bins.sub_bits;
        end = limit + (1u << bins.sub_bits);
        part = at.part;
      }
    }
    a.top_p[head][c] = top_p;
    s.todo[head][c] = todo;
    s.limit[head][c] = limit;
    s.end[head][c] = end;
    s.part[head][c] = part;
  }
  __syncthreads();
  if (threadIdx.x == 0) *s.again_size[head] = again;
}

// t_c from the depths of the keys in its bin: the fewest from the top whose mass is `part` of the bin's.
__global__ void __launch_bounds__(kPickThreads)
    refine_top_p(ProxyLaunch p, SelectSpace s, Bins bins, RuleLaunch a, int key_bits) {
  const int shift = max(0, bins.sub_bits - (32 - key_bits));
  for_rows(p, s, kRefineTopP, [&](int32_t head, int32_t group) {
    constexpr int kEach = kFewCandidates / kPickThreads;
    const auto n = static_cast<int>(s.found[head][group]);
    const uint32_t* list = s.few[head] + group * kFewCandidates;
    uint32_t fraction[kEach], weight[kEach], total = 0;
    const float step = s.step[head][group] * static_cast<float>(1 << shift);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kPickThreads;
      fraction[i] = at < n ? list[at] >> key_bits : ~0u;
      weight[i] = at < n ? static_cast<uint32_t>(expf(-step * static_cast<float>(fraction[i])) * 0x1p22f) : 0;
      total += weight[i];
    }
    const auto goal = static_cast<uint32_t>(ceil(static_cast<double>(s.part[head][group]) * block_sum<kPickThreads>(total)));
    uint32_t low = 0, high = (1u << bins.sub_bits) - 1;  // the first fraction by which the mass is reached
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      uint32_t mass = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) mass += fraction[i] <= middle ? weight[i] : 0;
      if (block_sum<kPickThreads>(mass) >= goal) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    uint32_t mass = 0, before = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mass += fraction[i] < low ? weight[i] : 0;
      before += fraction[i] < low ? 1 : 0;
      equal += fraction[i] == low ? 1 : 0;
    }
    mass = block_sum<kPickThreads>(mass);
    before = block_sum<kPickThreads>(before);
    equal = block_sum<kPickThreads>(equal);
    if (threadIdx.x != 0) return;
    const auto each = max(1u, static_cast<uint32_t>(expf(-step * static_cast<float>(low)) * 0x1p22f));
    const uint32_t more = min(max((max(goal, mass) - mass + each - 1) / each, 1u), max(equal, 1u));
    const int bin = static_cast<int>(s.limit[head][group] >> bins.sub_bits);
    a.top_p[head][group] = min(Scanned(s, bins, head, group).keys(bin - 1) + static_cast<int32_t>(before + more), p.count);
    s.found[head][group] = 0;  // for the selection's candidates
  });
}

}  // namespace

void solve_sample_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a,
                       const SampleSpace& sample) {
  const int64_t blocks = blocks_for(exec, 1, p.heads);
  launch_together(exec, "solve_sample", solve_sample, blocks, kSolveThreads, p, s, bins, a, sample);
}

void solve_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a) {
  launch(exec, "solve_top_p", solve_top_p, p.heads, kSolveThreads, 0, p, s, bins, a);
}

void refine_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a) {
  launch(exec, "refine_top_p", refine_top_p, blocks_for(exec, 16, int64_t{p.heads} * p.groups), kPickThreads, 0, p, s, bins,
         a, index_bits(p.count));
}

}  // namespace scope::cuda
