// q, k and v, whatever they come from.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/file.h"
#include "measure/synthetic.h"
#include "methods/partition.h"

namespace scope::cli {

// q, k and v as [batch, heads, tokens, dim], with what the file's metadata or the flags said of them.
struct Qkv {
  io::Array q, k, v;
  int64_t batch = 1, heads = 0, q_tokens = 0, k_tokens = 0, dim = 0;
  bool batched = false;  // the file had a batch dimension
  DType dtype = DType::f32;
  std::vector<int64_t> rope;
  Partition subspaces;

  TensorView view(const io::Array& x, int64_t tokens) const;
};

// Checks ranks, dtypes and shapes; the arrays come from anywhere.
Qkv make_qkv_input(io::Array q, io::Array k, io::Array v);
// What `scope make-qkv` makes, in f32, f16 or bf16; `done` is called after each head.
Qkv synthetic_qkv(
    const SyntheticSpec& spec, const std::string& dtype, ThreadPool& pool, const std::function<void()>& done = [] {});

}  // namespace scope::cli
