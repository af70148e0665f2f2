// Flow matching with guidance: from noise to a sample, every self-attention through the pipeline.
#pragma once

#include <functional>
#include <vector>

#include "video/self_attention.h"
#include "video/stepper.h"

namespace scope::video {

// All that the steps to come need of those that are done.
struct Snapshot {
  int64_t steps_done = 0;
  std::vector<float> latent;
  std::vector<std::vector<float>> history;     // the sampler's
  std::vector<std::vector<std::byte>> states;  // of self-attention: of each layer, and there of each branch
  std::vector<CallReport> calls;
  double seconds = 0;
};

struct Request {
  std::array<int64_t, 3> grid = {};  // tokens along T, H and W
  int64_t steps = 20;
  Sampler sampler = Sampler::euler;
  double shift = 3;
  double boundary = 0;                               // timesteps below it are the second transformer's; 0: there is none
  double guidance = 1, guidance_2 = 1;               // of each transformer; 1: the prompt alone, one pass per step
  Settings settings;                                 // of self-attention
  std::vector<float> noise;                          // [latent_channels, T, H, W]
  std::vector<float> condition;                      // [condition_channels, T, H, W]
  std::vector<float> first_frame;                    // [latent_channels, 1, H, W] of the sample; empty: it is made too
  Prompt prompt, negative;                           // the second is read when a guidance is not 1
  std::function<void(const CallReport&)> done = {};  // of each self-attention; a device's after its step
  // Before each self-attention, what goes in: [tokens, heads x head_dim] on the host in `dtype`, without padding; null:
  // not wanted.
  std::function<bool(int64_t step, int64_t layer, int64_t branch)> wanted = {};
  std::function<void(int64_t step, int64_t layer, int64_t branch, DType dtype, std::vector<std::byte> q,
                     std::vector<std::byte> k, std::vector<std::byte> v)>
      watch = {};
  // After every so many steps, but not after the last; 0: never.
  int64_t snapshot_every = 0;
  std::function<void(Snapshot)> snapshot = {};
  const Snapshot* resume = nullptr;  // of the same request: it goes on from there, bit for bit
};

struct Sample {
  std::vector<float> latent;  // [latent_channels, T, H, W]
  std::vector<CallReport> calls;
  double seconds = 0;  // without the reading of weights
};

// Unit normals, the same for a seed on every machine and for every method. Pair p takes the 64-bit draws 2p and 2p + 1 of
// the Philox stream (seed, purpose 4), as u = (draw div 2^11 + 1/2) / 2^53: sqrt(-2 ln u_1) times cos and sin of 2 pi u_2.
std::vector<float> make_noise(uint64_t seed, int64_t count);

// Latent elements along T, H and W.
std::array<int64_t, 3> latent_size(const ModelConfig& config, const std::array<int64_t, 3>& grid);

// The transformer, from 0, that runs at each step. Its guidance is that of the request.
std::vector<int64_t> experts_of(const Request& request);
inline double guidance_of(const Request& request, int64_t expert) {
  return expert == 0 ? request.guidance : request.guidance_2;
}

// Gives a transformer, which is kept while its steps last: each is asked for once, after the other was let go.
using OpenModel = std::function<std::shared_ptr<const Model>(int64_t expert)>;

Sample generate(const OpenModel& open, const Request& request);
Sample generate(const Model& model, const Request& request);  // by one transformer

}  // namespace scope::video
