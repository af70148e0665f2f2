// Tests models without weights: the normals that stand for them, what they take of memory, and the times of their layers.
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cases.h"
#include "core/normal.h"
#include "methods/methods.h"
#include "video/footprint.h"
#include "video/sampler.h"

namespace scope::video {
namespace {

const std::string kWan =
    R"({"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 3,
        "ffn_dim": 256, "text_dim": 40, "in_channels": 16, "out_channels": 16, "freq_dim": 32, "eps": 1e-6,
        "qk_norm": "rms_norm_across_heads"})";
const std::string kHunyuan =
    R"({"_class_name": "HunyuanVideoTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 2,
        "num_single_layers": 3, "num_refiner_layers": 1, "rope_axes_dim": [16, 24, 24], "text_embed_dim": 40,
        "pooled_projection_dim": 24, "qk_norm": "rms_norm"})";
constexpr std::array<int64_t, 3> kGrid = {3, 4, 5};

class Drawn : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::backend().present()) GTEST_SKIP() << "[GPU tests skipped]";
    context_ = std::make_unique<Context>(ContextOptions{.backend = test::testing_cuda() ? "cuda" : "cpu", .threads = 2});
    engine_ = make_engine(*context_, DType::f32);
  }

  std::vector<float> read(const void* from, int64_t n) {
    std::vector<float> host(static_cast<size_t>(n));
    engine_->download(from, host.data(), n * 4);
    return host;
  }

  std::vector<float> draw(const RandomStream& from, float mean, float deviation, int64_t n) {
    const Buffer memory = engine_->allocate((n + 1) * 4);
    const float guard = 77;
    engine_->upload(&guard, static_cast<float*>(memory.get()) + n, 4);
    engine_->draw(from, mean, deviation, {memory.get(), DType::f32, 1, n});
    std::vector<float> host = read(memory.get(), n + 1);
    EXPECT_EQ(host.back(), guard) << n << " numbers";
    host.pop_back();
    return host;
  }

  // The matrix [out, in] behind weights: what a linear layer makes of the unit vectors.
  std::vector<float> matrix(const Weights& weights) {
    std::vector<float> units(static_cast<size_t>(weights.in * weights.in));
    for (int64_t i = 0; i < weights.in; ++i) units[static_cast<size_t>(i * weights.in + i)] = 1;
    const Buffer x = uploaded(*engine_, units), y = engine_->allocate(weights.in * weights.out * 4);
    engine_->linear({&weights, nullptr}, {x.get(), DType::f32, weights.in, weights.in},
                    {y.get(), DType::f32, weights.in, weights.out});
    return read(y.get(), weights.in * weights.out);
  }

  // The velocity that a model of this seed gives for the same inputs.
  std::vector<float> forward(const std::string& config, uint64_t seed) {
    const auto model = make_model(config, drawn_tensors(seed), *engine_);
    const ModelConfig& common = model->config();
    const auto pass = model->start(kGrid, false);
    Prompt prompt{make_noise(1, 7 * common.text_dim), {}, make_noise(2, common.pooled_dim), 6};
    pass->add_prompt(prompt);
    pass->set_timesteps(std::vector<double>{900, 500});
    SelfAttention attention(*engine_, common, parse("dense"), kGrid, 1);
    const auto size = latent_size(common, kGrid);
    const int64_t n = common.latent_channels * size[0] * size[1] * size[2];
    const Buffer latent = uploaded(*engine_, make_noise(3, n)), velocity = engine_->allocate(n * 4);
    const auto attend = [&](int64_t layer, Matrix q, Matrix k, Matrix v, Matrix out, const TextTokens& text) {
      attention.run({layer, 1, 2}, 0, q, k, v, out, text);
    };
    pass->forward(1, 0, static_cast<float*>(latent.get()), nullptr, attend, static_cast<float*>(velocity.get()));
    return read(velocity.get(), n);
  }
  static Settings parse(const char* method) { return find_method(method).settings(); }

  std::unique_ptr<Context> context_;
  std::unique_ptr<Engine> engine_;
};

struct Moments {
  double mean = 0, variance = 0, skew = 0, kurtosis = 0, most = 0;
};
Moments moments(const std::vector<float>& x) {
  Moments m;
  const auto n = static_cast<double>(x.size());
  for (const float v : x) m.mean += v / n;
  for (const float v : x) {
    const double d = v - m.mean;
    m.variance += d * d / n;
    m.skew += d * d * d / n;
    m.kurtosis += d * d * d * d / n;
    m.most = std::max(m.most, std::abs(d));
  }
  m.skew /= std::pow(m.variance, 1.5);
  m.kurtosis /= m.variance * m.variance;
  return m;
}

