// The list of tensors, a line for each layer.
#include "video/models/wan/layers.h"

#include <fmt/format.h>

namespace scope::video::wan {

TensorList list_tensors(const Config& config, Layers& layers) {
  TensorList list;
  list.ignored = ".norm_added_q.";  // old exports carry it, and nothing reads it
  const int64_t dim = config.dim();
  bool on_host = false, large = false;
  const auto matrix = [&](const std::string& name, std::vector<int64_t> shape, const Weights*& place) {
    list.tensors.push_back({name, std::move(shape), &place, on_host, large});
  };
  const auto vector = [&](const std::string& name, std::vector<int64_t> shape, const float*& place) {
    list.tensors.push_back({name, std::move(shape), &place, on_host});
  };
  const auto linear = [&](const std::string& name, int64_t in, int64_t out, Linear& place) {
    matrix(name + ".weight", {out, in}, place.weights);
    vector(name + ".bias", {out}, place.bias);
  };
  const auto norm = [&](const std::string& name, int64_t n, Norm& place) {
    vector(name + ".weight", {n}, place.scale);
    vector(name + ".bias", {n}, place.shift);
  };

  matrix("patch_embedding.weight", {dim, config.in_channels, config.patch[0], config.patch[1], config.patch[2]},
         layers.patch.weights);
  vector("patch_embedding.bias", {dim}, layers.patch.bias);
  const std::string embedder = "condition_embedder.";
  on_host = true;
  linear(embedder + "time_embedder.linear_1", config.freq_dim, dim, layers.time_1);
  linear(embedder + "time_embedder.linear_2", dim, dim, layers.time_2);
  linear(embedder + "time_proj", dim, 6 * dim, layers.time_projection);
  on_host = false;
  linear(embedder + "text_embedder.linear_1", config.text_dim, dim, layers.text_1);
  linear(embedder + "text_embedder.linear_2", dim, dim, layers.text_2);
  if (config.image_dim > 0) {
    const std::string image = embedder + "image_embedder.";
    norm(image + "norm1", config.image_dim, layers.image_norm1);
    linear(image + "ff.net.0.proj", config.image_dim, config.image_dim, layers.image_1);
    linear(image + "ff.net.2", config.image_dim, dim, layers.image_2);
    norm(image + "norm2", dim, layers.image_norm2);
    if (config.image_tokens > 0)
      vector(image + "pos_embed", {1, config.image_tokens, config.image_dim}, layers.image_places);
  }
  large = true;
  layers.blocks.resize(static_cast<size_t>(config.layers));
  for (size_t i = 0; i < layers.blocks.size(); ++i) {
    const std::string name = fmt::format("blocks.{}.", i);
    Block& block = layers.blocks[i];
    vector(name + "scale_shift_table", {1, 6, dim}, block.modulation);
    const auto attention = [&](const std::string& part, Attention& place) {
      linear(part + "to_q", dim, dim, place.to_q);
      linear(part + "to_k", dim, dim, place.to_k);
      linear(part + "to_v", dim, dim, place.to_v);
      linear(part + "to_out.0", dim, dim, place.to_out);
      vector(part + "norm_q.weight", {dim}, place.norm_q);
      vector(part + "norm_k.weight", {dim}, place.norm_k);
    };
    attention(name + "attn1.", block.self);
    attention(name + "attn2.", block.cross);
    if (config.added_kv_dim > 0) {
      linear(name + "attn2.add_k_proj", config.added_kv_dim, dim, block.cross.add_k);
      linear(name + "attn2.add_v_proj", config.added_kv_dim, dim, block.cross.add_v);
      vector(name + "attn2.norm_added_k.weight", {dim}, block.cross.norm_added_k);
    }
    if (config.cross_attn_norm) norm(name + "norm2", dim, block.norm);
    linear(name + "ffn.net.0.proj", dim, config.ffn_dim, block.expand);
    linear(name + "ffn.net.2", config.ffn_dim, dim, block.contract);
  }
  large = false;
  linear("proj_out", dim, config.out_channels * config.patch_size(), layers.projection);
  vector("scale_shift_table", {1, 2, dim}, layers.last_modulation);
  return list;
}

}  // namespace scope::video::wan
