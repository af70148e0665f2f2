// Tests what scope inspect measures against plain float64 code: scores, matched recall, axis shares, the scoring account.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "measure/recall.h"
#include "measure/scoring.h"
#include "reference.h"

namespace scope {
namespace {

struct Head {
  int64_t keys, dim, groups, codes;
  std::vector<float> k, centroids, codebooks;
  std::vector<int32_t> key_codes;
  HeadProxy proxy;

  Head(int64_t n, int64_t d, int64_t c_q, int64_t c, Partition partition, uint32_t seed)
      : keys(n), dim(d), groups(c_q), codes(c) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, int64_t count) {
      for (int64_t i = 0; i < count; ++i) x.push_back(normal(random));
    };
    fill(k, n * d);
    fill(centroids, c_q * d);
    fill(codebooks, c * d);
    for (int64_t i = 0; i < n * std::ssize(partition); ++i) key_codes.push_back(static_cast<int32_t>(random() % c));
    proxy.centroids = centroids.data();
    proxy.k = {k.data(), DType::f32, n, d, d};
    proxy.codes = partition.empty() ? 0 : c;
    int64_t at = 0;
    for (size_t m = 0; m < partition.size(); ++m) {
      proxy.codebooks.push_back(codebooks.data() + at);
      proxy.key_codes.push_back(key_codes.data() + static_cast<int64_t>(m) * n);
      at += c * std::ssize(partition[m]);
    }
    proxy.partition = std::move(partition);
  }
};

TEST(Scoring, ScoresAreTheSpecifications) {
  const Partition split = {{0, 5, 2}, {1}, {3, 4, 6, 7}};
  for (const Partition& partition : {Partition{}, split, Partition{{0, 1, 2, 3, 4, 5, 6, 7}}}) {
    const Head head(50, 8, 3, 6, partition, 1);
    std::vector<int32_t> rows(50);
    for (int32_t j = 0; j < 50; ++j) rows[j] = j;
    const float scale = 1 / std::sqrt(8.0f);
    const ScoreArgs score{.centroids = head.centroids.data(),
                          .groups = 3,
                          .dim = 8,
                          .partition = &head.proxy.partition,
                          .codebooks = head.codebooks.data(),
                          .codes = head.codes,
                          .scale = scale,
                          .tables = {}};
    std::vector<float> tables;
    if (!partition.empty()) {
      for (const double x : reference::tables(score)) tables.push_back(static_cast<float>(x));
    }
    const Proxy proxy{.kind = partition.empty() ? ProxyKind::exact : ProxyKind::codes,
                      .groups = 3,
                      .count = 50,
                      .scale = scale,
                      .centroids = head.centroids.data(),
                      .k = head.proxy.k,
                      .rows = rows.data(),
                      .subspaces = std::ssize(partition),
                      .codes = head.codes,
                      .tables = tables.data(),
                      .labels = head.key_codes.data()};
    for (int64_t group = 0; group < 3; ++group) {
      const auto want = reference::score_row(proxy, group), got = proxy_scores(head.proxy, group);
      ASSERT_EQ(got.size(), want.size());
      for (size_t j = 0; j < want.size(); ++j) EXPECT_NEAR(got[j], want[j], 1e-5) << j;
    }
  }
}

TEST(Scoring, MatchedRecallIsTheFirstThresholdThatReachesIt) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    const int64_t n = 1 + static_cast<int64_t>(random() % 60), levels = 1 + static_cast<int64_t>(random() % 20);
    std::vector<double> scores;
    std::vector<bool> oracle;
    for (int64_t j = 0; j < n; ++j) {
      scores.push_back(0.5 * static_cast<double>(random() % levels) - 3);
      oracle.push_back(random() % 4 == 0);
    }
    oracle[random() % n] = true;
    const auto wanted = static_cast<double>(std::count(oracle.begin(), oracle.end(), true));
    const double recalls[] = {0.1, 0.5, 0.958, 1};
    const auto matches = match_recall(scores, oracle, recalls);
    ASSERT_EQ(matches.size(), 4u);
    for (const RecallMatch& match : matches) {
      // Every threshold from the top, until one is low enough.
      const std::set<double, std::greater<>> thresholds(scores.begin(), scores.end());
      double before_kept = 0, before_hits = 0;
      for (const double threshold : thresholds) {
        double kept = 0, hits = 0;
        for (int64_t j = 0; j < n; ++j) {
          if (scores[j] < threshold) continue;
          ++kept;
          hits += oracle[j] ? 1 : 0;
        }
        if (hits / wanted < match.recall - 1e-12) {
          before_kept = kept, before_hits = hits;
          continue;
        }
        EXPECT_EQ(match.threshold, threshold);
        EXPECT_EQ(match.kept, static_cast<int64_t>(kept));
        EXPECT_DOUBLE_EQ(match.oracle_recall, hits / wanted);
        EXPECT_DOUBLE_EQ(match.retention, kept / static_cast<double>(n));
        const double part = (match.recall * wanted - before_hits) / (hits - before_hits);
        EXPECT_NEAR(match.even_retention, (before_kept + part * (kept - before_kept)) / static_cast<double>(n), 1e-12);
        break;
      }
    }
  }
}

