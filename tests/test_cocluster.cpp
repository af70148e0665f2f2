// cocluster against float64 profiles: every assignment, the means, row subsets, ties, and bits.
#include "cases.h"
#include "reference.h"
#include "stages/cocluster.h"

namespace scope::test {
namespace {

struct Problem {
  Rows q, k;
  std::vector<int32_t> q_rows, k_rows;
  Partition partition;
  CoclusterArgs args;

  Problem(Random& random, DType dtype, int64_t dim, int64_t q_tokens, int64_t k_tokens, double share)
      : q(random, dtype, q_tokens, dim, 1), k(random, dtype, k_tokens, dim, 1) {
    const auto pick = [&](int64_t tokens) {
      return subset(random, tokens, std::max<int64_t>(1, static_cast<int64_t>(share * static_cast<double>(tokens))));
    };
    q_rows = pick(q_tokens);
    k_rows = pick(k_tokens);
    partition = {all_rows(dim)};
    args.queries.q = q.view();
    args.queries.rows = q_rows.data();
    args.queries.count = static_cast<int64_t>(q_rows.size());
    args.queries.iterations = 1;
    args.keys.k = k.view();
    args.keys.rows = k_rows.data();
    args.keys.count = static_cast<int64_t>(k_rows.size());
    args.keys.partition = &partition;
    args.queries.seed = args.keys.seed = static_cast<uint64_t>(random.below(1000));
  }
  reference::Matrix queries() const {
    return reference::gather(q.view(), q_rows.data(), args.queries.count, nullptr, q.view().dim);
  }
  reference::Matrix keys() const {
    return reference::gather(k.view(), k_rows.data(), args.keys.count, nullptr, k.view().dim);
  }
};

// Outputs and scratch between canaries, poisoned before the call.
struct Output {
  Guarded<float> centroids, codebooks;
  Guarded<int32_t> labels, sizes, order, codes;
  Guarded<int64_t> offsets, empty;
  GuardedScratch scratch;
  CoclusterArgs args;

