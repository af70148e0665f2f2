// group against the float64 reference: K-means and raster groups, row subsets, and what is not grouped.
#include "cases.h"
#include "reference.h"
#include "stages/group.h"

namespace scope::test {
namespace {

struct Result {
  Guarded<float> centroids;
  Guarded<int32_t> labels, sizes, order;
  Guarded<int64_t> offsets;

  Result(const Exec& exec, const GroupArgs& problem, const std::vector<float>& start = {}, uint8_t poison = 0xff)
      : centroids(problem.groups * problem.q.dim, poison),
        labels(problem.q.tokens, poison),
        sizes(problem.groups, poison),
        order(problem.count, poison),
        offsets(problem.groups + 1, poison) {
    GroupArgs args = problem;
    GuardedScratch scratch(cpu::group_scratch(exec, args.count, args.q.dim, args.groups), poison);
    args.warm = !start.empty();
    std::copy(start.begin(), start.end(), centroids.data());
    args.centroids = centroids.data();
    args.labels = labels.data();
    args.sizes = sizes.data();
    args.order = order.data();
    args.offsets = offsets.data();
    args.scratch = scratch_of(scratch);
    cpu::group(exec, args);
  }
  std::vector<float> centres() const { return {centroids.data(), centroids.data() + centroids.size()}; }
  std::vector<uint8_t> all() const { return joined_bytes(centroids, labels, sizes, order, offsets); }
};

// Labels, sizes, order (in tokens) and offsets agree; tokens outside the rows have label -1; centroids are means.
void expect_groups(const GroupArgs& args, const Result& ours, const std::vector<float>& before) {
  const std::vector<int32_t> rows(args.rows, args.rows + args.count);
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < args.q.tokens; ++t) {
    if (std::binary_search(rows.begin(), rows.end(), t)) {
      ASSERT_TRUE(ours.labels[t] >= 0 && ours.labels[t] < args.groups) << "token " << t;
      labels.push_back(ours.labels[t]);
    } else {
      ASSERT_EQ(ours.labels[t], -1) << "token " << t << " is not grouped";
    }
  }
  std::vector<int32_t> order;
  for (int32_t c = 0; c < args.groups; ++c) {
    ASSERT_EQ(ours.offsets[c], static_cast<int64_t>(order.size()));
    for (const int32_t token : rows) {
      if (ours.labels[token] == c) order.push_back(token);
    }
    ASSERT_EQ(ours.sizes[c], static_cast<int64_t>(order.size()) - ours.offsets[c]);
  }
  ASSERT_EQ(ours.offsets[args.groups], args.count);
  ASSERT_EQ(order, std::vector<int32_t>(ours.order.data(), ours.order.data() + args.count));

