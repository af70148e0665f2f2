// Tests pipelines of Wan2.2: samples that diffusers made, the change of experts, and folders whose files disagree.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cases.h"
#include "io/safetensors.h"
#include "methods/methods.h"
#include "support.h"
#include "video/folder.h"
#include "video/footprint.h"
#include "video/sampler.h"
#include "video/weights.h"

namespace scope::video {
namespace {

namespace fs = std::filesystem;

const std::string kCases = test::repository() + "/tests/data/video/";

struct Case {
  Folder folder;
  Request request;
  std::vector<float> sample;
};

Case read_case(const std::string& name) {
  Case c{read_folder(kCases + name), {}, {}};
  io::SafeTensors file = io::read_safetensors(kCases + name + "/case.safetensors");
  const auto take = [&](const char* tensor) {
    const auto found = file.tensors.find(tensor);
    return found == file.tensors.end() ? std::vector<float>{} : to_f32(found->second);
  };
  Request& r = c.request;
  std::sscanf(file.metadata["grid"].c_str(), "%ldx%ldx%ld", &r.grid[0], &r.grid[1], &r.grid[2]);
  r.steps = std::stoll(file.metadata["steps"]);
  r.sampler = c.folder.schedule->sampler;
  r.shift = c.folder.schedule->shift;
  r.boundary = c.folder.boundary;
  r.guidance = test::number(file.metadata["guidance"]);
  r.guidance_2 = test::number(file.metadata["guidance_2"]);
  r.settings = find_method("dense").settings();
  r.noise = take("noise");
  (c.folder.keeps_first_frame ? r.first_frame : r.condition) = take("condition");
  r.prompt.text = take("prompt_embeds");
  r.negative.text = take("negative_prompt_embeds");
  c.sample = take("sample");
  return c;
}

Sample run(const Case& c, Engine& engine) {
  return generate(
      [&](int64_t expert) {
        return std::shared_ptr(open_model(c.folder.transformers[static_cast<size_t>(expert)], engine));
      },
      c.request);
}

// |a - b| over how far the sample went from the noise.
double distance(const std::vector<float>& a, const Case& c) {
  double error = 0, moved = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(double{a[i]} - double{c.sample[i]}, 2);
    moved += std::pow(double{c.sample[i]} - double{c.request.noise[i]}, 2);
  }
  return std::sqrt(error / moved);
}

class Wan22 : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (test::testing_cuda() && !test::backend().present()) GTEST_SKIP() << "[GPU tests skipped]";
  }
};

TEST_P(Wan22, SamplesOfDiffusers) {
  const Case c = read_case(GetParam());
  const Context cpu(2);
  const auto steps = static_cast<double>(c.request.steps);
  const double own = distance(run(c, *make_cpu_engine(cpu, DType::bf16)).latent, c);
  EXPECT_LT(own, 0.05);
  if (test::testing_cuda()) {
    const Context gpu(ContextOptions{.backend = "cuda"});
    EXPECT_LT(distance(run(c, *make_cuda_engine(gpu)).latent, c), 2 * own + 1e-3) << "the CPU's bf16: " << own;
    return;
  }
  for (const auto& set : cpu::instruction_sets()) {
    const Context context(2, set.name);
    const Sample sample = run(c, *make_cpu_engine(context, DType::f32));
    EXPECT_LT(distance(sample.latent, c), 2e-6 * steps * c.request.guidance) << set.name;
  }
}
INSTANTIATE_TEST_SUITE_P(Frozen, Wan22, testing::Values("wan22_t2v", "wan22_i2v", "wan22_ti2v"));

