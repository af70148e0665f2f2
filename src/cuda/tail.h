// The tail of whole codes, for the stage of all tails.
#pragma once

#include "stages/tail.h"

namespace scope::cuda {

// Group c sees the codes whose keys it drops. Codes are kept whole, so one key tells of all.
void mask_dropped_codes(const Exec& exec, const TailArgs& args);
int64_t mask_dropped_codes_scratch(const Sizes& sizes);

}  // namespace scope::cuda
