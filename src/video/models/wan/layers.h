// The layers of a Wan transformer, and the one list of its tensors: their names, shapes and places.
#pragma once

#include "video/models/wan/config.h"
#include "video/weights.h"

namespace scope::video::wan {

struct Attention {
  Linear to_q, to_k, to_v, to_out, add_k, add_v;  // add_*: the image branch
  const float *norm_q = nullptr, *norm_k = nullptr, *norm_added_k = nullptr;
};

struct Norm {
  const float *scale = nullptr, *shift = nullptr;
};

struct Block {
  Attention self, cross;
  Linear expand, contract;
  Norm norm;                          // before the cross-attention; null: none there
  const float* modulation = nullptr;  // [6, dim]
};

struct Layers {
  Linear patch, text_1, text_2, image_1, image_2;
  Norm image_norm1, image_norm2;
  const float* image_places = nullptr;     // [image_tokens, image_dim]; null: none
  Linear time_1, time_2, time_projection;  // kept by the host
  std::vector<Block> blocks;
  Linear projection;
  const float* last_modulation = nullptr;  // [2, dim]
};

// Every tensor of such a model, each to go into `layers`, which gets its blocks here.
TensorList list_tensors(const Config& config, Layers& layers);

}  // namespace scope::video::wan
