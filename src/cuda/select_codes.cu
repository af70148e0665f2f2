// select on CUDA for the rules that keep whole codes: a sort per group, a bound per head, and masks of 32 groups at a time.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/select_codes.h"

namespace scope::cuda {

namespace {

struct CodesLaunch {
  Rule rule;
  double alpha, given, target, rho;  // alpha as used; given: what the rule compares with when there is no target
  int32_t floor;                     // codes that alpha keeps
  double similar;
  PerHead<const float> q_similarity, k_similarity;
  PerHead<const int32_t> sizes;
  PerHead<int32_t> counts, top_p;
  PerHead<int64_t> head_budget;
  PerHead<double> rho_used, alpha_used;
  // scratch
  PerHead<int32_t> code_sizes;  // [codes] keys of each
  PerHead<int32_t> kept;        // [groups] codes that the group keeps
  PerHead<uint16_t> rank;       // [groups, codes] where a code stands in the group's order: what all keep, then by weight
  PerHead<int32_t> keys;        // [groups, codes] keys up to and with each rank
  PerHead<double> mass;         // [groups, codes] share of the weight up to and with each rank; 0 for what all keep

  // NaN is not similar.
  __device__ bool always(int64_t head, int code) const {
    return rule != Rule::clusters && !(static_cast<double>(k_similarity[head][code]) > similar);
  }
  __device__ bool keeps_all(int64_t head, int group) const {
    return rule != Rule::clusters && !(static_cast<double>(q_similarity[head][group]) > similar);
  }
};

// ---- keys of each code ----

constexpr int kTallyThreads = 512, kTallyKeys = 8192;

__global__ void __launch_bounds__(kTallyThreads) tally_codes(ProxyLaunch p, CodesLaunch a, int parts) {
  extern __shared__ int32_t counts[];  // [codes]
  const int64_t head = blockIdx.x / parts;
  const int begin = static_cast<int>(blockIdx.x % parts) * kTallyKeys, end = min(begin + kTallyKeys, p.count);
  for (int r = threadIdx.x; r < p.codes; r += kTallyThreads) counts[r] = 0;
  __syncthreads();
  for (int j = begin + threadIdx.x; j < end; j += kTallyThreads) atomicAdd(counts + p.labels[head][j], 1);
  __syncthreads();
  for (int r = threadIdx.x; r < p.codes; r += kTallyThreads) {
    if (counts[r] > 0) atomicAdd(a.code_sizes[head] + r, counts[r]);
  }
}

// ---- each group's order ----

constexpr int kRankThreads = 256, kRankWarps = kRankThreads / 32;
constexpr int kMostEach = static_cast<int>(kMostRankedCodes) / kRankThreads;

// A weight, and below its first 40 fraction bits the code: descending keys are descending weights, and equal weights in
// ascending code.
constexpr uint64_t kCodeMask = kMostRankedCodes - 1;
static_assert((kMostRankedCodes & static_cast<int64_t>(kCodeMask)) == 0);
__device__ uint64_t key_of(double weight, int code) {
  return (static_cast<uint64_t>(__double_as_longlong(weight)) & ~kCodeMask) | (kCodeMask - static_cast<uint64_t>(code));
}
__device__ int code_of(uint64_t key) { return static_cast<int>(kCodeMask - (key & kCodeMask)); }
// In sums, what all keep weighs nothing.
__device__ double weight_of(uint64_t key) {
  const double weight = __longlong_as_double(static_cast<int64_t>(key & ~kCodeMask));
  return weight < INFINITY ? weight : 0.0;
}

// Sorts kRankThreads x kEach keys, descending; thread t has number t x kEach and those that follow. Bitonic: neighbours
// within a thread, then within a warp, and what is further apart through shared memory [kRankThreads x kEach].
template <int kEach>
__device__ void sort_keys(uint64_t (&key)[kEach], uint64_t* shared) {
  const int first = static_cast<int>(threadIdx.x) * kEach;
  for (int run = 2; run <= kRankThreads * kEach; run *= 2) {
    for (int distance = run / 2; distance >= kEach; distance /= 2) {
      const bool larger = ((first & distance) == 0) == ((first & run) == 0);
      const int lanes = distance / kEach;
      uint64_t other[kEach];
      if (lanes < 32) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) other[e] = __shfl_xor_sync(~0u, key[e], lanes);
      } else {
        __syncthreads();  // everyone has read what was there
#pragma unroll
        for (int e = 0; e < kEach; ++e) shared[e * kRankThreads + threadIdx.x] = key[e];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < kEach; ++e) other[e] = shared[e * kRankThreads + (threadIdx.x ^ lanes)];
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((other[e] > key[e]) == larger) key[e] = other[e];
      }
    }
#pragma unroll
    for (int distance = kEach / 2; distance > 0; distance /= 2) {
      if (distance >= run) continue;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((e & distance) != 0) continue;
        const uint64_t x = key[e], y = key[e + distance];
        const bool swap = (y > x) == (((first + e) & run) == 0);
        key[e] = swap ? y : x;
        key[e + distance] = swap ? x : y;
      }
    }
  }
}

