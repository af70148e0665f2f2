// Finds the family of a model by the class that its config.json names.
#include "video/model.h"

#include "video/fields.h"
#include "video/weights.h"

namespace scope::video {

namespace {

const Family& find_family(std::string_view config) {
  std::vector<std::string> names;
  for (const Family* family : families()) names.emplace_back(family->class_name);
  return *families()[Fields(config).text("_class_name", names)];
}

}  // namespace

ModelConfig parse_model_config(std::string_view json) { return find_family(json).parse(json); }

ModelConfig read_model_config(const std::string& folder) { return read_config(folder, parse_model_config); }

std::unique_ptr<Model> open_model(const std::string& folder, Engine& engine) {
  const Family* family = read_config(folder, [](std::string_view json) { return &find_family(json); });
  return family->open(folder, engine);
}

}  // namespace scope::video
