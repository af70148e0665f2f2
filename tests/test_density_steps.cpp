// density_steps: which density a call is to meet, what is refused, and whole calls on the tested backend.
#include "call_support.h"
#include "methods/effects.h"
#include "methods/methods.h"
#include "pipeline/schedule.h"
#include "stages/choices.h"

namespace scope::test {
namespace {

Settings with(const char* steps) { return method("scope", {{"density_steps", steps}, {"dense_steps", "0"}}); }

std::vector<double> densities(const char* text, int64_t steps) {
  std::vector<double> found;
  for (int64_t step = 0; step < steps; ++step) found.push_back(density_at(with(text), {1, step, steps}, 0));
  return found;
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument) << error.what();
    return error.what();
  }
  return "accepted";
}

TEST(DensitySteps, TheFirstEntryPastTheStepDecides) {
  using D = std::vector<double>;
  EXPECT_EQ(densities("0.2:0.3,1:0.08", 10), (D{0.3, 0.3, 0.08, 0.08, 0.08, 0.08, 0.08, 0.08, 0.08, 0.08}));
  EXPECT_EQ(densities("0.2:0.3,1:0.08", 4), (D{0.3, 0.08, 0.08, 0.08}));  // 0 < 0.2 <= 1/4
  EXPECT_EQ(densities("0.2:0.3,1:0.08", 1), D{0.3});
  EXPECT_EQ(densities("0.25:0.4,0.5:0.3,1:0.2", 4), (D{0.4, 0.3, 0.2, 0.2}));
  EXPECT_EQ(densities("0.1:0.4,0.2:0.3,1:0.2", 2), (D{0.4, 0.2}));    // no step between 0.1 and 0.2
  EXPECT_EQ(densities("0.333333:0.4,1:0.2", 3), (D{0.4, 0.2, 0.2}));  // in millionths
  EXPECT_EQ(densities("1:0.2", 3), (D{0.2, 0.2, 0.2}));
  EXPECT_EQ(density_at(with("0.2:0.3,1:0.08"), {1, -1, 0}, 0.5), 0.08);  // no step is said
  EXPECT_EQ(density_at(method("scope"), {1, 0, 4}, 0.5), 0.5);
}

TEST(DensitySteps, ADensityOfOneIsADenseStep) {
  Settings settings = with("0.2:1,0.5:0.3,1:0.999999");
  EXPECT_EQ(schedule(settings, {1, 1, 10}), Reason::dense_step);
  EXPECT_EQ(schedule(settings, {0, 1, 10}), Reason::dense_layer);
  EXPECT_EQ(schedule(settings, {1, 2, 10}), Reason::sparse);
  EXPECT_EQ(schedule(settings, {1, 9, 10}), Reason::sparse);
  settings.dense_steps = 0.4;  // stays a setting of its own
  EXPECT_EQ(schedule(settings, {1, 3, 10}), Reason::dense_step);
  EXPECT_EQ(schedule(with("0.2:0.3,1:1"), {}), Reason::dense_step);
}

TEST(DensitySteps, RefusesByName) {
  for (const char* text : {"", "0.2", "0.2:0.3", "1:0", "1:1.1", "1:nan", "0:0.1,1:0.2", "0.5:0.1,0.5:0.2,1:0.3",
                           "0.6:0.1,0.5:0.2,1:0.3", "0.5:0.1,0.5000001:0.2,1:0.3", "0.5:0.1,1:0.2,", ",1:0.2", "1:0.2:0.3",
                           "0.5:0.1,1.5:0.2", "0.5:0.1;1:0.2", "0.5: 0.1,1:0.2", "1:1e-9", "None"}) {
    Settings settings = with("0.5:0.1,1:0.2");
    const std::string said = refusal([&] { set_setting(settings, "density_steps", text); });
    EXPECT_NE(said.find("density_steps: got "), std::string::npos) << text << ": " << said;
    EXPECT_EQ(get_setting(settings, "density_steps"), "0.5:0.1,1:0.2");
  }
  Settings settings = with("0.5:0.1,1:0.2");
  set_setting(settings, "density_steps", "none");
  EXPECT_TRUE(settings.density_steps.empty());

  const Context context(1);
  const Shape shape = Inputs(1, 1, 20, 20, 8, 1).shape();
  const auto said = [&](const char* name, std::initializer_list<std::pair<const char*, const char*>> set) {
    return refusal([&] { Plan(context, method(name, set), shape); });
  };
  EXPECT_EQ(said("dense", {{"density_steps", "1:0.2"}}), "density_steps: got 1:0.2, and method dense keeps everything");
  EXPECT_EQ(said("svg2", {{"density_steps", "1:0.2"}, {"target_density", "0.2"}}),
            "density_steps: got 1:0.2 beside target_density 0.2, expected one of the two");
}

