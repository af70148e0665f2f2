// Fuzzes parse_safetensors: any bytes give Error(Status::format) or tensors that survive being written and parsed again.
#include <algorithm>
#include <cstdlib>

#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scope::io;
  try {
    const SafeTensors file = parse_safetensors(std::as_bytes(std::span(data, size)));
    const std::string header = safetensors_header(file);
    std::vector<std::byte> written(header.size());
    std::copy_n(reinterpret_cast<const std::byte*>(header.data()), header.size(), written.begin());
    for (const auto& item : file.tensors) written.insert(written.end(), item.second.data.begin(), item.second.data.end());
    if (parse_safetensors(written) != file) std::abort();
  } catch (const scope::Error& error) {
    if (error.status() != scope::Status::format) std::abort();
  }
  return 0;
}
