// cuBLASLt, loaded at run time: the command starts without it, and only linear layers on a GPU need it.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/tensor.h"

namespace scope::cuda {

// e4m3: with an f32 scale for each row of x and of the weights. Tensor cores of sm_90 add e4m3 products with about 13 bits;
// e4m3 adds their sums up in f32 every few channels, e4m3_fast never.
enum class Operands { bf16, e4m3, e4m3_fast };

// out [rows, columns] = x [rows, depth] . weights [columns, depth]^T + bias [columns], then gelu (tanh).
struct Product {
  int64_t rows, columns, depth;  // columns and depth: multiples of 8, of 16 in e4m3
  DType out_type;                // bf16 or f32
  bool bias, gelu;
  Operands operands = Operands::bf16;
  auto operator<=>(const Product&) const = default;
};

// Pointers on 16 bytes.
struct ProductArrays {
  const void *weights, *x;
  const void* bias;  // in out's type, for e4m3 in bf16; null without one
  void* out;
  const float *weight_scales = nullptr, *x_scales = nullptr;  // [columns], [rows]: of e4m3
};

class CublasLt {
 public:
  // Throws Status::unsupported with what was tried where the library cannot be loaded. The device must be current.
  CublasLt();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // The same arguments give the same bits. Throws Status::unsupported where the library has no such product.
  void multiply(void* stream, const Product& product, const ProductArrays& at);
  // Whether the library has such a product; the arrays are not read.
  bool has(const Product& product, const ProductArrays& at) { return plan(product, at) != nullptr; }
  // Seconds of `multiply` by the algorithm that it takes, then by each of up to 8 that the library proposes.
  std::vector<double> time_algorithms(void* stream, const Product& product, const ProductArrays& at);

 private:
  struct Functions;
  struct Plan;
  struct Algorithm;
  const Plan* plan(const Product& product, const ProductArrays& at);  // null: there is none
  const Plan& need_plan(const Product& product, const ProductArrays& at);
  std::vector<Algorithm> propose(const Plan& plan, int most) const;
  void run(void* stream, const Plan& plan, const Algorithm& algorithm, const ProductArrays& at) const;

  std::unique_ptr<Functions> call_;
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Product, std::unique_ptr<Plan>> plans_;
};

}  // namespace scope::cuda
