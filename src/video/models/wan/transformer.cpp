// The transformer's layers in order, each line one call of the engine.
#include "video/models/wan/transformer.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/numeric.h"
#include "video/morton.h"
#include "video/parts.h"

namespace scope::video {

namespace wan {

namespace {

float* floats(const Buffer& memory) { return static_cast<float*>(memory.get()); }

// The prompt of a branch as the layers read it.
struct Text {
  Matrix text, image;  // [tokens, dim]
  Buffer memory;
  std::unique_ptr<DenseAttention> text_attention, image_attention;
  Buffer keys;
};

// Tokens that follow one another and share an embedding of time.
struct Run {
  int64_t first, count;
  bool still;  // of the first frame, at timestep 0
};

class WanPass final : public Pass {
 public:
  WanPass(const Transformer& model, const std::array<int64_t, 3>& grid, bool morton);
  void add_prompt(const Prompt& prompt) override { texts_.push_back(embed(prompt)); }
  void set_timesteps(std::span<const double> timesteps) override;
  void keep_first_frame() override;
  void forward(int64_t step, int64_t branch, const float* latent, const float* condition, const Attend& attend,
               float* velocity) override;

 private:
  Matrix matrix(const Buffer& memory, DType dtype, int64_t columns) const {
    return {memory.get(), dtype, grid_.tokens(), columns};
  }
  Matrix rows(Matrix x, const Run& run) const {
    const int64_t skipped = run.first * x.columns * dtype_bytes(x.dtype);
    return {static_cast<std::byte*>(x.data) + skipped, x.dtype, run.count, x.columns};
  }
  // Rows of the modulation, for a run's embedding of time.
  float* modulation(const Run& run, int64_t row) const {
    return floats(modulation_) + ((run.still ? 6 : 0) + row) * config_.dim();
  }
  // Rows of `table` and of the embeddings of time from `row` on: [count, dim] each, and 1 more in those of `plus_one`.
  void modulate(const float* table, int64_t step, int64_t row, int64_t count, uint32_t plus_one, int64_t to);
  // Of block `i`, or of the projection behind the last: shift and scale of the norm before it.
  void modulate_first(int64_t i, int64_t step);
  void modulated_norm(int64_t shift_row);  // of the residual stream; the scale is the row behind the shift's
  // Adds to the residual stream, gated where there is a row, and then normalises it: by the modulation, or by `norm`.
  void add_norm(Matrix y, std::optional<int64_t> gate_row, int64_t shift_row);
  void add_norm(Matrix y, int64_t gate_row, const Norm& norm);
  Text embed(const Prompt& prompt) const;
  void self_attention(const Block& block, int64_t index, const Attend& attend);
  void cross_attention(const Attention& layer, const Text& text);

