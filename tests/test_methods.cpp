// The baselines as whole calls: SpargeAttn against its float64 rules from q and k alone, SVG2's clusters, text, padding,
// batches, targets, and what is refused.
#include <set>

#include "call_support.h"
#include "reference.h"

namespace scope::test {
namespace {

constexpr int64_t kDim = 24;

reference::Matrix gather(const std::vector<float>& x, int64_t head, int64_t tokens, const std::vector<int32_t>& rows) {
  reference::Matrix out(static_cast<int64_t>(rows.size()), kDim);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(x.data() + (head * tokens + rows[i]) * kDim, kDim, out.row(static_cast<int64_t>(i)));
  }
  return out;
}

struct Block {
  std::vector<double> mean;
  bool similar;
};

std::vector<Block> blocks_of(const reference::Matrix& x, int64_t size, double threshold) {
  std::vector<Block> result;
  for (int64_t begin = 0; begin < x.rows; begin += size) {
    const int64_t n = std::min(size, x.rows - begin);
    reference::Matrix rows(n, kDim);
    std::copy_n(x.row(begin), n * kDim, rows.row(0));
    Block block{std::vector<double>(kDim), n == size && reference::self_similarity(rows) > threshold};
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < kDim; ++c) block.mean[static_cast<size_t>(c)] += rows.row(i)[c] / static_cast<double>(n);
    }
    result.push_back(block);
  }
  return result;
}

TEST(Methods, SpargeFollowsItsRulesFromQAndK) {
  const Ragged ragged(kDim);
  const Inputs& in = ragged.in;
  const Context context = tested_context();
  for (const char* name : {"sparge", "sparge-cdf"}) {
    for (const char* threshold : {"-0.1", "0.1", "0.6"}) {
      const Settings settings =
          method(name, {{"q_block", "16"}, {"k_block", "8"}, {"similarity", threshold}, {"density", "0.3"}, {"rho", "0.7"}});
      const Plan plan(context, settings, ragged.shape());
      const Result result = run(plan, in, ragged.extra);
      expect_consistent(in, plan, result, ragged.extra);
      EXPECT_EQ(result.stats.iterations, 0);  // nothing is clustered
      const int64_t words = mask_words(in.k_tokens);
      int64_t queries_seen = 0, others = 0;
      for (int64_t head = 0; head < 4; ++head) {
        const int64_t b = head / 2;
        const auto at = static_cast<size_t>(b);
        const auto q_rows = part(ragged.extra.q_lengths[at], ragged.extra.dense_queries.data() + b * 5);
        const auto k_rows = part(ragged.extra.k_lengths[at], ragged.extra.keep.data() + b * 6);
        reference::Matrix k = gather(in.k, head, in.k_tokens, k_rows);
        for (int64_t c = 0; c < kDim; ++c) {
          double mean = 0;
          for (int64_t j = 0; j < k.rows; ++j) mean += k.row(j)[c] / static_cast<double>(k.rows);
          for (int64_t j = 0; j < k.rows; ++j) k.row(j)[c] -= mean;
        }
        const auto queries = blocks_of(gather(in.q, head, in.q_tokens, q_rows), 16, settings.similarity);
        const auto keys = blocks_of(k, 8, settings.similarity);
        std::vector<bool> similar;
        for (const Block& block : keys) similar.push_back(block.similar);
        for (size_t i = 0; i < q_rows.size(); ++i) {
          const Block& block = queries[i / 16];
          std::vector<double> scores;
          for (const Block& key : keys) {
            double sum = 0;
            for (size_t c = 0; c < kDim; ++c) sum += block.mean[c] * key.mean[c];
            scores.push_back(sum / std::sqrt(static_cast<double>(kDim)));
          }
          const auto form =
              std::string(name) == "sparge" ? reference::SpargeForm{.topk = 0.3} : reference::SpargeForm{.cdf = 0.7};
          const auto kept = reference::sparge_blocks(scores, similar, block.similar, form);
          const int32_t label = result.labels[static_cast<size_t>(head * in.q_tokens + q_rows[i])];
          const uint32_t* mask = result.mask.data() + (head * plan.selection_groups + label) * words;
          bool same = true;
          for (size_t j = 0; j < k_rows.size(); ++j) {
            same = same &&
                   mask_bit(mask, k_rows[j]) == std::binary_search(kept.begin(), kept.end(), static_cast<int64_t>(j / 8));
          }
          ++queries_seen;
          others += same ? 0 : 1;
        }
      }
      EXPECT_LE(static_cast<double>(others), limits().other_keys * static_cast<double>(queries_seen)) << name << threshold;
    }
  }
}

