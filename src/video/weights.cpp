// Reads the index of shards and the tensors, and holds each against the list.
#include "video/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/numeric.h"
#include "io/safetensors.h"
#include "video/fields.h"

namespace scope::video {

namespace {

constexpr int64_t kMostJson = int64_t{16} << 20;
constexpr const char* kWeights = "diffusion_pytorch_model.safetensors";
constexpr const char* kIndex = "diffusion_pytorch_model.safetensors.index.json";

void check_tensor(const Tensor& expected, const io::Array& got) {
  const std::string& name = expected.name;
  require(got.shape == expected.shape, Status::format, "tensor '{}': got shape [{}], config.json implies [{}]", name,
          io::join(got.shape), io::join(expected.shape));
  require(got.type == io::ElementType::f32 || got.type == io::ElementType::bf16 || got.type == io::ElementType::f16,
          Status::format, "tensor '{}': got {}, expected f32, bf16 or f16", name, io::element_name(got.type));
}

// Columns first .. first + count - 1 of a matrix.
io::Array columns_of(const io::Array& from, int64_t first, int64_t count) {
  const int64_t each = io::element_bytes(from.type), rows = from.shape[0], row = from.shape[1] * each;
  io::Array out{from.type, {rows, count}, std::vector<std::byte>(static_cast<size_t>(rows * count * each))};
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(from.data.begin() + i * row + first * each, count * each, out.data.begin() + i * count * each);
  }
  return out;
}

// Every dimension but the first is one of the matrix's inputs.
void load(const Tensor& tensor, const io::Array& from, Engine& keeper, LoadedTensors& loaded) {
  const auto pack = [&](const io::Array& matrix, const Weights** place) {
    int64_t in = 1;
    for (size_t i = 1; i < matrix.shape.size(); ++i) in *= matrix.shape[i];
    loaded.matrices.push_back(keeper.pack(matrix, matrix.shape[0], in));
    if (tensor.large) keeper.quantise(*loaded.matrices.back(), tensor.name);
    *place = loaded.matrices.back().get();
  };
  if (const auto* matrix = std::get_if<const Weights**>(&tensor.place)) {
    pack(from, *matrix);
  } else if (const auto* split = std::get_if<SplitMatrix>(&tensor.place)) {
    pack(columns_of(from, 0, split->left), split->first);
    pack(columns_of(from, split->left, from.shape[1] - split->left), split->second);
  } else {
    loaded.vectors.push_back(uploaded(keeper, to_f32(from)));
    *std::get<const float**>(tensor.place) = static_cast<const float*>(loaded.vectors.back().get());
  }
}

// Which file of the folder holds each tensor; empty: there is one file for all.
std::map<std::string, std::string> read_index(const std::string& folder) {
  const std::string path = folder + "/" + kIndex;
  if (io::exists(folder + "/" + kWeights) || !io::exists(path)) return {};
  return io::with_path(path, [&] { return parse_index(read_text(path)); });
}

std::set<std::string> files_of(const std::map<std::string, std::string>& index) {
  std::set<std::string> files;
  for (const auto& item : index) files.insert(item.second);
  return files.empty() ? std::set<std::string>{kWeights} : files;
}

LoadedTensors load_tensors(const std::string& folder, const TensorList& list, Engine& engine, Engine& host) {
  const std::map<std::string, std::string> index = read_index(folder);
  std::map<std::string, const Tensor*> expected;
  for (const Tensor& tensor : list.tensors) expected[tensor.name] = &tensor;
  auto missing = expected;
  LoadedTensors loaded;
  for (const std::string& file : files_of(index)) {
    const std::string path = fmt::format("{}/{}", folder, file);
    const io::SafeTensors read = io::read_safetensors(path);
    io::with_path(path, [&] {
      for (const auto& [name, tensor] : read.tensors) {
        if (!list.ignored.empty() && name.find(list.ignored) != std::string::npos) continue;
        const auto found = missing.find(name);
        require(found != missing.end(), Status::format, "tensor '{}': config.json implies no such tensor{}",
                io::printable(name), expected.contains(name) ? " twice" : "");
        const auto listed = index.find(name);
        require(index.empty() || (listed != index.end() && listed->second == file), Status::format,
                "tensor '{}': {} puts it elsewhere", io::printable(name), kIndex);
        check_tensor(*found->second, tensor);
        load(*found->second, tensor, found->second->on_host ? host : engine, loaded);
        missing.erase(found);
      }
    });
  }
  require(missing.empty(), Status::format, "{}: tensor '{}' of shape [{}] is missing, and {} more", folder,
          missing.empty() ? "" : missing.begin()->first, missing.empty() ? "" : io::join(missing.begin()->second->shape),
          missing.size() - (missing.empty() ? 0 : 1));
  return loaded;
}

// Every dimension but the first is one of the matrix's inputs.
void draw(const Tensor& tensor, RandomStream from, Engine& keeper, LoadedTensors& drawn) {
  int64_t numbers = 1;
  for (const int64_t n : tensor.shape) numbers *= n;
  const int64_t out = tensor.shape[0], in = numbers / out;
  const auto matrix = [&](int64_t inputs, const Weights** place) {
    const auto deviation = static_cast<float>(1.0 / std::sqrt(static_cast<double>(in)));
    drawn.matrices.push_back(keeper.draw_weights(from, deviation, out, inputs));
    if (tensor.large) keeper.quantise(*drawn.matrices.back(), tensor.name);
    *place = drawn.matrices.back().get();
    ++from.tensor;  // the next matrix of this tensor has other numbers
  };
  if (const auto* place = std::get_if<const Weights**>(&tensor.place)) {
    matrix(in, *place);
  } else if (const auto* split = std::get_if<SplitMatrix>(&tensor.place)) {
    matrix(split->left, split->first);
    matrix(in - split->left, split->second);
  } else {
    constexpr float kSmall = 0.02f;
    const bool norm = tensor.name.ends_with(".weight");
    drawn.vectors.push_back(keeper.allocate(numbers * static_cast<int64_t>(sizeof(float))));
    keeper.draw(from, norm ? 1.0f : 0.0f, kSmall, {drawn.vectors.back().get(), DType::f32, 1, numbers});
    *std::get<const float**>(tensor.place) = static_cast<const float*>(drawn.vectors.back().get());
  }
}

}  // namespace

