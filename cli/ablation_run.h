// The run of scope ablate.
#pragma once

#include "ablation.h"

namespace scope::cli::ablation {

// Refuses what cannot run before any work, and writes and prints what it finds.
void run(const AblateOptions& options);

}  // namespace scope::cli::ablation
