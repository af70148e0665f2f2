// select on CUDA: histograms of depths, budgets from them, and a mask whose last bin is decided key by key. The rules that
// keep whole codes are in select_codes.cu.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/select.h"
#include "cuda/select_codes.h"
#include "cuda/stages.h"
#include "stages/select.h"

namespace scope::cuda {

namespace {

struct RuleLaunch {
  Rule rule;
  double rho, alpha, goal;  // alpha as used; the density that rho is solved for, 0: rho is given
  int32_t fixed, floor;     // keys by rule fixed; ceil(alpha N), at most N
  PerHead<const int32_t> sizes;
  PerHead<int32_t> counts, top_p;
  PerHead<int64_t> head_budget;
  PerHead<double> rho_used, alpha_used;
};

// ---- histograms to cumulative counts and masses ----

constexpr int kScanParts = 20;
static_assert(kBins / 4 % kScanParts == 0);

// 32 groups and 20 stretches of bins to a block. A word becomes keys up to its bin << 32 | mass below its bin, in f32:
// summed from the bottom, so that it resolves rho close to 1.
__global__ void __launch_bounds__(kLanes* kScanParts) scan_histograms(ProxyLaunch p, SelectSpace s, Bins bins) {
  __shared__ int first_bin[kScanParts][kLanes];
  __shared__ uint32_t keys[kScanParts][kLanes];
  __shared__ float masses[kScanParts][kLanes], squares[kScanParts][kLanes];
  const int blocks = (p.groups + kLanes - 1) / kLanes, lane = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
  const int64_t head = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks, group = block * kLanes + lane, size = bins.count / kScanParts;
  unsigned long long* words = s.histogram[head] + (int64_t{block} * bins.count + part * size) * kLanes + lane;

  uint32_t count = 0;
  int first = bins.count;
  for (int b = size - 1; b >= 0; --b) {
    const auto n = static_cast<uint32_t>(words[b * kLanes] >> 32);
    count += n;
    if (n != 0) first = part * size + b;
  }
  first_bin[part][lane] = first;
  keys[part][lane] = count;
  __syncthreads();
  uint32_t keys_before = 0;
  for (int i = 0; i < kScanParts; ++i) {
    first = min(first, first_bin[i][lane]);
    if (i < part) keys_before += keys[i][lane];
  }

  const float width = group < p.groups ? s.step[head][group] * static_cast<float>(1 << bins.sub_bits) : 0.0f;
  const float spread = fminf(width * width, 1.0f) / 24.0f;  // of masses inside a bin, at an even density
  float square = 0;
  const auto mass_of = [&](int b) {
    const unsigned long long word = words[b * kLanes];
    const auto n = static_cast<float>(static_cast<uint32_t>(word >> 32));
    if (n == 0) return 0.0f;
    const float moment = static_cast<float>(static_cast<uint32_t>(word)) / n;
    const float fraction = (moment + 0.5f) / (1 << kMomentBits);
    const float each = expf(-width * (static_cast<float>(part * size + b - first) + fraction)) * (1 + spread - spread / n);
    square += each * each * n;
    return each * n;
  };
  float sum = 0;
  for (int b = size - 1; b >= 0; --b) sum += mass_of(b);
  masses[part][lane] = sum;
  squares[part][lane] = square;
  __syncthreads();
  float below = 0;
  for (int i = kScanParts - 1; i > part; --i) below += masses[i][lane];
  uint32_t keys_up_to = keys_before + count;
  for (int b = size - 1; b >= 0; --b) {
    const auto n = static_cast<uint32_t>(words[b * kLanes] >> 32);
    const float mass = mass_of(b);
    words[b * kLanes] = static_cast<unsigned long long>(keys_up_to) << 32 | __float_as_uint(below);
    keys_up_to -= n;
    below += mass;
  }
  if (part != 0 || group >= p.groups) return;
  square = 0;
  for (int i = 0; i < kScanParts; ++i) square += squares[i][lane];
  s.mass[head][group] = below;
  s.blur[head][group] = sqrtf(square) / below;
}

// One group's scanned histogram.
struct Scanned {
  const unsigned long long* words;
  int bins;
  float mass, width;

  __device__ Scanned(const SelectSpace& s, Bins b, int64_t head, int group)
      : words(s.histogram[head] + int64_t{group / kLanes} * b.count * kLanes + group % kLanes),
        bins(b.count),
        mass(s.mass[head][group]),
        width(s.step[head][group] * static_cast<float>(1 << b.sub_bits)) {}
  __device__ int32_t keys(int b) const { return b < 0 ? 0 : static_cast<int32_t>(words[b * kLanes] >> 32); }
  __device__ float below(int b) const { return b < 0 ? mass : __uint_as_float(static_cast<uint32_t>(words[b * kLanes])); }

