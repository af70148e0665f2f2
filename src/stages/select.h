// select: proxy rows -> exactly r_c keys per group, or whole codes, as a bitmask with counts. In two halves, so that what
// all heads weigh can be known before any of them keeps its keys.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

// What each keeps: docs/algorithm.md, "Rules". The last four keep every key of some codes and no other.
enum class Rule { fixed, top_p, hybrid, online, target, clusters, blocks_topk, blocks_cdf, error_aware };

// weigh: what `keep` must know of each row: histograms of its scores, or its codes in the order of their weight.
struct WeighArgs {
  int64_t heads = 1;
  Proxy proxy = {};
  PerHead<const int32_t> sizes = {};  // [groups] queries per group; an empty group gets no keys and no work
  Rule rule = Rule::online;
  double rho = 0;                 // top_p, hybrid, online, clusters, error_aware, blocks_cdf: (0, 1]
  const double* alpha = nullptr;  // [heads] host memory: hybrid, online, target: floor as a share of the keys; clusters,
                                  // error_aware: of the codes; [0, 1]
  double density = 0;             // fixed, target, blocks_topk: (0, 1]
  // Not for fixed, online and target. > 0: what the rule compares with (rho; n / codes for blocks_topk) is solved so that
  // the head's density is the nearest to this that can be reached.
  double target = 0;
  PerHead<const float> q_similarity = {};  // [groups] blocks rules only, like the next two
  PerHead<const float> k_similarity = {};  // [codes]
  double similar = 0;                      // a group or code is similar above this, which NaN never is
  PerHead<const float> errors = {};        // [groups, codes] error_aware only: see CompensateArgs
  PerHead<int32_t> top_p = {};             // [groups] out: t_c, here or, where rho is solved, by keep; 0: the rule has none
  Scratch weights = {};                    // out: weights_bytes
  Scratch scratch = {};
};

// keep: the keys themselves. The weights are used up.
struct KeepArgs {
  WeighArgs weighed = {};             // as weigh left it
  PerHead<int32_t> counts = {};       // [groups] out: r_c
  PerHead<int64_t> head_budget = {};  // [1] out: k_head (0 but under online and target)
  PerHead<double> rho_used = {};      // [1] out: rho, or what was solved for; 0: the least that is kept is above the target
  PerHead<double> alpha_used = {};    // [1] out: alpha, or less where a target asks for it
  PerHead<uint32_t> mask = {};        // [groups, mask_words(k.tokens)] out, in token positions
};

// k_head = ceil(sum n_c b_c / sum n_c), in integers.
int64_t head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups);

namespace cpu {
void weigh(const Exec& exec, const WeighArgs& args);
void keep(const Exec& exec, const KeepArgs& args);
int64_t weights_bytes(const Exec& exec, const Sizes& sizes);
int64_t weigh_scratch(const Exec& exec, const Sizes& sizes);  // of either half
}  // namespace cpu

}  // namespace scope
