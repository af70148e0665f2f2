// The transformer's layers in order, each line one call of the engine.
#include "video/models/hunyuan/transformer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/numeric.h"
#include "video/morton.h"
#include "video/parts.h"

namespace scope::video {

namespace hunyuan {

namespace {

constexpr float kEps = 1e-6f;  // of every norm; no config changes it

float* floats(const Buffer& memory) { return static_cast<float*>(memory.get()); }

// Where each token stands in Morton order; where the first frame is modulated by itself, its tokens before the others.
std::vector<int32_t> order_tokens(const std::array<int64_t, 3>& grid, int64_t first_frame) {
  std::vector<int32_t> places = morton_places(grid), order(places.size());
  for (size_t i = 0; i < places.size(); ++i) order[static_cast<size_t>(places[i])] = static_cast<int32_t>(i);
  std::stable_partition(order.begin(), order.end(), [&](int32_t token) { return token < first_frame; });
  for (size_t i = 0; i < order.size(); ++i) places[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  return places;
}

// Of vectors of one length; an empty one counts as zeros.
std::vector<float> sum(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < b.size(); ++i) a[i] += b[i];
  return a;
}

// The prompt of a branch as the layers read it.
struct Text {
  int64_t tokens = 0;
  Buffer embeds;                        // f32 [tokens, text_dim]
  std::vector<float> pooled, guidance;  // [dim] each, to be added to a time's; guidance: empty without one
  std::vector<float> mean;              // [dim], to be added to the refiner's
  std::unique_ptr<DenseAttention> attention;
};

// Neighbouring rows that are modulated alike.
struct Rows {
  int64_t first, count;
  const float* modulation;
};

// A gated sum that the norm before the next block takes along.
struct Waiting {
  Rows rows;
  Matrix y;  // of these rows
  int64_t gate;
};

// Tokens stand as [video | text | padding], and padding is never read.
class HunyuanPass final : public Pass {
 public:
  HunyuanPass(const Transformer& model, const std::array<int64_t, 3>& grid, bool morton);
  void add_prompt(const Prompt& prompt) override;
  void set_timesteps(std::span<const double> timesteps) override;
  void keep_first_frame() override {
    if (first_frame_ == 0) Pass::keep_first_frame();
  }
  void forward(int64_t step, int64_t branch, const float* latent, const float* condition, const Attend& attend,
               float* velocity) override;

 private:
  Matrix rows(const Buffer& memory, DType dtype, int64_t columns, int64_t first, int64_t count) const {
    return {static_cast<std::byte*>(memory.get()) + first * columns * dtype_bytes(dtype), dtype, count, columns};
  }
  Matrix hidden(int64_t first, int64_t count) const { return rows(hidden_, DType::f32, dim_, first, count); }
  Matrix normed(int64_t first, int64_t count) const { return rows(normed_, engine_.activation, dim_, first, count); }
  Matrix wide(int64_t count, int64_t columns) const { return rows(wide_, engine_.activation, columns, 0, count); }
  Matrix heads(const Buffer& memory, int64_t first, int64_t count) const {
    return rows(memory, engine_.attention, dim_, first, count);
  }
  void embed(int64_t step, const Text& text);
  const float* modulate(const Linear& layer, int64_t row, int64_t vectors, uint32_t scales, int64_t slot);
  // Norms of the residual stream, with all that waits for these rows.
  void normalise(const std::vector<Rows>& parts, int64_t shift, int64_t scale);
  void add(const std::vector<Rows>& parts, Matrix y, int64_t gate);
  void add_later(const std::vector<Rows>& parts, Matrix y, int64_t gate);
  void add_norm(const std::vector<Rows>& parts, Matrix y, int64_t gate, int64_t shift, int64_t scale);
  template <class Layer>
  void project(const Layer& layer, int64_t first, int64_t count);
  void refine(const Text& text);
  void run(const DoubleBlock& block, int64_t index, const Text& text, const Attend& attend);
  void run(const SingleBlock& block, int64_t index, const Text& text, const Attend& attend);

