// The rows; each table is in the order of its enumeration.
#include "stages/choices.h"

#include <algorithm>

namespace scope {

namespace {

constexpr GroupingRow kGroupings[] = {
    {.choice = Grouping::kmeans,
     .name = "kmeans",
     .help = "K-means over all channels",
     .iterates = true,
     .warm = true,
     .blocks = false,
     .reusable = true,
     .with_keys = false},
    {.choice = Grouping::raster,
     .name = "raster",
     .help = "runs in raster order, `groups` of them",
     .iterates = false,
     .warm = true,
     .blocks = false,
     .reusable = false,
     .with_keys = false},
    {.choice = Grouping::blocks,
     .name = "blocks",
     .help = "runs in raster order, of `q_block` queries each",
     .iterates = false,
     .warm = true,
     .blocks = true,
     .reusable = false,
     .with_keys = false},
    {.choice = Grouping::cocluster,
     .name = "cocluster",
     .help = "clustered together with the keys",
     .iterates = true,
     .warm = false,
     .blocks = false,
     .reusable = true,
     .with_keys = true},
};

constexpr EncodingRow kEncodings[] = {
    {.choice = Encoding::kmeans,
     .name = "kmeans",
     .help = "its cluster in each subspace",
     .iterates = true,
     .warm = true,
     .blocks = false,
     .reusable = true,
     .with_queries = false,
     .means = true},
    {.choice = Encoding::blocks,
     .name = "blocks",
     .help = "its block of `k_block` keys in raster order",
     .iterates = false,
     .warm = true,
     .blocks = true,
     .reusable = false,
     .with_queries = false,
     .means = false},
    {.choice = Encoding::cocluster,
     .name = "cocluster",
     .help = "its cluster when clustered together with the queries",
     .iterates = true,
     .warm = false,
     .blocks = false,
     .reusable = true,
     .with_queries = true,
     .means = true},
    {.choice = Encoding::means,
     .name = "means",
     .help = "as blocks, without subtracting the mean of all keys",
     .iterates = false,
     .warm = true,
     .blocks = true,
     .reusable = false,
     .with_queries = false,
     .means = true},
};

constexpr ProxyRow kProxies[] = {
    {.choice = ProxyKind::codes, .name = "codes", .help = "by their codes", .codes = true},
    {.choice = ProxyKind::exact,
     .name = "exact",
     .help = "by their own product with the group's centroid, without encode",
     .codes = false},
};

constexpr RuleRow kRules[] = {
    {.choice = Rule::fixed,
     .name = "fixed",
     .help = "the share `density` of the keys",
     .whole_codes = false,
     .similarity = false,
     .errors = false,
     .profile = false,
     .rho = false,
     .floor = 0,
     .meets = Meets::itself},
    {.choice = Rule::top_p,
     .name = "top_p",
     .help = "the best keys, until they reach the share rho of the proxy's mass",
     .whole_codes = false,
     .similarity = false,
     .errors = false,
     .profile = false,
     .rho = true,
     .floor = 0,
     .meets = Meets::by_bound},
    {.choice = Rule::hybrid,
     .name = "hybrid",
     .help = "as top_p, and at least the share alpha of the keys",
     .whole_codes = false,
     .similarity = false,
     .errors = false,
     .profile = false,
     .rho = true,
     .floor = 2,
     .meets = Meets::by_bound},
    {.choice = Rule::online,
     .name = "online",
     .help = "as hybrid, and at least as many keys as the head's mean",
     .whole_codes = false,
     .similarity = false,
     .errors = false,
     .profile = false,
     .rho = true,
     .floor = 2,
     .meets = Meets::as_target},
    {.choice = Rule::target,
     .name = "target",
     .help = "as online, with rho solved in the call so that `density` is met",
     .whole_codes = false,
     .similarity = false,
     .errors = false,
     .profile = false,
     .rho = false,
     .floor = 2,
     .meets = Meets::by_rho},
    {.choice = Rule::clusters,
     .name = "clusters",
     .help = "whole clusters by weight, until they pass the share rho of it, and at least the share alpha of the clusters",
     .whole_codes = true,
     .similarity = false,
     .errors = false,
     .profile = true,
     .rho = true,
     .floor = 2,
     .meets = Meets::by_bound},
    {.choice = Rule::blocks_topk,
     .name = "blocks_topk",
     .help = "the share `density` of the blocks, and every block that is not similar",
     .whole_codes = true,
     .similarity = true,
     .errors = false,
     .profile = false,
     .rho = false,
     .floor = 0,
     .meets = Meets::by_bound},
    {.choice = Rule::blocks_cdf,
     .name = "blocks_cdf",
     .help = "the blocks within the share rho of the softmax, and every block that is not similar",
     .whole_codes = true,
     .similarity = true,
     .errors = false,
     .profile = false,
     .rho = true,
     .floor = 0,
     .meets = Meets::by_bound},
    {.choice = Rule::error_aware,
     .name = "error_aware",
     .help = "the whole clusters that cost most to leave out, with as many keys as rule clusters keeps",
     .whole_codes = true,
     .similarity = false,
     .errors = true,
     .profile = true,
     .rho = true,
     .floor = 4,
     .meets = Meets::by_bound},
    {.choice = Rule::deviation,
     .name = "deviation",
     .help =
         "blocks whose score is at least t standard deviations above their row's mean, where rho = 1 - Phi(t), and always "
         "the queries' own block and its two neighbours",
     .whole_codes = true,
     .similarity = false,
     .errors = false,
     .profile = false,
     .rho = true,
     .floor = 0,
     .meets = Meets::by_bound,
     .diagonal = true},
};

constexpr TargetScopeRow kTargetScopes[] = {
    {.choice = TargetScope::head, .name = "head", .help = "each head, at a rho of its own"},
    {.choice = TargetScope::sample,
     .name = "sample",
     .help = "the mean over a batch element's heads, at one rho for all of them"},
};

constexpr TailRow kTails[] = {
    {.choice = Tail::none, .name = "none", .help = "nothing", .per_group = false, .per_code = false, .mixes = false},
    {.choice = Tail::first_order,
     .name = "first_order",
     .help = "one virtual key for each group",
     .per_group = true,
     .per_code = false,
     .mixes = false},
    {.choice = Tail::centroids,
     .name = "centroids",
     .help = "one virtual key for each whole cluster that a group drops",
     .per_group = false,
     .per_code = true,
     .mixes = false},
    {.choice = Tail::mean,
     .name = "mean",
     .help = "their mean value under the proxy, mixed in with `tail_weight`",
     .per_group = false,
     .per_code = false,
     .mixes = true},
    {.choice = Tail::means,
     .name = "means",
     .help = "a mean value for each part of a group, from a sample of the keys, to which each query adds some of its own",
     .per_group = false,
     .per_code = false,
     .mixes = true,
     .splits = true},
};

constexpr ProductsRow kProducts[] = {
    {.choice = Products::bf16, .name = "bf16", .help = "the inputs as they are, whatever their type"},
    {.choice = Products::qk8,
     .name = "qk8",
     .help = "queries and keys in 8 bits (CUDA; on the CPU bf16 inputs and AVX-512 with BF16 and VNNI); for heads of 64 "
             "channels an H200 is no faster with it"},
    {.choice = Products::qkv8, .name = "qkv8", .help = "probabilities and values in 8 bits too (CUDA's wgmma kernel)"},
};

template <class Row, size_t n>
constexpr bool in_order(const Row (&rows)[n]) {
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<size_t>(rows[i].choice) != i) return false;
  }
  return true;
}
static_assert(in_order(kGroupings) && in_order(kEncodings) && in_order(kProxies) && in_order(kRules) &&
              in_order(kTargetScopes) && in_order(kTails) && in_order(kProducts));

}  // namespace