std::string read_text(const std::string& path) {
  const auto bytes = io::read_file(path, kMostJson);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::map<std::string, std::string> parse_index(std::string_view text) {
  const nlohmann::json index = parse_json(text);
  require(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(), Status::format,
          "expected a JSON object with an object 'weight_map'");
  std::map<std::string, std::string> files;
  for (const auto& item : index["weight_map"].items()) {
    const std::string name = io::printable(item.key());
    require(item.value().is_string(), Status::format, "weight_map, '{}': got {}, expected a file name", name,
            shown(item.value()));
    const std::string& file = item.value().get_ref<const std::string&>();
    // The files of a model lie in its folder: an index must not lead out of it.
    require(!file.empty() && file != "." && file != ".." && file.find('/') == std::string::npos &&
                file.find('\0') == std::string::npos,
            Status::format, "weight_map, '{}': got '{}', expected the name of a file in the same folder", name,
            io::printable(file));
    files[item.key()] = file;
  }
  return files;
}

TensorSource tensors_in(const std::string& folder) {
  return [folder](const TensorList& list, Engine& engine, Engine& host) { return load_tensors(folder, list, engine, host); };
}

TensorSource drawn_tensors(uint64_t seed) {
  return [seed](const TensorList& list, Engine& engine, Engine& host) {
    LoadedTensors drawn;
    RandomStream from{.seed = seed, .purpose = 5};
    for (const Tensor& tensor : list.tensors) {
      draw(tensor, from, tensor.on_host ? host : engine, drawn);
      ++from.subspace;
    }
    return drawn;
  };
}

std::map<std::string, std::vector<int64_t>> read_shapes(const std::string& folder) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const std::string& file : files_of(read_index(folder))) {
    shapes.merge(io::read_safetensors_shapes(fmt::format("{}/{}", folder, file)));
  }
  return shapes;
}

std::vector<float> to_f32(const io::Array& array) {
  std::vector<float> out(array.data.size() / static_cast<size_t>(io::element_bytes(array.type)));
  if (array.type == io::ElementType::f32) {
    if (!out.empty()) std::memcpy(out.data(), array.data.data(), array.data.size());
    return out;
  }
  require(array.type == io::ElementType::bf16 || array.type == io::ElementType::f16, Status::dtype,
          "got {}, expected f32, bf16 or f16", io::element_name(array.type));
  const bool bf16 = array.type == io::ElementType::bf16;
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, array.data.data() + 2 * i, 2);
    out[i] = bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
  return out;
}

}  // namespace scope::video
