// SVOO as whole calls: co-clusters and kept clusters against float64, the reuse of clusters, profiles and what is refused.
#include <unistd.h>

#include <fstream>
#include <set>

#include "call_support.h"
#include "methods/models.h"
#include "reference.h"

namespace scope::test {
namespace {

constexpr int64_t kDim = 24;

// A file that goes when the test does.
class TextFile {
 public:
  explicit TextFile(const std::string& text)
      : path_(testing::TempDir() + "scope_profile_" + std::to_string(++count) + "_" + std::to_string(getpid()) + ".csv") {
    std::ofstream(path_) << text;
  }
  ~TextFile() { std::remove(path_.c_str()); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  const char* path() const { return path_.c_str(); }

 private:
  inline static int count = 0;
  std::string path_;
};

std::string refusal(const std::function<void()>& body, Status status) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  return "accepted";
}

reference::Matrix gather(const std::vector<float>& x, int64_t head, int64_t tokens, const std::vector<int32_t>& rows) {
  const RowsView view{x.data() + head * tokens * kDim, DType::f32, tokens, kDim, kDim};
  return reference::gather(view, rows.data(), static_cast<int64_t>(rows.size()), nullptr, kDim);
}

// Two samples with padding, text keys that all see and text queries that see all: groups and kept keys from q and k alone.
TEST(SvooOnCpu, FollowsItsRulesFromQAndK) {
  const Ragged ragged(kDim);
  const Inputs& in = ragged.in;
  Extra extra = ragged.extra;
  extra.place = {3, 20, 50};
  const TextFile profile("step,layer,head,density\n20,3,0,0.5\n20,3,1,0.01\n");
  const Context context(2);
  for (const double p : {0.3, 0.9, 1.0}) {
    Settings settings = method("svoo", {{"groups", "9"}, {"codes", "20"}, {"profile", profile.path()}});
    settings.rho = p;
    const Plan plan(context, settings, ragged.shape());
    const Result result = run(plan, in, extra);
    expect_consistent(in, plan, result, extra);
    EXPECT_EQ(result.stats.iterations, 2);
    EXPECT_FALSE(result.stats.warm);
    const int64_t words = mask_words(in.k_tokens);
    for (int64_t head = 0; head < 4; ++head) {
      const int64_t b = head / 2;
      const double least = head % 2 == 0 ? 0.2 : 0.15;  // the profile's entries, clipped
      EXPECT_EQ(result.heads[static_cast<size_t>(head)].alpha, least);
      const auto q_rows = part(extra.q_lengths[static_cast<size_t>(b)], extra.dense_queries.data() + b * 5);
      const auto k_rows = part(extra.k_lengths[static_cast<size_t>(b)], extra.keep.data() + b * 6);
      const auto q = gather(in.q, head, in.q_tokens, q_rows), k = gather(in.k, head, in.k_tokens, k_rows);
      const auto both =
          reference::cocluster(q, k, reference::start_rows(q, 9, {}), reference::start_rows(k, 20, {.tensor = 1}), 2);
      std::vector<int64_t> sizes(20);
      for (const int32_t code : both.keys.labels) ++sizes[static_cast<size_t>(code)];
      for (size_t i = 0; i < q_rows.size(); ++i) {
        const int32_t label = result.labels[static_cast<size_t>(head * in.q_tokens + q_rows[i])];
        ASSERT_EQ(label, both.queries.labels[i]) << "head " << head << " query " << q_rows[i];
        std::vector<double> scores;
        for (int64_t r = 0; r < 20; ++r) {
          scores.push_back(reference::dot(both.queries.centroids.row(label), both.keys.centroids.row(r), kDim) /
                           std::sqrt(1.0 * kDim));
        }
        const auto kept = reference::svg2_clusters(scores, sizes, p, least);
        const uint32_t* mask = result.mask.data() + (head * plan.selection_groups + label) * words;
        for (size_t j = 0; j < k_rows.size(); ++j) {
          ASSERT_EQ(mask_bit(mask, k_rows[j]), std::binary_search(kept.begin(), kept.end(), both.keys.labels[j]))
              << "head " << head << " query " << q_rows[i] << " key " << k_rows[j];
        }
      }
    }
  }
}

// From the third step on every third one clusters; between them labels, codes, centroids and with them the selection stay,
// while attention is that of the new q, k, v. So for K-means, whose clusterings start from the state.
TEST(Svoo, ClustersAreReusedBetweenTheStepsThatMakeThem) {
  const Context context = tested_context();
  for (const char* name : {"svoo", "svg2", "scope", "scope-exact"}) {
    SCOPED_TRACE(name);
    const Settings settings = method(name, {{"partition", "even:1"},
                                            {"groups", "7"},
                                            {"codes", "30"},
                                            {"reuse_start", "3"},
                                            {"reuse_steps", "0"},
                                            {"reuse_interval", "3"},
                                            {"dense_steps", "0"}});
    const Plan plan(context, settings, Inputs(2, 2, 120, 140, kDim, 1).shape());
    Settings fresh = settings;
    fresh.reuse_interval = 1;
    const Plan fresh_plan(context, fresh, plan.shape);
    const int64_t codes = std::string(name) == "scope-exact" ? 0 : round_up(2 * 2 * 140 * 4, 64);
    EXPECT_EQ(plan.state_bytes, fresh_plan.state_bytes + round_up(2 * 2 * 120 * 4, 64) + codes);
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    extra.q_lengths = {120, 90};
    extra.k_lengths = {140, 101};
    Result last;
    for (const int64_t step : {0, 1, 2, 3, 4, 5, 6}) {
      SCOPED_TRACE(fmt::format("step {}", step));
      const Inputs in(2, 2, 120, 140, kDim, static_cast<uint32_t>(step));
      extra.place = {1, step, 10};
      const Result now = run(plan, in, extra);
      ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, now, extra));
      const bool reused = step == 3 || step == 4 || step == 6;
      EXPECT_EQ(now.stats.iterations == 0, reused);
      EXPECT_EQ(now.stats.warm, reused || (step > 0 && std::string(name) != "svoo"));
      EXPECT_EQ(last.labels == now.labels, reused);
      const bool keys_scored = std::string(name) == "scope-exact";  // by this call's k
      EXPECT_EQ(last.mask == now.mask, reused && !keys_scored);
      if (std::string(name) == "svoo" && !reused) {  // no clustering starts from another
        Extra alone = extra;
        alone.state = nullptr;
        EXPECT_EQ(run(plan, in, alone).out, now.out);
      }
      if (reused) {
        EXPECT_EQ(last.sizes, now.sizes);
        EXPECT_EQ(last.heads[0].empty_codes, now.heads[0].empty_codes);
        // Without a state, without a step, or with a state that forgot, every call clusters.
        Extra other = extra;
        other.place.step = -1;
        OwnState copy(plan);
        copy.state.load(nullptr, own.save());
        other.state = &copy.state;
        EXPECT_NE(run(plan, in, other).stats.iterations, 0);
        other.place = extra.place;
        copy.state.load(nullptr, own.save());
        EXPECT_EQ(run(plan, in, other).stats.iterations, 0);
        copy.state.set_filled(false);
        EXPECT_NE(run(plan, in, other).stats.iterations, 0);
        other.state = nullptr;
        EXPECT_NE(run(plan, in, other).stats.iterations, 0);
      }
      last = now;
    }
  }
}

