// compensate: clusters of keys -> what may stand for each of them, and what letting it do so costs each group.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

// Cluster j is the keys with code j. What is computed of it: docs/reference/algorithm.md, "Error-aware" and "Tails".
struct CompensateArgs {
  int64_t heads = 1;
  Proxy proxy = {};           // codes, with one subspace; centroids, k and rows too where errors are asked for
  HeadsView v = {};           // [tokens, dim]
  PerHead<float> value = {};  // [codes, dim] out: v_j; 0 without keys
  PerHead<float> bias = {};   // [codes] out: log n_j; -inf without keys
  // [groups, codes] out, optional: epsilon_cj of docs/reference/algorithm.md, "Error-aware"; -inf for none
  PerHead<float> errors = {};
  Scratch scratch = {};
};

namespace cpu {
void compensate(const Exec& exec, const CompensateArgs& args);
int64_t compensate_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
