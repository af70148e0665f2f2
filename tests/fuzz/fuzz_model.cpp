// Fuzzes the JSON of a model folder: any text is a config, an index, a scheduler or notes that hold together, or
// Error(Status::format).
#include <cstdlib>

#include "video/folder.h"
#include "video/media.h"
#include "video/models/wan/layers.h"

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
  refused([&] {
    const wan::Config config = wan::parse_config(text);
    if (config.layers * config.heads > 64) return;
    wan::Layers layers;
    for (const Tensor& tensor : wan::list_tensors(config, layers).tensors) {
      for (const int64_t n : tensor.shape) {
        if (n < 1 || tensor.name.empty()) std::abort();
      }
    }
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
