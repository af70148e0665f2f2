// attend against the float64 reference: error bound, masks, extra keys, metamorphic relations and named bug classes.
#include "attend_cases.h"

namespace scope::test {
namespace {

double ulp(DType dtype) { return dtype == DType::f32 ? 0x1p-23 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7; }

// How far apart two good programs may be where values are about 1: `in_f32`, or an ulp where inputs have 16 bits.
double apart(double in_f32) { return limits().finest == DType::f32 ? in_f32 : ulp(limits().finest); }

struct MeanError {
  double ours = 0, naive = 0;
};

// On `tokens`, R2: at most twice (mean: 1.5 times) the error of the naive program, plus 2 ulp of the output's magnitude. In
// f32 an ulp of a logit moves the output as well, so there the slack grows with the logits.
MeanError expect_within_bound(const Exec& exec, const AttendArgs& args, const Output& ours,
                              const std::vector<int32_t>& tokens) {
  const bool bf16_dot = exec.attend_kernels_bf16 != nullptr && args.q.dtype == DType::bf16;
  const bool rounded_extra = exec.device != nullptr && args.extra.count > 0;
  const auto exact = reference::attend(args);
  const auto naive = reference::naive_attend(args, args.q.dtype);
  double our_max = 0, naive_max = 0, magnitude = 0, lse_slack = 0;
  MeanError mean;
  if (bf16_dot || rounded_extra) {  // rounds probabilities, or virtual keys alone, as the naive program does
    for (size_t t = 0; t < exact.lse.size(); ++t) {
      if (std::isfinite(exact.lse[t])) lse_slack = std::max(lse_slack, 0x1p-8 + 2 * std::abs(naive.lse[t] - exact.lse[t]));
    }
  }
  const double elements = static_cast<double>(std::max<int64_t>(1, static_cast<int64_t>(tokens.size()) * args.q.dim));
  for (const int32_t t : tokens) {
    for (int64_t i = 0; i < args.q.dim; ++i) {
      const double want = exact.out.row(t)[i], ours_off = std::abs(ours.at(t, i) - want);
      const double naive_off = std::abs(naive.out.row(t)[i] - want);
      EXPECT_TRUE(std::isfinite(ours_off)) << "row " << t << " channel " << i << ": " << ours.at(t, i) << ", not " << want;
      magnitude = std::max(magnitude, std::abs(want));
      our_max = std::max(our_max, ours_off);
      naive_max = std::max(naive_max, naive_off);
      mean.ours += ours_off / elements;
      mean.naive += naive_off / elements;
    }
    const double want = exact.lse[static_cast<size_t>(t)];
    if (std::isinf(want)) {
      EXPECT_EQ(ours.lse[t], -kInf) << "row " << t;
      for (int64_t i = 0; i < args.q.dim; ++i) {  // nothing but what is mixed in
        const double mixed = exact.out.row(t)[i];
        EXPECT_NEAR(ours.at(t, i), mixed, ulp(args.q.dtype) * std::abs(mixed) + 0x1p-24) << "row " << t;
      }
    } else {
      EXPECT_NEAR(ours.lse[t], want, limits().lse * (1 + std::abs(want)) + lse_slack) << "row " << t;
    }
  }
  const double slack = 2 * ulp(args.q.dtype) * magnitude * (args.q.dtype == DType::f32 ? 1 + exact.largest_logit : 1);
  EXPECT_LE(our_max, 2 * naive_max + slack) << "naive " << naive_max;
  EXPECT_LE(mean.ours, 1.5 * mean.naive + slack) << "naive " << mean.naive;
  return mean;
}

MeanError expect_within_bound(const Exec& exec, const AttendArgs& args, uint8_t poison = 0xff, int64_t padding = 0) {
  const Result ours(exec, args, poison, padding);
  return expect_within_bound(exec, args, ours, all_rows(args.q.tokens));
}

TEST(Attend, DifferentialErrorBound) {
  std::map<std::string, MeanError> total;
  each_case("attend", 7500, [&](Case& at) {
    Random& random = at.random;
    if (random.chance(0.02)) at.tokens = 0;
    const bool big = at.tokens >= 1025;
    // Long in keys or long in queries; the product stays affordable for the reference.
    int64_t other = big ? random.pick<int64_t>({1, 3, 6}) : random.pick<int64_t>({0, 1, 2, 5, 6, 7, 13, 17});
    if (!big && random.chance(limits().square_share)) other = random.pick(limits().sizes);
    const bool long_keys = random.chance(0.6);
    const int64_t nq = long_keys ? other : at.tokens, nk = long_keys ? at.tokens : other;
    Problem problem(random, at.dtype, nq, nk, at.dim, random.pick<double>({0.3, 1, 2}));
    const int64_t groups = random.between(1, 4);
    const auto active = random.chance(0.7) ? nq : random.between(0, nq);  // the rest is idle
    for (int64_t c = 0; c < groups; ++c) {
      problem.add_group(c + 1 == groups ? active - problem.offsets.back()
                                        : random.between(0, active - problem.offsets.back()));
      problem.select_some(c, random, random.pick<double>({0, 0.02, 0.5, 0.95, 1}));
    }
    if (random.chance(0.3)) {
      problem.keep.resize(static_cast<size_t>(mask_words(nk)));
      for (int64_t j = 0; j < nk; ++j) {
        if (random.chance(0.05)) set_mask_bit(problem.keep.data(), j);
      }
    }
    const bool one_group = random.chance(0.05);
    if (random.chance(0.3)) {
      problem.add_extra(random, random.pick<int64_t>({1, 4, 33}));
    }
    if (random.chance(0.3)) {
      problem.add_mix(random);
    } else if (random.chance(0.4)) {
      problem.add_parts(random);
    }
    AttendArgs args = problem.args();
    if (random.chance(0.05)) args.mask = nullptr;
    if (one_group) args.mask = nullptr, args.offsets = nullptr, args.groups = 1;
    if (random.chance(0.05)) args.order = nullptr;
    const MeanError mean = expect_within_bound(at.exec, args, at.poison, random.chance(0.3) ? limits().paddings[3] : 0);
    MeanError& sum = total[fmt::format("{} {}", dtype_name(at.dtype), at.machine.name)];
    sum.ours += mean.ours;
    sum.naive += mean.naive;
  });
  // Over many cases luck evens out, and the bound holds without slack.
  for (const auto& [name, sum] : total) {
    fmt::print("attend {}: mean error {:.2f} of the naive program's\n", name, sum.ours / sum.naive);
    EXPECT_LE(sum.ours, (scaled(100) >= 10 ? 1.5 : 3.0) * sum.naive) << name;
  }
}

TEST(Attend, GroupsOfEveryRaggedness) {
  Random random(7);
  each_machine([&](const Exec& exec) {
    std::vector<int64_t> sizes;
    for (int64_t n = 1; n <= 13; ++n) sizes.push_back(n);
    for (int64_t n = 251; n <= 260; ++n) sizes.push_back(n);
    sizes.insert(sizes.end(), {0, 505, 0});
    const int64_t nq = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    Problem problem(random, limits().finest, nq, 70, 8);
    for (const int64_t n : sizes) {
      problem.add_group(n);
      problem.select_some(problem.groups() - 1, random, 0.4);
    }
    expect_within_bound(exec, problem.args());
    problem.add_extra(random, problem.groups());
    expect_within_bound(exec, problem.args());
  });
}

// Many tiles of many blocks of keys; the reference sees two queries of each group.
TEST(Attend, ManyTilesOfManyKeys) {
  for (const DType dtype : limits().dtypes) {
    Random random(22);
    Problem problem(random, dtype, 9000, 5000, 128);
    std::vector<int32_t> judged;
    std::vector<int64_t> judged_offsets = {0};
    for (int64_t c = 0; c < 40; ++c) {
      problem.add_group(c == 39 ? 9000 - problem.offsets.back() : random.between(2, 440));
      problem.select_some(c, random, 0.2);
      for (const int64_t i : {problem.offsets.end()[-2], problem.offsets.back() - 1}) {
        judged.push_back(problem.order[static_cast<size_t>(i)]);
      }
      judged_offsets.push_back(static_cast<int64_t>(judged.size()));
    }
    problem.add_extra(random, 40);
    AttendArgs few = problem.args();
    few.order = judged.data();
    few.offsets = judged_offsets.data();
    each_machine([&](const Exec& exec) { expect_within_bound(exec, few, Result(exec, problem.args()), judged); });
  }
}

TEST(Attend, ZeroLengthQueriesOrKeys) {
  Random random(1);
  each_machine([&](const Exec& exec) {
    for (const auto& [nq, nk] : {std::pair{0, 9}, {9, 0}, {0, 0}}) {
      Problem problem(random, DType::f16, nq, nk, 40);
      problem.add_group(nq);
      problem.add_group(0);
      expect_within_bound(exec, problem.args());
    }
  });
}

TEST(Attend, FullyMaskedRowsAndIdleQueriesGiveZeros) {
  Random random(2);
  each_machine([&](const Exec& exec) {
    Problem problem(random, DType::bf16, 20, 30, 64);
    problem.add_group(7);        // no key selected
    problem.add_dense_group(6);  // and 7 queries belong to no group
    const Result ours(exec, problem.args());
    for (int64_t i = 0; i < 20; ++i) {
      const int64_t token = problem.order[static_cast<size_t>(i)];
      const bool empty = i < 7 || i >= 13;
      EXPECT_EQ(std::isinf(ours.lse[token]), empty);
      for (int64_t c = 0; c < 64; ++c) EXPECT_EQ(ours.at(token, c) == 0, empty);
    }
  });
}

// Logits size * x[j] from one channel.
Problem one_channel(Random& random, DType dtype, double size, const std::vector<double>& x) {
  const auto nk = static_cast<int64_t>(x.size());
  Problem problem(random, dtype, 3, nk, 8);
  problem.scale = 1;
  problem.add_dense_group(3);
  for (int64_t c = 0; c < 8; ++c) {
    for (int64_t t = 0; t < 3; ++t) problem.q.set(t, c, c == 0 ? size : 0);
    for (int64_t j = 0; j < nk; ++j) problem.k.set(j, c, c == 0 ? x[static_cast<size_t>(j)] : 0);
  }
  return problem;
}

// A finite stand-in for minus infinity would win against equal logits such as these; the answer is the mean of v.
TEST(Attend, HugeNegativeLogitsMeetNoFiniteSentinel) {
  each_machine([](const Exec& exec) {
    for (const double size : {1e4, 1e9, 1e15, 1e30, 1e37}) {
      if (size > limits().largest_logit) continue;
      for (const size_t nk : {1, 3, 20, 300}) {
        SCOPED_TRACE(fmt::format("logits {} keys {}", -size, nk));
        Random random(3);
        const std::vector<double> equal(nk, 1);
        expect_within_bound(exec, one_channel(random, limits().finest, -1.1 * size, equal).args());
        expect_within_bound(exec, one_channel(random, DType::bf16, -1.1 * size, equal).args());
      }
    }
  });
}

TEST(Attend, HugeSpreadOfLogitsPicksTheLargest) {
  each_machine([](const Exec& exec) {
    for (const double size : {300.0, 1e5, 1e20, 1e36}) {
      if (size > limits().largest_logit) continue;
      SCOPED_TRACE(size);
      Random random(4);
      std::vector<double> x(300, -1.3);
      x[271] = 2.7;
      const Problem problem = one_channel(random, limits().finest, size, x);
      const Result ours(exec, problem.args());
      for (int64_t c = 0; c < 8; ++c) EXPECT_NEAR(ours.at(0, c), reference::element(problem.v.view(), 271, c), 1e-6);
    }
  });
}

// Every block of keys has higher logits than the one before, by less and by more than a float holds.
TEST(Attend, LogitsThatRiseFromKeyToKey) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const double rise : {12.0, 60.0, 1500.0}) {  // in powers of two
        SCOPED_TRACE(fmt::format("{}, rise {}", dtype_name(dtype), rise));
        constexpr int64_t kQueries = 240, kKeys = 700;
        Random random(31);
        Problem problem(random, dtype, kQueries, kKeys, rise == 60.0 ? 128 : 64);
        for (int64_t t = 0; t < kQueries; ++t) problem.q.set(t, 3, 1 + static_cast<double>(t % 3));
        for (int64_t j = 0; j < kKeys; ++j) {
          problem.k.set(j, 3,
                        rise / 3 * static_cast<double>(j) / kKeys * std::log(2.0) / static_cast<double>(problem.scale));
        }
        for (const int64_t size : {1, 39, 200}) {
          problem.add_group(size);
          problem.select_some(problem.groups() - 1, random, size % 2 == 0 ? 1 : 0.9);
        }
        expect_within_bound(exec, problem.args());
      }
    }
  });
}

