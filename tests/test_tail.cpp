// The tail's mean against float64: the stage alone, and through whole calls.
#include <gtest/gtest.h>

#include <cmath>

#include "call_support.h"
#include "cases.h"
#include "reference.h"
#include "select_output.h"

namespace scope::test {
namespace {

// Centroids, keys and values of one head, with holes among the tokens, text, and random masks.
struct MeanProblem {
  int64_t groups, tokens, dim, codes = 0;
  Rows k, v;
  std::vector<float> centroids, tables;
  std::vector<int32_t> rows, labels, sizes;
  std::vector<uint32_t> kept, keep;
  TailArgs args;

  MeanProblem(Random& random, DType dtype, int64_t g, int64_t n, int64_t d, bool by_codes, bool text)
      : groups(g), tokens(n), dim(d), k(random, dtype, n, d, 1.0), v(random, dtype, n, d, 1.0) {
    const int64_t words = mask_words(tokens);
    keep.assign(static_cast<size_t>(words), 0u);
    for (int32_t t = 0; t < tokens; ++t) {
      const bool is_text = text && t > 0 && random.chance(0.15);
      if (is_text) set_mask_bit(keep.data(), t);
      if (!is_text && (t == 0 || random.chance(0.9))) rows.push_back(t);  // the rest is padding
    }
    for (int64_t i = 0; i < groups * dim; ++i) {
      centroids.push_back(static_cast<float>(reference::rounded(random.normal(), by_codes ? DType::f32 : dtype)));
    }
    for (int64_t c = 0; c < groups; ++c) sizes.push_back(static_cast<int32_t>(random.below(4)));
    kept.assign(static_cast<size_t>(groups * words), 0u);
    for (int64_t c = 0; c < groups; ++c) {
      const double share = c % 5 == 0 ? 1.0 : random.uniform();  // some drop nothing
      for (const int32_t t : rows) {
        if (random.uniform() < share) set_mask_bit(kept.data() + c * words, t);
      }
    }
    const auto count = static_cast<int64_t>(rows.size());
    if (by_codes) {
      codes = std::min<int64_t>(count, 7);
      for (int64_t i = 0; i < groups * 2 * codes; ++i) tables.push_back(static_cast<float>(random.normal()));
      for (int64_t i = 0; i < 2 * count; ++i) labels.push_back(static_cast<int32_t>(random.below(codes)));
    }
    args.tail = Tail::mean;
    args.proxy = {.kind = by_codes ? ProxyKind::codes : ProxyKind::exact,
                  .groups = groups,
                  .count = count,
                  .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                  .centroids = centroids.data(),
                  .k = k.view(),
                  .rows = rows.data(),
                  .subspaces = by_codes ? 2 : 0,
                  .codes = codes,
                  .tables = by_codes ? tables.data() : nullptr,
                  .labels = by_codes ? labels.data() : nullptr};
    args.v = v.view();
    args.sizes = sizes.data();
    args.kept = kept.data();
    args.weight = random.uniform();
    args.keep = text ? keep.data() : nullptr;
    args.centred = by_codes && random.chance(0.5);
    args.rows = groups + 1;
  }
  MeanProblem(const MeanProblem&) = delete;
  MeanProblem& operator=(const MeanProblem&) = delete;

