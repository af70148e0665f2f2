// Settings, methods, models and partitions: what is taken, what is refused and how it is said.
#include <gtest/gtest.h>

#include <charconv>
#include <cmath>
#include <map>
#include <set>

#include "methods/methods.h"
#include "methods/models.h"
#include "methods/partition.h"
#include "pipeline/schedule.h"
#include "stages/choices.h"

namespace scope {
namespace {

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// Not by std::stod: it reads a decimal comma where the locale has one.
double number(const std::string& text) {
  double value = NAN;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

TEST(Settings, RefusesValuesOutsideTheirRange) {
  const std::pair<const char*, const char*> cases[] = {{"rho", "0"},
                                                       {"rho", "1.1"},
                                                       {"rho", "-0.1"},
                                                       {"rho", "nan"},
                                                       {"rho", ""},
                                                       {"rho", "0.9x"},
                                                       {"rho", "1e-9"},
                                                       {"alpha", "-1"},
                                                       {"alpha", "2"},
                                                       {"density", "0"},
                                                       {"density", "inf"},
                                                       {"iterations", "0"},
                                                       {"iterations", "-2"},
                                                       {"iterations", "1.5"},
                                                       {"first_iterations", "0"},
                                                       {"first_sample", "0"},
                                                       {"warm_sample", "0"},
                                                       {"groups", "0"},
                                                       {"groups", "99999999"},
                                                       {"codes", "none"},
                                                       {"seed", "-1"},
                                                       {"proxy", "near"},
                                                       {"rule", "Online"},
                                                       {"tail", "second"},
                                                       {"partition", "even:0"},
                                                       {"partition", "random:"},
                                                       {"partition", "even:257"},
                                                       {"partition", "rope "},
                                                       {"dense_steps", "1.5"},
                                                       {"dense_layers", "-1"},
                                                       {"warm_prefix", "1"},
                                                       {"state_dtype", "f16"},
                                                       {"check_finite", "maybe"},
                                                       {"group", "block"},
                                                       {"encode", "mean"},
                                                       {"q_block", "0"},
                                                       {"k_block", "-1"},
                                                       {"target_density", "0"},
                                                       {"target_density", "1.1"},
                                                       {"target_scope", "batch"},
                                                       {"tail_weight", "-0.1"},
                                                       {"tail_weight", "1.1"},
                                                       {"tail_weight", "nan"},
                                                       {"workspace_limit", "0"},
                                                       {"similarity", "1.5"},
                                                       {"similarity", "nan"},
                                                       {"rule", "blocks"}};
  for (const auto& [name, value] : cases) {
    Settings settings;
    const std::string before = get_setting(settings, name);
    const std::string said = refusal([&, key = name, text = value] { set_setting(settings, key, text); });
    EXPECT_NE(said, "accepted") << name << "=" << value;
    EXPECT_NE(said.find(name), std::string::npos) << said;
    EXPECT_NE(said.find("expected"), std::string::npos) << said;
    EXPECT_EQ(get_setting(settings, name), before) << "a refused value must change nothing";
  }
}

// Of every number the ends that its row names, what lies beyond them, and that it moves no other setting.
TEST(Settings, NumbersEndWhereTheirRowsSay) {
  int numbers = 0;
  for (const Setting& setting : settings_table()) {
    const std::string values = setting.values.substr(setting.values.find(" | ") == std::string::npos ? 0 : 7);
    const size_t dots = values.find("..");
    std::vector<std::string> inside, outside;
    if (dots != std::string::npos && !values.ends_with("...")) {
      const std::string low = values.substr(0, dots), high = values.substr(dots + 2);
      inside = {low, high};
      outside = {std::to_string(std::stoll(low) - 1), std::to_string(std::stoull(high) + 1)};
    } else if (values.ends_with(", 1]")) {
      const std::string low = values.substr(1, values.find(',') - 1);
      inside = {values[0] == '[' ? low : "0.000001", "1"};
      outside = {values[0] == '[' ? (low == "0" ? "-0.000001" : "-1.000001") : "0", "1.000001"};
    } else {
      continue;
    }
    ++numbers;
    Settings settings;
    for (const std::string& value : inside) {
      const Settings before = settings;
      EXPECT_EQ(refusal([&] { set_setting(settings, setting.name, value); }), "accepted") << setting.name << "=" << value;
      EXPECT_EQ(number(setting.get(settings)), number(value)) << setting.name;
      for (const Setting& other : settings_table()) {
        if (&other == &setting) continue;
        EXPECT_EQ(other.get(settings), other.get(before)) << setting.name << " moves " << other.name;
      }
    }
    for (const std::string& value : outside) {
      EXPECT_NE(refusal([&] { set_setting(settings, setting.name, value); }), "accepted") << setting.name << "=" << value;
    }
  }
  EXPECT_GE(numbers, 26) << "the texts of values are not read any more";
}

TEST(Settings, NamesThatAreNearlyRightAreNamed) {
  Settings settings;
  const auto setting = [&](const char* name) { return refusal([&] { set_setting(settings, name, "1"); }); };
  EXPECT_NE(
      setting("target_desnity").find("there is no \"target_desnity\" (did you mean \"target_density\"?); there are group"),
      std::string::npos)
      << setting("target_desnity");
  EXPECT_NE(setting("rhoo").find("(did you mean \"rho\"?)"), std::string::npos);
  EXPECT_NE(setting("TAIL").find("(did you mean \"tail\"?)"), std::string::npos);
  // The nearest, and the first of those that are as near.
  EXPECT_NE(setting("q_blok").find("(did you mean \"q_block\"?)"), std::string::npos);
  EXPECT_NE(setting("x_block").find("(did you mean \"q_block\"?)"), std::string::npos);
  // Nothing is near, nothing was typed, and more than any name has.
  for (const std::string& name : {std::string("temperature"), std::string(), std::string(100'000, 'r')}) {
    EXPECT_EQ(setting(name.c_str()).find("did you mean"), std::string::npos) << name.substr(0, 20);
  }
  EXPECT_NE(
      refusal([&] { set_setting(settings, "rule", "onlin"); }).find("error_aware, deviation (did you mean \"online\"?)"),
      std::string::npos);
  EXPECT_NE(refusal([&] { find_method("scope_mean"); }).find("(did you mean \"scope-mean\"?)"), std::string::npos);
  EXPECT_NE(refusal([&] { find_model("wan2.2-a14"); }).find("(did you mean \"wan2.2-a14b\"?)"), std::string::npos);
}

TEST(Settings, UnknownNamesListWhatExists) {
  Settings settings;
  const std::string said = refusal([&] { set_setting(settings, "rhoo", "0.9"); });
  for (const Setting& setting : settings_table()) EXPECT_NE(said.find(setting.name), std::string::npos) << said;
  EXPECT_NE(refusal([] { find_method("sage"); }).find("scope-paper"), std::string::npos);
  EXPECT_NE(refusal([] { find_model("sora"); }).find("wan2.1-t2v-14b"), std::string::npos);
}

TEST(Settings, EveryValuePrintsBackToItself) {
  for (const Method& method : methods_table()) {
    for (const Setting& setting : settings_table()) {
      Settings settings = method.settings();
      const std::string value = setting.get(settings);
      setting.set(settings, value);
      EXPECT_EQ(setting.get(settings), value) << setting.name;
    }
  }
}

// Every row by its name, and its name among the values and in what is said of another.
template <class Row>
void expect_round_trips(const char* name, std::span<const Row> rows) {
  const auto setting = std::find_if(settings_table().begin(), settings_table().end(),
                                    [&](const Setting& each) { return std::string_view(each.name) == name; });
  ASSERT_NE(setting, settings_table().end()) << name;
  Settings settings;
  const std::string said = refusal([&] { set_setting(settings, name, "nothing"); });
  for (const Row& each : rows) {
    set_setting(settings, name, each.name);
    EXPECT_EQ(get_setting(settings, name), each.name);
    EXPECT_EQ(&row(each.choice), &each);
    EXPECT_NE(setting->values.find(each.name), std::string::npos) << setting->values;
    EXPECT_NE(setting->help.find(each.help), std::string::npos) << setting->help;
    EXPECT_NE(said.find(each.name), std::string::npos) << said;
  }
}

TEST(Settings, EveryRowOfEveryChoiceHasItsName) {
  expect_round_trips("group", grouping_rows());
  expect_round_trips("encode", encoding_rows());
  expect_round_trips("proxy", proxy_rows());
  expect_round_trips("rule", rule_rows());
  expect_round_trips("target_scope", target_scope_rows());
  expect_round_trips("tail", tail_rows());
  expect_round_trips("products", products_rows());
}

TEST(Settings, DenseTakesNoTail) {
  for (const TailRow& tail : tail_rows()) {
    Settings settings = find_method("dense").settings();
    const std::string said = refusal([&] { set_setting(settings, "tail", tail.name); });
    EXPECT_EQ(said, tail.choice == Tail::none ? "accepted"
                                              : fmt::format("tail: got {}, and method dense drops no keys", tail.name));
    EXPECT_EQ(settings.tail, Tail::none);
  }
}

TEST(Settings, AutoCountsFollowTheSequence) {
  const Settings settings;
  EXPECT_EQ(effective_groups(settings, 75600), 300);
  EXPECT_EQ(effective_codes(settings, 75600), 333);
  EXPECT_EQ(effective_groups(settings, 16384), 300);
  EXPECT_EQ(effective_groups(settings, 8320), 232);
  EXPECT_EQ(effective_codes(settings, 16384), 256);
  EXPECT_EQ(effective_groups(settings, 100), 16);
  EXPECT_EQ(effective_groups(settings, 7), 7);  // never more than there are tokens
  const Settings paper = find_method("scope-paper").settings();
  EXPECT_EQ(effective_groups(paper, 1000), 300);
  EXPECT_EQ(effective_codes(paper, 100), 100);
}

TEST(Partition, NamedOnesCoverEveryChannelOnce) {
  for (const int64_t dim : {8, 40, 64, 127, 128, 256}) {
    for (const char* name : {"even:1", "even:2", "even:3", "even:8", "random:3", "random:8"}) {
      EXPECT_NO_THROW(check_partition(make_partition(name, dim, {}, 5), dim)) << name << " " << dim;
    }
  }
  const Partition rope = make_partition("rope", 128, {44, 42, 42}, 0);
  EXPECT_EQ(rope[1].front(), 44);
  EXPECT_EQ(rope[2].back(), 127);
  const Partition random = make_partition("random:3", 128, {44, 42, 42}, 0);
  EXPECT_EQ(random[0].size(), 44u);  // cut at the RoPE sizes
  EXPECT_NE(random[0], rope[0]);
  EXPECT_EQ(random, make_partition("random:3", 128, {44, 42, 42}, 0));
  EXPECT_NE(random, make_partition("random:3", 128, {44, 42, 42}, 1));
  EXPECT_EQ(make_partition("even:256", 256, {}, 0).size(), 256u);
  const Partition even = make_partition("even:3", 128, {}, 0);
  EXPECT_EQ(std::set<size_t>({even[0].size(), even[1].size(), even[2].size()}), std::set<size_t>({42, 43}));
}

TEST(Partition, RefusesOverlapsAndGaps) {
  EXPECT_NE(refusal([] { check_partition({{0, 1}, {1, 2, 3}}, 4); }).find("channel 1 is already in"), std::string::npos);
  EXPECT_NE(refusal([] { check_partition({{0, 1}, {3}}, 4); }).find("channel 2 is in none"), std::string::npos);
  EXPECT_NE(refusal([] { check_partition({{0, 1}, {2, 4}}, 4); }).find("got channel 4"), std::string::npos);
  EXPECT_NE(refusal([] { check_partition({{0, 1, 2, 3}, {}}, 4); }).find("no channels"), std::string::npos);
  EXPECT_NE(refusal([] { check_partition({}, 4); }).find("got none"), std::string::npos);
  EXPECT_NE(refusal([] { make_partition("rope", 128, {}, 0); }).find("rope needs"), std::string::npos);
  EXPECT_NE(refusal([] { make_partition("rope", 128, {44, 42, 40}, 0); }).find("hold 126 channels"), std::string::npos);
  EXPECT_NE(refusal([] { make_partition("even:9", 8, {}, 0); }).find("more subsets"), std::string::npos);
}

TEST(Schedule, DenseLayersAndSteps) {
  Settings settings;  // dense_layers 1, dense_steps 0.2
  EXPECT_EQ(schedule(settings, {}), Reason::sparse);
  EXPECT_EQ(schedule(settings, {0, -1, 0}), Reason::dense_layer);
  EXPECT_EQ(schedule(settings, {1, 9, 50}), Reason::dense_step);
  EXPECT_EQ(schedule(settings, {1, 10, 50}), Reason::sparse);
  EXPECT_EQ(schedule(settings, {1, 0, 4}), Reason::sparse);  // 20 % of 4 steps is none
  settings.dense_last_steps = 0.1;
  EXPECT_EQ(schedule(settings, {1, 44, 50}), Reason::sparse);
  EXPECT_EQ(schedule(settings, {1, 45, 50}), Reason::dense_last_step);
  EXPECT_NE(refusal([&] { schedule(settings, {1, 50, 50}); }), "accepted");
  EXPECT_EQ(schedule(find_method("dense").settings(), {3, 30, 50}), Reason::method_dense);
}

TEST(Methods, SettingsCarryTheirRow) {
  EXPECT_STREQ(Settings{}.method->name, "scope");
  const std::set<std::string> sharing{"scope-paper", "svg2", "svoo"}, profiled{"svoo"};
  for (const Method& method : methods_table()) {
    EXPECT_EQ(method.settings().method, &method);
    EXPECT_EQ(method.shares_branches, sharing.contains(method.name)) << method.name;
    EXPECT_EQ(method.profiled, profiled.contains(method.name)) << method.name;
    Settings other = method.settings();
    set_setting(other, "rule", "clusters");  // no setting makes another method
    EXPECT_EQ(other.method, &method);
  }
}

// Of the frames and the resolution that each row's help names, in patches of the latent.
TEST(Models, GridsAndStepsAreTheUsualOnes) {
  const std::map<std::string_view, std::string_view> expected = {{"wan2.1-t2v-14b", "21x45x80 50"},
                                                                 {"wan2.1-i2v-14b", "21x45x80 40"},
                                                                 {"wan2.1-t2v-1.3b", "21x30x52 50"},
                                                                 {"wan2.1-14b-480p", "21x30x52 50"},
                                                                 {"wan2.1-14b-distilled", "21x30x52 4"},
                                                                 {"wan2.2-a14b", "21x45x80 40"},
                                                                 {"wan2.2-i2v-a14b", "21x45x80 40"},
                                                                 {"wan2.2-ti2v-5b", "31x22x40 50"},
                                                                 {"hunyuanvideo-13b", "33x45x80 50"},
                                                                 {"hunyuanvideo-1.5", "31x45x80 50"},
                                                                 {"cogvideox-5b", "11x48x85 50"},
                                                                 {"minimax-h3", "37x24x42 50"},
                                                                 {"ltx-2", "16x22x40 30"}};
  ASSERT_EQ(models_table().size(), expected.size());
  for (const Model& model : models_table()) {
    EXPECT_EQ(fmt::format("{}x{}x{} {}", model.grid[0], model.grid[1], model.grid[2], model.steps), expected.at(model.name))
        << model.name;
  }
}

TEST(Models, RangesCoverTheHeadDimension) {
  for (const Model& model : models_table()) {
    const bool none = !model.has_rope();
    EXPECT_EQ(model.rope[0] + model.rope[1] + model.rope[2], none ? 0 : model.dim) << model.name;
    EXPECT_EQ(none, std::string(model.name) == "minimax-h3" || std::string(model.name) == "ltx-2") << model.name;
  }
  EXPECT_EQ(
      find_model("wan2.1-t2v-14b").grid[0] * find_model("wan2.1-t2v-14b").grid[1] * find_model("wan2.1-t2v-14b").grid[2],
      75600);
}

// What each model makes of each method, as values rather than as code.
struct Known {
  const char *model, *rho, *dense_steps, *warm_prefix, *layers;
  const char *groups, *prefix;                            // of svg2
  const char *p, *low, *high, *start, *interval, *steps;  // of svoo
};
constexpr Known kKnown[] = {
    {"wan2.1-t2v-14b", "0.9", "0.2", "no", "40", "300", "0.2", "0.9", "0.15", "0.2", "11", "40", "50"},
    {"wan2.1-i2v-14b", "0.9", "0.2", "no", "40", "300", "0.35", "0.9", "0.1", "0.15", "9", "20", "40"},
    {"wan2.1-t2v-1.3b", "0.9", "0.2", "no", "30", "300", "0.2", "0.9", "0.15", "0.2", "11", "20", "50"},
    {"wan2.1-14b-480p", "0.9", "0.2", "no", "40", "300", "0.2", "0.9", "0.15", "0.2", "11", "40", "50"},
    {"wan2.1-14b-distilled", "0.9", "0", "no", "40", "300", "0", "0.9", "0.15", "0.2", "11", "40", "50"},
    {"wan2.2-a14b", "0.9", "0.2", "no", "40", "300", "0.2", "0.9", "0.2", "0.22", "9", "40", "40"},
    {"wan2.2-i2v-a14b", "0.9", "0.2", "no", "40", "300", "0.2", "0.9", "0.2", "0.25", "9", "40", "40"},
    {"wan2.2-ti2v-5b", "0.9", "0.2", "no", "30", "300", "0.2", "0.9", "0.15", "0.2", "11", "40", "50"},
    {"hunyuanvideo-13b", "0.88", "0.1", "yes", "60", "400", "0.1", "0.88", "0.05", "0.1", "6", "50", "50"},
    {"hunyuanvideo-1.5", "0.88", "0.1", "yes", "54", "400", "0.1", "0.88", "0.05", "0.1", "6", "50", "50"},
    {"cogvideox-5b", "0.9", "0.2", "no", "42", "300", "0.2", "0.9", "0.15", "0.2", "11", "40", "50"},
    {"minimax-h3", "0.9", "0.2", "no", "50", "300", "0.2", "0.9", "0.15", "0.2", "11", "40", "50"},
    {"ltx-2", "0.9", "0.2", "no", "48", "300", "0.2", "0.9", "0.15", "0.2", "11", "40", "50"},
};

TEST(Models, OverrideWhatEachMethodTakesFromThem) {
  ASSERT_EQ(models_table().size(), std::size(kKnown));
  for (const Method& method : methods_table()) {
    const std::string name = method.name;
    for (const Known& known : kKnown) {
      Settings settings = method.settings();
      apply_model(find_model(known.model), settings);
      std::map<std::string, std::string> expected;
      for (const Setting& setting : settings_table()) expected[setting.name] = setting.get(method.settings());
      const bool preset = name == "fast" || name == "quality";  // whose schedule is no model's
      expected["dense_layers"] = preset ? "0" : "1";
      expected["dense_steps"] = preset ? "0" : known.dense_steps;
      expected["warm_prefix"] = name == "svoo" ? "no" : known.warm_prefix;
      expected["layers"] = known.layers;
      if (name.starts_with("scope") || preset || name == "dense") expected["rho"] = known.rho;
      if (name.starts_with("svg2")) {
        expected["groups"] = known.groups;
        expected["dense_steps"] = known.prefix;
      }
      if (name == "svoo") {
        expected["rho"] = known.p;
        expected["profile_low"] = known.low;
        expected["profile_high"] = known.high;
        expected["reuse_start"] = known.start;
        expected["reuse_interval"] = known.interval;
        expected["reuse_steps"] = known.steps;
      }
      for (const Setting& setting : settings_table()) {
        EXPECT_EQ(setting.get(settings), expected[setting.name]) << name << " " << known.model << " " << setting.name;
      }
    }
  }
}

// The rows themselves, where they are not the defaults.
TEST(Methods, RowsAreWhatTheyWere) {
  const std::map<std::string, std::string> kRows = {
      {"scope", ""},
      {"scope-paper", "groups=300 codes=333 first_sample=1 alpha_first=yes"},
      {"scope-exact", "proxy=exact"},
      {"scope-mean", "warm_sample=0.25 proxy=exact select_stride=2 tail=means tail_weight=1"},
      {"fast",
       "warm_sample=0.25 proxy=exact target_density=0.12 select_stride=2 tail=means tail_weight=1 dense_layers=0 "
       "dense_steps=0"},
      {"quality",
       "warm_sample=0.25 proxy=exact target_density=0.18 select_stride=2 tail=means tail_weight=1 dense_layers=0 "
       "dense_steps=0"},
      {"svg2", "groups=300 partition=even:1 codes=1000 first_sample=1 rule=clusters"},
      {"svg2-ear", "groups=300 partition=even:1 codes=1000 first_sample=1 rule=error_aware tail=centroids"},
      {"svoo",
       "group=cocluster groups=256 encode=cocluster partition=even:1 codes=1024 first_iterations=2 first_sample=1 "
       "rule=clusters profile_low=0.15 profile_high=0.2 target_scope=head reuse_start=11 reuse_interval=40 reuse_steps=50"},
      {"sparge", "group=blocks encode=blocks partition=even:1 rule=blocks_topk density=0.5 target_scope=head"},
      {"sparge-cdf",
       "group=blocks encode=blocks partition=even:1 rule=blocks_cdf rho=0.98 target_scope=head similarity=0.6"},
      {"sol", "group=blocks encode=means partition=even:1 k_block=64 rule=deviation rho=0.158655 tail=centroids"},
      {"dense", ""}};
  ASSERT_EQ(methods_table().size(), kRows.size());
  for (const Method& method : methods_table()) {
    std::string text;
    for (const Setting& setting : settings_table()) {
      const std::string value = setting.get(method.settings());
      if (value != setting.get({})) text += fmt::format("{}{}={}", text.empty() ? "" : " ", setting.name, value);
    }
    EXPECT_EQ(text, kRows.at(method.name)) << method.name;
    EXPECT_EQ(method.settings().dense, std::string_view(method.name) == "dense");
  }
}

}  // namespace
}  // namespace scope
