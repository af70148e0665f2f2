// What happens around the stages for the heads of one sample: token lists, the rest of a selection, copies.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

struct HeadStats {
  double density = 0;             // sum n_c r_c / (queries x keys) over the tokens that take part in selection; 1 when dense
  double total_density = 0;       // with always-kept keys and densely attending queries, over all valid pairs
  double rho = 0, alpha = 0;      // as used
  int64_t head_budget = 0;        // k_head
  int64_t queries = 0, keys = 0;  // that take part in selection
  int64_t groups = 0, codes = 0;  // effective; 0 groups: the head ran dense
  int64_t empty_groups = 0, empty_codes = 0;
  int64_t min_count = 0, max_count = 0;  // of r_c over non-empty groups
};

// How the tokens of one sample divide; host integers on every backend.
struct Tokens {
  int64_t q_tokens = 0, k_tokens = 0;  // of the shape
  int64_t valid_q = 0, valid_k = 0;    // the rest is padding
  int64_t queries = 0, keys = 0;       // that take part in selection
  int64_t dense = 0, kept = 0;         // densely attending queries, always-kept keys
};

// describe: the host's bitmasks -> lists of tokens where the stages can read them.
struct DescribeArgs {
  Tokens tokens;
  const uint32_t* keep = nullptr;           // [mask_words(k_tokens)] host memory; null: none
  const uint32_t* dense_queries = nullptr;  // [mask_words(q_tokens)] host memory; null: none
  // [q_tokens] out: the queries that take part, then the densely attending ones, then padding, each ascending
  int32_t* q_rows = nullptr;
  int32_t* k_rows = nullptr;   // [keys] out: the keys that take part, ascending
  uint32_t* valid = nullptr;   // [mask_words(k_tokens)] out: the same as bits
  uint32_t* kept = nullptr;    // [mask_words(k_tokens)] out: valid keys that are always kept
  int64_t* offsets = nullptr;  // [2] out: 0, valid_q: all valid queries as one group
};

// finish: completes the selection of each head (unused groups, the dense group, idle queries, the tail's mask) and reports
// on it. Arrays of all heads lie one after the other. With groups == 0 the heads ran dense, and only `report` is written.
struct FinishArgs {
  Tokens tokens;
  int64_t heads = 0;
  int64_t groups = 0;      // that the sample has
  int64_t all_groups = 0;  // rows of the selection: the last is the dense group if tokens.dense > 0
  int64_t row_groups = 0;  // rows that one head's arrays have room for, >= all_groups
  int64_t subspaces = 0, codes = 0;
  const int32_t* q_rows = nullptr;
  const uint32_t* valid = nullptr;
  int32_t* labels = nullptr;         // [heads, q_tokens]
  int32_t* sizes = nullptr;          // [heads, row_groups]
  int32_t* counts = nullptr;         // [heads, row_groups]
  int32_t* order = nullptr;          // [heads, q_tokens]
  int64_t* offsets = nullptr;        // [heads, row_groups + 1]
  uint32_t* mask = nullptr;          // [heads, row_groups, mask_words(k_tokens)]
  const int64_t* empty = nullptr;    // [heads, subspaces]
  int64_t tail_groups = 0;           // 0: no tail
  const float* tail_bias = nullptr;  // [heads, tail_groups]
  uint32_t* tail_mask = nullptr;     // [heads, row_groups, mask_words(tail_groups)]
  HeadStats* report = nullptr;       // [heads]; rho, alpha and head_budget are already there
};

// import: a selection from elsewhere -> what attend takes. Labels outside 0 .. groups - 1 attend to nothing, and bits past
// the valid keys are dropped.
struct ImportArgs {
  Tokens tokens;
  int64_t heads = 0, groups = 0, row_groups = 0;
  const int32_t* labels = nullptr;     // [heads, q_tokens]
  const uint32_t* selected = nullptr;  // [heads, groups, mask_words(k_tokens)]
  const uint32_t* keep = nullptr;      // [mask_words(k_tokens)]; optional
  int32_t* order = nullptr;            // [heads, q_tokens] out
  int64_t* offsets = nullptr;          // [heads, row_groups + 1] out
  uint32_t* mask = nullptr;            // [heads, row_groups, mask_words(k_tokens)] out
  uint32_t* kept = nullptr;            // [mask_words(k_tokens)] out
};

// What a state says of one sample: how many groups and codes it holds; 0 and 0 before the first call.
struct StateSlot {
  int32_t groups, codes;
};

// Whose time a moment of a call belongs to.
enum class Moment : int { check, group, encode, score, select, attend, other, end };
inline constexpr int kMoments = 8;

}  // namespace scope
