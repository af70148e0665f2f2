// Lists GPUs through the statically linked CUDA runtime, which loads without a driver.
#include "cuda/device.h"

#include <cuda_runtime_api.h>

namespace scope::cuda {

bool built() { return true; }

std::vector<Device> devices() {
  std::vector<Device> found;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return found;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    found.push_back(
        {properties.name, properties.major, properties.minor, static_cast<long long>(properties.totalGlobalMem)});
  }
  return found;
}

}  // namespace scope::cuda