// Weights and keys before this thread's, in the order of the threads; `total` of all weights.
__device__ void exclusive_scan(double& mass, int32_t& keys, double& total) {
  __shared__ double masses[kRankWarps];
  __shared__ int32_t counts[kRankWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double sum = mass;
  int32_t count = keys;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(~0u, sum, offset);
    const int32_t others = __shfl_up_sync(~0u, count, offset);
    if (lane >= offset) sum += other, count += others;
  }
  if (lane == 31) masses[warp] = sum, counts[warp] = count;
  const double up_to_last = __shfl_up_sync(~0u, sum, 1);
  mass = lane == 0 ? 0.0 : up_to_last;
  keys = count - keys;
  __syncthreads();
  double first = 0;
  total = 0;
  for (int w = 0; w < kRankWarps; ++w) {
    if (w == warp) first = total;
    if (w < warp) keys += counts[w];
    total += masses[w];
  }
  mass += first;
}

// A block for each group: what a code weighs in it, and where that places the code.
template <int kEach>
__global__ void __launch_bounds__(kRankThreads, kEach <= 4 ? 4 : 1) rank_codes(ProxyLaunch p, CodesLaunch a) {
  __shared__ uint64_t shared[kRankThreads * kEach];
  __shared__ float highs[kRankWarps];
  const int64_t head = blockIdx.x / p.groups, group = blockIdx.x % p.groups;
  if (a.sizes[head][group] == 0) return;
  const float* scores = p.tables[head] + group * p.codes;
  const int32_t* code_sizes = a.code_sizes[head];
  const auto weighs = [&](int r) { return a.rule == Rule::clusters ? code_sizes[r] > 0 : !a.always(head, r); };

  float high = -INFINITY;  // without NaN
  for (int r = threadIdx.x; r < p.codes; r += kRankThreads) {
    if (weighs(r)) high = fmaxf(high, scores[r]);
  }
  for (int offset = 16; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
  if (threadIdx.x % 32 == 0) highs[threadIdx.x / 32] = high;
  __syncthreads();
  for (const float other : highs) high = fmaxf(high, other);

  uint64_t key[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int r = e * kRankThreads + static_cast<int>(threadIdx.x);
    double weight = 0;  // of what is no code, too: it has a higher number than all that are, and so comes last
    if (r < p.codes && a.always(head, r)) {
      weight = INFINITY;
    } else if (r < p.codes && weighs(r)) {
      weight =
          exp(static_cast<double>(scores[r]) - static_cast<double>(high)) * (a.rule == Rule::clusters ? code_sizes[r] : 1);
      if (!(weight < INFINITY)) weight = 0;
    }
    key[e] = key_of(weight, r);
  }
  sort_keys<kEach>(key, shared);

  double mass = 0, total = 0;
  int32_t keys = 0;
  const int first = static_cast<int>(threadIdx.x) * kEach;
  const auto keys_of = [&](int e) { return first + e < p.codes ? code_sizes[code_of(key[e])] : 0; };
#pragma unroll
  for (int e = 0; e < kEach; ++e) mass += weight_of(key[e]), keys += keys_of(e);
  exclusive_scan(mass, keys, total);
  auto* rank = reinterpret_cast<uint16_t*>(shared);  // [codes], in use since the scan waited for everyone
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (first + e >= p.codes) break;
    mass += weight_of(key[e]);
    keys += keys_of(e);
    a.mass[head][group * p.codes + first + e] = total > 0 ? mass / total : 0.0;
    a.keys[head][group * p.codes + first + e] = keys;
    rank[code_of(key[e])] = static_cast<uint16_t>(first + e);
  }
  __syncthreads();
  for (int r = threadIdx.x; r < p.codes; r += kRankThreads) a.rank[head][group * p.codes + r] = rank[r];
}

