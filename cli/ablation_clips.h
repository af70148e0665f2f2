// Which clips the seeds of an ablation take, and on which others its thresholds are found.
#pragma once

#include <string>
#include <vector>

#include "ablation.h"

namespace scope::cli::ablation {

struct Clips {
  std::vector<VideoInputs> shown;     // seed s takes clip s modulo how many there are
  std::vector<VideoInputs> choosing;  // two, with --match run
  std::vector<std::string> names() const;
};

// Samples of the condition, each with each image where some are given. An empty condition: the transformer's examples, which
// hold prompts or frames.
Clips find_clips(const AblateOptions& options, const std::string& condition, const std::string& transformer, bool prompts);

}  // namespace scope::cli::ablation
