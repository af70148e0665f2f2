// select against the float64 reference: counts, exact key sets, ties, every rule, the tail, and named bug classes.
#include <bit>
#include <limits>

#include "cases.h"
#include "reference.h"
#include "select_output.h"
#include "stages/tail.h"

namespace scope::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Scores that the test chooses: one subspace whose codes are the distinct values, or random tables, or exact products.
struct Problem {
  int64_t groups, count;
  std::vector<int32_t> rows, labels, sizes;
  std::vector<float> tables, centroids;
  std::unique_ptr<Rows> k, v;
  double alpha = 0.1;
  WeighArgs args;
  int64_t tail_rows = 0;  // of the tail's mask; 0: there is no tail

  Problem(Random& random, int64_t group_count, int64_t tokens, int64_t key_count, int64_t dim)
      : groups(group_count), count(key_count), rows(subset(random, tokens, key_count)) {
    for (int64_t c = 0; c < groups; ++c) sizes.push_back(static_cast<int32_t>(random.between(1, 50)));
    for (int64_t i = 0; i < groups * dim; ++i) centroids.push_back(static_cast<float>(2 * random.normal()));
    args.proxy.groups = groups;
    args.proxy.count = count;
    args.proxy.scale = 1 / std::sqrt(static_cast<float>(dim));
    args.proxy.k = RowsView{nullptr, limits().finest, tokens, dim, dim};  // select by codes must not read the keys
    args.proxy.centroids = centroids.data();
    args.proxy.rows = rows.data();
    args.sizes = sizes.data();
    args.rho = 0.9;
    args.alpha = &alpha;
    args.density = 0.2;
  }
  Problem(const Problem&) = delete;  // args point into it
  Problem& operator=(const Problem&) = delete;
  void use_keys(Random& random, DType dtype) {
    k = std::make_unique<Rows>(random, dtype, args.proxy.k.tokens, args.proxy.k.dim, 1.0);
    args.proxy.k = k->view();
  }
  void use_exact() {
    args.proxy.kind = ProxyKind::exact;
    for (float& x : centroids) x = static_cast<float>(reference::rounded(static_cast<double>(x), args.proxy.k.dtype));
  }
  void use_codes(Random& random, int64_t subspaces, int64_t codes, double deviation, bool coarse) {
    for (int64_t i = 0; i < groups * subspaces * codes; ++i) {
      const double x = deviation * random.normal();
      tables.push_back(static_cast<float>(coarse ? std::round(x) : x));
    }
    for (int64_t i = 0; i < subspaces * count; ++i) labels.push_back(static_cast<int32_t>(random.below(codes)));
    set_codes(subspaces, codes);
  }
  // Key j scores values[j] in every group.
  void use_values(const std::vector<float>& values) {
    for (int64_t c = 0; c < groups; ++c) tables.insert(tables.end(), values.begin(), values.end());
    labels = all_rows(count);
    set_codes(1, count);
  }
  void use_tail(Random& random, DType dtype) {
    v = std::make_unique<Rows>(random, dtype, args.proxy.k.tokens, args.proxy.k.dim, 1.0);
    tail_rows = groups + random.below(2);
  }
  TailArgs tail(const uint32_t* kept) const {
    TailArgs result;
    result.tail = Tail::first_order;
    result.proxy = args.proxy;
    result.v = v->view();
    result.sizes = sizes.data();
    result.kept = kept;
    result.rows = tail_rows;
    return result;
  }

 private:
  void set_codes(int64_t subspaces, int64_t codes) {
    args.proxy.kind = ProxyKind::codes;
    args.proxy.subspaces = subspaces;
    args.proxy.codes = codes;
    args.proxy.tables = tables.data();
    args.proxy.labels = labels.data();
  }
};

// Positions of the keys that a mask row keeps; -1 for a bit that stands for no key.
std::vector<int64_t> kept_keys(const Proxy& proxy, const uint32_t* row) {
  std::vector<int64_t> result;
  for (int64_t token = 0; token < 32 * mask_words(proxy.k.tokens); ++token) {
    if (!mask_bit(row, token)) continue;
    const int32_t* end = proxy.rows + proxy.count;
    const int32_t* place = std::lower_bound(proxy.rows, end, token);
    result.push_back(place != end && *place == token ? place - proxy.rows : -1);
  }
  return result;
}

struct Output : SelectOutput {
  using SelectOutput::SelectOutput;
  std::vector<int64_t> kept(int64_t group) const {
    const Proxy& proxy = args.weighed.proxy;
    return kept_keys(proxy, mask.data() + group * mask_words(proxy.k.tokens));
  }
};

struct TailOutput {
  Guarded<float> k, value, bias;
  Guarded<uint32_t> mask;
  GuardedScratch scratch;
  TailArgs args;

  TailOutput(const Exec& exec, const TailArgs& problem, uint8_t poison = 0xff)
      : k(problem.proxy.groups * problem.proxy.k.dim, poison),
        value(problem.proxy.groups * problem.proxy.k.dim, poison),
        bias(problem.proxy.groups, poison),
        mask(problem.rows * mask_words(problem.proxy.groups), poison),
        scratch(backend().tail_scratch(exec, sizes_of(problem)), poison),
        args(problem) {
    args.k = k.data();
    args.value = value.data();
    args.bias = bias.data();
    args.mask = mask.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(k, value, bias, mask); }
};

// A selection, and its tail where the problem has one.
struct Selection : Output {
  std::unique_ptr<TailOutput> tail;

  Selection(const Exec& exec, const Problem& problem, uint8_t poison = 0xff) : Output(exec, problem.args, poison) {
    run_select(exec, {&args, 1});
    if (problem.tail_rows == 0) return;
    tail = std::make_unique<TailOutput>(exec, problem.tail(mask.data()), poison);
    run_tail(exec, {&tail->args, 1});
  }
  std::vector<uint8_t> all() const {
    auto bytes = Output::all();
    const auto more = tail ? tail->all() : std::vector<uint8_t>();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  }
};

