// 8-bit products in attend: against the same arithmetic in float64, against exact attention, and on what stands out.
#include "attend_cases.h"
#include "cpu/kernels.h"
#include "methods/methods.h"
#include "pipeline/plan.h"
#include "stages/choices.h"

namespace scope::test {
namespace {

// Every machine whose attend has them; the others refuse them when a plan is made.
template <class Body>
void each_products(const Body& body) {
  bool any = false;
  each_machine([&](const Exec& exec) {
    for (const ProductsRow& row : products_rows()) {
      if (row.choice == Products::bf16) continue;
      SCOPED_TRACE(row.name);
      Exec configured = exec;
      const char* kernel = backend().can.host ? "auto" : backend().kernel(exec);
      bool has = backend().can.products.has(row.choice);
      if (has) {
        try {
          backend().configure(configured, kernel, DType::bf16, row.choice);
        } catch (const Error& error) {
          EXPECT_EQ(error.status(), Status::unsupported);
          const std::string kernels = backend().can.host ? backend().name : fmt::format("the {} kernel", kernel);
          EXPECT_EQ(std::string(error.what()).find(fmt::format("products: {} has no {}", kernels, row.name)), 0)
              << error.what();
          has = false;
        }
      }
      if (!has) continue;
      any = true;
      ASSERT_NO_FATAL_FAILURE(body(exec, row.choice));
    }
  });
  if (!any) GTEST_SKIP() << "this machine has no 8-bit products";
}

// docs/reference/algorithm.md, "8-bit products": logits as the integers give them, and what rounding probabilities and
// values may cost.
struct Emulated {
  std::vector<double> out, slack;  // [q_tokens, dim]
  std::vector<double> lse;         // [q_tokens]
};

Emulated emulate(const AttendArgs& args, bool bytes_of_values) {
  const RowsView q = args.q[0], k = args.k[0], v = args.v[0];
  const int64_t dim = q.dim, real = k.tokens, keys = real + args.extra.count, queries = args.offsets[0][args.groups];
  const auto rounded = [&](float x) {
    return q.dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(x)) : f16_to_f32(f32_to_f16(x));
  };
  const auto key = [&](int64_t j, int64_t c) {
    return j < real ? static_cast<float>(reference::element(k, j, c)) : rounded(args.extra.k[0][(j - real) * dim + c]);
  };
  const auto value = [&](int64_t j, int64_t c) {
    return j < real ? static_cast<float>(reference::element(v, j, c)) : rounded(args.extra.v[0][(j - real) * dim + c]);
  };
  const auto query = [&](int64_t i, int64_t c) { return static_cast<float>(reference::element(q, args.order[0][i], c)); };
  const auto is_valid = [&](int64_t j) {
    return args.valid == nullptr || j >= real || mask_bit(args.valid, j) || (args.keep != nullptr && mask_bit(args.keep, j));
  };

