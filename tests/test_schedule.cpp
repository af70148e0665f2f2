// When clusters are reused, what profiles say, in both formats and together, and which rows of the known models fit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <sstream>

#include "measure/recall.h"
#include "methods/methods.h"
#include "methods/models.h"
#include "pipeline/schedule.h"

namespace scope {
namespace {

using Steps = std::vector<int64_t>;

// Sparse steps of a run that cluster, from 0.
Steps clustering_steps(const Settings& settings, int64_t steps) {
  Steps found;
  for (int64_t step = 0; step < steps; ++step) {
    const Place place{1, step, steps};
    if (schedule(settings, place) == Reason::sparse && !reuses_clusters(settings, place)) found.push_back(step);
  }
  return found;
}

Settings svoo_of(const char* model) {
  Settings settings = find_method("svoo").settings();
  apply_model(find_model(model), settings);
  return settings;
}

// In the steps that they are published for, and in other numbers of them: as often, and first where the dense steps end.
TEST(Schedule, ModelsClusterWhenSvooDoes) {
  struct {
    const char* model;
    int64_t steps;
    Steps published, in_20, in_8;
  } const kKnown[] = {{"wan2.1-t2v-14b", 50, {10}, {4}, {1}},           {"wan2.1-t2v-1.3b", 50, {10, 30}, {4, 12}, {1, 5}},
                      {"wan2.1-i2v-14b", 40, {8, 28}, {4, 14}, {1, 5}}, {"wan2.2-a14b", 40, {8}, {4}, {1}},
                      {"wan2.2-i2v-a14b", 40, {8}, {4}, {1}},           {"hunyuanvideo-13b", 50, {5}, {2}, {0}}};
  for (const auto& known : kKnown) {
    SCOPED_TRACE(known.model);
    EXPECT_EQ(find_model(known.model).steps, known.steps);
    const Settings settings = svoo_of(known.model);
    EXPECT_EQ(clustering_steps(settings, known.steps), known.published);
    EXPECT_EQ(clustering_steps(settings, 20), known.in_20);
    EXPECT_EQ(clustering_steps(settings, 8), known.in_8);
  }
  EXPECT_EQ(clustering_steps(find_method("svoo").settings(), 20), Steps{4});
}

TEST(Schedule, ReuseCountsStepsFromOne) {
  Settings settings = find_method("svg2").settings();
  settings.dense_steps = 0;
  EXPECT_EQ(clustering_steps(settings, 4), (Steps{0, 1, 2, 3}));  // an interval of 1
  settings.reuse_interval = 3;
  EXPECT_EQ(clustering_steps(settings, 8), (Steps{0, 3, 6}));
  settings.reuse_start = 3;
  EXPECT_EQ(clustering_steps(settings, 8), (Steps{0, 1, 2, 5}));
  settings.reuse_steps = 4;  // doubled: 4 steps before, then every sixth
  EXPECT_EQ(clustering_steps(settings, 8), (Steps{0, 1, 2, 3, 4}));
  settings.reuse_interval = 1;
  EXPECT_EQ(clustering_steps(settings, 8), (Steps{0, 1, 2, 3, 4, 5, 6, 7}));  // always is always
  EXPECT_FALSE(reuses_clusters(settings, {1, -1, 0}));
  EXPECT_THROW(set_setting(settings, "reuse_start", "0"), Error);
  settings.reuse_start = settings.reuse_interval = 1'000'000'000;
  EXPECT_FALSE(reuses_clusters(settings, {1, 999'999'999, 1'000'000'000}));
}

// Both ends round down: a share of less than a step makes no step dense.
TEST(Schedule, DenseStepsOfBothEndsRoundDown) {
  const auto dense = [](const char* first, const char* last, int64_t steps) {
    Settings settings = find_method("scope").settings();
    set_setting(settings, "dense_steps", first);
    set_setting(settings, "dense_last_steps", last);
    Steps found;
    for (int64_t step = 0; step < steps; ++step) {
      const Reason reason = schedule(settings, {1, step, steps});
      if (reason != Reason::sparse) found.push_back(reason == Reason::dense_last_step ? -step : step);
    }
    return found;
  };
  EXPECT_EQ(dense("0.25", "0", 7), Steps{0});   // 1.75
  EXPECT_EQ(dense("0", "0.25", 7), Steps{-6});  // 1.75
  EXPECT_EQ(dense("0", "0.25", 8), (Steps{-6, -7}));
  EXPECT_EQ(dense("0", "0.1", 9), Steps{});  // 0.9
  EXPECT_EQ(dense("0.1", "0.1", 9), Steps{});
  EXPECT_EQ(dense("0.3", "0.3", 10), (Steps{0, 1, 2, -7, -8, -9}));
  EXPECT_EQ(dense("0.19", "0.29", 10), (Steps{0, -8, -9}));
}

Profile parsed(const std::string& text) {
  std::istringstream file(text);
  return parse_profile(file, "p.csv");
}

std::string refusal(const std::function<void()>& body, Status status) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  return "accepted";
}

const std::string kOurs = "step,layer,head,density\n", kTheirs = "Step,Layer,Head,Sparsity\r\n";

// The same numbers as the authors' files have them: steps from 1, layers and heads from 0, lines that end in \r\n.
TEST(Profiles, OfTheAuthorsLoadAsTheyAre) {
  const Profile theirs = parsed(kTheirs + "1,0,0,0.0038\r\n1,0,1,0.0044\r\n50,39,0,0.9026\r\n50,39,1,1e-05\r\n");
  const Profile ours = parsed(kOurs + "0,0,0,0.0038\n0,0,1,0.0044\n49,39,0,0.9026\n49,39,1,0.00001\n");
  EXPECT_EQ(theirs.densities, ours.densities);
  EXPECT_EQ(theirs.heads, 2);
  EXPECT_EQ(theirs.steps, 50);
  EXPECT_EQ(parsed(profile_csv(theirs)).densities, ours.densities);
  Settings settings = svoo_of("wan2.1-t2v-14b");
  settings.profile = std::make_shared<const Profile>(theirs);
  EXPECT_EQ(least_share(settings, {39, 49, 50}, 0), 0.20);
  EXPECT_EQ(least_share(settings, {39, 49, 50}, 1), 0.15);
  EXPECT_EQ(least_share(settings, {39, 48, 50}, 0), 0.10);
}

TEST(Profiles, RefuseWhatTheirHeaderDoesNotAllow) {
  const auto said = [](const std::string& text) { return refusal([&] { parsed(text); }, Status::format); };
  EXPECT_NE(said(kTheirs + "0,0,0,0.5\r\n").find("line 2: got \"0,0,0,0.5\", expected a step from 1"), std::string::npos);
  EXPECT_EQ(said(kOurs + "0,0,0,0.5\n"), "accepted");
  for (const char* header : {"Step,Layer,Head,Density", "step,layer,head,sparsity", "1,0,0,0.5"}) {
    const std::string text = said(header + std::string("\n1,0,0,0.5\n"));
    EXPECT_NE(text.find("line 1: got \"" + std::string(header) + "\""), std::string::npos) << text;
    EXPECT_NE(text.find("step,layer,head,density or Step,Layer,Head,Sparsity"), std::string::npos) << text;
  }
  EXPECT_NE(said(kOurs + "9223372036854775807,0,0,0.5\n").find("line 2"), std::string::npos);
}

TEST(Profiles, MergeToTheHigherDensities) {
  Profile profile = parsed(kOurs + "0,1,0,0.5\n0,1,1,0.2\n");
  merge_profile(profile, parsed(kTheirs + "1,1,0,0.4\n1,1,1,0.3\n3,0,0,0\n3,0,1,1\n"));
  EXPECT_EQ(profile_csv(profile), kOurs + "0,1,0,0.500000\n0,1,1,0.300000\n2,0,0,0.000000\n2,0,1,1.000000\n");
  EXPECT_EQ(profile.steps, 3);
  EXPECT_NE(refusal([&] { merge_profile(profile, parsed(kOurs + "0,1,0,0.5\n")); }, Status::shape).find("1 heads"),
            std::string::npos);
}

// Its steps are those of another run: nothing would say which entry is whose.
TEST(Profiles, OfMoreStepsThanTheRunAreRefused) {
  Settings settings = find_method("svoo").settings();
  settings.profile = std::make_shared<const Profile>(parsed(kOurs + "9,1,0,0.5\n"));
  EXPECT_EQ(schedule(settings, {1, 8, 10}), Reason::sparse);
  EXPECT_EQ(schedule(settings, {1, -1, 0}), Reason::sparse);
  EXPECT_NE(refusal(
                [&] {
                  schedule(settings, {1, 8, 9});
                },
                Status::shape)
                .find("of 10 steps, the run has 9"),
            std::string::npos);
}

TEST(Profiles, ADensityIsTheFewestKeysThatHoldTheMass) {
  ThreadPool pool(2);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const int64_t n : {1, 2, 511, 513}) {
    const int64_t dim = 24;
    std::vector<float> q(static_cast<size_t>(n * dim)), k(q.size());
    for (float& x : q) x = 3 * normal(random);
    for (float& x : k) x = normal(random);
    const RowsView queries{q.data(), DType::f32, n, dim, dim}, keys{k.data(), DType::f32, n, dim, dim};
    std::map<double, double> expected{{0.05, 0}, {0.95, 0}};  // by share of the mass
    for (int64_t i = 0; i < n; ++i) {
      std::vector<double> mass = exact_query(queries, keys, keys, i).mass;
      std::sort(mass.begin(), mass.end(), std::greater<>());
      for (auto& [share, density] : expected) {
        double sum = 0;
        for (int64_t j = 0; sum < share; ++j) {
          sum += mass[static_cast<size_t>(j)];
          density += 1.0 / static_cast<double>(n * n);
        }
      }
    }
    for (const auto& [share, density] : expected) {
      EXPECT_NEAR(exact_density(pool, queries, keys, share, n), density, 1e-9) << n << " " << share;
    }
    k[0] = NAN;
    EXPECT_THROW(exact_density(pool, queries, keys, 0.95, n), Error);
  }
}

// The row and the sentence for every kind of answer.
TEST(Models, FitByShapeThenExpertsThenImage) {
  const auto expect = [](const ModelQuery& query, const char* name, bool exact, const std::string& why) {
    const ModelFit fit = fit_model(query);
    EXPECT_EQ(fit.why, why);
    EXPECT_EQ(fit.exact, exact) << why;
    EXPECT_EQ(fit.model == nullptr ? "none" : fit.model->name, std::string(name)) << why;
  };
  const ModelQuery wan{.family = "wan", .layers = 40, .heads = 40, .dim = 128, .rope = {44, 42, 42}};
  const auto with = [](ModelQuery query, auto change) {
    change(query);
    return query;
  };
  const std::string shape = ": 40 layers x 40 heads of 128 channels, ";
  expect(wan, "wan2.1-t2v-14b", true,
         "wan2.1-t2v-14b" + shape +
             "from text, one transformer; wan2.1-14b-480p, wan2.1-14b-distilled fit as well, later in the table");
  expect(with(wan, [](ModelQuery& q) { q.from_image = true; }), "wan2.1-i2v-14b", true,
         "wan2.1-i2v-14b" + shape + "from an image, one transformer");
  expect(with(wan, [](ModelQuery& q) { q.experts = 2; }), "wan2.2-a14b", true,
         "wan2.2-a14b" + shape + "from text, two transformers");
  expect(with(wan, [](ModelQuery& q) { q.experts = 2, q.from_image = true; }), "wan2.2-i2v-a14b", true,
         "wan2.2-i2v-a14b" + shape + "from an image, two transformers");
  // The shape stands above experts and image, and any family has it.
  expect({.layers = 30, .heads = 12, .dim = 128, .rope = {44, 42, 42}, .from_image = true, .experts = 2}, "wan2.1-t2v-1.3b",
         true,
         "wan2.1-t2v-1.3b: 30 layers x 12 heads of 128 channels, from text, one transformer; none of this shape is from an "
         "image, two transformers");
  expect({.layers = 60, .heads = 24, .dim = 128, .rope = {16, 56, 56}}, "hunyuanvideo-13b", true,
         "hunyuanvideo-13b: 60 layers x 24 heads of 128 channels, from text, one transformer");
  // Without a RoPE that fits the table; what is not said does not count.
  expect({.family = "minimax-h3", .layers = 50, .heads = 56, .dim = 128}, "minimax-h3", true,
         "minimax-h3: 50 layers x 56 heads of 128 channels, from text, one transformer");
  expect({.heads = 32, .dim = 128}, "ltx-2", true,
         "ltx-2: 48 layers x 32 heads of 128 channels, from text, one transformer");
  // Shapes that no row has.
  const ModelQuery tiny{.family = "wan", .layers = 2, .heads = 4};
  expect(tiny, "none", false, "no known model of family \"wan\" has 2 layers x 4 heads");
  expect(with(tiny, [](ModelQuery& q) { q.nearest = true; }), "wan2.1-t2v-14b", false,
         "no known model of family \"wan\" has 2 layers x 4 heads; wan2.1-t2v-14b is the most alike");
  expect({.layers = 2, .heads = 24, .dim = 32, .rope = {16, 8, 8}, .nearest = true}, "wan2.2-ti2v-5b", false,
         "no known model has 2 layers x 24 heads of 32 channels with RoPE 16,8,8; wan2.2-ti2v-5b is the most alike");
  expect({.layers = 30, .heads = 12, .dim = 128, .rope = {42, 44, 42}}, "none", false,
         "no known model has 30 layers x 12 heads of 128 channels with RoPE 42,44,42");
  expect({.layers = 48, .heads = 32, .dim = 128, .rope = {44, 42, 42}}, "none", false,
         "no known model has 48 layers x 32 heads of 128 channels with RoPE 44,42,42");
  expect({.rope = {8, 4, 4}}, "none", false, "no known model has RoPE 8,4,4");
  expect({.family = "cogvideox", .dim = 32}, "none", false,
         "no known model of family \"cogvideox\" has heads of 32 channels");
  expect({.family = "sora", .layers = 40, .nearest = true}, "none", false, "there is no known model of family \"sora\"");
  for (const ModelQuery& bad :
       {ModelQuery{.layers = -1}, {.heads = -1}, {.dim = -1}, {.rope = {0, -1, 0}}, {.experts = 3}}) {
    EXPECT_THROW(fit_model(bad), Error);
  }
}

TEST(Models, SayWhichSettingsOfAMethodTheyHave) {
  const auto names = [](const char* method) {
    std::string text;
    for (const Setting* setting : settings_of_models(find_method(method))) text += std::string(setting->name) + " ";
    return text;
  };
  EXPECT_EQ(names("scope"), "rho dense_steps warm_prefix layers ");
  EXPECT_EQ(names("svg2"), "groups dense_steps warm_prefix layers ");
  EXPECT_EQ(names("svoo"), "rho profile_low profile_high dense_steps reuse_start reuse_interval reuse_steps layers ");
  EXPECT_EQ(names("sparge"), "dense_steps warm_prefix layers ");
}

}  // namespace
}  // namespace scope