// Labels of other tokens are not reused, and bytes that are no labels are not loaded.
void expect_not_reused(const char* name) {
  SCOPED_TRACE(name);
  const Context context = tested_context(1);
  const Inputs in(1, 2, 120, 140, kDim, 1);
  const Settings settings = method(name, {{"groups", "7"},
                                          {"codes", "30"},
                                          {"first_iterations", "2"},
                                          {"reuse_start", "1"},
                                          {"reuse_steps", "0"},
                                          {"reuse_interval", "40"},
                                          {"dense_steps", "0"}});
  const Plan plan(context, settings, in.shape());
  OwnState own(plan);
  Extra extra;
  extra.state = &own.state;
  extra.place = {1, 0, 10};
  run(plan, in, extra);
  extra.place.step = 1;
  EXPECT_EQ(run(plan, in, extra).stats.iterations, 0);
  const std::vector<std::byte> saved = own.save();
  const auto clusters_again = [&](const Extra& with) {
    const Result result = run(plan, in, with);
    expect_consistent(in, plan, result, with);
    own.state.load(nullptr, saved);
    return result.stats.iterations == 2 && result.stats.warm == row(settings.group).warm;
  };
  Extra other = extra;
  other.q_lengths = {119};
  EXPECT_TRUE(clusters_again(other));
  other = extra;
  other.k_lengths = {100};
  EXPECT_TRUE(clusters_again(other));
  other = extra;
  other.keep.assign(5, 0);
  set_mask_bit(other.keep.data(), 17);
  EXPECT_TRUE(clusters_again(other));
  other = extra;
  other.valid_keys.assign(5, ~0u);
  EXPECT_FALSE(clusters_again(other));  // all of them
  other.valid_keys[2] = ~4u;
  EXPECT_TRUE(clusters_again(other));
  other = extra;
  other.valid_queries.assign(4, ~8u);
  EXPECT_TRUE(clusters_again(other));
  const StateLayout layout(plan);
  for (const int32_t label : {-2, 30, INT32_MAX, INT32_MIN}) {
    for (const int64_t at :
         {layout[StateLayout::codes].at + 4 * (140 + 5), layout[StateLayout::labels].at + 4 * (120 + 5)}) {
      std::vector<std::byte> broken = saved;
      std::memcpy(broken.data() + at, &label, sizeof label);
      EXPECT_EQ(status_of([&] { own.state.load(nullptr, broken); }), Status::format) << label;
      EXPECT_EQ(own.save(), saved);
    }
  }
  EXPECT_FALSE(clusters_again(extra));
  // Nor is a state for other token counts, or without labels, taken.
  const Plan longer(context, settings, Inputs(1, 2, 121, 140, kDim, 1).shape());
  EXPECT_EQ(status_of([&] { own.state.check(longer); }), Status::shape);
  const Plan more_keys(context, settings, Inputs(1, 2, 120, 141, kDim, 1).shape());
  EXPECT_EQ(status_of([&] { own.state.check(more_keys); }), Status::shape);
  Settings always = settings;
  always.reuse_interval = 1;
  EXPECT_EQ(status_of([&] { own.state.check(Plan(context, always, in.shape())); }), Status::shape);
}

