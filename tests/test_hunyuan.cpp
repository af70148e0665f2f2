// Tests HunyuanVideo in the video runner: samples that diffusers made, text among the tokens, images, bad folders and
// requests.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "backends.h"
#include "cpu/kernels.h"
#include "io/safetensors.h"
#include "methods/methods.h"
#include "methods/models.h"
#include "support.h"
#include "video/models/hunyuan/layers.h"
#include "video/sampler.h"

namespace scope::video {
namespace {

namespace fs = std::filesystem;

const std::string kCases = test::repository() + "/tests/data/video/";
const std::string kWeights = "diffusion_pytorch_model.safetensors";
const std::string kDouble = "hunyuan_double_blocks", kSingle = "hunyuan_single_blocks", kImage = "hunyuan_image_tokens";

struct Case {
  Request request;
  std::vector<float> sample;
};

Case read_case(const std::string& name) {
  io::SafeTensors file = io::read_safetensors(kCases + name + "/case.safetensors");
  const auto take = [&](const char* tensor) {
    const auto found = file.tensors.find(tensor);
    return found == file.tensors.end() ? std::vector<float>{} : to_f32(found->second);
  };
  Case out;
  Request& r = out.request;
  std::sscanf(file.metadata["grid"].c_str(), "%ldx%ldx%ld", &r.grid[0], &r.grid[1], &r.grid[2]);
  r.steps = std::stoll(file.metadata["steps"]);
  r.shift = test::number(file.metadata["shift"]);
  r.settings = find_method("dense").settings();
  r.noise = take("noise");
  (name == kImage ? r.first_frame : r.condition) = take("condition");
  r.prompt = {take("prompt_embeds"), {}, take("pooled_prompt_embeds"), test::number(file.metadata["guidance"])};
  size_t length = 0;
  const std::vector<float> mask = take("prompt_attention_mask");
  for (const float x : mask) length += x != 0;
  EXPECT_LT(length, mask.size());  // so that padding is there to be cut off
  r.prompt.text.resize(r.prompt.text.size() / mask.size() * length);
  out.sample = take("sample");
  return out;
}

// The largest difference over the largest way that an element of the sample went from the noise.
double distance(const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& noise) {
  EXPECT_EQ(a.size(), b.size());
  double error = 0, moved = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error = std::max(error, std::abs(double{a[i]} - double{b[i]}));
    moved = std::max(moved, std::abs(double{b[i]} - double{noise[i]}));
  }
  return error / moved;
}

// A model on two threads of this machine, with what it stands on.
struct OnCpu {
  explicit OnCpu(const std::string& name)
      : context(2), engine(make_cpu_engine(context, DType::f32)), model(open_model(kCases + name, *engine)) {}
  Context context;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Model> model;
};

TEST(HunyuanOnCpu, SamplesOfDiffusers) {
  for (const std::string& name : {kDouble, kSingle, kImage}) {
    const Case c = read_case(name);
    for (const auto& set : cpu::instruction_sets()) {
      const Context context(2, set.name);
      for (const DType compute : {DType::f32, DType::bf16}) {
        const auto engine = make_cpu_engine(context, compute);
        const auto model = open_model(kCases + name, *engine);
        const Sample sample = generate(*model, c.request);
        const double error = distance(sample.latent, c.sample, c.request.noise);
        const bool exact = compute == DType::f32;
        EXPECT_LT(error, exact ? 2e-6 * static_cast<double>(c.request.steps) : 0.02) << name << " " << set.name;
        EXPECT_GT(error, exact ? 0 : 1e-4) << name;  // bf16 did round
        EXPECT_EQ(std::ssize(sample.calls), c.request.steps * 2) << "one pass a step, a call for each of two blocks";
      }
    }
  }
}

TEST(HunyuanOnCpu, OrderOfTokensChangesNothing) {
  for (const std::string& name : {kDouble, kSingle, kImage}) {
    const OnCpu on(name);
    Request request = read_case(name).request;
    const std::vector<float> raster = generate(*on.model, request).latent;
    Method morton = find_method("dense");
    morton.morton = true;
    request.settings.method = &morton;
    const std::vector<float> latent = generate(*on.model, request).latent;
    EXPECT_LT(distance(latent, raster, request.noise), 5e-6) << name;
    EXPECT_NE(latent, raster) << name;  // sums run in another order
  }
}

Settings sparse_settings(const char* method) {
  Settings settings = find_method(method).settings();
  settings.groups = settings.codes = 6;
  settings.dense_layers = 0;
  settings.dense_steps = 0;
  return settings;
}

TEST(HunyuanOnCpu, SparseCallsOverVideoAndText) {
  const OnCpu on(kSingle);
  Request request = read_case(kSingle).request;
  const std::vector<float> dense = generate(*on.model, request).latent;
  request.settings = sparse_settings("scope");
  set_setting(request.settings, "rho", "1");
  const Sample all = generate(*on.model, request);
  for (const CallReport& call : all.calls) EXPECT_EQ(call.stats.reason, Reason::sparse);
  EXPECT_LT(distance(all.latent, dense, request.noise), 5e-6) << "every key through the sparse path is dense attention";
  request.settings = sparse_settings("scope-mean");
  set_setting(request.settings, "target_density", "0.4");
  const Sample few = generate(*on.model, request);
  for (const CallReport& call : few.calls) {
    EXPECT_EQ(call.stats.reason, Reason::sparse);
    EXPECT_NEAR(call.stats.density, 0.4, 0.02);
    EXPECT_EQ(call.stats.warm, call.step > 0);
  }
  EXPECT_GT(distance(few.latent, dense, request.noise), 1e-4);
  EXPECT_LT(distance(few.latent, dense, request.noise), 0.5);
}

TEST(HunyuanOnCpu, WatchedTensorsEndWithTheTextAndHaveNoPadding) {
  const OnCpu on(kDouble);
  Request request = read_case(kDouble).request;
  int64_t seen = 0;
  request.wanted = [](int64_t step, int64_t, int64_t) { return step == 1; };
  request.watch = [&](int64_t, int64_t layer, int64_t, DType, const std::vector<std::byte>& q, const std::vector<std::byte>&,
                      const std::vector<std::byte>& v) {
    EXPECT_EQ(layer, seen++);
    EXPECT_EQ(q.size(), (60u + 9) * 12 * 4);
    EXPECT_EQ(v.size(), q.size());
  };
  generate(*on.model, request);
  EXPECT_EQ(seen, 2);
}

// In every block, so that sparse calls keep it and padding takes part in nothing.
TEST(HunyuanOnCpu, TextStandsBehindTheVideo) {
  for (const std::string& name : {kDouble, kSingle, kImage}) {
    const OnCpu on(name);
    const Request request = read_case(name).request;
    const auto pass = on.model->start(request.grid, false);
    pass->add_prompt(request.prompt);
    const double timestep = 500;
    pass->set_timesteps({&timestep, 1});
    int64_t layers = 0;
    const auto attend = [&](int64_t layer, Matrix q, Matrix, Matrix, Matrix, const TextTokens& text) {
      EXPECT_EQ(layer, layers++);
      EXPECT_EQ(q.rows, on.model->config().tokens(request.grid));
      EXPECT_EQ(text.first, 60);
      EXPECT_EQ(text.count, 9);
      EXPECT_EQ(text.padding, q.rows - 69);
    };
    std::vector<float> velocity(request.noise.size());
    pass->forward(0, 0, request.noise.data(), request.condition.data(), attend, velocity.data());
    EXPECT_EQ(layers, 2);
  }
}

TEST(HunyuanOnCpu, GuidanceIsAnInputOfTheModel) {
  const OnCpu on(kSingle);
  Request request = read_case(kSingle).request;
  ASSERT_TRUE(on.model->config().embeds_guidance);
  const Sample once = generate(*on.model, request);
  request.prompt.guidance = 1;
  const Sample other = generate(*on.model, request);
  EXPECT_GT(distance(other.latent, once.latent, request.noise), 0.01);
  EXPECT_EQ(other.calls.size(), once.calls.size());
}

// The image's tokens are at time 0: they stay, and the rest depends on them.
TEST(HunyuanOnCpu, FirstFrameIsTheImage) {
  const OnCpu on(kImage);
  Request request = read_case(kImage).request;
  const Sample sample = generate(*on.model, request);
  const int64_t volume = 3 * 8 * 10, frame = 8 * 10;
  ASSERT_EQ(request.first_frame.size(), 2u * frame);
  for (int64_t i = 0; i < 2 * frame; ++i) {
    EXPECT_EQ(sample.latent[static_cast<size_t>(i / frame * volume + i % frame)],
              request.first_frame[static_cast<size_t>(i)]);
  }
  request.first_frame[0] += 1;
  const std::vector<float> moved = generate(*on.model, request).latent;
  EXPECT_NE(moved[static_cast<size_t>(volume - 1)], sample.latent[static_cast<size_t>(volume - 1)]);
  // A video of that frame alone: nothing is left to step.
  request.grid[0] = 1;
  request.noise.resize(2 * frame);
  EXPECT_EQ(generate(*on.model, request).latent, request.first_frame);
}

void expect_refusal(const std::function<void()>& body, Status status, const std::string& words) {
  try {
    body();
    ADD_FAILURE() << "nothing was refused: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what() << "\ndoes not say: " << words;
  }
}

TEST(HunyuanOnCpu, RequestsThatDoNotFit) {
  const OnCpu on(kImage);
  const auto with = [&](const std::function<void(Request&)>& change, Status status, const std::string& words) {
    Request request = read_case(kImage).request;
    change(request);
    expect_refusal([&] { generate(*on.model, request); }, status, words);
  };
  with([](Request& r) { r.prompt.text.resize(5 * 401, 1.0f); }, Status::shape, "got 401 tokens, this model takes up to 400");
  with([](Request& r) { r.prompt.text.clear(); }, Status::shape, "prompt_embeds: got 0 numbers, expected rows of 5");
  with([](Request& r) { r.prompt.text.pop_back(); }, Status::shape, "rows of 5");
  with([](Request& r) { r.prompt.pooled.pop_back(); }, Status::shape,
       "pooled_prompt_embeds: got 3 numbers, this model takes 4");
  with([](Request& r) { r.prompt.image = {1}; }, Status::shape, "image_embeds: this model takes none");
  with([](Request& r) { r.prompt.guidance = NAN; }, Status::invalid_argument, "guidance");
  with([](Request& r) { r.first_frame.clear(); }, Status::shape, "first frame: this model needs one");
  with([](Request& r) { r.first_frame.pop_back(); }, Status::shape, "first frame: got 159 numbers, expected [2, 1, 8, 10]");
  with([](Request& r) { r.grid = {3, 4, 2000}; }, Status::shape, "3x4x2000");
  // As many as it takes, and one more by its own count.
  Request longest = read_case(kSingle).request;
  longest.prompt.text.resize(5 * 256, 0.5f);
  const OnCpu text_only(kSingle);
  EXPECT_NO_THROW(generate(*text_only.model, longest));
  longest.prompt.text.resize(5 * 257, 0.5f);
  expect_refusal([&] { generate(*text_only.model, longest); }, Status::shape, "this model takes up to 256");
  longest.first_frame.resize(2 * 8 * 10);
  longest.prompt.text.resize(5);
  expect_refusal([&] { generate(*text_only.model, longest); }, Status::unsupported, "first frame: this model keeps none");
}

TEST(HunyuanOnCpu, FoldersThatAreWrong) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("scope_hunyuan_{}", ::getpid());
  fs::remove_all(folder);
  fs::copy(kCases + kImage, folder, fs::copy_options::recursive);
  std::ifstream in(folder / "config.json");
  const std::string good{std::istreambuf_iterator<char>(in), {}};
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto expect = [&](const std::string& words) {
    expect_refusal([&] { open_model(folder, *engine); }, Status::format, words);
  };
  const auto with = [&](const std::string& from, const std::string& to, const std::string& words) {
    std::string text = good;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    std::ofstream(folder / "config.json") << text;
    expect(words);
  };
  with("\"num_layers\": 1", "\"num_layers\": 2", "transformer_blocks.1.");
  with("\"num_single_layers\": 1", "\"num_single_layers\": 0", "tensor 'single_transformer_blocks.0.");
  with("\"num_refiner_layers\": 1", "\"num_refiner_layers\": 2", "refiner_blocks.1.");
  with("\"mlp_ratio\": 2.0", "\"mlp_ratio\": 3.0", "got shape");
  with("\"mlp_ratio\": 2.0", "\"mlp_ratio\": 0.05", "mlp_ratio: got 0.05, which leaves nothing of 12 channels");
  with("\"mlp_ratio\": 2.0", "\"mlp_ratio\": -1", "mlp_ratio");
  with("\"attention_head_dim\": 6", "\"attention_head_dim\": 8", "rope_axes_dim: got [2, 2, 2], expected even numbers");
  with("\"rope_axes_dim\": [\n    2,\n    2,\n    2", "\"rope_axes_dim\": [2, 4, 8",
       "rope_axes_dim: got [2, 4, 8], expected even numbers that add up to attention_head_dim 6");
  with("\"guidance_embeds\": true", "\"guidance_embeds\": false", "guidance_embedder");
  with("\"guidance_embeds\": true", "\"guidance_embeds\": 1", "guidance_embeds");
  with("\"in_channels\": 2", "\"in_channels\": 5", "in_channels: got 5, expected as many as the 2");
  with("\"token_replace\"", "\"latent_concat\"", "in_channels: got 2, expected more than the 2");
  with("\"token_replace\"", "\"tokens\"",
       "image_condition_type: got \"tokens\", expected \"latent_concat\" or \"token_replace\"");
  with("\"rms_norm\"", "\"layer_norm\"", "qk_norm");
  with("\"patch_size\": 2", "\"patch_size\": [1, 2]", "patch_size");
  with("\"patch_size_t\": 1", "\"patch_size_t\": 2", "patch_size_t: got 2, expected 1");
  with("\"patch_size\": 2", "\"patch_size\": 2, \"byt5_dim\": 3", "'byt5_dim': unknown key");
  with("HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel",
       "_class_name: got \"HunyuanVideo15Transformer3DModel\", expected \"WanTransformer3DModel\" or "
       "\"HunyuanVideoTransformer3DModel\"");
  with("HunyuanVideoTransformer3DModel", "WanTransformer3DModel", "patch_size: got 2, expected three integers");
  std::ofstream(folder / "config.json") << good;
  const std::string split = "single_transformer_blocks.0.proj_out.weight";
  io::SafeTensors file = io::read_safetensors(folder / kWeights);
  io::Array& tensor = file.tensors.at(split);
  ASSERT_EQ(tensor.shape, (std::vector<int64_t>{12, 36}));
  tensor.shape = {36, 12};
  io::write_safetensors(folder / kWeights, file);
  expect("tensor '" + split + "': got shape [36, 12], config.json implies [12, 36]");
  file.tensors.erase(split);
  io::write_safetensors(folder / kWeights, file);
  expect("tensor '" + split + "' of shape [12, 36] is missing");
  fs::remove_all(folder);
}

