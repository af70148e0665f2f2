// The ranges of Wan's fields, and what must hold between them.
#include "video/models/wan/config.h"

#include <algorithm>

#include "video/fields.h"

namespace scope::video::wan {

std::vector<int64_t> Config::rope() const {
  const int64_t side = 2 * (head_dim / 6);
  return {head_dim - 2 * side, side, side};
}

ModelConfig Config::common() const {
  return {.layers = layers,
          .heads = heads,
          .head_dim = head_dim,
          .rope = rope(),
          .rope_max = rope_max,
          .patch = patch,
          .latent_channels = out_channels,
          .condition_channels = in_channels - out_channels,
          .text_dim = text_dim,
          .image_dim = image_dim,
          .image_tokens = image_tokens,
          .text_tokens = 0};
}

Config parse_config(std::string_view text) {
  constexpr int64_t kMost = int64_t{1} << 20;
  Config config;
  Fields fields(text);
  fields.triple("patch_size", 1, 16, config.patch);
  fields.integer("num_attention_heads", 1, 1024, config.heads);
  fields.integer("attention_head_dim", 6, 256, config.head_dim);
  fields.integer("num_layers", 1, 1024, config.layers);
  fields.integer("in_channels", 1, 4096, config.in_channels);
  config.out_channels = 16;
  fields.integer("out_channels", 1, 4096, config.out_channels, true);
  if (config.out_channels == 0) config.out_channels = config.in_channels;
  fields.integer("text_dim", 1, kMost, config.text_dim);
  fields.integer("freq_dim", 2, kMost, config.freq_dim);
  fields.integer("ffn_dim", 1, kMost, config.ffn_dim);
  fields.integer("image_dim", 1, kMost, config.image_dim, true);
  fields.integer("added_kv_proj_dim", 1, kMost, config.added_kv_dim, true);
  fields.integer("pos_embed_seq_len", 1, kMost, config.image_tokens, true);
  fields.integer("rope_max_seq_len", 1, kMost, config.rope_max);
  fields.boolean("cross_attn_norm", config.cross_attn_norm);
  fields.real("eps", 0, 1, config.eps);
  fields.text("qk_norm", {"rms_norm_across_heads"});
  fields.end();
  require(config.head_dim % 2 == 0, Status::format, "attention_head_dim: got {}, expected an even number", config.head_dim);
  require(config.in_channels >= config.out_channels, Status::format,
          "in_channels: got {}, expected at least the {} that come out", config.in_channels, config.out_channels);
  require(config.added_kv_dim == 0 || (config.image_dim > 0 && config.added_kv_dim == config.dim()), Status::format,
          "added_kv_proj_dim: got {}, expected the model's width {} and an image_dim", config.added_kv_dim, config.dim());
  require(config.image_tokens == 0 || config.image_dim > 0, Status::format,
          "pos_embed_seq_len: got {}, and there is no image_dim", config.image_tokens);
  return config;
}

std::string first_layers(std::string_view text, int64_t layers) {
  nlohmann::json json = parse_json(text);
  json["num_layers"] = std::min(layers, parse_config(text).layers);
  return json.dump();
}

}  // namespace scope::video::wan