// The row as the backend sees it, in f32: on it the choice of keys must be exact.
std::vector<double> f32_row(const Exec& exec, const Proxy& proxy, int64_t group) {
  std::vector<float> row(static_cast<size_t>(proxy.count)),
      buffer(static_cast<size_t>(cpu::score_rows_buffer(exec, proxy.k.dim)));
  cpu::score_rows(exec, proxy, 0, group, 1, row.data(), proxy.count, buffer.data());
  return {row.begin(), row.end()};
}

// How far the log of the dropped mass, and a mean whose terms add up to `size`, may be off.
double mass_bound(const reference::VirtualKey& want) { return limits().tail_mass + 1e-5 * (1 + std::abs(want.bias)); }
double mean_bound(double size) { return limits().tail_mean * size + 1e-5; }

// One group's virtual key. The mass is judged beside the key that comes with it: together they are the bias.
void expect_virtual_key(const Problem& problem, const TailOutput& ours, int64_t group, const std::vector<int64_t>& kept) {
  const Proxy& proxy = problem.args.proxy;
  const auto want = reference::virtual_key(proxy, problem.v->view(), group, reference::score_row(proxy, group), kept);
  const int64_t dim = proxy.k.dim;
  if (std::isinf(want.bias)) {
    EXPECT_EQ(ours.bias[group], -kInf);
  } else {
    double centre = 0;
    for (int64_t i = 0; i < dim; ++i) {
      centre += static_cast<double>(problem.centroids[static_cast<size_t>(group * dim + i)]) *
                static_cast<double>(ours.k[group * dim + i]);
    }
    EXPECT_NEAR(static_cast<double>(ours.bias[group]) + static_cast<double>(proxy.scale) * centre, want.log_mass,
                mass_bound(want));
  }
  for (int64_t i = 0; i < dim; ++i) {
    const auto at = static_cast<size_t>(i);
    EXPECT_NEAR(ours.k[group * dim + i], want.k[at], mean_bound(want.k_size[at])) << "channel " << i;
    EXPECT_NEAR(ours.value[group * dim + i], want.value[at], mean_bound(want.value_size[at])) << "channel " << i;
  }
}

// Every group's virtual key, and who sees which: a group its own, unless it has no queries or drops nothing.
void expect_tail(const Problem& problem, const TailOutput& ours, const uint32_t* masks) {
  const Proxy& proxy = problem.args.proxy;
  const int64_t dim = proxy.k.dim, words = mask_words(proxy.groups);
  for (int64_t c = 0; c < problem.tail_rows; ++c) {
    SCOPED_TRACE(fmt::format("virtual key of group {}", c));
    std::vector<uint32_t> sees(static_cast<size_t>(words));
    if (c < proxy.groups && problem.sizes[static_cast<size_t>(c)] > 0) {
      expect_virtual_key(problem, ours, c, kept_keys(proxy, masks + c * mask_words(proxy.k.tokens)));
      if (std::isfinite(ours.bias[c])) set_mask_bit(sees.data(), c);
    } else if (c < proxy.groups) {
      EXPECT_EQ(ours.bias[c], -kInf);
      for (int64_t i = 0; i < dim; ++i) EXPECT_EQ(std::abs(ours.k[c * dim + i]) + std::abs(ours.value[c * dim + i]), 0);
    }
    ASSERT_TRUE(std::equal(sees.begin(), sees.end(), ours.mask.data() + c * words));
  }
}

// Keys with the same table entries, or the same elements, have the same score however it is computed: of them the first are
// kept.
void expect_ties_by_index(const Proxy& proxy, int64_t group, const std::vector<int64_t>& kept) {
  std::map<std::vector<double>, bool> dropped;  // whether a key like this one was dropped before
  for (int64_t j = 0; j < proxy.count; ++j) {
    std::vector<double> like;
    if (proxy.kind == ProxyKind::codes) {
      for (int64_t m = 0; m < proxy.subspaces; ++m) {
        const int32_t code = proxy.labels[0][m * proxy.count + j];
        like.push_back(static_cast<double>(proxy.tables[0][(group * proxy.subspaces + m) * proxy.codes + code]));
      }
    } else {
      for (int64_t i = 0; i < proxy.k.dim; ++i) like.push_back(reference::element(proxy.k[0], proxy.rows[j], i));
    }
    const bool in = std::binary_search(kept.begin(), kept.end(), j);
    bool& before = dropped[like];
    ASSERT_FALSE(in && before) << "key " << j << " is kept, an equal one before it is not";
    before = before || !in;
  }
}

// What a group drops of the mass of `keys` keys, by those that its rule sees, `kept` of whose scores it keeps.
void expect_dropped(const Selection& ours, int64_t group, std::vector<double> scores, int64_t kept, int64_t keys) {
  if (ours.dropped.size() == 0) return;
  if (kept == 0) {  // it has no queries
    EXPECT_EQ(ours.dropped[group], 0);
    return;
  }
  std::sort(scores.begin(), scores.end(), std::greater<>());
  const double resolved = limits().threshold * (scores.front() - scores.back());
  double mass = 0, dropped = 0, like = 0;  // like: of keys that a backend's histogram does not tell from the last
  for (size_t j = 0; j < scores.size(); ++j) {
    const double x = std::exp(scores[j] - scores.front());
    mass += x;
    if (static_cast<int64_t>(j) >= kept) dropped += x;
    const double last = scores[static_cast<size_t>(kept - 1)];
    if (!limits().exact_keys && std::abs(scores[j] - last) <= resolved) like += x;
  }
  const auto size = static_cast<int64_t>(scores.size());
  EXPECT_NEAR(ours.dropped[group], kept == size ? 0 : dropped / mass, limits().mass + like / mass * std::min(1.0, resolved));
  const double weight = static_cast<double>(keys) / static_cast<double>(size);  // of a key that the rule sees
  EXPECT_NEAR(ours.log_mass[group], std::log(mass * weight) + scores.front(),
              limits().mass * (1 + std::abs(scores.front())));
}

