// target_scope = sample: one rho for all heads of a sample, by stages against float64 and in whole calls on the tested
// backend.
#include <unistd.h>

#include <fstream>

#include "call_support.h"
#include "select_output.h"
#include "stages/choices.h"

namespace scope::test {
namespace {

// The rules that solve something and that the tested backend has.
std::vector<Rule> solving_rules() {
  std::vector<Rule> rules;
  for (const RuleRow& each : rule_rows()) {
    const bool solves = each.meets == Meets::by_rho || each.meets == Meets::by_bound;
    if (solves && backend().can.rules.has(each.choice)) rules.push_back(each.choice);
  }
  return rules;
}

// One head's scores by codes, sharper or flatter.
struct Head {
  std::vector<int32_t> labels, sizes;
  std::vector<float> tables, q_similarity, k_similarity, errors;
  double alpha = 0.1;
  WeighArgs args;

  std::vector<int64_t> group_sizes() const { return {sizes.begin(), sizes.end()}; }
  std::vector<int64_t> code_sizes() const {
    std::vector<int64_t> result(static_cast<size_t>(args.proxy.codes));
    for (const int32_t code : labels) ++result[static_cast<size_t>(code)];
    return result;
  }
};

// Heads of one sample: the same keys take part in all of them.
struct Sample {
  std::vector<int32_t> rows;
  std::vector<std::unique_ptr<Head>> heads;  // args point into them

  Sample(Random& random, Rule rule, int64_t head_count, int64_t groups, int64_t tokens, int64_t count, int64_t codes)
      : rows(subset(random, tokens, count)) {
    const bool whole = row(rule).whole_codes;
    const int64_t subspaces = whole ? 1 : random.between(1, 3);
    for (int64_t h = 0; h < head_count; ++h) {
      heads.push_back(std::make_unique<Head>());
      Head& head = *heads.back();
      const auto deviation = random.pick<double>({0.3, 1, 3});
      const auto number = [&](double scale) { return static_cast<float>(scale * random.normal()); };
      for (int64_t i = 0; i < groups * subspaces * codes; ++i) head.tables.push_back(number(deviation));
      for (int64_t i = 0; i < groups * codes; ++i) head.errors.push_back(number(1));
      for (int64_t i = 0; i < subspaces * count; ++i) head.labels.push_back(static_cast<int32_t>(random.below(codes)));
      for (int64_t c = 0; c < groups; ++c) {
        head.sizes.push_back(static_cast<int32_t>(c > 0 && random.chance(0.15) ? 0 : random.between(1, 50)));
        head.q_similarity.push_back(random.chance(0.9) ? 0.5f : -0.5f);
      }
      for (int64_t r = 0; r < codes; ++r) head.k_similarity.push_back(random.chance(0.9) ? 0.5f : -0.5f);
      WeighArgs& args = head.args;
      args.proxy.groups = groups;
      args.proxy.count = count;
      args.proxy.scale = 1;
      args.proxy.k = RowsView{nullptr, limits().finest, tokens, 8, 8};
      args.proxy.rows = rows.data();
      args.proxy.subspaces = subspaces;
      args.proxy.codes = codes;
      args.proxy.tables = head.tables.data();
      args.proxy.labels = head.labels.data();
      args.sizes = head.sizes.data();
      args.rule = rule;
      args.alpha = &head.alpha;
      args.q_similarity = head.q_similarity.data();
      args.k_similarity = head.k_similarity.data();
      if (row(rule).errors) args.errors = head.errors.data();
    }
  }
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;

  // Of every head, or each its own where the backend takes that.
  void set_target(double target, const std::vector<double>& alphas) {
    double mean = 0;
    for (size_t h = 0; h < heads.size(); ++h) {
      heads[h]->alpha = alphas[h % alphas.size()];
      mean += heads[h]->alpha / static_cast<double>(heads.size());
    }
    for (const auto& head : heads) {
      head->args.mean_alpha = alphas.size() == 1 ? alphas[0] : mean;
      (row(head->args.rule).meets == Meets::by_rho ? head->args.density : head->args.target) = target;
    }
  }
  // Floors as used.
  std::vector<double> lowered(double target) const {
    std::vector<double> alphas;
    for (const auto& head : heads) alphas.push_back(head->alpha);
    return reference::lowered_alphas(alphas, target / std::max(row(heads[0]->args.rule).floor, 2));
  }
};

// What a backend selects for a sample, `chunk` heads at a time.
struct Selection {
  std::vector<std::unique_ptr<SelectOutput>> heads;
  double rho = -1;

