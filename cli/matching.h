// Finds the threshold at which a whole run keeps a given share of the keys, by the control that a method exposes.
#pragma once

#include <functional>
#include <string>

#include "methods/settings.h"

namespace scope::cli::ablation {

// How rows meet a density: in every call, by one threshold for a run, or not at all (each method's own settings).
enum class Match { call, run, own };

// A method's threshold and what it gave on the videos that it was found on.
struct Threshold {
  std::string control;  // the setting that was moved
  double value = 0, density = 0;
  double below = 0, above = 1;  // densities of the nearest thresholds on both sides that were tried; 0 and 1: none was
  int64_t runs = 0;
  double alpha = -1;  // that replaces the method's, whose floor lies above the density; -1: none does

  // Moves the method's control. With a profile, SVOO's two move together: p and the bounds of its profile.
  Settings apply(Settings settings) const;
};

// The setting that moves a method's density: "rho", or "density" where the rule has none. Refuses a rule that solves its
// own.
std::string control_of(const Settings& settings, const std::string& variant);

// density(settings): the mean over the sparse calls of some videos, which rises with the control. start: the first value.
Threshold find_threshold(const Settings& settings, const std::string& variant, double target, double start,
                         const std::function<double(const Settings&)>& density);

}  // namespace scope::cli::ablation
