// The answer of a build without CUDA.
#include "cuda/device.h"

namespace scope::cuda {

bool built() { return false; }
std::vector<Device> devices() { return {}; }

}  // namespace scope::cuda