  Selection(const Exec& exec, const Sample& sample, int64_t chunk, uint8_t poison = 0xff) {
    std::vector<KeepArgs> args;
    for (const auto& head : sample.heads) {
      heads.push_back(std::make_unique<SelectOutput>(exec, head->args, poison));
      args.push_back(heads.back()->args);
    }
    run_select_sample(exec, args, chunk, &rho);
  }
  double density() const {
    int64_t pairs = 0, queries = 0;
    for (const auto& head : heads) pairs += head->pairs(), queries += head->queries();
    return static_cast<double>(pairs) / static_cast<double>(queries) /
           static_cast<double>(heads[0]->args.weighed.proxy.count);
  }
  std::vector<uint8_t> all() const {
    std::vector<uint8_t> bytes;
    for (const auto& head : heads) {
      const auto more = head->all();
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  }
};

void expect_shared(const Sample& sample, const Selection& ours, double target) {
  const auto alphas = sample.lowered(target);
  for (size_t h = 0; h < ours.heads.size(); ++h) {
    EXPECT_EQ(ours.heads[h]->rho_used[0], ours.rho);
    EXPECT_NEAR(ours.heads[h]->alpha_used[0], alphas[h], 1e-15);
  }
}

// Single keys: every head keeps what its rule keeps at the one rho, and together they meet the target.
TEST(TargetScope, DifferentialSingleKeys) {
  each_case("sample target", 600, [](Case& at) {
    Random& random = at.random;
    const int64_t n = std::max<int64_t>(at.tokens, 200);
    const Rule rule = random.pick<Rule>({Rule::target, Rule::top_p, Rule::hybrid});
    Sample sample(random, rule, random.between(1, 5), random.between(1, 9), n + 3, n, random.pick<int64_t>({16, 70}));
    const auto target = random.pick<double>({0.05, 0.1, 0.2, 0.5, 0.8});
    std::vector<double> alphas = {random.pick<double>({0, 0.02, 0.1, 0.3})};
    if (own_alphas() && random.chance(0.5)) alphas = {0.3, 0.01, 0};
    sample.set_target(target, alphas);
    const Selection ours(at.exec, sample, random.between(1, 5), at.poison);
    expect_shared(sample, ours, target);
    std::vector<reference::SampleHead> heads;
    for (size_t h = 0; h < sample.heads.size(); ++h) {
      const Head& head = *sample.heads[h];
      const SelectOutput& got = *ours.heads[h];
      reference::SampleHead& want = heads.emplace_back();
      want.sizes = head.group_sizes();
      want.alpha = got.alpha_used[0];
      std::vector<int64_t> top_p(got.top_p.data(), got.top_p.data() + got.top_p.size());
      for (int64_t c = 0; c < head.args.proxy.groups; ++c) {
        const auto scores = want.scores.emplace_back(reference::score_row(head.args.proxy, c));
        if (head.sizes[static_cast<size_t>(c)] == 0) continue;
        EXPECT_GE(got.top_p[c], reference::top_p_count(scores, std::max(1e-12, ours.rho - limits().rho)));
        EXPECT_LE(got.top_p[c], reference::top_p_count(scores, ours.rho + limits().rho));
      }
      const auto counts = reference::counts(rule, want.sizes, top_p, want.alpha, target, n);
      EXPECT_EQ(got.head_budget[0], counts.head_budget);
      for (int64_t c = 0; c < head.args.proxy.groups; ++c) EXPECT_EQ(got.counts[c], counts.counts[static_cast<size_t>(c)]);
    }
    // Ties and floors aside, float64 meets the target; t_c is known to limits().rho of the mass.
    const double rho = reference::sample_rho(rule, heads, target), reached = reference::sample_density(rule, heads, rho);
    const double doubt = reference::sample_density(rule, heads, std::min(rho + limits().rho, 1.0)) -
                         reference::sample_density(rule, heads, std::max(rho - limits().rho, 1e-12));
    EXPECT_NEAR(ours.density(), reached, 0.005 * target + 1.0 / static_cast<double>(n) + doubt) << rho << " " << ours.rho;
  });
}

// The codes of a group that the float64 rules keep when they compare with `bound`.
std::vector<int64_t> wanted_codes(const Head& head, int64_t group, double bound, double alpha) {
  const int64_t codes = head.args.proxy.codes;
  const std::vector<double> scores(head.tables.begin() + group * codes, head.tables.begin() + (group + 1) * codes);
  if (head.args.rule == Rule::clusters) return reference::svg2_clusters(scores, head.code_sizes(), bound, alpha);
  if (head.args.rule == Rule::error_aware) {
    const std::vector<double> errors(head.errors.begin() + group * codes, head.errors.begin() + (group + 1) * codes);
    return reference::ear_clusters(scores, head.code_sizes(), errors, bound, alpha);
  }
  if (head.args.rule == Rule::deviation) return reference::sol_blocks(scores, group, bound);
  std::vector<bool> similar;
  for (const float x : head.k_similarity) similar.push_back(static_cast<double>(x) > head.args.similar);
  // A solved share of codes is a whole number of them, which millionths would round down.
  const reference::SpargeForm form = head.args.rule == Rule::blocks_topk ? reference::SpargeForm{.topk = bound + 1e-6}
                                                                         : reference::SpargeForm{.cdf = bound};
  return reference::sparge_blocks(scores, similar, head.q_similarity[static_cast<size_t>(group)] > head.args.similar, form);
}

int64_t keys_of(const Head& head, const std::vector<int64_t>& codes) {
  return std::count_if(head.labels.begin(), head.labels.end(),
                       [&](int32_t code) { return std::binary_search(codes.begin(), codes.end(), code); });
}

// Whole codes: float64's codes at the one bound, and no bound brings the heads' mean nearer to the target.
TEST(TargetScope, WholeCodesAreTheNearestReachable) {
  each_case("sample codes target", 240, [](Case& at) {
    Random& random = at.random;
    std::vector<Rule> rules = solving_rules();
    std::erase_if(rules, [](Rule rule) { return !row(rule).whole_codes; });
    const Rule rule = random.pick(rules);
    const int64_t n = std::max<int64_t>(at.tokens, 64);
    Sample sample(random, rule, random.between(1, 4), random.between(1, 5), n + 3, n, random.pick<int64_t>({1, 8, 40}));
    for (const auto& head : sample.heads) head->args.similar = -1;
    const auto target = random.pick<double>({0.01, 0.05, 0.2, 0.5, 0.9, 1});
    std::vector<double> alphas = {random.pick<double>({0, 0.02, 0.1, 0.3})};
    if (own_alphas() && random.chance(0.5)) alphas = {0.3, 0.01, 0};
    sample.set_target(target, alphas);
    const Selection ours(at.exec, sample, random.between(1, 4), at.poison);
    expect_shared(sample, ours, target);
    for (size_t h = 0; h < sample.heads.size(); ++h) {
      const Head& head = *sample.heads[h];
      for (int64_t c = 0; c < head.args.proxy.groups; ++c) {
        bool found = head.sizes[static_cast<size_t>(c)] == 0 && ours.heads[h]->counts[c] == 0;
        for (const double nudge : {0.0, -1e-12, 1e-12}) {  // a sum may round to either side of a bound that it meets
          const auto codes = wanted_codes(head, c, ours.rho + nudge, ours.heads[h]->alpha_used[0]);
          found = found || ours.heads[h]->counts[c] == keys_of(head, codes);
        }
        ASSERT_TRUE(found) << "head " << h << " group " << c;
      }
    }
    double nearest = 1;
    for (int i = 0; i <= 60; ++i) {
      const double bound = i / 60.0;
      double pairs = 0, queries = 0;
      for (size_t h = 0; h < sample.heads.size(); ++h) {
        const Head& head = *sample.heads[h];
        for (int64_t c = 0; c < head.args.proxy.groups; ++c) {
          const double size = head.sizes[static_cast<size_t>(c)];
          pairs += size * static_cast<double>(keys_of(head, wanted_codes(head, c, bound, ours.heads[h]->alpha_used[0])));
          queries += size;
        }
      }
      const double reached = pairs / queries / static_cast<double>(n);
      if (std::abs(reached - target) < std::abs(nearest - target)) nearest = reached;
    }
    EXPECT_LE(std::abs(ours.density() - target), std::abs(nearest - target) + 1e-9);
    if (ours.rho == 0) {
      EXPECT_GE(ours.density(), target);
    }
  });
}

TEST(TargetScope, AnyChunkingHasTheSameBits) {
  each_machine([](const Exec& exec) {
    for (const Rule rule : solving_rules()) {
      SCOPED_TRACE(row(rule).name);
      Random random(3);
      Sample sample(random, rule, 5, 70, 300, 260, 40);
      sample.set_target(0.3, {0.1});
      const Selection whole(exec, sample, 5);
      for (const int64_t chunk : {1, 2, 3}) {
        const Selection ours(exec, sample, chunk);
        EXPECT_EQ(ours.rho, whole.rho) << chunk;
        EXPECT_TRUE(ours.all() == whole.all()) << chunk;
      }
    }
  });
}

TEST(TargetScope, BitwiseOverThreadsAndRuns) {
  for (const Rule rule : {Rule::target, Rule::clusters}) {
    Random random(5);
    Sample sample(random, rule, 4, 70, 300, 260, 40);
    sample.set_target(0.3, {0.1});
    expect_repeatable([&](const Exec& exec) { return Selection(exec, sample, 2).all(); });
  }
}

TEST(TargetScope, IdenticalHeadsKeepWhatEachKeepsAlone) {
  each_machine([](const Exec& exec) {
    for (const Rule rule : solving_rules()) {
      SCOPED_TRACE(row(rule).name);
      Random random(7);
      Sample sample(random, rule, 1, 30, 400, 390, 40);
      sample.set_target(0.2, {0.15});
      SelectOutput alone(exec, sample.heads[0]->args);
      alone.args.weighed.mean_alpha = 0;
      run_select(exec, {&alone.args, 1});
      for (int i = 0; i < 2; ++i) {
        sample.heads.push_back(std::make_unique<Head>());
        sample.heads.back()->args = sample.heads[0]->args;
        sample.heads.back()->sizes = sample.heads[0]->sizes;
        sample.heads.back()->alpha = sample.heads[0]->alpha;
      }
      const Selection ours(exec, sample, 2);
      for (const auto& head : ours.heads) {
        EXPECT_NEAR(head->rho_used[0], alone.rho_used[0], 1e-9);
        EXPECT_NEAR(head->density(), alone.density(), 1.0 / 390);
        if (backend().can.host) {
          EXPECT_TRUE(head->all() == alone.all());
        }
      }
    }
  });
}

// A flat head needs more keys for the same share of its mass: it keeps more than the target, the other less.
TEST(TargetScope, HeadsDifferAndTheirMeanMeetsTheTarget) {
  each_machine([](const Exec& exec) {
    for (const Rule rule : {Rule::target, Rule::top_p, Rule::hybrid, Rule::clusters}) {
      SCOPED_TRACE(row(rule).name);
      Random random(9);
      Sample sample(random, rule, 2, 24, 3000, 3000, row(rule).whole_codes ? 700 : 60);
      for (size_t h = 0; h < 2; ++h) {
        for (float& x : sample.heads[h]->tables) x = static_cast<float>((h == 0 ? 4 : 0.5) * random.normal());
      }
      sample.set_target(0.2, {0});
      const Selection ours(exec, sample, 1);
      EXPECT_NEAR(ours.density(), 0.2, 0.005 * 0.2);
      EXPECT_LT(ours.heads[0]->density(), 0.1);
      EXPECT_GT(ours.heads[1]->density(), 0.3);
    }
  });
}

TEST(TargetScope, ATargetOfOneKeepsAll) {
  each_machine([](const Exec& exec) {
    for (const Rule rule : solving_rules()) {
      SCOPED_TRACE(row(rule).name);
      Random random(11);
      Sample sample(random, rule, 3, 9, 200, 190, 16);
      sample.set_target(1, {0.1});
      const Selection ours(exec, sample, 2);
      EXPECT_EQ(ours.density(), 1.0);
      EXPECT_GT(ours.rho, 0.9);
    }
  });
}

// ---- whole calls ----

// Heads whose queries are longer are sharper.
Inputs unlike_heads(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, uint32_t seed) {
  Inputs in(batch, heads, tokens, tokens, dim, seed);
  const int64_t each = tokens * dim;
  for (int64_t i = 0; i < std::ssize(in.q); ++i) {
    float& x = in.q[static_cast<size_t>(i)];
    const double factor = 0.25 * static_cast<double>(1 + 2 * (i / each % heads) + i / each / heads);
    x = static_cast<float>(reference::rounded(static_cast<double>(x) * factor, in.dtype));
  }
  return in;
}

Settings of_sample(Settings settings) {
  settings.target_scope = TargetScope::sample;
  return settings;
}

// Methods that solve for 0.3 under every rule and with every tail, as far as the tested backend has them.
std::vector<Settings> solving_methods() {
  std::vector<Settings> all = baselines("0.3");
  for (const char* rule : {"online", "hybrid", "top_p"}) {
    for (const char* tail : {"none", "first_order", "mean", "means"}) {
      all.push_back(method("scope", {{"partition", "even:3"}, {"rule", rule}, {"tail", tail}, {"target_density", "0.3"}}));
    }
  }
  all.push_back(method("scope-exact", {{"rule", "target"}, {"density", "0.3"}, {"tail", "first_order"}}));
  all.push_back(method("svg2-ear", {{"codes", "100"}, {"target_density", "0.3"}}));
  all.push_back(method("svg2", {{"codes", "100"}, {"target_density", "0.3"}, {"tail", "centroids"}}));
  all.push_back(method("svoo", {{"codes", "100"}, {"target_density", "0.3"}}));
  std::erase_if(all, [](const Settings& each) { return !tested_has(each); });
  for (Settings& each : all) {
    each = of_sample(each);
    each.similarity = -1;  // so that no block is kept whatever the bound
  }
  return all;
}

// The same selection is that of the rho that was found, given to each head: so nothing of a head is lost or mixed up while
// it waits for the others.
TEST(TargetScope, EqualsItsRhoGivenToEveryHead) {
  const Context context = tested_context();
  const Inputs in = unlike_heads(2, 3, 420, 40, 13);
  Extra extra;
  extra.q_lengths = {420, 301};
  extra.k_lengths = {390, 420};
  extra.keep.assign(2 * static_cast<size_t>(mask_words(420)), 0x10);
  for (const Settings& settings : solving_methods()) {
    SCOPED_TRACE(
        fmt::format("{}, rule {}, tail {}", settings.method->name, row(settings.rule).name, row(settings.tail).name));
    const Plan plan(context, settings, in.shape());
    const Result both = run(plan, in, extra);
    if (settings.tail == Tail::none) {
      ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, both, extra));
    }
    const bool shares = settings.rule == Rule::blocks_topk;  // the same share of blocks in every head
    EXPECT_TRUE(shares || both.heads[0].rho != both.heads[3].rho) << "samples have a rho each";
    for (int64_t b = 0; b < 2; ++b) {
      const HeadStats* heads = both.heads.data() + 3 * b;
      double mean = 0;
      for (int64_t h = 0; h < 3; ++h) {
        EXPECT_EQ(heads[h].rho, heads[0].rho);
        mean += heads[h].density / 3;
      }
      const bool coarse = row(settings.rule).similarity;
      EXPECT_NEAR(mean, 0.3, coarse ? 0.02 : std::max(0.005, limits().density));
      EXPECT_TRUE(shares || std::abs(heads[0].density - heads[2].density) > 0.02);
      Settings given = plan.settings;  // a target is resolved there
      given.target_scope = TargetScope::head;
      given.target_density = 0;
      if (given.rule == Rule::target) given.rule = Rule::online;
      given.rho = heads[0].rho;
      given.density = heads[0].rho + 1e-6;  // of blocks_topk: a whole number of blocks
      given.alpha = heads[0].alpha;
      const Result alone = run(Plan(context, given, in.shape()), in, extra);
      const auto same = [&](const auto& x, const auto& y) {
        const auto n = std::ssize(x) / 2;
        return std::equal(x.begin() + b * n, x.begin() + (b + 1) * n, y.begin() + b * n);
      };
      EXPECT_TRUE(same(both.labels, alone.labels));
      EXPECT_TRUE(same(both.mask, alone.mask));
      EXPECT_TRUE(same(both.counts, alone.counts));
      EXPECT_TRUE(same(both.out, alone.out));
      EXPECT_TRUE(same(both.lse, alone.lse));
      EXPECT_TRUE(same(both.centroids, alone.centroids));
      EXPECT_TRUE(same(both.codes, alone.codes));
    }
  }
}

TEST(TargetScope, ASampleAloneEqualsItselfInABatch) {
  const Context context = tested_context();
  const Inputs both = unlike_heads(2, 3, 340, 40, 21);
  for (const Settings& settings : solving_methods()) {
    SCOPED_TRACE(fmt::format("{}, rule {}", settings.method->name, row(settings.rule).name));
    const Result batch = run(Plan(context, settings, both.shape()), both);
    for (int64_t b = 0; b < 2; ++b) {
      const Inputs one = both.sample(b);
      const Result alone = run(Plan(context, settings, one.shape()), one);
      EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), batch.out.begin() + b * std::ssize(alone.out)));
      EXPECT_TRUE(std::equal(alone.mask.begin(), alone.mask.end(), batch.mask.begin() + b * std::ssize(alone.mask)));
      EXPECT_EQ(alone.heads[0].rho, batch.heads[static_cast<size_t>(3 * b)].rho);
    }
  }
}