// Everything that the specification promises of one selection (R3).
void expect_selection(const Exec& exec, const Problem& problem, const Selection& ours) {
  const WeighArgs& args = problem.args;
  const Proxy& proxy = args.proxy;
  const bool uses_mass = args.rule != Rule::fixed;
  std::vector<int64_t> sizes(problem.sizes.begin(), problem.sizes.end()),
      top_p(ours.top_p.data(), ours.top_p.data() + proxy.groups);
  if (args.rule != Rule::target) {
    EXPECT_EQ(ours.rho_used[0], args.rho);
    EXPECT_EQ(ours.alpha_used[0], problem.alpha);
  } else {
    EXPECT_EQ(ours.alpha_used[0], std::min(problem.alpha, args.density / 2));
  }
  const double rho = ours.rho_used[0];
  const auto want = reference::counts(args.rule, sizes, top_p, ours.alpha_used[0], args.density, proxy.count);
  EXPECT_EQ(ours.head_budget[0], want.head_budget);
  for (int64_t c = 0; c < proxy.groups; ++c) {
    SCOPED_TRACE(fmt::format("group {}", c));
    const auto scores = reference::score_row(proxy, c);
    if (!uses_mass || sizes[static_cast<size_t>(c)] == 0) {
      EXPECT_EQ(ours.top_p[c], 0);
    } else {
      EXPECT_GE(ours.top_p[c], reference::top_p_count(scores, rho >= 1 ? 1 : std::max(1e-12, rho - limits().rho)));
      EXPECT_LE(ours.top_p[c], reference::top_p_count(scores, rho + limits().rho));
    }
    ASSERT_EQ(ours.counts[c], want.counts[static_cast<size_t>(c)]);
    const auto kept = ours.kept(c);
    ASSERT_EQ(static_cast<int64_t>(kept.size()), ours.counts[c]) << "popcount of the mask row";
    expect_dropped(ours, c, scores, ours.counts[c], proxy.count);
    if (limits().exact_keys) {
      ASSERT_EQ(kept, reference::top_keys(f32_row(exec, proxy, c), ours.counts[c]));
    } else {
      expect_ties_by_index(proxy, c, kept);
    }
    // The same against float64, as loosely as f32 scores, or a backend's quantised ones, allow.
    double magnitude = 0, lowest = kInf, highest = -kInf;
    for (size_t j = 0; j < scores.size(); ++j) {
      const bool in = std::binary_search(kept.begin(), kept.end(), static_cast<int64_t>(j));
      magnitude = std::max(magnitude, std::abs(scores[j]));
      if (in) lowest = std::min(lowest, scores[j]);
      if (!in && !kept.empty()) highest = std::max(highest, scores[j]);
    }
    EXPECT_LE(highest - lowest, limits().order + 1e-6 * std::max(1.0, magnitude));
  }
  if (ours.tail) expect_tail(problem, *ours.tail, ours.mask.data());
}

// Each group keeps the share of the keys, at random.
std::vector<uint32_t> random_masks(Random& random, const Problem& problem, double share) {
  const int64_t words = mask_words(problem.args.proxy.k.tokens);
  std::vector<uint32_t> masks(static_cast<size_t>(problem.groups * words));
  for (int64_t c = 0; c < problem.groups; ++c) {
    for (const int32_t token : problem.rows) {
      if (random.chance(share)) set_mask_bit(masks.data() + c * words, token);
    }
  }
  return masks;
}

TEST(Select, DifferentialEveryRule) {
  each_case("select", 6000, [](Case& at) {
    Random& random = at.random;
    const bool big = at.tokens >= 1025;
    const int64_t tokens = at.tokens, count = random.chance(0.6) ? tokens : random.between(1, tokens);
    const int64_t dim = big ? 40 : at.dim;
    Problem problem(random, random.between(1, big ? 4 : random.pick<int64_t>({3, 9, 30})), tokens, count, dim);
    for (auto& n : problem.sizes) {
      if (random.chance(0.15)) n = 0;
    }
    const bool exact = random.chance(0.4), tail = random.chance(0.25);
    if (exact || tail) problem.use_keys(random, at.dtype);
    if (exact) {
      problem.use_exact();
    } else {
      problem.use_codes(random, random.between(1, 8), random.pick<int64_t>({1, 2, 16, 70}),
                        random.pick<double>({0, 0.3, 1, 3}), random.chance(0.3));
    }
    if (tail) problem.use_tail(random, at.dtype);
    WeighArgs& args = problem.args;
    args.rule = random.pick<Rule>({Rule::fixed, Rule::top_p, Rule::hybrid, Rule::online, Rule::target});
    args.rho = random.pick<double>({1e-6, 0.1, 0.5, 0.88, 0.9, 0.99, 0.999999, 1, random.uniform()});
    problem.alpha = random.pick<double>({0, 0.05, 0.1, 0.333333, 1, random.uniform()});
    args.density = random.pick<double>({0.000001, 0.1, 0.25, 0.9, 1, random.uniform()});
    const Selection ours(at.exec, problem, at.poison);
    expect_selection(at.exec, problem, ours);
  });
}

// A tail is of any mask: it need not be what a rule keeps.
TEST(Tail, DifferentialOfRandomMasks) {
  each_case("tail", 600, [](Case& at) {
    Random& random = at.random;
    const bool big = at.tokens >= 1025;
    const int64_t count = random.chance(0.6) ? at.tokens : random.between(1, at.tokens);
    Problem problem(random, random.between(1, big ? 4 : random.pick<int64_t>({3, 9, 70})), at.tokens, count,
                    big ? 40 : at.dim);
    for (auto& n : problem.sizes) {
      if (random.chance(0.15)) n = 0;
    }
    problem.use_keys(random, at.dtype);
    problem.use_tail(random, at.dtype);
    if (random.chance(0.5)) {
      problem.use_exact();
    } else {
      problem.use_codes(random, random.between(1, 8), random.pick<int64_t>({1, 2, 16, 70}),
                        random.pick<double>({0, 0.3, 1, 3}), random.chance(0.3));
    }
    const auto masks = random_masks(random, problem, random.pick<double>({0, 0.1, 0.5, 0.98, 1}));
    TailOutput ours(at.exec, problem.tail(masks.data()), at.poison);
    run_tail(at.exec, {&ours.args, 1});
    expect_tail(problem, ours, masks.data());
  });
}

