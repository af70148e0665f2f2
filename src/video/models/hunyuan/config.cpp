// The ranges of HunyuanVideo's fields, and what must hold between them.
#include "video/models/hunyuan/config.h"

#include <algorithm>

#include "video/fields.h"

namespace scope::video::hunyuan {

namespace {

// What diffusers' pipelines make of a prompt: 256 tokens of text, behind every fourth or every second of an image's 576.
int64_t text_tokens(ImageCondition image) {
  switch (image) {
    case ImageCondition::none:
      return 256;
    case ImageCondition::latent_concat:
      return 256 + 288;
    case ImageCondition::token_replace:
      return 256 + 144;
  }
  return 0;
}

}  // namespace

ModelConfig Config::common() const {
  return {.layers = double_blocks + single_blocks,
          .heads = heads,
          .head_dim = head_dim,
          .rope = {rope.begin(), rope.end()},
          .rope_max = 1024,
          .patch = {patch_size_t, patch_size, patch_size},
          .latent_channels = out_channels,
          .condition_channels = in_channels - out_channels,
          .needs_first_frame = image == ImageCondition::token_replace,
          .text_dim = text_dim,
          .text_tokens = text_tokens(image),
          .pooled_dim = pooled_dim,
          .embeds_guidance = guidance};
}

Config parse_config(std::string_view text) {
  constexpr int64_t kMost = int64_t{1} << 20;
  Config config;
  Fields fields(text);
  fields.integer("patch_size", 1, 16, config.patch_size);
  fields.integer("patch_size_t", 1, 16, config.patch_size_t);
  fields.integer("num_attention_heads", 1, 1024, config.heads);
  fields.integer("attention_head_dim", 6, 256, config.head_dim);
  fields.integer("num_layers", 0, 1024, config.double_blocks);
  fields.integer("num_single_layers", 0, 1024, config.single_blocks);
  fields.integer("num_refiner_layers", 0, 1024, config.refiner_blocks);
  fields.integer("in_channels", 1, 4096, config.in_channels);
  fields.integer("out_channels", 1, 4096, config.out_channels, true);
  if (config.out_channels == 0) config.out_channels = config.in_channels;
  fields.integer("text_embed_dim", 1, kMost, config.text_dim);
  fields.integer("pooled_projection_dim", 1, kMost, config.pooled_dim);
  fields.real("mlp_ratio", 0.01, 64, config.mlp_ratio);
  fields.triple("rope_axes_dim", 2, 256, config.rope);
  fields.real("rope_theta", 1, 1e9, config.rope_theta);
  fields.boolean("guidance_embeds", config.guidance);
  fields.text("qk_norm", {"rms_norm"});
  const size_t image = fields.text("image_condition_type", {"latent_concat", "token_replace"}, true);
  config.image = image == 0   ? ImageCondition::latent_concat
                 : image == 1 ? ImageCondition::token_replace
                              : ImageCondition::none;
  fields.end();
  const auto& rope = config.rope;
  require(rope[0] % 2 == 0 && rope[1] % 2 == 0 && rope[2] % 2 == 0 && rope[0] + rope[1] + rope[2] == config.head_dim,
          Status::format, "rope_axes_dim: got [{}, {}, {}], expected even numbers that add up to attention_head_dim {}",
          rope[0], rope[1], rope[2], config.head_dim);
  require(config.double_blocks + config.single_blocks >= 1, Status::format,
          "num_layers and num_single_layers: got 0 of both, expected a block");
  require(config.mlp_dim() >= 1, Status::format, "mlp_ratio: got {}, which leaves nothing of {} channels", config.mlp_ratio,
          config.dim());
  require(config.image != ImageCondition::token_replace || config.patch_size_t == 1, Status::format,
          "patch_size_t: got {}, expected 1 where an image replaces the tokens of the first frame", config.patch_size_t);
  const bool same = config.image != ImageCondition::latent_concat;
  require(same ? config.in_channels == config.out_channels : config.in_channels > config.out_channels, Status::format,
          "in_channels: got {}, expected {} the {} that come out", config.in_channels, same ? "as many as" : "more than",
          config.out_channels);
  return config;
}

std::string first_layers(std::string_view text, int64_t layers) {
  nlohmann::json json = parse_json(text);
  const Config config = parse_config(text);
  const int64_t doubles = std::min(layers, config.double_blocks);
  json["num_layers"] = doubles;
  json["num_single_layers"] = std::min(layers - doubles, config.single_blocks);
  return json.dump();
}

}  // namespace scope::video::hunyuan
