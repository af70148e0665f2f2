// Fuzzes decode_png: any bytes give an Error or an image that survives being encoded and decoded again.
#include <cstdlib>

#include "io/png.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scope::io;
  try {
    const Image image = decode_png(std::as_bytes(std::span(data, size)));
    if (decode_png(encode_png(image)) != image) std::abort();
  } catch (const scope::Error& error) {
    if (error.status() != scope::Status::format && error.status() != scope::Status::size_limit) std::abort();
  }
  return 0;
}
