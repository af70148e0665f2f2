// Means and medians of a run's figures.
#pragma once

#include <vector>

namespace scope::cli {

double mean(const std::vector<double>& values);
// Of a sample, n - 1; NaN for one value.
double deviation(const std::vector<double>& values);
// The mean of the middle one or two; upper_median: the second of two.
double median(std::vector<double> values);
double upper_median(std::vector<double> values);
// The value nearest to this share of the way from the least to the greatest.
double quantile(std::vector<double> values, double share);

}  // namespace scope::cli
