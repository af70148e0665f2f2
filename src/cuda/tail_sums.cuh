// Between the tail's kernels: which keys a group drops, and the partial sums over them that are merged in order.
#pragma once

#include "cuda/proxy.h"
#include "stages/tail.h"

namespace scope::cuda {

inline constexpr int kTailKeys = 64;  // keys and values that pass through shared memory at a time

// A partial result for one group: about its highest logit, what the keys that it drops weigh relative to it, what the
// others weigh (mean), a spare, and the weighted sums of values (and of keys). A sum that is not finite is not to be
// trusted: a kept value may be in it, times a weight of zero.
inline constexpr int kTailHeader = 4;

struct TailLaunch {
  HeadRows<const uint16_t> v;
  PerHead<const int32_t> sizes;  // [rows] queries: of a group, or of a part of one
  int32_t each = 1;              // rows of one group, which share its mask
  PerHead<const uint32_t> kept;  // [groups, words]
  int64_t words;
  bool by_key = false;            // bit j of `kept` is key j; else it is token j
  int32_t stride = 1, phase = 0;  // the keys at positions phase, phase + stride, ...
  int32_t partials;               // for each group
  int32_t splits;                 // partial i has the keys of part i / splits, and its share of each kTailKeys of them
  int32_t width;                  // of a partial result
  PerHead<float> sums;            // scratch [groups, partials, width]
  PerHead<float> centre;          // scratch [parts, dim]
};

// The keys that are weighed.
struct TailKeys {
  int32_t first, count;

  __device__ TailKeys(const ProxyLaunch& p, const TailLaunch& tail)
      : first(tail.phase), count((p.count - first + tail.stride - 1) / tail.stride) {}
  // Key `key` of these among all, and its token.
  __device__ int32_t place(const TailLaunch& tail, int32_t key) const { return first + key * tail.stride; }
  __device__ int32_t token(const ProxyLaunch& p, const TailLaunch& tail, int32_t key) const {
    return p.token(place(tail, key));
  }
};

// Those of one of `parts` blocks: all but the last have a multiple of kTailKeys.
struct KeyRange {
  int32_t begin, end;
};
__device__ inline KeyRange keys_of_part(int32_t count, int part, int parts) {
  const int64_t steps = (int64_t{count} + kTailKeys - 1) / kTailKeys;
  return {static_cast<int32_t>(steps * part / parts * kTailKeys),
          static_cast<int32_t>(min(steps * (part + 1) / parts * kTailKeys, int64_t{count}))};
}

// Bits of keys [first, first + 32) in a row of the mask.
__device__ inline uint32_t kept_bits(const ProxyLaunch& p, const TailLaunch& tail, const uint32_t* row, int32_t first) {
  if (p.rows == nullptr || tail.by_key) return row[first / 32];
  const int32_t last = min(first + 31, p.count - 1), start = p.rows[first], end = p.rows[last];
  if (end - start == last - first) {
    const uint32_t word = row[start / 32] >> (start % 32);
    return end / 32 == start / 32 ? word : word | row[end / 32] << (32 - start % 32);
  }
  uint32_t word = 0;
  for (int32_t key = first; key <= last; ++key) word |= (row[p.rows[key] / 32] >> (p.rows[key] % 32) & 1) << (key - first);
  return word;
}

// A row's mask; null: it drops nothing, because it has no queries or is past the last.
__device__ inline const uint32_t* kept_row(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, int row) {
  return row >= p.groups || tail.sizes[head][row] == 0 ? nullptr : tail.kept[head] + row / tail.each * tail.words;
}

// Which of keys [first, first + 32) a group drops, as bits.
__device__ inline uint32_t dropped_bits(const ProxyLaunch& p, const TailLaunch& tail, const uint32_t* row, int32_t first,
                                        int32_t end) {
  if (row == nullptr || first >= end) return 0;
  const uint32_t valid = end - first >= 32 ? ~0u : (1u << (end - first)) - 1;
  return valid & ~kept_bits(p, tail, row, first);
}

// How one head's sums lie in scratch.
struct TailSpace {
  int partials, splits, width;
  int64_t floats;

  // `each`: rows of a group. mean: of values alone, and not of keys.
  TailSpace(const Exec& exec, int64_t rows, int64_t dim, bool exact, bool mean, int64_t each);
};
// Fills tail.sums, of values and unless `mean` of keys.
void tail_sums_pass(const Exec& exec, const ProxyLaunch& p, const TailLaunch& tail, bool mean);

// The mean's sums by wgmma, for exact proxies.
void mean_sums_sm90(const Exec& exec, const ProxyLaunch& p, const TailLaunch& tail);

// Means of parts of groups.
void part_means(const Exec& exec, const TailArgs& args);
int64_t part_means_scratch(const Exec& exec, const Sizes& sizes);

}  // namespace scope::cuda