TEST(Scoring, APerfectScoreKeepsTheOracleAndAConstantOneKeepsAll) {
  std::vector<double> perfect, constant(100, 0.25);
  std::vector<bool> oracle;
  for (int j = 0; j < 100; ++j) perfect.push_back(j), oracle.push_back(j >= 90);
  const double recalls[] = {0.9};
  EXPECT_EQ(match_recall(perfect, oracle, recalls)[0].kept, 9);
  EXPECT_EQ(match_recall(constant, oracle, recalls)[0].kept, 100);
  EXPECT_NEAR(match_recall(constant, oracle, recalls)[0].even_retention, 0.9, 1e-12);
}

TEST(Scoring, AxisSharesSayWhatACoordinateKnows) {
  const Grid grid = {4, 3, 8};
  std::vector<int32_t> frame, row, column, both, same(96, 0);
  for (int32_t t = 0; t < 4; ++t) {
    for (int32_t y = 0; y < 3; ++y) {
      for (int32_t x = 0; x < 8; ++x) {
        frame.push_back(t), row.push_back(2 - y), column.push_back(x / 2), both.push_back(t / 2 * 2 + x / 4);
      }
    }
  }
  const auto expect = [&](const std::vector<int32_t>& labels, std::array<double, 3> want) {
    const auto got = axis_shares(labels.data(), grid);
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
  };
  expect(frame, {1, 0, 0});
  expect(row, {0, 1, 0});
  expect(column, {0, 0, 1});
  expect(both, {0.5, 0, 0.5});
  expect(same, {0, 0, 0});
  // Random labels against the sum over (label, coordinate) of p log(p / (p_label p_coordinate)).
  std::mt19937 random(3);
  std::vector<int32_t> labels;
  for (int i = 0; i < 96; ++i) labels.push_back(static_cast<int32_t>(random() % 5));
  const auto got = axis_shares(labels.data(), grid);
  for (size_t axis = 0; axis < 3; ++axis) {
    std::map<std::pair<int64_t, int32_t>, double> joint;
    std::map<int32_t, double> alone;
    for (int64_t i = 0; i < 96; ++i) {
      const int64_t place[] = {i / 24, i / 8 % 3, i % 8};
      joint[{place[axis], labels[i]}] += 1.0 / 96;
      alone[labels[i]] += 1.0 / 96;
    }
    double information = 0, entropy = 0;
    for (const auto& [key, p] : joint) {
      information += p * std::log(p / (alone[key.second] / static_cast<double>(grid[axis])));
    }
    for (const auto& [label, p] : alone) entropy -= p * std::log(p);
    EXPECT_NEAR(got[axis], information / entropy, 1e-12);
  }
}

// Masses of 0.75 and 0.25 on the one key that is kept: their deviation is 0.25.
TEST(Scoring, IntervalsAreOf95PerCentAndAddInQuadrature) {
  ThreadPool pool(1);
  const std::vector<ExactQuery> exact = {{0, {0.25, 0.75}, 0.75, {0}}, {1, {0.75, 0.25}, 0.75, {0}}};
  const int32_t labels[] = {0, 0};
  const uint32_t mask[] = {2};
  const Quality one = measure_head(pool, exact, {}, {labels, mask});
  EXPECT_DOUBLE_EQ(one.mass_recall, 0.5);
  EXPECT_DOUBLE_EQ(one.mass_interval, 1.96 * 0.25 / std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(one.oracle_recall, 0.5);
  EXPECT_DOUBLE_EQ(one.retention, 0.5);
  Quality heads[] = {one, one, one, one};
  heads[3].mass_interval = 3 * one.mass_interval;
  EXPECT_DOUBLE_EQ(mean_quality(heads, 4).mass_interval, one.mass_interval * std::sqrt(12.0) / 4);
  EXPECT_EQ(mean_quality(heads, 4).queries, 8);
}

TEST(Scoring, TheAccountIsTheComplexitySections) {
  const Head head(40, 8, 5, 3, {{0, 1, 2}, {3, 4, 5}, {6, 7}}, 4);
  const ScoringCost cost = scoring_cost(head.proxy, 5);
  EXPECT_EQ(cost.direct_macs, 5 * 40 * 8);
  EXPECT_EQ(cost.table_macs, 5 * (3 * 3 + 3 * 3 + 3 * 2));
  EXPECT_EQ(cost.lookups, 5 * 40 * 3);
  EXPECT_EQ(cost.additions, 5 * 40 * 2);
  EXPECT_DOUBLE_EQ(cost.mac_reduction, 40.0 / 3);
  EXPECT_EQ(cost.code_space, 27);
  EXPECT_EQ(cost.code_space_gain, 9);
  EXPECT_EQ(cost.centroid_scalars, 24);
  EXPECT_EQ(cost.monolithic_scalars, 27 * 8);
  std::set<std::array<int32_t, 3>> tuples;
  for (int64_t j = 0; j < 40; ++j) {
    tuples.insert({head.key_codes[j], head.key_codes[40 + j], head.key_codes[80 + j]});
  }
  EXPECT_EQ(cost.distinct_codes, static_cast<int64_t>(tuples.size()));
  EXPECT_LT(cost.distinct_codes, 27);  // so that the test could fail
  // Nothing is encoded for the exact proxy.
  const Head exact(40, 8, 5, 3, {}, 4);
  const ScoringCost direct = scoring_cost(exact.proxy, 5);
  EXPECT_EQ(direct.direct_macs, 5 * 40 * 8);
  EXPECT_EQ(direct.table_macs + direct.lookups + direct.code_space + static_cast<double>(direct.distinct_codes), 0);
}

}  // namespace
}  // namespace scope