TEST(Svoo, AStateOfOtherTokensIsNotReused) {
  expect_not_reused("svoo");
  expect_not_reused("svg2");
}

// Where queries and keys have the same masks, as in self-attention, their hashes must not cancel.
TEST(Svoo, AStateOfOtherTokensOnBothSidesIsNotReused) {
  const Context context = tested_context();
  const Inputs in(1, 2, 140, 140, kDim, 9);
  const Settings settings = method("svg2", {{"groups", "7"},
                                            {"codes", "30"},
                                            {"reuse_start", "1"},
                                            {"reuse_steps", "0"},
                                            {"reuse_interval", "40"},
                                            {"dense_steps", "0"}});
  const Plan plan(context, settings, in.shape());
  OwnState own(plan);
  Extra extra;
  extra.state = &own.state;
  extra.place = {1, 0, 10};
  run(plan, in, extra);
  extra.place.step = 1;
  EXPECT_EQ(run(plan, in, extra).stats.iterations, 0);
  extra.q_lengths = extra.k_lengths = {130};
  EXPECT_GT(run(plan, in, extra).stats.iterations, 0);
}

// At a rho that one cluster passes, what a group keeps is its head's least share of the clusters.
TEST(Svoo, EachHeadKeepsTheLeastShareOfItsProfile) {
  const TextFile profile("step,layer,head,density\n7,2,0,0.5\n7,2,1,0.01\n7,2,2,0.17\n");
  const Context context = tested_context();
  const Inputs in(1, 3, 120, 140, kDim, 1);
  const Plan plan(context, method("svoo", {{"groups", "7"}, {"codes", "20"}, {"rho", "1e-6"}, {"profile", profile.path()}}),
                  in.shape());
  Extra extra;
  extra.place = {2, 7, 10};
  const Result result = run(plan, in, extra);
  ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, result, extra));
  const double least[] = {0.2, 0.15, 0.17};  // clipped
  const size_t clusters[] = {4, 3, 3};
  for (int64_t head = 0; head < 3; ++head) {
    EXPECT_EQ(result.heads[static_cast<size_t>(head)].alpha, least[head]);
    for (int64_t c = 0; c < 7; ++c) {
      if (result.sizes[static_cast<size_t>(head * 7 + c)] == 0) continue;
      std::set<int32_t> kept;
      const uint32_t* mask = result.mask.data() + (head * 7 + c) * mask_words(140);
      for (int64_t j = 0; j < 140; ++j) {
        if (mask_bit(mask, j)) kept.insert(result.codes[static_cast<size_t>(head * 140 + j)]);
      }
      EXPECT_EQ(kept.size(), clusters[head]) << "head " << head << " group " << c;
    }
  }
}

