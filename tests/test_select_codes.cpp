// select where whole codes are kept, against the float64 rules of SVG2 and SpargeAttn: kept sets, ties, forced codes,
// targets.
#include <limits>

#include "cases.h"
#include "reference.h"
#include "select_output.h"

namespace scope::test {
namespace {

constexpr Rule kRules[] = {Rule::clusters, Rule::blocks_topk, Rule::blocks_cdf};

struct Problem {
  std::vector<int32_t> rows, labels, sizes;
  std::vector<float> tables, q_similarity, k_similarity;
  double alpha = 0.1;
  WeighArgs args;

  Problem(Random& random, Rule rule, int64_t groups, int64_t tokens, int64_t count, int64_t codes, double deviation,
          bool coarse)
      : rows(subset(random, tokens, count)) {
    for (int64_t c = 0; c < groups; ++c) sizes.push_back(static_cast<int32_t>(random.between(1, 50)));
    for (int64_t i = 0; i < groups * codes; ++i) {
      const double x = deviation * random.normal();
      tables.push_back(static_cast<float>(coarse ? std::round(x) : x));
    }
    for (int64_t j = 0; j < count; ++j) labels.push_back(static_cast<int32_t>(random.below(codes)));
    for (int64_t c = 0; c < groups; ++c) q_similarity.push_back(random.chance(0.9) ? 0.5f : -0.5f);
    for (int64_t r = 0; r < codes; ++r) k_similarity.push_back(random.chance(0.9) ? 0.5f : -0.5f);
    args.proxy.groups = groups;
    args.proxy.count = count;
    args.proxy.scale = 1;
    args.proxy.k = RowsView{nullptr, DType::f32, tokens, 8, 8};
    args.proxy.rows = rows.data();
    args.proxy.subspaces = 1;
    args.proxy.codes = codes;
    args.proxy.tables = tables.data();
    args.proxy.labels = labels.data();
    args.sizes = sizes.data();
    args.rule = rule;
    args.rho = 0.9;
    args.alpha = &alpha;
    args.density = 0.2;
    args.q_similarity = q_similarity.data();
    args.k_similarity = k_similarity.data();
  }
  std::vector<int64_t> code_sizes() const {
    std::vector<int64_t> result(static_cast<size_t>(args.proxy.codes));
    for (const int32_t code : labels) ++result[static_cast<size_t>(code)];
    return result;
  }
  // The codes that the float64 rules keep when they compare with `bound`.
  std::vector<int64_t> want(int64_t group, double bound, double least) const {
    const auto scores =
        std::vector<double>(tables.begin() + group * args.proxy.codes, tables.begin() + (group + 1) * args.proxy.codes);
    if (args.rule == Rule::clusters) return reference::svg2_clusters(scores, code_sizes(), bound, least);
    std::vector<bool> similar;
    for (const float x : k_similarity) similar.push_back(x > args.similar);
    const reference::SpargeForm form =
        args.rule == Rule::blocks_topk ? reference::SpargeForm{.topk = bound} : reference::SpargeForm{.cdf = bound};
    return reference::sparge_blocks(scores, similar, q_similarity[static_cast<size_t>(group)] > args.similar, form);
  }
};

struct Selection : SelectOutput {
  Selection(const Exec& exec, const WeighArgs& problem, uint8_t poison = 0xff, int64_t short_of = 0)
      : SelectOutput(exec, problem, poison, short_of) {
    run_select(exec, {&args, 1});
  }
};

// Every mask row holds exactly the keys of the codes that the rules keep, and its count.
void expect_selection(const Problem& problem, const Selection& ours) {
  const int64_t words = mask_words(problem.args.proxy.k.tokens);
  const double given = problem.args.rule == Rule::blocks_topk ? problem.args.density : problem.args.rho;
  // A solved share of codes is a whole number of them, which millionths would round down.
  const double bound =
      problem.args.target == 0 ? given : ours.rho_used[0] + (problem.args.rule == Rule::blocks_topk ? 1e-6 : 0);
  EXPECT_EQ(ours.head_budget[0], 0);
  EXPECT_EQ(ours.alpha_used[0], problem.args.target == 0 ? problem.alpha : std::min(problem.alpha, problem.args.target / 2));
  for (int64_t c = 0; c < problem.args.proxy.groups; ++c) {
    SCOPED_TRACE(fmt::format("group {}", c));
    EXPECT_EQ(ours.top_p[c], 0);
    // A sum of weights may round to either side of a bound that it meets exactly.
    bool found = false;
    for (const double nudge : {0.0, -1e-12, 1e-12}) {
      std::vector<int64_t> want;
      if (problem.sizes[static_cast<size_t>(c)] > 0) want = problem.want(c, bound + nudge, ours.alpha_used[0]);
      std::vector<uint32_t> mask(static_cast<size_t>(words));
      int64_t count = 0;
      for (size_t j = 0; j < problem.labels.size(); ++j) {
        if (!std::binary_search(want.begin(), want.end(), problem.labels[j])) continue;
        set_mask_bit(mask.data(), problem.rows[j]);
        ++count;
      }
      found = found || (ours.counts[c] == count && std::equal(mask.begin(), mask.end(), ours.mask.data() + c * words));
    }
    ASSERT_TRUE(found) << "keeps " << ours.counts[c] << " keys at " << bound;
  }
}

TEST(SelectCodes, DifferentialEveryRule) {
  each_case("select codes", 4000, [](Case& at) {
    Random& random = at.random;
    const int64_t tokens = at.tokens, count = random.chance(0.6) ? tokens : random.between(1, tokens);
    Problem problem(random, kRules[random.below(3)], random.between(1, tokens >= 1025 ? 4 : 12), tokens, count,
                    random.pick<int64_t>({1, 2, 16, 70, 333}), random.pick<double>({0, 0.3, 1, 3}), random.chance(0.3));
    for (auto& n : problem.sizes) {
      if (random.chance(0.15)) n = 0;
    }
    WeighArgs& args = problem.args;
    args.rho = random.pick<double>({1e-6, 0.1, 0.5, 0.9, 0.98, 0.999999, 1, random.uniform()});
    problem.alpha = random.pick<double>({0, 0.05, 0.1, 0.333333, 1, random.uniform()});
    args.density = random.pick<double>({0.000001, 0.1, 0.25, 0.9, 1, random.uniform()});
    args.similar = random.pick<double>({-1, 0, 0.6});
    expect_selection(problem, Selection(at.exec, args, at.poison));
  });
}

// Sixteen equal weights: the first by index, and the cluster that crosses p is kept where the block that crosses it is not.
TEST(SelectCodes, TiesByAscendingCodeAndTheCrossingOne) {
  each_machine([](const Exec& exec) {
    Random random(1);
    for (const Rule rule : kRules) {
      Problem problem(random, rule, 1, 160, 160, 16, 0, false);
      for (int64_t j = 0; j < 160; ++j) problem.labels[static_cast<size_t>(j)] = static_cast<int32_t>(j / 10);
      problem.args.similar = -1;
      problem.args.rho = 0.3;       // between 4 and 5 sixteenths
      problem.alpha = 0.1;          // one code
      problem.args.density = 0.24;  // 3 codes
      const Selection ours(exec, problem.args);
      const int64_t codes = rule == Rule::clusters ? 5 : rule == Rule::blocks_cdf ? 4 : 3;
      EXPECT_EQ(ours.counts[0], 10 * codes);
      for (int64_t j = 0; j < 160; ++j) ASSERT_EQ(mask_bit(ours.mask.data(), j), j < 10 * codes);
      problem.args.rho = problem.args.density = 1e-6;  // never nothing
      problem.alpha = 0;
      EXPECT_EQ(Selection(exec, problem.args).counts[0], 10);
      problem.args.rho = problem.args.density = 1;
      EXPECT_EQ(Selection(exec, problem.args).counts[0], 160);
    }
  });
}

TEST(SelectCodes, FloorCountsClustersNotKeys) {
  each_machine([](const Exec& exec) {
    Random random(2);
    Problem problem(random, Rule::clusters, 1, 100, 100, 10, 0, false);
    for (int64_t j = 0; j < 100; ++j) problem.labels[static_cast<size_t>(j)] = j < 91 ? 0 : static_cast<int32_t>(j - 90);
    problem.args.rho = 0.5;
    problem.alpha = 0.39;  // floor(3.9)
    EXPECT_EQ(Selection(exec, problem.args).counts[0], 91 + 2);
  });
}

// A NaN similarity, which a short last block has, is not similar at any threshold.
TEST(SelectCodes, NanIsNeverSimilar) {
  each_machine([](const Exec& exec) {
    Random random(3);
    for (const Rule rule : {Rule::blocks_topk, Rule::blocks_cdf}) {
      Problem problem(random, rule, 3, 100, 100, 10, 1, false);
      problem.args.similar = -1;
      problem.k_similarity[7] = problem.q_similarity[1] = std::numeric_limits<float>::quiet_NaN();
      const Selection ours(exec, problem.args);
      expect_selection(problem, ours);
      EXPECT_EQ(ours.counts[1], 100);
      for (int64_t j = 0; j < 100; ++j) {
        const auto at = static_cast<size_t>(j);
        ASSERT_TRUE(problem.labels[at] != 7 || mask_bit(ours.mask.data(), problem.rows[at]));
      }
    }
  });
}

// The nearest density that any bound reaches, found here by trying many.
TEST(SelectCodes, TargetIsTheNearestReachable) {
  each_case("select codes target", 300, [](Case& at) {
    Random& random = at.random;
    const int64_t n = std::max<int64_t>(at.tokens, 64);
    Problem problem(random, kRules[random.below(3)], random.between(1, 5), n, n, random.pick<int64_t>({1, 8, 40}),
                    random.pick<double>({0.3, 1, 3}), false);
    WeighArgs& args = problem.args;
    problem.alpha = random.pick<double>({0, 0.02, 0.1, 0.3});
    args.similar = random.pick<double>({-1, 0});
    args.target = random.pick<double>({0.01, 0.05, 0.2, 0.5, 0.9, 1});
    const Selection ours(at.exec, args, at.poison);
    expect_selection(problem, ours);
    double nearest = 1;
    WeighArgs given = args;
    const double lowered = std::min(problem.alpha, args.target / 2);
    given.target = 0;
    given.alpha = &lowered;
    const int64_t bounds = testing_cuda() ? 40 : 400;  // a device is slow to reach
    for (int64_t i = 1; i <= bounds; ++i) {
      given.rho = given.density = static_cast<double>(i) / static_cast<double>(bounds);
      const double reached = Selection(at.exec, given, at.poison).density();
      if (std::abs(reached - args.target) < std::abs(nearest - args.target)) nearest = reached;
    }
    EXPECT_LE(std::abs(ours.density() - args.target), std::abs(nearest - args.target) + 1e-12);
    if (ours.rho_used[0] == 0) {
      EXPECT_GE(ours.density(), args.target);
    }
  });
}

TEST(SelectCodes, ManyClustersMeetATargetClosely) {
  Random random(4);
  const Exec exec = machines().back().with(pool(2));
  Problem problem(random, Rule::clusters, 300, 8320, 8320, 1000, 2, false);
  for (const double target : {0.05, 0.1, 0.2, 0.3}) {
    problem.args.target = target;
    EXPECT_NEAR(Selection(exec, problem.args).density(), target, 0.005);
  }
}

// As many as the methods have, one more than a power of two, and the most that a device ranks.
TEST(SelectCodes, ManyCodes) {
  each_machine([](const Exec& exec) {
    for (const int64_t codes : {1000, 1025, 4096}) {
      for (const Rule rule : kRules) {
        SCOPED_TRACE(fmt::format("{} codes, rule {}", codes, static_cast<int>(rule)));
        Random random(8);
        Problem problem(random, rule, 3, 20'000, 19'000, codes, 2, false);
        expect_selection(problem, Selection(exec, problem.args));
        problem.args.target = 0.3;
        const Selection ours(exec, problem.args);
        expect_selection(problem, ours);
        if (rule == Rule::clusters) {
          EXPECT_NEAR(ours.density(), 0.3, 0.001);
        }
      }
    }
  });
}

TEST(SelectCodes, ChunkOfHeadsEqualsHeadsAlone) {
  for (const Rule rule : kRules) {
    Random random(9);
    std::vector<std::unique_ptr<Problem>> problems;
    std::vector<KeepArgs> heads;
    for (int h = 0; h < 3; ++h) {
      problems.push_back(std::make_unique<Problem>(random, rule, 70, 300, 260, 40, 1, false));
      Problem& problem = *problems.back();
      problem.args.proxy.rows = problems[0]->rows.data();
      problem.args.target = 0.3;
      if (own_alphas()) problem.alpha = 0.05 * h;
      heads.emplace_back().weighed = problem.args;
    }
    expect_chunk_equals_heads<SelectOutput>(heads, run_select);
  }
}

TEST(SelectCodes, BitwiseOverThreadsAndRuns) {
  for (const Rule rule : kRules) {
    Random random(5);
    Problem problem(random, rule, 70, 300, 260, 40, 1, false);
    problem.args.target = 0.3;
    expect_repeatable([&](const Exec& exec) { return Selection(exec, problem.args).all(); });
  }
}

TEST(SelectCodes, WorkspaceTooSmallIsRefused) {
  Random random(6);
  Problem problem(random, Rule::clusters, 3, 60, 60, 9, 1, false);
  EXPECT_THROW(Selection(machines().front().with(pool(1)), problem.args, 0xff, 256), Error);
}

}  // namespace
}  // namespace scope::test
