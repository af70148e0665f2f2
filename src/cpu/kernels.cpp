// The inner loops, compiled once for each instruction set by Highway.
#include "cpu/kernels.h"

// AVX-512, AVX2 and the portable baseline are enough: the targets between them gain nothing here.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
// The portable baseline is one lane with every compiler: Highway's emulated vectors, its choice for clang and newer GCC,
// lose the NaN and the infinities of f16, and -inf in MaxOfLanes.
#define HWY_BROKEN_EMU128 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"

#if defined(__clang__)
#define SCOPE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SCOPE_UNROLL _Pragma("GCC unroll 32")
#endif

HWY_BEFORE_NAMESPACE();
namespace scope::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::ScalableTag<int32_t>;
using DD = hn::ScalableTag<double>;
using V = hn::Vec<DF>;
constexpr DF df;
constexpr DI di;
constexpr DD dd;
constexpr int64_t L = hn::MaxLanes(DF());  // 16, 8, or 1 in the portable build
constexpr int64_t LD = hn::MaxLanes(DD());
// Panel width in vectors: kStrip x kPanelVectors accumulators fill the register file without spilling
// (24 of 32 registers on AVX-512, 12 of 16 on AVX2).
constexpr int64_t kPanelVectors = L == 16 ? 4 : L == 8 ? 2 : 4;
constexpr int64_t kPanel = kPanelVectors * L;
static_assert(kKeyBlock % kPanel == 0 && kLanes % L == 0 && kPanel <= kMostPanel && L % LD == 0);

// 2^x for x < 127: degree-6 Chebyshev fit on [-1/2, 1/2], relative error 2e-8; below 2^-126 it is zero. NaN stays NaN.
HWY_INLINE V exp2_below_127(V x) {
  const V n = hn::Round(x);
  const V f = hn::Sub(x, n);
  V y = hn::Set(df, 0x1.446c7ep-13f);
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.5f48c8p-10f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.3b29d8p-7f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.c6aeccp-5f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.ebfbe0p-3f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.62e430p-1f));
  y = hn::MulAdd(y, f, hn::Set(df, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, hn::Max(n, hn::Set(df, -126.0f))));
  const V scaled = hn::BitCast(df, hn::Add(hn::BitCast(di, y), exponent));
  return hn::IfThenElse(hn::Eq(x, x), hn::IfThenZeroElse(hn::Lt(x, hn::Set(df, -126.0f)), scaled), x);
}

HWY_INLINE float exp2_scalar(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

void load_rows(const RowsView& src, const int32_t* rows, int64_t count, float* out, int64_t stride) {
  const int64_t dim = src.dim;
  const int64_t padded = round_up(dim, kLanes);
  const int64_t line = 64 / dtype_bytes(src.dtype);
  for (int64_t i = 0; i < count; ++i, out += stride) {
    if (i + 8 < count) {  // rows are scattered: the hardware prefetcher cannot guess the next one
      const auto* ahead = src.row(rows[i + 8]);
      for (int64_t c = 0; c < dim; c += line) hwy::Prefetch(ahead + c * dtype_bytes(src.dtype));
    }
    int64_t c = 0;
    if (src.dtype == DType::f32) {
      const auto* in = reinterpret_cast<const float*>(src.row(rows[i]));
      for (; c + L <= dim; c += L) hn::StoreU(hn::LoadU(df, in + c), df, out + c);
      for (; c < dim; ++c) out[c] = in[c];
    } else if (src.dtype == DType::bf16) {
      const auto* in = reinterpret_cast<const uint16_t*>(src.row(rows[i]));
      const hn::Rebind<uint16_t, DF> d16;
      const hn::Rebind<uint32_t, DF> d32;
      for (; c + L <= dim; c += L) {
        const auto wide = hn::PromoteTo(d32, hn::LoadU(d16, in + c));
        hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(wide)), df, out + c);
      }
      for (; c < dim; ++c) out[c] = bf16_to_f32(in[c]);
    } else {
      const auto* in = reinterpret_cast<const uint16_t*>(src.row(rows[i]));
#if HWY_TARGET != HWY_SCALAR
      const hn::Rebind<hwy::float16_t, DF> d16;
      const hn::Rebind<uint16_t, DF> du16;
      for (; c + L <= dim; c += L) {
        const auto half = hn::BitCast(d16, hn::LoadU(du16, in + c));
        hn::StoreU(hn::PromoteTo(df, half), df, out + c);
      }
#endif
      for (; c < dim; ++c) out[c] = f16_to_f32(in[c]);
    }
    for (; c < padded; ++c) out[c] = 0.0f;
  }
}