  Output(const Exec& exec, const CoclusterArgs& problem, uint8_t poison = 0xff, int64_t short_of = 0)
      : centroids(problem.queries.groups * problem.queries.q.dim, poison),
        codebooks(problem.keys.codes * problem.queries.q.dim, poison),
        labels(problem.queries.q.tokens, poison),
        sizes(problem.queries.groups, poison),
        order(problem.queries.count, poison),
        codes(problem.keys.count, poison),
        offsets(problem.queries.groups + 1, poison),
        empty(1, poison),
        scratch(backend().cocluster_scratch(exec, sizes_of(problem)) - short_of, poison),
        args(problem) {
    args.queries.centroids = centroids.data();
    args.queries.labels = labels.data();
    args.queries.sizes = sizes.data();
    args.queries.order = order.data();
    args.queries.offsets = offsets.data();
    args.queries.scratch = scratch_of(scratch);
    args.keys.codebooks = codebooks.data();
    args.keys.labels = codes.data();
    args.keys.empty = empty.data();
  }
  std::vector<uint8_t> all() const {
    return joined_bytes(centroids, codebooks, labels, sizes, order, codes, offsets, empty);
  }
};

struct Result : Output {
  Result(const Exec& exec, const Problem& problem, int rounds = 1, uint8_t poison = 0xff, int64_t short_of = 0)
      : Output(exec, problem.args, poison, short_of) {
    args.queries.iterations = rounds;
    run_cocluster(exec, {&args, 1});
  }
};

// How much larger than the profile of x its terms are: rounding grows by as much where x is nearly orthogonal to all others.
double condition(const double* x, const reference::Matrix& others) {
  double terms = 0, square = 1e-8;
  for (int64_t o = 0; o < others.rows; ++o) {
    const double product = reference::dot(x, others.row(o), others.columns);
    square += product * product;
    terms += reference::dot(others.row(o), others.row(o), others.columns);
  }
  return std::sqrt(reference::dot(x, x, others.columns) * terms / square);
}

// Each label's profile is as alike as the best to within rounding, and the centroids that follow are the means.
void expect_half(const reference::Matrix& points, const std::vector<int32_t>& labels, const reference::Matrix& before,
                 const reference::Matrix& others, const float* after, double roundoff) {
  const auto x = reference::profiles(points, others), c = reference::profiles(before, others);
  // What is compared with a token itself: others' times a centroid's profile; how far rounding may move each.
  reference::Matrix directions(before.rows, before.columns), mean(1, before.columns);
  for (int64_t j = 0; j < before.rows; ++j) {
    for (int64_t i = 0; i < before.columns; ++i) {
      for (int64_t o = 0; o < others.rows; ++o) directions.row(j)[i] += c.row(j)[o] * others.row(o)[i];
      mean.row(0)[i] += directions.row(j)[i] / static_cast<double>(before.rows);
    }
  }
  const auto moved = [&](int32_t j) {
    return roundoff * std::sqrt(reference::distance(directions.row(j), mean.row(0), before.columns));
  };
  const auto best = reference::most_alike(points, before, others);
  for (int64_t i = 0; i < points.rows; ++i) {
    const int32_t label = labels[static_cast<size_t>(i)];
    ASSERT_TRUE(label >= 0 && label < before.rows);
    const int32_t want = best[static_cast<size_t>(i)];
    if (label == want) continue;
    const double worst =
        condition(points.row(i), others) + condition(before.row(label), others) + condition(before.row(want), others);
    double square = 1e-8;
    for (int64_t o = 0; o < others.rows; ++o)
      square += std::pow(reference::dot(points.row(i), others.row(o), others.columns), 2);
    const double length = std::sqrt(reference::dot(points.row(i), points.row(i), points.columns) / square);
    const double least =
        reference::dot(x.row(i), c.row(want), others.rows) - 3e-7 * worst - length * (moved(label) + moved(want));
    ASSERT_GE(reference::dot(x.row(i), c.row(label), others.rows), least)
        << "token " << i << " got " << label << ", most alike " << want << ", condition " << worst;
  }
  double largest = 1;
  for (const double value : points.data) largest = std::max(largest, std::abs(value));
  reference::Matrix means = before;
  reference::update(points, labels, means);
  for (size_t i = 0; i < means.data.size(); ++i) {
    // Where the members cancel, a mean is as exact as they are large.
    ASSERT_NEAR(after[i], means.data[i], limits().mean * std::max(largest, std::abs(means.data[i]))) << "element " << i;
  }
}

// One round from given centroids, which `ours` has run.
void expect_round(const Exec& exec, const Problem& problem, const Result& ours, const reference::Matrix& q_before,
                  const reference::Matrix& k_before) {
  const int64_t dim = problem.q.view().dim, groups = problem.args.queries.groups;
  const double roundoff = limits().centroid_rounding(exec, problem.q.view().dtype);
  const std::vector<int32_t> codes(ours.codes.data(), ours.codes.data() + ours.codes.size());
  ASSERT_NO_FATAL_FAILURE(expect_half(problem.keys(), codes, k_before, q_before, ours.codebooks.data(), roundoff));
  std::vector<int32_t> labels, order;
  for (int64_t t = 0, i = 0; t < problem.q.view().tokens; ++t) {
    const bool takes_part = i < problem.args.queries.count && problem.q_rows[static_cast<size_t>(i)] == t;
    i += takes_part ? 1 : 0;
    if (takes_part) {
      labels.push_back(ours.labels[t]);
    } else {
      ASSERT_EQ(ours.labels[t], -1);
    }
  }
  const reference::Matrix codebook(ours.codebooks.data(), problem.args.keys.codes, dim);
  ASSERT_NO_FATAL_FAILURE(expect_half(problem.queries(), labels, q_before, codebook, ours.centroids.data(), roundoff));
  for (int32_t c = 0; c < groups; ++c) {
    ASSERT_EQ(ours.offsets[c], static_cast<int64_t>(order.size()));
    for (const int32_t token : problem.q_rows) {
      if (ours.labels[token] == c) order.push_back(token);
    }
    ASSERT_EQ(ours.sizes[c], static_cast<int64_t>(order.size()) - ours.offsets[c]);
  }
  ASSERT_EQ(ours.offsets[groups], problem.args.queries.count);
  ASSERT_EQ(order, std::vector<int32_t>(ours.order.data(), ours.order.data() + ours.order.size()));
  std::vector<int32_t> keys(static_cast<size_t>(problem.args.keys.codes));
  for (const int32_t code : codes) ++keys[static_cast<size_t>(code)];
  ASSERT_EQ(ours.empty[0], std::count(keys.begin(), keys.end(), 0));
}

TEST(Cocluster, DifferentialEveryRound) {
  each_case("cocluster", 1200, [](Case& at) {
    Random& random = at.random;
    const int64_t dim = at.tokens >= 1025 ? std::min<int64_t>(at.dim, 64) : at.dim;
    Problem problem(random, at.dtype, dim, at.tokens, random.between(1, std::min<int64_t>(at.tokens + 40, 1200)),
                    random.chance(0.5) ? 1.0 : 0.7);
    GroupArgs& queries = problem.args.queries;
    EncodeArgs& keys = problem.args.keys;
    queries.groups = std::min(queries.count, random.pick<int64_t>({1, 3, 16, 65, 130}));
    keys.codes = std::min(keys.count, random.pick<int64_t>({1, 3, 16, 65, 200}));
    const auto q_start = reference::start_rows(problem.queries(), queries.groups, {.seed = queries.seed});
    const auto k_start = reference::start_rows(problem.keys(), keys.codes, {.seed = keys.seed, .tensor = 1});
    const Result one(at.exec, problem, 1, at.poison);
    ASSERT_NO_FATAL_FAILURE(expect_round(at.exec, problem, one, q_start, k_start));
    // The second round starts from what the first left.
    const Result two(at.exec, problem, 2, at.poison);
    expect_round(at.exec, problem, two, reference::Matrix(one.centroids.data(), queries.groups, dim),
                 reference::Matrix(one.codebooks.data(), keys.codes, dim));
  });
}

// A mean that all tokens share dwarfs what tells them apart: rounding must not.
TEST(Cocluster, ACommonMeanCostsNoMoreThanRounding) {
  each_machine([](const Exec& exec) {
    Random random(5);
    Problem problem(random, limits().finest, 64, 300, 400, 1);
    for (int64_t t = 0; t < 400; ++t) {
      for (int64_t c = 0; c < 64; ++c) {
        problem.k.set(t, c, random.normal() + (c == 0 ? 30 : 0));
        if (t < 300) problem.q.set(t, c, random.normal() - (c == 0 ? 30 : 0));
      }
    }
    problem.args.queries.groups = 20;
    problem.args.keys.codes = 50;
    const Result ours(exec, problem);
    const auto q_start = reference::start_rows(problem.queries(), 20, {.seed = problem.args.queries.seed});
    const auto k_start = reference::start_rows(problem.keys(), 50, {.seed = problem.args.keys.seed, .tensor = 1});
    expect_round(exec, problem, ours, q_start, k_start);
  });
}

// Equal tokens: all centroids are alike, the first gets all, the others are empty and stay. Zeros are alike to anything.
TEST(Cocluster, TiesGoToTheLowestIndexAndEmptyClustersKeepTheirCentroid) {
  each_machine([](const Exec& exec) {
    for (const double value : {0.0, 2.0}) {
      Random random(1);
      Problem problem(random, DType::bf16, 24, 30, 50, 1);
      for (int64_t t = 0; t < 50; ++t) {
        for (int64_t c = 0; c < 24; ++c) {
          problem.k.set(t, c, value);
          if (t < 30) problem.q.set(t, c, value);
        }
      }
      problem.args.queries.groups = 4;
      problem.args.keys.codes = 6;
      const Result ours(exec, problem, 2);
      for (int64_t t = 0; t < 50; ++t) ASSERT_EQ(ours.codes[t], 0);
      for (int64_t t = 0; t < 30; ++t) ASSERT_EQ(ours.labels[t], 0);
      EXPECT_EQ(ours.empty[0], 5);
      for (int64_t i = 0; i < ours.codebooks.size(); ++i) ASSERT_EQ(ours.codebooks[i], static_cast<float>(value));
    }
  });
}

TEST(Cocluster, LargestFiniteInputsStayApart) {
  each_machine([](const Exec& exec) {
    Random random(2);
    const int64_t dim = limits().dims.back();
    Problem problem(random, limits().finest, dim, 60, 60, 1);
    for (int64_t t = 0; t < 60; ++t) {
      for (int64_t c = 0; c < dim; ++c) {
        problem.k.set(t, c, 1e18 * (random.chance(0.5) ? 1 : -1));
        problem.q.set(t, c, 1e18 * (random.chance(0.5) ? 1 : -1));
      }
    }
    problem.args.queries.groups = 10;
    problem.args.keys.codes = 12;
    const Result ours(exec, problem);
    const auto q_start = reference::start_rows(problem.queries(), 10, {.seed = problem.args.queries.seed});
    const auto k_start = reference::start_rows(problem.keys(), 12, {.seed = problem.args.keys.seed, .tensor = 1});
    expect_round(exec, problem, ours, q_start, k_start);
  });
}

TEST(Cocluster, BitwiseOverThreadsAndRuns) {
  Random random(3);
  Problem problem(random, DType::bf16, 128, 900, 1100, 0.9);
  problem.args.queries.groups = 40;
  problem.args.keys.codes = 150;
  expect_repeatable([&](const Exec& exec) { return Result(exec, problem, 2).all(); });
}

TEST(Cocluster, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(6);
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<CoclusterArgs> heads;
  for (int h = 0; h < 3; ++h) {
    problems.push_back(std::make_unique<Problem>(random, DType::bf16, 64, 300, 400, 0.9));
    Problem& problem = *problems.back();
    problem.q = Rows(random, DType::bf16, 300, 64, 1, 2 * 64);  // side by side
    problem.k = Rows(random, DType::bf16, 400, 64, 1, 8);
    CoclusterArgs& args = heads.emplace_back(problem.args);
    args.queries.q = problem.q.view();
    args.keys.k = problem.k.view();
    args.queries.rows = problems[0]->q_rows.data();
    args.keys.rows = problems[0]->k_rows.data();
    args.queries.seed = args.keys.seed = 7;
    args.queries.iterations = 2;
    args.queries.groups = 20;
    args.keys.codes = 50;
  }
  expect_chunk_equals_heads<Output>(heads, run_cocluster);
}

TEST(Cocluster, WorkspaceTooSmallIsRefused) {
  Random random(4);
  Problem problem(random, limits().finest, 64, 90, 80, 1);
  problem.args.queries.groups = 9;
  problem.args.keys.codes = 8;
  each_machine([&](const Exec& exec) { EXPECT_THROW(Result(exec, problem, 1, 0xff, 64), Error); });
}

}  // namespace
}  // namespace scope::test
