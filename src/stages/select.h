// select: proxy rows -> exactly r_c keys per group, as a bitmask with counts.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

enum class Rule { fixed, top_p, hybrid, online, target };

// One virtual key per group that stands for the keys it drops (the first-order tail).
struct TailArgs {
  RowsView v;              // [tokens, dim]
  float* k = nullptr;      // [groups, dim] out: mean dropped key under the proxy's softmax
  float* value = nullptr;  // [groups, dim] out: mean dropped value
  float* bias = nullptr;   // [groups] out: what is added to its logit; -inf when nothing is dropped
};

struct SelectArgs {
  Proxy proxy;
  const int32_t* sizes = nullptr;  // [groups] queries per group; an empty group gets no keys and no work
  Rule rule = Rule::online;
  double rho = 0;                  // top_p, hybrid, online: (0, 1]
  double alpha = 0;                // hybrid, online, target: floor as a share of the keys, [0, 1]
  double density = 0;              // fixed, target: (0, 1]
  int32_t* counts = nullptr;       // [groups] out: r_c
  int32_t* top_p = nullptr;        // [groups] out: t_c (0 under rule fixed)
  int64_t* head_budget = nullptr;  // [1] out: k_head (0 under fixed and top_p)
  double* rho_used = nullptr;      // [1] out: rho, or what `target` solved for
  double* alpha_used = nullptr;    // [1] out: alpha, or density / 2 where target lowered it
  uint32_t* mask = nullptr;        // [groups, mask_words(k.tokens)] out, in token positions
  const TailArgs* tail = nullptr;  // optional
  Scratch scratch;
};

// k_head = ceil(sum n_c b_c / sum n_c), in integers.
int64_t head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups);

namespace cpu {
void select(const Exec& exec, const SelectArgs& args);
int64_t select_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups);
}  // namespace cpu

}  // namespace scope