// Clusters know nothing of targets: cold, warm and reused, the state is that of the other scope.
TEST(TargetScope, StatesAreTheSameInBothScopes) {
  const Context context = tested_context();
  const Inputs in = unlike_heads(2, 3, 300, 40, 31);
  for (const char* interval : {"1", "3"}) {
    for (const char* name : {"scope", "svg2"}) {
      SCOPED_TRACE(fmt::format("{}, reuse_interval {}", name, interval));
      const Settings settings = method(name, {{"partition", "even:1"},
                                              {"dense_steps", "0"},
                                              {"reuse_interval", interval},
                                              {"target_density", "0.3"},
                                              {"target_scope", "head"}});
      const Plan plan(context, settings, in.shape()), together(context, of_sample(settings), in.shape());
      OwnState state(plan), other(together);
      for (int64_t step = 0; step < 3; ++step) {
        Extra extra{.place = {3, step, 10}, .state = &state.state};
        const Result alone = run(plan, in, extra);
        extra.state = &other.state;
        const Result ours = run(together, in, extra);
        EXPECT_EQ(ours.stats.warm, step > 0);
        EXPECT_TRUE(ours.labels == alone.labels);
        EXPECT_TRUE(state.save() == other.save());
        EXPECT_FALSE(ours.counts == alone.counts);
      }
    }
  }
}

