// 8-bit products of queries and keys for attend (AVX-512 VNNI), in intrinsics as kernels_bf16.cpp is.
#include "cpu/kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "core/numeric.h"
#include "stages/attend.h"

#define SCOPE_S8 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#if defined(__clang__)
#define SCOPE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SCOPE_UNROLL _Pragma("GCC unroll 32")
#endif

namespace scope::cpu {

namespace {

constexpr int64_t kVectors = 4;            // sums per query, as in the other kernels
constexpr int64_t kPanel = 16 * kVectors;  // keys of a panel
constexpr int kMiddle = 128;               // added to a key's bytes: vpdpbusd multiplies unsigned ones by signed ones

// To the nearest whole numbers from -127 to 127: what lies beyond, which no key that counts does, saturates.
SCOPE_S8 inline __m512i to_s8(__m512 x) {
  const __m512i whole = _mm512_cvtps_epi32(x);
  return _mm512_max_epi32(_mm512_min_epi32(whole, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
}

// Channels c to c + 15 of a bf16 row; zeros from dim on.
SCOPE_S8 inline __m512 load(const uint16_t* row, int64_t c, int64_t dim) {
  const auto some = static_cast<__mmask16>((uint32_t{1} << std::clamp<int64_t>(dim - c, 0, 16)) - 1);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, row + c)), 16));
}

// Extremes stay in registers, of 64 channels at a time: channels are padded so far.
SCOPE_S8 bool widen(const RowsView& src, const int32_t* rows, int64_t count, float* low, float* high) {
  static_assert(kMostChannels % kPanel == 0);
  __m512 beyond = _mm512_setzero_ps();  // NaN after anything that is not finite
  for (int64_t c = 0; c < src.dim; c += kPanel) {
    __m512 least[kVectors], most[kVectors];
    SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) {
      least[v] = _mm512_loadu_ps(low + c + 16 * v), most[v] = _mm512_loadu_ps(high + c + 16 * v);
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto* row = reinterpret_cast<const uint16_t*>(src.row(rows[i]));
      SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) {
        const __m512 x = load(row, c + 16 * v, src.dim);
        least[v] = _mm512_min_ps(least[v], x), most[v] = _mm512_max_ps(most[v], x);
        beyond = _mm512_fmadd_ps(x, _mm512_setzero_ps(), beyond);
      }
    }
    SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(low + c + 16 * v, least[v]), _mm512_storeu_ps(high + c + 16 * v, most[v]);
    }
  }
  return _mm512_cmp_ps_mask(beyond, beyond, _CMP_UNORD_Q) == 0;
}

// Multiplies a row by the Hadamard matrix of as many channels, without its factor: neighbours in steps of 1, 2, 4, …
template <int kParts>
SCOPE_S8 inline void rotate(__m512 (&x)[kParts]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  SCOPE_UNROLL for (int step = 1; step < 16; step *= 2) {
    const __m512i other = _mm512_xor_si512(lane, _mm512_set1_epi32(step));
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(step));
    SCOPE_UNROLL for (int v = 0; v < kParts; ++v) {
      const __m512 y = _mm512_permutexvar_ps(other, x[v]);
      x[v] = _mm512_mask_sub_ps(_mm512_add_ps(y, x[v]), upper, y, x[v]);
    }
  }
  SCOPE_UNROLL for (int step = 1; step < kParts; step *= 2) {
    SCOPE_UNROLL for (int v = 0; v < kParts; ++v) {
      if ((v & step) != 0) continue;
      const __m512 a = x[v], b = x[v + step];
      x[v] = _mm512_add_ps(a, b), x[v + step] = _mm512_sub_ps(a, b);
    }
  }
}

// 0 stays 0 where a factor is infinite: its channel had nothing to be balanced by.
SCOPE_S8 inline __m512 stretch(__m512 x, const float* times) {
  return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ), x, _mm512_loadu_ps(times));
}

