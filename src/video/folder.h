// A pipeline's folder as diffusers writes it: model_index.json, its transformers and its scheduler; or a transformer's
// alone.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "video/stepper.h"

namespace scope::video {

// scheduler_config.json.
struct Schedule {
  Sampler sampler = Sampler::euler;
  double shift = 1;
  bool operator==(const Schedule&) const = default;
};

// model_index.json.
struct ModelIndex {
  bool two_experts = false;
  double boundary = 0;  // the share of 1000 below which the second expert's timesteps lie; 0: there is one expert
  bool expand_timesteps = false;
  bool operator==(const ModelIndex&) const = default;
};

struct Folder {
  std::vector<std::string> transformers;  // folders of their own: the first takes the noisy steps
  double boundary = 0;                    // timesteps below it are the second's; 0: there is none
  bool keeps_first_frame = false;         // it may be given, and stays as it is
  std::optional<Schedule> schedule;       // empty: the folder says nothing of it
};

// Whatever is wrong with the text is Error(Status::format).
Schedule parse_scheduler(std::string_view json);
ModelIndex parse_model_index(std::string_view json);

// Refuses experts that are missing, that have changed places as far as they say where they come from, or whose configs or
// tensors disagree.
Folder read_folder(const std::string& folder);

}  // namespace scope::video
