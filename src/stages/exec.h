// What a stage runs on: threads and instruction set on the CPU, a stream on a device.
#pragma once

#include "core/parallel.h"

namespace scope {

namespace cpu {
struct Kernels;
struct AttendKernels;
}  // namespace cpu

namespace cuda {
struct Device;
class Clock;
}  // namespace cuda

struct Exec {
  ThreadPool* pool = nullptr;
  const cpu::Kernels* kernels = nullptr;
  const cpu::AttendKernels* attend_kernels = nullptr;       // f32 arithmetic
  const cpu::AttendKernels* attend_kernels_bf16 = nullptr;  // bf16 dot products, for bf16 inputs; null: use f32's

  const cuda::Device* device = nullptr;  // the rest: CUDA only
  void* stream = nullptr;                // a cudaStream_t; everything is launched on it, and nothing waits for it
  cuda::Clock* clock = nullptr;          // records when each stage begins; null: no times
  const void* call = nullptr;            // whose times those are: the call's workspace
  bool wgmma = false;                    // attend and K-means with sm_90a kernels; false: portable ones
};

// Memory a stage may scribble on during one call.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};

}  // namespace scope
