// How the structs of the C ABI grow: a caller's header may be older or newer than the library, within one MINOR version.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/error.h"
#include "scope/scope.h"

namespace scope::capi {

// Where each struct ended in the first header of this MINOR version, by its last field: what every caller has. Fields that
// are added later come after it, and leave these lines alone until MINOR rises.
template <class T>
inline constexpr size_t kFirstSize = 0;
// A type and its field take no parentheses. NOLINTBEGIN(bugprone-macro-parentheses)
#define SCOPE_FIRST(type, last) \
  template <>                   \
  inline constexpr size_t kFirstSize<type> = offsetof(type, last) + sizeof(type::last)
// NOLINTEND(bugprone-macro-parentheses)
SCOPE_FIRST(scope_context_options, instruction_set);
SCOPE_FIRST(scope_setting_info, help);
SCOPE_FIRST(scope_method_info, reserved);
SCOPE_FIRST(scope_model_info, reserved);
SCOPE_FIRST(scope_shape, subspace_channels);
SCOPE_FIRST(scope_plan_info, reserved);
SCOPE_FIRST(scope_selection, codes);
SCOPE_FIRST(scope_head_stats, max_count);
SCOPE_FIRST(scope_call_stats, total_seconds);
SCOPE_FIRST(scope_run_args, stream);
SCOPE_FIRST(scope_model_query, reserved);
SCOPE_FIRST(scope_model_answer, why);
#undef SCOPE_FIRST

inline constexpr size_t kMostSize = 4096;  // a struct_size beyond it was never set, and is no reason to read that far

// Checks what a caller says of a struct's size, and returns it.
template <class T>
size_t struct_size(const T* value, const char* name) {
  static_assert(kFirstSize<T> > 0 && kFirstSize<T> <= sizeof(T));
  require(value != nullptr, Status::invalid_argument, "{}: got null, expected a pointer", name);
  const size_t size = value->struct_size;
  require(size >= kFirstSize<T> && size <= kMostSize, Status::invalid_argument,
          "{}.struct_size: got {}, expected {} (sizeof it)", name, size, sizeof(T));
  return size;
}

// A caller's input as this library knows it: what an older header lacks is 0, what a newer one adds must be.
template <class T>
T read_struct(const T* from, const char* name) {
  const size_t size = struct_size(from, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (size_t i = sizeof(T); i < size; ++i) {
    require(bytes[i] == 0, Status::unsupported,
            "{}.struct_size: got {}, this library knows {} bytes, and what follows is not 0 (byte {})", name, size,
            sizeof(T), i);
  }
  T value{};
  std::memcpy(static_cast<void*>(&value), from, std::min(size, sizeof(T)));
  return value;
}

// A caller's output, whose size was checked: as much as it has room for, and zeros past what this library knows.
template <class T>
void write_struct(T value, T* to) {
  const size_t size = to->struct_size, known = std::min(size, sizeof(T));
  value.struct_size = size;
  std::memcpy(static_cast<void*>(to), &value, known);
  std::memset(reinterpret_cast<unsigned char*>(to) + known, 0, size - known);
}

// Element i of an array whose elements are as long as its first one says.
template <class T>
void write_element(T value, T* array, size_t i) {
  const size_t size = array->struct_size;
  auto* to = reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(array) + i * size);
  to->struct_size = size;
  write_struct(value, to);
}

}  // namespace scope::capi