void store_row(const float* in, float factor, int64_t dim, DType dtype, void* out) {
  int64_t c = 0;
  if (dtype == DType::f32) {
    auto* to = static_cast<float*>(out);
    for (; c + L <= dim; c += L) hn::StoreU(hn::Mul(hn::LoadU(df, in + c), hn::Set(df, factor)), df, to + c);
    for (; c < dim; ++c) to[c] = in[c] * factor;
  } else {
    auto* to = static_cast<uint16_t*>(out);
    for (; c < dim; ++c) to[c] = dtype == DType::bf16 ? f32_to_bf16(in[c] * factor) : f32_to_f16(in[c] * factor);
  }
}

// Rows of one matrix, or scattered rows read in place; ahead() asks for the memory of later ones.
struct DenseRows {
  const float* data;
  int64_t stride;
  HWY_INLINE const float* operator()(int64_t i) const { return data + i * stride; }
  HWY_INLINE void ahead(int64_t) const {}
};
struct ScatteredRows {
  const RowsView& src;
  const int32_t* rows;
  int64_t count;
  HWY_INLINE const float* operator()(int64_t i) const { return reinterpret_cast<const float*>(src.row(rows[i])); }
  HWY_INLINE void ahead(int64_t i) const {
    if (i >= count) return;
    for (int64_t c = 0; c < src.dim; c += kLanes) hwy::Prefetch((*this)(i) + c);
  }
};

// One panel [depth, kPanel] from n <= kPanel rows. 4 x 4 blocks are transposed in registers, 16 rows side by side so that
// every cache line of the panel is written at once.
template <class Rows>
HWY_INLINE void pack_panel(const Rows& row, int64_t n, int64_t depth, float* HWY_RESTRICT panel) {
  constexpr int64_t kSide = HWY_MIN(kPanel, int64_t{16});
  for (int64_t first = 0; first < kPanel; first += kSide) {
    int64_t k = 0;
#if HWY_TARGET != HWY_SCALAR
    const hn::CappedTag<float, 4> d4;
    const hn::RepartitionToWide<decltype(d4)> d2;
    if (first + kSide <= n) {
      for (int64_t i = 0; i < kSide; ++i) row.ahead(first + kSide + i);
      const float* in[kSide];
      for (int64_t i = 0; i < kSide; ++i) in[i] = row(first + i);
      for (; k + 4 <= depth; k += 4) {
        float* out = panel + k * kPanel + first;
        SCOPE_UNROLL for (int64_t c = 0; c < kSide; c += 4) {
          const auto a = hn::LoadU(d4, in[c] + k), b = hn::LoadU(d4, in[c + 1] + k);
          const auto e = hn::LoadU(d4, in[c + 2] + k), f = hn::LoadU(d4, in[c + 3] + k);
          const auto ab0 = hn::BitCast(d2, hn::InterleaveLower(d4, a, b)),
                     ab1 = hn::BitCast(d2, hn::InterleaveUpper(d4, a, b));
          const auto ef0 = hn::BitCast(d2, hn::InterleaveLower(d4, e, f)),
                     ef1 = hn::BitCast(d2, hn::InterleaveUpper(d4, e, f));
          hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab0, ef0)), d4, out + c);
          hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab0, ef0)), d4, out + kPanel + c);
          hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab1, ef1)), d4, out + 2 * kPanel + c);
          hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab1, ef1)), d4, out + 3 * kPanel + c);
        }
      }
    }
