// What attention by warpgroups shares: rings of blocks in shared memory, and a softmax over blocks of logits.
#pragma once

#include <cuda_fp16.h>

#include <limits>
#include <type_traits>

#include "cuda/device/ptx_sm90.cuh"

namespace scope::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNoBase = std::numeric_limits<float>::lowest();
inline constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
// The float that an integer becomes when it is added to this one's bits, up to 2^22 either way, is their sum: logits in
// bytes begin here, and need not be converted; and a float added to it leaves the nearest integer in its bits.
inline constexpr float kWhole = 12582912.0f;

// Position in a ring of kCount slots that are filled and emptied in turn; one register.
template <int kCount>
struct Ring {
  static constexpr bool kCountsOn = (kCount & (kCount - 1)) == 0;  // where that costs no division
  uint32_t at = 0;  // counted on, or through two rounds, whose parities differ
  __device__ uint32_t slot() const { return kCountsOn ? at % kCount : at < kCount ? at : at - kCount; }
  __device__ uint32_t parity() const { return kCountsOn ? at / kCount % 2 : at < kCount ? 0 : 1; }
  __device__ void next() {
    ++at;
    if (!kCountsOn && at == 2 * kCount) at = 0;
  }
  __device__ void skip(uint32_t count) { at = kCountsOn ? at + count : (at + count) % (2 * kCount); }
};

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <DType kType>
using Element = std::conditional_t<kType == DType::bf16, __nv_bfloat16, __half>;

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

// The same by one warp without the others of its warpgroup: its 16 rows at a, kCount * 2 at b. kBytes: of bytes, from kWhole
// on.
template <DType kType, bool kBytes, int kPanels, int kStepA, int kStepB, int kCount>
__device__ void multiply_again(float (&s)[kCount], uint32_t a, uint32_t b) {
  int lane;  // volatile, so that the compiler leaves what is made of it here, and not in registers of the caller's loop
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int row = lane % 8, middle = lane / 8 % 2, upper = lane / 16;
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = kBytes ? kWhole : 0;
#pragma unroll 1
  for (int step = 0; step < 4 * kPanels; ++step) {  // of 32 bytes of each row
    const int panel = step / 4, chunk = step % 4 * 2;
    uint32_t x[4], y[4];
    load_matrix_x4(x, a + panel * kStepA + (row + 8 * middle) * 128 + (((chunk + upper) ^ row) << 4));
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      load_matrix_x4(y, b + panel * kStepB + (row + 8 * upper + 16 * i) * 128 + (((chunk + middle) ^ row) << 4));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        auto& four = *reinterpret_cast<float(*)[4]>(&s[8 * i + 4 * j]);
        if constexpr (kBytes) {
          int32_t sums[4];
          for (int l = 0; l < 4; ++l) sums[l] = __float_as_int(four[l]);
          mma_16x8x32(sums, x, y[2 * j], y[2 * j + 1]);
          for (int l = 0; l < 4; ++l) four[l] = __int_as_float(sums[l]);
        } else {
          mma_16x8x16<Element<kType>>(four, x, y[2 * j], y[2 * j + 1]);
        }
      }
    }
  }
}

// The highest of a row's logits, of which each lane of a quad has kCount / 2 for each of two rows.
template <int kCount>
__device__ void row_tops(const float (&s)[kCount], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float even = s[2 * h], odd = s[2 * h + 1];  // side by side, so that they wait less for one another
#pragma unroll
    for (int i = 4; i < kCount; i += 4) even = fmaxf(even, s[i + 2 * h]), odd = fmaxf(odd, s[i + 2 * h + 1]);
    top[h] = quad_max(fmaxf(even, odd));
  }
}

// What probabilities are rounded to: they are 2^kLift at the highest logit that was looked at, and none may pass kMost.
struct Bf16 {
  static constexpr float kLift = 0, kMost = 0x1p40f;
};
struct F16 {
  static constexpr float kLift = 0, kMost = 0x1p13f;
};
struct E4m3 {
  static constexpr float kLift = 6, kMost = 448;
};
template <DType kType>
using SixteenBits = std::conditional_t<kType == DType::bf16, Bf16, F16>;

// Online softmax of a thread's two rows: of a logit x the probability is 2^(unit x - base), and sums are of the same size.
// Base comes from the highest logit that was looked at; as long as probabilities keep below kMost it may stay.
template <class Range>
struct Softmax {
  float base[2] = {kNoBase, kNoBase};  // not -inf, which could not be subtracted from itself
  float sum[2] = {0, 0};               // of this thread's columns
  float factor[2];                     // what earlier sums were multiplied with when base was raised last

  // top: the highest logit of each row. unit: of a logit of each row, in powers of two.
  __device__ void raise(const float (&top)[2], const float (&unit)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = base[h];
      base[h] = fmaxf(before, fmaf(top[h], unit[h], -Range::kLift));
      factor[h] = exp2_approx(before - base[h]);
      sum[h] *= factor[h];
    }
  }
  // s: logits -> probabilities, and `added` their sums, which are not yet part of `sum`. False where one may pass kMost.
  template <int kCount>
  __device__ bool weigh(float (&s)[kCount], const float (&unit)[2], float (&added)[2]) const {
    added[0] = added[1] = 0;
    float most = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int h = i / 2 % 2;
      s[i] = exp2_approx(fmaf(s[i], unit[h], -base[h]));
      added[h] += s[i];
      if (kByTop) most = fmaxf(most, s[i]);
    }
    if (kByTop) return most <= Range::kMost && added[0] + added[1] < kInfinity;
    return added[0] <= Range::kMost && added[1] <= Range::kMost;
  }
  // After weigh: whether a row's sum kept below kMost in all four lanes that have a part of it.
  __device__ static bool fits(float added) {
    return (__ballot_sync(~0u, !(added <= Range::kMost)) >> (threadIdx.x % 32 & ~3u) & 15) == 0;
  }
  // Raises base after all, and lowers the probabilities of before; for finite sums.
  template <int kCount>
  __device__ void lower(float (&s)[kCount], float (&added)[2]) {
    float top[2];
    row_tops(s, top);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float steps = top[h] > Range::kMost ? __log2f(top[h]) - Range::kLift : 0;
      base[h] += steps;
      factor[h] = exp2_approx(-steps);
      sum[h] *= factor[h], added[h] *= factor[h];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= factor[i / 2 % 2];
  }

 private:
  static constexpr bool kByTop = std::is_same_v<Range, E4m3>;  // in 8 bits there is no room for many that are high together
};

}  // namespace scope::cuda
