// The inner loops of the CPU backend, one table per instruction set; everything above them is ordinary C++.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor.h"
#include "stages/exec.h"

namespace scope::cpu {

// Rows that one strip of a product covers, and the alignment of padded channel counts (one 512-bit vector of f32).
inline constexpr int64_t kStrip = 6;
inline constexpr int64_t kLanes = 16;
inline constexpr int64_t kMostPanel = 64;  // columns, of any instruction set
// Keys that attend packs at a time; a multiple of every panel width.
inline constexpr int64_t kKeyBlock = 256;

struct Masses {
  double all, dropped;
};

struct Kernels {
  const char* name;
  int64_t panel;  // columns of a packed panel

  // Rows `rows[0..count)` of src as f32 into out [count, stride]; columns from src.dim up to the next multiple of
  // kLanes are zeroed (stride allows for them).
  void (*load_rows)(const RowsView& src, const int32_t* rows, int64_t count, float* out, int64_t stride);
  // factor * in [dim] into one row of dtype `dtype`.
  void (*store_row)(const float* in, float factor, int64_t dim, DType dtype, void* out);
  // Transposes in [count, stride] into panels [ceil(count / panel), depth, panel], the last one zero-padded.
  void (*pack)(const float* in, int64_t stride, int64_t count, int64_t depth, float* panels);
  // out [rows, out_stride] = a [rows, a_stride] . panels; columns are written up to the next multiple of the lanes.
  void (*dot)(const float* a, int64_t a_stride, int64_t rows, const float* panels, int64_t columns, int64_t depth,
              float* out, int64_t out_stride);
  // out [rows, out_stride] = scale * a . one panel of `columns` columns, summed in f64.
  void (*dot_wide)(const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t columns, int64_t depth,
                   double scale, float* out, int64_t out_stride);
  // out [rows, out_stride] = out * factor[row] + p [rows, p_stride] . v [keys, v_stride], `channels` of them (a
  // multiple of kLanes).
  void (*accumulate)(const float* p, int64_t p_stride, int64_t rows, const float* v, int64_t v_stride, int64_t keys,
                     int64_t channels, const float* factor, float* out, int64_t out_stride);
  // labels[row] = argmax over n columns of s[row] - penalty, ties to the lowest; s and penalty are readable up to the
  // next multiple of the lanes, where the penalty is +inf.
  void (*argmax)(const float* s, int64_t stride, int64_t rows, int64_t n, const float* penalty, int32_t* labels);
  // out [depth] += in [depth].
  void (*add)(const float* in, int64_t depth, float* out);
  // out[j] = sum over m of table[m * codes + labels[m * count + j]].
  void (*lookup)(const float* table, int64_t codes, int64_t subspaces, const int32_t* labels, int64_t count, float* out);
  // *high is NaN when any value is not finite.
  void (*min_max)(const float* row, int64_t n, float* low, float* high);
  // bins[j] = min(int((high - row[j]) * per_bin), last); when mass is given, mass[j] = exp(row[j] - high).
  void (*bin)(const float* row, int64_t n, float high, float per_bin, int32_t last, int32_t* bins, float* mass);
  // moments[0..2] = v.v, 2 v.(v - mean), |v - mean|^2, over `depth` channels (a multiple of kLanes).
  void (*moments)(const float* v, const float* mean, int64_t depth, float* moments);
  // sums[c] += sum over rows t of x (apart[t] + x square[t]), x = e^(scale s[t, c] - centre[c]) - 1. s [rows, stride] and
  // centre are readable up to the next multiple of the lanes; an exponent counts for 350 at most.
  void (*excess)(const float* s, int64_t stride, int64_t rows, int64_t columns, float scale, const float* centre,
                 const float* apart, const float* square, double* sums);
  // row[j] = exp(row[j] - high), or 0 where bit j of kept is set; returns the sum of all weights and that of those left. The
  // row is writable up to the next multiple of the lanes.
  Masses (*weigh_dropped)(float* row, int64_t n, float high, const uint32_t* kept);
  // Bits of row[j] > threshold into words [ceil(n / 32)].
  void (*above)(const float* row, int64_t n, float threshold, uint32_t* words);
  // Whether every |x| <= limit; false for NaN.
  bool (*all_within)(const RowsView& src, const int32_t* rows, int64_t count, float limit);
};

// The arithmetic of attend: f32 on every instruction set; bf16 dot products where the CPU has them, with which K-means also
// compares bf16 points and centroids. Packed q, k, v and p are opaque to the caller; `element` is their size.
struct AttendKernels {
  const char* name;
  int64_t panel;
  int64_t element;
  // q rows into out [count, stride].
  void (*pack_q)(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* out, int64_t stride);
  // k rows into panels; `buffer` holds panel * stride f32.
  void (*pack_k)(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* panels, float* buffer,
                 int64_t stride);
  // v rows into a block of [count, stride].
  void (*pack_v)(const Kernels& base, const RowsView& src, const int32_t* rows, int64_t count, void* block, float* buffer,
                 int64_t stride);
  // Of at most kStrip rows; columns are written up to the next multiple of the lanes.
  void (*dot)(const void* q, int64_t q_stride, int64_t rows, const void* panels, int64_t columns, int64_t depth, float* s,
              int64_t s_stride);
  // Online softmax of `rows` strips of n logits: with x = unit * s, the running maximum m and sum l are updated,
  // factor = exp2(m_old - m_new), and p = exp2(x - m) replaces s (in the arithmetic's own format, same row stride
  // in bytes). s has room for n rounded up to a panel.
  void (*softmax)(float* s, int64_t stride, int64_t rows, int64_t n, float unit, float* m, float* l, float* factor);
  // Weights, n to a row, become p as softmax leaves it; sums[row] grows by what is multiplied.
  void (*pack_p)(float* weights, int64_t stride, int64_t rows, int64_t n, double* sums);
  void (*accumulate)(const float* p, int64_t p_stride, int64_t rows, const void* v, int64_t v_stride, int64_t keys,
                     int64_t channels, const float* factor, float* out, int64_t out_stride);
};

inline const AttendKernels& attend_kernels(const Exec& exec, DType dtype) {
  const bool bf16 = dtype == DType::bf16 && exec.attend_kernels_bf16 != nullptr;
  return bf16 ? *exec.attend_kernels_bf16 : *exec.attend_kernels;
}

inline constexpr int64_t kMostChannels = 256;   // of a head
inline constexpr float kMostByte = 127;         // that a number is rounded to
inline constexpr float kTinyRange = 0x1p-100f;  // and below: as good as zero

// What makes bytes of a head's queries and keys; zeros from dim on. docs/reference/algorithm.md, "8-bit products".
struct ByteFactors {
  float centre[kMostChannels], times_k[kMostChannels], times_q[kMostChannels];
  float over_k;  // makes bytes of rotated keys
  float unit_k;  // what a key's byte is worth, times that of a rotated query
};
// Of one query: q.k = unit * (start + sum of its bytes times those of a key) + shift.
struct QueryFactors {
  int32_t start;
  float unit, shift;
};

// 8-bit products of bf16 queries and keys, in the place of those of AttendKernels.
struct ByteKernels {
  // low, high [kMostChannels] are widened to hold the rows; false if something is not finite.
  bool (*widen)(const RowsView& src, const int32_t* rows, int64_t count, float* low, float* high);
  // The largest magnitude in rotated keys; infinite if something is not finite.
  float (*reach)(const RowsView& src, const int32_t* rows, int64_t count, const ByteFactors& by);
  // Keys [first, first + count) into out [count, rotated_channels]; panels are made of these bytes, four to a word.
  void (*round_keys)(const RowsView& src, int64_t first, int64_t count, const ByteFactors& by, uint8_t* out);
  // q rows into out [count, 2 stride]: bytes, and QueryFactors at byte `stride`.
  void (*pack_q)(const RowsView& src, const int32_t* rows, int64_t count, const ByteFactors& by, void* out, int64_t stride);
  // As in AttendKernels; without the shift.
  void (*dot)(const void* q, int64_t q_stride, int64_t rows, const void* panels, int64_t columns, int64_t depth, float* s,
              int64_t s_stride);
};

// An instruction set that this build has and this CPU can run.
struct InstructionSet {
  const char* name;  // avx512, avx2, portable
  const Kernels* kernels;
  const AttendKernels* attend;
};

// Best first; never empty.
std::vector<InstructionSet> instruction_sets();
// Null where the CPU or the build lacks it.
const AttendKernels* bf16_dot_kernels();
// Likewise; not without bf16 dot products.
const ByteKernels* byte_kernels();

}  // namespace scope::cpu