#endif
    for (; k < depth; ++k) {
      for (int64_t c = first; c < first + kSide; ++c) panel[k * kPanel + c] = c < n ? row(c)[k] : 0.0f;
    }
  }
}

void pack(const float* in, int64_t stride, int64_t count, int64_t depth, float* panels) {
  for (int64_t first = 0; first < count; first += kPanel, panels += depth * kPanel) {
    pack_panel(DenseRows{in + first * stride, stride}, HWY_MIN(kPanel, count - first), depth, panels);
  }
}

template <int kRows, int kVectors>
HWY_INLINE void dot_panel(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT panel, int64_t depth,
                          float* HWY_RESTRICT out, int64_t out_stride) {
  V sum[kRows][kVectors];
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) { SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(df); }
  for (int64_t k = 0; k < depth; ++k) {
    V b[kVectors];
    SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) b[v] = hn::LoadU(df, panel + k * kPanel + v * L);
    SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
      const V x = hn::Set(df, a[r * a_stride + k]);
      SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(x, b[v], sum[r][v]);
    }
  }
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], df, out + r * out_stride + v * L);
  }
}

template <int kRows>
void dot_rows(const float* a, int64_t a_stride, const float* panels, int64_t columns, int64_t depth, float* out,
              int64_t out_stride) {
  int64_t c = 0;
  for (; c + (kPanelVectors - 1) * L < columns; c += kPanel) {
    dot_panel<kRows, kPanelVectors>(a, a_stride, panels + c * depth, depth, out + c, out_stride);
  }
  // Of the last panel only the vectors that hold columns.
  const float* panel = panels + c * depth;
  for (; c + L < columns; c += 2 * L, panel += 2 * L) dot_panel<kRows, 2>(a, a_stride, panel, depth, out + c, out_stride);
  if (c < columns) dot_panel<kRows, 1>(a, a_stride, panel, depth, out + c, out_stride);
}

void dot(const float* a, int64_t a_stride, int64_t rows, const float* panels, int64_t columns, int64_t depth, float* out,
         int64_t out_stride) {
  for (; rows >= kStrip; rows -= kStrip, a += kStrip * a_stride, out += kStrip * out_stride) {
    dot_rows<kStrip>(a, a_stride, panels, columns, depth, out, out_stride);
  }
  switch (rows) {
    case 5:
      return dot_rows<5>(a, a_stride, panels, columns, depth, out, out_stride);
    case 4:
      return dot_rows<4>(a, a_stride, panels, columns, depth, out, out_stride);
    case 3:
      return dot_rows<3>(a, a_stride, panels, columns, depth, out, out_stride);
    case 2:
      return dot_rows<2>(a, a_stride, panels, columns, depth, out, out_stride);
    case 1:
      return dot_rows<1>(a, a_stride, panels, columns, depth, out, out_stride);
    default:
      return;
  }
}

// One vector of columns, as two halves in f64.
template <int kRows>
HWY_INLINE void dot_wide_rows(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT panel, int64_t depth,
                              double scale, double* HWY_RESTRICT out) {
  using VD = hn::Vec<decltype(dd)>;
  constexpr int kHalves = static_cast<int>(L / LD);
  VD sum[kRows][kHalves];
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) { SCOPE_UNROLL for (int h = 0; h < kHalves; ++h) sum[r][h] = hn::Zero(dd); }
  for (int64_t k = 0; k < depth; ++k) {
    VD b[kHalves];
    SCOPE_UNROLL for (int h = 0; h < kHalves; ++h) {
      b[h] = hn::PromoteTo(dd, hn::LoadU(hn::Rebind<float, decltype(dd)>(), panel + k * kPanel + h * LD));
    }
    SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
      const VD x = hn::Set(dd, static_cast<double>(a[r * a_stride + k]));
      SCOPE_UNROLL for (int h = 0; h < kHalves; ++h) sum[r][h] = hn::MulAdd(x, b[h], sum[r][h]);
    }
  }
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int h = 0; h < kHalves; ++h) {
      hn::StoreU(hn::Mul(sum[r][h], hn::Set(dd, scale)), dd, out + r * L + h * LD);
    }
  }
}

