// 8-bit products in whole calls with text, lengths and holes: padding changes nothing, however wide the text's keys are.
#include "call_support.h"
#include "stages/choices.h"

namespace scope::test {
namespace {

constexpr int64_t kVideo = 390, kText = 50, kTokens = kVideo + kText;

// Video, then text whose keys are `wide` times as wide. The text is always kept and attends densely.
struct Words {
  Inputs in;
  Extra extra;

  explicit Words(int64_t dim, float wide) : in(1, 2, kTokens, kTokens, dim, 7, DType::bf16) {
    for (int64_t i = 0; i < in.heads * kTokens; ++i) {
      if (i % kTokens < kVideo) continue;
      for (int64_t c = 0; c < dim; ++c) {
        float& x = in.k[static_cast<size_t>(i * dim + c)];
        x = static_cast<float>(reference::rounded(static_cast<double>(wide * x), DType::bf16));
      }
    }
    extra.keep.resize(static_cast<size_t>(mask_words(kTokens)));
    for (int64_t i = kVideo; i < kTokens; ++i) set_mask_bit(extra.keep.data(), i);
    extra.dense_queries = extra.keep;
  }
};

enum class Padding { length, holes, both };

// The same tokens with padding behind them, among them or both, which holds NaN. tokens[i] is where token i went.
struct Padded {
  Inputs in;
  Extra extra;
  std::vector<int64_t> tokens;

