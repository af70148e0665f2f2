// Means and medians of a run's figures.
#pragma once

#include <vector>

namespace scope::cli {

double mean(const std::vector<double>& values);

}  // namespace scope::cli
