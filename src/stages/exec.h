// What a stage runs on: threads and instruction set on the CPU, a stream on a device; and how large a call can be.
#pragma once

#include "core/parallel.h"

namespace scope {

namespace cpu {
struct Kernels;
struct AttendKernels;
struct ByteKernels;
}  // namespace cpu

namespace cuda {
struct Device;
}  // namespace cuda

enum class Products : int;  // stages/attend.h
class Clock;                // stages/clock.h

struct Exec {
  ThreadPool* pool = nullptr;

  // The CPU's.
  const cpu::Kernels* kernels = nullptr;
  const cpu::AttendKernels* attend_kernels = nullptr;       // f32 arithmetic
  const cpu::AttendKernels* attend_kernels_bf16 = nullptr;  // bf16 dot products, for bf16 inputs; null: use f32's
  const cpu::ByteKernels* byte_kernels = nullptr;           // 8-bit products of bf16 inputs; null: there are none
  int64_t proxy_floats = 8 << 20;  // of a head's proxy matrix that are held at a time, or one row on each thread

  // CUDA's.
  const cuda::Device* device = nullptr;
  int64_t memory_bytes = 0;  // the device's
  bool wgmma = false;        // attend, K-means and the mean with sm_90a kernels; false: portable ones

  // Of one call.
  void* stream = nullptr;      // a device's queue; everything is launched on it, and nothing waits for it
  const void* call = nullptr;  // whose times the clock records: the call's workspace; null: no times are wanted
  Clock* clock = nullptr;      // the context's, or the call's own
};

// Memory a stage may scribble on during one call.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};

// Upper bounds over the samples of a call, from which every stage's scratch follows.
struct Sizes {
  int64_t heads = 1;  // of a chunk
  int64_t q_tokens = 0, k_tokens = 0, dim = 0;
  int64_t groups = 0;
  int64_t codes = 0;         // per subspace; 0: keys are not encoded
  bool whole_codes = false;  // the rule keeps whole codes
  bool sampled = false;      // it sees a sample of the keys
  int64_t extra = 0;         // virtual keys that attend sees; 0: none
  int64_t parts = 0;         // of each group; 0: groups are not split
  int64_t part_stride = 1;   // the parts' means come from every such key
  Products products = {};    // of attend
};

}  // namespace scope
