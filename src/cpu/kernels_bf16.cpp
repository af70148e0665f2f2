// bf16 dot products for attend (AVX-512 BF16), in intrinsics: Highway 1.0 has no such target.
#include "cpu/kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"

#define SCOPE_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#if defined(__clang__)
#define SCOPE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SCOPE_UNROLL _Pragma("GCC unroll 32")
#endif

namespace scope::cpu {

namespace {

constexpr int64_t kVectors = 4;            // accumulators per row, as in the f32 kernels
constexpr int64_t kPanel = 16 * kVectors;  // keys of a panel, channels of a tile

// A channel pair (or key pair) is one 32-bit word, so that one vdpbf16ps does two products per lane.
int64_t pairs(int64_t n) { return ceil_div(n, 2); }

// f32_to_bf16, 16 at a time.
SCOPE_BF16 void round_row(const float* in, int64_t n, uint16_t* out) {
  int64_t c = 0;
  for (; c + 16 <= n; c += 16) {
    const __m512i bits = _mm512_loadu_si512(in + c);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512 values = _mm512_castsi512_ps(bits);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    const __m512i rounded = _mm512_mask_or_epi32(_mm512_add_epi32(bits, up), nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + c), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  for (; c < n; ++c) out[c] = f32_to_bf16(in[c]);
}

void copy_row(const RowsView& src, int32_t row, uint16_t* out, int64_t width) {
  if (src.dtype == DType::bf16) {
    std::memcpy(out, src.row(row), static_cast<size_t>(2 * src.dim));
  } else {  // virtual keys and centroids come as f32
    round_row(reinterpret_cast<const float*>(src.row(row)), src.dim, out);
  }
  std::fill(out + src.dim, out + width, uint16_t{0});
}

// q: [count, stride] bf16.
void pack_q(const Kernels&, const RowsView& src, const int32_t* rows, int64_t count, void* out, int64_t stride) {
  auto* to = static_cast<uint16_t*>(out);
  for (int64_t i = 0; i < count; ++i) copy_row(src, rows[i], to + i * stride, 2 * pairs(src.dim));
}

// Row i of `to`, `stride` apart, is word i of 16 rows, each of `words` of them.
SCOPE_BF16 void transpose(const std::byte* const (&rows)[16], int64_t words, float* to, int64_t stride) {
  __m512i a[16], b[16];
  const auto mask = static_cast<__mmask16>((1u << words) - 1);
  SCOPE_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i]);
  SCOPE_UNROLL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  SCOPE_UNROLL for (int i = 0; i < 16; i += 4) {  // then part l of a[i + j] has word 4 l + j of rows i to i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  SCOPE_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512i low[2] = {_mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88)};
    const __m512i high[2] = {_mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd), _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd)};
    b[j] = _mm512_shuffle_i32x4(low[0], low[1], 0x88);
    b[4 + j] = _mm512_shuffle_i32x4(high[0], high[1], 0x88);
    b[8 + j] = _mm512_shuffle_i32x4(low[0], low[1], 0xdd);
    b[12 + j] = _mm512_shuffle_i32x4(high[0], high[1], 0xdd);
  }
  SCOPE_UNROLL for (int i = 0; i < 16; ++i) {
    if (i < words) _mm512_storeu_si512(to + i * stride, b[i]);
  }
}

constexpr std::byte kZeros[2 * kMostChannels]{};  // a key past the last

// k: panels [ceil(count / 64), channel pairs, 64] of words. Whole words are read where they lie; else rows are copied first.
void pack_k(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* panels, float* buffer,
            int64_t stride) {
  auto* out = static_cast<float*>(panels);
  const int64_t depth = pairs(src.dim);
  const bool as_they_are = src.dtype == DType::bf16 && src.dim % 2 == 0;
  for (int64_t first = 0; first < count; first += kPanel, out += depth * kPanel) {
    const int64_t n = std::min(kPanel, count - first);
    if (!as_they_are) {
      for (int64_t i = 0; i < n; ++i)
        copy_row(src, rows[first + i], reinterpret_cast<uint16_t*>(buffer + i * stride), 2 * depth);
      base.pack(buffer, stride, n, depth, out);
      continue;
    }
    for (int64_t i = 0; i < n; i += 16) {
      const std::byte* from[16];
      for (int64_t r = 0; r < 16; ++r) from[r] = i + r < n ? src.row(rows[first + i + r]) : kZeros;
      for (int64_t k = 0; k < depth; k += 16) {
        transpose(from, std::min<int64_t>(16, depth - k), out + k * kPanel + i, kPanel);
        for (const std::byte*& row : from) row += 64;
      }
    }
  }
}

