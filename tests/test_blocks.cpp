// group and encode in raster blocks, against float64: offsets, means, codes and self-similarity.
#include "cases.h"
#include "reference.h"
#include "stages/encode.h"
#include "stages/group.h"

namespace scope::test {
namespace {

void expect_similarity(float ours, const reference::Matrix& rows, int64_t block) {
  if (rows.rows < block) {
    EXPECT_TRUE(std::isnan(ours)) << "a short block has none";
  } else {
    EXPECT_NEAR(ours, reference::self_similarity(rows), 1e-4);
  }
}

reference::Matrix rows_of(const RowsView& x, const std::vector<int32_t>& rows, int64_t begin, int64_t end) {
  return reference::gather(x, rows.data() + begin, end - begin, nullptr, x.dim);
}

std::vector<double> mean_of(const reference::Matrix& rows) {
  std::vector<double> mean(static_cast<size_t>(rows.columns));
  for (int64_t i = 0; i < rows.rows; ++i) {
    for (int64_t k = 0; k < rows.columns; ++k)
      mean[static_cast<size_t>(k)] += rows.row(i)[k] / static_cast<double>(rows.rows);
  }
  return mean;
}

struct Shape {
  int64_t count, block, blocks;
  Shape(Case& at)
      : count(at.random.chance(0.5) ? at.tokens : at.random.between(1, at.tokens)),
        block(at.random.pick<int64_t>({1, 3, 64, 128})),
        blocks(ceil_div(count, block)) {}
};

// Outputs and scratch between canaries, poisoned before the call.
struct Grouped {
  Guarded<float> centroids, similarity;
  Guarded<int32_t> labels, sizes, order;
  Guarded<int64_t> offsets;
  GuardedScratch scratch;
  GroupArgs args;

  Grouped(const Exec& exec, const GroupArgs& problem, uint8_t poison = 0xff)
      : centroids(problem.groups * problem.q.dim, poison),
        similarity(problem.groups, poison),
        labels(problem.q.tokens, poison),
        sizes(problem.groups, poison),
        order(problem.count, poison),
        offsets(problem.groups + 1, poison),
        scratch(backend().group_scratch(exec, sizes_of(problem)), poison),
        args(problem) {
    args.grouping = Grouping::blocks;
    args.centroids = centroids.data();
    args.labels = labels.data();
    args.sizes = sizes.data();
    args.order = order.data();
    args.offsets = offsets.data();
    args.similarity = similarity.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(centroids, similarity, labels, sizes, order, offsets); }
};

struct Encoded {
  Guarded<float> codebooks, similarity;
  Guarded<int32_t> labels;
  Guarded<int64_t> empty;
  GuardedScratch scratch;
  EncodeArgs args;

