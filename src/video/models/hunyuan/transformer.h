// HunyuanVideo's diffusion transformer on an engine: the function of diffusers' HunyuanVideoTransformer3DModel, one sample
// at a time.
#pragma once

#include "video/models/hunyuan/layers.h"

namespace scope::video::hunyuan {

class Transformer final : public Model {
 public:
  // Compute is the engine's, but for the embeddings of time, guidance and pooled prompt: always f32 on the host.
  Transformer(const Config& config, const TensorSource& tensors, Engine& engine);
  std::unique_ptr<Pass> start(const std::array<int64_t, 3>& grid, bool morton) const override;

  const Config& hunyuan() const { return hunyuan_; }
  const Layers& layers() const { return layers_; }
  // [rows, in] -> [rows, dim], on the host.
  std::vector<float> embed(const Embedder& embedder, std::vector<float> rows) const;

 private:
  Config hunyuan_;
  std::unique_ptr<Engine> host_;
  Layers layers_;
  LoadedTensors tensors_;
};

}  // namespace scope::video::hunyuan