  double dot(int64_t group, int32_t token, const std::vector<double>& centre) const {
    double sum = 0;
    for (int64_t c = 0; c < dim; ++c) {
      sum += static_cast<double>(centroids[static_cast<size_t>(group * dim + c)]) *
             (reference::element(k.view(), token, c) - centre[static_cast<size_t>(c)]);
    }
    return sum * static_cast<double>(args.proxy.scale);
  }
  double logit(int64_t group, size_t key) const {
    if (args.proxy.kind == ProxyKind::exact) return dot(group, rows[key], std::vector<double>(static_cast<size_t>(dim)));
    double sum = 0;
    for (size_t m = 0; m < 2; ++m) {
      const auto code = static_cast<size_t>(labels[m * rows.size() + key]);
      sum += static_cast<double>(tables[(static_cast<size_t>(group) * 2 + m) * static_cast<size_t>(codes) + code]);
    }
    return sum;
  }
  // The mean of the keys that take part, where codes are centred.
  std::vector<double> centre() const {
    std::vector<double> mean(static_cast<size_t>(dim));
    for (size_t j = 0; args.centred && j < rows.size(); ++j) {
      for (int64_t c = 0; c < dim; ++c) {
        mean[static_cast<size_t>(c)] += reference::element(k.view(), rows[j], c) / static_cast<double>(rows.size());
      }
    }
    return mean;
  }
};

void expect_mean(const Exec& exec, const MeanProblem& problem) {
  // Products by bf16 dot products round the weights, as a device's do.
  const bool bf16_dots = problem.args.v.dtype == DType::bf16 && exec.attend_kernels_bf16 != nullptr;
  const double rounding = bf16_dots ? 0x1p-5 : limits().tail_mean;
  Guarded<float> value((problem.groups + 1) * problem.dim), share(problem.groups + 1);
  TailArgs args = problem.args;
  GuardedScratch scratch(backend().tail_scratch(exec, sizes_of(args)));
  args.value = value.data();
  args.share = share.data();
  args.scratch = scratch_of(scratch);
  run_tail(exec, {&args, 1});
  const std::vector<double> centre = problem.centre();
  for (int64_t g = 0; g <= problem.groups; ++g) {
    double all = 0, dropped = 0;
    std::vector<double> mean(static_cast<size_t>(problem.dim)), square(mean);
    const bool lives = g < problem.groups && problem.sizes[static_cast<size_t>(g)] > 0;
    for (size_t j = 0; lives && j < problem.rows.size(); ++j) {
      const double mass = std::exp(problem.logit(g, j));
      all += mass;
      if (mask_bit(problem.kept.data() + g * mask_words(problem.tokens), problem.rows[j])) continue;
      dropped += mass;
      for (int64_t c = 0; c < problem.dim; ++c) {
        const double term = mass * reference::element(problem.v.view(), problem.rows[j], c);
        mean[static_cast<size_t>(c)] += term;
        square[static_cast<size_t>(c)] += term * term;
      }
    }
    for (int32_t t = 0; lives && args.keep != nullptr && t < problem.tokens; ++t) {
      if (mask_bit(problem.keep.data(), t)) all += std::exp(problem.dot(g, t, centre));
    }
    const double expected = dropped == 0 ? 0.0 : std::min(args.weight * dropped / all, 1 - 0x1p-10);
    ASSERT_NEAR(share[g], expected, dropped == 0 ? 0.0 : limits().tail_mass * expected + 2e-5) << "group " << g;
    ASSERT_LE(share[g], 1 - 0x1p-10) << "group " << g;
    for (int64_t c = 0; c < problem.dim; ++c) {
      const double want = dropped == 0 ? 0.0 : mean[static_cast<size_t>(c)] / dropped;
      const double size = dropped == 0 ? 0.0 : std::sqrt(square[static_cast<size_t>(c)]) / dropped;
      ASSERT_NEAR(value[g * problem.dim + c], want, rounding * size + 2e-5) << "group " << g << " channel " << c;
    }
  }
}

TEST(TailMean, DifferentialAgainstFloat64) {
  each_machine([](const Exec& exec) {
    for (uint64_t seed = 0; seed < 120; ++seed) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      Random random(900 + seed);
      const DType dtype = random.pick(limits().dtypes);
      // More groups than a block of threads has, and more keys than it takes at a time.
      const MeanProblem problem(random, dtype, random.between(1, seed % 4 == 0 ? 200 : 40),
                                random.between(1, seed % 5 == 0 ? 1500 : 300), random.pick(limits().dims), seed % 2 == 1,
                                seed % 3 == 1);
      ASSERT_NO_FATAL_FAILURE(expect_mean(exec, problem));
    }
  });
}

// The text is added a block of 256 keys at a time, on the call's own scale of the logits.
TEST(TailMean, BlocksOfTextKeysOnAnyScale) {
  each_machine([](const Exec& exec) {
    for (const int64_t text : {255, 256, 257, 512, 600}) {
      for (const float factor : {0.5f, 2.0f}) {
        for (const bool by_codes : {false, true}) {
          SCOPED_TRACE(fmt::format("{} keys of text, {} times the usual scale, by codes {}", text, factor, by_codes));
          Random random(static_cast<uint64_t>(4000 + text));
          MeanProblem problem(random, limits().finest, 12, 4000, 64, by_codes, true);
          std::vector<bool> takes_part(4000);
          for (const int32_t t : problem.rows) takes_part[static_cast<size_t>(t)] = true;
          std::fill(problem.keep.begin(), problem.keep.end(), 0u);
          int64_t left = text;
          for (int64_t t = 0; t < problem.tokens && left > 0; ++t) {
            if (takes_part[static_cast<size_t>(t)]) continue;
            set_mask_bit(problem.keep.data(), t);
            --left;
          }
          ASSERT_EQ(left, 0);
          problem.args.weight = 1;
          problem.args.proxy.scale *= factor;
          ASSERT_NO_FATAL_FAILURE(expect_mean(exec, problem));
        }
      }
    }
  });
}

// A group that drops nearly all of a flat row still keeps a share of 2^-10 for what it attends to.
TEST(TailMean, TheShareOfAFlatRowIsBounded) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const int64_t kept : {1, 2}) {
        SCOPED_TRACE(fmt::format("{}, {} kept", dtype_name(dtype), kept));
        Random random(78);
        MeanProblem problem(random, dtype, 9, 4096, 64, false, false);
        std::fill(problem.centroids.begin(), problem.centroids.end(), 0.0f);
        std::fill(problem.sizes.begin(), problem.sizes.end(), 1);
        std::fill(problem.kept.begin(), problem.kept.end(), 0u);
        for (int64_t c = 0; c < problem.groups; ++c) {
          for (int64_t j = 0; j < kept; ++j) {
            set_mask_bit(problem.kept.data() + c * mask_words(problem.tokens),
                         problem.rows[static_cast<size_t>(100 * c + j)]);
          }
        }
        problem.args.weight = 1;
        ASSERT_NO_FATAL_FAILURE(expect_mean(exec, problem));
      }
    }
  });
}