// A query's result is the same to the bit whatever logits the queries beside it have.
TEST(Attend, SteepRowsDoNotReachTheirNeighbours) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      SCOPED_TRACE(dtype_name(dtype));
      constexpr int64_t kQueries = 128, kKeys = 500;
      Random random(33);
      Problem problem(random, dtype, kQueries, kKeys, 128);
      for (int64_t j = 0; j < kKeys; ++j) problem.k.set(j, 3, static_cast<double>(j) / 10);
      for (int64_t t = 0; t < kQueries; ++t) problem.q.set(t, 3, 0);
      problem.add_dense_group(kQueries);
      const Result alone(exec, problem.args());
      for (int64_t t = 1; t < kQueries; t += 2) problem.q.set(t, 3, 100);  // logits rise by 440
      const Result beside(exec, problem.args());
      for (int64_t t = 0; t < kQueries; t += 2) {
        ASSERT_EQ(alone.lse[t], beside.lse[t]) << "row " << t;
        for (int64_t c = 0; c < 128; ++c) ASSERT_EQ(alone.at(t, c), beside.at(t, c)) << "row " << t << " channel " << c;
      }
    }
  });
}

// q.k past 65,504 must not pass through f16; the naive program would, so the reference alone judges.
TEST(Attend, F16OverflowDoesNotBlackenFrames) {
  each_machine([](const Exec& exec) {
    Random random(5);
    Problem problem(random, DType::f16, 13, 300, 128, 60);
    for (int64_t j = 0; j < 300; ++j) {
      for (int64_t c = 0; c < 128; ++c) problem.k.set(j, c, 60 * random.normal());
    }
    problem.add_dense_group(13);
    const Result ours(exec, problem.args());
    const auto want = reference::attend(problem.args());
    for (int64_t i = 0; i < 13 * 128; ++i)
      ASSERT_NEAR(ours.at(i / 128, i % 128), want.out.data[static_cast<size_t>(i)], 0.01);
  });
}

