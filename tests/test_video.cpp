// Tests the video runner: samples that diffusers made, bad model folders, noise, frames, and how sparse calls are scheduled.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "backends.h"
#include "core/numeric.h"
#include "core/random.h"
#include "cpu/kernels.h"
#include "io/safetensors.h"
#include "methods/methods.h"
#include "support.h"
#include "video/media.h"
#include "video/models/wan/layers.h"
#include "video/morton.h"
#include "video/sampler.h"

namespace scope::video {
namespace {

namespace fs = std::filesystem;

const std::string kCases = test::repository() + "/tests/data/video/";
const std::string kBundled = test::repository() + "/models/tiny-wan";
const std::vector<std::string> kModels = {"t2v_sharded", "i2v_image_branch", "two_images_no_norm", "patches_over_time"};

struct Case {
  Request request;
  std::vector<float> sample;
  io::SafeTensors file;
};

Case read_case(const std::string& name) {
  Case out;
  out.file = io::read_safetensors(kCases + name + "/case.safetensors");
  const auto take = [&](const char* tensor) {
    const auto found = out.file.tensors.find(tensor);
    return found == out.file.tensors.end() ? std::vector<float>{} : to_f32(found->second);
  };
  auto& meta = out.file.metadata;
  Request& r = out.request;
  std::sscanf(meta["grid"].c_str(), "%ldx%ldx%ld", &r.grid[0], &r.grid[1], &r.grid[2]);
  r.steps = std::stoll(meta["steps"]);
  r.shift = test::number(meta["shift"]);
  r.guidance = test::number(meta["guidance"]);
  r.settings = find_method("dense").settings();
  r.noise = take("noise");
  r.condition = take("condition");
  r.prompt = {take("prompt_embeds"), take("image_embeds")};
  r.negative = {take("negative_prompt_embeds"), take("image_embeds")};
  out.sample = take("sample");
  return out;
}

// |a - b| over how far the sample went from the noise.
double distance(const std::vector<float>& a, const Case& c) {
  EXPECT_EQ(a.size(), c.sample.size());
  double error = 0, moved = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(double{a[i]} - double{c.sample[i]}, 2);
    moved += std::pow(double{c.sample[i]} - double{c.request.noise[i]}, 2);
  }
  return std::sqrt(error / moved);
}

TEST(VideoOnCpu, SamplesOfDiffusers) {
  for (const std::string& name : kModels) {
    const Case c = read_case(name);
    for (const auto& set : cpu::instruction_sets()) {
      const Context context(2, set.name);
      for (const DType compute : {DType::f32, DType::bf16}) {
        const auto engine = make_cpu_engine(context, compute);
        const auto model = open_model(kCases + name, *engine);
        const Sample sample = generate(*model, c.request);
        const double error = distance(sample.latent, c);
        EXPECT_LT(error, compute == DType::f32 ? 1e-5 : 0.03) << name << " " << set.name << " " << dtype_name(compute);
        EXPECT_GT(error, compute == DType::f32 ? 0 : 1e-4) << name;  // bf16 did round
        EXPECT_EQ(std::ssize(sample.calls), c.request.steps * 2 * model->config().layers);
      }
    }
  }
}

TEST(VideoOnCpu, BundledModelGivesTheClipOfItsSampler) {
  Case c = read_case("bundled");
  const auto& first = c.file.tensors.at("first");
  io::Image image{first.shape[0], first.shape[1], {}};
  image.rgb.resize(first.data.size());
  std::memcpy(image.rgb.data(), first.data.data(), first.data.size());
  const Context context(2);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto model = open_model(kBundled, *engine);
  c.request.condition = first_frame_condition(image, latent_size(model->config(), c.request.grid));
  const Sample sample = generate(*model, c.request);
  EXPECT_LT(distance(sample.latent, c), 2e-5);
  EXPECT_EQ(to_frames(sample.latent, latent_size(model->config(), c.request.grid)).size(), 5u);
}

TEST(VideoOnCpu, SameBitsForAnyThreadCount) {
  const Case c = read_case("i2v_image_branch");
  std::vector<float> once;
  for (const int threads : {1, 2, 5}) {
    const Context context(threads);
    const auto engine = make_cpu_engine(context, DType::f32);
    const auto model = open_model(kCases + "i2v_image_branch", *engine);
    Request request = c.request;
    request.settings = find_method("scope").settings();
    request.settings.dense_steps = 0;
    const auto latent = generate(*model, request).latent;
    if (once.empty()) once = latent;
    EXPECT_EQ(latent, once);
  }
}

TEST(VideoOnCpu, MortonOrderInterleavesWidthHeightAndTime) {
  using Places = std::vector<int32_t>;
  EXPECT_EQ(morton_places({2, 2, 2}), (Places{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(morton_places({1, 4, 4}), (Places{0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}));
  EXPECT_EQ(morton_places({3, 1, 3}), (Places{0, 1, 4, 2, 3, 5, 6, 7, 8}));  // without the numbers of no token
}

// What attention does not change is the same in any order of tokens.
TEST(VideoOnCpu, OrderOfTokensChangesNothing) {
  const Context context(2);
  for (const std::string& name : kModels) {
    const Case c = read_case(name);
    const auto engine = make_cpu_engine(context, DType::f32);
    const auto model = open_model(kCases + name, *engine);
    Method morton = find_method("dense");
    morton.morton = true;
    Case raster = c;
    raster.sample = generate(*model, c.request).latent;
    Request request = c.request;
    request.settings.method = &morton;
    const std::vector<float> latent = generate(*model, request).latent;
    EXPECT_LT(distance(latent, raster), 1e-5) << name;
    EXPECT_NE(latent, raster.sample) << name;  // sums run in another order
  }
}

TEST(VideoOnCpu, EveryLayerAndBranchHasItsOwnState) {
  const Case c = read_case("t2v_sharded");
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto model = open_model(kCases + "t2v_sharded", *engine);
  Request request = c.request;
  request.settings = find_method("scope").settings();
  request.settings.groups = request.settings.codes = 4;
  request.settings.dense_layers = 0;
  request.settings.dense_steps = 0.25;  // of 8: 2
  request.steps = 8;
  int64_t reports = 0;
  request.done = [&](const CallReport&) { ++reports; };
  const Sample sample = generate(*model, request);
  ASSERT_EQ(reports, 8 * 2 * 2);
  for (const CallReport& call : sample.calls) {
    const Reason expected = call.step < 2 ? Reason::dense_step : Reason::sparse;
    EXPECT_EQ(call.stats.reason, expected);
    if (expected != Reason::sparse) continue;
    EXPECT_EQ(call.stats.warm, call.step > 2)
        << "step " << call.step << ", layer " << call.layer << ", branch " << call.branch;
    EXPECT_LT(call.stats.density, 1.0);
  }
  // Keeping everything must be dense attention.
  request.settings.rho = 1;
  EXPECT_LT(distance(generate(*model, request).latent,
                     [&] {
                       Case dense = c;
                       request.settings = find_method("dense").settings();
                       dense.sample = generate(*model, request).latent;
                       return dense;
                     }()),
            1e-5);
}

// Six calls of self-attention on an engine: two steps' worth of places, whose reports are taken after each call or at once.
struct ManyCalls {
  explicit ManyCalls(Engine& on) : engine(on) {
    config.layers = 3;
    config.heads = 2;
    config.head_dim = 24;
    config.rope = {8, 8, 8};
    settings = find_method("scope").settings();
    settings.groups = settings.codes = 4;
    settings.dense_layers = 0;
    settings.dense_steps = 0;
  }
  std::vector<CallReport> run(bool at_once, float poison = 0) {
    SelfAttention attention(engine, config, settings, {3, 4, 5}, 2);
    std::vector<CallReport> all;
    const auto take = [&] {
      for (CallReport& report : attention.take_reports()) all.push_back(std::move(report));
    };
    outputs.clear();
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (int64_t branch = 0; branch < 2; ++branch) {
        const auto seed = static_cast<uint64_t>(10 * layer + branch);
        std::vector<float> q = make_noise(seed, 60 * 48);
        if (layer == 1 && branch == 1) q[7] += poison;
        const Buffer memory[] = {fill(q), fill(make_noise(seed + 100, 60 * 48)), fill(make_noise(seed + 200, 60 * 48))};
        const auto matrix = [&](int i) { return Matrix{memory[i].get(), engine.attention, 60, 48}; };
        attention.run({layer, 1, 4}, branch, matrix(0), matrix(1), matrix(2), matrix(0), {});
        std::vector<std::byte> out(static_cast<size_t>(60 * 48 * dtype_bytes(engine.attention)));
        if (poison == 0) engine.download(memory[0].get(), out.data(), std::ssize(out));
        outputs.push_back(out);
        held.insert(held.end(), std::begin(memory), std::end(memory));
        if (!at_once) take();
      }
    }
    take();
    return all;
  }
  void expect_alike() {
    const std::vector<CallReport> one_by_one = run(false);
    const auto first = outputs;
    const std::vector<CallReport> at_once = run(true);
    EXPECT_EQ(first, outputs);
    ASSERT_EQ(at_once.size(), 6u);
    std::set<double> totals;
    for (size_t i = 0; i < 6; ++i) {
      const CallReport &a = one_by_one[i], &b = at_once[i];
      EXPECT_EQ(std::tie(b.step, b.layer, b.branch),
                std::tuple(1, static_cast<int64_t>(i) / 2, static_cast<int64_t>(i) % 2));
      EXPECT_EQ(std::tie(a.stats.reason, a.stats.density, a.stats.total_density, a.stats.iterations),
                std::tie(b.stats.reason, b.stats.density, b.stats.total_density, b.stats.iterations));
      ASSERT_EQ(b.heads.size(), 2u);
      for (size_t h = 0; h < 2; ++h) {
        EXPECT_EQ(std::tie(a.heads[h].density, a.heads[h].head_budget),
                  std::tie(b.heads[h].density, b.heads[h].head_budget));
      }
      // Each has its own times, though all were read after the last.
      EXPECT_GT(b.stats.attend, 0);
      EXPECT_GT(b.stats.total, b.stats.attend);
      totals.insert(b.stats.total);
    }
    EXPECT_GT(totals.size(), 1u);
    EXPECT_NE(at_once[0].stats.density, at_once[1].stats.density);
  }

  Engine& engine;
  ModelConfig config;
  Settings settings;
  std::vector<std::vector<std::byte>> outputs;
  std::vector<Buffer> held;  // until the engine is done with them

 private:
  Buffer fill(const std::vector<float>& values) {
    const Buffer floats = uploaded(engine, values);
    Buffer memory = engine.allocate(60 * 48 * dtype_bytes(engine.attention));
    engine.convert({floats.get(), DType::f32, 60, 48}, {memory.get(), engine.attention, 60, 48});
    engine.wait();
    return memory;
  }
};

// The branches of guidance go on from one state under the methods that say so, and each from its own under the others.
TEST(VideoOnCpu, BranchesShareStatesAsTheirMethodSays) {
  const Case c = read_case("t2v_sharded");
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto model = open_model(kCases + "t2v_sharded", *engine);
  std::string sharing;
  for (const Method& method : methods_table()) {
    SCOPED_TRACE(method.name);
    if (method.shares_branches) sharing += std::string(method.name) + " ";
    Request request = c.request;
    request.steps = 3;
    request.settings = method.settings();
    if (request.settings.dense) continue;
    request.settings.groups = request.settings.codes = 4;
    request.settings.q_block = request.settings.k_block = 4;
    request.settings.rho = 0.4;
    request.settings.alpha = 0;
    request.settings.dense_layers = 0;
    request.settings.dense_steps = 0;
    request.settings.reuse_start = 1;
    const bool warms = row(request.settings.group).warm && row(request.settings.group).iterates;
    Method other = method;
    other.shares_branches = !method.shares_branches;
    std::vector<float> latents[2];
    for (const Method* each : {&method, static_cast<const Method*>(&other)}) {
      request.settings.method = each;
      const Sample sample = generate(*model, request);
      for (const CallReport& call : sample.calls) {
        EXPECT_EQ(call.stats.reason, Reason::sparse);
        if (call.step > 0) continue;
        EXPECT_EQ(call.stats.warm, call.branch == 1 && each->shares_branches && warms)
            << "layer " << call.layer << ", branch " << call.branch;
      }
      latents[each == &other] = sample.latent;
    }
    // Where no clustering starts from another (svoo), the steps that reuse one show whose it was.
    EXPECT_EQ(latents[0] == latents[1], !warms && request.settings.reuse_interval == 1);
  }
  EXPECT_EQ(sharing, "scope-paper svg2 svoo ");
}

TEST(VideoOnCpu, WatchedTensorsAreWhatAttentionTakes) {
  const Case c = read_case("t2v_sharded");
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto model = open_model(kCases + "t2v_sharded", *engine);
  Request request = c.request;
  int64_t seen = 0;
  request.wanted = [](int64_t step, int64_t, int64_t branch) { return step == 1 && branch == 1; };
  request.watch = [&](int64_t step, int64_t layer, int64_t branch, DType dtype, const std::vector<std::byte>& q,
                      const std::vector<std::byte>& k, const std::vector<std::byte>& v) {
    EXPECT_EQ(step, 1);
    EXPECT_EQ(branch, 1);
    EXPECT_EQ(layer, seen++);
    EXPECT_EQ(dtype, DType::f32);
    EXPECT_EQ(q.size(), 60u * 24 * 4);
    EXPECT_NE(q, k);
    EXPECT_NE(k, v);
  };
  generate(*model, request);
  EXPECT_EQ(seen, 2);
}

// A family with text among the tokens of its self-attention, as many as the prompt has numbers; the rest of kText is
// padding. It knows no latent: q, k and v are noise, NaN in the padding, and channel 0 of a value says whether its token is
// text.
constexpr int64_t kText = 8, kHeads = 2, kHeadDim = 12, kWidth = kHeads * kHeadDim;
constexpr std::array<int64_t, 3> kVideo = {4, 6, 5};
constexpr int64_t kVideoTokens = 120, kJointTokens = kVideoTokens + kText;

struct JointCall {
  TextTokens text;
  std::vector<float> q, k, v, out;  // [kJointTokens, kWidth]
  bool is_text(int64_t token) const { return token >= text.first && token < text.first + text.count; }
};

class JointPass final : public Pass {
 public:
  JointPass(int64_t first, std::vector<JointCall>& calls) : first_(first), calls_(calls) {}
  void add_prompt(const Prompt& prompt) override { texts_.push_back({first_, kText, kText - std::ssize(prompt.text)}); }
  void set_timesteps(std::span<const double>) override {}
  void forward(int64_t step, int64_t branch, const float*, const float*, const Attend& attend, float* velocity) override {
    const auto seed = static_cast<uint64_t>(10 * step + branch);
    const auto noise = [&](uint64_t purpose) { return make_noise(100 * purpose + seed, kJointTokens * kWidth); };
    JointCall call{texts_[static_cast<size_t>(branch)], noise(1), noise(2), noise(3), {}};
    for (int64_t i = 0; i < kJointTokens * kWidth; ++i) {
      const int64_t token = i / kWidth;
      const auto at = static_cast<size_t>(i);
      if (i % kHeadDim == 0) call.v[at] = call.is_text(token) ? 1 : 0;
      if (token >= kJointTokens - call.text.padding) call.q[at] = call.k[at] = call.v[at] = NAN;
    }
    call.out = call.q;
    const auto matrix = [](std::vector<float>& x) { return Matrix{x.data(), DType::f32, kJointTokens, kWidth}; };
    attend(0, matrix(call.out), matrix(call.k), matrix(call.v), matrix(call.out), call.text);
    calls_.push_back(std::move(call));
    std::fill_n(velocity, kVideoTokens, 0.0f);
  }

 private:
  int64_t first_;
  std::vector<JointCall>& calls_;
  std::vector<TextTokens> texts_;
};

class JointModel final : public Model {
 public:
  JointModel(Engine& engine, int64_t first)
      : Model(engine, {.layers = 1,
                       .heads = kHeads,
                       .head_dim = kHeadDim,
                       .rope = {4, 4, 4},
                       .rope_max = 16,
                       .patch = {1, 1, 1},
                       .latent_channels = 1,
                       .text_dim = 1,
                       .text_tokens = kText}),
        first_(first) {}
  std::unique_ptr<Pass> start(const std::array<int64_t, 3>&, bool) const override {
    return std::make_unique<JointPass>(first_, calls);
  }
  mutable std::vector<JointCall> calls;

 private:
  int64_t first_;
};

// Attention of one head's query over every valid key, in f64.
std::vector<double> plain_attention(const JointCall& call, int64_t query, int64_t head) {
  const auto at = [&](const std::vector<float>& x, int64_t token, int64_t c) {
    return double{x[static_cast<size_t>(token * kWidth + head * kHeadDim + c)]};
  };
  std::vector<double> out(kHeadDim);
  double sum = 0;
  for (int64_t key = 0; key < kJointTokens - call.text.padding; ++key) {
    double dot = 0;
    for (int64_t c = 0; c < kHeadDim; ++c) dot += at(call.q, query, c) * at(call.k, key, c);
    const double weight = std::exp(dot / std::sqrt(double{kHeadDim}));
    sum += weight;
    for (int64_t c = 0; c < kHeadDim; ++c) out[static_cast<size_t>(c)] += weight * at(call.v, key, c);
  }
  for (double& x : out) x /= sum;
  return out;
}

TEST(VideoOnCpu, TextAmongTheTokensOfSelfAttention) {
  const Context context(2);
  const auto engine = make_cpu_engine(context, DType::f32);
  for (const bool text_first : {false, true}) {
    Request request;
    request.grid = kVideo;
    request.steps = 3;
    request.guidance = 2;
    request.noise = make_noise(1, kVideoTokens);
    // Padding stands at the end, so that text before the video has none.
    request.prompt.text.resize(text_first ? kText : 5);
    request.negative.text.resize(text_first ? kText : 7);
    for (const char* kept : {"all, dense", "all", "few"}) {
      SCOPED_TRACE(fmt::format("keys kept: {}; text {}", kept, text_first ? "first" : "last"));
      const bool dense = std::string(kept) == "all, dense", sparse = std::string(kept) == "few";
      request.settings = find_method(dense ? "dense" : "scope").settings();
      if (!dense) {
        request.settings.groups = request.settings.codes = 8;
        request.settings.dense_layers = 0;
        request.settings.dense_steps = 0;
        set_setting(request.settings, "rho", "1");
      }
      if (sparse) set_setting(request.settings, "target_density", "0.1");
      const JointModel model(*engine, text_first ? 0 : kVideoTokens);
      const Sample sample = generate(model, request);
      ASSERT_EQ(model.calls.size(), 6u);
      double moved = 0;  // by leaving keys out
      for (size_t i = 0; i < model.calls.size(); ++i) {
        const JointCall& call = model.calls[i];
        EXPECT_EQ(sample.calls[i].stats.reason == Reason::sparse, !dense);
        const int64_t valid = kJointTokens - call.text.padding;
        EXPECT_EQ(call.text.padding, kText - std::ssize((i % 2 == 0 ? request.prompt : request.negative).text));
        for (int64_t query = 0; query < kJointTokens; ++query) {
          for (int64_t head = 0; head < kHeads; ++head) {
            const float* out = call.out.data() + query * kWidth + head * kHeadDim;
            if (query >= valid) {
              for (int64_t c = 0; c < kHeadDim; ++c) EXPECT_EQ(out[c], 0);
              continue;
            }
            const auto expected = plain_attention(call, query, head);
            // Keys that are left out leave the kept ones a larger share, and the text's are never left out.
            EXPECT_GT(out[0], expected[0] - 1e-5);
            for (size_t c = 0; c < expected.size(); ++c) {
              if (!sparse || call.is_text(query)) {
                EXPECT_NEAR(out[c], expected[c], 1e-5);
              }
              moved = std::max(moved, std::abs(double{out[c]} - expected[c]));
            }
          }
        }
      }
      EXPECT_EQ(moved > 0.1, sparse);
    }
  }
}

std::string refusal(const std::function<void()>& body, Status status) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

void expect_refusal(const std::function<void()>& body, Status status, const std::string& words) {
  const std::string text = refusal(body, status);
  EXPECT_NE(text.find(words), std::string::npos) << text << "\ndoes not say: " << words;
}

TEST(VideoOnCpu, RequestsThatDoNotFit) {
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  const auto model = open_model(kCases + "i2v_image_branch", *engine);
  const auto with = [&](const std::function<void(Request&)>& change, Status status, const std::string& words) {
    Case c = read_case("i2v_image_branch");
    change(c.request);
    expect_refusal([&] { generate(*model, c.request); }, status, words);
  };
  with([](Request& r) { r.noise.pop_back(); }, Status::shape, "noise");
  with([](Request& r) { r.condition.clear(); }, Status::shape, "condition: got 0 numbers, expected [5, 3, 8, 10]");
  with([](Request& r) { r.grid = {3, 4, 2000}; }, Status::shape, "3x4x2000");
  with([](Request& r) { r.grid = {0, 4, 5}; }, Status::shape, "0x4x5");
  with([](Request& r) { r.prompt.text.resize(6); }, Status::shape, "padded to 512");
  with([](Request& r) { r.prompt.text.pop_back(); }, Status::shape, "rows of 6");
  with([](Request& r) { r.prompt.image.clear(); }, Status::shape, "image_embeds");
  with([](Request& r) { r.negative = {}; }, Status::shape, "prompt_embeds");
  with([](Request& r) { r.steps = 0; }, Status::invalid_argument, "steps");
  with([](Request& r) { r.shift = 0; }, Status::invalid_argument, "shift");
  with([](Request& r) { r.guidance = NAN; }, Status::invalid_argument, "guidance");
  with([](Request& r) { r.noise[7] = NAN; }, Status::non_finite, "NaN");
  const auto plain = open_model(kCases + "t2v_sharded", *engine);
  Case c = read_case("t2v_sharded");
  c.request.prompt.image = {1, 2, 3};
  expect_refusal([&] { generate(*plain, c.request); }, Status::shape, "takes none");
}

// A copy of a model's folder that a test may spoil.
class Folder {
 public:
  explicit Folder(const std::string& name) : path_(fs::temp_directory_path() / fmt::format("scope_video_{}", ::getpid())) {
    fs::remove_all(path_);
    fs::copy(kCases + name, path_, fs::copy_options::recursive);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ / name; }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path_ / name) << text; }
  std::string read(const std::string& name) const {
    std::ifstream in(path_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void expect(const std::string& words, Status status = Status::format) const {
    const Context context(1);
    const auto engine = make_cpu_engine(context, DType::f32);
    expect_refusal([&] { open_model(path_, *engine); }, status, words);
  }

 private:
  fs::path path_;
};

const std::string kOne = "diffusion_pytorch_model.safetensors";

// Reads, changes and writes the weights.
void spoil(const Folder& folder, const std::function<void(std::map<std::string, io::Array>&)>& change,
           const std::string& name = kOne) {
  io::SafeTensors file = io::read_safetensors(folder.file(name));
  change(file.tensors);
  io::write_safetensors(folder.file(name), file);
}

TEST(VideoOnCpu, SpoiledCheckpoints) {
  const std::string name = "blocks.1.attn2.add_k_proj.weight";
  {
    const Folder folder("i2v_image_branch");
    const std::string all = folder.read(kOne);
    folder.write(kOne, all.substr(0, all.size() - 1));
    folder.expect(kOne);
    folder.write(kOne, all.substr(0, 100));
    folder.expect(kOne);
    fs::remove(folder.file(kOne));
    folder.expect(kOne, Status::io);
  }
  {
    const Folder folder("i2v_image_branch");
    spoil(folder, [&](auto& tensors) {
      auto node = tensors.extract(name);
      node.key() = "blocks.1.attn2.add_key.weight";
      tensors.insert(std::move(node));
    });
    folder.expect("tensor 'blocks.1.attn2.add_key.weight': config.json implies no such tensor");
  }
  {
    const Folder folder("i2v_image_branch");
    spoil(folder, [&](auto& tensors) { tensors.erase(name); });
    folder.expect("tensor '" + name + "' of shape [24, 24] is missing");
  }
  {
    const Folder folder("i2v_image_branch");
    spoil(folder, [&](auto& tensors) { tensors.at(name).shape = {12, 48}; });
    folder.expect("tensor '" + name + "': got shape [12, 48], config.json implies [24, 24]");
    spoil(folder, [&](auto& tensors) {
      tensors.at(name).shape = {24, 24};
      tensors.at(name).type = io::ElementType::i16;
    });
    folder.expect("tensor '" + name + "': got i16");
  }
  {
    const Folder folder("i2v_image_branch");  // what old exports carry is no part of the model
    spoil(folder, [&](auto& tensors) {
      tensors["blocks.1.attn2.norm_added_q.weight"] = tensors.at("blocks.1.attn2.norm_k.weight");
    });
    const Context context(1);
    const auto engine = make_cpu_engine(context, DType::f32);
    EXPECT_NO_THROW(open_model(folder.file("."), *engine));
  }
  {
    const Folder folder("t2v_sharded");
    const std::string index = kOne + ".index.json", text = folder.read(index),
                      last = "diffusion_pytorch_model-00003-of-00003.safetensors";
    fs::rename(folder.file(last), folder.file("kept"));
    folder.expect(last, Status::io);
    fs::rename(folder.file("kept"), folder.file(last));
    folder.write(index, "{\"weight_map\": {\"a\": \"../x.safetensors\"}}");
    folder.expect("'../x.safetensors'");
    folder.write(index, "{\"weight_map\": 3}");
    folder.expect("weight_map");
    folder.write(index, text.substr(0, text.size() / 2));
    folder.expect(index);
    // A tensor that is in another shard than the index says.
    std::string moved = text;
    const std::string first = "diffusion_pytorch_model-00001-of-00003.safetensors";
    const size_t at = moved.find(first);
    ASSERT_NE(at, std::string::npos);
    moved.replace(at, first.size(), last);
    folder.write(index, moved);
    folder.expect("puts it elsewhere");
  }
}

TEST(VideoOnCpu, ConfigsThatAreWrongOrContradictTheWeights) {
  const Folder folder("i2v_image_branch");
  const std::string good = folder.read("config.json");
  const auto with = [&](const std::string& from, const std::string& to, const std::string& words) {
    std::string text = good;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    folder.write("config.json", text);
    folder.expect(words);
  };
  with("\"ffn_dim\": 20", "\"ffn_dim\": 21", "ffn.net.");
  with("\"num_layers\": 2", "\"num_layers\": 3", "blocks.2.");
  with("\"num_layers\": 2", "\"num_layers\": 1", "tensor 'blocks.1.");
  with("\"in_channels\": 9", "\"in_channels\": 8", "patch_embedding.weight");
  with("\"num_layers\": 2", "\"num_layers\": -2", "num_layers: got -2, expected an integer in 1..1024");
  with("\"num_layers\": 2", "\"num_layers\": 2.5", "num_layers: got 2.5");
  with("\"num_layers\": 2", "\"num_layers\": 18446744073709551615", "num_layers");
  with("\"num_layers\": 2", "\"num_layers\": null", "num_layers: got null");
  with("\"num_layers\": 2", "\"num_layers\": \"2\"", "num_layers");
  with("\"attention_head_dim\": 12", "\"attention_head_dim\": 13", "attention_head_dim: got 13, expected an even");
  with("\"attention_head_dim\": 12", "\"attention_head_dim\": 4", "attention_head_dim");
  with("\"cross_attn_norm\": true", "\"cross_attn_norm\": 1", "cross_attn_norm");
  with("\"eps\": 1e-06", "\"eps\": -1", "eps");
  with("\"added_kv_proj_dim\": 24", "\"added_kv_proj_dim\": 12", "added_kv_proj_dim: got 12");
  with("\"added_kv_proj_dim\": 24", "\"added_kv_proj_dim\": null", "attn2.add_k_proj");
  with("\"out_channels\": 4", "\"out_channels\": 40", "in_channels: got 9");
  with("\"ffn_dim\": 20", "\"ffn_dim\": 20, \"window\": 3", "'window': unknown key");
  with("\"ffn_dim\": 20", "\"ffn_dim\": 20, \"ffn_dim\": 20", "key \"ffn_dim\" appears twice");
  with("WanTransformer3DModel", "WanVACETransformer3DModel",
       "_class_name: got \"WanVACETransformer3DModel\", expected \"WanTransformer3DModel\"");
  with("rms_norm_across_heads", "rms_norm", "qk_norm");
  with("{", "[{", "config.json");
  folder.write("config.json", std::string(100000, '['));
  folder.expect("config.json");
  folder.write("config.json", "");
  folder.expect("config.json");
  fs::remove(folder.file("config.json"));
  folder.expect("config.json", Status::io);
}

TEST(VideoOnCpu, ConfigDefaultsAreThoseOfDiffusers) {
  const wan::Config config =
      wan::parse_config(R"({"_class_name": "WanTransformer3DModel", "qk_norm": "rms_norm_across_heads"})");
  EXPECT_EQ(config, wan::Config{});
  EXPECT_EQ(config.dim(), 5120);
  EXPECT_EQ(config.rope(), (std::vector<int64_t>{44, 42, 42}));
}

TEST(VideoOnCpu, NoteFiles) {
  const Notes notes = parse_notes(R"({"latent": "rgb", "shift": 3.0, "grid": [13, 20, 32]})");
  EXPECT_TRUE(notes.rgb);
  EXPECT_EQ(notes.shift, 3.0);
  EXPECT_EQ(notes.grid, (std::array<int64_t, 3>{13, 20, 32}));
  EXPECT_EQ(notes.steps, 20);
  EXPECT_TRUE(notes.prompts);
  EXPECT_EQ(parse_notes(R"({"steps": 25})").steps, 25);
  EXPECT_FALSE(parse_notes(R"({"prompts": false})").prompts);
  for (const char* bad : {"", "[]", R"({"latent": "vae"})", R"({"shift": 0})", R"({"shift": "3"})", R"({"grid": [1, 2]})",
                          R"({"grid": [1, 2, 0]})", R"({"grid": [1, 2, -3]})", R"({"grid": [1, 2, 3.5]})", R"({"steps": 0})",
                          R"({"steps": 2.5})", R"({"prompts": 0})", R"({"other": 1})", R"({"steps": 25, "steps": 25})"}) {
    EXPECT_THROW(parse_notes(bad), Error) << bad;
  }
  EXPECT_TRUE(read_notes(kBundled).rgb);
  EXPECT_FALSE(read_notes(kCases + "t2v_sharded").rgb);
}

TEST(VideoOnCpu, NoiseIsNormalAndNamedByItsSeed) {
  const auto a = make_noise(7, 200001), b = make_noise(8, 200001);
  double mean = 0, square = 0, fourth = 0, both = 0, neighbours = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i];
    mean += x;
    square += x * x;
    fourth += x * x * x * x;
    both += x * b[i];
    if (i > 0) neighbours += x * a[i - 1];
  }
  const auto n = static_cast<double>(a.size());
  EXPECT_NEAR(mean / n, 0, 0.01);
  EXPECT_NEAR(square / n, 1, 0.015);
  EXPECT_NEAR(fourth / n, 3, 0.12);
  EXPECT_NEAR(both / n, 0, 0.01);
  EXPECT_NEAR(neighbours / n, 0, 0.01);
  EXPECT_EQ(make_noise(7, 1000), std::vector<float>(a.begin(), a.begin() + 1000));
  // Frozen: seeds name the same noise in every version.
  EXPECT_FLOAT_EQ(a[0], -3.258746499f);
  EXPECT_FLOAT_EQ(a[1], -1.271917265f);
}

TEST(VideoOnCpu, FramesAndTheFirstFrameAreInverse) {
  const std::array<int64_t, 3> size = {3, 4, 6};
  io::Image image{8, 12, std::vector<uint8_t>(8 * 12 * 3)};
  for (size_t i = 0; i < image.rgb.size(); ++i) image.rgb[i] = static_cast<uint8_t>(i * 7);
  const auto condition = first_frame_condition(image, size);
  ASSERT_EQ(condition.size(), 16u * 3 * 24);
  const std::vector<float> latent(condition.begin() + 4 * 3 * 24, condition.end());
  const auto frames = to_frames(latent, size);
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(frames[0], image);
  EXPECT_EQ(frames[2].rgb, std::vector<uint8_t>(image.rgb.size(), 128));  // a latent of 0 is grey
  const auto guide = [&](int64_t channel, int64_t t, int64_t y, int64_t x) {
    return condition[static_cast<size_t>(((channel * 3 + t) * 4 + y) * 6 + x)];
  };
  EXPECT_EQ(guide(0, 0, 1, 1), 1);
  EXPECT_EQ(guide(0, 1, 1, 1), 0);
  EXPECT_EQ(guide(1, 1, 0, 0), 0.5f);
  EXPECT_FLOAT_EQ(guide(2, 0, 3, 0), 1.5f / 32);
  EXPECT_FLOAT_EQ(guide(3, 0, 0, 0), -2.5f / 32);
  // Blue of row 1, column 2: channel 4 * 2 + 2 * 1 + 0 at (0, 1).
  EXPECT_FLOAT_EQ(latent[static_cast<size_t>(10 * 3 * 24 + 1)], (static_cast<float>(image.pixel(1, 2)[2]) / 255 - 0.5f) * 4);
  expect_refusal(
      [&] {
        first_frame_condition({8, 10, std::vector<uint8_t>(240)}, size);
      },
      Status::shape, "got 10 x 8 pixels, this grid needs 12 x 8");
}

TEST(VideoOnCpu, ReportsOfManyCallsAreThoseOfEach) {
  const Context context(1);
  const auto engine = make_cpu_engine(context, DType::f32);
  ManyCalls calls(*engine);
  calls.expect_alike();
  expect_refusal([&] { calls.run(true, NAN); }, Status::non_finite, "step 1, layer 1, negative prompt: q: NaN");
  // A report has room until it is taken.
  SelfAttention attention(*engine, calls.config, calls.settings, {3, 4, 5}, 1);
  const Buffer memory = uploaded(*engine, make_noise(1, 60 * 48)), out = engine->allocate(60 * 48 * 4);
  const Matrix x{memory.get(), DType::f32, 60, 48}, to{out.get(), DType::f32, 60, 48};
  const auto run = [&] { attention.run({0, 1, 4}, 0, x, x, x, to, {}); };
  for (int i = 0; i < 3; ++i) run();
  expect_refusal(run, Status::internal, "the reports of 3 calls were not taken");
  EXPECT_EQ(attention.take_reports().size(), 3u);
  run();
  EXPECT_EQ(attention.take_reports().size(), 1u);
}

// On a GPU: the same samples as the CPU's f32 to bf16's rounding, which the CPU's own bf16 measures.
class VideoOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::testing_cuda() || !test::backend().present()) GTEST_SKIP() << "[GPU tests skipped]";
  }
};

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    error += std::pow(double{a[i]} - double{b[i]}, 2);
    size += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(error / size);
}

