// The passes of select that keep whole codes: a sort per group, a bound per head or sample, and masks.
#pragma once

#include "cuda/proxy.h"
#include "cuda/select/sample.h"

namespace scope::cuda {

// How a group orders the codes: what all keep, then by weight, or by error after the first of them; or by score, its own
// block and the two beside it first.
struct CodesOrder {
  // Every group keeps the codes that are not similar, a group that is not keeps every code, and the other codes weigh once.
  // Else there is no similarity, and a code weighs once for each of its keys.
  bool by_similarity;
  double similar;
  PerHead<const float> q_similarity, k_similarity;  // null unless by_similarity
  PerHead<const float> errors;                      // [groups, codes] what leaving a code out costs; null: all by weight
  bool by_score;                                    // groups and codes are blocks of one size
  PerHead<const int32_t> sizes;

  // NaN is not similar.
  __device__ bool always(int64_t head, int code) const {
    return by_similarity && !(static_cast<double>(k_similarity[head][code]) > similar);
  }
  __device__ bool keeps_all(int64_t head, int group) const {
    return by_similarity && !(static_cast<double>(q_similarity[head][group]) > similar);
  }
};

// How many codes of its order a group keeps past what all keep, at least one.
enum class Bound {
  share_of_codes,  // this share of the codes
  mass_within,     // those up to which the mass is within the bound
  mass_reaching,   // and the one that passes it; no fewer than `floor`
  keys_reaching,   // those that have as many keys as mass_reaching keeps by weight, which is no fewer than are guaranteed
};
// What alpha keeps of one head.
struct CodesFloors {
  double alpha;        // as used
  int32_t floor;       // codes
  int32_t guaranteed;  // codes that are first in the order by error; no more than floor, or one
};
struct CodesRule {
  Bound bound;
  double given, target, rho;  // given: the bound when there is no target
  const double* solved;       // [1] the bound of the whole sample; null: each head has its own
  PerHead<int32_t> counts, top_p;
  PerHead<int64_t> head_budget;
  PerHead<double> rho_used, alpha_used;
};

// Scratch of a chunk.
struct CodesSpace {
  int64_t bytes = 0;            // per head
  PerHead<CodesFloors> floors;  // [1]
  PerHead<int32_t> code_sizes;  // [codes] keys of each
  PerHead<int32_t> kept;        // [groups] codes that the group keeps
  PerHead<uint16_t> rank;       // [groups, codes] where a code stands in the group's order
  PerHead<int32_t> keys;        // [groups, codes] keys up to and with each rank
  PerHead<double> mass;         // [groups, codes] share of the weight up to and with each by weight; 0 for what all keep;
                                // by score: the share of a normal row above each, 0 for those that are first
  PerHead<uint16_t> reaching;   // [groups, codes] by error alone: ranks that have as many keys as the first by weight
};

// What codes weigh.
void tally_pass(const Exec& exec, const ProxyLaunch& proxy, const CodesFloors& floors, const CodesSpace& space);
void rank_pass(const Exec& exec, const ProxyLaunch& proxy, const CodesOrder& order, const CodesSpace& space);

// One bound for all heads of a sample.
void solve_codes_pass(const Exec& exec, const ProxyLaunch& proxy, const CodesOrder& order, const CodesRule& rule,
                      const CodesSpace& space, const SampleSpace& sample);

// What is kept.
void keep_codes_pass(const Exec& exec, const ProxyLaunch& proxy, const CodesOrder& order, const CodesRule& rule,
                     const CodesSpace& space);
void emit_codes_pass(const Exec& exec, const ProxyLaunch& proxy, const CodesSpace& space, const MaskLaunch& mask);

}  // namespace scope::cuda
