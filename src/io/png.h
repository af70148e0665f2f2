// PNG images as 8-bit RGB: frames in and out, and the pictures that commands draw.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/file.h"

namespace scope::io {

// Rows from the top, pixels from the left, three bytes each: rgb.size() == height * width * 3.
struct Image {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> rgb;

  uint8_t* pixel(int64_t y, int64_t x) { return rgb.data() + (y * width + x) * 3; }
  const uint8_t* pixel(int64_t y, int64_t x) const { return rgb.data() + (y * width + x) * 3; }
  bool operator==(const Image&) const = default;
};

inline constexpr int64_t kMaxPixels = int64_t{1} << 27;  // a small file may announce any size

Image make_image(int64_t height, int64_t width, uint8_t grey = 0);

// Grey is repeated, palettes are looked up, 16 bits are rounded to 8, alpha is dropped and gamma is not applied. Broken
// bytes are Error(Status::format), more than kMaxPixels Error(Status::size_limit) or, in a file too short for them, format.
Image decode_png(std::span<const std::byte> bytes);
std::vector<std::byte> encode_png(const Image& image);

Image read_png(const std::string& path);
void write_png(const std::string& path, const Image& image);  // whole or not at all (write_file)

}  // namespace scope::io
