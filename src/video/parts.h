// What transformers of several families share: waves of a time, rotations of tokens, and dense attention beside the
// pipeline's.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "video/engine.h"

namespace scope::video {

// Cosines, then sines, of each time at falling frequencies: [times, channels].
std::vector<float> make_waves(std::span<const double> times, int64_t channels);

// cos and sin of each token's angles along T, H and W: [tokens, 2, head_dim / 2]. rope: channels of a head along each axis;
// places: as in PatchGrid, on the host; angle: of a place along an axis, for the pair of channels that begins at `share` of
// the axis' channels.
std::vector<float> make_rotation(const PatchGrid& grid, const std::vector<int32_t>& places, const std::vector<int64_t>& rope,
                                 const std::function<double(int64_t place, double share)>& angle);

// Attention of every query to every key, always of the same shape.
class DenseAttention {
 public:
  DenseAttention(Engine& engine, int64_t heads, int64_t head_dim, int64_t queries, int64_t keys);
  // [tokens, heads x head_dim]; out may be q.
  void run(Matrix q, Matrix k, Matrix v, Matrix out) const;

 private:
  Engine& engine_;
  Plan plan_;
  Buffer workspace_;
};

}  // namespace scope::video
