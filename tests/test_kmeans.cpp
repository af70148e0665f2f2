// K-means against the float64 reference: every step, the bookkeeping around it, degenerate inputs and named bug classes.
#include "cases.h"
#include "reference.h"
#include "stages/kmeans.h"

namespace scope::test {
namespace {

// Outputs and scratch between canaries, poisoned before the call.
struct Result {
  Guarded<float> centroids;
  Guarded<int32_t> labels, sizes, order;
  Guarded<int64_t> offsets;

  // `start`: [clusters, depth] centroids of a warm start; empty: from random rows.
  Result(const Exec& exec, const KMeansArgs& problem, const std::vector<float>& start = {}, uint8_t poison = 0xff)
      : centroids(problem.clusters * problem.depth, poison),
        labels(problem.count, poison),
        sizes(problem.clusters, poison),
        order(problem.count, poison),
        offsets(problem.clusters + 1, poison) {
    KMeansArgs args = problem;
    GuardedScratch scratch(kmeans_scratch(exec, args), poison);
    args.warm = !start.empty();
    std::copy(start.begin(), start.end(), centroids.data());
    args.centroids = centroids.data();
    args.labels = labels.data();
    args.sizes = sizes.data();
    args.order = order.data();
    args.offsets = offsets.data();
    args.scratch = scratch_of(scratch);
    run_kmeans(exec, args);
  }
  std::vector<float> centres() const { return {centroids.data(), centroids.data() + centroids.size()}; }
  std::vector<uint8_t> all() const { return joined_bytes(centroids, labels, sizes, order, offsets); }
};

struct Problem {
  Rows points;
  std::vector<int32_t> rows, channels;
  KMeansArgs args;

