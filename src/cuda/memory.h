// Device memory for the engine; a call never uses it.
#pragma once

#include <cstdint>

namespace scope::cuda {

void* allocate(int64_t bytes);
void release(void* memory);

}  // namespace scope::cuda
