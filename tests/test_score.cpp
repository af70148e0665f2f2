// score against the float64 reference: tables, and proxy rows from codes or from the keys themselves.
#include "cases.h"
#include "reference.h"
#include "stages/score.h"

namespace scope::test {
namespace {

std::vector<float> normals(Random& random, int64_t n) {
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(static_cast<float>(random.normal()));
  return out;
}

// Channels in random order, dealt to the subspaces one by one.
Partition dealt(Random& random, int64_t dim, int64_t subspaces) {
  Partition partition(static_cast<size_t>(subspaces));
  for (const int32_t channel : shuffled(random, dim)) partition[static_cast<size_t>(channel % subspaces)].push_back(channel);
  return partition;
}

int64_t buffer_of(const Exec& exec, int64_t dim) { return exec.device != nullptr ? 0 : cpu::score_rows_buffer(exec, dim); }

// All rows of the proxy, asked for in blocks of `height`; the space between rows keeps its poison.
void expect_rows(const Exec& exec, const Proxy& proxy, int64_t height, double tolerance) {
  const int64_t stride = proxy.count + 3;
  for (int64_t first = 0; first < proxy.groups; first += height) {
    const int64_t n = std::min(height, proxy.groups - first);
    Guarded<float> out(n * stride), buffer(buffer_of(exec, proxy.k.dim));
    run_score_rows(exec, proxy, first, n, out.data(), stride, buffer.data());
    for (int64_t i = 0; i < n; ++i) {
      const auto want = reference::score_row(proxy, first + i);
      for (int64_t j = 0; j < proxy.count; ++j) {
        ASSERT_NEAR(out[i * stride + j], want[static_cast<size_t>(j)], tolerance) << "group " << first + i << " key " << j;
      }
      for (int64_t j = proxy.count; j < stride; ++j) ASSERT_TRUE(std::isnan(out[i * stride + j])) << "past the row";
    }
  }
}

// Centroids of the exact proxy are numbers of its keys' type.
std::vector<float> rounded_normals(Random& random, int64_t count, DType dtype) {
  auto x = normals(random, count);
  for (float& each : x) each = static_cast<float>(reference::rounded(static_cast<double>(each), dtype));
  return x;
}

TEST(Score, Differential) {
  each_case("score", 3000, [](Case& at) {
    Random& random = at.random;
    const int64_t count = random.chance(0.5) ? at.tokens : random.between(1, at.tokens);
    const int64_t groups = random.between(1, at.tokens >= 1025 ? 3 : 30), codes = random.pick<int64_t>({1, 7, 16, 70});
    const Partition partition = dealt(random, at.dim, random.pick<int64_t>({1, 2, 3, 4, 8}));
    const auto centroids = rounded_normals(random, groups * at.dim, at.dtype), codebooks = normals(random, codes * at.dim);
    const auto subspaces = static_cast<int64_t>(partition.size());
    ScoreArgs args;
    args.centroids = centroids.data();
    args.groups = groups;
    args.dim = at.dim;
    args.partition = &partition;
    args.codebooks = codebooks.data();
    args.codes = codes;
    args.scale = 1 / std::sqrt(static_cast<float>(at.dim));
    Guarded<float> tables(groups * subspaces * codes, at.poison);
    args.tables = tables.data();
    run_score(at.exec, {&args, 1});
    const auto want = reference::tables(args);
    for (int64_t i = 0; i < tables.size(); ++i) {
      const double x = want[static_cast<size_t>(i)];
      ASSERT_NEAR(tables[i], x, limits().table * (1 + std::abs(x))) << "table entry " << i;
    }

    const auto rows = subset(random, at.tokens, count);
    std::vector<int32_t> labels;
    for (int64_t i = 0; i < subspaces * count; ++i) labels.push_back(static_cast<int32_t>(random.below(codes)));
    Proxy proxy;
    proxy.groups = groups;
    proxy.count = count;
    proxy.scale = args.scale;
    proxy.centroids = centroids.data();
    proxy.rows = rows.data();
    proxy.k = RowsView{nullptr, at.dtype, at.tokens, at.dim, at.dim};
    const int64_t height = random.between(1, kScoreRows);
    if (random.chance(0.5)) {
      proxy.kind = ProxyKind::exact;
      const Rows k(random, at.dtype, at.tokens, at.dim, 1);
      proxy.k = k.view();
      expect_rows(at.exec, proxy, height, limits().score);
    } else {
      proxy.subspaces = subspaces;
      proxy.codes = codes;
      proxy.tables = tables.data();
      proxy.labels = labels.data();
      expect_rows(at.exec, proxy, height, 2e-6);
    }
  });
}

// Codes that reproduce the keys exactly make both proxies one.
TEST(Score, ExactCodesEqualTheExactProxy) {
  each_machine([](const Exec& exec) {
    Random random(1);
    constexpr int64_t kKeys = 70, kDim = 40, kGroups = 5;
    const Rows k(random, limits().finest, kKeys, kDim, 1);
    const Partition partition = dealt(random, kDim, 3);
    const auto centroids = normals(random, kGroups * kDim);
    std::vector<float> codebooks;
    std::vector<int32_t> labels;
    for (const auto& channels : partition) {
      const auto columns =
          reference::gather(k.view(), nullptr, kKeys, channels.data(), static_cast<int64_t>(channels.size()));
      codebooks.insert(codebooks.end(), columns.data.begin(), columns.data.end());
      for (int32_t j = 0; j < kKeys; ++j) labels.push_back(j);
    }
    Guarded<float> tables(kGroups * 3 * kKeys);
    const ScoreArgs args{1, centroids.data(), kGroups, kDim, &partition, codebooks.data(), kKeys, 0.25f, tables.data()};
    run_score(exec, {&args, 1});
    const auto rows = all_rows(kKeys);
    Proxy codes{ProxyKind::codes, kGroups, kKeys, 0.25f,         centroids.data(), k.view(),
                rows.data(),      3,       kKeys, tables.data(), labels.data()};
    Proxy exact = codes;
    exact.kind = ProxyKind::exact;
    expect_rows(exec, codes, kGroups, 2e-6);
    expect_rows(exec, exact, kGroups, limits().score);
    for (int64_t c = 0; c < kGroups; ++c) {
      const auto a = reference::score_row(codes, c), b = reference::score_row(exact, c);
      for (size_t j = 0; j < a.size(); ++j) ASSERT_NEAR(a[j], b[j], std::max(1e-5, limits().table));
    }
  });
}

TEST(Score, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(5);
  struct Output {
    Guarded<float> tables;
    ScoreArgs args;
    Output(const Exec&, const ScoreArgs& problem) : tables(problem.groups * 3 * problem.codes), args(problem) {
      args.tables = tables.data();
    }
    std::vector<uint8_t> all() const { return tables.bytes(); }
  };
  const Partition partition = dealt(random, 40, 3);
  std::vector<std::vector<float>> centroids, codebooks;
  std::vector<ScoreArgs> heads;
  for (int h = 0; h < 3; ++h) centroids.push_back(normals(random, 70 * 40)), codebooks.push_back(normals(random, 33 * 40));
  for (size_t h = 0; h < 3; ++h) {
    heads.push_back({1, centroids[h].data(), 70, 40, &partition, codebooks[h].data(), 33, 0.25f, nullptr});
  }
  expect_chunk_equals_heads<Output>(heads, run_score);
}

TEST(Score, MoreGroupsThanAGridHasInYAndZ) {
  Random random(7);
  const Partition partition = {{0, 2, 4, 6}, {1, 3, 5, 7}};
  const auto centroids = normals(random, kManyGroups * 8), codebooks = normals(random, 3 * 8);
  Guarded<float> tables(kManyGroups * 2 * 3);
  const ScoreArgs args{1, centroids.data(), kManyGroups, 8, &partition, codebooks.data(), 3, 0.25f, tables.data()};
  run_score(machines().front().with(pool(2)), {&args, 1});
  const auto want = reference::tables(args);
  for (int64_t i = 0; i < tables.size(); ++i) {
    const double x = want[static_cast<size_t>(i)];
    ASSERT_NEAR(tables[i], x, limits().table * (1 + std::abs(x))) << "table entry " << i;
  }
}

TEST(Score, BitwiseOverThreadsAndRuns) {
  Random random(6);
  const Partition partition = dealt(random, 40, 3);
  const auto centroids = normals(random, 70 * 40), codebooks = normals(random, 33 * 40);
  expect_repeatable([&](const Exec& exec) {
    Guarded<float> tables(70 * 3 * 33);
    const ScoreArgs args{1, centroids.data(), 70, 40, &partition, codebooks.data(), 33, 0.25f, tables.data()};
    run_score(exec, {&args, 1});
    return tables.bytes();
  });
}

TEST(Score, NanInKeysOutsideTheRowsNeverLeaks) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      Random random(2);
      Rows k(random, dtype, 200, 40, 1);
      const auto rows = subset(random, 200, 77);
      for (int64_t t = 0; t < 200; ++t) {
        if (!std::binary_search(rows.begin(), rows.end(), t)) {
          for (int64_t c = 0; c < 40; ++c) k.set(t, c, std::nan(""));
        }
      }
      const auto centroids = rounded_normals(random, 3 * 40, dtype);
      const Proxy proxy{ProxyKind::exact, 3, 77, 0.2f, centroids.data(), k.view(), rows.data(), 0, 0, nullptr, nullptr};
      expect_rows(exec, proxy, 3, limits().score);
    }
  });
}

