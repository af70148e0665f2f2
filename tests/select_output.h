// What the tests of select lend a call for its results.
#pragma once

#include "cases.h"
#include "stages/choices.h"
#include "stages/select.h"

namespace scope::test {

// Whether heads of one chunk may have alphas of their own: a plan gives them to no device, where a profile makes chunks of
// one.
inline bool own_alphas() { return backend().can.host; }

// Outputs, weights and scratch between canaries, poisoned before the call.
struct SelectOutput {
  Guarded<int32_t> counts, top_p;
  Guarded<int64_t> head_budget;
  Guarded<double> rho_used, alpha_used;
  Guarded<float> dropped, log_mass;  // of single keys by exact proxies
  Guarded<uint32_t> mask;
  GuardedScratch weights, scratch;
  KeepArgs args;

  // short_of: bytes that the weights lack.
  SelectOutput(const Exec& exec, const WeighArgs& problem, uint8_t poison = 0xff, int64_t short_of = 0)
      : counts(problem.proxy.groups, poison),
        top_p(problem.proxy.groups, poison),
        head_budget(1, poison),
        rho_used(1, poison),
        alpha_used(1, poison),
        dropped(weighs(problem) ? problem.proxy.groups : 0, poison),
        log_mass(weighs(problem) ? problem.proxy.groups : 0, poison),
        mask(problem.proxy.groups * mask_words(problem.proxy.k.tokens), poison),
        weights(backend().weights_bytes(exec, sizes_of(problem)) - short_of, poison),
        scratch(backend().weigh_scratch(exec, sizes_of(problem)), poison) {
    args.weighed = problem;
    args.weighed.top_p = top_p.data();
    args.weighed.weights = scratch_of(weights);
    args.weighed.scratch = scratch_of(scratch);
    args.counts = counts.data();
    args.head_budget = head_budget.data();
    args.rho_used = rho_used.data();
    args.alpha_used = alpha_used.data();
    args.mask = mask.data();
    if (weighs(problem)) args.dropped = dropped.data(), args.log_mass = log_mass.data();
  }
  static bool weighs(const WeighArgs& problem) {
    return problem.proxy.kind == ProxyKind::exact && !row(problem.rule).whole_codes;
  }
  SelectOutput(const Exec& exec, const KeepArgs& problem) : SelectOutput(exec, problem.weighed) {}

  int64_t queries() const {
    return sum([](int32_t size, int32_t) { return size; });
  }
  // Of queries and the keys that they keep.
  int64_t pairs() const {
    return sum([](int32_t size, int32_t count) { return int64_t{size} * count; });
  }
  double density() const {
    return static_cast<double>(pairs()) / static_cast<double>(queries()) / static_cast<double>(args.weighed.proxy.count);
  }
  std::vector<uint8_t> all() const {
    return joined_bytes(counts, top_p, head_budget, rho_used, alpha_used, dropped, log_mass, mask);
  }

 private:
  template <class Each>
  int64_t sum(const Each& each) const {
    int64_t total = 0;
    for (int64_t c = 0; c < counts.size(); ++c) total += each(args.weighed.sizes[0][c], counts[c]);
    return total;
  }
};

}  // namespace scope::test