  Padded(const Words& words, Padding padding) : in(words.in) {
    const int64_t behind = padding == Padding::holes ? 0 : 23;
    int64_t end = 0;
    for (int64_t i = 0; i < kTokens; ++i) {
      // One hole is a whole word of the mask; the others lie before a text token and inside the text.
      if (padding != Padding::length && (i == 96 || i == kVideo || i == kVideo + 9)) end += i == 96 ? 32 : 3;
      tokens.push_back(end++);
    }
    in.q_tokens = in.k_tokens = end + behind;
    const auto spread = [&](const std::vector<float>& from, std::vector<float>& to) {
      to.assign(static_cast<size_t>(in.heads * in.q_tokens * in.dim), std::numeric_limits<float>::quiet_NaN());
      for (int64_t i = 0; i < in.heads * kTokens; ++i) {
        const int64_t row = i / kTokens * in.q_tokens + tokens[static_cast<size_t>(i % kTokens)];
        std::copy_n(from.begin() + i * in.dim, in.dim, to.begin() + row * in.dim);
      }
    };
    spread(words.in.q, in.q);
    spread(words.in.k, in.k);
    spread(words.in.v, in.v);
    const auto bits = static_cast<size_t>(mask_words(in.q_tokens));
    std::vector<uint32_t> valid(bits);
    extra.keep.resize(bits);
    for (int64_t i = 0; i < kTokens; ++i) {
      set_mask_bit(valid.data(), tokens[static_cast<size_t>(i)]);
      if (i >= kVideo) set_mask_bit(extra.keep.data(), tokens[static_cast<size_t>(i)]);
    }
    extra.dense_queries = extra.keep;
    if (padding != Padding::length) extra.valid_queries = extra.valid_keys = valid;
    if (padding != Padding::holes) extra.q_lengths = extra.k_lengths = {end};
  }
};

std::vector<Settings> settings_of(Products products) {
  const char* name = row(products).name;
  return {method("dense", {{"products", name}}),
          method("scope", {{"products", name}, {"groups", "9"}, {"codes", "20"}, {"partition", "even:3"}, {"rho", "0.8"}}),
          method("scope-mean", {{"products", name}, {"groups", "9"}, {"target_density", "0.4"}}),
          method("scope-mean", {{"products", name}, {"groups", "9"}, {"target_density", "0.4"}, {"tail", "mean"}})};
}

// Root mean square of the differences over that of `want`.
double apart(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double x = static_cast<double>(want[i]), d = static_cast<double>(got[i]) - x;
    error += d * d, size += x * x;
  }
  return std::sqrt(error / size);
}

TEST(ProductsCall, PaddingBesideTextChangesNothing) {
  const Context context = tested_context();
  bool any = false;
  for (const Products products : {Products::qk8, Products::qkv8}) {
    for (const int64_t dim : {64, 128}) {
      for (const float wide : {1.0f, 2.0f, 10.0f, 100.0f}) {
        const Words words(dim, wide);
        for (const Settings& settings : settings_of(products)) {
          SCOPED_TRACE(fmt::format("{}, {}, {} channels, text {} times as wide", settings.method->name, row(products).name,
                                   dim, wide));
          Settings exact = settings;
          exact.products = Products::bf16;
          std::unique_ptr<Plan> plan;
          try {
            plan = std::make_unique<Plan>(context, settings, words.in.shape(true));
          } catch (const Error& error) {
            ASSERT_EQ(error.status(), Status::unsupported) << error.what();
            continue;
          }
          any = true;
          const Result want = run(*plan, words.in, words.extra);
          if (wide <= 2) {  // what 8 bits cost here; bytes that wrap around cost 1
            const Result in_16 = run(Plan(context, exact, words.in.shape(true)), words.in, words.extra);
            EXPECT_LT(apart(want.out, in_16.out), 0.05);
          }
          for (const Padding padding : {Padding::length, Padding::holes, Padding::both}) {
            SCOPED_TRACE(fmt::format("padding {}", static_cast<int>(padding)));
            const Padded padded(words, padding);
            const Result got = run(Plan(context, settings, padded.in.shape(true)), padded.in, padded.extra);
            ASSERT_NO_FATAL_FAILURE(expect_invalid(padded.in, got, padded.extra));
            std::vector<float> out;
            for (int64_t i = 0; i < words.in.heads * kTokens; ++i) {
              const int64_t row = i / kTokens * padded.in.q_tokens + padded.tokens[static_cast<size_t>(i % kTokens)];
              ASSERT_EQ(got.labels[static_cast<size_t>(row)], want.labels[static_cast<size_t>(i)]) << "query " << i;
              out.insert(out.end(), got.out.begin() + row * dim, got.out.begin() + (row + 1) * dim);
            }
            EXPECT_LT(apart(out, want.out), 4e-3);  // the order of sums, in bf16
          }
        }
      }
    }
  }
  if (!any) GTEST_SKIP() << "this machine has no 8-bit products";
}

// Four channels of the keys 30 and 100 times as wide as the others, with an offset as some models have: logits are so much
// wider, or queries so much shorter.
TEST(ProductsCall, ChannelsThatStandOutCostNoMore) {
  const Context context = tested_context();
  bool any = false;
  for (const Products products : {Products::qk8, Products::qkv8}) {
    for (const int64_t dim : {64, 128}) {
      for (const Settings& settings : settings_of(products)) {
        SCOPED_TRACE(fmt::format("{}, {}, {} channels", settings.method->name, row(products).name, dim));
        Settings exact = settings;
        exact.products = Products::bf16;
        const auto error = [&](float factor, float offset, bool shorter) {
          Inputs in(1, 2, 700, 700, dim, 7, DType::bf16);
          const auto set = [](float& x, float value) {
            x = static_cast<float>(reference::rounded(static_cast<double>(value), DType::bf16));
          };
          const auto channels = static_cast<float>(dim);
          for (float& x : in.q) set(x, shorter ? x / std::sqrt((channels - 4 + 4 * factor * factor) / channels) : x);
          for (int64_t i = 0; i < in.heads * in.k_tokens; ++i) {
            for (const int64_t c : {5, 20, 21, 50}) {
              float& x = in.k[static_cast<size_t>(i * dim + c)];
              set(x, factor * (offset + x));
            }
          }
          return apart(run(Plan(context, settings, in.shape()), in).out, run(Plan(context, exact, in.shape()), in).out);
        };
        double without = 0;
        try {
          without = error(1, 0, false);
        } catch (const Error& refused) {
          ASSERT_EQ(refused.status(), Status::unsupported) << refused.what();
          continue;
        }
        any = true;
        for (const float factor : {30.0f, 100.0f}) {
          for (const float offset : {0.0f, 3.0f}) {
            SCOPED_TRACE(fmt::format("{} times, offset {}", factor, offset));
            EXPECT_LT(error(factor, offset, true), (products == Products::qk8 ? 1.2 : 1.5) * without) << "shorter queries";
            // Each query sees fewer keys then, whose errors do not even out: 4.3 times at most, and 14 without a rotation.
            if (dim == 128) {
              EXPECT_LT(error(factor, offset, false), 5 * without) << "wider logits";
            }
          }
        }
      }
    }
  }
  if (!any) GTEST_SKIP() << "this machine has no 8-bit products";
}

}  // namespace
}  // namespace scope::test