std::span<const GroupingRow> grouping_rows() { return kGroupings; }
std::span<const EncodingRow> encoding_rows() { return kEncodings; }
std::span<const ProxyRow> proxy_rows() { return kProxies; }
std::span<const RuleRow> rule_rows() { return kRules; }
std::span<const TargetScopeRow> target_scope_rows() { return kTargetScopes; }
std::span<const TailRow> tail_rows() { return kTails; }
std::span<const ProductsRow> products_rows() { return kProducts; }

const GroupingRow& row(Grouping choice) { return kGroupings[static_cast<size_t>(choice)]; }
const EncodingRow& row(Encoding choice) { return kEncodings[static_cast<size_t>(choice)]; }
const ProxyRow& row(ProxyKind choice) { return kProxies[static_cast<size_t>(choice)]; }
const RuleRow& row(Rule choice) { return kRules[static_cast<size_t>(choice)]; }
const TargetScopeRow& row(TargetScope choice) { return kTargetScopes[static_cast<size_t>(choice)]; }
const TailRow& row(Tail choice) { return kTails[static_cast<size_t>(choice)]; }
const ProductsRow& row(Products choice) { return kProducts[static_cast<size_t>(choice)]; }

double lowered_alpha(const WeighArgs& args, int64_t head, double goal) {
  const double alpha = args.alpha[head];
  if (goal == 0) return alpha;
  if (args.alpha_first && (args.mean_alpha == 0 ? alpha : args.mean_alpha) < goal) return alpha;
  const double most = goal / std::max(row(args.rule).floor, 2);
  if (args.mean_alpha == 0) return std::min(alpha, most);
  return args.mean_alpha <= most ? alpha : alpha / args.mean_alpha * most;
}

}  // namespace scope