// A folder with a random model of which every width is a multiple of 8.
wan::Config write_random_model(const std::string& folder, bool image) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder + "/config.json")
      << R"({"_class_name": "WanTransformer3DModel", "qk_norm": "rms_norm_across_heads", "num_attention_heads": 2,
             "attention_head_dim": 24, "num_layers": 3, "in_channels": )"
      << (image ? 10 : 4) << R"(, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 72)"
      << (image ? R"(, "image_dim": 40, "added_kv_proj_dim": 48, "pos_embed_seq_len": 14)" : R"(, "cross_attn_norm": false)")
      << "}";
  const wan::Config config = read_config(folder, wan::parse_config);
  io::SafeTensors file;
  uint64_t seed = 1;
  wan::Layers layers;
  for (const auto& [name, shape, place, on_host, large] : wan::list_tensors(config, layers).tensors) {
    int64_t n = 1;
    for (const int64_t side : shape) n *= side;
    std::vector<float> values = make_noise(seed++, n);
    const double scale = shape.size() > 1 ? 1 / std::sqrt(static_cast<double>(n / shape[0])) : 0.3;
    for (float& x : values) x = name.find("norm") != std::string::npos ? 1 + 0.2f * x : x * static_cast<float>(scale);
    io::Array array{io::ElementType::f32, shape, std::vector<std::byte>(values.size() * 4)};
    std::memcpy(array.data.data(), values.data(), array.data.size());
    file.tensors[name] = array;
  }
  io::write_safetensors(folder + "/" + kOne, file);
  return config;
}

