// Fuzzes parse_npy: any bytes give Error(Status::format) or an array that survives being written and parsed again.
#include <algorithm>
#include <cstdlib>

#include "io/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scope::io;
  try {
    const Array array = parse_npy(std::as_bytes(std::span(data, size)));
    const std::string header = npy_header(array);
    std::vector<std::byte> written(header.size());
    std::copy_n(reinterpret_cast<const std::byte*>(header.data()), header.size(), written.begin());
    written.insert(written.end(), array.data.begin(), array.data.end());
    if (parse_npy(written) != array) std::abort();
  } catch (const scope::Error& error) {
    if (error.status() != scope::Status::format) std::abort();
  }
  return 0;
}
