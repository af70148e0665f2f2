// compensate: clusters of keys -> what may stand for each of them, and what letting it do so costs each group.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

// Cluster j is the n_j keys with code j; v_j is the mean of their values, s_cj = tables[c, j] and s_ct = scale q_c . k_t.
// SVG-EAR calls errors (less log n_c, which is the same for all of a group's clusters) the score of a cluster.
struct CompensateArgs {
  Proxy proxy;             // codes, with one subspace; centroids, k and rows too where errors are asked for
  RowsView v;              // [tokens, dim]
  float* value = nullptr;  // [codes, dim] out: v_j; 0 without keys
  float* bias = nullptr;   // [codes] out: log n_j; -inf without keys
  float* errors =
      nullptr;  // [groups, codes] out, optional: log(sum over t of |e^s_ct v_t - e^s_cj v_j|^2) - log n_j; -inf for 0
  Scratch scratch;
};

namespace cpu {
void compensate(const Exec& exec, const CompensateArgs& args);
int64_t compensate_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes);
}  // namespace cpu

}  // namespace scope