  // In f32 and in the backends' order: integers are to be the same.
  const int64_t channels = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
  const auto rotate = [&](std::vector<float>& x) {
    for (int64_t step = 1; step < channels; step *= 2) {
      for (int64_t c = 0; c < channels; ++c) {
        if (c / step % 2 != 0) continue;
        float &a = x[static_cast<size_t>(c)], &b = x[static_cast<size_t>(c + step)];
        const float sum = a + b, difference = a - b;
        a = sum, b = difference;
      }
    }
  };
  const auto largest = [](float most, const std::vector<float>& row) {
    for (const float x : row) most = std::max(most, std::abs(x));
    return most;
  };
  const auto byte = [](float x, float most) {
    const float over = most > 0x1p-100f ? 127 / most : 0;
    return static_cast<int>(std::nearbyint(x * over));
  };
  std::vector<float> centre(dim), times_q(dim), times_k(dim), mean(dim), far(dim);
  for (int64_t c = 0; c < dim; ++c) {
    float low = kInf, high = -kInf, low_v = kInf, high_v = -kInf, high_q = 0;
    double sum = 0, count = 0;
    for (int64_t j = 0; j < keys; ++j) {
      if (!is_valid(j)) continue;
      if (real < 4096 || j >= real || j % 8 == 0) low = std::min(low, key(j, c)), high = std::max(high, key(j, c));
      low_v = std::min(low_v, value(j, c)), high_v = std::max(high_v, value(j, c));
      sum += value(j, c), ++count;
    }
    for (int64_t i = 0; i < queries; ++i) {
      if (queries < 4096 || args.order[0][i] % 8 == 0) high_q = std::max(high_q, std::abs(query(i, c)));
    }
    const auto at = static_cast<size_t>(c);
    centre[at] = 0.5f * low + 0.5f * high;
    const float reach = std::max(high - centre[at], centre[at] - low);
    const bool counts = high_q > 0x1p-100f && reach > 0x1p-100f;
    times_q[at] = counts ? std::sqrt(reach / high_q) : 0;
    times_k[at] = counts ? std::sqrt(high_q / reach) : 0;
    mean[at] = static_cast<float>(sum / std::max(count, 1.0));
    far[at] = std::max(high_v - mean[at], mean[at] - low_v);
  }
  std::vector<std::vector<float>> rotated(static_cast<size_t>(keys), std::vector<float>(static_cast<size_t>(channels)));
  float most_k = 0;
  for (int64_t j = 0; j < keys; ++j) {
    std::vector<float>& row = rotated[static_cast<size_t>(j)];
    if (!is_valid(j)) continue;
    for (int64_t c = 0; c < dim; ++c) {
      const auto at = static_cast<size_t>(c);
      row[at] = (key(j, c) - centre[at]) * times_k[at];
    }
    rotate(row);
    most_k = largest(most_k, row);
  }
  const float k_unit = (most_k > 0x1p-100f ? most_k / 127 : 1) / static_cast<float>(channels);
  std::vector<int> bytes;
  for (const auto& row : rotated) {
    for (const float x : row) bytes.push_back(byte(x, most_k));
  }

  Emulated result{.out = std::vector<double>(static_cast<size_t>(q.tokens * dim)),
                  .slack = std::vector<double>(static_cast<size_t>(q.tokens * dim)),
                  .lse = std::vector<double>(static_cast<size_t>(q.tokens), -kInf)};
  for (int64_t g = 0; g < args.groups; ++g) {
    for (int64_t i = args.offsets[0][g]; i < args.offsets[0][g + 1]; ++i) {
      std::vector<float> row(static_cast<size_t>(channels));
      double shift = 0;
      for (int64_t c = 0; c < dim; ++c) {
        const auto at = static_cast<size_t>(c);
        row[at] = query(i, c) * times_q[at];
        shift += static_cast<double>(query(i, c)) * static_cast<double>(centre[at]);
      }
      rotate(row);
      const float high = largest(0, row);
      const double unit = static_cast<double>((high > 0x1p-100f ? high / 127 : 1) * k_unit);
      std::vector<std::pair<double, int64_t>> seen;  // logit, key
      double top = -kInf;
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t words = mask_words(real), e = j - real;
        const bool kept = j < real
                              ? mask_bit(args.mask[0] + g * words, j) || (args.keep != nullptr && mask_bit(args.keep, j))
                              : mask_bit(args.extra.mask[0] + g * mask_words(args.extra.count), e);
        if (!kept) continue;
        int64_t sum = 0;
        for (int64_t c = 0; c < channels; ++c) {
          sum += int64_t{byte(row[static_cast<size_t>(c)], high)} * bytes[static_cast<size_t>(j * channels + c)];
        }
        const double bias = j < real ? 0 : static_cast<double>(args.extra.bias[0][e]);
        seen.emplace_back(static_cast<double>(args.scale) * (unit * static_cast<double>(sum) + shift) + bias, j);
        top = std::max(top, seen.back().first);
      }
      const int32_t token = args.order[0][i];
      double total = 0;
      for (auto& [x, j] : seen) total += x = top == -kInf ? 0 : std::exp(x - top);
      if (total > 0) result.lse[static_cast<size_t>(token)] = top + std::log(total);
      for (int64_t c = 0; c < dim; ++c) {
        const auto at = static_cast<size_t>(c);
        double out = 0, cost = 0;
        for (const auto& [weight, j] : seen) {
          const double x = static_cast<double>(value(j, c)), apart = std::abs(x - static_cast<double>(mean[at]));
          out += weight * x;
          cost += weight * (bytes_of_values ? 0.14 * apart + 0x1p-9 * static_cast<double>(far[at]) : 0x1p-8 * std::abs(x));
        }
        if (total > 0) out /= total, cost /= total;
        const auto to = static_cast<size_t>(token * dim + c);
        result.out[to] = out;
        result.slack[to] = cost + 1e-6;
      }
    }
  }
  reference::mix(args, result.out, result.lse);
  for (size_t i = 0; i < result.out.size(); ++i) result.slack[i] += 0x1p-7 * std::abs(result.out[i]);
  return result;
}