template <int kEach>
void launch_rank(const Exec& exec, const ProxyLaunch& p, const CodesLaunch& a, unsigned blocks) {
  if constexpr (kEach < kMostEach) {
    if (p.codes > kRankThreads * kEach) return launch_rank<2 * kEach>(exec, p, a, blocks);
  }
  rank_codes<kEach><<<blocks, kRankThreads, 0, stream(exec)>>>(p, a);
  check_launch("rank_codes");
}

// ---- how many codes each group keeps ----

constexpr int kKeepThreads = 1024;

// One head's groups, all of whose orders are known.
struct Keeper {
  const ProxyLaunch& p;
  const CodesLaunch& a;
  int64_t head;
  int always;       // codes that all keep
  int64_t queries;  // of all groups

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
    const int kept = a.rule == Rule::blocks_topk ? whole_codes(bound)
                     : a.rule == Rule::clusters  ? max(inside + 1, a.floor)
                                                 : inside;
    return always + min(max(kept, min(1, rest)), rest);
  }
  __device__ int32_t keys_kept(int group, int codes) const { return a.keys[head][int64_t{group} * p.codes + codes - 1]; }
  __device__ bool searches() const { return a.rule != Rule::blocks_topk; }

  // The bound whose density is nearest to the target; 0 if even that keeps more. Three points of the interval at a time:
  // what a round costs is latency.
  __device__ double solve() const {
    const bool one_each = p.groups <= kKeepThreads;  // then a thread remembers where its group's ranks can be
    double low = 0, high = 1, at_low = 0, at_high = 1;
    int from = 0, to = p.codes - always;
    for (int round = 0; round < 31; ++round) {  // the first looks at 0 alone
      const double quarter = round == 0 ? 0.0 : 0.25 * (high - low);
      int inside[3] = {};
      int64_t pairs[3] = {};
      for (int c = threadIdx.x; c < p.groups; c += kKeepThreads) {
        const int64_t size = a.sizes[head][c];
        if (size == 0) continue;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          const double bound = low + (i + 1) * quarter;
          if (searches()) inside[i] = within(c, bound, one_each ? from : 0, one_each ? to : p.codes - always);
          pairs[i] += size * keys_kept(c, codes_kept(c, bound, inside[i]));
        }
      }
      block_sums<kKeepThreads>(pairs);
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
    return searches() ? bound : static_cast<double>(max(1, whole_codes(bound))) / p.codes;
  }
};

