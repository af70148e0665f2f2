// SVG-EAR against float64: mean values and errors of clusters, the rule error_aware, and whole calls with centroids for
// tail.
#include <bit>
#include <set>

#include "call_support.h"
#include "stages/compensate.h"
#include "stages/tail.h"

namespace scope::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Problem {
  Rows k, v;
  std::vector<int32_t> rows, labels;
  std::vector<float> centroids, tables;
  Proxy proxy;

  Problem(Random& random, DType dtype, int64_t dim, int64_t groups, int64_t tokens, int64_t count, int64_t codes,
          double deviation)
      : k(random, dtype, tokens, dim, deviation), v(random, dtype, tokens, dim, 1), rows(subset(random, tokens, count)) {
    for (int64_t i = 0; i < groups * dim; ++i) centroids.push_back(static_cast<float>(deviation * random.normal()));
    for (int64_t t = 0; t < count; ++t) labels.push_back(static_cast<int32_t>(random.below(codes)));
    proxy.groups = groups;
    proxy.count = count;
    proxy.scale = 1 / std::sqrt(static_cast<float>(dim));
    proxy.centroids = centroids.data();
    proxy.k = k.view();
    proxy.rows = rows.data();
    proxy.subspaces = 1;
    proxy.codes = codes;
    make_tables();
  }
  // Products with the mean keys; those without keys score anything.
  void make_tables() {
    const int64_t dim = proxy.k.dim;
    reference::Matrix means(proxy.codes, dim);
    reference::update(reference::gather(k.view(), rows.data(), proxy.count, nullptr, dim), labels, means);
    tables.clear();
    for (int64_t c = 0; c < proxy.groups; ++c) {
      for (int64_t j = 0; j < proxy.codes; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < dim; ++i)
          sum += static_cast<double>(centroids[static_cast<size_t>(c * dim + i)]) * means.row(j)[i];
        tables.push_back(static_cast<float>(sum * static_cast<double>(proxy.scale)));
      }
    }
    proxy.tables = tables.data();
    proxy.labels = labels.data();
  }
  std::vector<int64_t> sizes() const {
    std::vector<int64_t> result(static_cast<size_t>(proxy.codes));
    for (const int32_t code : labels) ++result[static_cast<size_t>(code)];
    return result;
  }
};

// Outputs and scratch between canaries, poisoned before the call.
struct Output {
  Guarded<float> value, bias, errors;
  GuardedScratch scratch;
  CompensateArgs args;

  Output(const Exec& exec, const CompensateArgs& problem, uint8_t poison = 0xff, int64_t short_of = 0)
      : value(problem.proxy.codes * problem.v.dim, poison),
        bias(problem.proxy.codes, poison),
        errors(problem.proxy.groups * problem.proxy.codes, poison),
        scratch(backend().compensate_scratch(exec, sizes_of(problem)) - short_of, poison),
        args(problem) {
    args.value = value.data();
    args.bias = bias.data();
    args.errors = errors.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(value, bias, errors); }
};

CompensateArgs compensate_of(const Problem& problem) {
  CompensateArgs args;
  args.proxy = problem.proxy;
  args.v = problem.v.view();
  return args;
}

struct StageResult : Output {
  StageResult(const Exec& exec, const Problem& problem, bool with_errors = true, uint8_t poison = 0xff, int64_t short_of = 0)
      : Output(exec, compensate_of(problem), poison, short_of) {
    if (!with_errors) args.errors = {};
    run_compensate(exec, {&args, 1});
  }
};

// By how much a cluster's error may be off: a logit that is off by `off` moves a term by as much of itself.
double error_bound(const reference::ClusterErrors& want, size_t j, double off) {
  return 1e-5 * want.error[j] + 2 * off * std::sqrt(want.error[j] * want.terms[j]) + off * off * want.terms[j];
}

void expect_errors(const Problem& problem, const StageResult& ours) {
  const auto sizes = problem.sizes();
  for (int64_t c = 0; c < problem.proxy.groups; ++c) {
    const auto want = reference::cluster_errors(problem.proxy, problem.v.view(), c);
    for (size_t j = 0; j < sizes.size(); ++j) {
      const float got = ours.errors[c * problem.proxy.codes + static_cast<int64_t>(j)];
      ASSERT_FALSE(std::isnan(got));
      if (sizes[j] == 0) {
        ASSERT_EQ(got, -kInfinity);
        continue;
      }
      const double error = std::exp(static_cast<double>(got) + std::log(static_cast<double>(sizes[j])) - 2 * want.high);
      const double most = error_bound(want, j, 0.6 * limits().score * (1 + std::abs(want.high)));
      ASSERT_NEAR(error, want.error[j], most + 1e-300) << "group " << c << " cluster " << j << " of " << sizes[j];
    }
  }
}

