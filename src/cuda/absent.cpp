// The answer of a build without CUDA.
#include "cuda/clock.h"
#include "cuda/device.h"
#include "cuda/memory.h"
#include "stages/backend.h"

namespace scope {

const Backend* cuda_backend() { return nullptr; }

namespace cuda {

bool built() { return false; }
std::vector<Device> devices() { return {}; }
std::shared_ptr<Clock> make_clock(int) { return nullptr; }
void* allocate(int64_t) { fail(Status::unsupported, "backend: this build has no CUDA"); }
void release(void*) {}
void upload(const void*, void*, int64_t) { fail(Status::unsupported, "backend: this build has no CUDA"); }
void download(const void*, void*, int64_t) { fail(Status::unsupported, "backend: this build has no CUDA"); }

}  // namespace cuda
}  // namespace scope