// Every block of keys has higher logits than the one before, by less and by more than a float holds.
TEST(TailMean, LogitsThatRiseFromKeyToKey) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      for (const double rise : {30.0, 200.0, 1500.0}) {  // in powers of two
        SCOPED_TRACE(fmt::format("{}, rise {}", dtype_name(dtype), rise));
        Random random(77);
        MeanProblem problem(random, dtype, 20, 6000, 128, false, false);
        for (int64_t c = 0; c < problem.groups; ++c) problem.centroids[static_cast<size_t>(c * 128 + 3)] = 1;
        for (int64_t j = 0; j < problem.tokens; ++j) {
          problem.k.set(j, 3,
                        rise * static_cast<double>(j - problem.tokens) / static_cast<double>(problem.tokens) *
                            std::log(2.0) / static_cast<double>(problem.args.proxy.scale));
        }
        ASSERT_NO_FATAL_FAILURE(expect_mean(exec, problem));
      }
    }
  });
}

// keep makes the mean on the CPU alone: over the masks that it made, it is that of the tail, bit by bit.
TEST(TailMeanOnCpu, InThePassOfTheMasksItIsTheTails) {
  ASSERT_TRUE(backend().can.mean_in_keep);
  each_machine([](const Exec& exec) {
    for (uint64_t seed = 0; seed < 30; ++seed) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      Random random(2900 + seed);
      const MeanProblem problem(random, random.pick(limits().dtypes), random.between(1, 200), random.between(1, 700),
                                random.pick(limits().dims), seed % 2 == 1, seed % 3 == 1);
      const double alpha = 0.05;
      WeighArgs weigh;
      weigh.proxy = problem.args.proxy;
      weigh.sizes = problem.sizes.data();
      weigh.rule = seed % 5 == 0 ? Rule::fixed : Rule::target;
      weigh.density = 0.3;
      weigh.alpha = &alpha;
      SelectOutput out(exec, weigh);
      TailArgs tail = problem.args;
      tail.kept = out.mask.data();
      const int64_t rows = problem.groups + 1;
      Guarded<float> value(rows * problem.dim), share(rows), tail_value(rows * problem.dim), tail_share(rows);
      tail.value = value.data();
      tail.share = share.data();
      out.args.mean = &tail;
      backend().weigh(exec, out.args.weighed);
      backend().keep(exec, out.args);
      GuardedScratch scratch(backend().tail_scratch(exec, sizes_of(tail)));
      tail.value = tail_value.data();
      tail.share = tail_share.data();
      tail.scratch = scratch_of(scratch);
      backend().tail(exec, tail);
      ASSERT_EQ(joined_bytes(value, share), joined_bytes(tail_value, tail_share));

      // Without room for the proxy matrix, rows are computed for every pass, with the same bits.
      Exec narrow = exec;
      narrow.proxy_floats = 0;
      SelectOutput again(narrow, weigh);
      tail.kept = again.mask.data();
      again.args.mean = &tail;
      backend().weigh(narrow, again.args.weighed);
      backend().keep(narrow, again.args);
      ASSERT_EQ(again.all(), out.all());
      ASSERT_EQ(joined_bytes(value, share), joined_bytes(tail_value, tail_share));
    }
  });
}

Settings mean_settings(const char* rule, const char* weight) {
  return method("scope-exact",
                {{"rule", rule}, {"density", "0.2"}, {"groups", "9"}, {"tail", "mean"}, {"tail_weight", weight}});
}

