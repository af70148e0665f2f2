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

TEST(Blocks, GroupDifferential) {
  each_case("group blocks", 500, [](Case& at) {
    const Shape shape(at);
    const int64_t dim = std::min<int64_t>(at.dim, 64);
    const Rows q(at.random, at.dtype, at.tokens, dim, 1);
    const auto rows = subset(at.random, at.tokens, shape.count);
    Guarded<float> centroids(shape.blocks * dim, at.poison), similarity(shape.blocks, at.poison);
    Guarded<int32_t> labels(at.tokens, at.poison), sizes(shape.blocks, at.poison), order(shape.count, at.poison);
    Guarded<int64_t> offsets(shape.blocks + 1, at.poison);
    GuardedScratch scratch(backend(at.exec).group_scratch(at.exec, shape.count, dim, shape.blocks), at.poison);
    GroupArgs args;
    args.q = q.view();
    args.rows = rows.data();
    args.count = shape.count;
    args.groups = shape.blocks;
    args.grouping = Grouping::blocks;
    args.block = shape.block;
    args.centroids = centroids.data();
    args.labels = labels.data();
    args.sizes = sizes.data();
    args.order = order.data();
    args.offsets = offsets.data();
    args.similarity = similarity.data();
    args.scratch = scratch_of(scratch);
    run_group(at.exec, {&args, 1});
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
    const int64_t dim = std::min<int64_t>(at.dim, 64);
    const Rows k(random, at.dtype, at.tokens, dim, 1);
    const auto rows = subset(random, at.tokens, shape.count);
    const auto channels = shuffled(random, dim);
    Partition partition = {channels};
    if (dim > 1 && random.chance(0.3))
      partition = {{channels.begin(), channels.begin() + 1}, {channels.begin() + 1, channels.end()}};
    const auto subspaces = static_cast<int64_t>(partition.size());
    Guarded<float> codebooks(shape.blocks * dim, at.poison), similarity(shape.blocks, at.poison);
    Guarded<int32_t> labels(subspaces * shape.count, at.poison);
    Guarded<int64_t> empty(subspaces, at.poison);
    GuardedScratch scratch(backend(at.exec).encode_scratch(at.exec, shape.count, dim, shape.blocks), at.poison);
    EncodeArgs args;
    args.k = k.view();
    args.rows = rows.data();
    args.count = shape.count;
    args.partition = &partition;
    args.codes = shape.blocks;
    args.encoding = Encoding::blocks;
    args.block = shape.block;
    args.codebooks = codebooks.data();
    args.labels = labels.data();
    args.empty = empty.data();
    args.similarity = similarity.data();
    args.scratch = scratch_of(scratch);
    run_encode(at.exec, {&args, 1});
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

}  // namespace
}  // namespace scope::test
