// attend: q, k, v and a selection -> out and log-sum-exp, with the original tokens.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

// Virtual keys beside the real ones; group c sees those in its row of `mask`.
struct ExtraKeys {
  int64_t count = 0;               // on a device at most `groups`: attend_scratch has room for so many
  const float* k = nullptr;        // [count, dim]
  const float* v = nullptr;        // [count, dim]
  const float* bias = nullptr;     // [count] added to the scaled logit
  const uint32_t* mask = nullptr;  // [groups, mask_words(count)]
};

// softmax(scale q k^T + bias) v over the keys of mask OR keep. A query with no key gets zeros and LSE -inf.
// Dense attention is one group with a full row, and a null mask stands for it. A non-finite value reaches only the rows that
// read it.
struct AttendArgs {
  RowsView q;       // [q_tokens, dim]
  RowsView k, v;    // [k_tokens, dim]
  float scale = 0;  // 1 / sqrt(dim)
  int64_t groups = 0;
  const int32_t* order =
      nullptr;  // [q_tokens] queries by group; those past offsets[groups] attend to nothing; null: 0, 1, …
  const int64_t* offsets = nullptr;  // [groups + 1]; null: one group of all q_tokens
  const uint32_t* mask = nullptr;    // [groups, mask_words(k_tokens)]; null: every key, and `keep` is not read
  const uint32_t* keep = nullptr;    // [mask_words(k_tokens)] keys that every query sees; optional
  ExtraKeys extra;
  MutableRowsView out;   // [q_tokens, dim]
  float* lse = nullptr;  // [q_tokens] natural log; optional
  Scratch scratch;
};

namespace cpu {
void attend(const Exec& exec, const AttendArgs& args);
int64_t attend_scratch(const Exec& exec, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups);
}  // namespace cpu

}  // namespace scope