TEST(Attend, NanInUnselectedKeysNeverLeaks) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      Random random(6);
      Problem problem(random, dtype, 9, 400, 40);
      problem.add_group(9);
      for (int64_t j = 0; j < 400; ++j) {
        if (j % 3 == 0) {
          problem.select(0, j);
        } else {
          for (int64_t c = 0; c < 40; ++c) problem.k.set(j, c, kNan), problem.v.set(j, c, kInf);
        }
      }
      expect_within_bound(exec, problem.args());
    }
  });
}

// Key 5 is read by group 0 alone; whichever tensor holds the NaN, group 1 stays finite and group 0 says NaN.
TEST(Attend, NanReachesExactlyTheRowsThatReadIt) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const int where : {0, 1, 2}) {
        SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), where == 0 ? "q" : where == 1 ? "k" : "v"));
        Random random(8);
        Problem problem(random, dtype, 14, 70, 64);
        problem.add_group(7);
        problem.add_group(7);
        for (int64_t j = 0; j < 70; ++j) {
          problem.select(0, j);
          if (j != 5) problem.select(1, j);
        }
        if (where == 0) problem.q.set(problem.order[3], 11, kNan);
        if (where == 1) problem.k.set(5, 11, kNan);
        if (where == 2) problem.v.set(5, 11, kNan);
        const Result ours(exec, problem.args());
        for (int64_t i = 0; i < 14; ++i) {
          for (int64_t c = 0; c < 64; ++c) {
            const bool reads = where == 0 ? i == 3 : i < 7 && (where == 1 || c == 11);
            EXPECT_EQ(std::isnan(ours.at(problem.order[static_cast<size_t>(i)], c)), reads)
                << "query " << i << " channel " << c;
          }
        }
      }
    }
  });
}