TEST(Wan22OnCpu, FirstFrameStaysInEveryOrderOfTokens) {
  Case c = read_case("wan22_ti2v");
  ASSERT_TRUE(c.folder.keeps_first_frame);
  const Context context(2);
  const auto engine = make_cpu_engine(context, DType::f32);
  Method morton = find_method("dense");
  morton.morton = true;
  const auto raster = run(c, *engine).latent;
  c.request.settings.method = &morton;
  const auto other = run(c, *engine).latent;
  EXPECT_NE(raster, other) << "sums run in another order";
  EXPECT_LT(distance(other, c), 2e-6 * 3 * c.request.guidance);
  const int64_t frame = std::ssize(c.request.first_frame) / 4, volume = std::ssize(raster) / 4;
  for (int64_t channel = 0; channel < 4; ++channel) {
    const auto from = c.request.first_frame.begin() + channel * frame;
    EXPECT_TRUE(std::equal(from, from + frame, raster.begin() + channel * volume)) << channel;
  }
  // A video of one frame is that frame.
  c.request.settings = find_method("dense").settings();
  c.request.grid[0] = 1;
  c.request.noise.assign(c.request.first_frame.size(), 1.0f);
  EXPECT_EQ(run(c, *engine).latent, c.request.first_frame);
  // Without it the same model makes a video from text.
  c = read_case("wan22_ti2v");
  c.request.first_frame.clear();
  EXPECT_GT(distance(run(c, *engine).latent, c), 0.01);
  c.request.first_frame = {1, 2, 3};
  EXPECT_THROW(run(c, *engine), Error);
}

TEST(Wan22OnCpu, FoldersSayWhenTheSecondExpertRuns) {
  const Case c = read_case("wan22_t2v");
  EXPECT_EQ(c.folder.boundary, 875);
  EXPECT_EQ(c.folder.schedule, (Schedule{Sampler::unipc, 3}));
  // diffusers: the first expert at and above the boundary.
  const auto timesteps = noise_timesteps(Sampler::unipc, c.request.steps, 3);
  const auto experts = experts_of(c.request);
  for (size_t i = 0; i < experts.size(); ++i) EXPECT_EQ(experts[i], timesteps[i] >= 875 ? 0 : 1) << timesteps[i];
  EXPECT_EQ(experts.front(), 0);
  EXPECT_EQ(experts.back(), 1);
  Request at = c.request;
  at.boundary = timesteps[2];
  EXPECT_EQ(experts_of(at)[2], 0);
  EXPECT_EQ(experts_of(at)[3], 1);
  // A transformer's folder alone has neither an expert beside it nor a schedule.
  const Folder alone = read_folder(kCases + "wan22_t2v/transformer");
  EXPECT_EQ(alone.transformers.size(), 1u);
  EXPECT_FALSE(alone.schedule);
}

TEST(Wan22OnCpu, OneExpertIsInMemoryAtATime) {
  const Case c = read_case("wan22_t2v");
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  std::vector<int64_t> opened;
  std::weak_ptr<const Model> last;
  generate(
      [&](int64_t expert) {
        EXPECT_TRUE(last.expired()) << "the other is let go first";
        opened.push_back(expert);
        std::shared_ptr<const Model> model = open_model(c.folder.transformers[static_cast<size_t>(expert)], *engine);
        last = model;
        return model;
      },
      c.request);
  EXPECT_EQ(opened, (std::vector<int64_t>{0, 1}));
}

TEST(Wan22OnCpu, EveryExpertStartsWithItsOwnStates) {
  Case c = read_case("wan22_t2v");
  c.request.steps = 12;
  c.request.settings = find_method("scope").settings();
  c.request.settings.groups = c.request.settings.codes = 4;
  c.request.settings.dense_layers = 0;
  c.request.settings.dense_steps = 0.1;  // of 12: 1
  const auto experts = experts_of(c.request);
  const int64_t change = std::find(experts.begin(), experts.end(), 1) - experts.begin();
  ASSERT_GT(change, 2);
  ASSERT_LT(change, 11);
  const Context context(1);
  const Sample sample = run(c, *make_cpu_engine(context, DType::f32));
  EXPECT_EQ(std::ssize(sample.calls), 12 * 2 * 2);
  for (const CallReport& call : sample.calls) {
    // Steps are those of the whole schedule: the second expert has no dense start of its own.
    EXPECT_EQ(call.stats.reason, call.step < 1 ? Reason::dense_step : Reason::sparse) << call.step;
    EXPECT_EQ(call.stats.warm, call.step > 1 && call.step != change) << "step " << call.step << ", layer " << call.layer;
  }
}

TEST(Wan22OnCpu, GuidanceOfEachExpert) {
  Case c = read_case("wan22_t2v");
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto experts = experts_of(c.request);
  const int64_t first = std::count(experts.begin(), experts.end(), 0), second = c.request.steps - first;
  c.request.guidance_2 = 1;
  EXPECT_EQ(std::ssize(run(c, *engine).calls), 2 * (2 * first + second)) << "one pass where guidance is 1";
  c.request.guidance = 1;
  c.request.guidance_2 = 3;
  EXPECT_EQ(std::ssize(run(c, *engine).calls), 2 * (first + 2 * second));
}