  const Transformer& model_;
  Engine& engine_;
  const Config& config_;
  PatchGrid grid_;
  std::vector<Text> texts_;  // of each branch
  bool keeps_first_frame_ = false;
  std::vector<Run> runs_;  // of all tokens
  int64_t steps_ = 0;
  Buffer time_;        // see embed_time; behind the steps', that of timestep 0
  Buffer hidden_;      // f32: the residual stream
  Buffer normed_;      // activation: what a linear layer reads
  Buffer wide_;        // activation: what it writes, ffn_dim wide; patches in and out
  Buffer q_, k_, v_;   // attention
  Buffer rotation_;    // [tokens, 2, head_dim / 2]
  Buffer modulation_;  // [6, dim], and of the first frame where it is kept
  std::vector<int32_t> places_on_host_;
  Buffer places_;  // of grid_, in Morton order
};

WanPass::WanPass(const Transformer& model, const std::array<int64_t, 3>& grid, bool morton)
    : model_(model), engine_(model.engine()), config_(model.wan()), grid_{grid[0],          grid[1],
                                                                          grid[2],          config_.patch[0],
                                                                          config_.patch[1], config_.patch[2]} {
  const int64_t dim = config_.dim(), act = dtype_bytes(engine_.activation);
  const auto allocate = [&](int64_t row_bytes) {
    return engine_.allocate(checked_mul(grid_.tokens(), row_bytes, "tokens"));
  };
  hidden_ = allocate(dim * 4);
  normed_ = allocate(dim * act);
  wide_ = allocate(std::max({std::max({dim, config_.ffn_dim, config_.in_channels * grid_.patch()}) * act,
                             config_.out_channels * grid_.patch() * 4}));
  for (Buffer* buffer : {&q_, &k_, &v_}) *buffer = allocate(dim * dtype_bytes(engine_.attention));
  if (morton) {
    places_on_host_ = morton_places(grid);
    const auto bytes = static_cast<int64_t>(places_on_host_.size() * sizeof(int32_t));
    places_ = engine_.allocate(bytes);
    engine_.upload(places_on_host_.data(), places_.get(), bytes);
    grid_.places = static_cast<const int32_t*>(places_.get());
  }
  rotation_ = uploaded(engine_, make_rotation(grid_, places_on_host_, config_.rope(), [](int64_t place, double share) {
                         return static_cast<double>(place) / std::pow(10000.0, share);
                       }));
  runs_ = {{0, grid_.tokens(), false}};
  modulation_ = engine_.allocate(2 * 6 * dim * 4);
}

void WanPass::keep_first_frame() {
  require(config_.patch[0] == 1, Status::unsupported, "first frame: a token of this model is {} frames of the latent",
          config_.patch[0]);
  std::vector<bool> still(static_cast<size_t>(grid_.tokens()));
  for (int64_t patch = 0; patch < grid_.h * grid_.w; ++patch) {
    still[static_cast<size_t>(places_on_host_.empty() ? patch : places_on_host_[static_cast<size_t>(patch)])] = true;
  }
  keeps_first_frame_ = true;
  runs_.clear();
  for (int64_t token = 0; token < grid_.tokens(); ++token) {
    const bool now = still[static_cast<size_t>(token)];
    if (runs_.empty() || runs_.back().still != now) runs_.push_back({token, 0, now});
    ++runs_.back().count;
  }
}

void WanPass::set_timesteps(std::span<const double> timesteps) {
  std::vector<double> all(timesteps.begin(), timesteps.end());
  steps_ = std::ssize(all);
  all.push_back(0);
  time_ = model_.embed_time(all);
}

void WanPass::modulate(const float* table, int64_t step, int64_t row, int64_t count, uint32_t plus_one, int64_t to) {
  const int64_t dim = config_.dim();
  for (const bool still : {false, true}) {
    if (still && !keeps_first_frame_) continue;
    engine_.modulation(table, floats(time_) + ((still ? steps_ : step) * 7 + row) * dim, count, dim, plus_one,
                       modulation({0, 0, still}, to));
  }
}

void WanPass::modulate_first(int64_t i, int64_t step) {
  const Layers& layers = model_.layers();
  if (i < config_.layers) {
    modulate(layers.blocks[static_cast<size_t>(i)].modulation, step, 0, 2, 1u << 1, 0);
  } else {  // both rows of the last modulation, shift and scale, take the same embedding of time
    modulate(layers.last_modulation, step, 6, 1, 0, 0);
    modulate(layers.last_modulation + config_.dim(), step, 6, 1, 1, 1);
  }
}

void WanPass::modulated_norm(int64_t shift_row) {
  const Matrix hidden = matrix(hidden_, DType::f32, config_.dim()),
               normed = matrix(normed_, engine_.activation, config_.dim());
  for (const Run& run : runs_) {
    engine_.layer_norm(rows(hidden, run), modulation(run, shift_row + 1), modulation(run, shift_row),
                       static_cast<float>(config_.eps), rows(normed, run));
  }
}

void WanPass::add_norm(Matrix y, std::optional<int64_t> gate_row, int64_t shift_row) {
  const Matrix hidden = matrix(hidden_, DType::f32, config_.dim()),
               normed = matrix(normed_, engine_.activation, config_.dim());
  for (const Run& run : runs_) {
    engine_.add_norm(rows(hidden, run), rows(y, run), gate_row ? modulation(run, *gate_row) : nullptr,
                     modulation(run, shift_row + 1), modulation(run, shift_row), static_cast<float>(config_.eps),
                     rows(normed, run));
  }
}

void WanPass::add_norm(Matrix y, int64_t gate_row, const Norm& norm) {
  const Matrix hidden = matrix(hidden_, DType::f32, config_.dim()),
               normed = matrix(normed_, engine_.activation, config_.dim());
  for (const Run& run : runs_) {
    const float* gate = modulation(run, gate_row);
    if (norm.scale != nullptr) {
      engine_.add_norm(rows(hidden, run), rows(y, run), gate, norm.scale, norm.shift, static_cast<float>(config_.eps),
                       rows(normed, run));
    } else {
      engine_.add(rows(hidden, run), rows(y, run), gate);
      engine_.convert(rows(hidden, run), rows(normed, run));
    }
  }
}

Text WanPass::embed(const Prompt& prompt) const {
  const Layers& layers = model_.layers();
  const auto tokens = [](const char* name, const std::vector<float>& x, int64_t columns) {
    const auto size = static_cast<int64_t>(x.size());
    require(size > 0 && size % columns == 0, Status::shape, "{}: got {} numbers, expected rows of {}", name, size, columns);
    return size / columns;
  };
  const int64_t dim = config_.dim(), text_tokens = tokens("prompt_embeds", prompt.text, config_.text_dim);
  require(config_.image_dim == 0 || !prompt.image.empty(), Status::shape,
          "image_embeds: this model needs them, as rows of {}", config_.image_dim);
  require(config_.image_dim > 0 || prompt.image.empty(), Status::shape, "image_embeds: this model takes none");
  const int64_t image_tokens = prompt.image.empty() ? 0 : tokens("image_embeds", prompt.image, config_.image_dim);
  // diffusers tells the two apart by counting 512 text tokens from the end.
  require(config_.added_kv_dim == 0 || text_tokens == 512, Status::shape,
          "prompt_embeds: got {} tokens, a model with an image branch takes text padded to 512", text_tokens);
  require(config_.image_tokens == 0 || image_tokens == config_.image_tokens, Status::shape,
          "image_embeds: got {} tokens, this model takes {}", image_tokens, config_.image_tokens);
  const DType type = engine_.activation;
  const int64_t each = dtype_bytes(type), all = image_tokens + text_tokens;
  Text out;
  out.memory = engine_.allocate(all * dim * each);
  Matrix image{out.memory.get(), type, image_tokens, dim};
  Matrix text{static_cast<std::byte*>(out.memory.get()) + image_tokens * dim * each, type, text_tokens, dim};
  const Buffer text_in = uploaded(engine_, prompt.text), hidden = engine_.allocate(text_tokens * dim * each);
  engine_.linear(layers.text_1, {text_in.get(), DType::f32, text_tokens, config_.text_dim},
                 {hidden.get(), type, text_tokens, dim}, Activation::gelu_tanh);
  engine_.linear(layers.text_2, {hidden.get(), type, text_tokens, dim}, text);
  if (image_tokens > 0) {
    constexpr float kEps = 1e-5f;  // these norms do not take the model's
    const int64_t wide = config_.image_dim;
    const Buffer in = uploaded(engine_, prompt.image), normed = engine_.allocate(image_tokens * wide * each),
                 inner = engine_.allocate(image_tokens * wide * each), last = engine_.allocate(image_tokens * dim * 4);
    if (layers.image_places != nullptr) engine_.axpy(1.0f, layers.image_places, image_tokens * wide, floats(in));
    engine_.layer_norm({in.get(), DType::f32, image_tokens, wide}, layers.image_norm1.scale, layers.image_norm1.shift, kEps,
                       {normed.get(), type, image_tokens, wide});
    engine_.linear(layers.image_1, {normed.get(), type, image_tokens, wide}, {inner.get(), type, image_tokens, wide},
                   Activation::gelu);
    engine_.linear(layers.image_2, {inner.get(), type, image_tokens, wide}, {last.get(), DType::f32, image_tokens, dim});
    engine_.layer_norm({last.get(), DType::f32, image_tokens, dim}, layers.image_norm2.scale, layers.image_norm2.shift, kEps,
                       image);
    engine_.wait();  // before what was allocated here is freed
  }
  engine_.wait();
  // Without an image branch the image's tokens stand before the text's, as one sequence.
  const bool branch = config_.added_kv_dim > 0;
  out.image = branch ? image : Matrix{};
  out.text = branch ? text : Matrix{image.data, type, all, dim};
  const auto attention = [&](int64_t keys) {
    return std::make_unique<DenseAttention>(engine_, config_.heads, config_.head_dim, grid_.tokens(), keys);
  };
  out.text_attention = attention(out.text.rows);
  if (branch) out.image_attention = attention(image_tokens);
  // A key before its norm, a key and a value for each token.
  out.keys = engine_.allocate(all * dim * (each + 2 * dtype_bytes(engine_.attention)));
  return out;
}

void WanPass::self_attention(const Block& block, int64_t index, const Attend& attend) {
  const Attention& layer = block.self;
  const int64_t dim = config_.dim();
  const auto eps = static_cast<float>(config_.eps);
  const Matrix normed = matrix(normed_, engine_.activation, dim), raw = matrix(wide_, engine_.activation, dim);
  const Matrix q = matrix(q_, engine_.attention, dim), k = matrix(k_, engine_.attention, dim);
  const Matrix v = matrix(v_, engine_.attention, dim);
  engine_.linear(layer.to_q, normed, raw);
  engine_.rms_norm(raw, layer.norm_q, eps, floats(rotation_), config_.head_dim, q);
  engine_.linear(layer.to_k, normed, raw);
  engine_.rms_norm(raw, layer.norm_k, eps, floats(rotation_), config_.head_dim, k);
  engine_.linear(layer.to_v, normed, v);
  attend(index, q, k, v, q, {});
  engine_.linear(layer.to_out, q, raw);
  add_norm(raw, 2, block.norm);
}

void WanPass::cross_attention(const Attention& layer, const Text& text) {
  const int64_t dim = config_.dim();
  const auto eps = static_cast<float>(config_.eps);
  const Matrix normed = matrix(normed_, engine_.activation, dim), raw = matrix(wide_, engine_.activation, dim);
  const Matrix q = matrix(q_, engine_.attention, dim);
  const Matrix out = matrix(k_, engine_.attention, dim), image_out = matrix(v_, engine_.attention, dim);
  engine_.linear(layer.to_q, normed, raw);
  engine_.rms_norm(raw, layer.norm_q, eps, nullptr, config_.head_dim, q);
  const auto attend = [&](Matrix context, const Linear& to_k, const float* norm, const Linear& to_v,
                          const DenseAttention& attention, Matrix to) {
    auto* memory = static_cast<std::byte*>(text.keys.get());
    const int64_t each = dtype_bytes(engine_.attention);
    const Matrix k{memory, engine_.attention, context.rows, dim};
    const Matrix v{memory + context.rows * dim * each, engine_.attention, context.rows, dim};
    const Matrix before{memory + 2 * context.rows * dim * each, engine_.activation, context.rows, dim};
    engine_.linear(to_k, context, before);
    engine_.rms_norm(before, norm, eps, nullptr, config_.head_dim, k);
    engine_.linear(to_v, context, v);
    attention.run(q, k, v, to);
  };
  attend(text.text, layer.to_k, layer.norm_k, layer.to_v, *text.text_attention, out);
  if (text.image_attention != nullptr) {
    attend(text.image, layer.add_k, layer.norm_added_k, layer.add_v, *text.image_attention, image_out);
    engine_.add(out, image_out, nullptr);
  }
  engine_.linear(layer.to_out, out, raw);
  add_norm(raw, std::nullopt, 3);
}

void WanPass::forward(int64_t step, int64_t branch, const float* latent, const float* condition, const Attend& attend,
                      float* velocity) {
  const Layers& layers = model_.layers();
  const Text& text = texts_[static_cast<size_t>(branch)];
  const int64_t dim = config_.dim(), out = config_.out_channels;
  const DType type = engine_.activation;
  const Matrix normed = matrix(normed_, type, dim);

  const Matrix patches = matrix(wide_, type, config_.in_channels * grid_.patch());
  engine_.patchify(grid_, latent, out, condition, config_.in_channels - out, patches);
  engine_.linear(layers.patch, patches, matrix(hidden_, DType::f32, dim));
  modulate_first(0, step);
  modulated_norm(0);
  for (int64_t i = 0; i < config_.layers; ++i) {
    const Block& block = layers.blocks[static_cast<size_t>(i)];
    // Rows: shift, scale, gate of self-attention, then of the feed-forward; the first two are there.
    modulate(block.modulation + 2 * dim, step, 2, 4, 1u << 2, 2);
    self_attention(block, i, attend);
    cross_attention(block.cross, text);
    const Matrix inner = matrix(wide_, type, config_.ffn_dim);
    engine_.linear(block.expand, normed, inner, Activation::gelu_tanh);
    engine_.linear(block.contract, inner, normed);
    modulate_first(i + 1, step);  // this block's first rows are no longer read
    add_norm(normed, 5, 0);
  }
  const Matrix tokens = matrix(wide_, DType::f32, out * grid_.patch());
  engine_.linear(layers.projection, normed, tokens);
  engine_.unpatchify(grid_, tokens, out, ChannelOrder::fastest, velocity);
}

std::unique_ptr<Model> open(std::string_view config, const TensorSource& tensors, Engine& engine) {
  return std::make_unique<Transformer>(parse_config(config), tensors, engine);
}

}  // namespace

Transformer::Transformer(const Config& config, const TensorSource& tensors, Engine& engine)
    : Model(engine, config.common()),
      wan_(config),
      host_(make_cpu_engine(engine.context, DType::f32)),
      tensors_(tensors(list_tensors(wan_, layers_), engine, *host_)) {}

std::unique_ptr<Pass> Transformer::start(const std::array<int64_t, 3>& grid, bool morton) const {
  return std::make_unique<WanPass>(*this, grid, morton);
}

Buffer Transformer::embed_time(std::span<const double> timesteps) const {
  const auto steps = static_cast<int64_t>(timesteps.size());
  const int64_t dim = wan_.dim(), freq = wan_.freq_dim;
  std::vector<float> waves = make_waves(timesteps, freq), first(static_cast<size_t>(steps * dim)), time = first;
  std::vector<float> activated = time, projected(static_cast<size_t>(steps * 6 * dim));
  const auto view = [&](std::vector<float>& x, int64_t columns) { return Matrix{x.data(), DType::f32, steps, columns}; };
  host_->linear(layers_.time_1, view(waves, freq), view(first, dim), Activation::silu);
  host_->linear(layers_.time_2, view(first, dim), view(time, dim));
  activated = time;
  for (float& x : activated) x = x / (1.0f + std::exp(-x));
  host_->linear(layers_.time_projection, view(activated, dim), view(projected, 6 * dim));
  std::vector<float> out;
  for (int64_t s = 0; s < steps; ++s) {
    out.insert(out.end(), projected.begin() + s * 6 * dim, projected.begin() + (s + 1) * 6 * dim);
    out.insert(out.end(), time.begin() + s * dim, time.begin() + (s + 1) * dim);
  }
  return uploaded(engine(), out);
}

}  // namespace wan

extern const Family kWan;
constexpr Family kWan = {"WanTransformer3DModel", [](std::string_view json) { return wan::parse_config(json).common(); },
                         wan::first_layers, wan::open};

}  // namespace scope::video