// R4: a full mask over several groups is dense attention over one.
TEST(Attend, FullMaskEqualsDense) {
  each_machine([](const Exec& exec) {
    Random random(9);
    Problem problem(random, limits().finest, 300, 270, 40);
    problem.order = all_rows(300);
    problem.add_dense_group(300);
    const Result dense(exec, problem.args());
    problem.offsets = {0};
    problem.mask.clear();
    for (const int64_t n : {1, 100, 199}) problem.add_dense_group(n);
    const Result grouped(exec, problem.args());
    EXPECT_TRUE(testing_cuda() || dense.all() == grouped.all());  // CUDA may split the keys of a small tile
    for (int64_t t = 0; t < 300; ++t) {
      EXPECT_NEAR(dense.lse[t], grouped.lse[t], limits().lse * (1 + std::abs(dense.lse[t])));
      for (int64_t c = 0; c < 40; ++c) ASSERT_NEAR(dense.at(t, c), grouped.at(t, c), apart(2e-6));
    }
  });
}

TEST(Attend, ConstantValuesGiveConstantOutput) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      Random random(10);
      Problem problem(random, dtype, 31, 300, 80, 3);
      for (int64_t j = 0; j < 300; ++j) {
        for (int64_t c = 0; c < 80; ++c) problem.v.set(j, c, 0.75);
      }
      problem.add_dense_group(31);
      const Result ours(exec, problem.args());
      for (int64_t t = 0; t < 31; ++t) {
        for (int64_t c = 0; c < 80; ++c) ASSERT_NEAR(ours.at(t, c), 0.75, 4 * ulp(dtype)) << dtype_name(dtype);
      }
    }
  });
}

