// What the passes of select share: logits as fixed-point depths, the rule, and what is known of each row.
#pragma once

#include "cuda/proxy.h"

namespace scope::cuda {

// A warp's lanes are 32 groups: tables and histograms have 32 columns, and lane l uses bank l.
inline constexpr int kLanes = 32;

// A key's depth is how far its logit lies below its row's upper bound, in bins with kSubBits of fraction: integers from
// here on, so that histograms add up in any order and equal logits stay equal. 23 bits come out of one f32 addition.
inline constexpr int kBins = 640, kSubBits = 13;
inline constexpr uint32_t kDepths = uint32_t{kBins} << kSubBits;
inline constexpr float kUsedDepths = kDepths - 64;  // what a row's range is mapped to; the rest is for rounding
static_assert(kDepths <= 1u << 23);
// Where tables leave little shared memory, fewer and wider bins.
struct Bins {
  int count = kBins, sub_bits = kSubBits;
};
// Beyond this range a depth is too coarse for the tolerance of 2e-3: the row is done from its f32 logits.
inline constexpr float kMostRange = 1500.0f;

// A histogram word in shared memory: keys, and the sum of the top bits of their fractions. Blocks flush in time.
inline constexpr int kMomentBits = 6, kCountShift = 19, kFlushKeys = 8'000;
inline constexpr int kMostMoment = (1 << kMomentBits) - 1;
static_assert(kFlushKeys * kMostMoment < 1 << kCountShift && kFlushKeys < 1 << (32 - kCountShift));
// In memory: keys << 32 | the sum, so this many keys at most.
inline constexpr int64_t kMostKeys = 1 << 26;
static_assert(kMostKeys * kMostMoment < int64_t{1} << 32);

// What a row still needs after the fast passes.
inline constexpr uint32_t kRefineTopP = 1;   // t_c from the depths in its bin
inline constexpr uint32_t kExactTopP = 2;    // t_c from the f32 logits
inline constexpr uint32_t kExactSelect = 4;  // the whole mask row from the f32 logits

// Scratch of a chunk. The histograms are dead once the budgets are known: the candidates take their place.
struct SelectSpace {
  int64_t bytes = 0;  // per head
  int32_t most_candidates = 0;
  PerHead<uint32_t> found;                // [groups] candidates so far
  PerHead<unsigned long long> histogram;  // [groups / 32, bins, 32]; scanned: keys up to the bin << 32 | mass below it
  PerHead<uint32_t> candidates;           // [groups, most_candidates] fraction of the depth << index bits | key
  PerHead<uint32_t> few;                  // [groups, kFewCandidates] the same beside the histograms, for t_c
  PerHead<float> step;                    // [groups] nats per depth; 0: the row is one bin
  PerHead<float> range;                   // [groups] upper minus lower bound, in nats; not finite when the logits are not
  PerHead<float> high;                    // [groups] upper bound; exact: of Height, its bias
  PerHead<float> unit;                    // [groups] depths per unit of the logit; exact: of Height, without the scale
  PerHead<float> mass;                    // [groups] of all keys, relative to the top of the first bin that has any
  PerHead<float> blur;          // [groups] how much the fractions' rounding can move a share of the mass, per bin width
  PerHead<uint32_t> todo;       // [groups] kExact flags
  PerHead<uint32_t> limit;      // [groups] keys above this depth are kept
  PerHead<uint32_t> end;        // [groups] keys from limit up to here are candidates
  PerHead<int32_t> need;        // [groups] how many of the candidates are kept
  PerHead<int32_t> again;       // [groups] rows that a pass looks at once more
  PerHead<int32_t> again_size;  // [1] how many they are
  PerHead<float> part;          // [groups] what share of the mass of t_c's bin is needed
};
inline constexpr int kFewCandidates = 1024;

// The rows of each head that a pass looks at: all groups, or those in a list.
struct RowSet {
  int groups;
  PerHead<const int32_t> list = {}, size = {};  // [groups], [1]; null: all

  __device__ int count(int64_t head) const { return list ? *size[head] : groups; }
  __device__ int at(int64_t head, int i) const { return i >= count(head) ? -1 : list ? list[head][i] : i; }
};

// A rule that keeps key by key, as its properties.
struct RuleLaunch {
  int32_t fixed;            // keys of every group; 0: as many as reach rho
  int32_t floor;            // the fewest keys of a group: ceil(alpha N), at most N
  bool shares_budget;       // nor does a group keep fewer than the head's mean, k_head
  int32_t all;              // keys, of which the rule sees a sample; 0: it sees all
  double rho, alpha, goal;  // alpha as used; the density that rho is solved for, 0: rho is given
  const double* solved;     // [1] the rho of the whole sample; null: each head has its own
  PerHead<const int32_t> sizes;
  PerHead<int32_t> counts, top_p;
  PerHead<float> dropped, log_mass;  // null: not wanted
  PerHead<int64_t> head_budget;
  PerHead<double> rho_used, alpha_used;
};

// A candidate's lower bits hold its key.
inline int index_bits(int64_t count) {
  int bits = 1;
  while ((int64_t{1} << bits) < count) ++bits;
  return bits;
}

}  // namespace scope::cuda