  // The first bin of [from, to] by whose end `test` holds; `to` when none before it does.
  template <class Test>
  __device__ int search(int from, int to, const Test& test) const {
    while (from < to) {
      const int middle = (from + to) / 2;
      if (test(middle)) {
        to = middle;
      } else {
        from = middle + 1;
      }
    }
    return from;
  }

  struct Crossing {
    int bin;
    int32_t n;      // keys in it
    int32_t count;  // t: keys that reach rho, linear inside the bin
    float part;     // the share of the bin's mass that they need
    float doubt;    // how far from rho, in mass, t's true sum can be
  };
  __device__ Crossing cross(double rho, int from, int to) const {
    const auto left = static_cast<float>((1.0 - rho) * mass);
    const int b = search(from, to, [&](int x) { return below(x) <= left; });
    const int32_t before = keys(b - 1), n = keys(b) - before;
    const float above = below(b - 1), inside = above - below(b);
    const float part = inside > 0 ? fminf(fmaxf((above - left) / inside, 0.0f), 1.0f) : 1.0f;
    const int32_t taken = max(1, static_cast<int32_t>(ceilf(part * static_cast<float>(n) - 1e-3f)));
    // At worst half of the bin's keys are at its top and half at its bottom.
    return {b, n, before + min(taken, max(n, 1)), part, n < 2 ? 0.0f : inside / mass * fminf(width, 4.0f) / 4};
  }
};

constexpr int kSolveThreads = 512;

// ---- rho under rule target, and t_c ----

// How much of the mass the fractions' rounding and a bin's unknown order may move, together; the tolerance is 1e-3.
constexpr float kMostDoubt = 9e-4f;

// The rho at which the rule keeps `goal` of the keys. Three points of the interval at a time: what a round
// costs is latency.
__device__ double solve_rho(const ProxyLaunch& p, const SelectSpace& s, Bins bins, const RuleLaunch& a, int64_t head) {
  if (a.goal >= 1) return 1.0;
  const int32_t* sizes = a.sizes[head];
  int64_t queries[1] = {0};
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) queries[0] += sizes[c];
  block_sums<kSolveThreads>(queries);
  const bool one_each = p.groups <= kSolveThreads;  // then a thread remembers where its group's crossing can be
  const int32_t floor = a.rule == Rule::top_p ? 1 : max(1, a.floor);
  double low = 0, high = 1;
  int from = 0, to = bins.count - 1;
  for (int round = 0; round < 20 && queries[0] > 0; ++round) {
    const double quarter = 0.25 * (high - low);
    int bin[3] = {};
    int32_t base[3] = {};
    const auto set_bases = [&](int c) {
      const Scanned row(s, bins, head, c);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const auto at = row.cross(low + (i + 1) * quarter, one_each ? from : 0, one_each ? to : bins.count - 1);
        bin[i] = at.bin;
        base[i] = max(at.count, floor);
      }
    };
    int64_t total[3] = {}, kept[3] = {}, budget[3];
    for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
      if (sizes[c] == 0) continue;
      set_bases(c);
#pragma unroll
      for (int i = 0; i < 3; ++i) total[i] += int64_t{sizes[c]} * base[i];
    }
    block_sums<kSolveThreads>(total);
#pragma unroll
    for (int i = 0; i < 3; ++i) budget[i] = a.rule == Rule::target ? (total[i] + queries[0] - 1) / queries[0] : 0;
    for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
      if (sizes[c] == 0) continue;
      if (!one_each) set_bases(c);
#pragma unroll
      for (int i = 0; i < 3; ++i) kept[i] += sizes[c] * max(int64_t{base[i]}, budget[i]);
    }
    block_sums<kSolveThreads>(kept);
    const double goal = a.goal * static_cast<double>(queries[0]) * p.count;
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
  return fmin(fmax(0.5 * (low + high), 1e-9), 1.0 - 1e-12);
}

