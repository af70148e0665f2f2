// What GPUs there are, for `scope doctor`; the CUDA stages come behind the same backend table.
#pragma once

#include <string>
#include <vector>

namespace scope::cuda {

struct Device {
  std::string name;
  int major = 0, minor = 0;
  long long memory_bytes = 0;
};

// False in a build without CUDA.
bool built();
// Empty without a driver or a GPU; never throws.
std::vector<Device> devices();

}  // namespace scope::cuda