TEST(Compensate, Differential) {
  each_case("compensate", 800, [](Case& at) {
    Random& random = at.random;
    const int64_t dim = at.tokens >= 1025 ? std::min<int64_t>(at.dim, 64) : at.dim;
    const int64_t count = random.chance(0.5) ? at.tokens : random.between(1, at.tokens);
    const Problem problem(random, at.dtype, dim, random.pick<int64_t>({1, 5, 24, 25, 60}), at.tokens, count,
                          random.pick<int64_t>({1, 3, 20, 100, count}), random.pick<double>({0.1, 1, 2}));
    const StageResult ours(at.exec, problem, true, at.poison);
    const auto sizes = problem.sizes();
    reference::Matrix means(problem.proxy.codes, dim);
    reference::update(reference::gather(problem.v.view(), problem.rows.data(), count, nullptr, dim), problem.labels, means);
    for (int64_t i = 0; i < ours.value.size(); ++i) {
      const double want = means.data[static_cast<size_t>(i)];
      ASSERT_NEAR(ours.value[i], want, limits().mean * std::max(1.0, std::abs(want)));
    }
    for (int64_t j = 0; j < problem.proxy.codes; ++j) {
      const double n = static_cast<double>(sizes[static_cast<size_t>(j)]);
      if (n == 0) {
        ASSERT_EQ(ours.bias[j], -kInfinity);
      } else {
        ASSERT_NEAR(ours.bias[j], std::log(n), 1e-6);
      }
    }
    expect_errors(problem, ours);
  });
}

// Alike keys and values leave no error; one key far above its cluster's mean leaves one that no float holds.
TEST(Compensate, NothingAndTooMuch) {
  each_machine([](const Exec& exec) {
    Random random(1);
    for (const double height : {3.0, 100.0, 900.0}) {
      Problem problem(random, limits().finest, 16, 2, 40, 40, 4, 1);
      for (int64_t t = 0; t < 40; ++t) {
        const auto code = static_cast<int32_t>(t / 10);
        problem.labels[static_cast<size_t>(t)] = code;
        for (int64_t c = 0; c < 16; ++c) {
          problem.k.set(t, c, c == code ? 1 : 0);
          problem.v.set(t, c, static_cast<double>(c + code));
        }
      }
      for (int64_t i = 0; i < 32; ++i) problem.centroids[static_cast<size_t>(i)] = 1;
      problem.k.set(25, 2, 40 * height);  // its logit is 10 height, the mean's height
      problem.make_tables();
      const StageResult ours(exec, problem);
      for (int64_t c = 0; c < 2; ++c) {
        for (const int64_t j : {0, 1, 3}) ASSERT_LT(ours.errors[c * 4 + j], -20);
        ASSERT_GT(ours.errors[c * 4 + 2], height);
        ASSERT_TRUE(std::isfinite(ours.errors[c * 4 + 2]));
      }
      if (height < 50) expect_errors(problem, ours);
    }
  });
}

TEST(Compensate, BitwiseOverThreadsAndRuns) {
  Random random(2);
  const Problem problem(random, DType::bf16, 128, 70, 1500, 1400, 90, 1);
  expect_repeatable([&](const Exec& exec) { return StageResult(exec, problem).all(); });
}

TEST(Compensate, ChunkOfHeadsEqualsHeadsAlone) {
  Random random(9);
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<CompensateArgs> heads;
  for (int h = 0; h < 3; ++h) {
    problems.push_back(std::make_unique<Problem>(random, DType::bf16, 64, 30, 500, 450, 40, 1));
    Problem& problem = *problems.back();
    problem.k = Rows(random, DType::bf16, 500, 64, 1, 2 * 64);  // side by side
    problem.v = Rows(random, DType::bf16, 500, 64, 1, 8);
    problem.proxy.k = problem.k.view();
    problem.proxy.rows = problems[0]->rows.data();
    heads.push_back(compensate_of(problem));
  }
  expect_chunk_equals_heads<Output>(heads, run_compensate);
}

