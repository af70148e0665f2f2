// The row loops, compiled once for each instruction set by Highway.
#include "cpu/elementwise.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)  // as in kernels.cpp
#define HWY_BROKEN_EMU128 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/elementwise.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "core/error.h"
#include "cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace scope::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::ScalableTag<int32_t>;
using V = hn::Vec<DF>;
constexpr DF df;
constexpr DI di;
constexpr int64_t L = hn::MaxLanes(DF());

// Every loop runs whole vectors, and the last elements through the same instructions on a padded copy: an element's result
// never depends on where the row ends.
template <class Body>
HWY_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + L <= n; i += L) body(i, L);
  if (i < n) body(i, n - i);
}
HWY_INLINE V load(const float* x, int64_t count) {
  if (count == L) return hn::LoadU(df, x);
  HWY_ALIGN float padded[L] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = x[i];
  return hn::Load(df, padded);
}
HWY_INLINE void store(V value, int64_t count, float* out) {
  if (count == L) {
    hn::StoreU(value, df, out);
    return;
  }
  HWY_ALIGN float padded[L];
  hn::Store(value, df, padded);
  for (int64_t i = 0; i < count; ++i) out[i] = padded[i];
}

void layer_norm(const float* x, int64_t n, const float* scale, const float* shift, float eps, float* out) {
  V sum = hn::Zero(df);
  each_vector(n, [&](int64_t i, int64_t count) { sum = hn::Add(sum, load(x + i, count)); });
  const float mean = hn::GetLane(hn::SumOfLanes(df, sum)) / static_cast<float>(n);
  const V middle = hn::Set(df, mean);
  V square = hn::Zero(df);
  each_vector(n, [&](int64_t i, int64_t count) {
    V away = hn::Sub(load(x + i, count), middle);
    if (count < L) away = hn::IfThenElseZero(hn::FirstN(df, static_cast<size_t>(count)), away);
    square = hn::MulAdd(away, away, square);
  });
  const float variance = hn::GetLane(hn::SumOfLanes(df, square)) / static_cast<float>(n);
  const V factor = hn::Set(df, 1.0f / std::sqrt(variance + eps));
  each_vector(n, [&](int64_t i, int64_t count) {
    V y = hn::Mul(hn::Sub(load(x + i, count), middle), factor);
    if (scale != nullptr) y = hn::MulAdd(y, load(scale + i, count), load(shift + i, count));
    store(y, count, out + i);
  });
}

void rms_norm(const float* x, int64_t n, const float* weight, float eps, float* out) {
  V square = hn::Zero(df);
  each_vector(n, [&](int64_t i, int64_t count) {
    const V value = load(x + i, count);
    square = hn::MulAdd(value, value, square);
  });
  const float mean = hn::GetLane(hn::SumOfLanes(df, square)) / static_cast<float>(n);
  const V factor = hn::Set(df, 1.0f / std::sqrt(mean + eps));
  each_vector(n, [&](int64_t i, int64_t count) {
    store(hn::Mul(hn::Mul(load(x + i, count), factor), load(weight + i, count)), count, out + i);
  });
}

// 2^x for x <= 0, as in kernels.cpp.
HWY_INLINE V exp2_nonpositive(V x) {
  x = hn::Max(x, hn::Set(df, -126.0f));
  const V n = hn::Round(x);
  const V f = hn::Sub(x, n);
  V y = hn::Set(df, 0x1.446c7ep-13f);
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.5f48c8p-10f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.3b29d8p-7f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.c6aeccp-5f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.ebfbe0p-3f));
  y = hn::MulAdd(y, f, hn::Set(df, 0x1.62e430p-1f));
  y = hn::MulAdd(y, f, hn::Set(df, 1.0f));
  return hn::BitCast(df, hn::Add(hn::BitCast(di, y), hn::ShiftLeft<23>(hn::ConvertTo(di, n))));
}

void gate_sigmoid(float* x, int64_t n, float factor, float cubic) {
  const V one = hn::Set(df, 1.0f);
  each_vector(n, [&](int64_t i, int64_t count) {
    const V value = load(x + i, count);
    const V inner =
        hn::Mul(hn::MulAdd(hn::Mul(hn::Mul(value, value), hn::Set(df, cubic)), value, value), hn::Set(df, factor));
    // With e = exp(-|inner|), sigmoid is 1 / (1 + e) on the right and e / (1 + e) on the left: nothing overflows.
    const V e = exp2_nonpositive(hn::Mul(hn::Neg(hn::Abs(inner)), hn::Set(df, 1.44269504f)));
    const V top = hn::IfThenElse(hn::Lt(inner, hn::Zero(df)), e, one);
    store(hn::Mul(value, hn::Div(top, hn::Add(one, e))), count, x + i);
  });
}

void add_scaled(const float* y, const float* factor, int64_t n, float* x) {
  each_vector(n, [&](int64_t i, int64_t count) {
    const V more = load(y + i, count), before = load(x + i, count);
    store(factor == nullptr ? hn::Add(before, more) : hn::MulAdd(more, load(factor + i, count), before), count, x + i);
  });
}

#if HWY_TARGET == HWY_AVX3
#define SCOPE_NAME "avx512"
#elif HWY_TARGET == HWY_AVX2
#define SCOPE_NAME "avx2"
#else
#define SCOPE_NAME "portable"
#endif

const RowKernels kRowKernels = {SCOPE_NAME, layer_norm, rms_norm, gate_sigmoid, add_scaled};

#undef SCOPE_NAME

}  // namespace scope::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scope::cpu {

const RowKernels& row_kernels(std::string_view name) {
#if HWY_TARGETS & HWY_AVX3
  if (name == "avx512") return N_AVX3::kRowKernels;
#endif
#if HWY_TARGETS & HWY_AVX2
  if (name == "avx2") return N_AVX2::kRowKernels;
#endif
  require(name == "portable", Status::internal, "row kernels: there is no instruction set {}", name);
  return HWY_STATIC_DISPATCH(kRowKernels);
}

}  // namespace scope::cpu
#endif