TEST(Wan22OnCpu, BothExpertsTakeTheirWeightsAndARun) {
  Case c = read_case("wan22_t2v");
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto needed = [&] { return two_experts_bytes(c.folder, c.request, *engine); };
  int64_t weights = 0;
  for (const std::string& expert : c.folder.transformers) {
    for (const auto& [name, shape] : read_shapes(expert)) {
      weights += 4 * std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    }
  }
  EXPECT_GT(needed(), weights);
  c.request.settings = find_method("scope").settings();
  const int64_t guided = needed();
  c.request.guidance = 1;
  EXPECT_EQ(needed(), guided) << "the second expert has two branches still";
  c.request.guidance_2 = 1;
  const Plan plan(context, c.request.settings,
                  attention_shape(read_model_config(c.folder.transformers[0]), c.request.grid, DType::f32));
  const int64_t layers = 2 * (plan.state_bytes + plan.report_bytes);
  EXPECT_EQ(guided - needed(), layers);
  const std::string config = read_text(c.folder.transformers[0] + "/config.json");
  EXPECT_EQ(needed() - plan.workspace_bytes - layers, 2 * model_bytes(config, *engine, c.request.grid, false));
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::format) << error.what();
    return error.what();
  }
  return "nothing";
}

// Every step, stopped after it and gone on with from what was kept, by whichever expert comes next.
TEST_P(Wan22, RunsThatWereStoppedGoOnBitForBit) {
  Case c = read_case(GetParam());
  c.request.steps = 5;
  const Context context = test::testing_cuda() ? Context(ContextOptions{.backend = "cuda"}) : Context(2);
  const auto engine = test::testing_cuda() ? make_cuda_engine(context) : make_cpu_engine(context, DType::f32);
  for (const Sampler sampler : {Sampler::euler, Sampler::unipc}) {
    c.request.sampler = sampler;
    for (const char* method : {"dense", "scope", "scope-mean", "svg2", "svoo"}) {
      SCOPED_TRACE(method);
      Settings& settings = c.request.settings = find_method(method).settings();
      if (!settings.dense) {
        settings.groups = settings.codes = 4;
        settings.rho = 0.4;
        settings.alpha = 0;
        settings.dense_layers = 0;
        settings.dense_steps = 0;
        settings.reuse_start = 1;
      }
      const Sample whole = run(c, *engine);
      std::vector<Snapshot> kept;
      Case watched = c;
      watched.request.snapshot_every = 1;
      watched.request.snapshot = [&](const Snapshot& snapshot) { kept.push_back(snapshot); };
      EXPECT_EQ(run(watched, *engine).latent, whole.latent) << "keeping changes nothing";
      ASSERT_EQ(kept.size(), 4u) << "none after the last step";
      for (size_t i = 0; i < kept.size(); ++i) {
        EXPECT_EQ(kept[i].steps_done, static_cast<int64_t>(i) + 1);
        EXPECT_GT(kept[i].seconds, i == 0 ? 0.0 : kept[i - 1].seconds);
        Case rest = c;
        kept[i].seconds += 1000;  // more than the steps that are left take
        rest.request.resume = &kept[i];
        double last = 0;  // of the snapshots that follow
        rest.request.snapshot_every = 1;
        rest.request.snapshot = [&](const Snapshot& snapshot) { last = snapshot.seconds; };
        const Sample sample = run(rest, *engine);
        EXPECT_GE(sample.seconds, kept[i].seconds) << "what was spent before counts";
        if (i + 1 < kept.size()) {
          EXPECT_GE(last, kept[i].seconds);
        }
        kept[i].seconds -= 1000;
        EXPECT_EQ(sample.latent, whole.latent) << "from step " << i + 1;
        ASSERT_EQ(sample.calls.size(), whole.calls.size());
        for (size_t k = 0; k < sample.calls.size(); ++k) {
          EXPECT_EQ(sample.calls[k].stats.warm, whole.calls[k].stats.warm);
          EXPECT_EQ(sample.calls[k].stats.density, whole.calls[k].stats.density);
        }
      }
    }
  }
}