__global__ void __launch_bounds__(kSolveThreads) solve_top_p(ProxyLaunch p, SelectSpace s, Bins bins, RuleLaunch a) {
  const int64_t head = blockIdx.x;
  const double rho = a.goal > 0 ? solve_rho(p, s, bins, a, head) : a.rho;
  if (threadIdx.x == 0) {
    *a.rho_used[head] = rho;
    *a.alpha_used[head] = a.alpha;
  }
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
    uint32_t todo = 0, limit = 0, end = 0;
    int32_t top_p = 0;
    float part = 0;
    if (a.sizes[head][c] > 0 && rho >= 1) {
      top_p = p.count;
    } else if (a.sizes[head][c] > 0) {
      const Scanned row(s, bins, head, c);
      const auto at = row.cross(rho, 0, bins.count - 1);
      top_p = min(at.count, p.count);
      const float step = row.width / (1 << kMomentBits);  // fractions are within half of this
      const float blur = fminf(static_cast<float>(rho * (1 - rho)) * step, 4 * s.blur[head][c] * step * 0.29f);
      const bool doubtful = blur + at.doubt > kMostDoubt;
      if (!(s.range[head][c] <= kMostRange) || 2 * blur > kMostDoubt || (doubtful && at.n > kFewCandidates)) {
        todo = kExactTopP;
      } else if (doubtful) {
        todo = kRefineTopP;
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
}

constexpr int kPickThreads = 128;

// Calls body(head, group) by the whole block for each of its rows that has a bit of `flags` to do.
template <class Body>
__device__ void for_rows(const ProxyLaunch& p, const SelectSpace& s, uint32_t flags, const Body& body) {
  __shared__ int32_t found[kPickThreads], n;
  const int rows = p.heads * p.groups, stride = static_cast<int>(gridDim.x);
  for (int64_t first = blockIdx.x; first < rows; first += int64_t{stride} * kPickThreads) {
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
    const int64_t row = first + int64_t{stride} * threadIdx.x;
    if (threadIdx.x < kPickThreads && row < rows) {
      const int at = static_cast<int>(row);
      if ((s.todo[at / p.groups][at % p.groups] & flags) != 0) found[atomicAdd(&n, 1)] = at;
    }
    __syncthreads();
    for (int i = 0; i < n; ++i) body(found[i] / p.groups, found[i] % p.groups);
    __syncthreads();
  }
}

// The sum of an integer over the block.
__device__ uint32_t pick_sum(uint32_t x) {
  __shared__ uint32_t parts[kPickThreads / 32];
  x = __reduce_add_sync(~0u, x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (const uint32_t part : parts) x += part;
  return x;
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
    const auto goal = static_cast<uint32_t>(ceil(static_cast<double>(s.part[head][group]) * pick_sum(total)));
    uint32_t low = 0, high = (1u << bins.sub_bits) - 1;  // the first fraction by which the mass is reached
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      uint32_t mass = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) mass += fraction[i] <= middle ? weight[i] : 0;
      if (pick_sum(mass) >= goal) {
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
    mass = pick_sum(mass);
    before = pick_sum(before);
    equal = pick_sum(equal);
    if (threadIdx.x != 0) return;
    const auto each = max(1u, static_cast<uint32_t>(expf(-step * static_cast<float>(low)) * 0x1p22f));
    const uint32_t more = min(max((max(goal, mass) - mass + each - 1) / each, 1u), max(equal, 1u));
    const int bin = static_cast<int>(s.limit[head][group] >> bins.sub_bits);
    a.top_p[head][group] = min(Scanned(s, bins, head, group).keys(bin - 1) + static_cast<int32_t>(before + more), p.count);
    s.found[head][group] = 0;  // for the selection's candidates
  });
}

// ---- r_c, and where each row's selection ends ----

__global__ void __launch_bounds__(kSolveThreads)
    set_budgets(ProxyLaunch p, SelectSpace s, Bins bins, RuleLaunch a, int key_bits) {
  const int64_t head = blockIdx.x;
  const int32_t* sizes = a.sizes[head];
  const int32_t* top_p = a.top_p[head];
  const bool fixed = a.rule == Rule::fixed;
  int64_t budget = 0;
  if (a.rule == Rule::online || a.rule == Rule::target) {
    int64_t sums[2] = {};  // pairs of queries and keys, queries
    for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
      if (sizes[c] > 0) sums[0] += int64_t{sizes[c]} * max(top_p[c], a.floor);
      sums[1] += sizes[c];
    }
    block_sums<kSolveThreads>(sums);
    budget = sums[1] == 0 ? 0 : (sums[0] + sums[1] - 1) / sums[1];
  }
  if (threadIdx.x == 0) {
    *a.head_budget[head] = budget;
    if (fixed) *a.rho_used[head] = a.rho, *a.alpha_used[head] = a.alpha;
  }
  for (int c = threadIdx.x; c < p.groups; c += kSolveThreads) {
    int32_t count = 0, need = 0;
    uint32_t limit = 0, end = 0, todo = 0;
    if (sizes[c] > 0) {
      const int32_t least = a.rule == Rule::top_p ? 0 : max(a.floor, static_cast<int32_t>(budget));
      count = fixed ? a.fixed : max(top_p[c], least);
      const Scanned row(s, bins, head, c);
      const int bin = row.search(0, bins.count - 1, [&](int b) { return row.keys(b) >= count; });
      const int32_t n = row.keys(bin) - row.keys(bin - 1);
      need = count - row.keys(bin - 1);
      limit = static_cast<uint32_t>(bin) << bins.sub_bits;
      end = limit + (1u << bins.sub_bits);
      const int dropped_bits = max(0, bins.sub_bits - (32 - key_bits));
      const float resolution = row.width / static_cast<float>(1 << (bins.sub_bits - dropped_bits));
      if (need == n) {
        limit = end;
        need = 0;
      } else if (n > s.most_candidates || resolution > 1e-3f) {
        todo = kExactSelect;
      }
      if (!(s.range[head][c] <= kMostRange)) todo = kExactSelect;
      if (todo != 0) limit = end = 0, need = 0;
    }
    a.counts[head][c] = count;
    if (fixed) a.top_p[head][c] = 0;
    s.limit[head][c] = limit;
    s.end[head][c] = end;
    s.need[head][c] = need;
    s.todo[head][c] = todo;
  }
}