TEST(TargetScope, OneHeadIsTheSameInBothScopes) {
  const Context context = tested_context();
  const Inputs in = unlike_heads(2, 1, 300, 40, 32);
  for (const Settings& settings : solving_methods()) {
    SCOPED_TRACE(fmt::format("{}, rule {}", settings.method->name, row(settings.rule).name));
    Settings of_head = settings;
    of_head.target_scope = TargetScope::head;
    const Plan plan(context, of_head, in.shape()), together(context, of_sample(settings), in.shape());
    EXPECT_EQ(together.workspace_bytes, plan.workspace_bytes);
    EXPECT_TRUE(same_bits(run(together, in), run(plan, in)));
  }
}

TEST(TargetScope, CallsRepeatBitwise) {
  const Inputs in = unlike_heads(1, 3, 300, 64, 33);
  const Settings settings =
      of_sample(method("scope", {{"partition", "even:3"}, {"rule", "target"}, {"tail", "first_order"}}));
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 7}) {
    const Context context = tested_context(threads);
    const Plan plan(context, settings, in.shape());
    for (int i = 0; i < 10; ++i) {
      const Result result = run(plan, in);
      if (first.empty()) first = result.out;
      ASSERT_EQ(std::memcmp(first.data(), result.out.data(), first.size() * 4), 0) << threads << " threads, run " << i;
    }
  }
}

