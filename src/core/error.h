// Status codes and the one exception type; thrown below the C ABI, translated to scope_status at it.
#pragma once

#ifndef __CUDACC__
#include <fmt/format.h>
#endif

#include <stdexcept>
#include <string>

namespace scope {

// Same values as scope_status in scope.h (checked in c_api.cpp).
enum class Status : int {
  ok = 0,
  invalid_argument = 1,
  shape = 2,
  dtype = 3,
  alignment = 4,
  unsupported = 5,
  size_limit = 6,
  workspace = 7,
  out_of_memory = 8,
  non_finite = 9,
  io = 10,
  format = 11,
  busy = 12,
  device = 13,
  device_lost = 14,
  internal = 15,
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

#ifdef __CUDACC__
// nvcc cannot compile fmt's compile-time checks: kernels' host code says what is wrong in plain text.
[[noreturn]] inline void fail(Status status, const std::string& text) { throw Error(status, text); }
inline void require(bool condition, Status status, const char* text) {
  if (!condition) fail(status, text);
}
#else
// Messages name the argument, what it got and what it expects.
template <class... Args>
[[noreturn]] void fail(Status status, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(status, fmt::format(text, std::forward<Args>(args)...));
}

template <class... Args>
void require(bool condition, Status status, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) fail(status, text, std::forward<Args>(args)...);
}
#endif

}  // namespace scope
