// Reads and writes NumPy's .npy files (versions 1 to 3, little-endian, C order); strict, since files are not trusted.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "io/file.h"

namespace scope::io {

inline constexpr int64_t kMaxNpyHeader = 10'000;  // NumPy's own limit

// Whatever is wrong with the bytes is Error(Status::format).
Array parse_npy(std::span<const std::byte> bytes);
Array read_npy(const std::string& path);

// .npy has no bf16: Error(Status::dtype).
void write_npy(const std::string& path, const Array& array);

// All that stands before the data, a multiple of 64 bytes as NumPy writes it.
std::string npy_header(const Array& array);

}  // namespace scope::io
