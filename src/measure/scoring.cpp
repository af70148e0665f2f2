// Scores of one group, keys in the order of their scores, and counting.
#include "measure/scoring.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "measure/recall.h"

namespace scope {

namespace {

double entropy(const std::vector<int64_t>& counts, double total) {
  double sum = 0;
  for (const int64_t n : counts) {
    if (n > 0) sum -= static_cast<double>(n) / total * std::log(static_cast<double>(n) / total);
  }
  return sum;
}

int64_t count_distinct(const HeadProxy& proxy) {
  std::vector<int64_t> keys(static_cast<size_t>(proxy.k.tokens));
  std::iota(keys.begin(), keys.end(), 0);
  const auto compare = [&](int64_t a, int64_t b) {
    for (const int32_t* codes : proxy.key_codes) {
      if (codes[a] != codes[b]) return codes[a] < codes[b] ? -1 : 1;
    }
    return 0;
  };
  std::sort(keys.begin(), keys.end(), [&](int64_t a, int64_t b) { return compare(a, b) < 0; });
  return std::unique(keys.begin(), keys.end(), [&](int64_t a, int64_t b) { return compare(a, b) == 0; }) - keys.begin();
}

}  // namespace

std::vector<double> proxy_scores(const HeadProxy& proxy, int64_t group) {
  const int64_t n = proxy.k.tokens, dim = proxy.k.dim;
  const float* centroid = proxy.centroids + group * dim;
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  std::vector<double> scores(static_cast<size_t>(n), 0.0);
  if (proxy.partition.empty()) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < dim; ++c) scores[j] += centroid[c] * element(proxy.k, j, c);
      scores[j] *= scale;
    }
    return scores;
  }
  std::vector<double> table(static_cast<size_t>(proxy.codes));
  for (size_t m = 0; m < proxy.partition.size(); ++m) {
    const std::vector<int32_t>& channels = proxy.partition[m];
    for (int64_t r = 0; r < proxy.codes; ++r) {
      const float* code = proxy.codebooks[m] + r * std::ssize(channels);
      double sum = 0;
      for (size_t c = 0; c < channels.size(); ++c) sum += static_cast<double>(centroid[channels[c]]) * code[c];
      table[r] = sum * scale;
    }
    for (int64_t j = 0; j < n; ++j) scores[j] += table[proxy.key_codes[m][j]];
  }
  return scores;
}

std::vector<RecallMatch> match_recall(const std::vector<double>& scores, const std::vector<bool>& oracle,
                                      std::span<const double> recalls) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  const auto wanted = static_cast<double>(std::count(oracle.begin(), oracle.end(), true));
  std::vector<RecallMatch> matches;
  int64_t kept = 0, kept_before = 0;  // with and without the last keys of equal score
  double hits = 0, hits_before = 0;
  for (const double recall : recalls) {
    const double need = recall * wanted;
    while (kept < n && hits < need - 1e-9) {
      kept_before = kept;
      hits_before = hits;
      const double score = scores[order[kept]];
      for (; kept < n && scores[order[kept]] == score; ++kept) hits += oracle[order[kept]] ? 1 : 0;
    }
    RecallMatch match{.recall = recall, .kept = kept, .oracle_recall = hits / wanted};
    match.threshold = scores[order[kept - 1]];
    match.retention = static_cast<double>(kept) / static_cast<double>(n);
    const double part = std::max(need - hits_before, 0.0) / std::max(hits - hits_before, 1.0);
    match.even_retention =
        (static_cast<double>(kept_before) + part * static_cast<double>(kept - kept_before)) / static_cast<double>(n);
    matches.push_back(match);
  }
  return matches;
}

std::array<double, 3> axis_shares(const int32_t* labels, const Grid& grid) {
  const int64_t n = grid[0] * grid[1] * grid[2];
  const int64_t clusters = *std::max_element(labels, labels + n) + 1;
  const auto total = static_cast<double>(n);
  std::array<double, 3> shares{};
  std::vector<int64_t> sizes(static_cast<size_t>(clusters), 0);
  for (int64_t i = 0; i < n; ++i) ++sizes[labels[i]];
  const double all = entropy(sizes, total);
  if (all <= 0) return shares;
  for (size_t axis = 0; axis < 3; ++axis) {
    std::vector<int64_t> joint(static_cast<size_t>(grid[axis] * clusters), 0);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place[] = {i / (grid[1] * grid[2]), i / grid[2] % grid[1], i % grid[2]};
      ++joint[place[axis] * clusters + labels[i]];
    }
    // H(label | coordinate) = H(label, coordinate) - H(coordinate), and coordinates are uniform.
    shares[axis] = std::clamp(1 - (entropy(joint, total) - std::log(static_cast<double>(grid[axis]))) / all, 0.0, 1.0);
  }
  return shares;
}

ScoringCost scoring_cost(const HeadProxy& proxy, int64_t groups) {
  ScoringCost cost{.groups = groups,
                   .keys = proxy.k.tokens,
                   .dim = proxy.k.dim,
                   .subspaces = std::ssize(proxy.partition),
                   .codes = proxy.codes};
  const auto queries = static_cast<double>(groups), keys = static_cast<double>(cost.keys);
  cost.direct_macs = queries * keys * static_cast<double>(cost.dim);
  if (cost.subspaces == 0) return cost;
  const auto subspaces = static_cast<double>(cost.subspaces), codes = static_cast<double>(cost.codes);
  for (const auto& channels : proxy.partition) cost.centroid_scalars += codes * static_cast<double>(channels.size());
  cost.table_macs = queries * cost.centroid_scalars;
  cost.lookups = queries * keys * subspaces;
  cost.additions = queries * keys * (subspaces - 1);
  cost.mac_reduction = cost.direct_macs / cost.table_macs;
  cost.code_space = std::pow(codes, subspaces);
  cost.code_space_gain = std::pow(codes, subspaces - 1);
  cost.monolithic_scalars = cost.code_space * static_cast<double>(cost.dim);
  cost.distinct_codes = count_distinct(proxy);
  return cost;
}

}  // namespace scope
