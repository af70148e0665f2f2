// The layers of a HunyuanVideo transformer, and the one list of its tensors: their names, shapes and places.
#pragma once

#include "video/models/hunyuan/config.h"
#include "video/weights.h"

namespace scope::video::hunyuan {

constexpr int64_t kWaves = 256;  // channels of a time or a guidance before its embedder

// Two layers with silu between them, kept by the host: of a time, a guidance or a pooled prompt.
struct Embedder {
  Linear first, second;
};

struct Norm {
  const float *scale = nullptr, *shift = nullptr;
};

// Of the text alone, before it meets the video.
struct RefinerBlock {
  Norm norm_1, norm_2;
  Linear to_q, to_k, to_v, to_out, expand, contract;
  Linear gates;  // of attention and feed-forward
};

// What a double block does to the video's tokens, or to the text's.
struct Stream {
  Linear modulation;  // shift, scale and gate of attention, then of the feed-forward
  Linear to_q, to_k, to_v, to_out, expand, contract;
  const float *norm_q = nullptr, *norm_k = nullptr;  // [head_dim]
};

struct DoubleBlock {
  Stream video, text;
};

// Attention and feed-forward side by side, for all tokens.
struct SingleBlock {
  Linear modulation;  // shift, scale, gate
  Linear to_q, to_k, to_v, expand;
  Linear from_attention, from_mlp;                   // one layer of the model over both; the first has its bias
  const float *norm_q = nullptr, *norm_k = nullptr;  // [head_dim]
};

struct Layers {
  Linear patch;
  Embedder time, guidance, pooled;      // guidance: null where the model has none
  Embedder refiner_time, refiner_text;  // what the refiner takes of the time and of the mean text
  Linear text;
  std::vector<RefinerBlock> refiner;
  std::vector<DoubleBlock> double_blocks;
  std::vector<SingleBlock> single_blocks;
  Linear last_modulation;  // scale, shift
  Linear projection;
};

// Every tensor of such a model, each to go into `layers`, which gets its blocks here.
TensorList list_tensors(const Config& config, Layers& layers);

}  // namespace scope::video::hunyuan