TEST(Attend, EqualLogitsGiveTheMeanOfSelectedValues) {
  each_machine([](const Exec& exec) {
    Random random(11);
    Problem problem(random, limits().finest, 5, 300, 64);
    for (int64_t j = 1; j < 300; ++j) problem.k.copy_row(j, 0);
    problem.add_group(5);
    std::vector<double> mean(64);
    for (int64_t j = 0; j < 300; j += 2) {
      problem.select(0, j);
      for (int64_t c = 0; c < 64; ++c) mean[static_cast<size_t>(c)] += reference::element(problem.v.view(), j, c) / 150;
    }
    const Result ours(exec, problem.args());
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t c = 0; c < 64; ++c) ASSERT_NEAR(ours.at(t, c), mean[static_cast<size_t>(c)], apart(1e-6));
    }
  });
}

TEST(Attend, PermutingKeysAndValuesTogetherChangesNothing) {
  each_machine([](const Exec& exec) {
    Random random(12);
    Problem problem(random, limits().finest, 13, 300, 64), other(random, limits().finest, 13, 300, 64);
    const auto to = shuffled(random, 300);
    problem.add_group(13);
    other.add_group(13);
    other.order = problem.order;
    for (int64_t t = 0; t < 13; ++t) other.q.copy_row(t, problem.q.view(), t);
    for (int64_t j = 0; j < 300; ++j) {
      const int32_t place = to[static_cast<size_t>(j)];
      other.k.copy_row(place, problem.k.view(), j);
      other.v.copy_row(place, problem.v.view(), j);
      if (j % 5 != 0) problem.select(0, j), other.select(0, place);
    }
    const Result a(exec, problem.args()), b(exec, other.args());
    for (int64_t t = 0; t < 13; ++t) {
      for (int64_t c = 0; c < 64; ++c) ASSERT_NEAR(a.at(t, c), b.at(t, c), apart(2e-6));
    }
  });
}

// The virtual key of a tail whose keys coincide is those keys: E = groups with a diagonal mask and bias log(n).
TEST(Attend, ExtraKeyStandsForCoincidingKeys) {
  each_machine([](const Exec& exec) {
    Random random(13);
    Problem problem(random, limits().finest, 12, 40, 64), full(random, limits().finest, 12, 40, 64);
    for (int64_t j = 21; j < 40; ++j) problem.k.copy_row(j, 20), problem.v.copy_row(j, 20);
    for (Problem* p : {&problem, &full}) {
      for (int64_t c = 0; c < 2; ++c) {
        p->add_group(6);
        for (int64_t j = 0; j < (p == &full ? 40 : 20); ++j) p->select(c, j);
      }
    }
    AttendArgs dense = problem.args();
    dense.mask = full.mask.data();
    for (int64_t e = 0; e < 2; ++e) {
      for (int64_t c = 0; c < 64; ++c) {
        problem.extra_k.push_back(static_cast<float>(reference::element(problem.k.view(), 20, c)));
        problem.extra_v.push_back(static_cast<float>(reference::element(problem.v.view(), 20, c)));
      }
    }
    problem.bias = {std::log(20.0f), std::log(20.0f)};
    problem.extra_mask = {1, 2};
    const Result a(exec, problem.args()), b(exec, dense);
    for (int64_t t = 0; t < 12; ++t) {
      EXPECT_NEAR(a.lse[t], b.lse[t], limits().lse);
      for (int64_t c = 0; c < 64; ++c) ASSERT_NEAR(a.at(t, c), b.at(t, c), apart(2e-6));
    }
  });
}