void expect_as_emulated(const Exec& exec, const AttendArgs& args) {
  const Result ours(exec, args, 0xff, 8);
  const Emulated want = emulate(args, args.products == Products::qkv8);
  const double rounded = backend().can.host ? 0x1.1p-9 : 0;  // the CPU sums probabilities as it multiplies them, in bf16
  for (int64_t t = 0; t < args.q.tokens; ++t) {
    const double lse = want.lse[static_cast<size_t>(t)];
    if (std::isinf(lse)) {
      ASSERT_EQ(static_cast<double>(ours.lse[t]), lse) << "token " << t;
    } else {
      ASSERT_NEAR(ours.lse[t], lse, 1e-4 * (1 + std::abs(lse)) + rounded) << "token " << t;
    }
    for (int64_t c = 0; c < args.q.dim; ++c) {
      const auto at = static_cast<size_t>(t * args.q.dim + c);
      ASSERT_NEAR(ours.at(t, c), want.out[at], want.slack[at]) << "token " << t << " channel " << c;
    }
  }
}

// Root mean square of the error over that of the exact output.
double relative_error(const Exec& exec, const AttendArgs& args) {
  const Result ours(exec, args);
  const auto exact = reference::attend(args);
  double error = 0, size = 0;
  for (int64_t t = 0; t < args.q.tokens; ++t) {
    for (int64_t c = 0; c < args.q.dim; ++c) {
      const double want = exact.out.data[static_cast<size_t>(t * args.q.dim + c)];
      error += (ours.at(t, c) - want) * (ours.at(t, c) - want);
      size += want * want;
    }
  }
  return std::sqrt(error / size);
}

// Nothing is selected in a dense call, but it multiplies. Statistics say what.
TEST(ProductsOnCpu, AreThereForBf16InputsOrRefusedByName) {
  for (const auto& set : cpu::instruction_sets()) {
    const Context context(1, set.name);
    const bool vnni = std::string(set.name) == "avx512" && cpu::byte_kernels() != nullptr;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const ProductsRow& row : products_rows()) {
        Settings settings = find_method("dense").settings();
        settings.products = row.choice;
        const bool has = row.choice == Products::bf16 || (row.choice == Products::qk8 && dtype == DType::bf16 && vnni);
        const std::string refused = fmt::format("products: cpu has no {}", row.name);
        std::string said = "accepted";
        try {
          const Plan plan(context, settings,
                          {.q_tokens = 8, .k_tokens = 8, .dim = 16, .dtype = dtype, .rope = {}, .subspaces = {}});
          if (row.choice != Products::bf16) said = plan.backend->arithmetic(plan.exec, dtype, row.choice);
        } catch (const Error& error) {
          said = std::string(error.what()).substr(0, refused.size());
          EXPECT_EQ(error.status(), Status::unsupported);
        }
        EXPECT_EQ(said, !has                           ? refused
                        : row.choice == Products::bf16 ? "accepted"
                                                       : "s8+bf16")
            << set.name << ", " << dtype_name(dtype);
      }
    }
  }
}