TEST(HunyuanOnCpu, ConfigDefaultsAreThoseOfDiffusersAndFitTheKnownModel) {
  const hunyuan::Config config = hunyuan::parse_config(R"({"qk_norm": "rms_norm"})");
  EXPECT_EQ(config, hunyuan::Config{});
  EXPECT_EQ(config, hunyuan::parse_config(R"({"qk_norm": "rms_norm", "image_condition_type": null})"));
  EXPECT_EQ(config.mlp_dim(), 12288);
  const ModelConfig common = config.common();
  ModelQuery query{.layers = common.layers, .heads = common.heads, .dim = common.head_dim};
  std::copy_n(common.rope.begin(), 3, query.rope);
  const ModelFit fit = fit_model(query);
  ASSERT_TRUE(fit.exact) << fit.why;
  EXPECT_STREQ(fit.model->name, "hunyuanvideo-13b");
  expect_refusal([] { hunyuan::parse_config(R"({"qk_norm": "rms_norm", "num_layers": 0, "num_single_layers": 0})"); },
                 Status::format, "expected a block");
}

// On a GPU: the same samples as the CPU's f32 to bf16's rounding, which the CPU's own bf16 measures.
class HunyuanOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::testing_cuda() || !test::backend().present()) GTEST_SKIP() << "[GPU tests skipped]";
  }
};