TEST(Compensate, WorkspaceTooSmallIsRefused) {
  Random random(3);
  const Problem problem(random, limits().finest, 64, 5, 90, 80, 7, 1);
  each_machine([&](const Exec& exec) { EXPECT_THROW(StageResult(exec, problem, true, 0xff, 64), Error); });
}

// ---- the rule ----

// A selection by errors, and which codes the tail shows to each group and to one more.
struct Selection {
  Guarded<int32_t> counts, top_p;
  Guarded<int64_t> head_budget;
  Guarded<double> rho_used, alpha_used;
  Guarded<uint32_t> mask, dropped;
  std::vector<int32_t> sizes;

  Selection(const Exec& exec, const Problem& problem, const std::vector<float>& errors, WeighArgs args,
            std::vector<int32_t> queries = {}, uint8_t poison = 0xff)
      : counts(problem.proxy.groups, poison),
        top_p(problem.proxy.groups, poison),
        head_budget(1, poison),
        rho_used(1, poison),
        alpha_used(1, poison),
        mask(problem.proxy.groups * mask_words(problem.proxy.k.tokens), poison),
        dropped((problem.proxy.groups + 1) * mask_words(problem.proxy.codes), poison),
        sizes(std::move(queries)) {
    if (sizes.empty()) sizes.assign(static_cast<size_t>(problem.proxy.groups), 1);
    args.proxy = problem.proxy;
    args.rule = Rule::error_aware;
    args.sizes = sizes.data();
    args.errors = errors.data();
    args.top_p = top_p.data();
    GuardedScratch weights(backend().weights_bytes(exec, sizes_of(args)), poison);
    GuardedScratch scratch(backend().weigh_scratch(exec, sizes_of(args)), poison);
    args.weights = scratch_of(weights);
    args.scratch = scratch_of(scratch);
    KeepArgs keep;
    keep.weighed = args;
    keep.counts = counts.data();
    keep.head_budget = head_budget.data();
    keep.rho_used = rho_used.data();
    keep.alpha_used = alpha_used.data();
    keep.mask = mask.data();
    run_select(exec, {&keep, 1});
    TailArgs tail;
    tail.tail = Tail::centroids;
    tail.proxy = problem.proxy;
    tail.v = problem.v.view();
    tail.sizes = sizes.data();
    tail.kept = mask.data();
    tail.rows = problem.proxy.groups + 1;
    tail.mask = dropped.data();
    GuardedScratch tail_scratch(backend().tail_scratch(exec, sizes_of(tail)), poison);
    tail.scratch = scratch_of(tail_scratch);
    run_tail(exec, {&tail, 1});
  }
  double density(int64_t count) const {
    double kept = 0;
    for (int64_t c = 0; c < counts.size(); ++c) kept += counts[c];
    return kept / static_cast<double>(counts.size() * count);
  }
};