// In one channel keys are so much larger than queries, or so much smaller, that their ratio is no float.
TEST(Products, RangesTooFarApartAreDoneIn16Bits) {
  each_products([](const Exec& exec, Products products) {
    for (const bool large_keys : {false, true}) {
      Random random(15);
      Problem problem(random, DType::bf16, 40, 90, 64);
      problem.add_dense_group(40);
      for (int64_t t = 0; t < 40; ++t) problem.q.set(t, 5, (large_keys ? 1e-25 : 1e16) * random.normal());
      for (int64_t j = 0; j < 90; ++j) problem.k.set(j, 5, (large_keys ? 1e16 : 1e-25) * random.normal());
      AttendArgs args = problem.args();
      const auto in_16 = Result(exec, args).all();
      args.products = products;
      EXPECT_EQ(Result(exec, args).all(), in_16) << (large_keys ? "large keys" : "large queries");
    }
  });
}

TEST(Products, EqualTheSameArithmeticInFloat64) {
  each_products([](const Exec& exec, Products products) {
    for (int i = 0; i < scaled(24); ++i) {
      Random random(static_cast<uint64_t>(i) + 50);
      const bool device = !backend().can.host;
      const DType dtype = random.chance(0.5) || !device ? DType::bf16 : DType::f16;
      const int64_t nq = random.pick<int64_t>({1, 70, 300, 500}), nk = random.pick<int64_t>({1, 95, 97, 700});
      const int64_t dim = device ? random.pick<int64_t>({8, 64, 72, 128}) : random.pick<int64_t>({1, 8, 35, 64, 128, 256});
      SCOPED_TRACE(fmt::format("case {}: {} {} x {} x {}", i, dtype_name(dtype), nq, nk, dim));
      Problem problem(random, dtype, nq, nk, dim, random.pick<double>({0.1, 1.0, 4.0}));
      int64_t left = nq;
      while (left > 0 && problem.groups() < 6) {
        const int64_t size = random.between(0, left);
        problem.add_group(size);
        problem.select_some(problem.groups() - 1, random, random.pick<double>({0.02, 0.3, 1.0}));
        left -= size;
      }
      if (random.chance(0.5)) {
        problem.keep.resize(static_cast<size_t>(mask_words(nk)));
        set_mask_bit(problem.keep.data(), nk - 1);
      }
      if (random.chance(0.4)) problem.add_extra(random, random.pick<int64_t>({1, 40}));
      if (random.chance(0.4)) {
        problem.add_mix(random);
      } else if (random.chance(0.5)) {
        problem.add_parts(random);
      }
      AttendArgs args = problem.args();
      args.products = products;
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args));
    }
  });
}

// Every block of keys has higher logits than the one before, by less and by more than a float holds.
TEST(Products, LogitsThatRiseFromKeyToKey) {
  each_products([](const Exec& exec, Products products) {
    for (const double rise : {12.0, 60.0, 1500.0}) {  // in powers of two
      SCOPED_TRACE(rise);
      constexpr int64_t kKeys = 900;
      Random random(32);
      Problem problem(random, DType::bf16, 300, kKeys, 128);
      for (int64_t t = 0; t < 300; ++t) problem.q.set(t, 3, 1 + static_cast<double>(t % 3));
      for (int64_t j = 0; j < kKeys; ++j) {
        problem.k.set(j, 3, rise / 3 * static_cast<double>(j) / kKeys * std::log(2.0) / static_cast<double>(problem.scale));
      }
      for (const int64_t size : {40, 200, 60}) {
        problem.add_group(size);
        problem.select_some(problem.groups() - 1, random, size == 60 ? 0.7 : 1);
      }
      AttendArgs args = problem.args();
      args.products = products;
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args));
    }
  });
}

// From 4,096 attending queries on, every 8th token balances the channels. Here the others are larger.
TEST(Products, ManyQueriesAreBalancedByASample) {
  each_products([](const Exec& exec, Products products) {
    for (const int64_t idle : {0, 500}) {
      constexpr int64_t kQueries = 4600, kKeys = 97;
      Random random(16);
      Problem problem(random, DType::bf16, kQueries, kKeys, 64);
      for (int64_t t = 0; t < kQueries; ++t) {
        if (t % 8 != 0) problem.q.set(t, 9, 50 * random.normal());
      }
      for (const int64_t size : {int64_t{1500}, kQueries - idle - 1500}) {
        problem.add_group(size);
        problem.select_some(problem.groups() - 1, random, 0.3);
      }
      AttendArgs args = problem.args();
      args.products = products;
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args)) << idle << " idle";
    }
  });
}

