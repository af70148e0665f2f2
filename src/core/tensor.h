// Tensor views: pointer, shape, strides in elements; a view never owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/error.h"
#include "core/host_device.h"

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

// The same head range of q, k or v for a chunk of heads: [heads, tokens, dim]; one head's rows are a chunk of one.
struct HeadsView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t tokens = 0;
  int64_t dim = 0;
  int64_t head_stride = 0, row_stride = 0;  // elements

  HeadsView() = default;
  HeadsView(const void* first, DType type, int64_t rows, int64_t channels, int64_t from_head, int64_t from_row)
      : data(first), dtype(type), tokens(rows), dim(channels), head_stride(from_head), row_stride(from_row) {}
  HeadsView(const RowsView& one) : HeadsView(one.data, one.dtype, one.tokens, one.dim, 0, one.row_stride) {}
  RowsView operator[](int64_t head) const {
    return {static_cast<const std::byte*>(data) + head * head_stride * dtype_bytes(dtype), dtype, tokens, dim, row_stride};
  }
};

struct MutableHeadsView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t tokens = 0;
  int64_t dim = 0;
  int64_t head_stride = 0, row_stride = 0;

  MutableHeadsView() = default;
  MutableHeadsView(void* first, DType type, int64_t rows, int64_t channels, int64_t from_head, int64_t from_row)
      : data(first), dtype(type), tokens(rows), dim(channels), head_stride(from_head), row_stride(from_row) {}
  MutableHeadsView(const MutableRowsView& one)
      : MutableHeadsView(one.data, one.dtype, one.tokens, one.dim, 0, one.row_stride) {}
  MutableRowsView operator[](int64_t head) const {
    return {static_cast<std::byte*>(data) + head * head_stride * dtype_bytes(dtype), dtype, tokens, dim, row_stride};
  }
};

// One array of each head of a chunk, at a constant step; a plain pointer is that of a chunk of one.
template <class T>
struct PerHead {
  T* base = nullptr;
  int64_t step = 0;  // elements from one head to the next

  PerHead() = default;
  SCOPE_HOST_DEVICE PerHead(T* first, int64_t to_next = 0) : base(first), step(first == nullptr ? 0 : to_next) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> SCOPE_HOST_DEVICE PerHead(const PerHead<U>& other)
      : base(other.base), step(other.step) {}

  SCOPE_HOST_DEVICE T* operator[](int64_t head) const { return base + head * step; }
  SCOPE_HOST_DEVICE explicit operator bool() const { return base != nullptr; }
};

// [batch, heads, tokens, dim] with the last stride 1; strides of the others are free, so [batch, tokens, heads, dim]
// memory is the same type with other strides.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, tokens = 0, dim = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  // Sample b from head h on.
  HeadsView from(int64_t b, int64_t h) const {
    const int64_t offset = b * batch_stride + h * head_stride;
    return {
        static_cast<const std::byte*>(data) + offset * dtype_bytes(dtype), dtype, tokens, dim, head_stride, token_stride};
  }
  RowsView head(int64_t b, int64_t h) const { return from(b, h)[0]; }
};

struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, tokens = 0, dim = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  MutableHeadsView from(int64_t b, int64_t h) const {
    const int64_t offset = b * batch_stride + h * head_stride;
    return {static_cast<std::byte*>(data) + offset * dtype_bytes(dtype), dtype, tokens, dim, head_stride, token_stride};
  }
  MutableRowsView head(int64_t b, int64_t h) const { return from(b, h)[0]; }
};

// Bytes from a tensor's first element to its last.
template <class View>
int64_t extent_bytes(const View& x) {
  if (x.data == nullptr || x.batch == 0 || x.heads == 0 || x.tokens == 0 || x.dim == 0) return 0;
  return ((x.batch - 1) * x.batch_stride + (x.heads - 1) * x.head_stride + (x.tokens - 1) * x.token_stride + x.dim) *
         dtype_bytes(x.dtype);
}

inline bool overlaps(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  if (a == nullptr || b == nullptr || a_bytes <= 0 || b_bytes <= 0) return false;
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return first < second + static_cast<uintptr_t>(b_bytes) && second < first + static_cast<uintptr_t>(a_bytes);
}

// Bitmasks: entry j is bit j % 32 of word j / 32.
inline int64_t mask_words(int64_t n) { return (n + 31) / 32; }
SCOPE_HOST_DEVICE inline bool mask_bit(const uint32_t* mask, int64_t j) { return (mask[j / 32] >> (j % 32)) & 1u; }
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
