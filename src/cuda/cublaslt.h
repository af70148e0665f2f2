// cuBLASLt, loaded at run time: the command starts without it, and only linear layers on a GPU need it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "core/tensor.h"

namespace scope::cuda {

class CublasLt {
 public:
  // Throws Status::unsupported with what was tried where the library cannot be loaded. The device must be current.
  CublasLt();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // out [rows, columns] = x [rows, depth] . weights [columns, depth]^T + bias [columns], then gelu (tanh) if asked; x and
  // weights bf16, out bf16 or f32, bias in out's type or null. Pointers on 16 bytes, depth and columns multiples of 8. The
  // same arguments give the same bits.
  void linear(void* stream, const void* weights, const void* bias, const void* x, int64_t rows, int64_t columns,
              int64_t depth, bool gelu, DType out_type, void* out);
  // Seconds of `linear` without gelu by the algorithm that it takes, then by each of up to 8 that the library proposes.
  std::vector<double> time_algorithms(void* stream, const void* weights, const void* bias, const void* x, int64_t rows,
                                      int64_t columns, int64_t depth, DType out_type, void* out);

 private:
  struct Functions;
  struct Product;
  struct Algorithm;
  std::vector<Algorithm> propose(const Product& product, int most) const;
  void multiply(void* stream, const Product& product, const Algorithm& algorithm, const void* weights, const void* bias,
                const void* x, void* out) const;
  const Product& product(int64_t rows, int64_t columns, int64_t depth, bool bias, bool gelu, DType out_type);

  std::unique_ptr<Functions> call_;
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<std::tuple<int64_t, int64_t, int64_t, bool, bool, DType>, std::unique_ptr<Product>> products_;
};

}  // namespace scope::cuda