// From 4,096 keys on, every 8th balances the channels, and all of them give the unit. Here the others are wider.
TEST(Products, ManyKeysAreBalancedByASample) {
  each_products([](const Exec& exec, Products products) {
    constexpr int64_t kKeys = 4500;
    Random random(18);
    Problem problem(random, DType::bf16, 120, kKeys, 64);
    for (int64_t j = 0; j < kKeys; ++j) {
      problem.k.set(j, 20, 3);
      if (j % 8 != 0) problem.k.set(j, 9, 5 + 20 * random.normal());
    }
    for (const int64_t size : {50, 70}) {
      problem.add_group(size);
      problem.select_some(problem.groups() - 1, random, 0.02);
    }
    problem.add_extra(random, 40);
    AttendArgs args = problem.args();
    args.products = products;
    ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args));

    // Holes of whole words, and of all keys in the sample.
    for (const int64_t hole : {32, 8}) {
      std::vector<uint32_t> valid(static_cast<size_t>(mask_words(kKeys)));
      for (int64_t j = 0; j < kKeys; ++j) {
        if (hole == 32 ? j / 32 % 5 != 0 : j % 8 != 0) set_mask_bit(valid.data(), j);
      }
      for (size_t i = 0; i < problem.mask.size(); ++i) problem.mask[i] &= valid[i % valid.size()];
      args = problem.args();
      args.products = products, args.valid = valid.data();
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args)) << "holes by " << hole;
    }
  });
}

// What is not in the sample: something where that is constant, and what is not finite.
TEST(Products, WhatTheSampleOfKeysLacksIsDoneIn16Bits) {
  each_products([](const Exec& exec, Products products) {
    for (const double what : {2.0, 0.5, static_cast<double>(kInf), std::nan("")}) {
      constexpr int64_t kKeys = 4200;
      Random random(19);
      Problem problem(random, DType::bf16, 97, kKeys, 64);
      for (int64_t j = 0; j < kKeys; ++j) problem.k.set(j, 9, 2);
      problem.k.set(4001, 9, what);
      problem.add_dense_group(97);
      AttendArgs args = problem.args();
      const auto in_16 = Result(exec, args).all();
      args.products = products;
      EXPECT_EQ(Result(exec, args).all() == in_16, what != 2) << what;
    }
  });
}

// What is not in the sample: something where that is zero, and what is not finite.
TEST(Products, WhatTheSampleOfQueriesLacksIsDoneIn16Bits) {
  each_products([](const Exec& exec, Products products) {
    for (const double what : {0.5, static_cast<double>(kInf), std::nan("")}) {
      constexpr int64_t kQueries = 4200, kKeys = 97;
      Random random(17);
      Problem problem(random, DType::bf16, kQueries, kKeys, 64);
      for (int64_t t = 0; t < kQueries; ++t) problem.q.set(t, 9, 0);
      problem.q.set(4001, 9, what);
      problem.add_dense_group(kQueries);
      AttendArgs args = problem.args();
      const auto in_16 = Result(exec, args).all();
      args.products = products;
      EXPECT_EQ(Result(exec, args).all(), in_16) << what;
    }
  });
}

TEST(Products, CloseToExactAttention) {
  each_products([](const Exec& exec, Products products) {
    for (const int64_t nk : {700, 9000}) {
      for (const double deviation : {0.3, 2.0}) {
        Random random(7);
        Problem problem(random, DType::bf16, 256, nk, 128, deviation);
        problem.add_dense_group(256);
        AttendArgs args = problem.args();
        const double bf16 = relative_error(exec, args);
        args.products = products;
        const double error = relative_error(exec, args);
        RecordProperty(fmt::format("error_{}_{}_{}", row(products).name, nk, deviation), fmt::format("{:.5f}", error));
        EXPECT_LT(error, products == Products::qk8 ? 0.025 : 0.05) << nk << " keys, deviation " << deviation;
        EXPECT_GT(error, bf16) << "8 bits were not used";
      }
    }
  });
}

