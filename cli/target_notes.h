// What meeting a target density took.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "runner.h"

namespace scope::cli {

// A line each: a lowered alpha, or the nearest density where the steps are coarse.
// Throws when the least that the method keeps is above the target. target 0: none.
std::vector<std::string> target_notes(const Runner& runner, double target, const std::string& method);
// The same for heads of several sparse calls; settings: their plan's.
std::vector<std::string> target_notes(const Settings& settings, double density, std::span<const HeadStats> heads,
                                      double target, const std::string& method);

}  // namespace scope::cli