// A row's bits must not depend on the block it was computed in: threads cut the groups differently.
TEST(Score, RowsAreBitwiseTheSameInAnyBlock) {
  each_machine([](const Exec& exec) {
    Random random(3);
    const Rows k(random, DType::bf16, 150, 80, 1);
    const auto rows = all_rows(150);
    const auto centroids = rounded_normals(random, kScoreRows * 80, DType::bf16);
    const Proxy proxy{ProxyKind::exact, kScoreRows, 150, 0.1f,    centroids.data(), k.view(),
                      rows.data(),      0,          0,   nullptr, nullptr};
    Guarded<float> whole(kScoreRows * 150), buffer(buffer_of(exec, 80));
    run_score_rows(exec, proxy, 0, kScoreRows, whole.data(), 150, buffer.data());
    for (int64_t height = 1; height < kScoreRows; ++height) {
      Guarded<float> part(height * 150);
      run_score_rows(exec, proxy, kScoreRows - height, height, part.data(), 150, buffer.data());
      ASSERT_EQ(std::memcmp(part.data(), whole.data() + (kScoreRows - height) * 150, static_cast<size_t>(height * 600)), 0);
    }
  });
}

// Every stage reads its inputs through load_rows. The row ends where the page does: one byte more is a fault.
// This is the CPU's own loader.
TEST(ScoreOnCpu, LoadRowsZeroesItsPaddingAndReadsNothingPastTheRow) {
  const int64_t page = 65'536;
  const SparseMemory memory(2 * page);
  ASSERT_TRUE(memory.ok() && mprotect(static_cast<std::byte*>(memory.data()) + page, page, PROT_NONE) == 0);
  each_machine([&](const Exec& exec) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const int64_t dim : {1, 7, 8, 15, 16, 17, 40, 80, 255, 256}) {
        std::byte* row = static_cast<std::byte*>(memory.data()) + page - dim * dtype_bytes(dtype);
        for (int64_t c = 0; c < dim; ++c) put(row, dtype, c, static_cast<double>(c + 1));
        const RowsView view{row, dtype, 1, dim, dim};
        const int64_t padded = round_up(dim, cpu::kLanes);
        Guarded<float> out(padded);
        exec.kernels->load_rows(view, all_rows(1).data(), 1, out.data(), padded);
        for (int64_t c = 0; c < padded; ++c) ASSERT_EQ(out[c], c < dim ? reference::element(view, 0, c) : 0) << dim;
      }
    }
  });
}

TEST(Score, Int32OffsetOverflowThroughStrides) {
  constexpr int64_t kTokens = 4, kDim = 40, kStride = (int64_t{1} << 30) + 24;
  const SparseMemory far(kTokens * kStride * 2);
  if (!far.ok()) GTEST_SKIP() << "no address space";
  const RowsView view{far.data(), DType::f16, kTokens, kDim, kStride};
  Random random(4);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t c = 0; c < kDim; ++c) put(const_cast<std::byte*>(view.row(t)), DType::f16, c, random.normal());
  }
  const auto rows = all_rows(kTokens);
  const auto centroids = normals(random, 2 * kDim);
  each_machine([&](const Exec& exec) {
    expect_rows(exec, {ProxyKind::exact, 2, kTokens, 0.2f, centroids.data(), view, rows.data(), 0, 0, nullptr, nullptr}, 2,
                limits().score);
  });
}

}  // namespace
}  // namespace scope::test
