// Fuzzes decode_png: any bytes give an Error or an image that survives being encoded and decoded again.
#include <zlib.h>

#include <cstdlib>

#include "io/png.h"

namespace {

// Checksums would stop nearly every mutation at the door: the chunks get right ones.
std::vector<std::byte> with_checksums(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  for (size_t at = 8; at + 12 <= size;) {
    const size_t length = size_t{bytes[at]} << 24 | size_t{bytes[at + 1]} << 16 | size_t{bytes[at + 2]} << 8 | bytes[at + 3];
    if (length > size - at - 12) break;
    const uLong crc = crc32(0, &bytes[at + 4], static_cast<uInt>(length + 4));
    for (size_t i = 0; i < 4; ++i) bytes[at + 8 + length + i] = static_cast<uint8_t>(crc >> (24 - 8 * i));
    at += length + 12;
  }
  const auto view = std::as_bytes(std::span(bytes));
  return {view.begin(), view.end()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scope::io;
  try {
    const Image image = decode_png(with_checksums(data, size));
    if (decode_png(encode_png(image)) != image) std::abort();
  } catch (const scope::Error& error) {
    if (error.status() != scope::Status::format && error.status() != scope::Status::size_limit) std::abort();
  }
  return 0;
}
