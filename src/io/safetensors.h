// Reads and writes .safetensors files: named dense arrays and string metadata; strict, since files are not trusted.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "io/file.h"

namespace scope::io {

inline constexpr int64_t kMaxSafetensorsHeader = int64_t{16} << 20;
inline constexpr int64_t kMaxTensors = 65'536;  // and as many metadata entries

struct SafeTensors {
  std::map<std::string, Array> tensors;
  std::map<std::string, std::string> metadata;
  bool operator==(const SafeTensors&) const = default;
};

// Whatever is wrong with the bytes is Error(Status::format).
SafeTensors parse_safetensors(std::span<const std::byte> bytes);
SafeTensors read_safetensors(const std::string& path);
// The shape of every tensor, without reading any; the file is checked as far as it can be.
std::map<std::string, std::vector<int64_t>> read_safetensors_shapes(const std::string& path);

// The same contents always give the same bytes: tensors lie in the map's order.
void write_safetensors(const std::string& path, const SafeTensors& file);

// All that stands before the data: the length and the JSON, padded with spaces to a multiple of 8 bytes.
std::string safetensors_header(const SafeTensors& file);

}  // namespace scope::io
