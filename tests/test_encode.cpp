// encode against the float64 reference: codebooks and codes of every partition.
#include "cases.h"
#include "reference.h"
#include "stages/encode.h"

namespace scope::test {
namespace {

// Outputs and scratch between canaries, poisoned before the call.
struct Output {
  Guarded<float> codebooks;
  Guarded<int32_t> labels;
  Guarded<int64_t> empty;
  GuardedScratch scratch;
  EncodeArgs args;

  // `start`: codebooks of a warm start; empty: from random rows.
  Output(const Exec& exec, const EncodeArgs& problem, const std::vector<float>& start = {}, uint8_t poison = 0xff)
      : codebooks(problem.codes * problem.k.dim, poison),
        labels(static_cast<int64_t>(problem.partition->size()) * problem.count, poison),
        empty(static_cast<int64_t>(problem.partition->size()), poison),
        scratch(backend().encode_scratch(exec, sizes_of(problem)), poison),
        args(problem) {
    args.warm = !start.empty();
    std::copy(start.begin(), start.end(), codebooks.data());
    args.codebooks = codebooks.data();
    args.labels = labels.data();
    args.empty = empty.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(codebooks, labels, empty); }
};

struct Result : Output {
  Result(const Exec& exec, const EncodeArgs& problem, const std::vector<float>& start = {}, uint8_t poison = 0xff)
      : Output(exec, problem, start, poison) {
    run_encode(exec, {&args, 1});
  }
};

// Every channel once, in random order, cut at random places.
Partition random_partition(Random& random, int64_t dim, int64_t subspaces) {
  const auto channels = random.chance(0.5) ? all_rows(dim) : shuffled(random, dim);
  auto cuts = subset(random, dim - 1, subspaces - 1);
  for (auto& cut : cuts) ++cut;
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(static_cast<int32_t>(dim));
  Partition partition;
  for (size_t m = 0; m + 1 < cuts.size(); ++m)
    partition.emplace_back(channels.begin() + cuts[m], channels.begin() + cuts[m + 1]);
  return partition;
}

TEST(Encode, Differential) {
  each_case("encode", 2000, [](Case& at) {
    Random& random = at.random;
    const int64_t dim = at.tokens >= 1025 ? std::min<int64_t>(at.dim, 40) : at.dim;
    const int64_t count = random.chance(0.5) ? at.tokens : random.between(1, at.tokens);
    const Rows k(random, at.dtype, at.tokens, dim, 1);
    const auto rows = subset(random, at.tokens, count);
    const Partition partition = random_partition(random, dim, random.pick<int64_t>({1, 2, 3, 4, 8}));
    EncodeArgs args;
    args.k = k.view();
    args.rows = rows.data();
    args.count = args.sample = count;
    args.partition = &partition;
    args.codes = std::min(count, random.pick<int64_t>({1, 3, 16, 65}));
    args.iterations = 1;
    args.seed = static_cast<uint64_t>(random.below(1000));
    // Keys are tensor 1; each subspace has its own stream.
    std::vector<float> before, warm;
    std::vector<reference::Matrix> points;
    for (size_t m = 0; m < partition.size(); ++m) {
      const auto depth = static_cast<int64_t>(partition[m].size());
      points.push_back(reference::gather(args.k[0], args.rows, count, partition[m].data(), depth));
      const RandomStream random_rows{.seed = args.seed, .tensor = 1, .subspace = static_cast<uint32_t>(m)};
      const auto start = reference::start_rows(points.back(), args.codes, random_rows);
      before.insert(before.end(), start.data.begin(), start.data.end());
    }
    if (random.chance(0.3)) {
      for (float& x : before) x += static_cast<float>(0.1 * random.normal());
      warm = before;
    }
    const Result ours(at.exec, args, warm, at.poison);
    int64_t place = 0;  // where the codebook of subspace m begins
    for (size_t m = 0; m < partition.size(); ++m) {
      SCOPED_TRACE(fmt::format("subspace {}", m));
      const int64_t depth = points[m].columns;
      reference::Matrix codebook(before.data() + place, args.codes, depth);
      const reference::RoundedCentroids rounded(codebook, limits().centroid_rounding(at.exec, at.dtype));
      const int32_t* codes = ours.labels.data() + static_cast<int64_t>(m) * count;
      std::vector<int64_t> members(static_cast<size_t>(args.codes));
      for (int64_t j = 0; j < count; ++j) {
        ASSERT_TRUE(codes[j] >= 0 && codes[j] < args.codes);
        ++members[static_cast<size_t>(codes[j])];
        const double* x = points[m].row(j);
        const int32_t nearest = reference::nearest(x, codebook);
        const double best = reference::distance(x, codebook.row(nearest), depth);
        const double most = rounded.most(best, nearest, codes[j]);
        ASSERT_LE(reference::distance(x, codebook.row(codes[j]), depth), most + 1e-5 * (1 + best))
            << "key " << j << " got " << codes[j] << ", nearest " << nearest;
      }
      EXPECT_EQ(ours.empty[static_cast<int64_t>(m)], std::count(members.begin(), members.end(), 0));
      reference::update(points[m], {codes, codes + count}, codebook);
      for (int64_t i = 0; i < args.codes * depth; ++i) {
        const double want = codebook.data[static_cast<size_t>(i)];
        ASSERT_NEAR(ours.codebooks[place + i], want, limits().mean * std::max(1.0, std::abs(want)));
      }
      place += args.codes * depth;
    }
  });
}

// Reordering the channels of a subset reorders the columns of its codebook and nothing else.
TEST(Encode, ColumnsFollowTheSubsetsOrder) {
  each_machine([](const Exec& exec) {
    Random random(1);
    Rows k(random, limits().finest, 100, 8, 1);
    for (int64_t t = 0; t < 100; ++t) {  // integers: sums are exact in any order
      for (int64_t c = 0; c < 8; ++c) k.set(t, c, static_cast<double>(random.between(-9, 9)));
    }
    const Partition plain = {{0, 1, 2, 3}, {4, 5, 6, 7}}, turned = {{3, 1, 0, 2}, {4, 7, 6, 5}};
    const auto rows = all_rows(100);
    EncodeArgs args;
    args.k = k.view();
    args.rows = rows.data();
    args.count = args.sample = 100;
    args.codes = 10;
    args.iterations = 1;
    args.partition = &plain;
    const Result a(exec, args);
    args.partition = &turned;
    const Result b(exec, args);
    EXPECT_TRUE(a.labels.bytes() == b.labels.bytes());
    for (int64_t m = 0; m < 2; ++m) {
      for (int64_t i = 0; i < 40; ++i) {
        const auto channel = turned[static_cast<size_t>(m)][static_cast<size_t>(i % 4)] - 4 * m;
        EXPECT_EQ(b.codebooks[40 * m + i], a.codebooks[40 * m + i / 4 * 4 + channel]);
      }
    }
  });
}

TEST(Encode, EmptyCodesAndDuplicatePoints) {
  each_machine([](const Exec& exec) {
    Random random(2);
    Rows k(random, DType::bf16, 70, 40, 1);
    for (int64_t t = 2; t < 70; ++t) k.copy_row(t, t % 2);
    const Partition partition = random_partition(random, 40, 3);
    const auto rows = all_rows(70);
    EncodeArgs args;
    args.k = k.view();
    args.rows = rows.data();
    args.count = args.sample = 70;
    args.codes = 20;
    args.iterations = 5;
    args.partition = &partition;
    const Result ours(exec, args);
    for (int64_t m = 0; m < 3; ++m) EXPECT_EQ(ours.empty[m], 18);
  });
}

TEST(Encode, BitwiseOverThreadsAndRuns) {
  Random random(3);
  const Rows k(random, DType::bf16, 600, 40, 1);
  const Partition partition = random_partition(random, 40, 4);
  const auto rows = subset(random, 600, 550);
  EncodeArgs args;
  args.k = k.view();
  args.rows = rows.data();
  args.count = 550;
  args.sample = 200;
  args.codes = 30;
  args.iterations = 4;
  args.partition = &partition;
  expect_repeatable([&](const Exec& exec) { return Result(exec, args).all(); });
}

TEST(Encode, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(4);
  std::vector<Rows> k;
  const int64_t tokens = testing_cuda() ? 6000 : 600, dim = testing_cuda() ? 128 : 40;       // several blocks
  for (int h = 0; h < 3; ++h) k.emplace_back(random, DType::bf16, tokens, dim, 1, 2 * dim);  // side by side
  const Partition partition = random_partition(random, dim, 3);
  const auto rows = subset(random, tokens, tokens - 30);
  std::vector<EncodeArgs> heads;
  for (const Rows& head : k) {
    EncodeArgs& args = heads.emplace_back();
    args.k = head.view();
    args.rows = rows.data();
    args.count = tokens - 30;
    args.sample = tokens / 3;
    args.codes = tokens / 20;
    args.iterations = 4;
    args.partition = &partition;
  }
  expect_chunk_equals_heads<Output>(heads, run_encode);
}

// More blocks of tokens than a grid has in y or z.
// The CPU has no grid to overflow.
TEST(EncodeOnDevice, MoreTokensThanAGridHasInYAndZ) {
  Rows k(DType::bf16, kManyTokens, 8);
  for (int64_t t = 0; t < kManyTokens; ++t) {
    for (int64_t c = 0; c < 8; ++c) k.set(t, c, c == t % 3 || c == 4 + t % 2 ? 8 : 0);
  }
  const Partition partition = {{0, 1, 2, 3}, {4, 5, 6, 7}};
  const auto rows = all_rows(kManyTokens);
  EncodeArgs args;
  args.k = k.view();
  args.rows = rows.data();
  args.count = args.sample = kManyTokens;
  args.codes = 3;
  args.iterations = 1;
  args.partition = &partition;
  std::vector<float> start(24);
  for (size_t c = 0; c < 3; ++c) start[4 * c + c] = start[12 + 4 * c + c] = 7;
  const Result ours(machines().front().exec, args, start);
  for (int64_t t = 0; t < kManyTokens; ++t) {
    ASSERT_EQ(ours.labels[t], t % 3);
    ASSERT_EQ(ours.labels[kManyTokens + t], t % 2);
  }
  EXPECT_EQ(ours.empty[1], 1);
}

// The CPU looks before it encodes.
TEST(EncodeOnDevice, StatusSaysThatARowIsNotFinite) {
  each_machine([](const Exec& exec) {
    for (const double bad : {1e4, std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      for (const int64_t channel : {0, 17, 39}) {
        Random random(7);
        Rows k(random, DType::bf16, 200, 40, 1);
        k.set(77, channel, bad);
        const Partition partition = random_partition(random, 40, 5);
        const auto rows = all_rows(200);
        EncodeArgs args;
        args.k = k.view();
        args.rows = rows.data();
        args.count = 200;
        args.sample = 20;
        args.codes = 7;
        args.iterations = 3;
        args.partition = &partition;
        Guarded<uint32_t> status(1);
        status[0] = 4;
        args.status = status.data();
        const Result ours(exec, args);
        EXPECT_EQ(status[0], std::isfinite(bad) ? 4u : 5u) << bad;
        for (int64_t i = 0; i < ours.labels.size(); ++i) ASSERT_TRUE(ours.labels[i] >= 0 && ours.labels[i] < 7);
      }
    }
  });
}

TEST(Encode, WorkspaceTooSmallIsRefused) {
  const Exec exec = machines().front().with(pool(1));
  Random random(5);
  const Rows k(random, DType::bf16, 60, 40, 1);
  const Partition partition = random_partition(random, 40, 3);
  const auto rows = all_rows(60);
  EncodeArgs args;
  args.k = k.view();
  args.rows = rows.data();
  args.count = args.sample = 60;
  args.codes = 7;
  args.iterations = 1;
  args.partition = &partition;
  Output ours(exec, args);
  GuardedScratch scratch(ours.scratch.size() / 2);  // the size is a bound for any partition
  ours.args.scratch = scratch_of(scratch);
  EXPECT_THROW(run_encode(exec, {&ours.args, 1}), Error);
}

}  // namespace
}  // namespace scope::test