// The bounds above notice a tile of 64 keys that was left out, however many there are.
TEST(Tail, ALostTileIsPastTheBounds) {
  Random random(19);
  for (const int64_t n : {65, 257, 1025, 4097}) {
    Problem problem(random, 1, n, n, 40);
    problem.use_keys(random, DType::bf16);
    problem.use_tail(random, DType::bf16);
    problem.use_exact();
    const auto scores = reference::score_row(problem.args.proxy, 0);
    std::vector<int64_t> lost(64);
    std::iota(lost.begin(), lost.end(), n - 64);
    const auto whole = reference::virtual_key(problem.args.proxy, problem.v->view(), 0, scores, {});
    const auto less = reference::virtual_key(problem.args.proxy, problem.v->view(), 0, scores, lost);
    EXPECT_GT(std::abs(whole.log_mass - less.log_mass), mass_bound(whole)) << n;
    int64_t seen = 0;
    for (size_t i = 0; i < 40; ++i) seen += std::abs(whole.value[i] - less.value[i]) > mean_bound(whole.value_size[i]);
    EXPECT_GT(seen, 20) << n;
  }
}

// Top-k ties must neither keep more than k nor depend on where they fall: duplicates on both sides of every boundary.
TEST(Select, TopKTiesKeepExactlyKByAscendingIndex) {
  each_machine([](const Exec& exec) {
    for (const int64_t n : {1, 2, 31, 32, 33, 64, 511, 512, 513, 1500}) {
      for (const int distinct : {1, 2, 3}) {
        for (const double share : {0.000001, 0.3, 0.5, 0.999999, 1.0}) {
          Random random(static_cast<uint64_t>(n));
          Problem problem(random, 2, n + 5, n, 8);
          std::vector<float> values;
          for (int64_t j = 0; j < n; ++j) values.push_back(static_cast<float>(random.below(distinct)));
          problem.use_values(values);
          problem.args.rule = Rule::fixed;
          problem.args.density = share;
          const Selection ours(exec, problem);
          ASSERT_NO_FATAL_FAILURE(expect_selection(exec, problem, ours));
        }
      }
    }
  });
}

TEST(Select, ConstantRowsCountByIndex) {
  each_machine([](const Exec& exec) {
    for (const float value : {0.0f, 5.0f, -1e30f, 1e-42f}) {
      Random random(2);
      Problem problem(random, 1, 1000, 1000, 8);
      problem.use_values(std::vector<float>(1000, value));
      problem.args.rule = Rule::top_p;
      problem.args.rho = 0.2995;
      const Selection ours(exec, problem);
      EXPECT_EQ(ours.counts[0], 300);  // the key that crosses rho is included
      for (int64_t j = 0; j < 1000; ++j) ASSERT_EQ(mask_bit(ours.mask.data(), j), j < 300) << value;
    }
  });
}

// One key holds all the mass, and one far below stretches the histogram: everything else shares a bin or two.
TEST(Select, OutliersDoNotBlurTheHistogram) {
  each_machine([](const Exec& exec) {
    Random random(3);
    Problem problem(random, 3, 2000, 2000, 8);
    std::vector<float> values;
    for (int64_t j = 0; j < 2000; ++j) values.push_back(static_cast<float>(random.normal()));
    values[77] = -1e6f;
    for (const float top : {0.0f, 8.0f, 1e5f}) {
      values[1234] = top;
      problem.tables.clear();
      problem.use_values(values);
      for (const double rho : {0.3, 0.9, 0.99999}) {
        problem.args.rule = Rule::online;
        problem.args.rho = rho;
        const Selection ours(exec, problem);
        ASSERT_NO_FATAL_FAILURE(expect_selection(exec, problem, ours));
      }
    }
  });
}

TEST(Select, RhoOfOneKeepsAllByRule) {
  each_machine([](const Exec& exec) {
    Random random(4);
    Problem problem(random, 3, 300, 300, 8);
    std::vector<float> values(300, -200.0f);  // masses that vanish in f32 beside the first
    values[0] = 0;
    problem.use_values(values);
    problem.args.rho = 1;
    for (const Rule rule : {Rule::top_p, Rule::hybrid, Rule::online}) {
      problem.args.rule = rule;
      const Selection ours(exec, problem);
      for (int64_t c = 0; c < 3; ++c) EXPECT_EQ(ours.counts[c], 300);
    }
  });
}

TEST(Select, TargetMeetsItsDensityAndLowersTheFloor) {
  each_case("select target", 600, [](Case& at) {
    Random& random = at.random;
    const int64_t n = std::max<int64_t>(at.tokens, 200);
    Problem problem(random, random.between(1, 12), n, n, 40);
    problem.use_keys(random, at.dtype);
    problem.use_exact();
    const double density = random.pick<double>({0.05, 0.1, 0.2, 0.5, 0.8});
    const Rule rule = random.pick<Rule>({Rule::target, Rule::top_p, Rule::hybrid});
    problem.args.rule = rule;
    (rule == Rule::target ? problem.args.density : problem.args.target) = density;
    problem.alpha = random.pick<double>({0, 0.02, 0.1, 0.3});
    const Selection ours(at.exec, problem, at.poison);
    EXPECT_NEAR(ours.density(), density, std::max(0.005, 1.0 / static_cast<double>(n)) + 1e-9);
    EXPECT_EQ(ours.alpha_used[0], std::min(problem.alpha, density / 2));
    EXPECT_GT(ours.rho_used[0], 0);
    EXPECT_LT(ours.rho_used[0], 1);
    // Each group keeps what its rule says of the t_c found.
    std::vector<int64_t> sizes(problem.sizes.begin(), problem.sizes.end());
    const std::vector<int64_t> top_p(ours.top_p.data(), ours.top_p.data() + problem.groups);
    const auto want = reference::counts(rule, sizes, top_p, ours.alpha_used[0], density, n);
    for (int64_t c = 0; c < problem.groups; ++c) EXPECT_EQ(ours.counts[c], want.counts[static_cast<size_t>(c)]) << c;
  });
}

