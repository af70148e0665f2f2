// Reads config.json, the index of shards and the tensors, and holds each against the others.
#include "video/weights.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/numeric.h"
#include "io/safetensors.h"

namespace scope::video {

namespace {

using nlohmann::json;

constexpr int64_t kMostJson = int64_t{16} << 20;
constexpr const char* kWeights = "diffusion_pytorch_model.safetensors";
constexpr const char* kIndex = "diffusion_pytorch_model.safetensors.index.json";

std::string shown(const json& value) { return io::printable(value.dump(-1, ' ', true, json::error_handler_t::replace), 60); }

// Files are not trusted: what nests deeply would exhaust the stack of whoever walks it.
json parse_json(std::string_view text) {
  return json::parse(
      text,
      [](int depth, json::parse_event_t, json&) {
        require(depth <= 8, Status::format, "JSON nested deeper than 8 levels");
        return true;
      },
      false);
}

// An object whose keys are read one by one; what nobody asked for is refused at the end, because it could change the model.
class Fields {
 public:
  explicit Fields(std::string_view text) : json_(parse_json(text)) {
    require(json_.is_object(), Status::format, "not a JSON object");
  }

  // An absent field keeps the value it has; null is allowed where 0 says so.
  void integer(const char* name, int64_t low, int64_t high, int64_t& value, bool nullable = false) {
    const json* found = find(name);
    if (found == nullptr) return;
    if (nullable && found->is_null()) {
      value = 0;
      return;
    }
    value = number(name, *found, low, high);
  }

  void triple(const char* name, int64_t low, int64_t high, std::array<int64_t, 3>& value) {
    const json* found = find(name);
    if (found == nullptr) return;
    require(found->is_array() && found->size() == 3, Status::format, "{}: got {}, expected three integers", name,
            shown(*found));
    for (size_t i = 0; i < 3; ++i) value[i] = number(name, (*found)[i], low, high);
  }

  void boolean(const char* name, bool& value) {
    const json* found = find(name);
    if (found == nullptr) return;
    require(found->is_boolean(), Status::format, "{}: got {}, expected true or false", name, shown(*found));
    value = found->get<bool>();
  }

  void real(const char* name, double low, double high, double& value) {
    const json* found = find(name);
    if (found == nullptr) return;
    require(found->is_number() && found->get<double>() >= low && found->get<double>() <= high, Status::format,
            "{}: got {}, expected a number in {}..{}", name, shown(*found), low, high);
    value = found->get<double>();
  }

  // Only this text will do.
  void text(const char* name, const char* expected) {
    const json* found = find(name);
    require(found != nullptr && found->is_string() && found->get_ref<const std::string&>() == expected, Status::format,
            "{}: got {}, expected \"{}\"", name, found == nullptr ? "nothing" : shown(*found), expected);
  }

  void end() const {
    for (const auto& item : json_.items()) {
      require(item.key().starts_with('_') || known_.contains(item.key()), Status::format,
              "'{}': unknown key, and it may change the model", io::printable(item.key()));
    }
  }

 private:
  const json* find(const char* name) {
    known_.insert(name);
    const auto at = json_.find(name);
    return at == json_.end() ? nullptr : &*at;
  }

  static int64_t number(const char* name, const json& value, int64_t low, int64_t high) {
    const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX) &&
                      value.get<int64_t>() >= low && value.get<int64_t>() <= high;
    require(fits, Status::format, "{}: got {}, expected an integer in {}..{}", name, shown(value), low, high);
    return value.get<int64_t>();
  }