TEST_F(VideoOnDevice, SamplesOfTheCpu) {
  const Context cpu(2), gpu(ContextOptions{.backend = "cuda"});
  for (const bool image : {false, true}) {
    const std::string folder = fs::temp_directory_path() / fmt::format("scope_video_gpu_{}", ::getpid());
    const wan::Config config = write_random_model(folder, image);
    Request request;
    request.grid = {3, 5, 7};
    request.steps = 4;
    request.guidance = 3;
    const auto size = latent_size(config.common(), request.grid);
    const int64_t volume = size[0] * size[1] * size[2];
    request.noise = make_noise(100, config.out_channels * volume);
    request.condition = make_noise(101, (config.in_channels - config.out_channels) * volume);
    const auto prompt = [&](uint64_t seed) {
      return Prompt{make_noise(seed, (image ? 512 : 9) * config.text_dim),
                    image ? make_noise(seed + 1, 14 * config.image_dim) : std::vector<float>{}};
    };
    request.prompt = prompt(102);
    request.negative = prompt(104);
    Method morton = find_method("dense");
    morton.morton = true;
    for (const std::string method : {"dense", "scope", "dense in Morton order"}) {
      request.settings = find_method(method == "scope" ? "scope" : "dense").settings();
      if (method == "dense in Morton order") request.settings.method = &morton;
      if (!request.settings.dense) request.settings.rho = 1;  // every key, through the sparse path: rounding alone remains
      const auto run = [&](std::unique_ptr<Engine> engine) {
        const auto model = open_model(folder, *engine);
        return generate(*model, request);
      };
      const auto exact = run(make_cpu_engine(cpu, DType::f32)).latent;
      const double own = difference(run(make_cpu_engine(cpu, DType::bf16)).latent, exact);
      const Sample sample = run(make_cuda_engine(gpu));
      const double error = difference(sample.latent, exact);
      EXPECT_LT(error, 2 * own + 1e-3) << method << (image ? " with images" : "");
      EXPECT_GT(error, 0);
      EXPECT_EQ(sample.latent, run(make_cuda_engine(gpu)).latent) << "runs repeat";
      fmt::print("{}{}: relative error {:.5f}, the CPU's bf16 {:.5f}\n", method, image ? " with images" : "", error, own);
    }
    fs::remove_all(folder);
  }
}

