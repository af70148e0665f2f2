// Sums up lists of figures.
#include "statistics.h"

#include <numeric>

namespace scope::cli {

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace scope::cli