TEST(Attend, BitwiseOverThreadsAndRuns) {
  Random random(14);
  Problem problem(random, DType::bf16, 290, 300, 40);
  for (const int64_t n : {5, 0, 260, 20}) {
    problem.add_group(n);
    problem.select_some(problem.groups() - 1, random, 0.3);
  }
  problem.add_extra(random, 4);
  expect_repeatable([&](const Exec& exec) { return Result(exec, problem.args()).all(); });
}

TEST(Attend, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(19);
  std::vector<Problem> problems;
  std::vector<AttendArgs> heads;
  const auto keep = subset(random, 300, 9);
  for (int h = 0; h < 3; ++h) {
    Problem& problem = problems.emplace_back(random, DType::bf16, 290, 300, 40);
    problem.q = Rows(random, DType::bf16, 290, 40, 1, 2 * 40);  // side by side
    problem.k = Rows(random, DType::bf16, 300, 40, 1, 8), problem.v = Rows(random, DType::bf16, 300, 40, 1, 0);
    for (int c = 0; c < 4; ++c) {
      problem.add_group(c == 3 ? 280 - problem.offsets.back() : random.between(0, 90));
      problem.select_some(c, random, 0.3);
    }
    problem.keep.resize(static_cast<size_t>(mask_words(300)));
    for (const int32_t j : keep) set_mask_bit(problem.keep.data(), j);
    problem.add_extra(random, 4);
  }
  for (const Problem& problem : problems) heads.push_back(problem.args());
  expect_chunk_equals_heads<Output>(heads, run_attend);
}

// One key: every query's output is its value, whatever tile the query is in. More tiles than a grid has in y or z.
// The CPU has no grid to overflow.
TEST(AttendOnDevice, MoreTilesThanAGridHasInYAndZ) {
  each_machine([](const Exec& exec) {
    Random random(20);
    const Rows q(DType::bf16, kManyTokens, 8), key(random, DType::bf16, 1, 8, 1), value(random, DType::bf16, 1, 8, 1);
    AttendArgs args;
    args.q = q.view(), args.k = key.view(), args.v = value.view();
    std::memset(const_cast<void*>(args.q.data), 0, kManyTokens * 16);
    args.scale = 1;
    args.groups = 1;
    const Result ours(exec, args);
    for (int64_t t = 0; t < kManyTokens; ++t) ASSERT_EQ(std::memcmp(ours.args.out[0].row(t), args.v[0].row(0), 16), 0) << t;
  });
}

TEST(Attend, MoreGroupsThanAGridHasInYAndZ) {
  each_machine([](const Exec& exec) {
    Random random(21);
    Problem problem(random, DType::bf16, kManyGroups, 30, 8);
    for (int64_t c = 0; c < kManyGroups; ++c) {
      problem.add_group(1);
      problem.select(c, c % 30);
    }
    const Result ours(exec, problem.args());
    for (int64_t i = 0; i < kManyGroups; ++i) {  // one key each: its value
      const auto token = problem.order[static_cast<size_t>(i)];
      ASSERT_EQ(std::memcmp(ours.args.out[0].row(token), problem.v.view().row(i % 30), 16), 0) << "group " << i;
    }
  });
}

// Token numbers past 32,768, and sums over more than 160,000 keys.
TEST(Attend, NoInt16CastAndNoNoiseInLongSequences) {
  each_machine([](const Exec& exec) {
    for (const int64_t nk : {40'000, 170'001}) {
      Random random(15);
      Problem problem(random, DType::bf16, 2, nk, 8);
      problem.add_dense_group(2);
      expect_within_bound(exec, problem.args());
    }
  });
}

