// The half of select on the CPU that keeps whole codes, for the other, which keeps keys.
#pragma once

#include "stages/select.h"

namespace scope::cpu {

void select_codes(const Exec& exec, const SelectArgs& args);
int64_t select_codes_scratch(const Exec& exec, int64_t count, int64_t groups, int64_t codes);

}  // namespace scope::cpu
