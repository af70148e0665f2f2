// What a model folder says of its latents, and the bundled model's: RGB frames after a 2 x 2 pixel-unshuffle, no VAE.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "io/png.h"

namespace scope::video {

// scope.json, beside config.json: what diffusers' config does not hold. Without the file these are the values.
struct Notes {
  bool rgb = false;                  // latents are RGB frames, conditioned on the first one
  double shift = 5;                  // of the noise levels
  std::array<int64_t, 3> grid = {};  // tokens that the model was made for; 0: not said
  int64_t steps = 20;                // of sampling, unless a request says otherwise
  bool prompts = true;               // false: they do nothing, and none is needed
};
Notes parse_notes(std::string_view json);  // Error(Status::format)
Notes read_notes(const std::string& folder);

inline constexpr int64_t kRgbChannels = 12;
inline constexpr int64_t kMostGuides = 4;

// The channels beside the noisy latent [guides + 12, T, H, W]: the first `guides` of mask of frame 0, time, y and x, then
// the clean latent of frame 0. docs/notebook/tiny_video.md has the scales. size: latent elements, half of the pixels.
std::vector<float> first_frame_condition(const io::Image& first, const std::array<int64_t, 3>& size,
                                         int64_t guides = kMostGuides);

// Latent [12, T, H, W] -> T frames of 2H x 2W pixels.
std::vector<io::Image> to_frames(const std::vector<float>& latent, const std::array<int64_t, 3>& size);

}  // namespace scope::video