  const Transformer& model_;
  Engine& engine_;
  const Config& config_;
  int64_t dim_;
  PatchGrid grid_;
  int64_t video_;        // tokens
  int64_t first_frame_;  // so many of them are modulated as at time 0
  std::vector<Text> texts_;
  std::vector<float> times_, refiner_times_;  // [steps, dim]
  std::vector<float> start_;                  // [dim] the embedding of time 0
  Buffer hidden_;                             // f32: the residual stream
  Buffer normed_;                             // activation: what a linear layer reads
  Buffer wide_;                               // activation: what it writes, mlp_dim wide; patches in and out
  Buffer q_, k_, v_;                          // attention
  Buffer rotation_;                           // [video, 2, head_dim / 2]
  Buffer conditioning_;                       // f32 [3, dim] after silu: of the step, of time 0, of the refiner
  Buffer projected_;                          // f32 [6, dim]
  Buffer modulation_;                         // f32 [2, 3, 6, dim]: of the video, of its first frame, of the text
  int64_t turn_ = 0;                          // which half of it a block has: what waits reads the other
  std::vector<Waiting> waiting_;
  Buffer zeros_;   // f32 [6, dim]
  Buffer places_;  // of grid_, in Morton order
};

HunyuanPass::HunyuanPass(const Transformer& model, const std::array<int64_t, 3>& grid, bool morton)
    : model_(model),
      engine_(model.engine()),
      config_(model.hunyuan()),
      dim_(config_.dim()),
      grid_{grid[0], grid[1], grid[2], config_.patch_size_t, config_.patch_size, config_.patch_size},
      video_(grid_.tokens()),
      first_frame_(config_.image == ImageCondition::token_replace ? grid[1] * grid[2] : 0) {
  const int64_t act = dtype_bytes(engine_.activation), text = model.config().text_tokens, all = model.config().tokens(grid);
  const auto bytes = [](int64_t tokens, int64_t row_bytes) { return checked_mul(tokens, row_bytes, "tokens"); };
  hidden_ = engine_.allocate(bytes(all, dim_ * 4));
  normed_ = engine_.allocate(bytes(all, dim_ * act));
  wide_ = engine_.allocate(std::max(
      {bytes(all, std::max(dim_, config_.mlp_dim()) * act), bytes(video_, config_.in_channels * grid_.patch() * act),
       bytes(video_, config_.out_channels * grid_.patch() * 4), bytes(text, config_.refiner_mlp_dim() * act)}));
  for (Buffer* buffer : {&q_, &k_, &v_}) *buffer = engine_.allocate(bytes(all, dim_ * dtype_bytes(engine_.attention)));
  std::vector<int32_t> places;
  if (morton) {
    places = order_tokens(grid, first_frame_);
    const auto size = static_cast<int64_t>(places.size() * sizeof(int32_t));
    places_ = engine_.allocate(size);
    engine_.upload(places.data(), places_.get(), size);
    grid_.places = static_cast<const int32_t*>(places_.get());
  }
  // In f32 as diffusers does it.
  const auto angle = [theta = static_cast<float>(config_.rope_theta)](int64_t place, double share) {
    const float frequency = 1.0f / std::pow(theta, static_cast<float>(share));
    return double{static_cast<float>(place) * frequency};
  };
  rotation_ = uploaded(engine_, make_rotation(grid_, places, model.config().rope, angle));
  conditioning_ = engine_.allocate(3 * dim_ * 4);
  projected_ = engine_.allocate(6 * dim_ * 4);
  modulation_ = engine_.allocate(2 * 3 * 6 * dim_ * 4);
  zeros_ = uploaded(engine_, std::vector<float>(static_cast<size_t>(6 * dim_)));
}

void HunyuanPass::add_prompt(const Prompt& prompt) {
  check_prompt(model_.config(), prompt);
  require(prompt.image.empty(), Status::shape, "image_embeds: this model takes none, but for what stands in prompt_embeds");
  require(std::isfinite(prompt.guidance), Status::invalid_argument, "guidance: got {}, expected a number", prompt.guidance);
  const Layers& layers = model_.layers();
  Text text;
  text.tokens = std::ssize(prompt.text) / config_.text_dim;
  text.embeds = uploaded(engine_, prompt.text);
  text.pooled = model_.embed(layers.pooled, prompt.pooled);
  const double scaled = 1000 * prompt.guidance;
  if (config_.guidance) text.guidance = model_.embed(layers.guidance, make_waves({&scaled, 1}, kWaves));
  std::vector<float> mean(static_cast<size_t>(config_.text_dim));
  for (size_t i = 0; i < prompt.text.size(); ++i) mean[i % mean.size()] += prompt.text[i];
  for (float& x : mean) x /= static_cast<float>(text.tokens);
  text.mean = model_.embed(layers.refiner_text, mean);
  text.attention = std::make_unique<DenseAttention>(engine_, config_.heads, config_.head_dim, text.tokens, text.tokens);
  texts_.push_back(std::move(text));
}

void HunyuanPass::set_timesteps(std::span<const double> timesteps) {
  const std::vector<float> waves = make_waves(timesteps, kWaves);
  const double start = 0;
  times_ = model_.embed(model_.layers().time, waves);
  start_ = model_.embed(model_.layers().time, make_waves({&start, 1}, kWaves));
  refiner_times_ = model_.embed(model_.layers().refiner_time, waves);
}

// What modulations are made of.
void HunyuanPass::embed(int64_t step, const Text& text) {
  const auto of_step = [&](const std::vector<float>& times) {
    return std::vector<float>(times.begin() + step * dim_, times.begin() + (step + 1) * dim_);
  };
  std::vector<float> all = sum(sum(of_step(times_), text.guidance), text.pooled);
  for (const auto& more : {sum(start_, text.pooled), sum(of_step(refiner_times_), text.mean)}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  for (float& x : all) x = x / (1.0f + std::exp(-x));
  engine_.upload(all.data(), conditioning_.get(), static_cast<int64_t>(all.size() * sizeof(float)));
}

// `vectors` of [dim] from one row of the conditioning, into one of the places of modulation_; 1 is added to those that are
// scales.
const float* HunyuanPass::modulate(const Linear& layer, int64_t row, int64_t vectors, uint32_t scales, int64_t slot) {
  float* out = floats(modulation_) + (3 * turn_ + slot) * 6 * dim_;
  engine_.linear(layer, rows(conditioning_, DType::f32, dim_, row, 1), {projected_.get(), DType::f32, 1, vectors * dim_});
  engine_.modulation(floats(zeros_), floats(projected_), vectors, dim_, scales, out);
  return out;
}

// Rows of y, which begins with row `first` of the stream.
Matrix rows_of(Matrix y, int64_t first, const Rows& part) {
  const int64_t bytes = (part.first - first) * y.columns * dtype_bytes(y.dtype);
  return {static_cast<std::byte*>(y.data) + bytes, y.dtype, part.count, y.columns};
}

void HunyuanPass::normalise(const std::vector<Rows>& parts, int64_t shift, int64_t scale) {
  for (const Rows& part : parts) {
    const float *scales = part.modulation + scale * dim_, *shifts = part.modulation + shift * dim_;
    if (waiting_.empty()) {
      engine_.layer_norm(hidden(part.first, part.count), scales, shifts, kEps, normed(part.first, part.count));
    }
    for (const auto& [rows, y, gate] : waiting_) {  // rows of double blocks need not be those of single ones
      const int64_t first = std::max(part.first, rows.first),
                    count = std::min(part.first + part.count, rows.first + rows.count) - first;
      if (count <= 0) continue;
      engine_.add_norm(hidden(first, count), rows_of(y, rows.first, {first, count, nullptr}), rows.modulation + gate * dim_,
                       scales, shifts, kEps, normed(first, count));
    }
  }
  waiting_.clear();
}

// y begins with the first part's first row.
void HunyuanPass::add(const std::vector<Rows>& parts, Matrix y, int64_t gate) {
  for (const Rows& part : parts) {
    engine_.add(hidden(part.first, part.count), rows_of(y, parts[0].first, part), part.modulation + gate * dim_);
  }
}

void HunyuanPass::add_later(const std::vector<Rows>& parts, Matrix y, int64_t gate) {
  for (const Rows& part : parts) waiting_.push_back({part, rows_of(y, parts[0].first, part), gate});
}

void HunyuanPass::add_norm(const std::vector<Rows>& parts, Matrix y, int64_t gate, int64_t shift, int64_t scale) {
  for (const Rows& part : parts) {
    engine_.add_norm(hidden(part.first, part.count), rows_of(y, parts[0].first, part), part.modulation + gate * dim_,
                     part.modulation + scale * dim_, part.modulation + shift * dim_, kEps, normed(part.first, part.count));
  }
}

// q, k and v of rows that are all video's or all text's, or of video with text behind it.
template <class Layer>
void HunyuanPass::project(const Layer& layer, int64_t first, int64_t count) {
  const Matrix in = normed(first, count), raw = wide(count, dim_);
  const int64_t turned = std::clamp<int64_t>(video_ - first, 0, count);  // the video's
  const auto norm = [&](const float* weight, const Buffer& to) {
    if (turned > 0) {
      engine_.head_norm(wide(turned, dim_), weight, kEps, floats(rotation_), config_.head_dim, heads(to, first, turned));
    }
    if (turned < count) {
      engine_.head_norm(rows(wide_, engine_.activation, dim_, turned, count - turned), weight, kEps, nullptr,
                        config_.head_dim, heads(to, first + turned, count - turned));
    }
  };
  engine_.linear(layer.to_q, in, raw);
  norm(layer.norm_q, q_);
  engine_.linear(layer.to_k, in, raw);
  norm(layer.norm_k, k_);
  engine_.linear(layer.to_v, in, heads(v_, first, count));
}

// The text by itself, into its rows of the residual stream.
void HunyuanPass::refine(const Text& text) {
  const Layers& layers = model_.layers();
  const int64_t n = text.tokens;
  const Matrix stream = hidden(video_, n), in = normed(0, n), raw = wide(n, dim_);
  const Matrix q = heads(q_, 0, n), k = heads(k_, 0, n), v = heads(v_, 0, n), inner = wide(n, config_.refiner_mlp_dim());
  engine_.linear(layers.text, {text.embeds.get(), DType::f32, n, config_.text_dim}, stream);
  for (const RefinerBlock& block : layers.refiner) {
    const float* gates = modulate(block.gates, 2, 2, 0, 0);
    engine_.layer_norm(stream, block.norm_1.scale, block.norm_1.shift, kEps, in);
    engine_.linear(block.to_q, in, q);
    engine_.linear(block.to_k, in, k);
    engine_.linear(block.to_v, in, v);
    text.attention->run(q, k, v, q);
    engine_.linear(block.to_out, q, raw);
    engine_.add(stream, raw, gates);
    engine_.layer_norm(stream, block.norm_2.scale, block.norm_2.shift, kEps, in);
    engine_.linear(block.expand, in, inner, Activation::silu);
    engine_.linear(block.contract, inner, in);
    engine_.add(stream, in, gates + dim_);
  }
}

void HunyuanPass::run(const DoubleBlock& block, int64_t index, const Text& text, const Attend& attend) {
  constexpr uint32_t kScales = 1u << 1 | 1u << 4;
  turn_ = 1 - turn_;
  struct Part {
    const Stream& stream;
    int64_t first, count;
    std::vector<Rows> rows;
  };
  Part parts[] = {{block.video, 0, video_, {}}, {block.text, video_, text.tokens, {}}};
  if (first_frame_ > 0) parts[0].rows = {{0, first_frame_, modulate(block.video.modulation, 1, 6, kScales, 1)}};
  if (first_frame_ < video_) {
    parts[0].rows.push_back({first_frame_, video_ - first_frame_, modulate(block.video.modulation, 0, 6, kScales, 0)});
  }
  parts[1].rows = {{video_, text.tokens, modulate(block.text.modulation, 0, 6, kScales, 2)}};
  std::vector<Rows> both = parts[0].rows;
  both.push_back(parts[1].rows[0]);
  normalise(both, 0, 1);
  for (const Part& part : parts) project(part.stream, part.first, part.count);
  const int64_t all = model_.config().text_tokens + video_;
  const Matrix q = heads(q_, 0, all);
  attend(index, q, heads(k_, 0, all), heads(v_, 0, all), q, {video_, text.tokens, all - video_ - text.tokens});
  for (const Part& part : parts) {
    const Matrix in = normed(part.first, part.count), raw = wide(part.count, dim_);
    engine_.linear(part.stream.to_out, heads(q_, part.first, part.count), raw);
    add_norm(part.rows, raw, 2, 3, 4);
    const Matrix inner = wide(part.count, config_.mlp_dim());
    engine_.linear(part.stream.expand, in, inner, Activation::gelu_tanh);
    engine_.linear(part.stream.contract, inner, in);
    add_later(part.rows, in, 5);
  }
}

void HunyuanPass::run(const SingleBlock& block, int64_t index, const Text& text, const Attend& attend) {
  constexpr uint32_t kScales = 1u << 1;
  turn_ = 1 - turn_;
  const int64_t n = video_ + text.tokens, all = model_.config().text_tokens + video_;
  std::vector<Rows> parts;
  if (first_frame_ > 0) parts = {{0, first_frame_, modulate(block.modulation, 1, 3, kScales, 1)}};
  parts.push_back({first_frame_, n - first_frame_, modulate(block.modulation, 0, 3, kScales, 0)});
  normalise(parts, 0, 1);
  project(block, 0, n);
  const Matrix q = heads(q_, 0, all), in = normed(0, n);
  attend(index, q, heads(k_, 0, all), heads(v_, 0, all), q, {video_, text.tokens, all - n});
  const Matrix raw = wide(n, dim_), inner = wide(n, config_.mlp_dim());
  engine_.linear(block.from_attention, heads(q_, 0, n), raw);
  add(parts, raw, 2);
  engine_.linear(block.expand, in, inner, Activation::gelu_tanh);
  engine_.linear(block.from_mlp, inner, in);
  add_later(parts, in, 2);
}

void HunyuanPass::forward(int64_t step, int64_t branch, const float* latent, const float* condition, const Attend& attend,
                          float* velocity) {
  const Layers& layers = model_.layers();
  const Text& text = texts_[static_cast<size_t>(branch)];
  const int64_t out = config_.out_channels, more = config_.in_channels - out;
  waiting_.clear();  // of a pass that was not finished
  embed(step, text);
  const Matrix patches = wide(video_, config_.in_channels * grid_.patch());
  engine_.patchify(grid_, latent, out, condition, more, patches);
  engine_.linear(layers.patch, patches, hidden(0, video_));
  refine(text);
  int64_t index = 0;
  for (const DoubleBlock& block : layers.double_blocks) run(block, index++, text, attend);
  for (const SingleBlock& block : layers.single_blocks) run(block, index++, text, attend);
  turn_ = 1 - turn_;
  normalise({{0, video_, modulate(layers.last_modulation, 0, 2, 1, 0)}}, 1, 0);
  const Matrix tokens = rows(wide_, DType::f32, out * grid_.patch(), 0, video_);
  engine_.linear(layers.projection, normed(0, video_), tokens);
  engine_.unpatchify(grid_, tokens, out, ChannelOrder::slowest, velocity);
}

std::unique_ptr<Model> open(std::string_view config, const TensorSource& tensors, Engine& engine) {
  return std::make_unique<Transformer>(parse_config(config), tensors, engine);
}

}  // namespace

Transformer::Transformer(const Config& config, const TensorSource& tensors, Engine& engine)
    : Model(engine, config.common()),
      hunyuan_(config),
      host_(make_cpu_engine(engine.context, DType::f32)),
      tensors_(tensors(list_tensors(hunyuan_, layers_), engine, *host_)) {}

std::unique_ptr<Pass> Transformer::start(const std::array<int64_t, 3>& grid, bool morton) const {
  return std::make_unique<HunyuanPass>(*this, grid, morton);
}

std::vector<float> Transformer::embed(const Embedder& embedder, std::vector<float> rows) const {
  const int64_t in = embedder.first.weights->in, dim = hunyuan_.dim(), n = std::ssize(rows) / in;
  std::vector<float> inner(static_cast<size_t>(n * dim)), out = inner;
  const Matrix between{inner.data(), DType::f32, n, dim};
  host_->linear(embedder.first, {rows.data(), DType::f32, n, in}, between, Activation::silu);
  host_->linear(embedder.second, between, {out.data(), DType::f32, n, dim});
  return out;
}

}  // namespace hunyuan

extern const Family kHunyuan;
constexpr Family kHunyuan = {"HunyuanVideoTransformer3DModel",
                             [](std::string_view json) { return hunyuan::parse_config(json).common(); },
                             hunyuan::first_layers, hunyuan::open};

}  // namespace scope::video