template <int kParts>
SCOPE_S8 inline void rotated_key(__m512 (&x)[kParts], const RowsView& src, int64_t i, const ByteFactors& by) {
  const auto* row = reinterpret_cast<const uint16_t*>(src.row(i));
  SCOPE_UNROLL for (int v = 0; v < kParts; ++v) {
    x[v] = stretch(_mm512_sub_ps(load(row, 16 * v, src.dim), _mm512_loadu_ps(by.centre + 16 * v)), by.times_k + 16 * v);
  }
  rotate(x);
}

// Bits of magnitudes, as whole numbers: what is not finite is above all others.
template <int kParts>
SCOPE_S8 inline __m512i larger(__m512i most, const __m512 (&x)[kParts]) {
  SCOPE_UNROLL for (int v = 0; v < kParts; ++v) most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(x[v])));
  return most;
}

SCOPE_S8 inline float largest(__m512i most) {
  const uint32_t bits = std::min(_mm512_reduce_max_epu32(most), 0x7f800000u);
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <int kParts>
SCOPE_S8 float reach_of(const RowsView& src, const int32_t* rows, int64_t count, const ByteFactors& by) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; ++i) {
    __m512 x[kParts];
    rotated_key(x, src, rows[i], by);
    most = larger(most, x);
  }
  return largest(most);
}

template <int kParts>
SCOPE_S8 void round_keys_of(const RowsView& src, int64_t first, int64_t count, const ByteFactors& by, uint8_t* out) {
  for (int64_t i = first; i < first + count; ++i, out += 16 * kParts) {
    __m512 x[kParts];
    rotated_key(x, src, i, by);
    SCOPE_UNROLL for (int v = 0; v < kParts; ++v) {
      const __m512i byte = to_s8(_mm512_mul_ps(x[v], _mm512_set1_ps(by.over_k)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * v),
                       _mm512_cvtepi32_epi8(_mm512_add_epi32(byte, _mm512_set1_epi32(kMiddle))));
    }
  }
}

// q: rows of 2 * stride bytes, of which the first half is the query's.
template <int kParts>
SCOPE_S8 void pack_q_of(const RowsView& src, const int32_t* rows, int64_t count, const ByteFactors& by, void* out,
                        int64_t stride) {
  auto* to = static_cast<int8_t*>(out);
  for (int64_t i = 0; i < count; ++i, to += 2 * stride) {
    const auto* row = reinterpret_cast<const uint16_t*>(src.row(rows[i]));
    __m512 x[kParts], along = _mm512_setzero_ps();
    SCOPE_UNROLL for (int v = 0; v < kParts; ++v) {
      x[v] = load(row, 16 * v, src.dim);
      along = _mm512_fmadd_ps(x[v], _mm512_loadu_ps(by.centre + 16 * v), along);
      x[v] = stretch(x[v], by.times_q + 16 * v);
    }
    rotate(x);
    const float most = largest(larger(_mm512_setzero_si512(), x));
    const float over = most > kTinyRange ? kMostByte / most : 0;
    __m512i sum = _mm512_setzero_si512();
    SCOPE_UNROLL for (int v = 0; v < kParts; ++v) {
      const __m512i byte = to_s8(_mm512_mul_ps(x[v], _mm512_set1_ps(over)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * v), _mm512_cvtepi32_epi8(byte));
      sum = _mm512_add_epi32(sum, byte);
    }
    const QueryFactors factors{.start = -kMiddle * _mm512_reduce_add_epi32(sum),
                               .unit = (most > kTinyRange ? most / kMostByte : 1) * by.unit_k,
                               .shift = _mm512_reduce_add_ps(along)};
    std::memcpy(to + stride, &factors, sizeof factors);
  }
}

float reach(const RowsView& src, const int32_t* rows, int64_t count, const ByteFactors& by) {
  const int64_t channels = rotated_channels(src.dim);
  return (channels == 64 ? reach_of<4> : channels == 128 ? reach_of<8> : reach_of<16>)(src, rows, count, by);
}

