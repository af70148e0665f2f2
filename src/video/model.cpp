// Finds the family of a model by the class that its config.json names.
#include "video/model.h"

#include "video/fields.h"

namespace scope::video {

namespace {

const Family& find_family(std::string_view config) {
  std::vector<std::string> names;
  for (const Family* family : families()) names.emplace_back(family->class_name);
  return *families()[Fields(config).text("_class_name", names)];
}

}  // namespace

void check_prompt(const ModelConfig& config, const Prompt& prompt) {
  const int64_t size = std::ssize(prompt.text), tokens = size / config.text_dim;
  require(size > 0 && size % config.text_dim == 0, Status::shape, "prompt_embeds: got {} numbers, expected rows of {}", size,
          config.text_dim);
  require(config.text_tokens == 0 || tokens <= config.text_tokens, Status::shape,
          "prompt_embeds: got {} tokens, this model takes up to {}", tokens, config.text_tokens);
  require(std::ssize(prompt.pooled) == config.pooled_dim, Status::shape,
          "pooled_prompt_embeds: got {} numbers, this model takes {}", prompt.pooled.size(), config.pooled_dim);
}

ModelConfig parse_model_config(std::string_view json) { return find_family(json).parse(json); }

ModelConfig read_model_config(const std::string& folder) { return read_config(folder, parse_model_config); }

std::unique_ptr<Model> open_model(const std::string& folder, Engine& engine) {
  const std::string config = read_config(folder, [](std::string_view json) {
    parse_model_config(json);
    return std::string(json);
  });
  return make_model(config, tensors_in(folder), engine);
}

std::unique_ptr<Model> make_model(std::string_view config, const TensorSource& tensors, Engine& engine) {
  return find_family(config).open(config, tensors, engine);
}

std::string first_layers(std::string_view config, int64_t layers) {
  return find_family(config).first_layers(config, layers);
}

}  // namespace scope::video
