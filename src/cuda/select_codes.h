// select on CUDA for the rules that keep whole codes.
#pragma once

#include <span>

#include "cuda/select.h"
#include "stages/select.h"

namespace scope::cuda {

void select_codes(const Exec& exec, std::span<const SelectArgs> heads, const ProxyLaunch& proxy, const MaskLaunch& mask);
int64_t select_codes_scratch(int64_t groups, int64_t codes);

}  // namespace scope::cuda