void dot_wide(const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t columns, int64_t depth,
              double scale, float* out, int64_t out_stride) {
  constexpr int64_t kRows = 4;
  double sums[kRows * L];
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t height = HWY_MIN(kRows, rows - r);
    for (int64_t c = 0; c < columns; c += L) {
      if (height == kRows) {
        dot_wide_rows<kRows>(a + r * a_stride, a_stride, panel + c, depth, scale, sums);
      } else {
        for (int64_t i = 0; i < height; ++i) {
          dot_wide_rows<1>(a + (r + i) * a_stride, a_stride, panel + c, depth, scale, sums + i * L);
        }
      }
      for (int64_t i = 0; i < height; ++i) {
        for (int64_t j = 0; j < HWY_MIN(L, columns - c); ++j) {
          out[(r + i) * out_stride + c + j] = static_cast<float>(sums[i * L + j]);
        }
      }
    }
  }
}

template <int kRows, int kVectors>
HWY_INLINE void accumulate_tile(const float* HWY_RESTRICT p, int64_t p_stride, const float* HWY_RESTRICT v, int64_t v_stride,
                                int64_t keys, const float* HWY_RESTRICT factor, float* HWY_RESTRICT out,
                                int64_t out_stride) {
  V sum[kRows][kVectors];
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    const V f = hn::Set(df, factor[r]);
    SCOPE_UNROLL for (int c = 0; c < kVectors; ++c) sum[r][c] = hn::Mul(f, hn::LoadU(df, out + r * out_stride + c * L));
  }
  for (int64_t k = 0; k < keys; ++k) {
    V b[kVectors];
    SCOPE_UNROLL for (int c = 0; c < kVectors; ++c) b[c] = hn::LoadU(df, v + k * v_stride + c * L);
    SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
      const V x = hn::Set(df, p[r * p_stride + k]);
      SCOPE_UNROLL for (int c = 0; c < kVectors; ++c) sum[r][c] = hn::MulAdd(x, b[c], sum[r][c]);
    }
  }
  SCOPE_UNROLL for (int r = 0; r < kRows; ++r) {
    SCOPE_UNROLL for (int c = 0; c < kVectors; ++c) hn::StoreU(sum[r][c], df, out + r * out_stride + c * L);
  }
}

template <int kRows>
void accumulate_rows(const float* p, int64_t p_stride, const float* v, int64_t v_stride, int64_t keys, int64_t channels,
                     const float* factor, float* out, int64_t out_stride) {
  int64_t c = 0;
  for (; c + kPanel <= channels; c += kPanel) {
    accumulate_tile<kRows, kPanelVectors>(p, p_stride, v + c, v_stride, keys, factor, out + c, out_stride);
  }
  for (; c < channels; c += L) {
    accumulate_tile<kRows, 1>(p, p_stride, v + c, v_stride, keys, factor, out + c, out_stride);
  }
}

void accumulate(const float* p, int64_t p_stride, int64_t rows, const float* v, int64_t v_stride, int64_t keys,
                int64_t channels, const float* factor, float* out, int64_t out_stride) {
  for (; rows >= kStrip; rows -= kStrip, p += kStrip * p_stride, factor += kStrip, out += kStrip * out_stride) {
    accumulate_rows<kStrip>(p, p_stride, v, v_stride, keys, channels, factor, out, out_stride);
  }
  switch (rows) {
    case 5:
      return accumulate_rows<5>(p, p_stride, v, v_stride, keys, channels, factor, out, out_stride);
    case 4:
      return accumulate_rows<4>(p, p_stride, v, v_stride, keys, channels, factor, out, out_stride);
    case 3:
      return accumulate_rows<3>(p, p_stride, v, v_stride, keys, channels, factor, out, out_stride);
    case 2:
      return accumulate_rows<2>(p, p_stride, v, v_stride, keys, channels, factor, out, out_stride);
    case 1:
      return accumulate_rows<1>(p, p_stride, v, v_stride, keys, channels, factor, out, out_stride);
    default:
      return;
  }
}