  json json_;
  std::set<std::string> known_;
};

std::string read_text(const std::string& path) {
  const auto bytes = io::read_file(path, kMostJson);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void check_tensor(const std::string& name, const io::Array& got, const std::vector<int64_t>& expected) {
  require(got.shape == expected, Status::format, "tensor '{}': got shape [{}], config.json implies [{}]", name,
          io::join(got.shape), io::join(expected));
  require(got.type == io::ElementType::f32 || got.type == io::ElementType::bf16 || got.type == io::ElementType::f16,
          Status::format, "tensor '{}': got {}, expected f32, bf16 or f16", name, io::element_name(got.type));
}

}  // namespace

std::vector<int64_t> Config::rope() const {
  const int64_t side = 2 * (head_dim / 6);
  return {head_dim - 2 * side, side, side};
}

Config parse_config(std::string_view text) {
  constexpr int64_t kMost = int64_t{1} << 20;
  Config config;
  Fields fields(text);
  fields.text("_class_name", "WanTransformer3DModel");
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
  fields.text("qk_norm", "rms_norm_across_heads");
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

Config read_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  return io::with_path(path, [&] { return parse_config(read_text(path)); });
}

std::map<std::string, std::string> parse_index(std::string_view text) {
  const json index = parse_json(text);
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

std::map<std::string, std::vector<int64_t>> tensor_shapes(const Config& config) {
  std::map<std::string, std::vector<int64_t>> shapes;
  const int64_t dim = config.dim();
  const auto vector = [&](const std::string& name, int64_t n) { shapes[name] = {n}; };
  const auto linear = [&](const std::string& name, int64_t in, int64_t out) {
    shapes[name + ".weight"] = {out, in};
    shapes[name + ".bias"] = {out};
  };
  const auto layer_norm = [&](const std::string& name, int64_t n) {
    vector(name + ".weight", n);
    vector(name + ".bias", n);
  };
  shapes["patch_embedding.weight"] = {dim, config.in_channels, config.patch[0], config.patch[1], config.patch[2]};
  vector("patch_embedding.bias", dim);
  const std::string embedder = "condition_embedder.";
  linear(embedder + "time_embedder.linear_1", config.freq_dim, dim);
  linear(embedder + "time_embedder.linear_2", dim, dim);
  linear(embedder + "time_proj", dim, 6 * dim);
  linear(embedder + "text_embedder.linear_1", config.text_dim, dim);
  linear(embedder + "text_embedder.linear_2", dim, dim);
  if (config.image_dim > 0) {
    const std::string image = embedder + "image_embedder.";
    layer_norm(image + "norm1", config.image_dim);
    linear(image + "ff.net.0.proj", config.image_dim, config.image_dim);
    linear(image + "ff.net.2", config.image_dim, dim);
    layer_norm(image + "norm2", dim);
    if (config.image_tokens > 0) shapes[image + "pos_embed"] = {1, config.image_tokens, config.image_dim};
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string block = fmt::format("blocks.{}.", layer);
    shapes[block + "scale_shift_table"] = {1, 6, dim};
    for (const char* attention : {"attn1", "attn2"}) {
      for (const char* part : {".to_q", ".to_k", ".to_v", ".to_out.0"}) linear(block + attention + part, dim, dim);
      vector(block + attention + ".norm_q.weight", dim);
      vector(block + attention + ".norm_k.weight", dim);
    }
    if (config.added_kv_dim > 0) {
      linear(block + "attn2.add_k_proj", config.added_kv_dim, dim);
      linear(block + "attn2.add_v_proj", config.added_kv_dim, dim);
      vector(block + "attn2.norm_added_k.weight", dim);
    }
    if (config.cross_attn_norm) layer_norm(block + "norm2", dim);
    linear(block + "ffn.net.0.proj", dim, config.ffn_dim);
    linear(block + "ffn.net.2", config.ffn_dim, dim);
  }
  linear("proj_out", dim, config.out_channels * config.patch_size());
  shapes["scale_shift_table"] = {1, 2, dim};
  return shapes;
}

void read_weights(const std::string& folder, const Config& config, const UseTensor& use) {
  const std::string index_path = folder + "/" + kIndex;
  std::set<std::string> files = {kWeights};
  std::map<std::string, std::string> index;
  if (!std::filesystem::exists(folder + "/" + kWeights) && std::filesystem::exists(index_path)) {
    index = io::with_path(index_path, [&] { return parse_index(read_text(index_path)); });
    files.clear();
    for (const auto& item : index) files.insert(item.second);
  }
  auto missing = tensor_shapes(config);
  for (const std::string& file : files) {
    const std::string path = fmt::format("{}/{}", folder, file);
    const io::SafeTensors read = io::read_safetensors(path);
    io::with_path(path, [&] {
      for (const auto& [name, tensor] : read.tensors) {
        if (name.find(".norm_added_q.") != std::string::npos) continue;  // old exports carry it, and nothing reads it
        const auto expected = missing.find(name);
        require(expected != missing.end(), Status::format, "tensor '{}': config.json implies no such tensor{}",
                io::printable(name), tensor_shapes(config).contains(name) ? " twice" : "");
        const auto listed = index.find(name);
        require(index.empty() || (listed != index.end() && listed->second == file), Status::format,
                "tensor '{}': {} puts it elsewhere", io::printable(name), kIndex);
        check_tensor(name, tensor, expected->second);
        use(name, tensor);
        missing.erase(expected);
      }
    });
  }
  require(missing.empty(), Status::format, "{}: tensor '{}' of shape [{}] is missing, and {} more", folder,
          missing.empty() ? "" : missing.begin()->first, missing.empty() ? "" : io::join(missing.begin()->second),
          missing.size() - (missing.empty() ? 0 : 1));
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
