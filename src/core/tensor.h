// Tensor views: pointer, shape, strides in elements; a view never owns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/error.h"

namespace scope {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

inline int64_t dtype_bytes(DType type) { return type == DType::f32 ? 4 : 2; }
inline const char* dtype_name(DType type) { return type == DType::f32 ? "f32" : type == DType::f16 ? "f16" : "bf16"; }

// One head of q, k or v: [tokens, dim], consecutive channels, any row stride.
struct RowsView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t tokens = 0;
  int64_t dim = 0;
  int64_t row_stride = 0;  // elements

  const std::byte* row(int64_t token) const {
    return static_cast<const std::byte*>(data) + token * row_stride * dtype_bytes(dtype);
  }
};

struct MutableRowsView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t tokens = 0;
  int64_t dim = 0;
  int64_t row_stride = 0;

  std::byte* row(int64_t token) const { return static_cast<std::byte*>(data) + token * row_stride * dtype_bytes(dtype); }
};

// [batch, heads, tokens, dim] with the last stride 1; strides of the others are free, so [batch, tokens, heads, dim]
// memory is the same type with other strides.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, tokens = 0, dim = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  RowsView head(int64_t b, int64_t h) const {
    const int64_t offset = b * batch_stride + h * head_stride;
    return {static_cast<const std::byte*>(data) + offset * dtype_bytes(dtype), dtype, tokens, dim, token_stride};
  }
};

struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, tokens = 0, dim = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  MutableRowsView head(int64_t b, int64_t h) const {
    const int64_t offset = b * batch_stride + h * head_stride;
    return {static_cast<std::byte*>(data) + offset * dtype_bytes(dtype), dtype, tokens, dim, token_stride};
  }
};

// Bitmasks: entry j is bit j % 32 of word j / 32.
inline int64_t mask_words(int64_t n) { return (n + 31) / 32; }
inline bool mask_bit(const uint32_t* mask, int64_t j) { return (mask[j / 32] >> (j % 32)) & 1u; }
inline void set_mask_bit(uint32_t* mask, int64_t j) { mask[j / 32] |= 1u << (j % 32); }

// Cuts one caller-provided block into aligned arrays. With no block it only counts, so that a plan's size and a
// call's layout come from the same code.
class Arena {
 public:
  static constexpr int64_t kAlignment = 64;
  Arena() = default;
  Arena(void* base, int64_t bytes) : base_(static_cast<std::byte*>(base)), bytes_(bytes) {}

  template <class T>
  T* take(int64_t count) {
    used_ = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    T* result = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += count * static_cast<int64_t>(sizeof(T));
    if (base_ != nullptr && used_ > bytes_) fail(Status::internal, "workspace layout exceeds its plan");
    return result;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t used_ = 0;
};

}  // namespace scope
