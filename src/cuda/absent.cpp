// The answer of a build without CUDA.
#include "cuda/backend.h"

namespace scope {

const Backend* cuda_backend() { return nullptr; }

}  // namespace scope
