// Lays the heads of a call one after the other.
#include "qkv_dump.h"

#include <cstring>

#include "io/safetensors.h"

namespace scope::cli {

void write_qkv(const std::string& path, const video::ModelConfig& config, const std::array<int64_t, 3>& grid, DType dtype,
               std::initializer_list<std::pair<const char*, const std::vector<std::byte>*>> parts) {
  const int64_t row = config.head_dim * dtype_bytes(dtype);
  io::SafeTensors file;
  for (const auto& [name, bytes] : parts) {
    const int64_t tokens = std::ssize(*bytes) / (config.heads * row);  // text and all
    io::Array& array = file.tensors[name];
    array.type = dtype == DType::f32 ? io::ElementType::f32 : io::ElementType::bf16;
    array.shape = {config.heads, tokens, config.head_dim};
    array.data.resize(bytes->size());
    for (int64_t h = 0; h < config.heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(array.data.data() + (h * tokens + t) * row, bytes->data() + (t * config.heads + h) * row,
                    static_cast<size_t>(row));
      }
    }
  }
  file.metadata["grid"] = io::join(grid, "x");
  file.metadata["rope"] = io::join(config.rope, ",");
  io::write_safetensors(path, file);
}

}  // namespace scope::cli