TEST(ErrorAware, KeepsWhatTheReferenceKeeps) {
  each_case("error aware", 1500, [](Case& at) {
    Random& random = at.random;
    const int64_t count = random.chance(0.6) ? at.tokens : random.between(1, at.tokens);
    const Problem problem(random, DType::f32, 8, random.between(1, 6), at.tokens, count,
                          random.pick<int64_t>({1, 2, 16, 70, 200}), random.pick<double>({0.5, 2}));
    std::vector<float> errors;  // few values, so that ties are common
    for (size_t i = 0; i < problem.tables.size(); ++i) {
      const auto error = static_cast<float>(std::round(3 * random.normal()));
      errors.push_back(random.chance(0.1) ? -std::numeric_limits<float>::infinity() : error);
    }
    std::vector<int32_t> queries;
    for (int64_t c = 0; c < problem.proxy.groups; ++c) queries.push_back(random.chance(0.9) ? 1 : 0);
    WeighArgs args;
    args.rho = random.pick<double>({1e-6, 0.1, 0.5, 0.9, 0.999999, 1, random.uniform()});
    const double alpha = random.pick<double>({0, 0.05, 0.1, 0.6, 1, random.uniform()});
    args.alpha = &alpha;
    args.target = random.chance(0.3) ? random.pick<double>({0.02, 0.2, 0.5, 1}) : 0;
    const Selection ours(at.exec, problem, errors, args, queries, at.poison);
    const auto sizes = problem.sizes();
    const int64_t codes = problem.proxy.codes, words = mask_words(problem.proxy.k.tokens);
    EXPECT_EQ(ours.alpha_used[0], args.target > 0 ? std::min(alpha, args.target / 4) : alpha);
    const double bound = args.target > 0 ? ours.rho_used[0] : args.rho;
    for (int64_t c = 0; c < problem.proxy.groups; ++c) {
      SCOPED_TRACE(fmt::format("group {}", c));
      const auto row = [&](const std::vector<float>& x) {
        return std::vector<double>(x.begin() + c * codes, x.begin() + (c + 1) * codes);
      };
      // A sum of weights may round to either side of a bound that it meets exactly.
      bool found = false;
      for (const double nudge : {0.0, -1e-12, 1e-12}) {
        const auto kept =
            reference::ear_clusters(row(problem.tables), sizes, row(errors), bound + nudge, ours.alpha_used[0]);
        std::vector<uint32_t> mask(static_cast<size_t>(words)), dropped(static_cast<size_t>(mask_words(codes)));
        int64_t keys = 0;
        for (size_t t = 0; t < problem.labels.size() && queries[static_cast<size_t>(c)] > 0; ++t) {
          const bool in = std::binary_search(kept.begin(), kept.end(), problem.labels[t]);
          keys += in ? 1 : 0;
          if (in) {
            set_mask_bit(mask.data(), problem.rows[t]);
          } else {
            set_mask_bit(dropped.data(), problem.labels[t]);
          }
        }
        found = found || (ours.counts[c] == keys && std::equal(mask.begin(), mask.end(), ours.mask.data() + c * words) &&
                          std::equal(dropped.begin(), dropped.end(), ours.dropped.data() + c * mask_words(codes)));
      }
      ASSERT_TRUE(found) << "keeps " << ours.counts[c] << " keys";
    }
    const uint32_t* beyond = ours.dropped.data() + problem.proxy.groups * mask_words(codes);
    ASSERT_EQ(std::count(beyond, beyond + mask_words(codes), 0u), mask_words(codes)) << "dense queries see no code";
  });
}

TEST(ErrorAware, ManyClustersMeetATargetClosely) {
  each_machine([](const Exec& exec) {
    Random random(4);
    const Problem problem(random, DType::f32, 16, 20, 4000, 4000, 300, 2);
    std::vector<float> errors;
    for (size_t i = 0; i < problem.tables.size(); ++i) errors.push_back(static_cast<float>(random.normal()));
    for (const double target : {0.05, 0.1, 0.3, 0.8}) {
      const double alpha = 0.1;
      WeighArgs args;
      args.alpha = &alpha;
      args.target = target;
      EXPECT_NEAR(Selection(exec, problem, errors, args).density(4000), target, 0.005);
    }
  });
}

// ---- whole calls ----

constexpr int64_t kDim = 24;

struct Call : Ragged {
  Result got;
  explicit Call(uint32_t seed) : Ragged(kDim, seed) {}
  void run(const Plan& plan) { got = test::run(plan, in, extra); }
};

Settings ear(std::initializer_list<std::pair<const char*, const char*>> set) {
  Settings settings = find_method("svg2-ear").settings();
  settings.first_iterations = 4;
  for (const auto& [name, value] : set) set_setting(settings, name, value);
  return settings;
}

