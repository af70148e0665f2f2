// select: proxy rows -> exactly r_c keys per group, or whole codes, as a bitmask with counts.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

// The last four keep every key of some codes and no other; they take the codes proxy with one subspace. A group ranks the
// codes by weight, equal weights in ascending code, and m_r is the share of the first r in the whole weight:
//   clusters:    n_j e^s, n_j the keys of code j. Rank r stays iff r = 1, m_(r-1) <= rho or r <= floor(alpha codes);
//                rho = 1 keeps all.
//   blocks_topk: e^s over the similar codes. The first max(1, floor(density codes)) stay.
//   blocks_cdf:  e^s over the similar codes. The first max(1, #{r: m_r <= rho}) stay: the one that crosses rho does not.
//   error_aware: the rank of `clusters`, but rank r stays iff r = 1 or r <= floor(alpha codes). Then the other codes with
//   keys,
//                in descending `errors`, while fewer keys are kept than `clusters` would keep with 2 alpha for alpha.
// A group or a code is similar iff its similarity is > `similar`, which NaN never is. Under the blocks rules a code that is
// not similar is kept by every group, and a group that is not keeps every key.
enum class Rule { fixed, top_p, hybrid, online, target, clusters, blocks_topk, blocks_cdf, error_aware };
inline bool keeps_codes(Rule rule) { return rule >= Rule::clusters; }

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
  double rho = 0;      // top_p, hybrid, online, clusters, error_aware, blocks_cdf: (0, 1]
  double alpha = 0;    // hybrid, online, target: floor as a share of the keys; clusters, error_aware: of the codes; [0, 1]
  double density = 0;  // fixed, target, blocks_topk: (0, 1]
  // Not for fixed, online and target. > 0: what the rule compares with (rho; n / codes for blocks_topk) is solved so that
  // the head's density is the nearest to this that can be reached.
  double target = 0;
  const float* q_similarity = nullptr;  // [groups] blocks rules only, like the next two
  const float* k_similarity = nullptr;  // [codes]
  double similar = 0;
  const float* errors = nullptr;   // [groups, codes] error_aware only: see CompensateArgs
  int32_t* counts = nullptr;       // [groups] out: r_c
  int32_t* top_p = nullptr;        // [groups] out: t_c (0 under rule fixed and where codes are kept)
  int64_t* head_budget = nullptr;  // [1] out: k_head (0 but under online and target)
  double* rho_used = nullptr;      // [1] out: rho, or what was solved for; 0: the least that is kept is above the target
  double* alpha_used = nullptr;    // [1] out: alpha, or half the target (a quarter under error_aware) where that is less
  uint32_t* mask = nullptr;        // [groups, mask_words(k.tokens)] out, in token positions
  const TailArgs* tail = nullptr;  // optional; null where codes are kept
  uint32_t* dropped = nullptr;     // [groups, mask_words(codes)] in zeros, out: codes with keys that a group does not keep;
                                   // optional, only where codes are kept
  Scratch scratch;
};

// k_head = ceil(sum n_c b_c / sum n_c), in integers.
int64_t head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups);

namespace cpu {
void select(const Exec& exec, const SelectArgs& args);
// codes: 0 but for a rule that keeps codes.
int64_t select_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes);
}  // namespace cpu

}  // namespace scope