__global__ void __launch_bounds__(kKeepThreads) keep_codes(ProxyLaunch p, CodesLaunch a) {
  const int64_t head = blockIdx.x;
  int64_t sums[2] = {};  // codes that all keep, queries
  for (int r = threadIdx.x; r < p.codes; r += kKeepThreads) sums[0] += a.always(head, r) ? 1 : 0;
  for (int c = threadIdx.x; c < p.groups; c += kKeepThreads) sums[1] += a.sizes[head][c];
  block_sums<kKeepThreads>(sums);
  const Keeper keeper{p, a, head, static_cast<int>(sums[0]), sums[1]};
  const double bound = a.target > 0 ? keeper.solve() : a.given;
  for (int c = threadIdx.x; c < p.groups; c += kKeepThreads) {
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
  *a.alpha_used[head] = a.alpha;
}

// ---- masks ----

constexpr int kEmitWarps = 8, kEmitThreads = kEmitWarps * 32;
constexpr int kEmitWords = 32, kEmitKeys = 32 * kEmitWords;  // of a warp at a time
constexpr int kPassKeys = kEmitWarps * kEmitKeys;            // of a block at a time

// Bit l of lane g becomes bit g of lane l.
__device__ uint32_t transpose(uint32_t x) {
  const int lane = threadIdx.x % 32;
  uint32_t low = 0x0000ffff;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, x, step);
    x = (lane & step) == 0 ? (x & low) | (other & low) << step : (x & ~low) | (other >> step & low);
    low ^= low << step / 2;
  }
  return x;
}

// A block for 32 groups and one of `parts` of the keys. In the table a code has one bit per group, so that one lookup
// answers for all of them; transposed, the bits of 32 keys are the groups' mask words.
__global__ void __launch_bounds__(kEmitThreads, 4)
    emit_codes(ProxyLaunch p, CodesLaunch a, MaskLaunch mask, int tiles, int parts) {
  extern __shared__ uint32_t table[];                                                // [codes]
  auto* words = reinterpret_cast<uint32_t(*)[32][kEmitWords + 1]>(table + p.codes);  // [kEmitWarps]
  __shared__ int32_t kept[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t block = blockIdx.x;
  const auto part = static_cast<int>(block % parts);
  block /= parts;
  const int group = static_cast<int>(block % tiles) * 32, groups = min(32, p.groups - group);
  const int64_t head = block / tiles;
  if (threadIdx.x < 32) kept[lane] = lane < groups ? a.kept[head][group + lane] : 0;
  __syncthreads();
  const uint16_t* rank = a.rank[head] + int64_t{group} * p.codes;
  for (int r = threadIdx.x; r < p.codes; r += kEmitThreads) {
    uint32_t bits = 0;
#pragma unroll 8
    for (int g = 0; g < groups; ++g) bits |= uint32_t{rank[int64_t{g} * p.codes + r] < kept[g]} << g;
    table[r] = bits;
  }
  __syncthreads();

  const int32_t* labels = p.labels[head];
  // The same passes for all warps: where the compiler cannot see that a warp's lanes stay together, a shuffle is a call.
  for (int64_t pass = int64_t{part} * kPassKeys; pass < p.count; pass += int64_t{parts} * kPassKeys) {
    const int64_t first = pass + warp * kEmitKeys;
#pragma unroll 8
    for (int w = 0; w < kEmitWords; ++w) {
      const int64_t key = first + w * 32 + lane;
      words[warp][lane][w] = transpose(key < p.count ? table[labels[key]] : 0);
    }
    __syncwarp();
    const int64_t key = first + lane * 32;
    if (key < p.count) {
      for (int g = 0; g < groups; ++g) {
        uint32_t* row = mask.rows[head] + (group + g) * mask.words;
        if (mask.direct) {
          row[key / 32] = words[warp][g][lane];
        } else {
          add_bits(p, row, static_cast<int32_t>(key), words[warp][g][lane]);
        }
      }
    }
    __syncwarp();
  }
}

// ---- host ----

int64_t lay_out(Arena arena, int64_t groups, int64_t codes, CodesLaunch& a) {
  a.code_sizes.base = arena.take<int32_t>(codes);
  a.kept.base = arena.take<int32_t>(groups);
  a.rank.base = arena.take<uint16_t>(groups * codes);
  a.keys.base = arena.take<int32_t>(groups * codes);
  a.mass.base = arena.take<double>(groups * codes);
  const int64_t bytes = round_up(arena.used(), 256);
  const auto step = [&](auto&... arrays) { ((arrays.step = bytes / static_cast<int64_t>(sizeof(*arrays.base))), ...); };
  step(a.code_sizes, a.kept, a.rank, a.keys, a.mass);
  return bytes;
}

template <class Kernel>
void allow_shared(Kernel* kernel, int64_t bytes) {
  const cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  check(cudaFuncSetAttribute(kernel, attribute, static_cast<int>(bytes)), "shared memory");
}

unsigned grid(int64_t blocks) {
  require(blocks <= INT32_MAX, Status::size_limit, "select: too many groups in one chunk of heads");
  return static_cast<unsigned>(blocks);
}

}  // namespace