TEST_F(Drawn, NumbersAreNormalAndRepeat) {
  const RandomStream stream{.seed = 5, .subspace = 3, .purpose = 5};
  const int64_t n = 1 << 20;
  const auto x = draw(stream, 1.5f, 0.25f, n);
  const Moments m = moments(x);  // bounds: five deviations of each
  EXPECT_NEAR(m.mean, 1.5, 5 * 0.25 / 1024);
  EXPECT_NEAR(m.variance, 0.0625, 5 * 0.0625 * std::sqrt(2) / 1024);
  EXPECT_NEAR(m.skew, 0, 5 * std::sqrt(6) / 1024);
  EXPECT_NEAR(m.kurtosis, 3, 5 * std::sqrt(24) / 1024);
  EXPECT_GT(m.most, 0.25 * 4.2);
  EXPECT_LT(m.most, 0.25 * 6.8);
  double neighbours = 0;
  for (size_t i = 1; i < x.size(); ++i) neighbours += (x[i] - 1.5) * (x[i - 1] - 1.5) / 0.0625 / static_cast<double>(n);
  EXPECT_NEAR(neighbours, 0, 5.0 / 1024);
  EXPECT_EQ(draw(stream, 1.5f, 0.25f, n), x);
  for (const RandomStream& other :
       {RandomStream{.seed = 6, .subspace = 3, .purpose = 5}, RandomStream{.seed = 5, .subspace = 4, .purpose = 5}}) {
    EXPECT_NE(draw(other, 1.5f, 0.25f, n), x);
  }
  for (const int64_t fewer : {1, 2, 3, 5, 127, 4095, 4097}) {
    EXPECT_EQ(draw(stream, 1.5f, 0.25f, fewer), std::vector<float>(x.begin(), x.begin() + fewer)) << fewer;
  }
}

TEST_F(Drawn, NumbersAreThoseOfTheStream) {
  const RandomStream stream{.seed = 9, .tensor = 2, .purpose = 5};
  const auto x = draw(stream, 0, 1, 4000);
  for (uint64_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(x[i], four_normals(stream, i / 4).number[i % 4], 2e-6) << i;
  }
}

TEST_F(Drawn, WeightsAreTheStreamsNumbersRowAfterRow) {
  const RandomStream stream{.seed = 2, .purpose = 5};
  for (const int64_t in : {8, 13, 96}) {  // a device pads 13 inputs to 16
    const int64_t out = 72;
    const auto weights = engine_->draw_weights(stream, 0.5f, out, in);
    ASSERT_EQ(weights->in, in);
    ASSERT_EQ(weights->out, out);
    const auto turned = matrix(*weights), flat = draw(stream, 0, 0.5f, out * in);
    for (int64_t i = 0; i < out * in; ++i) {
      const float want = flat[static_cast<size_t>(i)], got = turned[static_cast<size_t>(i % in * out + i / in)];
      ASSERT_NEAR(got, want, 0x1p-8 * std::abs(want) + 1e-7) << in << " inputs, number " << i;
    }
    EXPECT_EQ(matrix(*engine_->draw_weights(stream, 0.5f, out, in)), turned);
  }
}