// Group 0 is small and peaked, group 1 large and flat: the mean lies between, and only group 0 is raised to it.
TEST(Select, OnlineRuleRaisesGroupsToTheHeadMean) {
  each_machine([](const Exec& exec) {
    Random random(5);
    Problem problem(random, 2, 100, 100, 8);
    problem.sizes = {3, 7};
    problem.args.sizes = problem.sizes.data();
    problem.tables.assign(200, 0.0f);
    problem.tables[40] = 50;  // key 40 alone
    problem.labels = all_rows(100);
    problem.args.proxy.subspaces = 1;
    problem.args.proxy.codes = 100;
    problem.args.proxy.tables = problem.tables.data();
    problem.args.proxy.labels = problem.labels.data();
    problem.args.rho = 0.9;
    problem.alpha = 0.02;
    problem.args.rule = Rule::online;
    const Selection ours(exec, problem);
    EXPECT_EQ(ours.top_p[0], 1);
    EXPECT_NEAR(ours.top_p[1], 90, 1);
    const int64_t budget = (3 * 2 + 7 * ours.top_p[1] + 9) / 10;
    EXPECT_EQ(ours.head_budget[0], budget);
    EXPECT_EQ(ours.counts[0], budget);
    EXPECT_EQ(ours.counts[1], ours.top_p[1]);
  });
}

TEST(Select, EmptyGroupsGetNothingAndWeighNothing) {
  each_machine([](const Exec& exec) {
    Random random(6);
    for (const bool all_empty : {false, true}) {
      Problem problem(random, 40, 100, 60, 8);
      problem.use_keys(random, limits().finest);
      problem.use_codes(random, 3, 9, 1, false);
      problem.use_tail(random, limits().finest);
      for (size_t c = 0; c < 40; ++c) problem.sizes[c] = all_empty || c % 2 == 0 ? 0 : problem.sizes[c];
      for (const Rule rule : {Rule::fixed, Rule::top_p, Rule::hybrid, Rule::online, Rule::target}) {
        problem.args.rule = rule;
        const Selection ours(exec, problem);
        if (!all_empty) expect_selection(exec, problem, ours);
        for (int64_t c = 0; c < 40; c += all_empty ? 1 : 2) {
          EXPECT_EQ(ours.counts[c], 0);
          EXPECT_TRUE(ours.kept(c).empty());
        }
        expect_tail(problem, *ours.tail, ours.mask.data());
      }
    }
  });
}

TEST(Select, HeadBudgetInIntegersPastInt32) {
  const std::vector<int32_t> sizes = {100'000, 18'800, 0, 1}, base = {100'000, 118'800, 7, 3};
  const int64_t total = 100'000LL * 100'000 + 18'800LL * 118'800 + 3, queries = 118'801;
  EXPECT_EQ(head_budget(sizes.data(), base.data(), 4), (total + queries - 1) / queries);
  const std::vector<int32_t> exact = {2, 2}, mean = {3, 5};
  EXPECT_EQ(head_budget(exact.data(), mean.data(), 2), 4);  // no ceiling past an exact mean
  const std::vector<int32_t> one_more = {2, 1};
  EXPECT_EQ(head_budget(one_more.data(), mean.data(), 2), 4);  // 11 / 3 rounds up
  const std::vector<int32_t> none = {0, 0};
  EXPECT_EQ(head_budget(none.data(), mean.data(), 2), 0);
}

// R4: keys and codes permuted together select the same keys, ties aside (these scores are distinct).
TEST(Select, PermutingKeysAndCodesTogetherChangesNothing) {
  each_machine([](const Exec& exec) {
    Random random(8);
    Problem a(random, 4, 700, 700, 8), b(random, 4, 700, 700, 8);
    std::vector<float> values(700), moved(700);
    const auto to = shuffled(random, 700);
    for (int64_t j = 0; j < 700; ++j) {
      values[static_cast<size_t>(j)] = static_cast<float>(0.01 * static_cast<double>((j * 337) % 700));
      moved[static_cast<size_t>(to[static_cast<size_t>(j)])] = values[static_cast<size_t>(j)];
    }
    a.use_values(values);
    b.use_values(moved);
    b.sizes = a.sizes;
    b.args.sizes = b.sizes.data();
    for (const Rule rule : {Rule::fixed, Rule::top_p, Rule::hybrid, Rule::online, Rule::target}) {
      a.args.rule = b.args.rule = rule;
      const Selection left(exec, a), right(exec, b);
      for (int64_t c = 0; c < 4; ++c) {
        ASSERT_EQ(left.counts[c], right.counts[c]);
        for (int64_t j = 0; j < 700; ++j) {
          ASSERT_EQ(mask_bit(left.mask.data() + c * 22, j),
                    mask_bit(right.mask.data() + c * 22, to[static_cast<size_t>(j)]));
        }
      }
    }
  });
}

TEST(Select, BitwiseOverThreadsAndRuns) {
  for (const bool exact : {false, true}) {
    Random random(9);
    Problem problem(random, 70, 300, 260, 40);
    problem.use_keys(random, DType::bf16);
    problem.use_codes(random, 3, 9, 1, false);
    if (exact) problem.use_exact();
    problem.use_tail(random, DType::bf16);
    problem.args.rule = Rule::target;
    expect_repeatable([&](const Exec& exec) { return Selection(exec, problem).all(); });
  }
}

