// Finds lowered floors and coarse steps in a call's statistics.
#include "target_notes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "stages/choices.h"

namespace scope::cli {

namespace {

constexpr double kCloseEnough = 0.005;  // of a density to its target

// Samples whose heads have floors with a mean of `most`; all heads of each follow one another.
int64_t scaled_samples(const Settings& settings, std::span<const HeadStats> heads, double most) {
  const auto n = static_cast<size_t>(settings.profile->heads);
  int64_t found = 0;
  for (size_t first = 0; first + n <= heads.size(); first += n) {
    double mean = 0;
    for (const HeadStats& head : heads.subspan(first, n)) mean += head.alpha / static_cast<double>(n);
    found += heads[first].groups > 0 && std::abs(mean - most) < 1e-9 ? 1 : 0;
  }
  return found;
}

}  // namespace

std::vector<std::string> target_notes(const Runner& runner, double target, const std::string& method) {
  if (target == 0 || runner.stats.reason != Reason::sparse) return {};
  return target_notes(runner.plan().settings, runner.stats.density, runner.head_stats, target, method);
}

std::vector<std::string> target_notes(const Settings& settings, double density, std::span<const HeadStats> heads,
                                      double target, const std::string& method) {
  const bool least =
      std::all_of(heads.begin(), heads.end(), [](const HeadStats& head) { return head.groups == 0 || head.rho == 0; });
  require(!least || density <= target + kCloseEnough, Status::unsupported,
          "target density: got {}, and the least that {} keeps here is {:.4f}", target, method, density);
  std::vector<std::string> notes;
  const int floor = row(settings.rule).floor;
  const double most = floor > 0 ? target / floor : 1;
  const auto lowered = std::count_if(heads.begin(), heads.end(),
                                     [&](const HeadStats& head) { return head.groups > 0 && head.alpha == most; });
  if (floor > 0 && settings.profile != nullptr && settings.target_scope == TargetScope::sample) {
    const int64_t samples = scaled_samples(settings, heads, most);
    if (samples > 0) {
      notes.push_back(
          fmt::format("{}: least shares of the profile scaled to a mean of {}, 1/{} of the target density, in {} "
                      "samples",
                      method, most, floor, samples));
    }
  } else if (floor > 0 && settings.profile != nullptr && lowered > 0) {
    notes.push_back(
        fmt::format("{}: least shares of the profile lowered to {}, 1/{} of the target density, in {} of {} heads", method,
                    most, floor, lowered, heads.size()));
  } else if (settings.alpha > most && !(settings.alpha_first && settings.alpha < target)) {
    notes.push_back(
        fmt::format("{}: alpha lowered from {} to {}, 1/{} of the target density", method, settings.alpha, most, floor));
  }
  if (std::abs(density - target) > kCloseEnough) {
    notes.push_back(fmt::format("{}: density {:.4f} is the nearest to {} that can be reached", method, density, target));
  }
  return notes;
}

}  // namespace scope::cli
