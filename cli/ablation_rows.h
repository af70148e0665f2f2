// The rows of an ablation: the control, and each variant at each of its points.
#pragma once

#include <string>

#include "ablation.h"
#include "core/error.h"

namespace scope::cli::ablation {

// Every variant and point of the tables once; what cannot run is refused or, in a suite, said.
void make_rows(const AblateOptions& options, const video::ModelConfig& config, const Context& context, Findings& found);
// A variant that cannot run is refused or, in a suite, said.
void leave_out(const AblateOptions& options, Findings& found, const std::string& variant, const Error& error);
// Of one attention call of the videos.
Plan make_plan(const video::ModelConfig& config, const Context& context, const Findings& found, const Settings& settings);
// The type that the videos are not computed in.
std::string other_compute(const Findings& found);

}  // namespace scope::cli::ablation