int64_t select_codes_scratch(int64_t groups, int64_t codes) {
  CodesLaunch a{};
  return lay_out(Arena(), groups, codes, a);
}

void select_codes(const Exec& exec, std::span<const SelectArgs> heads, const ProxyLaunch& p, const MaskLaunch& mask) {
  const SelectArgs& first = heads[0];
  const auto n = static_cast<int64_t>(heads.size());
  require(p.codes <= kMostRankedCodes, Status::size_limit, "select on CUDA ranks up to 4096 codes");
  CodesLaunch a{};
  a.rule = first.rule;
  a.alpha = first.target > 0 ? std::min(first.alpha, first.target / 2) : first.alpha;
  a.floor = static_cast<int32_t>(floor_share(a.alpha, p.codes));
  a.target = first.target;
  a.rho = first.rho;
  a.given = first.rho;
  if (first.rule == Rule::blocks_topk) {
    a.given = static_cast<double>(floor_share(first.density, p.codes)) / static_cast<double>(p.codes);
  }
  a.similar = first.similar;
  if (first.rule != Rule::clusters) {
    a.q_similarity = per_head(heads, [](const SelectArgs& x) { return x.q_similarity; });
    a.k_similarity = per_head(heads, [](const SelectArgs& x) { return x.k_similarity; });
  }
  a.sizes = per_head(heads, [](const SelectArgs& x) { return x.sizes; });
  a.counts = per_head(heads, [](const SelectArgs& x) { return x.counts; });
  a.top_p = per_head(heads, [](const SelectArgs& x) { return x.top_p; });
  a.head_budget = per_head(heads, [](const SelectArgs& x) { return x.head_budget; });
  a.rho_used = per_head(heads, [](const SelectArgs& x) { return x.rho_used; });
  a.alpha_used = per_head(heads, [](const SelectArgs& x) { return x.alpha_used; });
  const int64_t bytes = lay_out(Arena(first.scratch.data, first.scratch.bytes), p.groups, p.codes, a);
  require(bytes * n <= first.scratch.bytes, Status::internal, "select: scratch is smaller than its plan");

  const auto table = static_cast<size_t>(p.codes) * sizeof(int32_t);
  check(cudaMemset2DAsync(a.code_sizes.base, static_cast<size_t>(bytes), 0, table, static_cast<size_t>(n), stream(exec)),
        "select: sizes of codes");
  const auto tally_parts = static_cast<int>(ceil_div(p.count, kTallyKeys));
  tally_codes<<<grid(n * tally_parts), kTallyThreads, table, stream(exec)>>>(p, a, tally_parts);
  check_launch("tally_codes");

  launch_rank<1>(exec, p, a, grid(n * p.groups));
  keep_codes<<<grid(n), kKeepThreads, 0, stream(exec)>>>(p, a);
  check_launch("keep_codes");

  // Few parts, since each makes its table anew, but enough to keep the device busy.
  const int64_t wanted = ceil_div(8 * exec.device->multiprocessors, n * ceil_div(p.groups, 32));
  const auto tiles = static_cast<int>(ceil_div(p.groups, 32));
  const auto parts = static_cast<int>(std::min(wanted, ceil_div(p.count, kPassKeys)));
  const int64_t emit_bytes = static_cast<int64_t>(table) + kEmitWarps * 32 * (kEmitWords + 1) * 4;
  allow_shared(emit_codes, emit_bytes);
  emit_codes<<<grid(n * tiles * parts), kEmitThreads, static_cast<size_t>(emit_bytes), stream(exec)>>>(p, a, mask, tiles,
                                                                                                       parts);
  check_launch("emit_codes");
}

}  // namespace scope::cuda
