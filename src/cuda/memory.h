// Device memory for the command and the tests; a call never uses it.
#pragma once

#include <cstdint>
#include <memory>

namespace scope::cuda {

void* allocate(int64_t bytes);
void release(void* memory);
void upload(const void* host, void* to, int64_t bytes);
void download(const void* from, void* host, int64_t bytes);

struct Release {
  void operator()(void* memory) const { release(memory); }
};
using Memory = std::unique_ptr<void, Release>;
inline Memory make_memory(int64_t bytes) { return Memory(allocate(bytes)); }

}  // namespace scope::cuda
