// The samplers: noise levels, timesteps, and how a latent goes from one level to the next by the velocity there.
#pragma once

#include <vector>

#include "video/engine.h"

namespace scope::video {

enum class Sampler { euler, unipc };

// steps + 1 levels from noise to 0, s u / (1 + (s - 1) u) with s the shift. Euler: u = 1 - i / steps. UniPC, as diffusers
// has it: u = 1 - 0.999 i / steps, the first level 10^-6 below 1, rounded to f32.
std::vector<double> noise_levels(Sampler sampler, int64_t steps, double shift);
// What the model is told of every step, in 0..1000: 1000 times the level; UniPC's are whole numbers, rounded down.
std::vector<double> noise_timesteps(Sampler sampler, int64_t steps, double shift);

// A latent's way through the levels. Velocity is noise - data.
class Stepper {
 public:
  Stepper(Engine& engine, Sampler sampler, int64_t steps, double shift, int64_t numbers);

  // The latent of level i becomes that of level i + 1, by the velocity negative + guidance (prompt - negative); null
  // negative: the prompt's. Every step once, in order.
  void step(int64_t i, const float* prompt, const float* negative, double guidance, float* latent);

  // What it remembers of earlier steps. What is loaded must be what another saved, as many vectors of as many numbers: else
  // Error(Status::format).
  std::vector<std::vector<float>> save() const;
  void load(const std::vector<std::vector<float>>& saved);

 private:
  void unipc(int64_t i, float* latent);
  // Data as step i predicted it.
  float* data(int64_t i) const { return static_cast<float*>(memory_[static_cast<size_t>(1 + i % 3)].get()); }

  Engine& engine_;
  Sampler sampler_;
  int64_t steps_, numbers_;
  std::vector<double> levels_;
  std::vector<Buffer> memory_;  // UniPC's: the last step's corrected latent, and data as the last three steps predicted it
};

}  // namespace scope::video
