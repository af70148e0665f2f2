// What every CUDA stage shares on the host side (included by .cu files): errors, launches, and rows as kernels take them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.h"
#include "core/tensor.h"
#include "cuda/device.h"
#include "cuda/errors.h"
#include "stages/exec.h"

namespace scope::cuda {

// After every launch: a configuration that the device refuses is reported at once, and by name.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline cudaStream_t stream(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

template <class... Parameters, class... Args>
void launch(const Exec& exec, const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
            int64_t shared_bytes, const Args&... args) {
  if (blocks > INT32_MAX) fail(Status::size_limit, std::string(name) + ": too many blocks for one launch");
  if (shared_bytes > exec.device->shared_bytes) {  // which the tests make less than the device has
    fail(Status::internal, std::string(name) + ": more shared memory than a block can have");
  }
  if (shared_bytes > 32 << 10) {  // more than 48 KiB, what the kernel declares among them, must be asked for
    // As much as there is, since the program's threads share the answer: less would take from a launch that is on its way.
    cudaFuncAttributes declared{};
    check(cudaFuncGetAttributes(&declared, kernel), name);
    const auto rest = static_cast<int>(exec.device->shared_bytes - static_cast<int64_t>(declared.sharedSizeBytes));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, rest), name);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, static_cast<size_t>(shared_bytes), stream(exec)>>>(args...);
  check_launch(name);
}

// The same for a kernel whose blocks wait for one another: no more than can be resident at once.
template <class... Parameters, class... Args>
void launch_together(const Exec& exec, const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
                     const Args&... args) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream(exec);
  config.attrs = &together;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), name);
}

// As many blocks as are resident at once, but no more than there is work for.
inline int64_t blocks_for(const Exec& exec, int64_t blocks_per_sm, int64_t most) {
  return std::max<int64_t>(1, std::min(most, blocks_per_sm * exec.device->multiprocessors));
}

// This thread's warp in its block. Shuffled, so that the compiler knows that all lanes have the same: where it cannot tell
// that a warp stays together, it makes a call of every shuffle.
__device__ inline int warp_index() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// Rows of 16-bit elements for each head.
template <class T>
struct HeadRows {
  T* base = nullptr;
  int64_t head_step = 0, row_step = 0;  // elements

  __host__ __device__ T* row(int64_t head, int64_t token) const { return base + head * head_step + token * row_step; }
};

inline HeadRows<const uint16_t> head_rows(const HeadsView& x) {
  return {static_cast<const uint16_t*>(x.data), x.head_stride, x.row_stride};
}
inline HeadRows<uint16_t> head_rows(const MutableHeadsView& x) {
  return {static_cast<uint16_t*>(x.data), x.head_stride, x.row_stride};
}

}  // namespace scope::cuda
