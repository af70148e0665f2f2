// Lists GPUs through the statically linked CUDA runtime, which loads without a driver.
#include "cuda/device.h"

#include <cuda_runtime_api.h>

namespace scope::cuda {

std::vector<Device> devices() {
  std::vector<Device> found;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // a machine without a driver is an answer, not a failure
    return found;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
    found.push_back({p.name, i, p.major, p.minor, p.multiProcessorCount, static_cast<int64_t>(p.sharedMemPerBlockOptin),
                     static_cast<int64_t>(p.totalGlobalMem)});
  }
  return found;
}

}  // namespace scope::cuda
