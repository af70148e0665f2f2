// What attention by warpgroups shares: rings of blocks in shared memory, and a softmax over blocks of logits.
#pragma once

#include <cuda_fp16.h>

#include <limits>

#include "cuda/device/ptx_sm90.cuh"

namespace scope::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2e = 1.44269504088896f;
// The float that an integer becomes when it is added to this one's bits, up to 2^22 either way, is their sum: logits in
// bytes begin here, and need not be converted; and a float added to it leaves the nearest integer in its bits.
inline constexpr float kWhole = 12582912.0f;

// Position in a ring of kCount slots that are filled and emptied in turn; one register.
template <int kCount>
struct Ring {
  int at = 0;  // of two rounds, whose parities differ
  __device__ int slot() const { return at < kCount ? at : at - kCount; }
  __device__ uint32_t parity() const { return at < kCount ? 0 : 1; }
  __device__ void next() {
    if (++at == 2 * kCount) at = 0;
  }
  __device__ void skip(int count) { at = (at + count) % (2 * kCount); }
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

// Four bytes, the first in the lowest; for sm_89 and later.
__device__ inline uint32_t pack_e4m3([[maybe_unused]] float a, [[maybe_unused]] float b, [[maybe_unused]] float c,
                                     [[maybe_unused]] float d) {
  uint32_t four = 0;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
#endif
  return four;
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

// s = the products of 64 rows at a and kCount * 2 at b over kDim channels: panels that lie kStepA and kStepB bytes apart.
template <DType kType, int kDim, int kStepA, int kStepB, int kCount>
__device__ void multiply_rows(float (&s)[kCount], uint64_t a, uint64_t b) {
  wgmma_ss<kType, false>(s, a, b);
#pragma unroll
  for (int i = 1; i < kDim / 16; ++i) {
    wgmma_ss<kType, true>(s, a + (i / 4 * kStepA + i % 4 * 32 >> 4), b + (i / 4 * kStepB + i % 4 * 32 >> 4));
  }
}

// What probabilities are rounded to: they reach up to 2^(kLift + kLag).
struct SixteenBits {
  static constexpr float kLag = 8, kLift = 0;
};
struct E4m3 {  // up to 448
  static constexpr float kLag = 2.75f, kLift = 6;
};

// Online softmax of a thread's two rows. `high` may lag behind the true maximum by up to kLag powers of two, which
// saves most of the rescaling; sums and products stay far from overflow. Probabilities and sums are 2^kLift times larger.
template <class Range = SixteenBits>
struct Softmax {
  float high[2] = {-kInfinity, -kInfinity};  // of unscaled logits
  float sum[2] = {0, 0};                     // of this thread's columns
  float factor[2];                           // what the last block multiplies earlier sums with

  // s: logits -> probabilities. unit: of a logit of each row, in powers of two.
  template <int kCount>
  __device__ void block(float (&s)[kCount], const float (&unit)[2]) {
    block(s, unit, [&](int h) {
      float top = s[2 * h];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * h + i % 2]);
      return top;
    });
  }
  // The same; top_of(h): the highest of the thread's logits in row h.
  template <int kCount, class TopOf>
  __device__ void block(float (&s)[kCount], const float (&unit)[2], const TopOf& top_of) {
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = quad_max(top_of(h));
      const float before = high[h];
      if (!((top - before) * unit[h] <= Range::kLag)) high[h] = fmaxf(before, top);
      const float base = high[h] == -kInfinity ? 0.0f : high[h];  // -inf minus -inf would be NaN
      factor[h] = exp2_approx((before - base) * unit[h]);
      shift[h] = base;
    }
    // A fused multiply-subtract leaves the rounding error of shift * unit in the exponent: subtract first where it matters.
    if (__any_sync(~0u, fmaxf(fabsf(shift[0]) * unit[0], fabsf(shift[1]) * unit[1]) > 4096.0f)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] -= shift[i / 2 % 2];
      shift[0] = shift[1] = 0;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] *= factor[h];
      shift[h] = shift[h] * unit[h] - Range::kLift;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], unit[i / 2 % 2], -shift[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }
};

}  // namespace scope::cuda