void softmax(float* s, int64_t stride, int64_t rows, int64_t n, float unit, float* m, float* l, float* factor) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t padded = round_up(n, L);
  const V scale = hn::Set(df, unit);
  for (int64_t r = 0; r < rows; ++r, s += stride) {
    for (int64_t j = n; j < padded; ++j) s[j] = kNone;
    V high = hn::Set(df, kNone);
    // Scaled and stored first: a fused multiply-subtract below would leave the product's rounding error in the exponent,
    // which past logits of 1e9 turns the largest probability into 0 or worse.
    for (int64_t j = 0; j < padded; j += L) {
      const V x = hn::Mul(hn::LoadU(df, s + j), scale);
      hn::StoreU(x, df, s + j);
      high = hn::Max(high, x);
    }
    const float top = hn::GetLane(hn::MaxOfLanes(df, high));
    const float now = m[r] < top ? top : m[r];
    // A row of -inf alone must not become -inf minus -inf.
    const float base = now == kNone ? 0.0f : now;
    const V shift = hn::Set(df, base);
    V sum = hn::Zero(df);
    for (int64_t j = 0; j < padded; j += L) {
      const V p = exp2_below_127(hn::Sub(hn::LoadU(df, s + j), shift));
      hn::StoreU(p, df, s + j);
      sum = hn::Add(sum, p);
    }
    factor[r] = exp2_scalar(m[r] - base);
    l[r] = l[r] * factor[r] + hn::GetLane(hn::SumOfLanes(df, sum));
    m[r] = now;
  }
}

void argmax(const float* s, int64_t stride, int64_t rows, int64_t n, const float* penalty, int32_t* labels) {
  for (int64_t r = 0; r < rows; ++r, s += stride) {
    V best = hn::Set(df, -std::numeric_limits<float>::infinity());
    auto at = hn::Zero(di);
    auto index = hn::Iota(di, 0);
    for (int64_t c = 0; c < n; c += L) {  // the penalty of padding is +inf
      const V value = hn::Sub(hn::LoadU(df, s + c), hn::LoadU(df, penalty + c));
      const auto better = hn::Gt(value, best);
      best = hn::IfThenElse(better, value, best);
      at = hn::IfThenElse(hn::RebindMask(di, better), index, at);
      index = hn::Add(index, hn::Set(di, static_cast<int32_t>(L)));
    }
    const auto tied = hn::RebindMask(di, hn::Eq(best, hn::MaxOfLanes(df, best)));
    labels[r] = hn::GetLane(hn::MinOfLanes(di, hn::IfThenElse(tied, at, hn::Set(di, std::numeric_limits<int32_t>::max()))));
  }
}

void add(const float* in, int64_t depth, float* out) {
  int64_t c = 0;
  for (; c + L <= depth; c += L) hn::StoreU(hn::Add(hn::LoadU(df, in + c), hn::LoadU(df, out + c)), df, out + c);
  for (; c < depth; ++c) out[c] += in[c];
}

void lookup(const float* table, int64_t codes, int64_t subspaces, const int32_t* labels, int64_t count, float* out) {
  int64_t j = 0;
  for (; j + L <= count; j += L) {
    V sum = hn::GatherIndex(df, table, hn::LoadU(di, labels + j));
    for (int64_t m = 1; m < subspaces; ++m) {
      sum = hn::Add(sum, hn::GatherIndex(df, table + m * codes, hn::LoadU(di, labels + m * count + j)));
    }
    hn::StoreU(sum, df, out + j);
  }
  for (; j < count; ++j) {
    float sum = table[labels[j]];
    for (int64_t m = 1; m < subspaces; ++m) sum += table[m * codes + labels[m * count + j]];
    out[j] = sum;
  }
}

