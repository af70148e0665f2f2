// config.json of a HunyuanVideo transformer, as diffusers writes it.
#pragma once

#include <array>
#include <string_view>

#include "video/model.h"

namespace scope::video::hunyuan {

// How an image comes in: not at all, by channels beside the noise, or as the tokens of the first frame.
enum class ImageCondition { none, latent_concat, token_replace };

// The fields that change the function.
struct Config {
  int64_t patch_size = 2, patch_size_t = 1;  // of the latent along H and W, and along T
  int64_t heads = 24, head_dim = 128;
  int64_t double_blocks = 20, single_blocks = 40, refiner_blocks = 2;
  int64_t in_channels = 16, out_channels = 16;
  int64_t text_dim = 4096, pooled_dim = 768;
  double mlp_ratio = 4;
  std::array<int64_t, 3> rope = {16, 56, 56};  // channels of a head along T, H and W
  double rope_theta = 256;
  bool guidance = true;  // embedded beside the timestep
  ImageCondition image = ImageCondition::none;

  int64_t dim() const { return heads * head_dim; }
  int64_t mlp_dim() const { return static_cast<int64_t>(static_cast<double>(dim()) * mlp_ratio); }
  int64_t refiner_mlp_dim() const { return 4 * dim(); }
  int64_t patch_elements() const { return patch_size_t * patch_size * patch_size; }
  ModelConfig common() const;  // what other families say of themselves too
  bool operator==(const Config&) const = default;
};

// Whatever is wrong with the text is Error(Status::format). Of which class it is, was asked before.
Config parse_config(std::string_view json);
// The same text for a model that ends after its first layers.
std::string first_layers(std::string_view json, int64_t layers);

}  // namespace scope::video::hunyuan
