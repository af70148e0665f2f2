// Wan's diffusion transformer on an engine: the function of diffusers' WanTransformer3DModel, one sample at a time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pipeline/call.h"
#include "video/engine.h"
#include "video/weights.h"

namespace scope::video {

class Transformer {
 public:
  // Reads the folder. Compute is the engine's, but for the embedding of time: always f32 on the host.
  Transformer(const std::string& folder, Engine& engine);
  const Config& config() const { return config_; }
  Engine& engine() const { return engine_; }

  struct Attention {
    Linear to_q, to_k, to_v, to_out, add_k, add_v;  // add_*: the image branch
    const float *norm_q = nullptr, *norm_k = nullptr, *norm_added_k = nullptr;
  };
  struct Block {
    Attention self, cross;
    Linear expand, contract;
    const float *norm_scale = nullptr, *norm_shift = nullptr;  // before the cross-attention; null: no norm there
    const float* modulation = nullptr;                         // [6, dim]
  };
  struct Embedders {
    Linear patch, text_1, text_2, image_1, image_2;
    const float *image_norm1[2] = {}, *image_norm2[2] = {};  // scale, shift
    const float* image_places = nullptr;                     // [image_tokens, image_dim]; null: none
  };
  const Embedders& embedders() const { return embedders_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  const Linear& projection() const { return projection_; }
  const float* last_modulation() const { return last_modulation_; }  // [2, dim]

  // What every layer takes from the timesteps: [steps, 7, dim] f32 in the engine's memory, six rows for the blocks and one
  // for the end.
  Buffer embed_time(std::span<const double> timesteps) const;

 private:
  Linear linear(const std::string& name) const;
  const float* vector(const std::string& name) const;

  Engine& engine_;
  Config config_;
  std::unique_ptr<Engine> host_;
  std::map<std::string, std::unique_ptr<Weights>> matrices_;
  std::map<std::string, Buffer> vectors_;
  Embedders embedders_;
  Linear time_1_, time_2_, time_projection_;
  std::vector<Block> blocks_;
  Linear projection_;
  const float* last_modulation_ = nullptr;
};

// Encoded text and image of one guidance branch: f32 on the host.
struct Prompt {
  std::vector<float> text;   // [text_tokens, text_dim]
  std::vector<float> image;  // [image_tokens, image_dim]; empty where the model takes none
};

// Everything that forward passes at one grid share. q, k, v and out of `attend` are [tokens, heads x head_dim].
class Pass {
 public:
  using Attend = std::function<void(int64_t layer, Matrix q, Matrix k, Matrix v, Matrix out)>;

  Pass(const Transformer& model, const std::array<int64_t, 3>& grid);
  const PatchGrid& grid() const { return grid_; }

  // A prompt as the layers read it.
  class Text {
   public:
    Text() = default;

   private:
    friend class Pass;
    Matrix text_, image_;  // [tokens, dim]
    Buffer memory_;
    std::shared_ptr<Plan> text_plan_, image_plan_;
    Buffer workspace_, keys_;
  };
  Text embed(const Prompt& prompt);

  // latent [out_channels, T, H, W] and more [in - out channels, T, H, W] -> velocity [out_channels, T, H, W], all f32 in the
  // engine's memory; time: one timestep of embed_time. `attend` may write out over q: they are the same memory.
  void forward(const float* latent, const float* more, const float* time, const Text& text, const Attend& attend,
               float* velocity);

 private:
  Matrix matrix(const Buffer& memory, DType dtype, int64_t columns) const {
    return {memory.get(), dtype, grid_.tokens(), columns};
  }
  void self_attention(const Transformer::Attention& layer, int64_t index, const Attend& attend);
  void cross_attention(const Transformer::Attention& layer, const Text& text);
  void attend_all(const Plan& plan, const Text& text, Matrix q, Matrix k, Matrix v, Matrix out);

  const Transformer& model_;
  Engine& engine_;
  const Config& config_;
  PatchGrid grid_;
  Buffer hidden_;      // f32: the residual stream
  Buffer normed_;      // activation: what a linear layer reads
  Buffer wide_;        // activation: what it writes, ffn_dim wide; patches in and out
  Buffer q_, k_, v_;   // attention
  Buffer rotation_;    // [tokens, 2, head_dim / 2]
  Buffer modulation_;  // [6, dim]
};

}  // namespace scope::video