// Thousands of values on one side of the mean: sums of few bits would lose to every one of them.
TEST(Products, LongSumsOfOneSignKeepTheirSize) {
  each_products([](const Exec& exec, Products products) {
    constexpr int64_t kQueries = 100, kKept = 6000;
    Random random(12);
    Problem problem(random, DType::bf16, kQueries, 2 * kKept, 128, 0.1);
    problem.add_group(kQueries);
    for (int64_t j = 0; j < 2 * kKept; ++j) {
      for (int64_t c = 0; c < 128; ++c) problem.v.set(j, c, (j < kKept ? 0.5 : -0.5) * (1 + random.uniform()));
      if (j < kKept) problem.select(0, j);
    }
    AttendArgs args = problem.args();
    args.products = products;
    const Result ours(exec, args);
    const auto exact = reference::attend(args);
    double sum = 0, whole = 0;
    for (int64_t t = 0; t < kQueries; ++t) {
      for (int64_t c = 0; c < 128; ++c) sum += ours.at(t, c), whole += exact.out.data[static_cast<size_t>(t * 128 + c)];
    }
    RecordProperty(fmt::format("lost_{}", row(products).name), fmt::format("{:.5f}", 1 - sum / whole));
    EXPECT_NEAR(sum / whole, 1, 0.01);
  });
}

// One channel 100 times the rest, in each of the three.
TEST(Products, ChannelThatStandsOut) {
  each_products([](const Exec& exec, Products products) {
    for (const int where : {0, 1, 2}) {
      SCOPED_TRACE(where == 0 ? "q" : where == 1 ? "k" : "v");
      Random random(8);
      Problem problem(random, DType::bf16, 200, 700, 128);
      Rows& rows = where == 0 ? problem.q : where == 1 ? problem.k : problem.v;
      for (int64_t t = 0; t < rows.view().tokens; ++t) rows.set(t, 37, 100 * reference::element(rows.view(), t, 37));
      problem.scale = where == 2 ? problem.scale : 0.01f;
      problem.add_dense_group(200);
      AttendArgs args = problem.args();
      args.products = products;
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args));
      EXPECT_LT(relative_error(exec, args), 0.06);
    }
  });
}

// Mean over every tenth query of the deviation of its logits.
double spread(const Problem& problem) {
  const RowsView q = problem.q.view(), k = problem.k.view();
  double all = 0;
  for (int64_t t = 0; t < q.tokens; t += 10) {
    double sum = 0, squares = 0;
    for (int64_t j = 0; j < k.tokens; ++j) {
      double x = 0;
      for (int64_t c = 0; c < q.dim; ++c) x += reference::element(q, t, c) * reference::element(k, j, c);
      sum += x, squares += x * x;
    }
    const auto n = static_cast<double>(k.tokens);
    all += std::sqrt(squares / n - sum / n * (sum / n)) / static_cast<double>(q.tokens / 10);
  }
  return all * static_cast<double>(problem.scale);
}

