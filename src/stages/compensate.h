// compensate: clusters of keys -> what may stand for each of them, and what letting it do so costs each group.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

// Cluster j is the n_j keys with code j; v_j is the mean of their values, s_cj = tables[c, j] and s_ct = scale q_c . k_t.
// SVG-EAR calls errors (less log n_c, which is the same for all of a group's clusters) the score of a cluster.
struct CompensateArgs {
  int64_t heads = 1;
  Proxy proxy = {};           // codes, with one subspace; centroids, k and rows too where errors are asked for
  HeadsView v = {};           // [tokens, dim]
  PerHead<float> value = {};  // [codes, dim] out: v_j; 0 without keys
  PerHead<float> bias = {};   // [codes] out: log n_j; -inf without keys
  // [groups, codes] out, optional: log(sum over t of |e^s_ct v_t - e^s_cj v_j|^2) - log n_j; -inf for 0
  PerHead<float> errors = {};
  Scratch scratch = {};
};

namespace cpu {
void compensate(const Exec& exec, const CompensateArgs& args);
int64_t compensate_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
