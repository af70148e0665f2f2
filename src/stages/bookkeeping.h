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
  int64_t valid_q = 0, valid_k = 0;    // how many are not padding, which may lie anywhere
  int64_t queries = 0, keys = 0;       // that take part in selection
  int64_t dense = 0, kept = 0;         // densely attending queries, always-kept keys
};

// Which tokens of a sample are what, as the host says: bitmasks in its memory.
struct TokenMasks {
  int64_t q_length = 0, k_length = 0;       // tokens from there on are padding
  const uint32_t* valid_q = nullptr;        // [mask_words(q_tokens)] padding before the length too; null: none
  const uint32_t* valid_k = nullptr;        // [mask_words(k_tokens)]
  const uint32_t* keep = nullptr;           // [mask_words(k_tokens)] null: none
  const uint32_t* dense_queries = nullptr;  // [mask_words(q_tokens)] null: none
};

// describe: the host's bitmasks -> lists of tokens where the stages can read them.
struct DescribeArgs {
  Tokens tokens = {};
  TokenMasks masks = {};
  // [q_tokens] out: the queries that take part, then the densely attending ones, then padding, each ascending
  int32_t* q_rows = nullptr;
  int32_t* k_rows = nullptr;    // [keys] out: the keys that take part, ascending
  uint32_t* valid = nullptr;    // [mask_words(k_tokens)] out: the same as bits
  uint32_t* kept = nullptr;     // [mask_words(k_tokens)] out: valid keys that are always kept
  uint32_t* queries = nullptr;  // [mask_words(q_tokens)] out: valid queries
  int64_t* offsets = nullptr;   // [2] out: 0, valid_q: all valid queries as one group
};

// finish: completes the selection of each head (unused groups, the dense group, idle queries) and reports on it. Arrays of
// all heads lie one after the other. With groups == 0 the heads ran dense, and only `report` is written.
struct FinishArgs {
  Tokens tokens = {};
  int64_t heads = 0;
  int64_t groups = 0;      // that the sample has
  int64_t all_groups = 0;  // rows of the selection: the last is the dense group if tokens.dense > 0
  int64_t row_groups = 0;  // rows that one head's arrays have room for, >= all_groups
  int64_t subspaces = 0, codes = 0;
  const int32_t* q_rows = nullptr;
  const uint32_t* valid = nullptr;
  int32_t* labels = nullptr;       // [heads, q_tokens]
  int32_t* sizes = nullptr;        // [heads, row_groups]
  int32_t* counts = nullptr;       // [heads, row_groups]
  int32_t* order = nullptr;        // [heads, q_tokens]
  int64_t* offsets = nullptr;      // [heads, row_groups + 1]
  uint32_t* mask = nullptr;        // [heads, row_groups, mask_words(k_tokens)]
  const int64_t* empty = nullptr;  // [heads, subspaces]
  HeadStats* report = nullptr;     // [heads]; rho, alpha and head_budget are already there
};

// import: a selection from elsewhere -> what attend takes. Labels outside 0 .. groups - 1 and padding attend to nothing, and
// bits of padding are dropped.
struct ImportArgs {
  Tokens tokens = {};
  const uint32_t* valid_keys = nullptr;     // [mask_words(k_tokens)] DescribeArgs::valid of a call without `keep`
  const uint32_t* valid_queries = nullptr;  // [mask_words(q_tokens)] DescribeArgs::queries
  int64_t heads = 0, groups = 0, row_groups = 0;
  const int32_t* labels = nullptr;     // [heads, q_tokens]
  const uint32_t* selected = nullptr;  // [heads, groups, mask_words(k_tokens)]
  const uint32_t* keep = nullptr;      // [mask_words(k_tokens)]; optional
  int32_t* order = nullptr;            // [heads, q_tokens] out
  int64_t* offsets = nullptr;          // [heads, row_groups + 1] out
  uint32_t* mask = nullptr;            // [heads, row_groups, mask_words(k_tokens)] out
  uint32_t* kept = nullptr;            // [mask_words(k_tokens)] out
};

// reuse: what a state holds -> what group and encode write, but for centroids and codebooks. State arrays are by token.
struct ReuseArgs {
  Tokens tokens = {};
  int64_t heads = 1;
  int64_t groups = 0, codes = 0, subspaces = 0;
  const int32_t* q_rows = nullptr;           // [queries]; on a device null stands for the first ones, like the next
  const int32_t* k_rows = nullptr;           // [keys]
  PerHead<const int32_t> state_labels = {};  // [q_tokens]
  PerHead<const int32_t> state_codes = {};   // [subspaces, k_tokens]
  PerHead<int32_t> labels = {}, sizes = {}, order = {};  // as GroupArgs says, like the next
  PerHead<int64_t> offsets = {};
  PerHead<int32_t> code_labels = {};  // as EncodeArgs::labels says, like the next
  PerHead<int64_t> empty = {};
  Scratch scratch = {};  // of the chunk: 4 bytes for each head and code
};

// What a state holds of one sample: groups and codes, 0 and 0 before the first call, and which tokens they are of.
struct StateSlot {
  int32_t groups, codes;
  uint64_t tokens;  // a hash of the sample's masks

  bool operator==(const StateSlot&) const = default;
};

// Bits of a call's status word, for what only a device knows.
inline constexpr uint32_t kNotFinite = 1;       // q or k held NaN or Inf among the tokens that take part
inline constexpr uint32_t kStateNotFilled = 2;  // a warm call found a state that no first call of its shape has filled

}  // namespace scope