  Problem(Random& random, DType dtype, int64_t tokens, int64_t dim, int64_t count, int64_t depth, int64_t clusters)
      : points(random, dtype, tokens, dim, 1), rows(subset(random, tokens, count)), channels(shuffled(random, dim)) {
    if (depth == dim && random.chance(0.5)) channels = all_rows(dim);
    channels.resize(static_cast<size_t>(depth));
    args = {.points = points.view(),
            .rows = rows.data(),
            .count = count,
            .channels = channels.data(),
            .depth = depth,
            .clusters = clusters,
            .iterations = 1,
            .sample = count,
            .warm = false,
            .random = {.seed = 5, .tensor = 1, .subspace = 2},
            .centroids = nullptr,
            .labels = nullptr,
            .sizes = nullptr,
            .order = nullptr,
            .offsets = nullptr,
            .scratch = {}};
    if (testing_cuda()) args.random = {.seed = 5, .tensor = channels == all_rows(dim) ? 0u : 1u};
  }
  reference::Matrix matrix() const {
    return reference::gather(args.points, rows.data(), args.count, channels.data(), args.depth);
  }
  std::vector<float> start() const {
    const auto start = reference::start_rows(matrix(), args.clusters, args.random);
    return {start.data.begin(), start.data.end()};
  }
};

double squared_norm(const double* x, int64_t n) { return std::inner_product(x, x + n, x, 0.0); }

// sizes, order and offsets say the same as labels, ascending within a label.
void expect_consistent(const KMeansArgs& args, const Result& ours) {
  int64_t place = 0;
  ASSERT_EQ(ours.offsets[0], 0);
  for (int64_t c = 0; c < args.clusters; ++c) {
    ASSERT_EQ(ours.offsets[c], place);
    for (int64_t i = 0; i < args.count; ++i) {
      if (ours.labels[i] != c) continue;
      ASSERT_EQ(ours.order[place++], i);
    }
    ASSERT_EQ(ours.sizes[c], place - ours.offsets[c]);
  }
  ASSERT_EQ(ours.offsets[args.clusters], args.count);
  ASSERT_EQ(place, args.count) << "a label out of range";
}

// The last step: labels nearest to `before`, centroids the means of exactly these labels.
void expect_step(const Exec& exec, const Problem& problem, const std::vector<float>& before, const Result& ours) {
  const KMeansArgs& args = problem.args;
  ASSERT_NO_FATAL_FAILURE(expect_consistent(args, ours));
  const auto points = problem.matrix();
  reference::Matrix centroids(before.data(), args.clusters, args.depth);
  const reference::RoundedCentroids rounded(centroids, limits().centroid_rounding(exec, args.points.dtype));
  double largest = 0;
  for (int64_t c = 0; c < args.clusters; ++c) largest = std::max(largest, squared_norm(centroids.row(c), args.depth));
  for (int64_t i = 0; i < args.count; ++i) {
    const double* x = points.row(i);
    const double* chosen = centroids.row(ours.labels[i]);
    const int32_t nearest = reference::nearest(x, centroids);
    const double best = reference::distance(x, centroids.row(nearest), args.depth);
    // |c|^2 - 2 x.c in f32 is exact to a share of these norms, not of the distance; CUDA compares in the largest one's unit.
    const double norm = testing_cuda() ? largest : squared_norm(chosen, args.depth);
    const double tolerance = 1e-6 * (squared_norm(x, args.depth) + norm);
    ASSERT_LE(reference::distance(x, chosen, args.depth), rounded.most(best, nearest, ours.labels[i]) + tolerance)
        << "point " << i << " got " << ours.labels[i] << ", nearest " << nearest;
  }
  const std::vector<int32_t> labels(ours.labels.data(), ours.labels.data() + args.count);
  reference::update(points, labels, centroids);
  for (int64_t c = 0; c < args.clusters; ++c) {
    for (int64_t k = 0; k < args.depth; ++k) {
      const float got = ours.centroids[c * args.depth + k];
      if (ours.sizes[c] == 0) {
        ASSERT_EQ(got, before[static_cast<size_t>(c * args.depth + k)]) << "empty cluster " << c;
      } else {
        const double want = centroids.row(c)[k];  // f32 sums of up to 128 equal points drift by an ulp now and then
        ASSERT_NEAR(got, want, limits().mean * std::max(1.0, std::abs(want))) << "cluster " << c << " channel " << k;
      }
    }
  }
}

TEST(KMeans, DifferentialEveryStep) {
  each_case("kmeans", 5000, [](Case& at) {
    Random& random = at.random;
    const bool big = at.tokens >= 1025;
    const int64_t dim = big ? std::min<int64_t>(at.dim, 64) : at.dim;
    const int64_t count = random.chance(0.6) ? at.tokens : random.between(1, at.tokens);
    const int64_t depth = random.chance(0.4) ? dim : random.between(1, dim);
    const int64_t clusters = std::min(count, random.pick<int64_t>({1, 2, 5, 16, 17, 65, big ? 16 : count}));
    Problem problem(random, at.dtype, at.tokens, dim, count, depth, clusters);
    if (random.chance(0.2)) {  // few distinct points: ties and empty clusters everywhere
      for (int64_t t = 3; t < at.tokens; ++t) problem.points.copy_row(t, random.below(3));
    }
    if (random.chance(0.1)) {  // a large common mean: 16 bits hold little beside it
      for (int64_t i = 0; i < at.tokens * dim; ++i) {
        const int64_t t = i / dim, c = i % dim;
        problem.points.set(t, c, 30 + reference::element(problem.points.view(), t, c));
      }
    }
    problem.args.random.seed = random.below(1 << 20);
    // Step i starts from the centroids of step i - 1; the first from the specified rows, or from a warm start.
    std::vector<float> before = problem.start();
    std::vector<float> warm;
    if (random.chance(0.3)) {
      for (float& x : before) x += static_cast<float>(0.1 * random.normal());
      warm = before;
    }
    const int steps = static_cast<int>(random.between(1, big ? 2 : 4));
    for (int i = 1; i < steps; ++i) {
      problem.args.iterations = i;
      before = Result(at.exec, problem.args, warm, at.poison).centres();
    }
    problem.args.iterations = steps;
    expect_step(at.exec, problem, before, Result(at.exec, problem.args, warm, at.poison));
  });
}

// More centroids than a device's shared memory holds, and than one of its argmax keys tells apart.
TEST(KMeans, AThousandClustersOverAllChannels) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      Random random(10);
      Problem problem(random, dtype, 1500, 128, 1400, 128, 1000);
      problem.args.iterations = 1;
      expect_step(exec, problem, problem.start(), Result(exec, problem.args));
    }
  });
}

