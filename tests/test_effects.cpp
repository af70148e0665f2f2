// Settings that are said to change nothing: calls with other values of them must give the same bits.
#include <map>
#include <vector>

#include "call_support.h"
#include "methods/effects.h"
#include "methods/methods.h"
#include "methods/models.h"

namespace scope::test {
namespace {

// Two values of each setting that a row may not read; where one is the method's own, the other counts.
const std::map<std::string, std::vector<const char*>> kValues{{"groups", {"3", "7"}},
                                                              {"q_block", {"8", "16"}},
                                                              {"encode", {"kmeans", "blocks"}},
                                                              {"partition", {"even:1", "random:2"}},
                                                              {"codes", {"3", "9"}},
                                                              {"k_block", {"8", "16"}},
                                                              {"iterations", {"1", "4"}},
                                                              {"first_iterations", {"1", "6"}},
                                                              {"first_sample", {"0.1", "1"}},
                                                              {"warm_sample", {"0.1", "0.5"}},
                                                              {"seed", {"3", "11"}},
                                                              {"rho", {"0.3", "0.8"}},
                                                              {"alpha", {"0.02", "0.6"}},
                                                              {"profile_low", {"0", "0.3"}},
                                                              {"profile_high", {"0.4", "1"}},
                                                              {"density", {"0.1", "0.6"}},
                                                              {"select_stride", {"1", "3"}},
                                                              {"similarity", {"-1", "0.99"}},
                                                              {"tail_weight", {"0.1", "0.9"}},
                                                              {"tail_parts", {"1", "3"}},
                                                              {"tail_stride", {"1", "5"}},
                                                              {"tail_follow", {"0", "0.5"}},
                                                              {"alpha_first", {"no", "yes"}},
                                                              {"dense_layers", {"0", "9"}},
                                                              {"dense_steps", {"0", "1"}},
                                                              {"dense_last_steps", {"0", "1"}},
                                                              {"warm_prefix", {"no", "yes"}},
                                                              {"reuse_start", {"1", "5"}},
                                                              {"reuse_steps", {"0", "40"}},
                                                              {"target_scope", {"head", "sample"}},
                                                              {"layers", {"0", "40"}},
                                                              {"state_dtype", {"f32", "bf16"}},
                                                              {"workspace_limit", {"1", "400"}}};

// Small enough to run every row, and with counts that leave something to select.
Settings small(const Method& method, const char* target) {
  Settings settings = method.settings();
  if (settings.dense) return settings;
  settings.groups = 5;
  settings.codes = 6;
  settings.q_block = settings.k_block = 10;
  settings.first_iterations = 3;
  settings.reuse_interval = 1;
  if (settings.partition == "rope") settings.partition = "even:2";
  set_setting(settings, "target_density", target);
  return settings;
}

TEST(EffectsOnCpu, WhatIsIdleChangesNoBit) {
  const Context context(2);
  const Inputs in(1, 2, 70, 70, 16, 5);
  int idle = 0, counting = 0;
  for (const Method& method : methods_table()) {
    for (const char* target : {"none", "0.3"}) {
      const Settings settings = small(method, method.settings().dense ? "none" : target);
      const Result expected = run(Plan(context, settings, in.shape()), in, {});
      for (const auto& [name, values] : kValues) {
        // A single call: no place, no state, no device.
        if (why_idle(settings, name, {false, false, false, false}).empty()) {
          ++counting;
          continue;
        }
        ++idle;
        for (const char* value : values) {
          Settings other = settings;
          set_setting(other, name, value);
          const Result result = run(Plan(context, other, in.shape()), in, {});
          EXPECT_TRUE(same_bits(result, expected)) << method.name << " target " << target << " " << name << "=" << value;
        }
      }
    }
  }
  EXPECT_GT(idle, 100);
  EXPECT_GT(counting, 50);
}

// The other way round: what counts must be able to change the call.
TEST(EffectsOnCpu, WhatCountsChangesBits) {
  const Context context(2);
  const Inputs in(1, 2, 70, 70, 16, 5);
  for (const auto& [text, name] : std::initializer_list<std::pair<const char*, const char*>>{{"scope", "groups"},
                                                                                             {"scope", "codes"},
                                                                                             {"scope", "partition"},
                                                                                             {"scope", "first_iterations"},
                                                                                             {"scope", "seed"},
                                                                                             {"scope", "rho"},
                                                                                             {"scope", "alpha"},
                                                                                             {"sparge", "q_block"},
                                                                                             {"sparge", "k_block"},
                                                                                             {"sparge", "density"},
                                                                                             {"svg2", "alpha"},
                                                                                             {"svoo", "iterations"},
                                                                                             {"sparge", "similarity"}}) {
    const Settings settings = small(find_method(text), "none");
    EXPECT_EQ(why_idle(settings, name, {false, false, false, false}), "") << text << " " << name;
    bool changed = false;
    const Result expected = run(Plan(context, settings, in.shape()), in, {});
    for (const char* value : kValues.at(name)) {
      Settings other = settings;
      set_setting(other, name, value);
      changed = changed || !same_bits(run(Plan(context, other, in.shape()), in, {}), expected);
    }
    EXPECT_TRUE(changed) << text << " " << name;
  }
}

TEST(EffectsOnCpu, SaysWhatDecides) {
  const auto said = [](const char* name, const std::map<std::string, std::string>& set, const Surroundings& with = {}) {
    Settings settings;
    for (const auto& [key, value] : set) set_setting(settings, key, value);
    return why_idle(settings, name, with);
  };
  EXPECT_EQ(said("rho", {}), "");
  EXPECT_EQ(said("rho", {{"rule", "target"}}), "rule is target; density sets the share of keys that it keeps");
  EXPECT_EQ(said("rho", {{"target_density", "0.2"}}), "target_density is 0.2");
  EXPECT_EQ(said("codes", {{"proxy", "exact"}}), "proxy is exact");
  EXPECT_EQ(said("tail_weight", {{"tail", "mean"}}), "");
  EXPECT_EQ(said("state_dtype", {}, {.state = false}), "calls have no state here");
  EXPECT_EQ(said("warm_sample", {}), "");
  EXPECT_EQ(said("warm_sample", {}, {.state = false}), "calls have no state here");
  EXPECT_EQ(said("warm_sample", {{"iterations", "1"}}), "iterations is 1");
  EXPECT_EQ(why_idle(find_method("svoo").settings(), "warm_sample"), "group is cocluster");
  EXPECT_EQ(why_idle(find_method("dense").settings(), "rho"), "method dense selects nothing");
  EXPECT_EQ(why_idle(find_method("dense").settings(), "check_finite"), "");
}

// A caller's own settings are refused where nothing reads them; those of a row or a known model, and "none", are not.
TEST(EffectsOnCpu, IdleSettingsOfACallerAreRefused) {
  const auto refused = [](const char* method, const std::map<std::string, std::string>& given, const char* model = nullptr) {
    Settings settings = find_method(method).settings();
    for (const auto& [name, value] : given) set_setting(settings, name, value);
    if (model != nullptr) apply_model(find_model(model), settings);
    try {
      refuse_idle(settings, given);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused("scope", {{"density", "0.3"}}),
            "density: got 0.3, which would do nothing: rule is online; target_density sets the share of keys that any rule "
            "keeps");
  EXPECT_EQ(refused("scope", {{"density", "0.2"}}).substr(0, 20), "density: got 0.2, wh");  // the row's own value, too
  EXPECT_EQ(refused("sparge", {{"rho", "0.8"}}),
            "rho: got 0.8, which would do nothing: rule is blocks_topk; density sets the share of keys that it keeps");
  EXPECT_EQ(refused("scope", {{"rho", "0.8"}, {"target_density", "0.2"}}),
            "rho: got 0.8, which would do nothing: target_density is 0.2");
  EXPECT_EQ(refused("dense", {{"groups", "5"}}), "groups: got 5, which would do nothing: method dense selects nothing");
  EXPECT_EQ(refused("scope", {{"density", "0.3"}, {"rule", "fixed"}}), "");
  EXPECT_EQ(refused("scope", {{"density_steps", "none"}, {"target_density", "0.2"}}), "");
  EXPECT_EQ(refused("dense", {{"dense_steps", "0.5"}}, "wan2.1-t2v-14b"), "");  // the model's now
  for (const Method& method : methods_table()) EXPECT_EQ(refused(method.name, {}, "wan2.1-t2v-14b"), "") << method.name;
}

}  // namespace
}  // namespace scope::test
