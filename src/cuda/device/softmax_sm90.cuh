// What attention by warpgroups shares: rings of blocks in shared memory, and a softmax over blocks of logits.
#pragma once

#include <cuda_fp16.h>

#include <limits>

#include "cuda/device/ptx_sm90.cuh"

namespace scope::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2e = 1.44269504088896f;

// Position in a ring of kCount slots that are filled and emptied in turn.
template <int kCount>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++slot == kCount) slot = 0, parity ^= 1;
  }
  __device__ void skip(int count) {
    parity ^= (slot + count) / kCount & 1;
    slot = (slot + count) % kCount;
  }
};

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <DType kType>
__device__ uint32_t pack(float low, float high) {
  uint32_t both;
  if constexpr (kType == DType::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

template <DType kType>
__device__ float2 unpack(uint32_t both) {
  if constexpr (kType == DType::bf16) return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
  return __half22float2(*reinterpret_cast<const __half2*>(&both));
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Online softmax of a thread's two rows. `high` may lag behind the true maximum by up to kLag powers of two, which
// saves most of the rescaling; sums and products stay far from overflow.
struct Softmax {
  static constexpr float kLag = 8;
  float high[2] = {-kInfinity, -kInfinity};  // of unscaled logits
  float sum[2] = {0, 0};                     // of this thread's columns
  float factor[2];                           // what the last block multiplies earlier sums with

  // s: logits -> probabilities.
  template <int kCount>
  __device__ void block(float (&s)[kCount], float unit) {
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * h + i % 2]);
      top = quad_max(top);
      const float before = high[h];
      if (!((top - before) * unit <= kLag)) high[h] = fmaxf(before, top);
      const float base = high[h] == -kInfinity ? 0.0f : high[h];  // -inf minus -inf would be NaN
      factor[h] = exp2_approx((before - base) * unit);
      shift[h] = base;
    }
    // A fused multiply-subtract leaves the rounding error of shift * unit in the exponent: subtract first where it matters.
    if (__any_sync(~0u, fmaxf(fabsf(shift[0]), fabsf(shift[1])) * unit > 4096.0f)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] -= shift[i / 2 % 2];
      shift[0] = shift[1] = 0;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] *= factor[h];
      shift[h] *= unit;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], unit, -shift[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }
};

}  // namespace scope::cuda
