// Sol-Attn as whole calls against float64, from q, k and v alone: which blocks are kept, and what stands for the others.
#include "call_support.h"

namespace scope::test {
namespace {

constexpr int64_t kDim = 24, kBlock = 16;

Settings sol(std::initializer_list<std::pair<const char*, const char*>> set = {}) {
  Settings settings = method("sol", {{"q_block", "16"}, {"k_block", "16"}});
  for (const auto& [name, value] : set) set_setting(settings, name, value);
  return settings;
}

reference::Matrix means_of(const reference::Matrix& x) {
  reference::Matrix means(ceil_div(x.rows, kBlock), kDim);
  for (int64_t i = 0; i < x.rows; ++i) {
    const int64_t n = std::min(kBlock, x.rows - i / kBlock * kBlock);
    for (int64_t c = 0; c < kDim; ++c) means.row(i / kBlock)[c] += x.row(i)[c] / static_cast<double>(n);
  }
  return means;
}

// How many deviations each block of a row lies above the row's mean.
std::vector<double> standing(const double* query, const reference::Matrix& keys) {
  std::vector<double> scores;
  double mean = 0, square = 0;
  for (int64_t r = 0; r < keys.rows; ++r) scores.push_back(reference::dot(query, keys.row(r), kDim));
  for (const double x : scores) mean += x / static_cast<double>(keys.rows);
  for (const double x : scores) square += (x - mean) * (x - mean) / static_cast<double>(keys.rows);
  for (double& x : scores) x = (x - mean) / std::sqrt(square);
  return scores;
}

struct Head {
  std::vector<int32_t> q_rows, k_rows;
  reference::Matrix q, k, v, q_means, k_means, v_means;
};

Head head_of(const Ragged& given, int64_t head) {
  const Inputs& in = given.in;
  const int64_t b = head / in.heads;
  const auto at = static_cast<size_t>(b);
  const auto rows_of = [&](const std::vector<float>& x, int64_t tokens, const std::vector<int32_t>& rows) {
    const RowsView view{x.data() + head * tokens * kDim, DType::f32, tokens, kDim, kDim};
    return reference::gather(view, rows.data(), std::ssize(rows), nullptr, kDim);
  };
  std::vector<int32_t> q_rows = part(given.extra.q_lengths[at], given.extra.dense_queries.data() + b * 5);
  std::vector<int32_t> k_rows = part(given.extra.k_lengths[at], given.extra.keep.data() + b * 6);
  const auto q = rows_of(in.q, in.q_tokens, q_rows), k = rows_of(in.k, in.k_tokens, k_rows),
             v = rows_of(in.v, in.k_tokens, k_rows);
  return {std::move(q_rows), std::move(k_rows), q, k, v, means_of(q), means_of(k), means_of(v)};
}

// Every row of the selection and of the output; `tau`: of the deviation.
void expect_call(const Ragged& given, const Plan& plan, const Result& got, double tau) {
  const Inputs& in = given.in;
  const double scale = 1 / std::sqrt(static_cast<double>(kDim));
  const int64_t words = mask_words(in.k_tokens);
  for (int64_t head = 0; head < in.batch * in.heads; ++head) {
    const Head x = head_of(given, head);
    const int64_t b = head / in.heads;
    for (size_t i = 0; i < x.q_rows.size(); ++i) {
      const int64_t query = x.q_rows[i], c = static_cast<int64_t>(i) / kBlock;
      ASSERT_EQ(got.labels[static_cast<size_t>(head * in.q_tokens + query)], c);
      const uint32_t* mask = got.mask.data() + (head * plan.selection_groups + c) * words;
      const std::vector<double> above = standing(x.q_means.row(c), x.k_means);
      std::vector<std::pair<double, std::vector<double>>> seen;  // logits and values
      const auto see = [&](const double* key, const double* value, double bias) {
        seen.push_back({scale * reference::dot(x.q.row(static_cast<int64_t>(i)), key, kDim) + bias, {value, value + kDim}});
      };
      for (int64_t r = 0; r < x.k_means.rows; ++r) {
        const int64_t begin = r * kBlock, end = std::min(begin + kBlock, x.k.rows);
        const bool kept = mask_bit(mask, x.k_rows[static_cast<size_t>(begin)]);
        const double z = above[static_cast<size_t>(r)];
        if (std::abs(z - tau) > 1e-3 || std::abs(r - c) <= 1) {
          ASSERT_EQ(kept, std::abs(r - c) <= 1 || z > tau)
              << "head " << head << " group " << c << " block " << r << ": " << z;
        }
        for (int64_t j = begin; j < end; ++j) {
          ASSERT_EQ(mask_bit(mask, x.k_rows[static_cast<size_t>(j)]), kept);
          if (kept) see(x.k.row(j), x.v.row(j), 0);
        }
        if (kept) continue;
        std::vector<double> key(x.k_means.row(r), x.k_means.row(r) + kDim), value(x.v_means.row(r), x.v_means.row(r) + kDim);
        for (auto* each : {&key, &value}) {  // virtual keys are of the type of the others
          for (double& number : *each) number = reference::rounded(number, in.dtype);
        }
        see(key.data(), value.data(), std::log(static_cast<double>(end - begin)));
      }
      for (int64_t j = 0; j < given.extra.k_lengths[static_cast<size_t>(b)]; ++j) {  // text
        if (!mask_bit(given.extra.keep.data() + b * 6, j)) continue;
        const reference::Matrix key(in.k.data() + (head * in.k_tokens + j) * kDim, 1, kDim);
        const reference::Matrix value(in.v.data() + (head * in.k_tokens + j) * kDim, 1, kDim);
        see(key.row(0), value.row(0), 0);
      }
      double total = 0;
      std::vector<double> out(kDim);
      for (const auto& [logit, value] : seen) {
        total += std::exp(logit);
        for (size_t k = 0; k < kDim; ++k) out[k] += std::exp(logit) * value[k];
      }
      for (double& value : out) value /= total;
      ASSERT_NO_FATAL_FAILURE(expect_rows(in, got, b, head % in.heads, query, out));
      ASSERT_NEAR(got.lse[static_cast<size_t>(head * in.q_tokens + query)], std::log(total), 1e-3);
    }
  }
}

// Shares of a normal row, and the deviations above which they lie.
TEST(Sol, FollowsItsRulesFromQKAndV) {
  const Ragged given(kDim);
  const Context context = tested_context();
  ASSERT_NEAR(method("sol").rho, 0.5 * std::erfc(std::sqrt(0.5)), 1e-6);  // one deviation is the default
  for (const auto& [rho, tau] : {std::pair{"0.158655", 1.0}, {"0.5", 0.0}, {"0.0227501", 2.0}, {"0.841345", -1.0}}) {
    SCOPED_TRACE(tau);
    const Plan plan(context, sol({{"rho", rho}}), given.shape());
    const Result got = run(plan, given.in, given.extra);
    ASSERT_NO_FATAL_FAILURE(expect_call(given, plan, got, tau));
    EXPECT_EQ(got.stats.iterations, 0);
    EXPECT_EQ(got.heads[0].codes, 11);
  }
}

// One bound for the heads of a sample, or one for each of them: what is solved for is what the rule then compares with.
TEST(Sol, MeetsATargetDensity) {
  const Ragged given(kDim, 9);
  const Context context = tested_context();
  for (const char* scope : {"head", "sample"}) {
    const Plan plan(context, sol({{"target_density", "0.5"}, {"target_scope", scope}}), given.shape());
    const Result got = run(plan, given.in, given.extra);
    EXPECT_NEAR(got.stats.density, 0.5, 0.06) << scope;  // blocks are a tenth of the keys
    if (std::string_view(scope) == "head") continue;
    for (int64_t b = 0; b < 2; ++b)
      EXPECT_EQ(got.heads[static_cast<size_t>(2 * b)].rho, got.heads[static_cast<size_t>(2 * b + 1)].rho);
  }
  // The queries' own block and its neighbours are the least.
  const Result least = run(Plan(context, sol({{"target_density", "0.01"}}), given.shape()), given.in, given.extra);
  EXPECT_EQ(least.heads[0].rho, 0);
  for (const int32_t count : {least.counts[0], least.counts[1]}) EXPECT_LE(count, 3 * kBlock);
}

TEST(Sol, KeysThatAreAllAlikeKeepTheDiagonal) {
  Inputs in(1, 1, 96, 96, kDim, 3);
  for (int64_t j = 1; j < 96; ++j) std::copy_n(in.k.begin(), kDim, in.k.begin() + j * kDim);
  const Result got = run(Plan(tested_context(), sol({{"rho", "0.9"}}), in.shape()), in);
  EXPECT_EQ(std::vector<int32_t>(got.counts.begin(), got.counts.end()), (std::vector<int32_t>{32, 48, 48, 48, 48, 32}));
  EXPECT_NEAR(run(Plan(tested_context(), sol({{"rho", "1"}}), in.shape()), in).stats.density, 1, 0);
}

TEST(SolOnCpu, BitwiseOverThreads) {
  const Ragged given(kDim);
  const Settings settings = sol({{"target_density", "0.4"}});
  const auto with = [&](int threads) { return run(Plan(Context(threads), settings, given.shape()), given.in, given.extra); };
  EXPECT_TRUE(same_bits(with(1), with(3)));
}

TEST(SolOnCpu, RefusesWhatDoesNotGoTogether) {
  const Context context(1);
  const Inputs in(1, 1, 40, 40, kDim, 1);
  for (const auto& [name, value] : {std::pair{"k_block", "8"}, {"group", "kmeans"}, {"encode", "kmeans"}}) {
    Settings settings = sol({{name, value}});
    try {
      Plan(context, settings, in.shape());
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rule: deviation needs group blocks"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace scope::test