// Well separated clusters leave no room for rounding: the whole run equals the reference's.
TEST(KMeans, WholeRunEqualsTheReference) {
  each_machine([](const Exec& exec) {
    Random random(1);
    Problem problem(random, limits().finest, 300, 40, 300, 40, 12);
    for (int64_t t = 0; t < 300; ++t) {
      for (int64_t c = 0; c < 40; ++c) problem.points.set(t, c, 20.0 * ((t % 9) == c) + 0.1 * random.normal());
    }
    problem.args.iterations = 6;
    const Result ours(exec, problem.args);
    const auto points = problem.matrix();
    const auto want = reference::kmeans(points, reference::start_rows(points, 12, problem.args.random), 6);
    const reference::RoundedCentroids rounded(want.centroids, limits().centroid_rounding(exec, problem.args.points.dtype));
    for (int64_t i = 0; i < 300; ++i) {
      const double* x = points.row(i);  // near-ties between two centroids in one blob may go either way
      const int32_t label = want.labels[static_cast<size_t>(i)];
      const double best = reference::distance(x, want.centroids.row(label), 40);
      const double got = reference::distance(x, want.centroids.row(ours.labels[i]), 40);
      ASSERT_GE(got, best - 1e-2);
      ASSERT_LE(got, rounded.most(best, label, ours.labels[i]) + 1e-2);
    }
  });
}

// Several identical centroids: the lowest index takes every point, the others are empty and keep theirs.
TEST(KMeans, TiesGoToTheLowestIndexAndEmptyClustersKeepTheirCentroid) {
  each_machine([](const Exec& exec) {
    for (const int64_t clusters : {2, 16, 17, 64, 65, 130}) {
      Random random(2);
      Problem problem(random, DType::bf16, 200, 8, 200, 8, clusters);
      for (int64_t t = 0; t < 200; ++t) problem.points.copy_row(t, 0);
      const Result ours(exec, problem.args);
      EXPECT_EQ(ours.sizes[0], 200);
      for (int64_t c = 1; c < clusters; ++c) EXPECT_EQ(ours.sizes[c], 0);
      // Duplicates that start past the first panel: 1 and clusters - 1 are the same point, 0 is far away.
      auto start = problem.start();
      for (int64_t k = 0; k < 8; ++k) start[static_cast<size_t>(k)] += 50;
      const Result shifted(exec, problem.args, start);
      EXPECT_EQ(shifted.sizes[1], 200);
      for (int64_t k = 0; k < 8; ++k) EXPECT_EQ(shifted.centroids[k], start[static_cast<size_t>(k)]);
    }
  });
}

TEST(KMeans, AsManyClustersAsPoints) {
  each_machine([](const Exec& exec) {
    for (const int64_t n : {1, 2, 63, 64, 65, 257}) {
      Random random(3);
      Problem problem(random, DType::f16, n, 40, n, 40, n);
      const auto points = problem.matrix();
      const std::vector<float> start(points.data.begin(), points.data.end());
      const Result ours(exec, problem.args, start);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(ours.labels[i], i);
      EXPECT_EQ(ours.centres(), start);
    }
  });
}

TEST(KMeans, WarmStartContinuesARun) {
  each_machine([](const Exec& exec) {
    Random random(4);
    Problem problem(random, limits().finest, 500, 64, 400, 20, 30);
    problem.args.iterations = 5;
    const Result whole(exec, problem.args);
    problem.args.iterations = 2;
    const Result first(exec, problem.args);
    problem.args.iterations = 3;
    const Result rest(exec, problem.args, first.centres());
    EXPECT_TRUE(whole.all() == rest.all());
  });
}

