// Wan's diffusion transformer on an engine: the function of diffusers' WanTransformer3DModel, one sample at a time.
#pragma once

#include "video/models/wan/layers.h"

namespace scope::video::wan {

class Transformer final : public Model {
 public:
  // Compute is the engine's, but for the embedding of time: always f32 on the host.
  Transformer(const Config& config, const TensorSource& tensors, Engine& engine);
  std::unique_ptr<Pass> start(const std::array<int64_t, 3>& grid, bool morton) const override;

  const Config& wan() const { return wan_; }
  const Layers& layers() const { return layers_; }
  // What every layer takes from the timesteps: [steps, 7, dim] f32 in the engine's memory, six rows for the blocks and one
  // for the end.
  Buffer embed_time(std::span<const double> timesteps) const;

 private:
  Config wan_;
  std::unique_ptr<Engine> host_;
  Layers layers_;
  LoadedTensors tensors_;
};

}  // namespace scope::video::wan
