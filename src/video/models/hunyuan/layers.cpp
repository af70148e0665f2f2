// The list of tensors, a line for each layer.
#include "video/models/hunyuan/layers.h"

#include <fmt/format.h>

namespace scope::video::hunyuan {

TensorList list_tensors(const Config& config, Layers& layers) {
  TensorList list;
  const int64_t dim = config.dim(), mlp = config.mlp_dim();
  bool on_host = false, large = false;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, auto place) {
    list.tensors.push_back({name, std::move(shape), place, on_host, large});
  };
  const auto linear = [&](const std::string& name, int64_t in, int64_t out, Linear& place) {
    add(name + ".weight", {out, in}, &place.weights);
    add(name + ".bias", {out}, &place.bias);
  };
  const auto embedder = [&](const std::string& name, int64_t in, Embedder& place) {
    on_host = true;
    linear(name + ".linear_1", in, dim, place.first);
    linear(name + ".linear_2", dim, dim, place.second);
    on_host = false;
  };
  const auto modulation = [&](const std::string& name, int64_t vectors, Linear& place) {
    linear(name, dim, vectors * dim, place);
    list.tensors[list.tensors.size() - 2].large = false;  // of one row, and every row of the stream is scaled by it
  };
  const auto projections = [&](const std::string& name, auto& place) {
    linear(name + "to_q", dim, dim, place.to_q);
    linear(name + "to_k", dim, dim, place.to_k);
    linear(name + "to_v", dim, dim, place.to_v);
  };
  const auto head_norms = [&](const std::string& q, const std::string& k, auto& place) {
    add(q + ".weight", {config.head_dim}, &place.norm_q);
    add(k + ".weight", {config.head_dim}, &place.norm_k);
  };
  const auto feed_forward = [&](const std::string& name, int64_t wide, auto& place) {
    linear(name + ".net.0.proj", dim, wide, place.expand);
    linear(name + ".net.2", wide, dim, place.contract);
  };

  add("x_embedder.proj.weight", {dim, config.in_channels, config.patch_size_t, config.patch_size, config.patch_size},
      &layers.patch.weights);
  add("x_embedder.proj.bias", {dim}, &layers.patch.bias);
  embedder("time_text_embed.timestep_embedder", kWaves, layers.time);
  embedder("time_text_embed.text_embedder", config.pooled_dim, layers.pooled);
  if (config.guidance) embedder("time_text_embed.guidance_embedder", kWaves, layers.guidance);

  const std::string refiner = "context_embedder.";
  embedder(refiner + "time_text_embed.timestep_embedder", kWaves, layers.refiner_time);
  embedder(refiner + "time_text_embed.text_embedder", config.text_dim, layers.refiner_text);
  linear(refiner + "proj_in", config.text_dim, dim, layers.text);
  layers.refiner.resize(static_cast<size_t>(config.refiner_blocks));
  for (size_t i = 0; i < layers.refiner.size(); ++i) {
    const std::string name = fmt::format("{}token_refiner.refiner_blocks.{}.", refiner, i);
    RefinerBlock& block = layers.refiner[i];
    const auto norm = [&](const std::string& part, Norm& place) {
      add(name + part + ".weight", {dim}, &place.scale);
      add(name + part + ".bias", {dim}, &place.shift);
    };
    norm("norm1", block.norm_1);
    norm("norm2", block.norm_2);
    projections(name + "attn.", block);
    linear(name + "attn.to_out.0", dim, dim, block.to_out);
    feed_forward(name + "ff", config.refiner_mlp_dim(), block);
    linear(name + "norm_out.linear", dim, 2 * dim, block.gates);
  }

  large = true;
  layers.double_blocks.resize(static_cast<size_t>(config.double_blocks));
  for (size_t i = 0; i < layers.double_blocks.size(); ++i) {
    const std::string name = fmt::format("transformer_blocks.{}.", i), attention = name + "attn.";
    auto& [video, text] = layers.double_blocks[i];
    modulation(name + "norm1.linear", 6, video.modulation);
    projections(attention, video);
    head_norms(attention + "norm_q", attention + "norm_k", video);
    linear(attention + "to_out.0", dim, dim, video.to_out);
    feed_forward(name + "ff", mlp, video);
    modulation(name + "norm1_context.linear", 6, text.modulation);
    linear(attention + "add_q_proj", dim, dim, text.to_q);
    linear(attention + "add_k_proj", dim, dim, text.to_k);
    linear(attention + "add_v_proj", dim, dim, text.to_v);
    head_norms(attention + "norm_added_q", attention + "norm_added_k", text);
    linear(attention + "to_add_out", dim, dim, text.to_out);
    feed_forward(name + "ff_context", mlp, text);
  }

  layers.single_blocks.resize(static_cast<size_t>(config.single_blocks));
  for (size_t i = 0; i < layers.single_blocks.size(); ++i) {
    const std::string name = fmt::format("single_transformer_blocks.{}.", i);
    SingleBlock& block = layers.single_blocks[i];
    modulation(name + "norm.linear", 3, block.modulation);
    projections(name + "attn.", block);
    head_norms(name + "attn.norm_q", name + "attn.norm_k", block);
    linear(name + "proj_mlp", dim, mlp, block.expand);
    add(name + "proj_out.weight", {dim, dim + mlp},
        SplitMatrix{dim, &block.from_attention.weights, &block.from_mlp.weights});
    add(name + "proj_out.bias", {dim}, &block.from_attention.bias);
  }
  large = false;
  linear("norm_out.linear", dim, 2 * dim, layers.last_modulation);
  linear("proj_out", dim, config.out_channels * config.patch_elements(), layers.projection);
  return list;
}

}  // namespace scope::video::hunyuan
