// What a method's proxy scores are worth and what they cost: recall matched by threshold, how codes follow the axes of the
// video, and the account of the complexity section.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "stages/encode.h"

namespace scope {

// Frames, rows and columns of the video tokens, which come first.
using Grid = std::array<int64_t, 3>;

// What one head's scores are made of, as a call wrote it out (SelectionOut).
struct HeadProxy {
  const float* centroids = nullptr;       // [groups, dim]
  RowsView k;                             // the keys to score, [tokens, dim]
  Partition partition;                    // empty: the exact proxy
  int64_t codes = 0;                      // of a subspace
  std::vector<const float*> codebooks;    // per subspace [codes, dim_m]
  std::vector<const int32_t*> key_codes;  // per subspace [k.tokens]
};

// The proxy logit of every key for one group, in float64. Keys of equal codes have bitwise equal scores.
std::vector<double> proxy_scores(const HeadProxy& proxy, int64_t group);

// Keys of the highest scores, until they hold `recall` of the oracle's. Keys that a score cannot tell apart stay together,
// so more may be recalled than was asked for.
struct RecallMatch {
  double recall = 0;         // asked for
  double threshold = 0;      // keys with at least this score are kept
  int64_t kept = 0;          // keys
  double oracle_recall = 0;  // reached
  double retention = 0;      // kept / keys
  double even_retention =
      0;  // when the last keys of equal score are kept only in the part that `recall` needs, drawn evenly
};
// `oracle` is true for the keys that matter, one at least; recalls in (0, 1], ascending.
std::vector<RecallMatch> match_recall(const std::vector<double>& scores, const std::vector<bool>& oracle,
                                      std::span<const double> recalls);

// How much of what a label says is known from each coordinate alone: mutual information / entropy of the labels, for
// frame, row and column; 0 (nothing) to 1, and 0 where all labels are equal.
std::array<double, 3> axis_shares(const int32_t* labels, const Grid& grid);

// One head's scoring, counted. Products of counts may be large: they are doubles.
struct ScoringCost {
  int64_t groups = 0, keys = 0, dim = 0, subspaces = 0, codes = 0;
  double direct_macs = 0;         // groups keys dim
  double table_macs = 0;          // groups sum_m codes dim_m
  double lookups = 0;             // groups keys subspaces
  double additions = 0;           // groups keys (subspaces - 1)
  double mac_reduction = 0;       // direct / table = keys / codes
  double code_space = 0;          // codes^subspaces
  double code_space_gain = 0;     // codes^(subspaces - 1)
  double centroid_scalars = 0;    // sum_m codes dim_m
  double monolithic_scalars = 0;  // code_space dim
  int64_t distinct_codes = 0;     // tuples that the keys have
};
ScoringCost scoring_cost(const HeadProxy& proxy, int64_t groups);

}  // namespace scope
