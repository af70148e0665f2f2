// A Wan transformer as diffusers stores it: config.json and the tensors it implies, in one .safetensors file or in shards.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"

namespace scope::video {

// The fields of config.json that change the function; 0 stands for null.
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
  bool operator==(const Config&) const = default;
};

// Whatever is wrong with the text is Error(Status::format).
Config parse_config(std::string_view json);
Config read_config(const std::string& folder);

// Which file of the folder holds each tensor. Error(Status::format) likewise.
std::map<std::string, std::string> parse_index(std::string_view json);

// Every tensor of such a model, with its shape.
std::map<std::string, std::vector<int64_t>> tensor_shapes(const Config& config);

// Hands every tensor to `use`, one file in memory at a time. A tensor that is missing, unknown, of another shape or not of a
// float type is Error(Status::format) with its name and file; `use` may have seen others by then.
using UseTensor = std::function<void(const std::string& name, const io::Array& tensor)>;
void read_weights(const std::string& folder, const Config& config, const UseTensor& use);

// A float array as f32.
std::vector<float> to_f32(const io::Array& array);

}  // namespace scope::video