// Matrices keep the size of what goes through them, norms are near 1 and biases near 0; no two tensors share numbers.
TEST_F(Drawn, TensorsByTheirKind) {
  const int64_t in = 96, left = 32, out = 64;
  const Weights *whole = nullptr, *again = nullptr, *first = nullptr, *second = nullptr, *kept = nullptr;
  const float *norm = nullptr, *bias = nullptr;
  TensorList list;
  list.tensors = {{"a.weight", {out, in}, &whole},
                  {"b.weight", {out, in / 4, 2, 2}, &again},
                  {"c.weight", {out, in}, SplitMatrix{left, &first, &second}},
                  {"norm.weight", {5000}, &norm},
                  {"a.bias", {1, 2, 2500}, &bias},
                  {"host.weight", {out, in}, &kept, true}};
  const auto host = make_cpu_engine(*context_, DType::f32);
  const LoadedTensors drawn = drawn_tensors(3)(list, *engine_, *host);
  ASSERT_EQ(drawn.matrices.size(), 5u);
  ASSERT_EQ(drawn.vectors.size(), 2u);
  EXPECT_EQ(first->in, left);
  EXPECT_EQ(second->in, in - left);
  const auto a = matrix(*whole), b = matrix(*again), c = matrix(*first), d = matrix(*second);
  EXPECT_NE(a, b);
  int64_t same = 0;  // inputs of the first output
  for (int64_t i = 0; i < left; ++i) same += c[static_cast<size_t>(i * out)] == d[static_cast<size_t>(i * out)] ? 1 : 0;
  EXPECT_LT(same, left);
  for (const auto& x : {a, b, c, d}) {
    const double spread = 5.0 / std::sqrt(static_cast<double>(x.size())), variance = 1.0 / static_cast<double>(in);
    EXPECT_NEAR(moments(x).mean, 0, spread * std::sqrt(variance));
    EXPECT_NEAR(moments(x).variance, variance, spread * std::sqrt(2) * variance);
  }
  const auto scales = read(norm, 5000), shifts = read(bias, 5000);
  EXPECT_NEAR(moments(scales).mean, 1, 0.002);
  EXPECT_NEAR(moments(shifts).mean, 0, 0.002);
  for (const auto& x : {scales, shifts}) EXPECT_NEAR(moments(x).variance, 0.0004, 0.00005);
  std::vector<float> unit(static_cast<size_t>(in)), row(static_cast<size_t>(out));
  unit[0] = 1;
  host->linear({kept, nullptr}, {unit.data(), DType::f32, 1, in}, {row.data(), DType::f32, 1, out});  // the host's memory
  EXPECT_NEAR(moments(row).variance, 1.0 / static_cast<double>(in), 5 * std::sqrt(2.0 / out) / static_cast<double>(in));
}

TEST_F(Drawn, ModelsAreThoseOfTheirSeed) {
  for (const std::string& config : {kWan, kHunyuan}) {
    const auto x = forward(config, 4);
    const Moments m = moments(x);
    EXPECT_TRUE(std::isfinite(m.variance));
    EXPECT_GT(m.variance, 0.05);  // neither lost nor blown up by the layers
    EXPECT_LT(m.variance, 20);
    EXPECT_EQ(forward(config, 4), x);
    EXPECT_NE(forward(config, 5), x);
  }
}

TEST_F(Drawn, LinearLayersAreTimed) {
  const auto weights = engine_->draw_weights({.purpose = 5}, 0.1f, 64, 48);
  const Buffer x = engine_->allocate(300 * 48 * 4), y = engine_->allocate(300 * 64 * 4);
  engine_->draw({.purpose = 4}, 0, 1, {x.get(), DType::f32, 300, 48});
  const auto run = [&](int64_t rows) {
    engine_->linear({weights.get(), nullptr}, {x.get(), DType::f32, rows, 48}, {y.get(), DType::f32, rows, 64});
  };
  run(300);
  EXPECT_TRUE(engine_->take_linear_times().empty());
  engine_->wait();
  const auto start = std::chrono::steady_clock::now();
  engine_->time_linear(true);
  for (const int64_t rows : {300, 20, 300, 300}) run(rows);
  engine_->time_linear(false);
  run(300);
  LinearTimes times = engine_->take_linear_times();
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_EQ(times.size(), 2u);
  const LinearTime longer = times[{300, 64, 48, DType::f32}], shorter = times[{20, 64, 48, DType::f32}];
  EXPECT_EQ(longer.calls, 3);
  EXPECT_EQ(shorter.calls, 1);
  EXPECT_GT(longer.seconds, 0);
  EXPECT_GT(shorter.seconds, 0);
  EXPECT_LT(longer.seconds + shorter.seconds, wall);
  EXPECT_TRUE(engine_->take_linear_times().empty());
  EXPECT_EQ((LinearShape{300, 64, 48, DType::f32}.flop()), 2.0 * 300 * 64 * 48);

  const auto algorithms = engine_->time_algorithms({300, 64, 48, DType::f32});
  EXPECT_EQ(algorithms.size() > 1, test::testing_cuda());  // that of `linear`, and at least one proposal
  for (const double seconds : algorithms) EXPECT_GT(seconds, 0);
}