TEST(Select, ChunkOfHeadsEqualsHeadsAlone) {
  for (const bool exact : {false, true}) {
    Random random(12);
    std::vector<std::unique_ptr<Problem>> problems;
    std::vector<KeepArgs> heads;
    std::vector<std::vector<uint32_t>> kept;
    std::vector<TailArgs> tails;
    for (int h = 0; h < 3; ++h) {
      problems.push_back(std::make_unique<Problem>(random, 70, 300, 260, 40));
      Problem& problem = *problems.back();
      problem.k = std::make_unique<Rows>(random, DType::bf16, 300, 40, 1.0, 2 * 40);  // side by side
      problem.args.proxy.k = problem.k->view();
      problem.use_codes(random, 3, 9, 1, false);
      if (exact) problem.use_exact();
      problem.use_tail(random, DType::bf16);
      problem.v = std::make_unique<Rows>(random, DType::bf16, 300, 40, 1.0, 8);
      problem.tail_rows = problem.groups + 1;
      problem.args.proxy.rows = problems[0]->rows.data();
      problem.args.rule = Rule::target;
      if (own_alphas()) problem.alpha = 0.03 * h;
      heads.emplace_back().weighed = problem.args;
      kept.push_back(random_masks(random, problem, 0.3));
      tails.push_back(problem.tail(kept.back().data()));
    }
    expect_chunk_equals_heads<Output>(heads, run_select);
    expect_chunk_equals_heads<TailOutput>(tails, run_tail);
  }
}

// Where extremes are found from a sample of the keys, most of it misses single keys far above or below the others; the last
// group has its heavy keys exactly where CUDA samples, and all others far below.
TEST(Select, ExtremesThatASampleMisses) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      Random random(21);
      constexpr int64_t kCount = 9000, kDim = 40, kGroups = 20;
      Problem problem(random, kGroups, kCount, kCount, kDim);
      problem.use_keys(random, dtype);
      problem.use_exact();
      std::fill(problem.centroids.begin(), problem.centroids.end(), 0.0f);
      for (int64_t c = 0; c < kGroups; ++c) {  // group c sees channel c, and a little of the random ones
        problem.centroids[static_cast<size_t>(c * kDim + c)] = 4;
        for (int64_t i = 20; i < kDim; ++i) problem.centroids[static_cast<size_t>(c * kDim + i)] = 0.25f;
      }
      for (int64_t j = 0; j < kCount; ++j) {
        for (int64_t c = 0; c < kGroups; ++c) problem.k->set(j, c, 0);
      }
      for (int64_t c = 0; c + 1 < kGroups; ++c) {
        const double far = c % 4 == 3 ? -60 : 20 + static_cast<double>(c);
        for (int64_t i = 0; i <= c % 3; ++i) problem.k->set(random.below(kCount), c, far);
      }
      for (int64_t j = 0; j < kCount; ++j) {
        const auto phase = static_cast<uint32_t>(j / 8) * 0x9e3779b1u >> 29;
        if (j % 8 != phase) problem.k->set(j, kGroups - 1, -40);
      }
      for (const Rule rule : {Rule::target, Rule::top_p, Rule::fixed}) {
        problem.args.rule = rule;
        expect_selection(exec, problem, Selection(exec, problem));
      }
    }
  });
}

// What the specification promises where the rule sees a sample: its counts there, and all keys from that score up.
void expect_by_sample(const Exec& exec, const Problem& problem, const Selection& ours) {
  const WeighArgs& args = problem.args;
  const Proxy& proxy = args.proxy;
  const int64_t n = sampled_keys(args);
  const std::vector<int64_t> sizes(problem.sizes.begin(), problem.sizes.end()),
      top_p(ours.top_p.data(), ours.top_p.data() + proxy.groups);
  const auto want = reference::counts(args.rule, sizes, top_p, ours.alpha_used[0], args.density, n);
  EXPECT_EQ(ours.head_budget[0], of_all_keys(args, want.head_budget));
  for (int64_t c = 0; c < proxy.groups; ++c) {
    SCOPED_TRACE(fmt::format("group {}", c));
    const auto kept = ours.kept(c);
    ASSERT_EQ(static_cast<int64_t>(kept.size()), ours.counts[c]) << "popcount of the mask row";
    const int64_t of_sample = want.counts[static_cast<size_t>(c)];
    const auto scores = limits().exact_keys ? f32_row(exec, proxy, c) : reference::score_row(proxy, c);
    std::vector<double> sample, sorted;
    for (int64_t i = 0; i < n; ++i) sample.push_back(scores[static_cast<size_t>(args.phase + i * args.stride)]);
    expect_dropped(ours, c, sample, of_sample, proxy.count);
    ASSERT_EQ(kept.empty(), of_sample == 0);
    if (of_sample == 0 || of_sample == n) {
      ASSERT_EQ(ours.counts[c], of_sample == 0 ? 0 : proxy.count);
      continue;
    }
    sorted = sample;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const auto at = [&](int64_t rank) { return sorted[static_cast<size_t>(std::clamp<int64_t>(rank, 1, n) - 1)]; };
    const double resolved = limits().threshold * (sorted.front() - sorted.back()), threshold = at(of_sample);
    if (args.rule != Rule::fixed) {
      const double rho = ours.rho_used[0], score = at(ours.top_p[c]);
      int64_t like = 0;  // a backend may count any of these before or after it
      for (const double x : sample) like += limits().exact_keys || std::abs(x - score) > resolved ? 0 : 1;
      EXPECT_GE(ours.top_p[c] + like, reference::top_p_count(sample, rho >= 1 ? 1 : std::max(1e-12, rho - limits().rho)));
      EXPECT_LE(ours.top_p[c] - like, reference::top_p_count(sample, rho + limits().rho));
    }
    // A row that a backend's histogram does not resolve keeps its share of all keys.
    if (!limits().exact_keys && ours.counts[c] == of_all_keys(args, of_sample)) continue;
    const int64_t apart = limits().exact_keys ? 0 : 1;  // keys of the sample
    const double high = at(of_sample - apart) + resolved, low = at(of_sample + apart) - resolved;
    int64_t above = 0;
    for (const double x : scores) above += x > threshold ? 1 : 0;
    int64_t equal = std::max<int64_t>(0, of_all_keys(args, of_sample) - above);  // that are kept
    for (int64_t j = 0; j < proxy.count; ++j) {
      const double x = scores[static_cast<size_t>(j)];
      const bool in = std::binary_search(kept.begin(), kept.end(), j);
      if (limits().exact_keys && x == threshold) {
        ASSERT_EQ(in, equal-- > 0) << "key " << j;
      } else if (x > high || x < low) {
        ASSERT_EQ(in, x > high) << "key " << j << " of " << x << ", beside the threshold " << threshold;
      }
    }
  }
}