// Whether the rule keeps these clusters for some errors within their bounds. A cluster of one key has no error but what
// rounding leaves, which may be more or less than that of clusters far from the group: float64 does not say where it ranks.
bool may_keep(const std::vector<int64_t>& kept, const std::vector<double>& scores, const std::vector<int64_t>& sizes,
              const reference::ClusterErrors& errors, double p, double alpha) {
  const auto has = [](const std::vector<int64_t>& clusters, size_t j) {
    return std::binary_search(clusters.begin(), clusters.end(), static_cast<int64_t>(j));
  };
  const auto keys_of = [&](const std::vector<int64_t>& clusters) {
    int64_t keys = 0;
    for (const int64_t j : clusters) keys += sizes[static_cast<size_t>(j)];
    return keys;
  };
  const auto guaranteed = reference::svg2_clusters(scores, sizes, -1, alpha);
  const int64_t keys = keys_of(kept), budget = keys_of(reference::svg2_clusters(scores, sizes, p, 2 * alpha));
  const double off = (0.6 * limits().score + limits().table) * (1 + std::abs(errors.high));
  // Of one key.
  const auto least = [&](size_t j) {
    return (errors.error[j] - error_bound(errors, j, off)) / static_cast<double>(sizes[j]);
  };
  const auto most = [&](size_t j) {
    return (errors.error[j] + error_bound(errors, j, off)) / static_cast<double>(sizes[j]);
  };
  double dropped = -kInfinity, last = kInfinity;  // no less, and no more, than the error of the last one kept
  for (size_t j = 0; j < sizes.size(); ++j) {
    if (sizes[j] == 0) continue;
    if (has(guaranteed, j)) {
      if (!has(kept, j)) return false;
    } else if (has(kept, j)) {
      last = std::min(last, most(j));
    } else {
      dropped = std::max(dropped, least(j));
    }
  }
  if (keys < budget || dropped > last) return false;
  if (last == kInfinity) return true;  // what is guaranteed and nothing else
  for (size_t j = 0; j < sizes.size(); ++j) {
    const bool added = has(kept, j) && !has(guaranteed, j);
    if (added && least(j) <= last && keys - sizes[j] < budget) return true;
  }
  return false;
}