// Four channels 10 to 100 times the others, in k, in q, or in other ones of both; with an offset of as much, that of keys in
// opposite directions by turns. Under the same scale logits are so much wider; scaled down to the spread that they had, the
// error is less than without such channels.
TEST(Products, ChannelsThatStandOutDoNotSmearTheOthers) {
  each_products([](const Exec& exec, Products products) {
    for (const int64_t dim : {64, 72, 128}) {
      for (const double deviation : {1.0, 4.0}) {
        double without = 0, spread_without = 0, worst = 0, worst_wide = 0;
        const auto check = [&](double factor, int where, bool offset) {
          SCOPED_TRACE(fmt::format("{} channels, deviation {}, {} times in {}{}", dim, deviation, factor,
                                   where == 0   ? "k"
                                   : where == 1 ? "q"
                                                : "both",
                                   offset ? ", with an offset" : ""));
          Random random(20);
          Problem problem(random, DType::bf16, 100, 2000, dim, deviation);
          const auto widen = [&](Rows& rows, int64_t first) {
            for (int64_t t = 0; t < rows.view().tokens; ++t) {
              for (const int64_t c : {first, first + 10, first + 11, first + 40}) {
                const double side = !offset ? 0 : &rows == &problem.k && t % 2 == 0 ? -1 : 1;
                rows.set(t, c, factor * (side + reference::element(rows.view(), t, c)));
              }
            }
          };
          if (where != 1) widen(problem.k, 5);
          if (where != 0) widen(problem.q, 8);
          problem.add_dense_group(100);
          const double wide = spread(problem);
          const auto error = [&] {
            AttendArgs args = problem.args();
            args.products = products;
            return relative_error(exec, args);
          };
          if (factor == 1) {
            without = error(), spread_without = wide;
            return;
          }
          const double of_wide = error() / without;
          problem.scale *= static_cast<float>(spread_without / wide);
          const double same = error() / without;
          worst = std::max(worst, same), worst_wide = std::max(worst_wide, of_wide);
          EXPECT_LT(same, products == Products::qk8 ? 1.0 : 1.5);
          if (dim == 128) {
            EXPECT_LT(of_wide, 2) << "under the same scale";
          }
        };
        check(1, 0, false);
        for (const double factor : {10.0, 30.0, 100.0}) {
          for (const int where : {0, 1, 2}) {
            for (const bool offset : {false, true}) check(factor, where, offset);
          }
        }
        RecordProperty(fmt::format("worst_{}_{}_{}", row(products).name, dim, deviation), fmt::format("{:.2f}", worst));
        RecordProperty(fmt::format("wide_{}_{}_{}", row(products).name, dim, deviation), fmt::format("{:.2f}", worst_wide));
      }
    }
  });
}

// A call without a selection is one with all keys selected, bit by bit, and keeps its log-sum-exp.
TEST(Products, DenseCallEqualsAFullSelection) {
  each_products([](const Exec& exec, Products products) {
    for (const int64_t dim : {64, 128}) {
      Random random(12);
      Problem problem(random, DType::bf16, 300, 777, dim);
      problem.order = all_rows(300);
      problem.add_dense_group(300);
      AttendArgs args = problem.args();
      args.products = products;
      const auto selected = Result(exec, args).all();
      args.order = {}, args.offsets = {}, args.mask = {};
      EXPECT_EQ(Result(exec, args).all(), selected) << dim << " channels";
    }
  });
}

TEST(Products, ConstantKeysAndZeroRows) {
  each_products([](const Exec& exec, Products products) {
    Random random(9);
    Problem same(random, DType::bf16, 100, 300, 128), zeros(random, DType::bf16, 100, 300, 128);
    for (int64_t j = 1; j < 300; ++j) same.k.copy_row(j, 0);
    for (int64_t c = 0; c < 128; ++c) {
      for (int64_t t = 0; t < 100; t += 3) zeros.q.set(t, c, 0);
      for (int64_t j = 0; j < 300; j += 7) zeros.k.set(j, c, 0), zeros.v.set(j, c, 0);
    }
    for (Problem* problem : {&same, &zeros}) {
      problem->add_dense_group(100);
      AttendArgs args = problem->args();
      args.products = products;
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args));
    }
  });
}

// Products so small that their unit is no float: what is left are the biases, which a device divides by that unit.
TEST(Products, BiasesBesideProductsThatVanish) {
  each_products([](const Exec& exec, Products products) {
    Random random(16);
    Problem problem(random, DType::bf16, 100, 300, 128, 1e-25);
    for (int64_t j = 0; j < 300; ++j) {
      for (int64_t c = 0; c < 128; ++c) problem.k.set(j, c, 1e-25 * random.normal());
    }
    problem.add_group(100);
    problem.select_some(0, random, 0.1);
    problem.add_extra(random, 40);
    for (float& x : problem.extra_k) x *= 1e-25f;
    for (const float bias : {0.0f, 5.0f, -20.0f}) {
      problem.bias[0] = bias;
      set_mask_bit(problem.extra_mask.data(), 0);
      AttendArgs args = problem.args();
      args.products = products;
      ASSERT_NO_FATAL_FAILURE(expect_as_emulated(exec, args)) << "bias " << bias;
    }
  });
}