TEST(Select, DifferentialBySample) {
  each_case("select by sample", 1500, [](Case& at) {
    Random& random = at.random;
    const int64_t tokens = std::max<int64_t>(at.tokens, 2), count = random.chance(0.6) ? tokens : random.between(2, tokens);
    Problem problem(random, random.pick<int64_t>({1, 9, 70}), tokens, count, at.tokens >= 1025 ? 40 : at.dim);
    for (auto& n : problem.sizes) {
      if (random.chance(0.15)) n = 0;
    }
    problem.use_keys(random, at.dtype);
    problem.use_exact();
    WeighArgs& args = problem.args;
    args.stride = std::min(count, random.pick<int64_t>({2, 3, 4, 8, 11}));
    args.phase = random.below(args.stride);
    args.rule = random.pick<Rule>({Rule::fixed, Rule::top_p, Rule::hybrid, Rule::online, Rule::target});
    args.rho = random.pick<double>({1e-6, 0.1, 0.5, 0.9, 0.999999, 1, random.uniform()});
    problem.alpha = random.pick<double>({0, 0.05, 0.1, 1, random.uniform()});
    args.density = random.pick<double>({0.000001, 0.1, 0.25, 1, random.uniform()});
    expect_by_sample(at.exec, problem, Selection(at.exec, problem, at.poison));
  });
}

TEST(Select, ASampleMeetsTheDensityOfAllKeys) {
  each_machine([](const Exec& exec) {
    Random random(31);
    Problem problem(random, 60, 20000, 20000, 64);
    problem.use_keys(random, DType::bf16);
    problem.use_exact();
    problem.args.rule = Rule::target;
    for (const double density : {0.05, 0.1, 0.3}) {
      for (const int64_t stride : {4, 8}) {
        problem.args.density = density;
        problem.args.stride = stride;
        problem.args.phase = 1;
        const Selection ours(exec, problem);
        // 1 head of 60 groups: a call has many more, whose errors even out.
        EXPECT_NEAR(ours.density(), density, (stride == 4 ? 0.01 : 0.02) * density) << "stride " << stride;
      }
    }
  });
}

// Keys that are equal, or of which one is far from all others: as many as the sample's share, the first.
TEST(Select, ASampleOfConstantRowsCountsByIndex) {
  each_machine([](const Exec& exec) {
    Random random(32);
    Problem problem(random, 3, 4000, 4000, 40);
    problem.use_keys(random, limits().finest);
    for (int64_t j = 1; j < 4000; ++j) problem.k->copy_row(j, 0);
    problem.use_exact();
    problem.args.rule = Rule::fixed;
    problem.args.density = 0.3;
    problem.args.stride = 4;
    const Selection ours(exec, problem);
    for (int64_t c = 0; c < 3; ++c) {
      ASSERT_EQ(ours.counts[c], 1200);
      for (int64_t j = 0; j < 4000; ++j) ASSERT_EQ(mask_bit(ours.mask.data() + c * mask_words(4000), j), j < 1200);
    }
  });
}

TEST(Select, ASampleIsRepeatableAndHeadsAreTheirOwn) {
  Random random(33);
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<KeepArgs> heads;
  for (int h = 0; h < 3; ++h) {
    problems.push_back(std::make_unique<Problem>(random, 70, 3000, 2900, 40));
    Problem& problem = *problems.back();
    problem.k = std::make_unique<Rows>(random, DType::bf16, 3000, 40, 1.0, 2 * 40);  // side by side
    problem.args.proxy.k = problem.k->view();
    problem.use_exact();
    problem.args.proxy.rows = problems[0]->rows.data();
    problem.args.rule = Rule::target;
    problem.args.stride = 4;
    problem.args.phase = 2;
    heads.emplace_back().weighed = problem.args;
  }
  expect_repeatable([&](const Exec& exec) { return Selection(exec, *problems[1]).all(); });
  expect_chunk_equals_heads<Output>(heads, run_select);
}

TEST(Select, NanInKeysOutsideTheRowsNeverLeaks) {
  each_machine([](const Exec& exec) {
    for (const DType dtype : limits().dtypes) {
      Random random(13);
      Problem problem(random, 9, 200, 77, 40);
      problem.use_keys(random, dtype);
      problem.use_exact();
      problem.use_tail(random, dtype);
      for (int64_t t = 0; t < 200; ++t) {
        if (std::binary_search(problem.rows.begin(), problem.rows.end(), t)) continue;
        for (int64_t c = 0; c < 40; ++c) problem.k->set(t, c, std::nan("")), problem.v->set(t, c, kInf);
      }
      expect_selection(exec, problem, Selection(exec, problem));
    }
  });
}

TEST(Select, Int32OffsetOverflowThroughStrides) {
  constexpr int64_t kTokens = 4, kDim = 40, kStride = (int64_t{1} << 30) + 24;
  const SparseMemory far(kTokens * kStride * 2);
  if (!far.ok()) GTEST_SKIP() << "no address space";
  each_machine([&](const Exec& exec) {
    Random random(14);
    Problem problem(random, 3, kTokens, kTokens, kDim);
    problem.use_keys(random, DType::f16);
    problem.use_exact();
    problem.use_tail(random, DType::f16);
    const Selection near(exec, problem);
    const RowsView view{far.data(), DType::f16, kTokens, kDim, kStride};
    for (int64_t t = 0; t < kTokens; ++t) {
      std::memcpy(const_cast<std::byte*>(view.row(t)), problem.k->view().row(t), kDim * 2);
    }
    problem.args.proxy.k = view;
    EXPECT_TRUE(Selection(exec, problem).all() == near.all());
  });
}