// Calls that differ by the weight alone: out is linear in what the tail mixes in, and LSE grows by -log(1 - share).
TEST(TailMean, CallsMixTheMeanIn) {
  const Context context = tested_context();
  const DType dtype = backend().can.dtypes.has(DType::f32) ? DType::f32 : DType::f16;
  const Inputs in(1, 2, 300, 300, 32, 5, dtype);
  const auto at = [&](const char* weight) { return run(Plan(context, mean_settings("fixed", weight), in.shape()), in); };
  const Result none = at("0"), half = at("0.4"), whole = at("0.8");
  const Settings plain = method("scope-exact", {{"rule", "fixed"}, {"density", "0.2"}, {"groups", "9"}});
  EXPECT_EQ(none.out, run(Plan(context, plain, in.shape()), in).out) << "weight 0 is no tail";
  double moved = 0;
  for (size_t i = 0; i < none.out.size(); ++i) {
    const double a = none.out[i], b = half.out[i], c = whole.out[i];
    ASSERT_NEAR(c - a, 2 * (b - a), limits().out(dtype));
    moved = std::max(moved, std::abs(c - a));
  }
  EXPECT_GT(moved, 10 * limits().out(dtype));
  double largest = 0;  // a group that keeps nearly all of the mass mixes in less than a float shows
  for (size_t i = 0; i < none.lse.size(); ++i) {
    const double share = 1 - std::exp(static_cast<double>(none.lse[i]) - static_cast<double>(half.lse[i]));
    ASSERT_GE(share, 0);
    largest = std::max(largest, share);
    ASSERT_NEAR(whole.lse[i], static_cast<double>(none.lse[i]) - std::log1p(-2 * share), 1e-4);
  }
  EXPECT_GT(largest, 0.01);
}

// Codes of blocks are less the mean of the keys, and so must be the text's logits beside them: what all keys share moves no
// softmax.
TEST(TailMeanOnCpu, WhatAllKeysShareMovesNothing) {
  const Context context = tested_context();
  Inputs in(1, 2, 300, 300, 32, 6);
  const Settings settings = method("scope", {{"encode", "blocks"},
                                             {"k_block", "16"},
                                             {"partition", "even:1"},
                                             {"rule", "fixed"},
                                             {"density", "0.2"},
                                             {"groups", "9"},
                                             {"tail", "mean"},
                                             {"tail_weight", "1"}});
  const Plan plan(context, settings, in.shape());
  Extra extra;
  extra.keep.assign(10, 0);
  for (int64_t t = 280; t < 300; ++t) set_mask_bit(extra.keep.data(), t);
  const Result before = run(plan, in, extra);
  for (float& x : in.k) x += 0.5f;
  const Result after = run(plan, in, extra);
  ASSERT_EQ(before.mask, after.mask);
  for (size_t i = 0; i < before.out.size(); ++i) ASSERT_NEAR(before.out[i], after.out[i], 1e-4);
}

// Keys of zero make every logit 0: a query that keeps n keys has a log-sum-exp of log n, and 2^10 times that with its tail.
TEST(TailMean, LseOfAFlatRowIsFinite) {
  const Context context = tested_context();
  Inputs in(1, 2, 300, 4096, 32, 8);
  std::fill(in.k.begin(), in.k.end(), 0.0f);
  Settings settings = mean_settings("fixed", "1");
  set_setting(settings, "density", "0.0004");
  const Plan plan(context, settings, in.shape());
  const Result result = run(plan, in);
  for (int64_t row = 0; row < 2 * in.q_tokens; ++row) {
    const int32_t label = result.labels[static_cast<size_t>(row)];
    const int32_t kept = result.counts[static_cast<size_t>(row / in.q_tokens * plan.selection_groups + label)];
    ASSERT_TRUE(kept == 1 || kept == 2) << kept;
    ASSERT_NEAR(result.lse[static_cast<size_t>(row)], std::log(kept) + 10 * std::log(2.0), 1e-3) << row;
  }
}

TEST(TailMean, KeepingAllIsBitwiseWithoutTail) {
  const Context context = tested_context();
  const Inputs in(1, 1, 200, 200, 16, 6);
  Settings settings = mean_settings("online", "1");
  set_setting(settings, "rho", "1");
  const Result with = run(Plan(context, settings, in.shape()), in);
  set_setting(settings, "tail", "none");
  const Result without = run(Plan(context, settings, in.shape()), in);
  EXPECT_EQ(with.out, without.out);
  EXPECT_EQ(with.lse, without.lse);
}

TEST(TailMean, EveryMethodTakesIt) {
  const Context context = tested_context();
  const Inputs in(1, 1, 260, 260, 64, 7);
  for (const Method& row : methods_table()) {
    SCOPED_TRACE(row.name);
    if (row.settings().dense) continue;
    Settings settings = method(row.name, {{"tail", "mean"}});
    if (!tested_has(settings)) continue;
    set_setting(settings, "target_density", "0.5");
    Shape shape = in.shape();
    shape.rope = {24, 20, 20};
    const Result result = run(Plan(context, settings, shape), in);
    for (const float x : result.out) ASSERT_TRUE(std::isfinite(x));
  }
}

}  // namespace
}  // namespace scope::test