// A folder with a random model of which every width is a multiple of 8, but for patches with an image beside them.
hunyuan::Config write_random_model(const std::string& folder, const std::string& image) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder + "/config.json")
      << R"({"_class_name": "HunyuanVideoTransformer3DModel", "qk_norm": "rms_norm", "num_attention_heads": 2,
             "attention_head_dim": 24, "rope_axes_dim": [8, 8, 8], "num_layers": 2, "num_single_layers": 2,
             "num_refiner_layers": 2, "out_channels": 4, "text_embed_dim": 16,
             "pooled_projection_dim": 11, "mlp_ratio": 3.0)"
      << ", \"in_channels\": " << (image == "latent_concat" ? 9 : 4)
      << ", \"guidance_embeds\": " << (image.empty() ? "true" : "false")
      << ", \"image_condition_type\": " << (image.empty() ? "null" : "\"" + image + "\"") << "}";
  const hunyuan::Config config = read_config(folder, hunyuan::parse_config);
  io::SafeTensors file;
  uint64_t seed = 1;
  hunyuan::Layers layers;
  for (const Tensor& tensor : hunyuan::list_tensors(config, layers).tensors) {
    int64_t n = 1;
    for (const int64_t side : tensor.shape) n *= side;
    const bool matrix = tensor.shape.size() > 1, norm = !matrix && tensor.name.find("norm") != std::string::npos;
    std::vector<float> values = make_noise(seed++, n);
    const auto scale = static_cast<float>(matrix ? 1 / std::sqrt(static_cast<double>(n / tensor.shape[0])) : 0.3);
    for (float& x : values) x = norm && tensor.name.ends_with("weight") ? 1 + 0.2f * x : x * scale;
    io::Array array{io::ElementType::f32, tensor.shape, std::vector<std::byte>(values.size() * 4)};
    std::memcpy(array.data.data(), values.data(), array.data.size());
    file.tensors[tensor.name] = array;
  }
  io::write_safetensors(folder + "/" + kWeights, file);
  return config;
}