// ---- the last bin, key by key ----

// Candidates are distinct integers, ordered by depth and then by key: the `need` smallest are kept. Byte by byte from the
// top, until what is left of a byte's candidates is kept as a whole.
__global__ void __launch_bounds__(kPickThreads)
    pick_candidates(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits) {
  extern __shared__ uint32_t list[];  // [most_candidates]
  __shared__ uint32_t counts[256];
  __shared__ uint32_t chosen, before, inside;
  const int bits = min(32, key_bits + bins.sub_bits), lane = threadIdx.x % 32;
  for (int64_t at = blockIdx.x; at < int64_t{p.heads} * p.groups; at += gridDim.x) {
    const int64_t head = at / p.groups, group = at % p.groups;
    auto need = static_cast<uint32_t>(s.need[head][group]);
    if (need == 0) continue;
    const auto n = static_cast<int>(s.found[head][group]);
    const uint32_t* from = s.candidates[head] + group * s.most_candidates;
    for (int i = threadIdx.x; i < n; i += kPickThreads) list[i] = from[i];
    uint32_t last = 0;  // the largest that is kept; known from bit `known` on
    for (int known = bits, shift = bits;;) {
      known = shift;
      shift = max(0, known - 8);
      for (int i = threadIdx.x; i < 256; i += kPickThreads) counts[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += kPickThreads) {
        if (uint64_t{list[i] ^ last} >> known == 0)
          atomicAdd(counts + (list[i] >> shift & ((1u << (known - shift)) - 1)), 1u);
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        uint32_t mine = 0;
        for (int i = 0; i < 8; ++i) mine += counts[lane * 8 + i];
        uint32_t sum = mine;
        for (int offset = 1; offset < 32; offset *= 2) {
          const uint32_t other = __shfl_up_sync(~0u, sum, offset);
          if (lane >= offset) sum += other;
        }
        if (sum >= need && sum - mine < need) {  // one lane's
          uint32_t up_to = sum - mine;
          int digit = lane * 8;
          while (up_to + counts[digit] < need) up_to += counts[digit++];
          chosen = static_cast<uint32_t>(digit);
          before = up_to;
          inside = counts[digit];
        }
      }
      __syncthreads();
      last |= chosen << shift;
      need -= before;
      if (need == inside || shift == 0) {
        last |= (1u << shift) - 1;
        break;
      }
    }
    uint32_t* row = mask.rows[head] + group * mask.words;
    for (int i = threadIdx.x; i < n; i += kPickThreads) {
      if (list[i] > last) continue;
      const int32_t token = p.token(static_cast<int32_t>(list[i] & ((1u << key_bits) - 1)));
      atomicOr(row + token / 32, 1u << (token % 32));
    }
    __syncthreads();
  }
}

// ---- rows that the histograms cannot settle, from their f32 logits: right, and rare ----

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

