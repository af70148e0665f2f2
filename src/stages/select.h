// select: proxy rows -> exactly r_c keys per group, or whole codes, as a bitmask with counts. In two halves, so that what
// all heads weigh can be known before any of them keeps its keys: between them one rho may be solved for a whole sample.
#pragma once

#include "core/numeric.h"
#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"
#include "stages/tail.h"

namespace scope {

// What each keeps: docs/reference/algorithm.md, "Rules". The last five keep every key of some codes and no other.
enum class Rule { fixed, top_p, hybrid, online, target, clusters, blocks_topk, blocks_cdf, error_aware, deviation };

// What meets a target density: each head, or the mean over a sample's heads at one rho for all of them.
enum class TargetScope { head, sample };

// weigh: what `keep` must know of each row: histograms of its scores, or its codes in the order of their weight.
struct WeighArgs {
  int64_t heads = 1;
  Proxy proxy = {};
  PerHead<const int32_t> sizes = {};  // [groups] queries per group; an empty group gets no keys and no work
  Rule rule = Rule::online;
  double rho = 0;                 // top_p, hybrid, online, clusters, error_aware, blocks_cdf, deviation: (0, 1]
  const double* alpha = nullptr;  // [heads] host memory: hybrid, online, target: floor as a share of the keys; clusters,
                                  // error_aware: of the codes; [0, 1]
  double density = 0;             // fixed, target, blocks_topk: (0, 1]
  // Not for fixed, online and target. > 0: what the rule compares with (rho; n / codes for blocks_topk) is solved so that
  // the head's density is the nearest to this that can be reached.
  double target = 0;
  double mean_alpha = 0;     // over all heads of the sample where they meet the target together; 0: each meets it alone
  bool alpha_first = false;  // a target lowers alpha only where it is not above it
  // Of single keys by exact proxies, a stride above 1: the rule sees a sample of the keys, those at places phase,
  // phase + stride, ...: count / stride of them. A group keeps the keys above the last that its rule keeps of the sample,
  // and of those equal to it the first, up to its share of all keys; all keys where it keeps the whole sample.
  int64_t stride = 1, phase = 0;
  PerHead<const float> q_similarity = {};  // [groups] blocks rules only, like the next two
  PerHead<const float> k_similarity = {};  // [codes]
  double similar = 0;                      // a group or code is similar above this, which NaN never is
  PerHead<const float> errors = {};        // [groups, codes] error_aware only: see CompensateArgs
  // [groups] out: t_c, of the sample where there is one, here or, where rho is solved, by keep; 0: the rule has none
  PerHead<int32_t> top_p = {};
  Scratch weights = {};  // out: weights_bytes
  Scratch scratch = {};
};

// solve: one rho (or share of codes) for all heads of a sample, at which their densities, weighted by queries, have the mean
// that is asked for. The weights stay as they are.
struct SolveArgs {
  // As weigh left it, for all heads: their weights lie one after the other, weights_bytes of one head's sizes apart. Without
  // scratch; `alpha` is read by a backend that has no profiles alone, the others have each head's in its weights.
  WeighArgs weighed = {};
  double* rho = nullptr;  // [1] out: as KeepArgs::rho_used
  Scratch scratch = {};
};

// keep: the keys themselves. The weights are used up.
struct KeepArgs {
  WeighArgs weighed = {};             // as weigh left it
  const double* rho = nullptr;        // [1] what solve found; null: each head's own is solved here, where one is
  PerHead<int32_t> counts = {};       // [groups] out: r_c
  PerHead<int64_t> head_budget = {};  // [1] out: k_head (0 but under online and target)
  PerHead<double> rho_used = {};      // [1] out: rho, or what was solved for; 0: the least that is kept is above the target
  PerHead<double> alpha_used = {};    // [1] out: alpha, or less where a target asks for it
  PerHead<uint32_t> mask = {};        // [groups, mask_words(k.tokens)] out, in token positions
  // [groups] out, of single keys by exact proxies: what share of the mass of all keys the group drops, and the log of that
  // mass. Both by the keys that its rule sees: one of a sample stands for count / sampled_keys. Null: not wanted.
  PerHead<float> dropped = {}, log_mass = {};
  const TailArgs* mean = nullptr;  // made in the same pass, without scratch of its own: see Capabilities::mean_in_keep
};

// A call whose sample would be smaller lets the rule see all keys.
inline constexpr int64_t kFewestSampledKeys = 1024;

// The keys among which the rule counts, and what a count of them stands for among all.
inline int64_t sampled_keys(const WeighArgs& args) { return args.proxy.count / args.stride; }
inline int64_t of_all_keys(const WeighArgs& args, int64_t kept) {
  return args.stride == 1 ? kept : ceil_div(kept * args.proxy.count, sampled_keys(args));
}

// k_head = ceil(sum n_c b_c / sum n_c), in integers.
int64_t head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups);

namespace cpu {
void weigh(const Exec& exec, const WeighArgs& args);
void solve(const Exec& exec, const SolveArgs& args);
int64_t solve_scratch(const Exec& exec, const Sizes& sizes);
void keep(const Exec& exec, const KeepArgs& args);
int64_t weights_bytes(const Exec& exec, const Sizes& sizes);
int64_t weigh_scratch(const Exec& exec, const Sizes& sizes);  // of either half
}  // namespace cpu

}  // namespace scope