// token * stride passes 2^31 elements in q, k, v and out.
TEST(Attend, Int32OffsetOverflowThroughStrides) {
  constexpr int64_t kTokens = 4, kDim = 40, kStride = (int64_t{1} << 30) + 24;
  Random random(16);
  Problem problem(random, DType::f16, kTokens, kTokens, kDim);
  problem.add_dense_group(kTokens);
  std::vector<std::unique_ptr<SparseMemory>> far;
  for (int i = 0; i < 4; ++i) far.push_back(std::make_unique<SparseMemory>(kTokens * kStride * 2));
  for (const auto& memory : far) {
    if (!memory->ok()) GTEST_SKIP() << "no address space";
  }
  AttendArgs args = problem.args();
  HeadsView* views[] = {&args.q, &args.k, &args.v};
  for (size_t i = 0; i < 3; ++i) {
    const RowsView near = (*views[i])[0], there{far[i]->data(), DType::f16, kTokens, kDim, kStride};
    for (int64_t t = 0; t < kTokens; ++t) std::memcpy(const_cast<std::byte*>(there.row(t)), near.row(t), kDim * 2);
    *views[i] = there;
  }
  each_machine([&](const Exec& exec) {
    const Result near(exec, problem.args());
    GuardedScratch scratch(backend().attend_scratch(exec, sizes_of(args)));
    args.out = MutableRowsView{far[3]->data(), DType::f16, kTokens, kDim, kStride};
    args.scratch = scratch_of(scratch);
    run_attend(exec, {&args, 1});
    for (int64_t t = 0; t < kTokens; ++t) {
      EXPECT_EQ(std::memcmp(args.out[0].row(t), near.out.data() + t * kDim * 2, kDim * 2), 0) << "row " << t;
    }
  });
}

// The last row ends where memory does.
TEST(AttendOnCpu, NothingIsReadPastTheLastRow) {
  constexpr int64_t kTokens = 37, kBytes = 1 << 17;  // whole pages, up to 64 KiB each
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const int64_t dim : {8, 10, 40, 72, 128}) {
        SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), dim));
        Random random(19);
        Problem problem(random, dtype, 5, kTokens, dim);
        problem.add_dense_group(5);
        AttendArgs args = problem.args();
        const SparseMemory memory[3] = {SparseMemory(kBytes), SparseMemory(kBytes), SparseMemory(kBytes)};
        HeadsView* views[] = {&args.q, &args.k, &args.v};
        for (size_t i = 0; i < 3; ++i) {
          ASSERT_TRUE(memory[i].ok());
          auto* const end = static_cast<std::byte*>(memory[i].data()) + kBytes / 2;
          ASSERT_EQ(mprotect(end, kBytes / 2, PROT_NONE), 0);
          const RowsView near = (*views[i])[0];
          const RowsView there{end - near.tokens * dim * dtype_bytes(dtype), dtype, near.tokens, dim, dim};
          for (int64_t r = 0; r < near.tokens; ++r) {
            std::memcpy(const_cast<std::byte*>(there.row(r)), near.row(r), static_cast<size_t>(dim * dtype_bytes(dtype)));
          }
          *views[i] = there;
        }
        EXPECT_TRUE(Result(exec, args).all() == Result(exec, problem.args()).all());
      }
    }
  });
}

// Stride 0: the same key n times.
TEST(Attend, BroadcastRows) {
  each_machine([](const Exec& exec) {
    Random random(17);
    Problem problem(random, limits().finest, 3, 50, 40);
    problem.add_dense_group(3);
    AttendArgs args = problem.args();
    args.k.row_stride = args.v.row_stride = 0;
    expect_within_bound(exec, args);
  });
}

TEST(Attend, WorkspaceTooSmallIsRefused) {
  const Exec exec = machines().front().with(pool(1));
  Random random(18);
  Problem problem(random, limits().finest, 3, 5, 8);
  problem.add_group(3);
  Output ours(exec, problem.args());
  GuardedScratch scratch(ours.scratch.size() / 2);
  ours.args.scratch = scratch_of(scratch);
  EXPECT_THROW(run_attend(exec, {&ours.args, 1}), Error);
}

}  // namespace
}  // namespace scope::test