TEST(SvooOnCpu, LeastSharesComeFromTheProfile) {
  const TextFile file("step,layer,head,density\n7,2,0,0.17\n7,2,1,0.9\r\n7,3,0,0\n7,3,1,0.2\n");
  const Settings settings = method("svoo", {{"profile", file.path()}});
  EXPECT_EQ(get_setting(settings, "profile"), file.path());
  EXPECT_EQ(least_share(settings, {2, 7, 50}, 0), 0.17);
  EXPECT_EQ(least_share(settings, {2, 7, 50}, 1), 0.20);
  EXPECT_EQ(least_share(settings, {3, 7, 50}, 0), 0.15);
  EXPECT_EQ(least_share(settings, {2, 8, 50}, 0), 0.1);  // no entry: not clipped
  EXPECT_EQ(least_share(settings, {4, 7, 50}, 1), 0.1);
  EXPECT_EQ(least_share(settings, {-1, -1, 0}, 1), 0.1);
  Settings none = settings;
  set_setting(none, "profile", "none");
  EXPECT_EQ(get_setting(none, "profile"), "none");
  EXPECT_EQ(least_share(none, {2, 7, 50}, 0), 0.1);
}

TEST(SvooOnCpu, RefusesProfilesThatAreNone) {
  const auto said = [](const std::string& text) {
    const TextFile file(text);
    return refusal([&] { read_profile(file.path()); }, Status::format);
  };
  const std::string head = "step,layer,head,density\n";
  EXPECT_NE(refusal([] { read_profile("/nowhere/profile.csv"); }, Status::io).find("/nowhere/profile.csv"),
            std::string::npos);
  EXPECT_NE(refusal([] { read_profile("/dev/zero"); }, Status::io).find("not a regular file"), std::string::npos);
  EXPECT_NE(said("").find("line 1: got \"\""), std::string::npos);
  EXPECT_NE(said("a\tb\xff,c\n1,2,3\n").find("line 1: got \"a?b?,c\""), std::string::npos);
  EXPECT_NE(said("step,layer,density\n1,2,3\n").find("line 1: got \"step,layer,density\""), std::string::npos);
  EXPECT_NE(said(head).find("no entries"), std::string::npos);
  for (const char* line :
       {"", "1,2,0", "1,2,0,", "1,2,0,x", "1,2,0,0.5,1", "1,2,0,0.5 ", "-1,2,0,0.5", "1,-2,0,0.5", "1,2,-1,0.5",
        "1,2,0,1.01", "1,2,0,-0.1", "1,2,0,nan", "1.5,2,0,0.5", "1;2;0;0.5", "99999999999999999999,2,0,0.5"}) {
    EXPECT_NE(said(head + "0,2,0,0.5\n" + line + "\n0,2,1,0.5\n").find("line 3"), std::string::npos) << line;
  }
  EXPECT_NE(said(head + "0,2,0,0.5\n0,2,0,0.5\n").find("line 3"), std::string::npos);
  const TextFile ends(head + "0,0,0,0\n1000000000,0,0,1\n");
  EXPECT_EQ(read_profile(ends.path()).densities.at({1000000000, 0, 0}), 1);
  EXPECT_NE(said(head + "0,2,0,0.5\n0,2,1,0.5\n0,3,1,0.5\n").find("layer 3 has 1 of 2 heads"), std::string::npos);
}