TEST(Wan22OnCpu, SnapshotsThatDoNotFit) {
  Case c = read_case("wan22_t2v");
  c.request.settings = find_method("scope").settings();
  c.request.settings.groups = c.request.settings.codes = 4;
  Snapshot kept;
  c.request.snapshot_every = 5;
  c.request.snapshot = [&](const Snapshot& snapshot) { kept = snapshot; };
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  run(c, *engine);
  ASSERT_EQ(kept.steps_done, 5);
  ASSERT_EQ(kept.states.size(), 4u) << "two layers, two branches";
  const std::vector<std::pair<std::string, std::function<void(Snapshot&)>>> spoiled = {
      {"latent: got", [](Snapshot& s) { s.latent.pop_back(); }},
      {"history: got 3 vectors, expected 4", [](Snapshot& s) { s.history.pop_back(); }},
      {"history: got", [](Snapshot& s) { s.history[2].pop_back(); }},
      {"states: got 3, expected 4", [](Snapshot& s) { s.states.pop_back(); }},
      {"state: got", [](Snapshot& s) { s.states[1].pop_back(); }},
      {"resume: got 6 steps done, expected 0..5", [](Snapshot& s) { s.steps_done = 6; }}};
  for (const auto& [words, spoil] : spoiled) {
    Snapshot bad = kept;
    spoil(bad);
    c.request.resume = &bad;
    const std::string said = refusal([&] { run(c, *engine); });
    EXPECT_NE(said.find(words), std::string::npos) << said;
  }
}

TEST(Wan22OnCpu, IndexesThatAreRefused) {
  const std::string both = R"("transformer": ["diffusers", "A"], "transformer_2": ["diffusers", "A"])";
  EXPECT_EQ(parse_model_index("{" + both + R"(, "boundary_ratio": 0.9, "vae": [null, null], "_class_name": "X"})"),
            (ModelIndex{true, 0.9, false}));
  EXPECT_EQ(parse_model_index(R"({"transformer": ["diffusers", "A"], "expand_timesteps": true})"),
            (ModelIndex{false, 0, true}));
  EXPECT_EQ(
      parse_model_index(R"({"transformer": ["diffusers", "A"], "transformer_2": [null, null], "boundary_ratio": null})"),
      ModelIndex{});
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"{" + both + "}", "transformer_2: there is no boundary_ratio"},
      {R"({"transformer": ["diffusers", "A"], "boundary_ratio": 0.9})", "boundary_ratio: there is no transformer_2"},
      {R"({"transformer": [null, null], "transformer_2": ["diffusers", "A"], "boundary_ratio": 0.9})",
       "transformer: got nothing, and transformer_2 alone lacks the noisy steps"},
      {R"({"transformer_2": [null, null]})", "transformer: got nothing, expected the component"},
      {"{" + both + R"(, "boundary_ratio": 1.5})", "boundary_ratio: got 1.5, expected a number between 0 and 1"},
      {"{" + both + R"(, "boundary_ratio": 0.9, "is_causal": true})", "'is_causal': unknown key"},
      {R"({"transformer": ["diffusers", "A"], "expand_timesteps": 1})", "expand_timesteps: got 1, expected true or false"},
      {"[]", "not a JSON object"}};
  for (const auto& [text, words] : bad) {
    const std::string said = refusal([&, &text = text] { parse_model_index(text); });
    EXPECT_NE(said.find(words), std::string::npos) << said;
  }
}

TEST(Wan22OnCpu, SchedulersThatAreRefused) {
  const std::string unipc = R"({"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction")";
  EXPECT_EQ(parse_scheduler(unipc + R"(, "use_flow_sigmas": true, "flow_shift": 5.0, "beta_end": 0.02})"),
            (Schedule{Sampler::unipc, 5}));
  EXPECT_EQ(parse_scheduler(R"({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7})"),
            (Schedule{Sampler::euler, 7}));
  const std::vector<std::pair<std::string, std::string>> bad = {
      {unipc + "}", "use_flow_sigmas: got nothing"},
      {unipc + R"(, "use_flow_sigmas": false})", "use_flow_sigmas: got false, expected true"},
      {unipc + R"(, "use_flow_sigmas": true, "solver_order": 3})", "solver_order: got 3, expected 2"},
      {unipc + R"(, "use_flow_sigmas": true, "disable_corrector": [0]})", "disable_corrector: got [0], expected []"},
      {unipc + R"(, "use_flow_sigmas": true, "novel": 1})", "'novel': unknown key"},
      {unipc + R"(, "use_flow_sigmas": true, "flow_shift": -1})", "flow_shift: got -1"},
      {R"({"_class_name": "FlowMatchEulerDiscreteScheduler", "stochastic_sampling": true})",
       "stochastic_sampling: got true"},
      {R"({"_class_name": "DDIMScheduler"})", "_class_name: got \"DDIMScheduler\", expected"}};
  for (const auto& [text, words] : bad) {
    const std::string said = refusal([&, &text = text] { parse_scheduler(text); });
    EXPECT_NE(said.find(words), std::string::npos) << said;
  }
}