// What the heads wait with must fit at once; beyond it, a device takes as many at a time as its limit allows.
TEST(TargetScopeOnDevice, ChunksHaveTheSameBits) {
  const Context context = tested_context();
  const Inputs in = unlike_heads(1, 7, 12288, 64, 35);  // a mebibyte is less than the masks of six heads
  std::vector<Settings> all = {of_sample(method("svg2", {{"target_density", "0.2"}}))};
  all.push_back(of_sample(method("scope", {{"partition", "even:3"}, {"rule", "target"}, {"tail", "first_order"}})));
  for (Settings settings : all) {
    const Plan whole(context, settings, in.shape());
    EXPECT_EQ(whole.chunk, 7);
    const Result expected = run(whole, in);
    EXPECT_NEAR(expected.stats.density, 0.2, 0.001);
    std::unique_ptr<Plan> least;
    for (settings.workspace_limit = 1; least == nullptr; ++settings.workspace_limit) {
      try {
        least = std::make_unique<Plan>(context, settings, in.shape());
      } catch (const Error& error) {
        ASSERT_EQ(error.status(), Status::invalid_argument) << error.what();
      }
    }
    EXPECT_LT(least->chunk, 7);
    EXPECT_TRUE(same_bits(run(*least, in), expected)) << "chunks of " << least->chunk;
  }
}