// All but the last `full_iterations` see a sample each, those every token; too few iterations see no sample at all.
TEST(KMeans, SampleIsSeenByAllButTheFullIterations) {
  each_machine([](const Exec& exec) {
    for (const int full : {1, 2}) {
      for (const int64_t sample : {1, 7, 100, 499, 500, 900}) {
        SCOPED_TRACE(fmt::format("{} full iterations, {} tokens", full, sample));
        Random random(5);
        Problem problem(random, limits().finest, 700, 40, 500, 40, 20);
        problem.args.sample = sample;
        problem.args.full_iterations = full;
        problem.args.draw = full == 1 ? 70 : 0;  // as in a warm call, or in a first one
        problem.args.iterations = full + 4;
        std::vector<float> centres = problem.start(), warm;
        if (full == 1) {
          for (float& x : centres) x += static_cast<float>(0.1 * random.normal());
          warm = centres;
        }
        const Result sampled(exec, problem.args, warm);
        Problem part(random, limits().finest, 1, 40, 1, 40, 1);
        part.args = problem.args;
        part.channels = problem.channels;
        part.args.iterations = 1;
        for (int64_t iteration = 0; iteration < 4; ++iteration) {
          part.rows = problem.rows;
          if (sample < 500) {
            part.rows.clear();
            const auto draw = static_cast<int64_t>(problem.args.draw) + iteration;
            for (const int32_t i : reference::sample_positions(500, sample, draw, problem.args.random)) {
              part.rows.push_back(problem.rows[static_cast<size_t>(i)]);
            }
          }
          part.args.rows = part.rows.data();
          part.args.count = part.args.sample = std::ssize(part.rows);
          const Result step(exec, part.args, centres);
          expect_step(exec, part, centres, step);
          centres = step.centres();
        }
        if (full == 1) expect_step(exec, problem, centres, sampled);
        problem.args.iterations = full;
        const Result late(exec, problem.args, centres);
        EXPECT_TRUE(sampled.all() == late.all());
      }
    }
  });
}

TEST(KMeans, StartRowsDependOnSeedTensorAndSubspaceAlone) {
  const RandomStream a{.seed = 1, .tensor = 1, .subspace = 2};
  for (const RandomStream& b :
       {RandomStream{2, 1, 2}, RandomStream{1, 0, 2}, RandomStream{1, 1, 3}, RandomStream{1, 1, 2, 1}}) {
    int same = 0;
    for (uint64_t i = 0; i < 100; ++i) same += a.index(i, 1000) == b.index(i, 1000);
    EXPECT_LT(same, 5);
  }
}

TEST(KMeans, BitwiseOverThreadsAndRuns) {
  Random random(6);
  Problem problem(random, DType::bf16, 1100, 40, 1000, 30, 40);
  problem.args.iterations = 4;
  problem.args.sample = 300;
  expect_repeatable([&](const Exec& exec) { return Result(exec, problem.args).all(); });
}

// The caller refuses such input (all_within); should it come anyway, labels stay in range and nothing is overrun.
TEST(KMeans, NanIntoKMeansNeverLeavesTheLabelRange) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        Random random(7);
        Problem problem(random, dtype, 90, 40, 70, 40, 20);
        const auto all_within = [&](int64_t n) {
          return exec.kernels->all_within(problem.args.points, problem.rows.data(), n, 1e18f);
        };
        EXPECT_TRUE(exec.device != nullptr || all_within(70));
        problem.points.set(problem.rows[33], 39, bad);
        EXPECT_FALSE(exec.device == nullptr && all_within(70));
        EXPECT_TRUE(exec.device != nullptr || all_within(33)) << "a row outside the list";
        problem.args.iterations = 3;
        expect_consistent(problem.args, Result(exec, problem.args));
      }
    }
  });
}

// Largest finite inputs are finite: the test for NaN must not overflow by itself.
// This is the CPU's own test for NaN.
TEST(KMeansOnCpu, LargestFiniteInputsAreFinite) {
  each_machine([](const Exec& exec) {
    Rows rows(DType::f32, 40, 40);
    for (int64_t i = 0; i < 1600; ++i) rows.set(i / 40, i % 40, std::numeric_limits<float>::max());
    EXPECT_TRUE(exec.kernels->all_within(rows.view(), all_rows(40).data(), 40, std::numeric_limits<float>::max()));
  });
}

