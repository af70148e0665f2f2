// Loops over one row that stand between linear layers, one table per instruction set.
#pragma once

#include <cstdint>
#include <string_view>

namespace scope::cpu {

struct RowKernels {
  const char* name;
  // out = (x - mean) / sqrt(variance + eps) * scale + shift; null scale and shift: 1 and 0. out may be x.
  void (*layer_norm)(const float* x, int64_t n, const float* scale, const float* shift, float eps, float* out);
  // out = x / sqrt(mean square + eps) * weight. out may be x.
  void (*rms_norm)(const float* x, int64_t n, const float* weight, float eps, float* out);
  // x *= sigmoid(factor * (x + cubic * x^3)): gelu's tanh form with 2 sqrt(2 / pi) and 0.044715, silu with 1 and 0.
  void (*gate_sigmoid)(float* x, int64_t n, float factor, float cubic);
  // x += factor[i] * y; null factor: 1.
  void (*add_scaled)(const float* y, const float* factor, int64_t n, float* x);
};

// By the name of an instruction set that this machine has.
const RowKernels& row_kernels(std::string_view name);

}  // namespace scope::cpu