// More blocks of keys than a grid has in y or z; scores fall with the key's number modulo 100.
// The CPU has no grid to overflow.
TEST(SelectOnDevice, MoreKeysThanAGridHasInYAndZ) {
  Random random(15);
  Problem problem(random, 2, kManyTokens, kManyTokens, 8);
  for (int i = 0; i < 200; ++i) problem.tables.push_back(static_cast<float>(-0.1 * (i % 100)));
  for (int64_t j = 0; j < kManyTokens; ++j) problem.labels.push_back(static_cast<int32_t>(j % 100));
  problem.args.proxy.subspaces = 1;
  problem.args.proxy.codes = 100;
  problem.args.proxy.tables = problem.tables.data();
  problem.args.proxy.labels = problem.labels.data();
  problem.args.rule = Rule::fixed;
  problem.args.density = 0.3;
  const Selection ours(machines().front().exec, problem);
  for (int64_t c = 0; c < 2; ++c) {
    ASSERT_EQ(ours.counts[c], ceil_share(0.3, kManyTokens));
    const uint32_t* row = ours.mask.data() + c * mask_words(kManyTokens);
    int64_t bits = 0;
    for (int64_t w = 0; w < mask_words(kManyTokens); ++w) bits += std::popcount(row[w]);
    ASSERT_EQ(bits, ours.counts[c]);
    for (int64_t j = 0; j < kManyTokens; ++j) {
      ASSERT_TRUE(j % 100 >= 29 || mask_bit(row, j)) << j;
      ASSERT_FALSE(j % 100 > 30 && mask_bit(row, j)) << j;
    }
  }
}

TEST(Select, MoreGroupsThanAGridHasInYAndZ) {
  for (const bool exact : {false, true}) {
    Random random(17);
    Problem problem(random, kManyGroups, 40, 37, 8);
    problem.use_keys(random, DType::bf16);
    problem.use_codes(random, 2, 3, 1, false);
    if (exact) problem.use_exact();
    problem.args.rule = Rule::online;
    const Exec exec = machines().front().with(pool(2));
    expect_selection(exec, problem, Selection(exec, problem));
  }
}

// The CPU has no grid to overflow, and who sees which of so many virtual keys takes half a gigabyte.
TEST(TailOnDevice, MoreGroupsThanAGridHasInYAndZ) {
  for (const bool exact : {false, true}) {
    Random random(17);
    Problem problem(random, kManyGroups, 40, 37, 8);
    problem.use_keys(random, DType::bf16);
    problem.use_codes(random, 2, 3, 1, false);
    if (exact) problem.use_exact();
    problem.use_tail(random, DType::bf16);
    const auto masks = random_masks(random, problem, 0.3);
    const Exec exec = machines().front().exec;
    TailOutput ours(exec, problem.tail(masks.data()));
    run_tail(exec, {&ours.args, 1});
    expect_tail(problem, ours, masks.data());
  }
}

TEST(Select, WorkspaceTooSmallIsRefused) {
  const Exec exec = machines().front().with(pool(1));
  Random random(16);
  Problem problem(random, 3, 60, 60, 8);
  problem.use_codes(random, 3, 9, 1, false);
  Output ours(exec, problem.args);
  if (ours.scratch.size() > 0) {  // a backend may need none beside the weights
    GuardedScratch scratch(ours.scratch.size() - 64 * 4);
    ours.args.weighed.scratch = scratch_of(scratch);
    EXPECT_THROW(run_select(exec, {&ours.args, 1}), Error);
  }
  Output other(exec, problem.args);
  GuardedScratch weights(other.weights.size() - 64 * 4);
  other.args.weighed.weights = scratch_of(weights);
  EXPECT_THROW(run_select(exec, {&other.args, 1}), Error);
  problem.use_keys(random, DType::bf16);
  problem.use_tail(random, DType::bf16);
  TailOutput tail(exec, problem.tail(other.mask.data()));
  GuardedScratch tail_scratch(tail.scratch.size() - 64 * 4);
  tail.args.scratch = scratch_of(tail_scratch);
  EXPECT_THROW(run_tail(exec, {&tail.args, 1}), Error);
}

TEST(Select, NoInt16CastAndNoNoiseInLongSequences) {
  each_machine([](const Exec& exec) {
    for (const int64_t n : {40'000, 170'001}) {
      Random random(10);
      Problem problem(random, 2, n, n, 8);
      problem.use_codes(random, 3, 333, 1, false);
      for (const double rho : {0.5, 0.9, 0.999}) {
        problem.args.rule = Rule::online;
        problem.args.rho = rho;
        const Selection ours(exec, problem);
        ASSERT_NO_FATAL_FAILURE(expect_selection(exec, problem, ours));
      }
    }
  });
}

// The paper's codes, and exactly.
TEST(Select, PaperSizes) {
  const Exec exec = machines().back().with(pool(2));
  for (const bool exact : {false, true}) {
    Random random(18);
    Problem problem(random, 100, 10'100, 10'000, 128);
    problem.use_keys(random, DType::bf16);
    problem.use_codes(random, 3, 333, 1, false);
    if (exact) problem.use_exact();
    problem.use_tail(random, DType::bf16);
    problem.args.rule = Rule::online;
    expect_selection(exec, problem, Selection(exec, problem));
  }
}

// A device does not wait to see its scores.
TEST(SelectOnCpu, ScoreSpanPastF32IsRefused) {
  const Exec exec = machines().front().with(pool(2));
  Random random(11);
  Problem problem(random, 1, 40, 40, 8);
  std::vector<float> values(40, -3e38f);
  values[3] = 3e38f;  // the span is not finite in f32
  problem.use_values(values);
  EXPECT_THROW(Selection(exec, problem), Error);
}

}  // namespace
}  // namespace scope::test
