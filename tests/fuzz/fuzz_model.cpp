// Fuzzes the JSON of a model folder: any text is a config, an index, a scheduler or notes that hold together, or
// Error(Status::format).
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "video/folder.h"
#include "video/media.h"
#include "video/models/hunyuan/layers.h"
#include "video/models/wan/layers.h"

namespace {

// Each name and every dimension of a model's tensors.
void check(const scope::video::TensorList& list) {
  for (const scope::video::Tensor& tensor : list.tensors) {
    for (const int64_t n : tensor.shape) {
      if (n < 1 || tensor.name.empty()) std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scope::video;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto refused = [](const auto& parse) {
    try {
      parse();
    } catch (const scope::Error& error) {
      if (error.status() != scope::Status::format) std::abort();
    }
  };
  refused([&] {
    const ModelConfig config = parse_model_config(text);
    if (config.layers < 1 || config.latent_channels < 1 || config.condition_channels < 0) std::abort();
  });
  // What is no JSON is refused alike by all: one parser is enough, and seven exceptions take most of the time.
  if (!nlohmann::json::accept(text)) return 0;
  refused([&] {
    const wan::Config config = wan::parse_config(text);
    if (config.layers * config.heads > 64) return;
    wan::Layers layers;
    check(wan::list_tensors(config, layers));
  });
  refused([&] {
    const hunyuan::Config config = hunyuan::parse_config(text);
    if (config.common().layers * config.heads > 64 || config.refiner_blocks > 64) return;
    hunyuan::Layers layers;
    check(hunyuan::list_tensors(config, layers));
  });
  refused([&] {
    for (const auto& item : parse_index(text)) {
      if (item.second.empty() || item.second.find('/') != std::string::npos) std::abort();
    }
  });
  refused([&] {
    const ModelIndex index = parse_model_index(text);
    if (index.two_experts != (index.boundary > 0)) std::abort();
  });
  refused([&] {
    if (!(parse_scheduler(text).shift > 0)) std::abort();
  });
  refused([&] {
    if (!(parse_notes(text).shift > 0)) std::abort();
  });
  return 0;
}