// ---- host ----

SelectSpace layout(Arena arena, int64_t count, int64_t dim, int64_t groups) {
  SelectSpace s;
  s.most_candidates = static_cast<int32_t>(std::min(count, std::clamp<int64_t>(ceil_div(count, 32), 2 * kBins, 8192)));
  s.found.base = arena.take<uint32_t>(groups);
  const int64_t histogram = round_up(groups, kLanes) * kBins * 8, candidates = groups * s.most_candidates * 4;
  const int64_t few = groups * kFewCandidates * 4, tail = groups * kTailParts * (2 + 2 * dim) * 4;
  s.histogram.base = arena.take<unsigned long long>(std::max({histogram + few, candidates, tail}) / 8 + 1);
  s.candidates.base = reinterpret_cast<uint32_t*>(s.histogram.base);
  s.tail.base = reinterpret_cast<float*>(s.histogram.base);
  s.few.base = reinterpret_cast<uint32_t*>(s.histogram.base) + histogram / 4;
  s.step.base = arena.take<float>(groups);
  s.range.base = arena.take<float>(groups);
  s.high.base = arena.take<float>(groups);
  s.unit.base = arena.take<float>(groups);
  s.mass.base = arena.take<float>(groups);
  s.blur.base = arena.take<float>(groups);
  s.todo.base = arena.take<uint32_t>(groups);
  s.limit.base = arena.take<uint32_t>(groups);
  s.end.base = arena.take<uint32_t>(groups);
  s.need.base = arena.take<int32_t>(groups);
  s.part.base = arena.take<float>(groups);
  s.bytes = round_up(arena.used(), 256);
  s.histogram.step = s.bytes / 8;
  s.found.step = s.candidates.step = s.todo.step = s.limit.step = s.end.step = s.bytes / 4;
  s.tail.step = s.range.step = s.high.step = s.unit.step = s.mass.step = s.blur.step = s.bytes / 4;
  s.need.step = s.few.step = s.step.step = s.part.step = s.bytes / 4;
  return s;
}

}  // namespace

int64_t select_scratch(const Exec&, int64_t tokens, int64_t dim, int64_t groups, int64_t codes) {
  return codes > 0 ? select_codes_scratch(groups, codes) : layout(Arena(), tokens, dim, groups).bytes;
}