void min_max(const float* row, int64_t n, float* low, float* high) {
  V lo = hn::Set(df, std::numeric_limits<float>::infinity());
  V hi = hn::Set(df, -std::numeric_limits<float>::infinity());
  V bad = hn::Zero(df);  // Min and Max may forget a NaN; its product with 0 does not
  int64_t j = 0;
  for (; j + L <= n; j += L) {
    const V x = hn::LoadU(df, row + j);
    lo = hn::Min(lo, x);
    hi = hn::Max(hi, x);
    bad = hn::MulAdd(x, hn::Zero(df), bad);
  }
  float tail_bad = 0;
  *low = hn::GetLane(hn::MinOfLanes(df, lo));
  *high = hn::GetLane(hn::MaxOfLanes(df, hi));
  for (; j < n; ++j) {
    *low = HWY_MIN(*low, row[j]);
    *high = HWY_MAX(*high, row[j]);
    tail_bad += row[j] * 0.0f;
  }
  *high += hn::GetLane(hn::SumOfLanes(df, bad)) + tail_bad;
}

HWY_INLINE void bin_vector(V x, float high, float per_bin, int32_t last, int32_t* bins, float* mass) {
  const V below = hn::Sub(hn::Set(df, high), x);
  const V place = hn::Min(hn::Mul(below, hn::Set(df, per_bin)), hn::Set(df, static_cast<float>(last)));
  hn::StoreU(hn::ConvertTo(di, place), di, bins);
  if (mass != nullptr) {
    hn::StoreU(exp2_below_127(hn::Mul(hn::Neg(below), hn::Set(df, 1.44269504f))), df, mass);
  }
}

void bin(const float* row, int64_t n, float high, float per_bin, int32_t last, int32_t* bins, float* mass) {
  int64_t j = 0;
  for (; j + L <= n; j += L) {
    bin_vector(hn::LoadU(df, row + j), high, per_bin, last, bins + j, mass == nullptr ? nullptr : mass + j);
  }
  if (j == n) return;
  // The tail goes through the same instructions, so that a key's bin never depends on its place in the row.
  HWY_ALIGN float x[L], tail_mass[L];
  HWY_ALIGN int32_t tail_bins[L];
  for (int64_t i = 0; i < L; ++i) x[i] = j + i < n ? row[j + i] : high;
  bin_vector(hn::Load(df, x), high, per_bin, last, tail_bins, mass == nullptr ? nullptr : tail_mass);
  for (int64_t i = 0; j + i < n; ++i) {
    bins[j + i] = tail_bins[i];
    if (mass != nullptr) mass[j + i] = tail_mass[i];
  }
}

void moments(const float* v, const float* mean, int64_t depth, float* moments) {
  V square = hn::Zero(df), apart = hn::Zero(df), spread = hn::Zero(df);
  for (int64_t c = 0; c < depth; c += L) {
    const V x = hn::LoadU(df, v + c);
    const V away = hn::Sub(x, hn::LoadU(df, mean + c));
    square = hn::MulAdd(x, x, square);
    apart = hn::MulAdd(x, away, apart);
    spread = hn::MulAdd(away, away, spread);
  }
  moments[0] = hn::GetLane(hn::SumOfLanes(df, square));
  moments[1] = 2 * hn::GetLane(hn::SumOfLanes(df, apart));
  moments[2] = hn::GetLane(hn::SumOfLanes(df, spread));
}

// One vector of columns; false, and nothing added, if f32 does not hold a sum.
HWY_INLINE bool excess_vector(const float* HWY_RESTRICT s, int64_t stride, int64_t rows, int64_t columns, float scale,
                              const float* centre, const float* HWY_RESTRICT apart, const float* HWY_RESTRICT square,
                              double* sums) {
  constexpr int64_t kChunk = 32;  // rows between additions in f64
  HWY_ALIGN float part[L];
  double total[L] = {};
  for (int64_t first = 0; first < rows; first += kChunk) {
    V sum = hn::Zero(df);
    for (int64_t t = first; t < HWY_MIN(rows, first + kChunk); ++t) {
      const V exponent = hn::Sub(hn::Mul(hn::LoadU(df, s + t * stride), hn::Set(df, scale)), hn::LoadU(df, centre));
      const V x = hn::Sub(exp2_below_127(hn::Min(hn::Mul(exponent, hn::Set(df, 1.44269504f)), hn::Set(df, 126.0f))),
                          hn::Set(df, 1.0f));
      sum = hn::MulAdd(x, hn::MulAdd(x, hn::Set(df, square[t]), hn::Set(df, apart[t])), sum);
    }
    hn::Store(sum, df, part);
    for (int64_t c = 0; c < L; ++c) total[c] += static_cast<double>(part[c]);
  }
  for (int64_t c = 0; c < columns; ++c) {
    if (!std::isfinite(total[c])) return false;
  }
  for (int64_t c = 0; c < columns; ++c) sums[c] += total[c];
  return true;
}