// Nobody who sets no limit is refused for what the heads wait with.
TEST(TargetScopeOnDevice, AnAutomaticLimitHoldsWhatTheHeadsWaitWith) {
  const Context context = tested_context();
  Settings settings = of_sample(method("scope", {{"partition", "even:3"}, {"rule", "target"}}));
  Shape shape{
      .heads = 40, .q_tokens = 75600, .k_tokens = 75600, .dim = 128, .dtype = DType::bf16, .rope = {}, .subspaces = {}};
  EXPECT_LE(Plan(context, settings, shape).workspace_bytes, 400'000'000);
  shape.q_tokens = shape.k_tokens = 151200;
  const Plan plan(context, settings, shape);
  EXPECT_GE(plan.chunk, 10);
  settings.workspace_limit = 400;
  EXPECT_EQ(status_of([&] { Plan(context, settings, shape); }), Status::invalid_argument);
}

// A profile's shares keep their proportions: they are scaled only where their mean passes half of the target.
TEST(TargetScopeOnCpu, AProfileGivesEveryHeadItsShareOfTheFloor) {
  const std::string path = testing::TempDir() + "scope_sample_" + std::to_string(getpid()) + ".csv";
  std::ofstream(path) << "step,layer,head,density\n20,3,0,0.4\n20,3,1,0.1\n20,3,2,0.01\n";
  const Context context(2);
  const Inputs in = unlike_heads(1, 3, 500, 24, 37);
  const Extra extra{.place = {3, 20, 50}};
  for (const double target : {0.2, 0.5}) {
    Settings settings = of_sample(
        method("svoo", {{"codes", "100"}, {"profile", path.c_str()}, {"profile_low", "0"}, {"profile_high", "1"}}));
    settings.target_density = target;
    const Result result = run(Plan(context, settings, in.shape()), in, extra);
    const auto alphas = reference::lowered_alphas({0.4, 0.1, 0.01}, target / 2);
    EXPECT_EQ(alphas[0] < 0.4, target == 0.2);
    for (size_t h = 0; h < 3; ++h) EXPECT_NEAR(result.heads[h].alpha, alphas[h], 1e-15);
    EXPECT_NEAR(result.stats.density, target, 0.005);
  }
  std::remove(path.c_str());
}

}  // namespace
}  // namespace scope::test