void select(const Exec& exec, std::span<const SelectArgs> heads) {
  const SelectArgs& first = heads[0];
  const Proxy& proxy = first.proxy;
  const auto n = static_cast<int64_t>(heads.size()), count = proxy.count, groups = proxy.groups;
  require(count < kMostKeys, Status::size_limit, "select on CUDA takes fewer than 2^26 keys");
  const bool keys = proxy.kind == ProxyKind::exact || first.tail != nullptr;
  require(!keys || proxy.k.dtype != DType::f32, Status::dtype, "select on CUDA takes f16 or bf16 keys");

  ProxyLaunch p{};
  p.exact = proxy.kind == ProxyKind::exact;
  p.f16 = proxy.k.dtype == DType::f16;
  p.heads = static_cast<int32_t>(n);
  p.groups = static_cast<int32_t>(groups);
  p.count = static_cast<int32_t>(count);
  p.dim = static_cast<int32_t>(proxy.k.dim);
  p.subspaces = static_cast<int32_t>(proxy.subspaces);
  p.codes = static_cast<int32_t>(proxy.codes);
  p.scale = proxy.scale;
  p.rows = proxy.rows;
  p.centroids = per_head(heads, [](const SelectArgs& a) { return a.proxy.centroids; });
  if (keys) p.k = head_rows<const uint16_t>(heads, [](const SelectArgs& a) { return a.proxy.k; });
  if (!p.exact) {
    p.tables = per_head(heads, [](const SelectArgs& a) { return a.proxy.tables; });
    p.labels = per_head(heads, [](const SelectArgs& a) { return a.proxy.labels; });
  }

  MaskLaunch mask{per_head(heads, [](const SelectArgs& x) { return x.mask; }), mask_words(proxy.k.tokens), false};
  mask.direct = proxy.rows == nullptr && mask_words(count) == mask.words;
  if (!mask.direct) {
    check(cudaMemset2DAsync(mask.rows.base, static_cast<size_t>(n == 1 ? groups * mask.words : mask.rows.step) * 4, 0,
                            static_cast<size_t>(groups * mask.words) * 4, static_cast<size_t>(n), stream(exec)),
          "select: mask");
  }
  if (keeps_codes(first.rule)) return select_codes(exec, heads, p, mask);

  RuleLaunch a{};
  a.rule = first.rule;
  a.rho = first.rho;
  a.goal = first.rule == Rule::target ? first.density : first.target;
  a.alpha = a.goal > 0 ? std::min(first.alpha, a.goal / 2) : first.alpha;
  a.fixed = static_cast<int32_t>(std::max<int64_t>(1, ceil_share(first.density, count)));
  a.floor = static_cast<int32_t>(std::min(count, ceil_share(a.alpha, count)));
  a.sizes = per_head(heads, [](const SelectArgs& x) { return x.sizes; });
  a.counts = per_head(heads, [](const SelectArgs& x) { return x.counts; });
  a.top_p = per_head(heads, [](const SelectArgs& x) { return x.top_p; });
  a.head_budget = per_head(heads, [](const SelectArgs& x) { return x.head_budget; });
  a.rho_used = per_head(heads, [](const SelectArgs& x) { return x.rho_used; });
  a.alpha_used = per_head(heads, [](const SelectArgs& x) { return x.alpha_used; });

  const SelectSpace s = layout(Arena(first.scratch.data, first.scratch.bytes), count, proxy.k.dim, groups);
  require(s.bytes * n <= first.scratch.bytes, Status::internal, "select: scratch is smaller than its plan");
  const Bins bins = select_bins(exec, p);
  const int64_t zeros = reinterpret_cast<char*>(s.histogram.base) - static_cast<char*>(first.scratch.data) +
                        round_up(groups, kLanes) * bins.count * 8;
  check(cudaMemset2DAsync(first.scratch.data, static_cast<size_t>(s.bytes), 0, static_cast<size_t>(zeros),
                          static_cast<size_t>(n), stream(exec)),
        "select: histograms");

  const int key_bits = index_bits(count);
  const auto blocks = static_cast<unsigned>(n);
  const int64_t rows = n * groups;
  require(rows < INT32_MAX, Status::size_limit, "select: too many groups in one chunk of heads");
  const auto row_blocks = static_cast<unsigned>(std::min<int64_t>(rows, 2 * exec.device->multiprocessors));
  const auto pick_blocks = static_cast<unsigned>(std::min<int64_t>(rows, 16 * exec.device->multiprocessors));
  row_bounds(exec, p, s, bins);
  histogram_pass(exec, p, s, bins);
  scan_histograms<<<static_cast<unsigned>(n * ceil_div(groups, kLanes)), kLanes * kScanParts, 0, stream(exec)>>>(p, s, bins);
  check_launch("scan_histograms");
  if (first.rule != Rule::fixed) {
    solve_top_p<<<blocks, kSolveThreads, 0, stream(exec)>>>(p, s, bins, a);
    check_launch("solve_top_p");
    SelectSpace few = s;  // the histograms are still needed
    few.candidates = s.few;
    few.most_candidates = kFewCandidates;
    emit_pass(exec, p, few, bins, MaskLaunch{});
    refine_top_p<<<pick_blocks, kPickThreads, 0, stream(exec)>>>(p, s, bins, a, key_bits);
    check_launch("refine_top_p");
    exact_top_p<<<row_blocks, kRowThreads, 0, stream(exec)>>>(p, s, a);
    check_launch("exact_top_p");
  }
  set_budgets<<<blocks, kSolveThreads, 0, stream(exec)>>>(p, s, bins, a, key_bits);
  check_launch("set_budgets");
  emit_pass(exec, p, s, bins, mask);
  pick_candidates<<<pick_blocks, kPickThreads, static_cast<size_t>(s.most_candidates) * 4, stream(exec)>>>(p, s, bins, mask,
                                                                                                           key_bits);
  check_launch("pick_candidates");
  exact_select<<<row_blocks, kRowThreads, 0, stream(exec)>>>(p, s, a, mask);
  check_launch("exact_select");

  if (first.tail != nullptr) {
    TailLaunch tail{};
    tail.v = head_rows<const uint16_t>(heads, [](const SelectArgs& x) { return x.tail->v; });
    tail.k = per_head(heads, [](const SelectArgs& x) { return x.tail->k; });
    tail.value = per_head(heads, [](const SelectArgs& x) { return x.tail->value; });
    tail.bias = per_head(heads, [](const SelectArgs& x) { return x.tail->bias; });
    tail.sizes = a.sizes;
    tail_pass(exec, p, s, mask, tail);
  }
}

}  // namespace scope::cuda