TEST(DensitySteps, MakesRhoAndDensityIdle) {
  EXPECT_EQ(why_idle(with("1:0.2"), "rho"), "density_steps is 1:0.2");
  EXPECT_EQ(why_idle(method("sparge", {{"density_steps", "1:0.2"}}), "density"), "density_steps is 1:0.2");
  EXPECT_EQ(why_idle(method("scope", {{"target_density", "0.2"}}), "density_steps"), "target_density is 0.2");
  EXPECT_EQ(why_idle(with("1:0.2"), "target_scope"), "");
  EXPECT_EQ(why_idle(method("scope"), "density_steps"), "");
}

// Each call is that of a plan for its density, bit by bit: under every rule, warm, with text and padding.
TEST(DensitySteps, CallsAreThoseOfTheirTarget) {
  const Context context = tested_context();
  Ragged given(40);
  std::vector<Settings> all;
  for (const RuleRow& rule : rule_rows()) {
    if (!rule.whole_codes) all.push_back(method("scope", {{"partition", "even:2"}, {"rule", rule.name}}));
  }
  for (const char* name : {"scope-mean", "svg2", "svg2-ear", "sparge", "sparge-cdf"}) {
    all.push_back(method(name, {{"q_block", "16"}, {"k_block", "8"}, {"codes", "60"}, {"similarity", "-1"}}));
  }
  for (Settings settings : all) {
    SCOPED_TRACE(fmt::format("{}, rule {}", settings.method->name, row(settings.rule).name));
    settings.dense_steps = 0;
    const auto plan_with = [&](const char* name, const char* value) {
      Settings own = settings;
      set_setting(own, name, value);
      return Plan(context, own, given.shape());
    };
    const Plan plan = plan_with("density_steps", "0.3:0.6,1:0.3");
    const Plan first = plan_with("target_density", "0.6"), then = plan_with("target_density", "0.3");
    OwnState state(plan), other(first);
    double before = 1;
    for (const int64_t step : {0, 2, 3, 9}) {
      Extra extra = given.extra;
      extra.place = {3, step, 10};
      extra.state = &state.state;
      const Result result = run(plan, given.in, extra);
      extra.state = &other.state;
      const Result expected = run(step < 3 ? first : then, given.in, extra);
      EXPECT_EQ(result.stats.reason, Reason::sparse);
      EXPECT_TRUE(same_bits(result, expected)) << step;
      EXPECT_EQ(result.heads[0].rho, expected.heads[0].rho);
      EXPECT_EQ(result.heads[0].alpha, expected.heads[0].alpha);
      if (step == 3) {
        EXPECT_LT(result.stats.density, before - 0.1);
      }
      if (!row(settings.rule).similarity) {
        EXPECT_NEAR(result.stats.density, step < 3 ? 0.6 : 0.3, 0.03);
      }
      before = result.stats.density;
    }
  }
}

TEST(DensitySteps, ADenseEntryIsDenseAndMayCluster) {
  const Context context = tested_context();
  const Inputs in(1, 2, 150, 150, 40, 9);
  const Result dense = run(Plan(context, method("dense"), in.shape()), in);
  for (const char* warm_prefix : {"no", "yes"}) {
    const Plan plan(
        context,
        method("scope-mean", {{"density_steps", "0.2:1,1:0.3"}, {"dense_steps", "0"}, {"warm_prefix", warm_prefix}}),
        in.shape());
    OwnState state(plan);
    Extra extra{.place = {3, 1, 10}, .state = &state.state};
    const Result result = run(plan, in, extra);
    EXPECT_EQ(result.stats.reason, Reason::dense_step);
    EXPECT_EQ(result.stats.density, 1);
    EXPECT_TRUE(result.out == dense.out);
    extra.place.step = 2;
    EXPECT_EQ(run(plan, in, extra).stats.warm, std::string_view(warm_prefix) == "yes");
  }
}

}  // namespace
}  // namespace scope::test
