// Settings, methods, models and partitions: what is taken, what is refused and how it is said.
#include <gtest/gtest.h>

#include <set>

#include "methods/methods.h"
#include "methods/models.h"
#include "methods/partition.h"
#include "pipeline/schedule.h"

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
                                                       {"encode", "means"},
                                                       {"q_block", "0"},
                                                       {"k_block", "-1"},
                                                       {"target_density", "0"},
                                                       {"target_density", "1.1"},
                                                       {"similarity", "1.5"},
                                                       {"similarity", "nan"},
                                                       {"rule", "blocks"}};
  for (const auto& [name, value] : cases) {
    Settings settings;
    const std::string before = get_setting(settings, name);
    const std::string said = refusal([&] { set_setting(settings, name, value); });
    EXPECT_NE(said, "accepted") << name << "=" << value;
    EXPECT_NE(said.find(name), std::string::npos) << said;
    EXPECT_NE(said.find("expected"), std::string::npos) << said;
    EXPECT_EQ(get_setting(settings, name), before) << "a refused value must change nothing";
  }
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

TEST(Settings, AutoCountsFollowTheSequence) {
  const Settings settings;
  EXPECT_EQ(effective_groups(settings, 75600), 300);
  EXPECT_EQ(effective_codes(settings, 75600), 333);
  EXPECT_EQ(effective_groups(settings, 16384), 171);
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

TEST(Models, RangesCoverTheHeadDimension) {
  for (const Model& model : models_table()) {
    EXPECT_EQ(model.rope[0] + model.rope[1] + model.rope[2], model.dim) << model.name;
    Settings settings;
    apply_model(model, settings);
    EXPECT_EQ(settings.rho, model.rho);
    Settings svg2 = find_method("svg2").settings(), cdf = find_method("sparge-cdf").settings();
    apply_model(model, svg2);
    apply_model(model, cdf);
    EXPECT_EQ(svg2.rho, 0.9);
    EXPECT_EQ(svg2.groups, model.svg2_groups);
    EXPECT_EQ(cdf.rho, 0.98);
  }
  EXPECT_EQ(
      find_model("wan2.1-t2v-14b").grid[0] * find_model("wan2.1-t2v-14b").grid[1] * find_model("wan2.1-t2v-14b").grid[2],
      75600);
}

}  // namespace
}  // namespace scope