// Those of the blocks and no other: embeddings, modulation, the refiner of text and the last projection are sensitive or
// small.
TEST_F(Drawn, LargeLayersByTheirNames) {
  const auto large = [&](const std::string& config, const std::string& block) {
    std::vector<std::string> names;
    make_model(
        config,
        [&](const TensorList& list, Engine& engine, Engine& host) {
          for (const Tensor& tensor : list.tensors) {
            if (tensor.large && tensor.name.ends_with(".weight") && !std::holds_alternative<const float**>(tensor.place)) {
              EXPECT_FALSE(tensor.on_host) << tensor.name;
              if (tensor.name.starts_with(block)) {
                names.push_back(tensor.name.substr(block.size(), tensor.name.size() - block.size() - 7));
              } else {
                EXPECT_NE(tensor.name.find("blocks."), std::string::npos) << tensor.name;
                EXPECT_EQ(tensor.name.find("refiner"), std::string::npos) << tensor.name;
              }
            }
          }
          return drawn_tensors(1)(list, engine, host);
        },
        *engine_);
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(large(kWan, "blocks.2."), (Names{"attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q",
                                             "attn2.to_k", "attn2.to_v", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"}));
  EXPECT_EQ(large(kHunyuan, "transformer_blocks.1."),
            (Names{"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "attn.add_q_proj",
                   "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"}));
  EXPECT_EQ(large(kHunyuan, "single_transformer_blocks.2."),
            (Names{"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"}));
}

TEST_F(Drawn, TheCpuHasNoFp8) {
  const Context cpu(1);
  for (const LinearMode mode : {LinearMode::fp8, LinearMode::fp8_fast}) {
    try {
      make_engine(cpu, DType::bf16, mode);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::unsupported);
      EXPECT_NE(std::string(error.what()).find("fp8"), std::string::npos) << error.what();
    }
  }
}

TEST_F(Drawn, ALayersBytesAreCounted) {
  const int64_t each = dtype_bytes(engine_->attention), dim = 128;
  const auto bytes = [&](const std::string& config, int64_t layers) {
    return model_bytes(first_layers(config, layers), *engine_, kGrid, false);
  };
  // Two attentions, the feed-forward, their biases, four norms of q and k, one with a shift, and the modulation.
  const int64_t wan = (8 * dim * dim + 2 * dim * 256) * each + (8 * dim + 256 + dim + 4 * dim + 2 * dim + 6 * dim) * 4;
  EXPECT_EQ(bytes(kWan, 3) - bytes(kWan, 2), wan);
  // Modulation, q, k, v, both ways of the feed-forward with attention's, biases and norms of heads.
  const int64_t single = (3 * dim * dim + 3 * dim * dim + 4 * dim * dim + 5 * dim * dim) * each +
                         (3 * dim + 3 * dim + 4 * dim + dim + 2 * 64) * 4;
  EXPECT_EQ(bytes(kHunyuan, 5) - bytes(kHunyuan, 4), single);
  EXPECT_GT(model_bytes(kWan, *engine_, {6, 4, 5}, false), model_bytes(kWan, *engine_, kGrid, false) + 60 * dim * 4);
  const Settings settings = parse("scope");
  const auto attention = [&](int64_t branches) {
    return SelfAttention::bytes(*engine_, parse_model_config(kWan), settings, kGrid, branches);
  };
  const Plan plan(*context_, settings, attention_shape(parse_model_config(kWan), kGrid, engine_->attention));
  EXPECT_EQ(attention(1), plan.workspace_bytes + 3 * (plan.state_bytes + plan.report_bytes));
  EXPECT_EQ(attention(2), plan.workspace_bytes + 6 * (plan.state_bytes + plan.report_bytes));
}

TEST(FirstLayers, OfEachFamily) {
  EXPECT_EQ(parse_model_config(first_layers(kWan, 2)).layers, 2);
  EXPECT_EQ(parse_model_config(first_layers(kWan, 9)).layers, 3);
  const auto blocks = [](int64_t layers) {
    const auto json = nlohmann::json::parse(first_layers(kHunyuan, layers));
    return std::pair<int64_t, int64_t>(json["num_layers"], json["num_single_layers"]);
  };
  EXPECT_EQ(blocks(1), std::pair(int64_t{1}, int64_t{0}));
  EXPECT_EQ(blocks(4), std::pair(int64_t{2}, int64_t{2}));
  EXPECT_EQ(blocks(9), std::pair(int64_t{2}, int64_t{3}));
}

}  // namespace
}  // namespace scope::video