TEST(KMeans, NoInt16CastPast32768Tokens) {
  each_machine([](const Exec& exec) {
    Random random(8);
    Problem problem(random, DType::bf16, 40'000, 8, 39'000, 8, 3);
    expect_step(exec, problem, problem.start(), Result(exec, problem.args));
  });
}

// The paper's counts, on all channels and on one of three subsets.
TEST(KMeans, PaperSizes) {
  const Exec exec = machines().back().with(pool(2));
  for (const int64_t depth : {128, 44}) {
    Random random(13);
    Problem problem(random, DType::bf16, 10'100, 128, 10'000, depth, depth == 128 ? 300 : 333);
    expect_step(exec, problem, problem.start(), Result(exec, problem.args));
  }
}

// One cluster over 200,000 points far from zero: plain f32 sums would drift by far more than the tolerance.
TEST(KMeans, NoNoiseInMeansPast160kTokens) {
  each_machine([](const Exec& exec) {
    const int64_t dim = testing_cuda() ? 8 : 1;
    const double step = testing_cuda() ? 0x1p-7 : 1e-3;  // what the inputs can hold
    Rows points(limits().finest, 200'000, dim);
    for (int64_t i = 0; i < 200'000 * dim; ++i) points.set(i / dim, i % dim, 1 + step * static_cast<double>(i / dim % 7));
    Random random(9);
    Problem problem(random, limits().finest, 1, dim, 1, dim, 1);
    const auto rows = all_rows(200'000);
    problem.args.points = points.view();
    problem.args.rows = rows.data();
    problem.args.count = problem.args.sample = 200'000;
    const Result ours(exec, problem.args);
    EXPECT_NEAR(ours.centroids[0], 1 + 3 * step, 1e-6);
  });
}

TEST(KMeans, Int32OffsetOverflowThroughStrides) {
  constexpr int64_t kTokens = 4, kDim = 40, kStride = (int64_t{1} << 30) + 24;
  Random random(10);
  Problem problem(random, DType::bf16, kTokens, kDim, kTokens, kDim, 2);
  const SparseMemory far(kTokens * kStride * 2);
  if (!far.ok()) GTEST_SKIP() << "no address space";
  KMeansArgs args = problem.args;
  args.points = {far.data(), DType::bf16, kTokens, kDim, kStride};
  for (int64_t t = 0; t < kTokens; ++t) {
    std::memcpy(const_cast<std::byte*>(args.points.row(t)), problem.args.points.row(t), kDim * 2);
  }
  each_machine([&](const Exec& exec) { EXPECT_TRUE(Result(exec, args).all() == Result(exec, problem.args).all()); });
}

TEST(KMeans, BroadcastRows) {
  each_machine([](const Exec& exec) {
    Random random(11);
    Problem problem(random, limits().finest, 60, 40, 60, 40, 7);
    problem.args.points.row_stride = 0;
    expect_step(exec, problem, problem.start(), Result(exec, problem.args));
  });
}

TEST(KMeans, WorkspaceTooSmallIsRefused) {
  const Exec exec = machines().front().with(pool(1));
  Random random(12);
  Problem problem(random, limits().finest, 60, 40, 60, 40, 7);
  GuardedScratch scratch(kmeans_scratch(exec, problem.args) - 64 * 4);
  problem.args.scratch = scratch_of(scratch);
  Guarded<float> centroids(7 * 40);
  Guarded<int32_t> labels(60), sizes(7), order(60);
  Guarded<int64_t> offsets(8);
  problem.args.centroids = centroids.data();
  problem.args.labels = labels.data();
  problem.args.sizes = sizes.data();
  problem.args.order = order.data();
  problem.args.offsets = offsets.data();
  EXPECT_THROW(run_kmeans(exec, problem.args), Error);
}

}  // namespace
}  // namespace scope::test
