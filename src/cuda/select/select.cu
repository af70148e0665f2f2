// select on CUDA, in two halves: `weigh` measures every row into the scratch, `keep` decides from there what stays.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/select/codes.h"
#include "cuda/select/passes.h"
#include "cuda/stages.h"
#include "cuda/tail.h"
#include "stages/select.h"

namespace scope::cuda {

namespace {

// ---- scratch ----

SelectSpace layout(Arena arena, int64_t count, int64_t dim, int64_t groups) {
  SelectSpace s;
  s.most_candidates = static_cast<int32_t>(std::min(count, std::clamp<int64_t>(ceil_div(count, 32), 2 * kBins, 8192)));
  s.found.base = arena.take<uint32_t>(groups);
  const int64_t histogram = round_up(groups, kLanes) * kBins * 8, candidates = groups * s.most_candidates * 4;
  const int64_t few = groups * kFewCandidates * 4, tail = tail_parts_size(groups, dim) * 4;
  s.histogram.base = arena.take<unsigned long long>(std::max({histogram + few, candidates, tail}) / 8 + 1);
  s.candidates.base = reinterpret_cast<uint32_t*>(s.histogram.base);
  s.tail.base = reinterpret_cast<float*>(s.histogram.base);
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
  s.bytes = round_up(arena.used(), 256);
  s.histogram.step = s.bytes / 8;
  s.found.step = s.candidates.step = s.todo.step = s.limit.step = s.end.step = s.bytes / 4;
  s.tail.step = s.range.step = s.high.step = s.unit.step = s.mass.step = s.blur.step = s.bytes / 4;
  s.need.step = s.few.step = s.step.step = s.part.step = s.bytes / 4;
  return s;
}

CodesSpace codes_layout(Arena arena, int64_t groups, int64_t codes) {
  CodesSpace s;
  s.code_sizes.base = arena.take<int32_t>(codes);
  s.kept.base = arena.take<int32_t>(groups);
  s.rank.base = arena.take<uint16_t>(groups * codes);
  s.keys.base = arena.take<int32_t>(groups * codes);
  s.mass.base = arena.take<double>(groups * codes);
  s.bytes = round_up(arena.used(), 256);
  const auto step = [&](auto&... arrays) { ((arrays.step = s.bytes / static_cast<int64_t>(sizeof(*arrays.base))), ...); };
  step(s.code_sizes, s.kept, s.rank, s.keys, s.mass);
  return s;
}

SelectSpace space_of(const ProxyLaunch& p, const Scratch& scratch) {
  const SelectSpace s = layout(Arena(scratch.data, scratch.bytes), p.count, p.dim, p.groups);
  require(s.bytes * p.heads <= scratch.bytes, Status::internal, "select: scratch is smaller than its plan");
  return s;
}
CodesSpace codes_space_of(const ProxyLaunch& p, const Scratch& scratch) {
  const CodesSpace s = codes_layout(Arena(scratch.data, scratch.bytes), p.groups, p.codes);
  require(s.bytes * p.heads <= scratch.bytes, Status::internal, "select: scratch is smaller than its plan");
  return s;
}

// ---- rules, as what the passes need to know of them ----

[[noreturn]] void refuse(const char* rule) {
  fail(Status::unsupported, std::string("rule: got ") + rule + ", which select on CUDA does not have");
}

RuleLaunch rule_of(const SelectArgs& x, int64_t count) {
  RuleLaunch a{};
  a.rho = x.rho;
  a.goal = x.target;
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
      fail(Status::internal, "select: a rule that keeps whole codes, key by key");
  }
  a.alpha = a.goal > 0 ? std::min(x.alpha, a.goal / 2) : x.alpha;
  if (floors) a.floor = static_cast<int32_t>(std::min(count, ceil_share(a.alpha, count)));
  return a;
}

void set_codes_rule(const SelectArgs& x, int64_t codes, CodesOrder& order, CodesRule& a) {
  order.similar = x.similar;
  a.rho = a.given = x.rho;
  a.target = x.target;
  a.alpha = x.target > 0 ? std::min(x.alpha, x.target / 2) : x.alpha;
  a.floor = static_cast<int32_t>(floor_share(a.alpha, codes));
  switch (x.rule) {
    case Rule::clusters:
      order.by_similarity = false;
      a.bound = Bound::mass_reaching;
      return;
    case Rule::blocks_topk:
      order.by_similarity = true;
      a.bound = Bound::share_of_codes;
      a.given = static_cast<double>(floor_share(x.density, codes)) / static_cast<double>(codes);
      return;
    case Rule::blocks_cdf:
      order.by_similarity = true;
      a.bound = Bound::mass_within;
      return;
    case Rule::error_aware:
      refuse("error_aware");
    case Rule::fixed:
    case Rule::top_p:
    case Rule::hybrid:
    case Rule::online:
    case Rule::target:
      fail(Status::internal, "select: a rule that keeps key by key, by codes");
  }
}

// ---- the stage's arguments, for both halves and the tail ----

struct Selection {
  ProxyLaunch proxy;
  MaskLaunch mask;
  Scratch scratch;
  bool codes;        // which of these there are
  RuleLaunch rule;   // key by key
  CodesOrder order;  // whole codes
  CodesRule codes_rule;
  bool has_tail;
  TailLaunch tail;
};

Selection read(std::span<const SelectArgs> heads) {
  const SelectArgs& first = heads[0];
  const Proxy& proxy = first.proxy;
  const bool keys = proxy.kind == ProxyKind::exact || first.tail != nullptr;
  require(proxy.count < kMostKeys, Status::size_limit, "select on CUDA takes fewer than 2^26 keys");
  require(!keys || proxy.k.dtype != DType::f32, Status::dtype, "select on CUDA takes f16 or bf16 keys");
  require(static_cast<int64_t>(heads.size()) * proxy.groups < INT32_MAX, Status::size_limit,
          "select: too many groups in one chunk of heads");

  Selection s{};
  s.scratch = first.scratch;
  ProxyLaunch& p = s.proxy;
  p.exact = proxy.kind == ProxyKind::exact;
  p.f16 = proxy.k.dtype == DType::f16;
  p.heads = static_cast<int32_t>(heads.size());
  p.groups = static_cast<int32_t>(proxy.groups);
  p.count = static_cast<int32_t>(proxy.count);
  p.dim = static_cast<int32_t>(proxy.k.dim);
  p.subspaces = static_cast<int32_t>(proxy.subspaces);
  p.codes = static_cast<int32_t>(proxy.codes);
  p.scale = proxy.scale;
  p.rows = proxy.rows;
  p.centroids = per_head(heads, [](const SelectArgs& x) { return x.proxy.centroids; });
  if (keys) p.k = head_rows<const uint16_t>(heads, [](const SelectArgs& x) { return x.proxy.k; });
  if (!p.exact) {
    p.tables = per_head(heads, [](const SelectArgs& x) { return x.proxy.tables; });
    p.labels = per_head(heads, [](const SelectArgs& x) { return x.proxy.labels; });
  }
  s.mask.rows = per_head(heads, [](const SelectArgs& x) { return x.mask; });
  s.mask.words = mask_words(proxy.k.tokens);
  s.mask.direct = proxy.rows == nullptr && mask_words(proxy.count) == s.mask.words;

  const auto set_outputs = [&](auto& rule) {
    rule.counts = per_head(heads, [](const SelectArgs& x) { return x.counts; });
    rule.top_p = per_head(heads, [](const SelectArgs& x) { return x.top_p; });
    rule.head_budget = per_head(heads, [](const SelectArgs& x) { return x.head_budget; });
    rule.rho_used = per_head(heads, [](const SelectArgs& x) { return x.rho_used; });
    rule.alpha_used = per_head(heads, [](const SelectArgs& x) { return x.alpha_used; });
  };
  const auto sizes = per_head(heads, [](const SelectArgs& x) { return x.sizes; });
  s.codes = keeps_codes(first.rule);
  if (s.codes) {
    require(p.codes <= kMostRankedCodes, Status::size_limit, "select on CUDA ranks up to 4096 codes");
    set_codes_rule(first, proxy.codes, s.order, s.codes_rule);
    s.order.sizes = sizes;
    if (s.order.by_similarity) {
      s.order.q_similarity = per_head(heads, [](const SelectArgs& x) { return x.q_similarity; });
      s.order.k_similarity = per_head(heads, [](const SelectArgs& x) { return x.k_similarity; });
    }
    set_outputs(s.codes_rule);
    return s;
  }
  s.rule = rule_of(first, proxy.count);
  s.rule.sizes = sizes;
  set_outputs(s.rule);
  s.has_tail = first.tail != nullptr;
  if (s.has_tail) {
    s.tail.v = head_rows<const uint16_t>(heads, [](const SelectArgs& x) { return x.tail->v; });
    s.tail.k = per_head(heads, [](const SelectArgs& x) { return x.tail->k; });
    s.tail.value = per_head(heads, [](const SelectArgs& x) { return x.tail->value; });
    s.tail.bias = per_head(heads, [](const SelectArgs& x) { return x.tail->bias; });
    s.tail.sizes = sizes;
    s.tail.parts = space_of(p, s.scratch).tail;
  }
  return s;
}

// ---- key by key ----

void weigh(const Exec& exec, const ProxyLaunch& p, const Scratch& scratch) {
  const SelectSpace s = space_of(p, scratch);
  const Bins bins = select_bins(exec, p);
  const int64_t zeros = reinterpret_cast<char*>(s.histogram.base) - static_cast<char*>(scratch.data) +
                        round_up(p.groups, kLanes) * bins.count * 8;
  check(cudaMemset2DAsync(scratch.data, static_cast<size_t>(s.bytes), 0, static_cast<size_t>(zeros),
                          static_cast<size_t>(p.heads), stream(exec)),
        "select: histograms");
  bounds_pass(exec, p, s);
  histogram_pass(exec, p, s, bins);
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

void keep(const Exec& exec, const ProxyLaunch& p, const RuleLaunch& rule, const Scratch& scratch, const MaskLaunch& mask) {
  const SelectSpace s = space_of(p, scratch);
  const Bins bins = select_bins(exec, p);
  clear_mask(exec, p, mask);
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

// ---- whole codes ----

void weigh(const Exec& exec, const ProxyLaunch& p, const CodesOrder& order, const Scratch& scratch) {
  const CodesSpace s = codes_space_of(p, scratch);
  tally_pass(exec, p, s);
  rank_pass(exec, p, order, s);
}

void keep(const Exec& exec, const ProxyLaunch& p, const CodesOrder& order, const CodesRule& rule, const Scratch& scratch,
          const MaskLaunch& mask) {
  const CodesSpace s = codes_space_of(p, scratch);
  clear_mask(exec, p, mask);
  keep_codes_pass(exec, p, order, rule, s);
  emit_codes_pass(exec, p, s, mask);
}

}  // namespace

int64_t select_scratch(const Exec&, int64_t tokens, int64_t dim, int64_t groups, int64_t codes) {
  return codes > 0 ? codes_layout(Arena(), groups, codes).bytes : layout(Arena(), tokens, dim, groups).bytes;
}

void select(const Exec& exec, std::span<const SelectArgs> heads) {
  const Selection s = read(heads);
  if (s.codes) {
    weigh(exec, s.proxy, s.order, s.scratch);
    keep(exec, s.proxy, s.order, s.codes_rule, s.scratch, s.mask);
  } else {
    weigh(exec, s.proxy, s.scratch);
    keep(exec, s.proxy, s.rule, s.scratch, s.mask);
    if (s.has_tail) tail_pass(exec, s.proxy, s.mask, s.tail);
  }
}

}  // namespace scope::cuda
