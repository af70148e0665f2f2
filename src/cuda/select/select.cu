// select on CUDA, in two halves: `weigh` measures every row into the weights, `keep` decides from there what stays. Between
// them `solve` may find one bound for all heads of a sample.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/select/codes.h"
#include "cuda/select/passes.h"
#include "cuda/stages.h"
#include "stages/choices.h"

namespace scope::cuda {

namespace {

// ---- weights ----

SelectSpace layout(Arena arena, int64_t count, int64_t groups) {
  SelectSpace s;
  s.most_candidates = static_cast<int32_t>(std::min(count, std::clamp<int64_t>(ceil_div(count, 32), 2 * kBins, 8192)));
  s.found.base = arena.take<uint32_t>(groups);
  const int64_t histogram = round_up(groups, kLanes) * kBins * 8, candidates = groups * s.most_candidates * 4;
  const int64_t few = groups * kFewCandidates * 4;
  s.histogram.base = arena.take<unsigned long long>(std::max(histogram + few, candidates) / 8 + 1);
  s.candidates.base = reinterpret_cast<uint32_t*>(s.histogram.base);
  s.few.base = reinterpret_cast<uint32_t*>(s.histogram.base) + histogram / 4;
  s.step.base = arena.take<float>(groups);
  s.range.base = arena.take<float>(groups);
  s.high.base = arena.take<float>(groups);
  s.unit.base = arena.take<float>(groups);
  s.mass.base = arena.take<float>(groups);
  s.blur.base = arena.take<float>(groups);
  s.todo.base = arena.take<uint32_t>(groups);
  s.limit.base = arena.take<uint32_t>(groups);
  s.end.base = arena.take<uint32_t>(groups);
  s.need.base = arena.take<int32_t>(groups);
  s.part.base = arena.take<float>(groups);
  s.again.base = arena.take<int32_t>(groups);
  s.again_size.base = arena.take<int32_t>(1);
  s.bytes = round_up(arena.used(), 256);
  s.histogram.step = s.bytes / 8;
  s.found.step = s.candidates.step = s.todo.step = s.limit.step = s.end.step = s.bytes / 4;
  s.range.step = s.high.step = s.unit.step = s.mass.step = s.blur.step = s.bytes / 4;
  s.need.step = s.few.step = s.step.step = s.part.step = s.again.step = s.again_size.step = s.bytes / 4;
  return s;
}

CodesSpace codes_layout(Arena arena, int64_t groups, int64_t codes) {
  CodesSpace s;
  s.floors.base = arena.take<CodesFloors>(1);
  s.code_sizes.base = arena.take<int32_t>(codes);
  s.kept.base = arena.take<int32_t>(groups);
  s.rank.base = arena.take<uint16_t>(groups * codes);
  s.keys.base = arena.take<int32_t>(groups * codes);
  s.mass.base = arena.take<double>(groups * codes);
  s.reaching.base = arena.take<uint16_t>(groups * codes);
  s.bytes = round_up(arena.used(), 256);
  const auto step = [&](auto&... arrays) { ((arrays.step = s.bytes / static_cast<int64_t>(sizeof(*arrays.base))), ...); };
  step(s.floors, s.code_sizes, s.kept, s.rank, s.keys, s.mass, s.reaching);
  return s;
}

SelectSpace space_of(const ProxyLaunch& p, const Scratch& weights) {
  const SelectSpace s = layout(Arena(weights.data, weights.bytes), p.count, p.groups);
  require(s.bytes * p.heads <= weights.bytes, Status::internal, "select: weights are smaller than their plan");
  return s;
}
CodesSpace codes_space_of(const ProxyLaunch& p, const Scratch& weights) {
  const CodesSpace s = codes_layout(Arena(weights.data, weights.bytes), p.groups, p.codes);
  require(s.bytes * p.heads <= weights.bytes, Status::internal, "select: weights are smaller than their plan");
  return s;
}

// ---- rules, as what the passes need to know of them; every head of a chunk has the same alpha ----

RuleLaunch rule_of(const WeighArgs& x, int64_t count) {
  RuleLaunch a{};
  a.rho = x.rho;
  a.goal = x.target;
  if (x.stride > 1) a.all = static_cast<int32_t>(x.proxy.count);
  bool floors = true;
  switch (x.rule) {
    case Rule::fixed:
      a.fixed = static_cast<int32_t>(std::max<int64_t>(1, ceil_share(x.density, count)));
      break;
    case Rule::top_p:
      floors = false;
      break;
    case Rule::hybrid:
      break;
    case Rule::online:
      a.shares_budget = true;
      break;
    case Rule::target:
      a.shares_budget = true;
      a.goal = x.density;
      break;
    case Rule::clusters:
    case Rule::blocks_topk:
    case Rule::blocks_cdf:
    case Rule::error_aware:
    case Rule::deviation:
      fail(Status::internal, "select: a rule that keeps whole codes, key by key");
  }
  a.alpha = lowered_alpha(x, 0, a.goal);
  if (floors) a.floor = static_cast<int32_t>(std::min(count, ceil_share(a.alpha, count)));
  a.sizes = x.sizes;
  return a;
}

CodesOrder order_of(const WeighArgs& x) {
  CodesOrder order{};
  order.sizes = x.sizes;
  if (row(x.rule).errors) order.errors = x.errors;
  order.by_similarity = row(x.rule).similarity;
  order.similar = x.similar;
  order.by_score = row(x.rule).diagonal;
  order.q_similarity = x.q_similarity;
  order.k_similarity = x.k_similarity;
  return order;
}

CodesFloors floors_of(const WeighArgs& x) {
  const double alpha = lowered_alpha(x, 0, x.target);
  const auto codes = [&](double share) { return static_cast<int32_t>(floor_share(share, x.proxy.codes)); };
  if (!row(x.rule).errors) return {alpha, codes(alpha), 0};
  return {alpha, codes(2 * alpha), std::max(1, codes(alpha))};
}

CodesRule codes_rule_of(const WeighArgs& x) {
  const int64_t codes = x.proxy.codes;
  CodesRule a{};
  a.rho = a.given = x.rho;
  a.target = x.target;
  switch (x.rule) {
    case Rule::clusters:
      a.bound = Bound::mass_reaching;
      return a;
    case Rule::blocks_topk:
      a.bound = Bound::share_of_codes;
      a.given = static_cast<double>(floor_share(x.density, codes)) / static_cast<double>(codes);
      return a;
    case Rule::blocks_cdf:
    case Rule::deviation:
      a.bound = Bound::mass_within;
      return a;
    case Rule::error_aware:
      a.bound = Bound::keys_reaching;
      return a;
    case Rule::fixed:
    case Rule::top_p:
    case Rule::hybrid:
    case Rule::online:
    case Rule::target:
      break;
  }
  fail(Status::internal, "select: a rule that keeps key by key, by codes");
}

ProxyLaunch proxy_of(const WeighArgs& args) {
  require(args.proxy.count < kMostKeys, Status::size_limit, "select on CUDA takes fewer than 2^26 keys");
  require(args.heads * args.proxy.groups < INT32_MAX, Status::size_limit, "select: too many groups in one chunk of heads");
  require(!row(args.rule).whole_codes || args.proxy.codes <= kMostRankedCodes, Status::size_limit,
          "select on CUDA ranks up to 4096 codes");
  return proxy_launch(args.proxy, args.heads);
}

// The keys that the rule sees.
ProxyLaunch seen_by_rule(const WeighArgs& args, ProxyLaunch p) {
  if (args.stride == 1) return p;
  p.count = static_cast<int32_t>(sampled_keys(args));
  p.stride = static_cast<int32_t>(args.stride);
  if (p.rows != nullptr) {
    p.rows += args.phase;
  } else {
    p.k.base += args.phase * p.k.row_step;
    p.k.row_step *= args.stride;
  }
  return p;
}

template <class Rule>
Rule with_outputs(Rule rule, const KeepArgs& args) {
  rule.solved = args.rho;
  rule.counts = args.counts;
  rule.top_p = args.weighed.top_p;
  if constexpr (requires { rule.dropped; }) rule.dropped = args.dropped, rule.log_mass = args.log_mass;
  rule.head_budget = args.head_budget;
  rule.rho_used = args.rho_used;
  rule.alpha_used = args.alpha_used;
  return rule;
}

// ---- key by key ----

void weigh_keys(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, const Scratch& weights) {
  const Bins bins = select_bins(exec, p);
  const int64_t zeros = reinterpret_cast<char*>(s.histogram.base) - static_cast<char*>(weights.data) +
                        round_up(p.groups, kLanes) * bins.count * 8;
  check(cudaMemset2DAsync(weights.data, static_cast<size_t>(s.bytes), 0, static_cast<size_t>(zeros),
                          static_cast<size_t>(p.heads), stream(exec)),
        "select: histograms");
  bounds_pass(exec, p, s);
  histogram_pass(exec, p, s, bins, RowSet{p.groups});
  leavers_pass(exec, p, s, bins);
  scan_pass(exec, p, s, bins);
}

// Bits are added to zeros where words are not stored.
void clear_mask(const Exec& exec, const ProxyLaunch& p, const MaskLaunch& mask) {
  if (mask.direct) return;
  const int64_t words = p.groups * mask.words;
  check(cudaMemset2DAsync(mask.rows.base, static_cast<size_t>(p.heads == 1 ? words : mask.rows.step) * 4, 0,
                          static_cast<size_t>(words) * 4, static_cast<size_t>(p.heads), stream(exec)),
        "select: mask");
}

// What reaches rho is looked for no closer than the sample's histograms tell.
void keep_keys_by_sample(const Exec& exec, const ProxyLaunch& p, const ProxyLaunch& sample, const RuleLaunch& rule,
                         const SelectSpace& s, MaskLaunch mask) {
  const Bins bins = select_bins(exec, p);
  if (rule.fixed == 0) solve_pass(exec, sample, s, bins, rule);
  budgets_pass(exec, sample, s, bins, rule);
  mask.counts = rule.counts;
  emit_pass(exec, p, s, bins, mask);
  exact_select_pass(exec, p, s, rule, mask);
}

void keep_keys(const Exec& exec, const ProxyLaunch& p, const RuleLaunch& rule, const SelectSpace& s,
               const MaskLaunch& mask) {
  const Bins bins = select_bins(exec, p);
  if (rule.fixed == 0) {
    solve_pass(exec, p, s, bins, rule);
    SelectSpace few = s;  // the histograms are still needed
    few.candidates = s.few;
    few.most_candidates = kFewCandidates;
    emit_pass(exec, p, few, bins, MaskLaunch{});
    refine_pass(exec, p, s, bins, rule);
    exact_top_p_pass(exec, p, s, rule);
  }
  budgets_pass(exec, p, s, bins, rule);
  emit_pass(exec, p, s, bins, mask);
  pick_pass(exec, p, s, bins, mask);
  exact_select_pass(exec, p, s, rule, mask);
}

}  // namespace

int64_t weights_bytes(const Exec&, const Sizes& sizes) {
  return sizes.heads * (sizes.whole_codes ? codes_layout(Arena(), sizes.groups, sizes.codes).bytes
                                          : layout(Arena(), sizes.k_tokens, sizes.groups).bytes);
}

int64_t weigh_scratch(const Exec&, const Sizes&) { return 0; }

void weigh(const Exec& exec, const WeighArgs& args) {
  const ProxyLaunch p = proxy_of(args);
  if (!row(args.rule).whole_codes) {
    return weigh_keys(exec, seen_by_rule(args, p), space_of(p, args.weights), args.weights);
  }
  const CodesSpace s = codes_space_of(p, args.weights);
  tally_pass(exec, p, floors_of(args), s);
  rank_pass(exec, p, order_of(args), s);
}

int64_t solve_scratch(const Exec&, const Sizes& sizes) {
  int64_t bytes = 0;
  SampleSpace::of(Arena(), sizes.heads, nullptr, &bytes);
  return bytes;
}

void solve(const Exec& exec, const SolveArgs& args) {
  const WeighArgs& weighed = args.weighed;
  const ProxyLaunch p = proxy_of(weighed);
  const SampleSpace sample = SampleSpace::of(Arena(args.scratch.data, args.scratch.bytes), p.heads, args.rho);
  if (row(weighed.rule).whole_codes) {
    return solve_codes_pass(exec, p, order_of(weighed), codes_rule_of(weighed), codes_space_of(p, weighed.weights), sample);
  }
  const ProxyLaunch seen = seen_by_rule(weighed, p);
  solve_sample_pass(exec, seen, space_of(p, weighed.weights), select_bins(exec, p), rule_of(weighed, seen.count), sample);
}

void keep(const Exec& exec, const KeepArgs& args) {
  const WeighArgs& weighed = args.weighed;
  const ProxyLaunch p = proxy_of(weighed);
  const int64_t words = mask_words(weighed.proxy.k.tokens);
  const MaskLaunch mask{args.mask, words, p.rows == nullptr && mask_words(p.count) == words};
  clear_mask(exec, p, mask);
  if (!row(weighed.rule).whole_codes) {
    const SelectSpace s = space_of(p, weighed.weights);
    const ProxyLaunch seen = seen_by_rule(weighed, p);
    const RuleLaunch rule = with_outputs(rule_of(weighed, seen.count), args);
    return weighed.stride == 1 ? keep_keys(exec, p, rule, s, mask) : keep_keys_by_sample(exec, p, seen, rule, s, mask);
  }
  const CodesSpace s = codes_space_of(p, weighed.weights);
  keep_codes_pass(exec, p, order_of(weighed), with_outputs(codes_rule_of(weighed), args), s);
  emit_codes_pass(exec, p, s, mask);
}

}  // namespace scope::cuda
