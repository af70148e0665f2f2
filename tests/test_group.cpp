// group against the float64 reference: K-means and raster groups, row subsets, and what is not grouped.
#include "cases.h"
#include "reference.h"
#include "stages/group.h"

namespace scope::test {
namespace {

// Outputs and scratch between canaries, poisoned before the call.
struct Output {
  Guarded<float> centroids;
  Guarded<int32_t> labels, sizes, order;
  Guarded<int64_t> offsets;
  GuardedScratch scratch;
  GroupArgs args;

  // `start`: centroids of a warm start; empty: from random rows.
  Output(const Exec& exec, const GroupArgs& problem, const std::vector<float>& start = {}, uint8_t poison = 0xff)
      : centroids(problem.groups * problem.q.dim, poison),
        labels(problem.q.tokens, poison),
        sizes(problem.groups, poison),
        order(problem.count, poison),
        offsets(problem.groups + 1, poison),
        scratch(backend().group_scratch(exec, sizes_of(problem)), poison),
        args(problem) {
    args.warm = !start.empty();
    std::copy(start.begin(), start.end(), centroids.data());
    args.centroids = centroids.data();
    args.labels = labels.data();
    args.sizes = sizes.data();
    args.order = order.data();
    args.offsets = offsets.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(centroids, labels, sizes, order, offsets); }
};

struct Result : Output {
  Result(const Exec& exec, const GroupArgs& problem, const std::vector<float>& start = {}, uint8_t poison = 0xff)
      : Output(exec, problem, start, poison) {
    run_group(exec, {&args, 1});
  }
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
  reference::update(reference::gather(args.q[0], args.rows, args.count, nullptr, args.q.dim), labels, centroids);
  for (int64_t i = 0; i < args.groups * args.q.dim; ++i) {
    const double want = centroids.data[static_cast<size_t>(i)];
    ASSERT_NEAR(ours.centroids[i], want, limits().mean * std::max(1.0, std::abs(want))) << "centroid element " << i;
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
    const auto points = reference::gather(args.q[0], args.rows, count, nullptr, dim);
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
    const reference::RoundedCentroids rounded(centroids, limits().centroid_rounding(at.exec, at.dtype));
    for (int64_t i = 0; i < count; ++i) {
      const double* x = points.row(i);
      const int32_t label = ours.labels[rows[static_cast<size_t>(i)]], nearest = reference::nearest(x, centroids);
      const double best = reference::distance(x, centroids.row(nearest), dim);
      const double most = rounded.most(best, nearest, label);
      ASSERT_LE(reference::distance(x, centroids.row(label), dim), most + 1e-5 * (1 + best))
          << "row " << i << " got " << label << ", nearest " << nearest;
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
    const Rows q(random, limits().finest, 1000, 40, 1);
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

TEST(Group, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(4);
  std::vector<Rows> q;
  const int64_t tokens = testing_cuda() ? 6000 : 600, dim = testing_cuda() ? 128 : 40;       // several blocks
  for (int h = 0; h < 3; ++h) q.emplace_back(random, DType::bf16, tokens, dim, 1, 2 * dim);  // side by side
  const auto rows = subset(random, tokens, tokens - 30);
  for (const Grouping grouping : {Grouping::kmeans, Grouping::raster}) {
    std::vector<GroupArgs> heads;
    for (const Rows& head : q) {
      GroupArgs& args = heads.emplace_back();
      args.q = head.view();
      args.rows = rows.data();
      args.count = tokens - 30;
      args.sample = tokens / 3;
      args.groups = tokens / 20;
      args.grouping = grouping;
      args.iterations = 4;
    }
    expect_chunk_equals_heads<Output>(heads, run_group);
  }
}

// More blocks of tokens than a grid has in y or z.
// The CPU has no grid to overflow.
TEST(GroupOnDevice, MoreTokensThanAGridHasInYAndZ) {
  Random random(5);
  Rows q(DType::bf16, kManyTokens, 8);
  for (int64_t t = 0; t < kManyTokens; ++t) {
    for (int64_t c = 0; c < 8; ++c) q.set(t, c, c == t % 3 ? 8 : 0);
  }
  const auto rows = all_rows(kManyTokens);
  GroupArgs args;
  args.q = q.view();
  args.rows = rows.data();
  args.count = args.sample = kManyTokens;
  args.groups = 3;
  args.iterations = 1;
  std::vector<float> start(24);
  for (size_t c = 0; c < 3; ++c) start[8 * c + c] = 7;
  const Result ours(machines().front().exec, args, start);
  for (int64_t t = 0; t < kManyTokens; ++t) ASSERT_EQ(ours.labels[t], t % 3);
  for (int64_t i = 0; i < kManyTokens; ++i)
    ASSERT_EQ(ours.order[i] % 3, i < ours.offsets[1] ? 0 : i < ours.offsets[2] ? 1 : 2);
  for (int64_t i = 0; i < 24; ++i) ASSERT_EQ(ours.centroids[i], i / 8 == i % 8 ? 8 : 0);
}

// Every point starts as a centroid: a label is the point itself, or one that rounding cannot tell from it.
// The CPU has no grid to overflow.
TEST(GroupOnDevice, MoreGroupsThanAGridHasInYAndZ) {
  Random random(8);
  const Rows q(random, DType::f16, kManyGroups, 16, 1);
  const auto rows = all_rows(kManyGroups);
  const auto points = reference::gather(q.view(), nullptr, kManyGroups, nullptr, 16);
  const std::vector<float> start(points.data.begin(), points.data.end());
  const reference::RoundedCentroids rounded(points, limits().centroid_rounding(machines().front().exec, DType::f16));
  GroupArgs args;
  args.q = q.view();
  args.rows = rows.data();
  args.count = args.sample = args.groups = kManyGroups;
  args.iterations = 1;
  for (const Grouping grouping : {Grouping::kmeans, Grouping::raster}) {
    args.grouping = grouping;
    const Result ours(machines().front().exec, args, start);
    std::vector<int32_t> sizes(kManyGroups);
    for (int32_t t = 0; t < kManyGroups; ++t) {
      const int32_t label = ours.labels[t];
      ASSERT_TRUE(label >= 0 && label < kManyGroups && (grouping == Grouping::kmeans || label == t));
      ++sizes[static_cast<size_t>(label)];
      ASSERT_LE(reference::distance(points.row(t), points.row(label), 16), rounded.most(0, t, label) + 1e-5) << t;
    }
    for (int64_t c = 0; c < kManyGroups; ++c) {
      ASSERT_EQ(ours.sizes[c], sizes[static_cast<size_t>(c)]);
      ASSERT_EQ(ours.offsets[c + 1] - ours.offsets[c], ours.sizes[c]);
      for (int64_t i = ours.offsets[c]; i < ours.offsets[c + 1]; ++i) ASSERT_EQ(ours.labels[ours.order[i]], c);
    }
  }
}

// The CPU looks before it groups.
TEST(GroupOnDevice, StatusSaysThatARowIsNotFinite) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const double bad : {1e4, std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        for (const bool listed : {true, false}) {
          Random random(7);
          Rows q(random, dtype, 200, 40, 1);
          const auto rows = subset(random, 200, 150);
          const int32_t outside = *std::find_if(rows.begin(), rows.end(), [&](int32_t t) {
            return !std::binary_search(rows.begin(), rows.end(), t + 1);
          }) + 1;
          q.set(listed ? rows[77] : outside, 39, bad);
          GroupArgs args;
          args.q = q.view();
          args.rows = rows.data();
          args.count = 150;
          args.sample = 20;
          args.groups = 7;
          args.iterations = 3;
          Guarded<uint32_t> status(1);
          status[0] = 4;
          args.status = status.data();
          const Result ours(exec, args);
          EXPECT_EQ(status[0], listed && !std::isfinite(bad) ? 5u : 4u) << bad;
        }
      }
    }
  });
}

TEST(Group, WorkspaceTooSmallIsRefused) {
  const Exec exec = machines().front().with(pool(1));
  Random random(6);
  const Rows q(random, DType::bf16, 60, 40, 1);
  const auto rows = all_rows(60);
  GroupArgs args;
  args.q = q.view();
  args.rows = rows.data();
  args.count = args.sample = 60;
  args.groups = 7;
  args.iterations = 1;
  Output ours(exec, args);
  GuardedScratch scratch(ours.scratch.size() - 64 * 4);
  ours.args.scratch = scratch_of(scratch);
  EXPECT_THROW(run_group(exec, {&ours.args, 1}), Error);
}

}  // namespace
}  // namespace scope::test