void excess(const float* s, int64_t stride, int64_t rows, int64_t columns, float scale, const float* centre,
            const float* apart, const float* square, double* sums) {
  for (int64_t c = 0; c < columns; c += L) {
    const int64_t n = HWY_MIN(L, columns - c);
    if (excess_vector(s + c, stride, rows, n, scale, centre + c, apart, square, sums + c)) continue;
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = c; i < c + n; ++i) {
        const double x = std::expm1(HWY_MIN(static_cast<double>(s[t * stride + i] * scale - centre[i]), 350.0));
        sums[i] += x * (static_cast<double>(apart[t]) + x * static_cast<double>(square[t]));
      }
    }
  }
}

Masses weigh_dropped(float* row, int64_t n, float high, const uint32_t* kept) {
  constexpr int64_t kChunk = 1024;  // keys between additions in f64
  HWY_ALIGN int32_t lane_bits[L];
  for (int64_t i = 0; i < L; ++i) lane_bits[i] = int32_t{1} << i;
  const auto lane_bit = hn::Load(di, lane_bits);
  for (int64_t j = n; j < round_up(n, L); ++j) row[j] = high - 1000;  // weighs nothing
  Masses masses{};
  for (int64_t first = 0; first < n; first += kChunk) {
    V all = hn::Zero(df), dropped = hn::Zero(df);
    for (int64_t j = first; j < HWY_MIN(n, first + kChunk); j += L) {
      const V x = hn::Sub(hn::LoadU(df, row + j), hn::Set(df, high));
      const V weight = exp2_below_127(hn::Mul(x, hn::Set(df, 1.44269504f)));
      const auto keeps = hn::TestBit(hn::Set(di, static_cast<int32_t>(kept[j / 32] >> (j % 32))), lane_bit);
      const V left = hn::IfThenZeroElse(hn::RebindMask(df, keeps), weight);
      hn::StoreU(left, df, row + j);
      all = hn::Add(all, weight);
      dropped = hn::Add(dropped, left);
    }
    masses.all += static_cast<double>(hn::GetLane(hn::SumOfLanes(df, all)));
    masses.dropped += static_cast<double>(hn::GetLane(hn::SumOfLanes(df, dropped)));
  }
  return masses;
}

void above(const float* row, int64_t n, float threshold, uint32_t* words) {
  const V limit = hn::Set(df, threshold);
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    uint32_t word = 0;
    for (int64_t i = 0; i < 32; i += L) {
      uint8_t bytes[8] = {};  // StoreMaskBits may touch 8
      hn::StoreMaskBits(df, hn::Gt(hn::LoadU(df, row + j + i), limit), bytes);
      uint16_t part = 0;
      std::memcpy(&part, bytes, sizeof part);
      word |= uint32_t{part} << i;
    }
    words[j / 32] = word;
  }
  if (j < n) words[j / 32] = 0;
  for (; j < n; ++j) {
    if (row[j] > threshold) words[j / 32] |= 1u << (j % 32);
  }
}