// A head with a value that is not finite is done in 16 bits, and the others of its chunk are not.
TEST(Products, HeadThatIsNotFiniteIsDoneIn16Bits) {
  each_products([](const Exec& exec, Products products) {
    for (const float bad : {1.0f, kNan, kInf}) {
      SCOPED_TRACE(bad);
      Random random(10);
      std::vector<Problem> problems;
      for (int h = 0; h < 3; ++h) {
        Problem& problem = problems.emplace_back(random, DType::bf16, 250, 300, 128);
        problem.q = Rows(random, DType::bf16, 250, 128, 1, 0);  // of one stride
        problem.k = Rows(random, DType::bf16, 300, 128, 1, 8), problem.v = Rows(random, DType::bf16, 300, 128, 1, 0);
        problem.add_group(250);
        problem.select_some(0, random, 0.5);
      }
      problems[1].k.set(17, 5, bad);
      std::vector<std::unique_ptr<Output>> together;
      std::vector<AttendArgs> chunk;
      for (const Problem& problem : problems) {
        AttendArgs args = problem.args();
        args.products = products;
        chunk.push_back(together.emplace_back(std::make_unique<Output>(exec, args))->args);
      }
      run_attend(exec, chunk);
      for (size_t h = 0; h < 3; ++h) {
        AttendArgs args = problems[h].args();
        const auto in_16 = Result(exec, args).all();
        args.products = products;
        const auto in_8 = Result(exec, args).all();
        EXPECT_EQ(in_16 == in_8, h == 1 && bad != 1) << "head " << h;
        EXPECT_TRUE(together[h]->all() == in_8) << "head " << h << " of a chunk";
      }
    }
  });
}

// Keys that are not valid, and queries that attend to nothing, hold anything, and what they hold changes nothing.
TEST(Products, InvalidKeysAndIdleQueriesDoNotCount) {
  each_products([](const Exec& exec, Products products) {
    std::vector<std::vector<uint8_t>> results;
    for (const float rest : {0.0f, 1e30f, kNan}) {
      Random random(11);
      Problem problem(random, DType::bf16, 250, 300, 128);
      problem.add_group(240);
      for (const int32_t idle : std::span(problem.order).subspan(240)) {
        for (int64_t c = 0; c < 128; ++c) problem.q.set(idle, c, rest);
      }
      std::vector<uint32_t> valid(static_cast<size_t>(mask_words(300)));
      for (int64_t j = 0; j < 300; ++j) {
        if (j % 5 != 0) {
          set_mask_bit(valid.data(), j), problem.select(0, j);
        } else {
          for (int64_t c = 0; c < 128; ++c) problem.k.set(j, c, rest), problem.v.set(j, c, rest);
        }
      }
      AttendArgs args = problem.args();
      args.products = products;
      args.valid = valid.data();
      results.push_back(Result(exec, args).all());
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
  });
}

TEST(Products, BitwiseOverThreadsAndRuns) {
  each_products([](const Exec& exec, Products products) {
    Random random(14);
    Problem problem(random, DType::bf16, 690, 4000, 128);
    for (const int64_t n : {5, 0, 600, 80}) {
      problem.add_group(n);
      problem.select_some(problem.groups() - 1, random, 0.9);
    }
    problem.add_extra(random, 4);
    AttendArgs args = problem.args();
    args.products = products;
    const auto first = Result(exec, args).all();
    for (const int threads : {1, 3, 5}) {
      Exec other = exec;
      other.pool = &pool(threads);
      EXPECT_EQ(Result(other, args).all(), first) << threads << " threads";
    }
    for (int64_t run = 0; run < scaled(limits().runs); ++run) ASSERT_EQ(Result(exec, args).all(), first) << "run " << run;
  });
}

}  // namespace
}  // namespace scope::test