// v: [key pairs, stride] of words.
SCOPE_BF16 void pack_v(const Kernels&, const RowsView& src, const int32_t* rows, int64_t count, void* block, float* buffer,
                       int64_t stride) {
  // Rows that are as they should be are read where they lie.
  const bool as_they_are = src.dtype == DType::bf16 && src.dim == stride;
  const auto row = [&](int64_t j, uint16_t* copy) -> const uint16_t* {
    if (j < count && as_they_are) return reinterpret_cast<const uint16_t*>(src.row(rows[j]));
    if (j < count) {
      copy_row(src, rows[j], copy, stride);
    } else {
      std::fill(copy, copy + stride, uint16_t{0});
    }
    return copy;
  };
  auto* copies = reinterpret_cast<uint16_t*>(buffer);
  auto* out = static_cast<uint32_t*>(block);
  for (int64_t j = 0; j < count; j += 2, out += stride) {
    const uint16_t *even = row(j, copies), *odd = row(j + 1, copies + stride);
    for (int64_t c = 0; c < stride; c += 16) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + c)));
      _mm512_storeu_si512(out + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

SCOPE_BF16 inline __m512bh load_pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
SCOPE_BF16 inline __m512bh broadcast_pair(const uint16_t* from) {
  int32_t word = 0;
  std::memcpy(&word, from, 4);
  return (__m512bh)_mm512_set1_epi32(word);
}

template <int kRows, int kWidth>
SCOPE_BF16 void dot_tile(const uint16_t* q, int64_t q_stride, const uint32_t* panel, int64_t depth, float* s,
                         int64_t s_stride) {
  __m512 sum[kRows][kWidth];
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512bh b[kWidth];
    SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) b[v] = load_pairs(panel + k * kPanel + 16 * v);
    SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512bh x = broadcast_pair(q + r * q_stride + 2 * k);
      SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, b[v]);
    }
  }
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int v = 0; v < kWidth; ++v) _mm512_storeu_ps(s + r * s_stride + 16 * v, sum[r][v]);
  }
}

// Of the last panel only the vectors that hold columns.
template <int kRows>
void dot_rows(const uint16_t* q, int64_t q_stride, const uint32_t* panels, int64_t columns, int64_t depth, float* s,
              int64_t s_stride) {
  for (; columns > 0; columns -= kPanel, panels += depth * kPanel, s += kPanel) {
    switch (std::min(kVectors, ceil_div(columns, int64_t{16}))) {
      case 1:
        dot_tile<kRows, 1>(q, q_stride, panels, depth, s, s_stride);
        break;
      case 2:
        dot_tile<kRows, 2>(q, q_stride, panels, depth, s, s_stride);
        break;
      case 3:
        dot_tile<kRows, 3>(q, q_stride, panels, depth, s, s_stride);
        break;
      default:
        dot_tile<kRows, kVectors>(q, q_stride, panels, depth, s, s_stride);
    }
  }
}

void dot(const void* q, int64_t q_stride, int64_t rows, const void* panels, int64_t columns, int64_t depth, float* s,
         int64_t s_stride) {
  const auto* a = static_cast<const uint16_t*>(q);
  const auto* b = static_cast<const uint32_t*>(panels);
  switch (rows) {
    case 6:
      return dot_rows<6>(a, q_stride, b, columns, pairs(depth), s, s_stride);
    case 5:
      return dot_rows<5>(a, q_stride, b, columns, pairs(depth), s, s_stride);
    case 4:
      return dot_rows<4>(a, q_stride, b, columns, pairs(depth), s, s_stride);
    case 3:
      return dot_rows<3>(a, q_stride, b, columns, pairs(depth), s, s_stride);
    case 2:
      return dot_rows<2>(a, q_stride, b, columns, pairs(depth), s, s_stride);
    default:
      return dot_rows<1>(a, q_stride, b, columns, pairs(depth), s, s_stride);
  }
}

// 2^x for x <= 0, as in kernels.cpp.
SCOPE_BF16 inline __m512 exp2_nonpositive(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(0x1.446c7ep-13f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.5f48c8p-10f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.3b29d8p-7f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.c6aeccp-5f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.ebfbe0p-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.62e430p-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(y, n), tiny, _mm512_setzero_ps());
}