  reference::Matrix centroids(before.data(), args.groups, args.q.dim);
  reference::update(reference::gather(args.q, args.rows, args.count, nullptr, args.q.dim), labels, centroids);
  for (int64_t i = 0; i < args.groups * args.q.dim; ++i) {
    const double want = centroids.data[static_cast<size_t>(i)];
    ASSERT_NEAR(ours.centroids[i], want, 4e-6 * std::max(1.0, std::abs(want))) << "centroid element " << i;
  }
}

TEST(Group, Differential) {
  each_case("group", 2000, [](Case& at) {
    Random& random = at.random;
    const int64_t dim = at.tokens >= 1025 ? std::min<int64_t>(at.dim, 64) : at.dim;
    const int64_t count = random.chance(0.5) ? at.tokens : random.between(1, at.tokens);
    const Rows q(random, at.dtype, at.tokens, dim, 1);
    const auto rows = subset(random, at.tokens, count);
    GroupArgs args;
    args.q = q.view();
    args.rows = rows.data();
    args.count = count;
    args.groups = std::min(count, random.pick<int64_t>({1, 3, 16, 65, count}));
    args.grouping = random.chance(0.4) ? Grouping::raster : Grouping::kmeans;
    args.iterations = 1;
    args.sample = count;
    args.seed = static_cast<uint64_t>(random.below(1000));
    const auto points = reference::gather(args.q, args.rows, count, nullptr, dim);
    // The stream of queries is tensor 0, subspace 0.
    const auto start = reference::start_rows(points, args.groups, {.seed = args.seed});
    std::vector<float> before(start.data.begin(), start.data.end()), warm;
    if (random.chance(0.3)) {
      for (float& x : before) x += static_cast<float>(0.1 * random.normal());
      warm = before;
    }
    const Result ours(at.exec, args, warm, at.poison);
    expect_groups(args, ours, before);
    if (args.grouping == Grouping::raster) {
      for (int64_t c = 0; c < args.groups; ++c) {
        ASSERT_TRUE(ours.sizes[c] == count / args.groups || ours.sizes[c] == ceil_div(count, args.groups));
      }
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(ours.order[i], rows[static_cast<size_t>(i)]);
      return;
    }
    const reference::Matrix centroids(before.data(), args.groups, dim);
    for (int64_t i = 0; i < count; ++i) {
      const double* x = points.row(i);
      const double got = reference::distance(x, centroids.row(ours.labels[rows[static_cast<size_t>(i)]]), dim);
      const double best = reference::distance(x, centroids.row(reference::nearest(x, centroids)), dim);
      ASSERT_LE(got, best + 1e-5 * (1 + best)) << "row " << i;
    }
  });
}

// A video sample and the same sample between text tokens: the same groups, whatever the tokens around them hold.
TEST(Group, TokensOutsideTheRowsDoNotMatter) {
  each_machine([](const Exec& exec) {
    for (const Grouping grouping : {Grouping::kmeans, Grouping::raster}) {
      Random random(1);
      Rows wide(random, DType::bf16, 90, 64, 1), narrow(DType::bf16, 60, 64);
      std::vector<int32_t> rows;
      for (int32_t t = 0; t < 90; ++t) {
        if (t >= 10 && t < 70) {
          rows.push_back(t);
          narrow.copy_row(t - 10, wide.view(), t);
        } else {
          for (int64_t c = 0; c < 64; ++c) wide.set(t, c, std::nan(""));
        }
      }
      const auto all = all_rows(60);
      GroupArgs args;
      args.q = wide.view();
      args.rows = rows.data();
      args.count = args.sample = 60;
      args.groups = 7;
      args.grouping = grouping;
      args.iterations = 3;
      const Result a(exec, args);
      args.q = narrow.view();
      args.rows = all.data();
      const Result b(exec, args);
      EXPECT_TRUE(joined_bytes(a.centroids, a.sizes, a.offsets) == joined_bytes(b.centroids, b.sizes, b.offsets));
      for (int64_t t = 0; t < 60; ++t) EXPECT_EQ(a.labels[t + 10], b.labels[t]);
    }
  });
}

TEST(Group, LabelMinusOneIsNeverUsedAsAnIndex) {
  each_machine([](const Exec& exec) {
    Random random(2);
    const Rows q(random, DType::f32, 1000, 40, 1);
    const std::vector<int32_t> rows = {999};
    GroupArgs args;
    args.q = q.view();
    args.rows = rows.data();
    args.count = args.groups = 1;
    args.iterations = 2;
    for (const Grouping grouping : {Grouping::kmeans, Grouping::raster}) {
      args.grouping = grouping;
      const Result ours(exec, args);
      for (int64_t t = 0; t < 1000; ++t) ASSERT_EQ(ours.labels[t], t == 999 ? 0 : -1);
      EXPECT_EQ(ours.order[0], 999);
    }
  });
}

TEST(Group, BitwiseOverThreadsAndRuns) {
  Random random(3);
  const Rows q(random, DType::f16, 700, 40, 1);
  const auto rows = subset(random, 700, 600);
  GroupArgs args;
  args.q = q.view();
  args.rows = rows.data();
  args.count = args.sample = 600;
  args.groups = 31;
  args.iterations = 3;
  for (const Grouping grouping : {Grouping::kmeans, Grouping::raster}) {
    args.grouping = grouping;
    expect_repeatable([&](const Exec& exec) { return Result(exec, args).all(); });
  }
}

}  // namespace
}  // namespace scope::test