// Which clusters are kept follows from q, k, v and the clusters; the output is one softmax over their keys, the text, and a
// pseudo-key for every other cluster.
void expect_call(const Call& call, const Plan& plan, bool routed) {
  const Inputs& in = call.in;
  const Extra& extra = call.extra;
  const Result& got = call.got;
  const int64_t heads = in.batch * in.heads;
  const int64_t codes = plan.codes, groups = plan.selection_groups, words = mask_words(in.k_tokens);
  const double scale = 1 / std::sqrt(static_cast<double>(kDim));
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t b = head / 2, valid_q = extra.q_lengths[static_cast<size_t>(b)],
                  valid_k = extra.k_lengths[static_cast<size_t>(b)];
    const RowsView q{in.q.data() + head * in.q_tokens * kDim, DType::f32, in.q_tokens, kDim, kDim};
    const RowsView k{in.k.data() + head * in.k_tokens * kDim, DType::f32, in.k_tokens, kDim, kDim};
    const RowsView v{in.v.data() + head * in.k_tokens * kDim, DType::f32, in.k_tokens, kDim, kDim};
    const reference::Matrix codebook(got.codebooks.data() + head * codes * kDim, codes, kDim);
    const float* centroids = got.centroids.data() + head * plan.groups * kDim;
    std::vector<int32_t> rows, labels;
    std::vector<int64_t> sizes(static_cast<size_t>(codes));
    for (int32_t t = 0; t < valid_k; ++t) {
      const int32_t code = got.codes[static_cast<size_t>(head * in.k_tokens + t)];
      ASSERT_EQ(code < 0, mask_bit(extra.keep.data() + b * 6, t));
      if (code < 0) continue;
      rows.push_back(t);
      labels.push_back(code);
      ++sizes[static_cast<size_t>(code)];
    }
    const auto count = static_cast<int64_t>(rows.size());
    reference::Matrix values(codes, kDim);
    reference::update(reference::gather(v, rows.data(), count, nullptr, kDim), labels, values);
    // Virtual keys and values, in the type of the others.
    const auto rounded = [&](reference::Matrix x) {
      for (double& each : x.data) each = reference::rounded(each, in.dtype);
      return x;
    };
    const reference::Matrix mean_keys = rounded(codebook), mean_values = rounded(values);
    std::vector<float> tables;
    for (int64_t c = 0; c < plan.groups; ++c) {
      const reference::Matrix centroid(centroids + c * kDim, 1, kDim);
      for (int64_t j = 0; j < codes; ++j) {
        tables.push_back(static_cast<float>(scale * reference::dot(centroid.row(0), codebook.row(j), kDim)));
      }
    }
    Proxy proxy;
    proxy.groups = plan.groups;
    proxy.count = count;
    proxy.scale = static_cast<float>(scale);
    proxy.centroids = centroids;
    proxy.k = k;
    proxy.rows = rows.data();
    proxy.subspaces = 1;
    proxy.codes = codes;
    proxy.tables = tables.data();
    proxy.labels = labels.data();
    for (int64_t i = 0; i < in.q_tokens; ++i) {
      const int32_t label = got.labels[static_cast<size_t>(head * in.q_tokens + i)];
      ASSERT_EQ(label < 0, i >= valid_q);
      const bool dense = i < valid_q && mask_bit(extra.dense_queries.data() + b * 5, i);
      const uint32_t* mask = got.mask.data() + (head * groups + std::max(label, 0)) * words;
      std::vector<int64_t> kept;
      if (label >= 0 && !dense) {
        std::set<int64_t> clusters;
        for (size_t t = 0; t < rows.size(); ++t) {
          if (mask_bit(mask, rows[t])) clusters.insert(labels[t]);
        }
        kept.assign(clusters.begin(), clusters.end());
        std::vector<double> scores(tables.begin() + label * codes, tables.begin() + (label + 1) * codes), errors;
        const auto found = reference::cluster_errors(proxy, v, label);
        for (size_t j = 0; j < sizes.size(); ++j) errors.push_back(std::log(found.error[j] / static_cast<double>(sizes[j])));
        const double p = plan.settings.rho, alpha = plan.settings.alpha;
        auto want = routed ? reference::ear_clusters(scores, sizes, errors, p, alpha)
                           : reference::svg2_clusters(scores, sizes, p, alpha);
        std::erase_if(want, [&](int64_t j) { return sizes[static_cast<size_t>(j)] == 0; });
        if (limits().exact_keys || !routed || !may_keep(kept, scores, sizes, found, p, alpha)) {
          ASSERT_EQ(kept, want) << "head " << head << " query " << i;
        }
      }
      double high = -kInfinity, total = 0;
      std::vector<double> logits, out(static_cast<size_t>(kDim));
      std::vector<std::vector<double>> seen;
      const reference::Matrix query = reference::gather(q, nullptr, in.q_tokens, nullptr, kDim);
      const auto see = [&](const double* key, const double* value, double bias) {
        logits.push_back(scale * reference::dot(query.row(i), key, kDim) + bias);
        seen.emplace_back(value, value + kDim);
        high = std::max(high, logits.back());
      };
      const reference::Matrix keys = reference::gather(k, nullptr, in.k_tokens, nullptr, kDim);
      const reference::Matrix all_values = reference::gather(v, nullptr, in.k_tokens, nullptr, kDim);
      for (int64_t t = 0; t < valid_k && label >= 0; ++t) {
        const int32_t code = got.codes[static_cast<size_t>(head * in.k_tokens + t)];
        const bool seen_too = code >= 0 && (dense || std::binary_search(kept.begin(), kept.end(), code));
        ASSERT_EQ(mask_bit(mask, t), seen_too) << "head " << head << " query " << i << " key " << t;
        if (seen_too || code < 0) see(keys.row(t), all_values.row(t), 0);
      }
      for (int64_t j = 0; j < codes && label >= 0 && !dense; ++j) {
        const auto n = static_cast<double>(sizes[static_cast<size_t>(j)]);
        if (n == 0 || std::binary_search(kept.begin(), kept.end(), j)) continue;
        see(mean_keys.row(j), mean_values.row(j), std::log(n));
      }
      for (size_t s = 0; s < seen.size(); ++s) {
        const double p = std::exp(logits[s] - high);
        total += p;
        for (size_t c = 0; c < kDim; ++c) out[c] += p * seen[s][c];
      }
      for (size_t c = 0; c < kDim; ++c) {
        const double want = total == 0 ? 0 : out[c] / total;
        ASSERT_NEAR(got.out[static_cast<size_t>((head * in.q_tokens + i) * kDim) + c], want, Limits::out(in.dtype))
            << "head " << head << " query " << i << " channel " << c;
      }
      if (total > 0) {
        ASSERT_NEAR(got.lse[static_cast<size_t>(head * in.q_tokens + i)], high + std::log(total), 1e-4);
      }
    }
  }
}

TEST(Svg2Ear, FollowsItsRulesWithTextPaddingAndBatches) {
  const Context context = tested_context();
  for (const char* p : {"0.2", "0.7", "0.9"}) {
    for (const char* alpha : {"0", "0.1"}) {
      Call call(5);
      const Plan plan(context, ear({{"groups", "9"}, {"codes", "40"}, {"rho", p}, {"alpha", alpha}}), call.shape());
      call.run(plan);
      ASSERT_NO_FATAL_FAILURE(expect_call(call, plan, true)) << p << " " << alpha;
    }
  }
}

