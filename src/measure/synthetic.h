// Synthetic q, k, v with real 3D RoPE over smooth, clustered, moving content, so that attention is structured as in a
// video model. The recipe is fixed: figures measured on it stay comparable.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/parallel.h"

namespace scope {

struct SyntheticSpec {
  int64_t grid[3] = {13, 30, 52};            // tokens along T, H and W
  std::vector<int64_t> rope = {44, 42, 42};  // even channel counts
  int64_t heads = 2;
  uint64_t seed = 1;
};

struct SyntheticQkv {
  int64_t heads = 0, tokens = 0, dim = 0;
  std::vector<float> q, k, v;  // [heads, tokens, dim]
};

// `done` is called after each head.
SyntheticQkv make_qkv(
    const SyntheticSpec& spec, ThreadPool& pool, const std::function<void()>& done = [] {});

}  // namespace scope