TEST(Methods, Svg2KeepsItsShareWithTextPaddingAndBatches) {
  const Ragged ragged(kDim);
  const Context context = tested_context();
  for (const char* p : {"0.5", "0.9", "1"}) {
    const Plan plan(context, method("svg2", {{"groups", "9"}, {"codes", "20"}, {"rho", p}}), ragged.shape());
    const Result result = run(plan, ragged.in, ragged.extra);
    expect_consistent(ragged.in, plan, result, ragged.extra);
    EXPECT_EQ(result.heads[0].codes, 20);
    if (std::string(p) == "1") {
      for (const HeadStats& head : result.heads) EXPECT_EQ(head.density, 1.0);
    }
  }
}

// A sample alone equals itself in a batch.
TEST(Methods, BatchesEqualSamplesAlone) {
  const Context context = tested_context();
  const Inputs both(2, 1, 96, 96, kDim, 7);
  for (const char* name : {"svg2", "sparge", "sparge-cdf"}) {
    const Settings settings = method(name, {{"q_block", "16"}, {"k_block", "16"}, {"target_density", "0.3"}});
    const Result batch = run(Plan(context, settings, both.shape()), both);
    Inputs one = both;
    one.batch = 1;
    const Result alone = run(Plan(context, settings, one.shape()), one);
    EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), batch.out.begin())) << name;
    EXPECT_TRUE(std::equal(alone.mask.begin(), alone.mask.end(), batch.mask.begin())) << name;
  }
}

TEST(Methods, EveryRuleMeetsATargetDensity) {
  const Context context = tested_context();
  const Inputs in(1, 2, 600, 600, kDim, 3);
  for (const char* rule : {"fixed", "top_p", "hybrid", "online", "target", "clusters"}) {
    for (const double target : {0.1, 0.3}) {
      Settings settings = method("scope", {{"partition", "even:1"}, {"rule", rule}, {"alpha", "0.2"}, {"codes", "200"}});
      settings.target_density = target;
      const Result result = run(Plan(context, settings, in.shape()), in);
      EXPECT_NEAR(result.stats.density, target, limits().density) << rule;
      const bool floor = std::string(rule) != "fixed";
      EXPECT_EQ(result.heads[0].alpha, floor ? std::min(0.2, target / 2) : 0.2) << rule;
    }
  }
  // Blocks are coarse: the nearest whole number of them.
  const Settings sparge = method("sparge", {{"q_block", "20"}, {"k_block", "60"}, {"target_density", "0.26"}});
  EXPECT_NEAR(run(Plan(context, sparge, in.shape()), in).stats.density, 0.3, 1e-9);
}

TEST(MethodsOnCpu, RefusesWhatDoesNotGoTogether) {
  const Context context(1);
  const Inputs in(1, 1, 40, 40, kDim, 1);
  const auto refusal = [&](const char* name, std::initializer_list<std::pair<const char*, const char*>> set) {
    try {
      Plan(context, method(name, set), in.shape());
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(refusal("svg2", {{"partition", "even:2"}}).find("one subspace"), std::string::npos);
  EXPECT_NE(refusal("svg2", {{"proxy", "exact"}}).find("proxy codes"), std::string::npos);
  EXPECT_NE(refusal("svg2", {{"tail", "first_order"}}).find("tail"), std::string::npos);
  EXPECT_NE(refusal("sparge", {{"group", "kmeans"}}).find("group blocks"), std::string::npos);
  EXPECT_NE(refusal("sparge", {{"encode", "kmeans"}}).find("encode blocks"), std::string::npos);
  EXPECT_NE(refusal("dense", {{"target_density", "0.5"}}).find("dense keeps everything"), std::string::npos);
  // A model's own axes are no partition for whole codes.
  Shape shape = in.shape();
  shape.subspaces = {{0, 1}, {}};
  for (int32_t c = 2; c < kDim; ++c) shape.subspaces[1].push_back(c);
  EXPECT_EQ(Plan(context, method("svg2"), shape).partition.size(), 1u);
}

}  // namespace
}  // namespace scope::test