TEST(SvooOnCpu, RefusesProfilesOfAnotherModel) {
  const Context context(1);
  const Inputs in(1, 2, 40, 40, kDim, 1);
  const auto plan = [&](const std::string& rows, std::initializer_list<std::pair<const char*, const char*>> more) {
    const TextFile file("step,layer,head,density\n" + rows);
    Settings settings = method("svoo", more);
    set_setting(settings, "profile", file.path());
    return refusal([&] { Plan(context, settings, in.shape()); }, Status::shape);
  };
  const std::string one = "0,1,0,0.5\n0,1,1,0.5\n", two = "4,2,0,0.5\n4,2,1,0.5\n";
  EXPECT_EQ(plan(one, {}), "accepted");
  EXPECT_EQ(plan(one + two, {{"layers", "3"}}), "accepted");  // layer 0 is dense
  EXPECT_NE(plan("0,1,0,0.5\n", {}).find("has 1 heads, the shape has 2"), std::string::npos);
  EXPECT_NE(plan(one + "0,1,2,0.5\n", {}).find("has 3 heads, the shape has 2"), std::string::npos);
  EXPECT_NE(plan(one + two, {{"layers", "2"}}).find("has layer 2, the model has layers 0..1"), std::string::npos);
  EXPECT_NE(plan(two, {{"layers", "3"}}).find("has 1 of the model's 3 layers, and layer 1"), std::string::npos);
  EXPECT_NE(plan(one + two, {{"layers", "3"}, {"dense_layers", "0"}}).find("layer 0"), std::string::npos);
}

TEST(SvooOnCpu, RefusesWhatDoesNotGoTogether) {
  const Context context(1);
  const Inputs in(1, 1, 40, 40, kDim, 1);
  const TextFile file("step,layer,head,density\n0,1,0,0.5\n");
  const auto said = [&](const char* name, std::initializer_list<std::pair<const char*, const char*>> set) {
    return refusal([&] { Plan(context, method(name, set), in.shape()); }, Status::invalid_argument);
  };
  EXPECT_NE(said("svoo", {{"group", "kmeans"}}).find("both or neither"), std::string::npos);
  EXPECT_NE(said("svoo", {{"encode", "kmeans"}}).find("both or neither"), std::string::npos);
  EXPECT_NE(said("svoo", {{"rule", "online"}, {"partition", "even:2"}}).find("even:1"), std::string::npos);
  EXPECT_NE(said("svoo", {{"partition", "random:1"}}).find("even:1"), std::string::npos);
  EXPECT_NE(said("svoo", {{"rule", "online"}, {"proxy", "exact"}}).find("proxy codes"), std::string::npos);
  EXPECT_NE(said("svoo", {{"rule", "online"}, {"profile", file.path()}}).find("takes none"), std::string::npos);
  EXPECT_NE(said("svoo", {{"profile", file.path()}, {"profile_low", "0.3"}}).find("profile_high"), std::string::npos);
  EXPECT_NE(said("sparge", {{"reuse_interval", "2"}}).find("no clusters to reuse"), std::string::npos);
  EXPECT_EQ(said("svg2", {{"reuse_interval", "2"}, {"profile", file.path()}, {"profile_low", "0.1"}}), "accepted");
  EXPECT_EQ(said("svoo", {{"rule", "online"}}), "accepted");
}

// When they cluster: test_schedule.
TEST(SvooOnCpu, ModelsHaveTheirPublishedValues) {
  struct {
    const char* model;
    double p, low, high;
    int64_t dense;
  } const published[] = {{"wan2.1-t2v-14b", 0.90, 0.15, 0.20, 10},
                         {"wan2.1-i2v-14b", 0.90, 0.10, 0.15, 8},
                         {"wan2.2-a14b", 0.90, 0.20, 0.22, 8},
                         {"wan2.2-i2v-a14b", 0.90, 0.20, 0.25, 8},
                         {"hunyuanvideo-13b", 0.88, 0.05, 0.10, 5}};
  for (const auto& row : published) {
    SCOPED_TRACE(row.model);
    const Model& model = find_model(row.model);
    Settings settings = find_method("svoo").settings();
    apply_model(model, settings);
    EXPECT_EQ(settings.rho, row.p);
    EXPECT_EQ(settings.profile_low, row.low);
    EXPECT_EQ(settings.profile_high, row.high);
    EXPECT_EQ(settings.groups, 256);
    EXPECT_EQ(settings.codes, 1024);
    EXPECT_EQ(settings.layers, model.layers);
    EXPECT_FALSE(settings.warm_prefix);
    for (int64_t step = 0; step < model.steps; ++step) {
      EXPECT_EQ(schedule(settings, {1, step, model.steps}) == Reason::dense_step, step < row.dense) << step;
    }
  }
}

}  // namespace
}  // namespace scope::test