// The tail goes with any rule that keeps whole clusters, and with clusters from anywhere; a short sample has fewer of them.
TEST(Svg2Ear, CentroidsStandForWhatSvg2AndSvooDrop) {
  const Context context = tested_context();
  for (const char* group : {"kmeans", "cocluster"}) {
    for (const int64_t length : {141, 60}) {
      Call call(6);
      call.extra.k_lengths[1] = length;
      const Plan plan(context,
                      ear({{"groups", "9"},
                           {"codes", "100"},
                           {"rho", "0.4"},
                           {"alpha", "0"},
                           {"rule", "clusters"},
                           {"group", group},
                           {"encode", group}}),
                      call.shape());
      call.run(plan);
      ASSERT_NO_FATAL_FAILURE(expect_call(call, plan, false)) << group << " " << length;
    }
  }
}

// With one key per cluster a pseudo-key is its key: whatever is dropped, the output is dense attention.
TEST(Svg2Ear, ClustersOfOneKeyGiveDenseAttention) {
  const Context context = tested_context();
  Call sparse(7), dense(7);
  sparse.extra.q_lengths = dense.extra.q_lengths = {150, 150};
  sparse.extra.k_lengths = dense.extra.k_lengths = {170, 170};
  const Plan plan(context, ear({{"groups", "5"}, {"codes", "170"}, {"rho", "0.1"}, {"first_iterations", "30"}}),
                  sparse.shape());
  sparse.run(plan);
  int64_t kept = 0;
  for (const uint32_t word : sparse.got.mask) kept += std::popcount(word);
  EXPECT_LT(kept, 4 * plan.selection_groups * sparse.in.k_tokens / 2);
  dense.run(Plan(context, find_method("dense").settings(), dense.shape()));
  double error = 0, norm = 0;
  for (size_t i = 0; i < dense.got.out.size(); ++i) {
    error += std::pow(static_cast<double>(sparse.got.out[i]) - static_cast<double>(dense.got.out[i]), 2);
    norm += std::pow(static_cast<double>(dense.got.out[i]), 2);
  }
  EXPECT_LT(std::sqrt(error / norm), 0.05);
}

TEST(Svg2Ear, BitwiseOverThreadsAndInBatches) {
  Call one(8), many(8);
  const Settings settings = ear({{"groups", "9"}, {"codes", "40"}, {"target_density", "0.2"}});
  one.run(Plan(Context(1), settings, one.shape()));
  many.run(Plan(Context(3), settings, many.shape()));
  EXPECT_EQ(one.got.out, many.got.out);
  EXPECT_EQ(one.got.mask, many.got.mask);
}

TEST(Svg2Ear, RefusesWhatDoesNotGoTogether) {
  const Context context(1);
  Call call(1);
  const auto refusal = [&](const char* name, std::initializer_list<std::pair<const char*, const char*>> set) {
    try {
      Settings settings = find_method(name).settings();
      for (const auto& [key, value] : set) set_setting(settings, key, value);
      Plan(context, settings, call.shape());
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(refusal("scope", {{"partition", "even:1"}, {"tail", "centroids"}}).find("drops single keys"), std::string::npos);
  EXPECT_NE(refusal("sparge", {{"tail", "centroids"}}).find("encode blocks"), std::string::npos);
  EXPECT_NE(refusal("svg2-ear", {{"partition", "random:1"}}).find("even:1"), std::string::npos);
  EXPECT_NE(refusal("svg2-ear", {{"partition", "even:2"}}).find("one subspace"), std::string::npos);
  EXPECT_NE(refusal("svg2-ear", {{"tail", "first_order"}}).find("drops whole codes"), std::string::npos);
  EXPECT_EQ(refusal("svg2-ear", {{"tail", "none"}}), "accepted");
  // Errors need v: there is no selection without attention.
  const Plan plan(context, ear({{"tail", "none"}, {"groups", "5"}, {"codes", "9"}}), call.shape());
  PreparedCall prepared(plan, call.in, call.extra);
  prepared.run();
  prepared.args.out.data = nullptr;
  prepared.args.lse = nullptr;
  EXPECT_THROW(scope::call(plan, prepared.args), Error);
}

}  // namespace
}  // namespace scope::test
