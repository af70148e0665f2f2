// Waves and rotations on the host, and the plan of a dense attention.
#include "video/parts.h"

#include <cmath>

#include "methods/methods.h"
#include "pipeline/call.h"

namespace scope::video {

std::vector<float> make_waves(std::span<const double> times, int64_t channels) {
  const int64_t half = channels / 2;
  std::vector<float> out(times.size() * static_cast<size_t>(channels));
  float* row = out.data();
  for (const double time : times) {
    // In f32 as diffusers does it: at timestep 1000 the rounding of a frequency is seen.
    for (int64_t i = 0; i < half; ++i) {
      const float exponent = -9.210340371976184f * static_cast<float>(i) / static_cast<float>(half);
      const float angle = static_cast<float>(time) * std::exp(exponent);
      row[i] = std::cos(angle);
      row[half + i] = std::sin(angle);
    }
    row += channels;
  }
  return out;
}

std::vector<float> make_rotation(const PatchGrid& grid, const std::vector<int32_t>& places, const std::vector<int64_t>& rope,
                                 const std::function<double(int64_t place, double share)>& angle) {
  const int64_t half = (rope[0] + rope[1] + rope[2]) / 2, sizes[3] = {grid.t, grid.h, grid.w};
  std::vector<float> cosines[3], sines[3];  // [size, channels / 2]: few angles, many tokens
  for (size_t axis = 0; axis < 3; ++axis) {
    for (int64_t place = 0; place < sizes[axis]; ++place) {
      for (int64_t c = 0; c < rope[axis]; c += 2) {
        const double turn = angle(place, static_cast<double>(c) / static_cast<double>(rope[axis]));
        cosines[axis].push_back(static_cast<float>(std::cos(turn)));
        sines[axis].push_back(static_cast<float>(std::sin(turn)));
      }
    }
  }
  std::vector<float> out(static_cast<size_t>(grid.tokens() * 2 * half));
  for (int64_t patch = 0; patch < grid.tokens(); ++patch) {
    const int64_t at[3] = {patch / (grid.h * grid.w), patch / grid.w % grid.h, patch % grid.w};
    float* to = out.data() + (places.empty() ? patch : places[static_cast<size_t>(patch)]) * 2 * half;
    for (size_t axis = 0; axis < 3; ++axis) {
      const int64_t n = rope[axis] / 2;
      std::copy_n(cosines[axis].begin() + at[axis] * n, n, to);
      std::copy_n(sines[axis].begin() + at[axis] * n, n, to + half);
      to += n;
    }
  }
  return out;
}

DenseAttention::DenseAttention(Engine& engine, int64_t heads, int64_t head_dim, int64_t queries, int64_t keys)
    : engine_(engine),
      plan_(engine.context, find_method("dense").settings(),
            Shape{.heads = heads,
                  .q_tokens = queries,
                  .k_tokens = keys,
                  .dim = head_dim,
                  .dtype = engine.attention,
                  .rope = {},
                  .subspaces = {}}),
      workspace_(engine.allocate(plan_.workspace_bytes)) {}

void DenseAttention::run(Matrix q, Matrix k, Matrix v, Matrix out) const {
  const int64_t heads = plan_.shape.heads, dim = plan_.shape.dim;
  const auto view = [&](Matrix x) {
    return TensorView{x.data, x.dtype, 1, heads, x.rows, dim, x.rows * x.columns, dim, x.columns};
  };
  CallArgs args;
  args.q = view(q);
  args.k = view(k);
  args.v = view(v);
  args.out = {out.data, out.dtype, 1, heads, out.rows, dim, out.rows * out.columns, dim, out.columns};
  args.stream = engine_.stream;
  args.workspace = workspace_.get();
  args.workspace_bytes = plan_.workspace_bytes;
  call(plan_, args);
}

}  // namespace scope::video
