// What a generated video is conditioned on, from files.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "video/folder.h"
#include "video/media.h"
#include "video/sampler.h"

namespace scope::cli {

struct VideoInputs {
  std::string image, condition;  // files; empty: the model's examples
  int64_t example = 0;           // which sample of the condition
};

// A float tensor of a file; `shape` has -1 where any size will do. A leading 1 or, with `pick`, a batch of which one is
// taken, may stand before it.
std::vector<float> take_floats(const std::string& path, const io::SafeTensors& file, const std::string& name,
                               const std::vector<int64_t>& shape, int64_t pick);
// How many tokens of a prompt are not padding: the ones of a mask [tokens] of whole numbers or floats, all of them first;
// all tokens where the file has no such mask. A batch as in take_floats.
int64_t prompt_length(const std::string& path, const io::SafeTensors& file, const std::string& name, int64_t tokens,
                      int64_t pick);
// Refuses an example other than 0 of a file that holds one sample.
void check_example(const std::string& path, const io::SafeTensors& file, int64_t example);
// What the bundled model is conditioned on: the first frame and the motion tokens of an example, or of the user's files.
void read_rgb_inputs(const VideoInputs& options, const std::string& folder, const video::Notes& notes,
                     const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request);

// What other models are conditioned on, from the tensors of the condition. guidance, guidance_2: 0 takes what
// `scope generate` does.
void read_latent_inputs(const VideoInputs& inputs, double guidance, double guidance_2, const video::Folder& folder,
                        const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request);

}  // namespace scope::cli
