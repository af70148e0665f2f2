// CUDA's entry in the list of backends.
#pragma once

#include "stages/backend.h"

namespace scope {

const Backend* cuda_backend();  // null in a build without CUDA

}  // namespace scope
