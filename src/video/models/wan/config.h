// config.json of a Wan transformer, as diffusers writes it.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "video/model.h"

namespace scope::video::wan {

// The fields that change the function; 0 stands for null.
struct Config {
  std::array<int64_t, 3> patch = {1, 2, 2};  // of the latent along T, H and W
  int64_t heads = 40, head_dim = 128, layers = 40;
  int64_t in_channels = 16, out_channels = 16;
  int64_t text_dim = 4096, freq_dim = 256, ffn_dim = 13824;
  int64_t image_dim = 0;     // channels of the image encoder
  int64_t added_kv_dim = 0;  // Wan2.1's image branch of the cross-attention
  int64_t image_tokens = 0;  // pos_embed_seq_len
  int64_t rope_max = 1024;   // most tokens along an axis
  bool cross_attn_norm = true;
  double eps = 1e-6;

  int64_t dim() const { return heads * head_dim; }
  int64_t patch_size() const { return patch[0] * patch[1] * patch[2]; }
  std::vector<int64_t> rope() const;  // channels along T, H and W
  ModelConfig common() const;         // what other families say of themselves too
  bool operator==(const Config&) const = default;
};

// Whatever is wrong with the text is Error(Status::format). Of which class it is, was asked before.
Config parse_config(std::string_view json);
// The same text for a model that ends after its first layers.
std::string first_layers(std::string_view json, int64_t layers);

}  // namespace scope::video::wan