void round_keys(const RowsView& src, int64_t first, int64_t count, const ByteFactors& by, uint8_t* out) {
  const int64_t channels = rotated_channels(src.dim);
  (channels == 64 ? round_keys_of<4> : channels == 128 ? round_keys_of<8> : round_keys_of<16>)(src, first, count, by, out);
}

void pack_q(const RowsView& src, const int32_t* rows, int64_t count, const ByteFactors& by, void* out, int64_t stride) {
  const int64_t channels = rotated_channels(src.dim);
  (channels == 64 ? pack_q_of<4> : channels == 128 ? pack_q_of<8> : pack_q_of<16>)(src, rows, count, by, out, stride);
}

// Sums have a type of their own: as __m512i, vectors of 8 to the compiler, GCC 12 copies and spills every one.
using Sums = int32_t __attribute__((vector_size(64)));

template <int kRows, int kWidth>
SCOPE_S8 void dot_tile(const int8_t* q, int64_t q_stride, const uint32_t* panel, int64_t depth, float* s, int64_t s_stride) {
  QueryFactors by[kRows];
  Sums sum[kRows][kWidth];
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    std::memcpy(&by[r], q + (2 * r + 1) * q_stride, sizeof(QueryFactors));
    SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) sum[r][v] = (Sums)_mm512_set1_epi32(by[r].start);
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512i b[kWidth];
    SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) b[v] = _mm512_loadu_si512(panel + k * kPanel + 16 * v);
    SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
      int32_t word = 0;
      std::memcpy(&word, q + 2 * r * q_stride + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32(word);
      SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) sum[r][v] = (Sums)_mm512_dpbusd_epi32((__m512i)sum[r][v], b[v], x);
    }
  }
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) {
      const __m512 whole = _mm512_cvtepi32_ps((__m512i)sum[r][v]);  // exactly: under 2^24
      _mm512_storeu_ps(s + r * s_stride + 16 * v, _mm512_mul_ps(whole, _mm512_set1_ps(by[r].unit)));
    }
  }
}

// Of the last panel only the vectors that hold columns.
template <int kRows>
void dot_rows(const int8_t* q, int64_t q_stride, const uint32_t* panels, int64_t columns, int64_t depth, float* s,
              int64_t s_stride) {
  constexpr decltype(&dot_tile<kRows, 1>) kWidths[] = {dot_tile<kRows, 1>, dot_tile<kRows, 2>, dot_tile<kRows, 3>,
                                                       dot_tile<kRows, 4>};
  for (; columns > 0; columns -= kPanel, panels += depth * kPanel, s += kPanel) {
    kWidths[std::min(kVectors, ceil_div(columns, int64_t{16})) - 1](q, q_stride, panels, depth, s, s_stride);
  }
}

void dot(const void* q, int64_t q_stride, int64_t rows, const void* panels, int64_t columns, int64_t depth, float* s,
         int64_t s_stride) {
  constexpr decltype(&dot_rows<1>) kHeights[] = {dot_rows<1>, dot_rows<2>, dot_rows<3>,
                                                 dot_rows<4>, dot_rows<5>, dot_rows<6>};
  static_assert(std::size(kHeights) == kStrip);
  kHeights[rows - 1](static_cast<const int8_t*>(q), q_stride, static_cast<const uint32_t*>(panels), columns,
                     ceil_div(depth, int64_t{4}), s, s_stride);
}

constexpr ByteKernels kBytes = {widen, reach, round_keys, pack_q, dot};

}  // namespace

const ByteKernels* byte_kernels() {
  return bf16_dot_kernels() != nullptr && __builtin_cpu_supports("avx512vnni") ? &kBytes : nullptr;
}

}  // namespace scope::cpu

#else

namespace scope::cpu {

const ByteKernels* byte_kernels() { return nullptr; }

}  // namespace scope::cpu

#endif