TEST_F(VideoOnDevice, ReportsOfManyCallsAreThoseOfEach) {
  const Context gpu(ContextOptions{.backend = "cuda"});
  const auto engine = make_cuda_engine(gpu);
  ManyCalls calls(*engine);
  calls.expect_alike();
  expect_refusal([&] { calls.run(true, NAN); }, Status::non_finite, "step 1, layer 1, negative prompt: q or k: a row");
}

TEST_F(VideoOnDevice, BundledExampleIsReproduced) {
  const io::SafeTensors file = io::read_safetensors(kBundled + "/examples.safetensors");
  const Context gpu(ContextOptions{.backend = "cuda"});
  const auto engine = make_cuda_engine(gpu);
  const auto model = open_model(kBundled, *engine);
  Request request;
  request.grid = {13, 20, 32};
  const auto size = latent_size(model->config(), request.grid);
  const auto& truth = file.tensors.at("truth");
  io::Image first{80, 128, std::vector<uint8_t>(80 * 128 * 3)};
  std::memcpy(first.rgb.data(), truth.data.data(), first.rgb.size());
  request.condition = first_frame_condition(first, size);
  request.noise = to_f32(file.tensors.at("noise"));
  const auto prompts = to_f32(file.tensors.at("prompt_embeds"));
  request.prompt.text.assign(prompts.begin(), prompts.begin() + 8 * 32);
  const auto expected = to_f32(file.tensors.at("dense"));
  for (const char* method : {"dense", "scope"}) {
    request.settings = find_method(method).settings();
    if (!request.settings.dense) set_setting(request.settings, "target_density", "0.2");
    generate(*model, request);  // warms up
    const Sample sample = generate(*model, request);
    double mse = 0;
    for (size_t i = 0; i < expected.size(); ++i) mse += std::pow((double{sample.latent[i]} - double{expected[i]}) / 4, 2);
    const double psnr = -10 * std::log10(mse / static_cast<double>(expected.size()));
    fmt::print("{}: {:.2f} dB against the committed f32 sample, {:.3f} s for 20 steps\n", method, psnr, sample.seconds);
    EXPECT_GT(psnr, request.settings.dense ? 38 : 28) << method;
  }
}

}  // namespace
}  // namespace scope::video