  Encoded(const Exec& exec, const EncodeArgs& problem, uint8_t poison = 0xff)
      : codebooks(problem.codes * problem.k.dim, poison),
        similarity(problem.codes, poison),
        labels(static_cast<int64_t>(problem.partition->size()) * problem.count, poison),
        empty(static_cast<int64_t>(problem.partition->size()), poison),
        scratch(backend().encode_scratch(exec, sizes_of(problem)), poison),
        args(problem) {
    args.encoding = Encoding::blocks;
    args.codebooks = codebooks.data();
    args.labels = labels.data();
    args.empty = empty.data();
    args.similarity = similarity.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(codebooks, similarity, labels, empty); }
};

GroupArgs group_of(const RowsView& q, const std::vector<int32_t>& rows, int64_t block) {
  const auto count = static_cast<int64_t>(rows.size());
  GroupArgs args;
  args.q = q;
  args.rows = rows.data();
  args.count = count;
  args.groups = ceil_div(count, block);
  args.block = block;
  return args;
}
EncodeArgs encode_of(const RowsView& k, const std::vector<int32_t>& rows, const Partition& partition, int64_t block) {
  const auto count = static_cast<int64_t>(rows.size());
  EncodeArgs args;
  args.k = k;
  args.rows = rows.data();
  args.count = count;
  args.partition = &partition;
  args.codes = ceil_div(count, block);
  args.block = block;
  return args;
}

TEST(Blocks, GroupDifferential) {
  each_case("group blocks", 500, [](Case& at) {
    const Shape shape(at);
    const int64_t dim = at.tokens >= 1025 ? std::min<int64_t>(at.dim, 64) : at.dim;
    const Rows q(at.random, at.dtype, at.tokens, dim, 1);
    const auto rows = subset(at.random, at.tokens, shape.count);
    Grouped ours(at.exec, group_of(q.view(), rows, shape.block), at.poison);
    run_group(at.exec, {&ours.args, 1});
    const auto& [centroids, similarity, labels, sizes, order, offsets, scratch, args] = ours;
    EXPECT_EQ(std::count(labels.data(), labels.data() + at.tokens, -1), at.tokens - shape.count);
    for (int64_t b = 0; b < shape.blocks; ++b) {
      const int64_t begin = b * shape.block, end = std::min(begin + shape.block, shape.count);
      ASSERT_EQ(offsets[b], begin);
      ASSERT_EQ(sizes[b], end - begin);
      for (int64_t i = begin; i < end; ++i) {
        ASSERT_EQ(order[i], rows[static_cast<size_t>(i)]);
        ASSERT_EQ(labels[order[i]], b);
      }
      const auto members = rows_of(q.view(), rows, begin, end);
      const auto mean = mean_of(members);
      for (int64_t k = 0; k < dim; ++k) ASSERT_NEAR(centroids[b * dim + k], mean[static_cast<size_t>(k)], 1e-5);
      expect_similarity(similarity[b], members, shape.block);
    }
    EXPECT_EQ(offsets[shape.blocks], shape.count);
  });
}

TEST(Blocks, EncodeDifferential) {
  each_case("encode blocks", 500, [](Case& at) {
    Random& random = at.random;
    const Shape shape(at);
    const int64_t dim = at.tokens >= 1025 ? std::min<int64_t>(at.dim, 64) : at.dim;
    const Rows k(random, at.dtype, at.tokens, dim, 1);
    const auto rows = subset(random, at.tokens, shape.count);
    const auto channels = shuffled(random, dim);
    Partition partition = {channels};
    if (dim > 1 && random.chance(0.3))
      partition = {{channels.begin(), channels.begin() + 1}, {channels.begin() + 1, channels.end()}};
    const auto subspaces = static_cast<int64_t>(partition.size());
    Encoded ours(at.exec, encode_of(k.view(), rows, partition, shape.block), at.poison);
    run_encode(at.exec, {&ours.args, 1});
    const auto& [codebooks, similarity, labels, empty, scratch, args] = ours;
    const auto centre = mean_of(rows_of(k.view(), rows, 0, shape.count));
    int64_t place = 0;
    for (int64_t m = 0; m < subspaces; ++m) {
      EXPECT_EQ(empty[m], 0);
      for (int64_t j = 0; j < shape.count; ++j) ASSERT_EQ(labels[m * shape.count + j], j / shape.block);
      for (int64_t b = 0; b < shape.blocks; ++b) {
        const auto mean = mean_of(rows_of(k.view(), rows, b * shape.block, std::min((b + 1) * shape.block, shape.count)));
        for (const int32_t channel : partition[static_cast<size_t>(m)]) {
          const auto at_channel = static_cast<size_t>(channel);
          ASSERT_NEAR(codebooks[place++], mean[at_channel] - centre[at_channel], 1e-5);
        }
      }
    }
    for (int64_t b = 0; b < shape.blocks && shape.count > 1; ++b) {  // a single key less its mean has no direction
      auto members = rows_of(k.view(), rows, b * shape.block, std::min((b + 1) * shape.block, shape.count));
      for (int64_t i = 0; i < members.rows; ++i) {
        for (int64_t c = 0; c < dim; ++c) members.row(i)[c] -= centre[static_cast<size_t>(c)];
      }
      expect_similarity(similarity[b], members, shape.block);
    }
  });
}

TEST(Blocks, BitwiseOverThreadsAndRuns) {
  Random random(3);
  const Rows x(random, DType::bf16, 1100, 40, 1);
  const auto rows = subset(random, 1100, 1000);
  const Partition partition = {all_rows(40)};
  expect_repeatable([&](const Exec& exec) {
    Grouped groups(exec, group_of(x.view(), rows, 64));
    run_group(exec, {&groups.args, 1});
    Encoded codes(exec, encode_of(x.view(), rows, partition, 128));
    run_encode(exec, {&codes.args, 1});
    auto all = groups.all();
    const auto more = codes.all();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  });
}

TEST(Blocks, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(4);
  std::vector<Rows> x;
  for (int h = 0; h < 3; ++h) x.emplace_back(random, DType::bf16, 600, 40, 1, 2 * 40);  // side by side
  const auto rows = subset(random, 600, 570);
  const Partition partition = {shuffled(random, 40)};
  std::vector<GroupArgs> groups;
  std::vector<EncodeArgs> codes;
  for (const Rows& head : x) {
    groups.push_back(group_of(head.view(), rows, 64));
    codes.push_back(encode_of(head.view(), rows, partition, 128));
  }
  expect_chunk_equals_heads<Grouped>(groups, run_group);
  expect_chunk_equals_heads<Encoded>(codes, run_encode);
}

// Rows that are alike count as 1, opposite pairs as 0; a row of zeros, and a short block, have no direction.
TEST(Blocks, SimilarityOfKnownRows) {
  each_machine([](const Exec& exec) {
    Rows q(DType::bf16, 14, 8);
    for (int64_t t = 0; t < 14; ++t) {
      const double sign = t >= 4 && t % 2 == 1 ? -1 : 1;
      for (int64_t c = 0; c < 8; ++c) q.set(t, c, t == 9 ? 0 : sign * static_cast<double>((t + 1) * (c + 1)));
    }
    const auto rows = all_rows(14);
    Grouped ours(exec, group_of(q.view(), rows, 4));
    run_group(exec, {&ours.args, 1});
    EXPECT_NEAR(ours.similarity[0], 1, 1e-6);
    EXPECT_NEAR(ours.similarity[1], 0, 1e-6);
    EXPECT_TRUE(std::isnan(ours.similarity[2]));
    EXPECT_TRUE(std::isnan(ours.similarity[3]));
  });
}

// The CPU looks before it groups. Rows that are not finite are left out of the means, and their block is not similar.
TEST(BlocksOnDevice, RowsThatAreNotFiniteAreLeftOut) {
  each_machine([](const Exec& exec) {
    for (const double bad : {1e4, std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      Random random(7);
      Rows x(random, DType::bf16, 200, 40, 1);
      const auto rows = subset(random, 200, 150);
      const Partition partition = {all_rows(40)};
      for (int64_t i = 64; i < 128; ++i) x.set(rows[static_cast<size_t>(i)], 39, bad);  // all of the second block
      x.set(rows[3], 0, bad);
      const bool finite = std::isfinite(bad);
      Guarded<uint32_t> status(1);
      status[0] = 4;
      Grouped groups(exec, group_of(x.view(), rows, 64));
      groups.args.status = status.data();
      run_group(exec, {&groups.args, 1});
      EXPECT_EQ(status[0], finite ? 4u : 5u) << bad;
      status[0] = 4;
      Encoded codes(exec, encode_of(x.view(), rows, partition, 64));
      codes.args.status = status.data();
      run_encode(exec, {&codes.args, 1});
      EXPECT_EQ(status[0], finite ? 4u : 5u) << bad;
      for (int64_t i = 0; i < 3 * 40; ++i)
        ASSERT_TRUE(std::isfinite(groups.centroids[i]) && std::isfinite(codes.codebooks[i]));
      for (int64_t b = 0; b < 2; ++b) {
        EXPECT_EQ(std::isnan(groups.similarity[b]), !finite);
        EXPECT_EQ(std::isnan(codes.similarity[b]), !finite);
      }
      if (finite) continue;
      double mean = 0;
      for (int64_t i = 0; i < 64; ++i) {
        if (i != 3) mean += reference::element(x.view(), rows[static_cast<size_t>(i)], 1) / 63;
      }
      EXPECT_NEAR(groups.centroids[1], mean, 1e-5);
      EXPECT_EQ(groups.centroids[41], 0);
    }
  });
}

}  // namespace
}  // namespace scope::test