// Probabilities become bf16 in place: element j of a row moves from byte 4j to byte 2j, behind the reads. The sum is that
// of the rounded values, so that a constant v still gives a constant output.
SCOPE_BF16 void softmax(float* s, int64_t stride, int64_t rows, int64_t n, float unit, float* m, float* l, float* factor) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t padded = round_up(n, 16);
  for (int64_t r = 0; r < rows; ++r, s += stride) {
    for (int64_t j = n; j < padded; ++j) s[j] = kNone;
    __m512 high = _mm512_set1_ps(kNone);
    for (int64_t j = 0; j < padded; j += 16) {  // scaled and stored first: see kernels.cpp
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(unit));
      _mm512_storeu_ps(s + j, x);
      high = _mm512_max_ps(high, x);
    }
    const float top = _mm512_reduce_max_ps(high);
    const float now = m[r] < top ? top : m[r];
    const float base = now == kNone ? 0.0f : now;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < padded; j += 16) {
      const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(base));
      const __m256i p = (__m256i)_mm512_cvtneps_pbh(exp2_nonpositive(x));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(s) + j), p);
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(p), 16)));
    }
    factor[r] = m[r] - base < -126.0f ? 0.0f : std::exp2(m[r] - base);
    l[r] = l[r] * factor[r] + _mm512_reduce_add_ps(sum);
    m[r] = now;
  }
}

SCOPE_BF16 void pack_p(float* weights, int64_t stride, int64_t rows, int64_t n, double* sums) {
  const int64_t padded = round_up(n, 16);
  for (int64_t r = 0; r < rows; ++r, weights += stride) {
    for (int64_t j = n; j < padded; ++j) weights[j] = 0;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < padded; j += 16) {
      const __m256i p = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + j));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(weights) + j), p);
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(p), 16)));
    }
    sums[r] += static_cast<double>(_mm512_reduce_add_ps(sum));
  }
}

template <int kRows, int kWidth>
SCOPE_BF16 void accumulate_tile(const uint16_t* p, int64_t p_stride, const uint32_t* v, int64_t v_stride, int64_t key_pairs,
                                const float* factor, float* out, int64_t out_stride) {
  __m512 sum[kRows][kWidth];
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int c = 0; c < kWidth; ++c) {
      sum[r][c] = _mm512_mul_ps(_mm512_set1_ps(factor[r]), _mm512_loadu_ps(out + r * out_stride + 16 * c));
    }
  }
  for (int64_t k = 0; k < key_pairs; ++k) {
    __m512bh b[kWidth];
    SCOPE_UNROLL for (int c = 0; c < kWidth; ++c) b[c] = load_pairs(v + k * v_stride + 16 * c);
    SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512bh x = broadcast_pair(p + r * p_stride + 2 * k);
      SCOPE_UNROLL for (int c = 0; c < kWidth; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], x, b[c]);
    }
  }
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int c = 0; c < kWidth; ++c) _mm512_storeu_ps(out + r * out_stride + 16 * c, sum[r][c]);
  }
}

template <int kRows>
void accumulate_rows(const uint16_t* p, int64_t p_stride, const uint32_t* v, int64_t v_stride, int64_t keys,
                     int64_t channels, const float* factor, float* out, int64_t out_stride) {
  int64_t c = 0;
  for (; c + kPanel <= channels; c += kPanel) {
    accumulate_tile<kRows, kVectors>(p, p_stride, v + c, v_stride, pairs(keys), factor, out + c, out_stride);
  }
  for (; c < channels; c += 16)
    accumulate_tile<kRows, 1>(p, p_stride, v + c, v_stride, pairs(keys), factor, out + c, out_stride);
}

void accumulate(const float* p, int64_t p_stride, int64_t rows, const void* v, int64_t v_stride, int64_t keys,
                int64_t channels, const float* factor, float* out, int64_t out_stride) {
  const auto* a = reinterpret_cast<const uint16_t*>(p);
  const auto* b = static_cast<const uint32_t*>(v);
  const int64_t a_stride = 2 * p_stride;
  switch (rows) {
    case 6:
      return accumulate_rows<6>(a, a_stride, b, v_stride, keys, channels, factor, out, out_stride);
    case 5:
      return accumulate_rows<5>(a, a_stride, b, v_stride, keys, channels, factor, out, out_stride);
    case 4:
      return accumulate_rows<4>(a, a_stride, b, v_stride, keys, channels, factor, out, out_stride);
    case 3:
      return accumulate_rows<3>(a, a_stride, b, v_stride, keys, channels, factor, out, out_stride);
    case 2:
      return accumulate_rows<2>(a, a_stride, b, v_stride, keys, channels, factor, out, out_stride);
    default:
      return accumulate_rows<1>(a, a_stride, b, v_stride, keys, channels, factor, out, out_stride);
  }
}

constexpr AttendKernels kAttend = {"bf16", kPanel, sizeof(uint16_t), pack_q, pack_k,
                                   pack_v, dot,    softmax,          pack_p, accumulate};

}  // namespace

const AttendKernels* bf16_dot_kernels() { return __builtin_cpu_supports("avx512bf16") ? &kAttend : nullptr; }

}  // namespace scope::cpu

#else

namespace scope::cpu {

const AttendKernels* bf16_dot_kernels() { return nullptr; }

}  // namespace scope::cpu

#endif