bool all_within(const RowsView& src, const int32_t* rows, int64_t count, float limit) {
  bool within = true;
  if (src.dtype == DType::f32) {
    auto fine = hn::Eq(hn::Zero(df), hn::Zero(df));
    for (int64_t i = 0; i < count; ++i) {
      const auto* in = reinterpret_cast<const float*>(src.row(rows[i]));
      int64_t c = 0;
      for (; c + L <= src.dim; c += L) fine = hn::And(fine, hn::Le(hn::Abs(hn::LoadU(df, in + c)), hn::Set(df, limit)));
      for (; c < src.dim; ++c) within &= std::abs(in[c]) <= limit;  // false for NaN
    }
    return within && hn::AllTrue(df, fine);
  }
  // The bits of positive numbers sort as the numbers do, infinity and NaN last.
  const int most = src.dtype == DType::bf16 ? f32_to_bf16(limit) : 0x7bff;
  for (int64_t i = 0; i < count; ++i) {
    const auto* in = reinterpret_cast<const uint16_t*>(src.row(rows[i]));
    for (int64_t c = 0; c < src.dim; ++c) within &= (in[c] & 0x7fff) <= most;
  }
  return within;
}

#if HWY_TARGET == HWY_AVX3
#define SCOPE_NAME "avx512"
#elif HWY_TARGET == HWY_AVX2
#define SCOPE_NAME "avx2"
#else
#define SCOPE_NAME "portable"
#endif

const Kernels kKernels = {SCOPE_NAME, kPanel, load_rows, store_row, pack,    dot,    dot_wide,      accumulate, argmax,
                          add,        lookup, min_max,   bin,       moments, excess, weigh_dropped, above,      all_within};

void pack_q_f32(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* out, int64_t stride) {
  base.load_rows(src, rows, count, static_cast<float*>(out), stride);
}

void pack_k_f32(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* panels, float* buffer,
                int64_t stride) {
  auto* out = static_cast<float*>(panels);
  for (int64_t first = 0; first < count; first += kPanel, out += src.dim * kPanel) {
    const int64_t n = HWY_MIN(kPanel, count - first);
    if (src.dtype == DType::f32) {  // straight from where the rows are
      pack_panel(ScatteredRows{src, rows + first, count - first}, n, src.dim, out);
    } else {
      base.load_rows(src, rows + first, n, buffer, stride);
      base.pack(buffer, stride, n, src.dim, out);
    }
  }
}

void pack_v_f32(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* block, float*,
                int64_t stride) {
  base.load_rows(src, rows, count, static_cast<float*>(block), stride);
}

void dot_f32(const void* q, int64_t q_stride, int64_t rows, const void* panels, int64_t columns, int64_t depth, float* s,
             int64_t s_stride) {
  dot(static_cast<const float*>(q), q_stride, rows, static_cast<const float*>(panels), columns, depth, s, s_stride);
}

void pack_p_f32(float* weights, int64_t stride, int64_t rows, int64_t n, double* sums) {
  for (int64_t r = 0; r < rows; ++r, weights += stride) {
    V sum = hn::Zero(df);
    int64_t j = 0;
    for (; j + L <= n; j += L) sum = hn::Add(sum, hn::LoadU(df, weights + j));
    sums[r] += static_cast<double>(hn::GetLane(hn::SumOfLanes(df, sum)));
    for (; j < n; ++j) sums[r] += static_cast<double>(weights[j]);
  }
}

void accumulate_f32(const float* p, int64_t p_stride, int64_t rows, const void* v, int64_t v_stride, int64_t keys,
                    int64_t channels, const float* factor, float* out, int64_t out_stride) {
  accumulate(p, p_stride, rows, static_cast<const float*>(v), v_stride, keys, channels, factor, out, out_stride);
}

const AttendKernels kAttend = {"f32",      kPanel,  sizeof(float), pack_q_f32, pack_k_f32,
                               pack_v_f32, dot_f32, softmax,       pack_p_f32, accumulate_f32};

#undef SCOPE_NAME

}  // namespace scope::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scope::cpu {

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#if HWY_TARGETS & HWY_AVX3
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    sets.push_back({"avx512", &N_AVX3::kKernels, &N_AVX3::kAttend});
  }
#endif
#if HWY_TARGETS & HWY_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    sets.push_back({"avx2", &N_AVX2::kKernels, &N_AVX2::kAttend});
  }
#endif
  sets.push_back({"portable", &HWY_STATIC_DISPATCH(kKernels), &HWY_STATIC_DISPATCH(kAttend)});
  return sets;
}

}  // namespace scope::cpu
#endif
