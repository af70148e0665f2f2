// What the sampler asks of a video model of any family, and how a folder becomes one.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "video/weights.h"

namespace scope::video {

// What everyone outside a family may know of a model.
struct ModelConfig {
  int64_t layers = 0, heads = 0, head_dim = 0;
  std::vector<int64_t> rope;            // channels of a head along T, H and W
  int64_t rope_max = 0;                 // most tokens along an axis
  std::array<int64_t, 3> patch = {};    // latent elements of a token along T, H and W
  int64_t latent_channels = 0;          // of the noise and the sample
  int64_t condition_channels = 0;       // that stand beside the noisy latent
  bool needs_first_frame = false;       // of the sample, as a latent
  int64_t text_dim = 0, image_dim = 0;  // channels of an encoded prompt and image; image_dim 0: it takes none
  int64_t image_tokens = 0;             // of all images together; 0: any number
  int64_t text_tokens = 0;              // in self-attention beside the video's, padding included; 0: none
  int64_t pooled_dim = 0;               // channels of a prompt as one vector; 0: it takes none
  bool embeds_guidance = false;         // guidance is an input of the model, which runs once a step then

  // Tokens of a self-attention.
  int64_t tokens(const std::array<int64_t, 3>& grid) const { return grid[0] * grid[1] * grid[2] + text_tokens; }
  bool operator==(const ModelConfig&) const = default;
};

// Encoded text and image of one guidance branch: f32 on the host.
struct Prompt {
  std::vector<float> text;         // [tokens, text_dim], without padding where text is among the tokens of self-attention
  std::vector<float> image;        // [tokens, image_dim]; empty where the model takes none
  std::vector<float> pooled = {};  // [pooled_dim]; empty where the model takes none
  double guidance = 1;             // where the model embeds it
};
// Throws Status::shape where a model does not take a prompt's text, or what is pooled of it.
void check_prompt(const ModelConfig& config, const Prompt& prompt);

// The tokens of a self-attention that are not video's. Every query sees the text's keys, the text's queries see every key.
struct TextTokens {
  int64_t first = 0, count = 0;  // where the text stands, padding included
  int64_t padding = 0;           // the last so many tokens take part in nothing
};

// q, k, v and out are [tokens, heads x head_dim]; out may be q.
using Attend = std::function<void(int64_t layer, Matrix q, Matrix k, Matrix v, Matrix out, const TextTokens& text)>;

// The forward passes of one generation, at one grid.
class Pass {
 public:
  Pass() = default;
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  virtual ~Pass() = default;

  // Both before the first `forward`. Branches are counted in the order of their prompts.
  virtual void add_prompt(const Prompt& prompt) = 0;
  virtual void set_timesteps(std::span<const double> timesteps) = 0;  // of every step, in 0..1000
  // Before them: what stands in the first frame of a latent is no noise, and its tokens have timestep 0 at every step.
  virtual void keep_first_frame() { fail(Status::unsupported, "first frame: this model keeps none"); }

  // latent [latent_channels, T, H, W] and condition [condition_channels, T, H, W] -> velocity, like latent; all f32 in the
  // engine's memory.
  virtual void forward(int64_t step, int64_t branch, const float* latent, const float* condition, const Attend& attend,
                       float* velocity) = 0;
};

class Model {
 public:
  Model(Engine& engine, ModelConfig config) : engine_(engine), config_(std::move(config)) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  virtual ~Model() = default;

  Engine& engine() const { return engine_; }
  const ModelConfig& config() const { return config_; }
  // grid: tokens along T, H and W, each in 1..rope_max. morton: self-attention sees them in Morton order, otherwise in
  // raster order. The model outlives the pass.
  virtual std::unique_ptr<Pass> start(const std::array<int64_t, 3>& grid, bool morton) const = 0;

 private:
  Engine& engine_;
  ModelConfig config_;
};

// A row of models/families.cpp. Whatever is wrong with a folder's files is Error(Status::format).
struct Family {
  const char* class_name;  // _class_name of config.json
  ModelConfig (*parse)(std::string_view config);
  std::string (*first_layers)(std::string_view config, int64_t layers);  // the config of a model that ends after them
  std::unique_ptr<Model> (*open)(std::string_view config, const TensorSource& tensors, Engine& engine);
};
std::span<const Family* const> families();

// A folder as diffusers writes it. A class that no family names is refused, with those that are known.
ModelConfig parse_model_config(std::string_view json);
ModelConfig read_model_config(const std::string& folder);
std::unique_ptr<Model> open_model(const std::string& folder, Engine& engine);

// By the text of a config.json.
std::unique_ptr<Model> make_model(std::string_view config, const TensorSource& tensors, Engine& engine);
std::string first_layers(std::string_view config, int64_t layers);  // at most as many as there are

}  // namespace scope::video