TEST_F(HunyuanOnDevice, SamplesOfTheCpu) {
  const Context cpu(2), gpu(ContextOptions{.backend = "cuda"});
  const std::string folder = fs::temp_directory_path() / fmt::format("scope_hunyuan_gpu_{}", ::getpid());
  for (const std::string image : {"", "token_replace", "latent_concat"}) {
    const ModelConfig config = write_random_model(folder, image).common();
    Request request;
    request.grid = {3, 5, 7};
    request.steps = 4;
    request.guidance = image.empty() ? 1 : 3;  // a model that embeds none has two passes
    const auto size = latent_size(config, request.grid);
    request.noise = make_noise(100, 4 * size[0] * size[1] * size[2]);
    request.condition = make_noise(101, config.condition_channels * size[0] * size[1] * size[2]);
    if (config.needs_first_frame) request.first_frame = make_noise(102, 4 * size[1] * size[2]);
    request.prompt = {make_noise(102, 13 * 16), {}, make_noise(103, 11), 6};
    request.negative = {make_noise(104, 9 * 16), {}, make_noise(105, 11)};
    Method morton = find_method("dense");
    morton.morton = true;
    for (const std::string method : {"dense", "scope", "dense in Morton order"}) {
      request.settings = method == "scope" ? sparse_settings("scope") : find_method("dense").settings();
      if (method == "scope") request.settings.rho = 1;  // every key, through the sparse path: rounding alone remains
      if (method == "dense in Morton order") request.settings.method = &morton;
      const auto run = [&](std::unique_ptr<Engine> engine) {
        const auto model = open_model(folder, *engine);
        return generate(*model, request).latent;
      };
      const auto exact = run(make_cpu_engine(cpu, DType::f32));
      const double own = distance(run(make_cpu_engine(cpu, DType::bf16)), exact, request.noise);
      const auto latent = run(make_cuda_engine(gpu));
      const double error = distance(latent, exact, request.noise);
      EXPECT_LT(error, 3 * own + 1e-3) << method << " " << image;
      EXPECT_GT(error, 0);
      EXPECT_EQ(latent, run(make_cuda_engine(gpu))) << "runs repeat";
      fmt::print("{} {}: largest error {:.5f}, the CPU's bf16 {:.5f}\n", method, image, error, own);
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace scope::video
