// A model's folder as diffusers writes it: config.json, and tensors in one .safetensors file or in shards with an index.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/file.h"
#include "video/engine.h"

namespace scope::video {

// Text of at most 16 MiB.
std::string read_text(const std::string& path);

// What `parse` makes of the folder's config.json.
template <class Parse>
auto read_config(const std::string& folder, Parse parse) {
  const std::string path = folder + "/config.json";
  return io::with_path(path, [&] { return parse(read_text(path)); });
}

// Which file of the folder holds each tensor. Whatever is wrong with the text is Error(Status::format).
std::map<std::string, std::string> parse_index(std::string_view json);

// A linear layer whose first `left` inputs come in one matrix and the others in another.
struct SplitMatrix {
  int64_t left;
  const Weights** first;
  const Weights** second;
};

// One tensor of a model: what the files must hold, where it goes, and who keeps it.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  std::variant<const Weights**, const float**, SplitMatrix> place;  // a linear layer's matrix, or f32 as they are
  bool on_host = false;                                             // not on the model's engine
  bool large = false;                                               // a layer that the engine may `quantise`
};

struct TensorList {
  std::vector<Tensor> tensors;
  std::string ignored;  // files may hold tensors with this in their name; empty: none
};

// What places point to.
struct LoadedTensors {
  std::vector<std::unique_ptr<Weights>> matrices;
  std::vector<Buffer> vectors;
};

// Fills every place of a list.
using TensorSource = std::function<LoadedTensors(const TensorList& list, Engine& engine, Engine& host)>;

// From a folder, one file in memory at a time. A tensor that is missing, not in the list, of another shape or not of a float
// type is Error(Status::format) with its name and file; other places may be filled by then.
TensorSource tensors_in(const std::string& folder);
// Numbers that a seed names, drawn where each tensor is kept: normals that keep the size of what goes through a layer, and
// norms near 1. The same for a backend and a seed.
TensorSource drawn_tensors(uint64_t seed);

// The shapes of all tensors in a folder's files.
std::map<std::string, std::vector<int64_t>> read_shapes(const std::string& folder);

// A float array as f32.
std::vector<float> to_f32(const io::Array& array);

}  // namespace scope::video