// A copy of a frozen pipeline, for a test to spoil.
class SpoiledOnCpu : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::copy(kCases + "wan22_t2v", folder_, fs::copy_options::recursive);
    fs::permissions(folder_, fs::perms::owner_all, fs::perm_options::add);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void edit(const std::string& file, const std::function<void(nlohmann::json&)>& change) const {
    nlohmann::json json = nlohmann::json::parse(std::ifstream(folder_ + file));
    change(json);
    std::ofstream(folder_ + file) << json;
  }
  std::string said() const {
    return refusal([&] { read_folder(folder_); });
  }

  const std::string folder_ = fs::temp_directory_path() / fmt::format("scope_wan22_{}", ::getpid());
  const std::string weights_ = "/diffusion_pytorch_model.safetensors";
};

TEST_F(SpoiledOnCpu, ExpertsThatDisagree) {
  edit("/transformer_2/config.json", [](auto& json) { json["num_layers"] = 1; });
  EXPECT_NE(said().find("expected two experts of one shape"), std::string::npos) << said();
  edit("/transformer_2/config.json", [](auto& json) { json["num_layers"] = 2; });
  EXPECT_EQ(said(), "nothing");

  io::SafeTensors file = io::read_safetensors(folder_ + "/transformer_2" + weights_);
  const io::SafeTensors whole = file;
  file.tensors.erase("proj_out.bias");
  io::write_safetensors(folder_ + "/transformer_2" + weights_, file);
  EXPECT_NE(said().find("transformer_2: tensor 'proj_out.bias' is missing"), std::string::npos) << said();
  file = whole;
  file.tensors["proj_out.bias"].shape = {1, 16};
  io::write_safetensors(folder_ + "/transformer_2" + weights_, file);
  EXPECT_NE(said().find("tensor 'proj_out.bias' has shape [1, 16], and [16] in"), std::string::npos) << said();
  file = whole;
  file.tensors["more"] = whole.tensors.at("proj_out.bias");
  io::write_safetensors(folder_ + "/transformer_2" + weights_, file);
  EXPECT_NE(said().find("tensor 'more' is not in"), std::string::npos) << said();
  io::write_safetensors(folder_ + "/transformer_2" + weights_, whole);
  fs::resize_file(folder_ + "/transformer_2" + weights_, 40000);
  EXPECT_NE(said().find("diffusion_pytorch_model.safetensors: tensor"), std::string::npos) << said();
}

TEST_F(SpoiledOnCpu, ExpertsThatChangedPlaces) {
  edit("/transformer/config.json", [](auto& json) { json["_name_or_path"] = "hub/Wan2.2/transformer_2"; });
  EXPECT_EQ(said(), "nothing") << "one origin alone proves nothing";
  edit("/transformer_2/config.json", [](auto& json) { json["_name_or_path"] = "hub/Wan2.2/transformer"; });
  EXPECT_NE(said().find("expected them the other way round"), std::string::npos) << said();
}

TEST_F(SpoiledOnCpu, TimestepsPerTokenBesideConcatenatedChannels) {
  fs::remove_all(folder_);
  fs::copy(kCases + "wan22_i2v", folder_, fs::copy_options::recursive);
  edit("/model_index.json", [](auto& json) { json["expand_timesteps"] = true; });
  EXPECT_NE(said().find("and this one has 6"), std::string::npos) << said();
}

TEST_F(SpoiledOnCpu, ExpertsThatAreMissing) {
  fs::remove_all(folder_ + "/transformer_2");
  try {
    read_folder(folder_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::io);
    EXPECT_NE(std::string(error.what()).find("transformer_2/config.json"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace scope::video
