// The plain structs that engines and their kernels share.
#pragma once

#include "core/tensor.h"

namespace scope::video {

// A dense matrix in an engine's memory, row after row; it never owns.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, columns = 0;
};

enum class Activation { none, gelu_tanh, gelu, silu };

// A vector and its share of a sum.
struct Term {
  float factor;
  const float* x;
};
inline constexpr int64_t kMostTerms = 4;

// Of the elements of a token's patch.
enum class ChannelOrder { fastest, slowest };

// A latent [channels, T, H, W] is cut into patches; a token is one patch.
struct PatchGrid {
  int64_t t, h, w;                  // tokens
  int64_t pt, ph, pw;               // latent elements of a patch
  const int32_t* places = nullptr;  // [tokens] where each patch stands, in raster order of (T, H, W); null: in that order
  int64_t tokens() const { return t * h * w; }
  int64_t patch() const { return pt * ph * pw; }
};

}  // namespace scope::video
