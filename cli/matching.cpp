// The search for a run's threshold.
#include "matching.h"

#include <algorithm>
#include <cmath>

#include "core/numeric.h"
#include "stages/choices.h"

namespace scope::cli::ablation {

namespace {

constexpr double kNear = 0.01;        // of the target: near enough on the choosing videos
constexpr int64_t kMostRuns = 12;     // of a search
constexpr double kLeast = 1e-6;       // of a share, which settings hold in millionths
constexpr double kMost = 1 - kLeast;  // 1 keeps everything

// A share so that equal steps are about equal factors of what is kept and of what is left out.
double logit(double share) { return std::log(share / (1 - share)); }
double share(double logit) { return std::clamp(1 / (1 + std::exp(-logit)), kLeast, kMost); }

struct Tried {
  double at, density;
};

// Between two tries by the logarithm of the density; in the middle where that goes to one end.
double between(const Tried& low, const Tried& high, double target) {
  const double a = logit(low.at), b = logit(high.at), from = std::log(std::max(low.density, kLeast));
  const double part = (std::log(target) - from) / (std::log(high.density) - from);
  return share(a + (b - a) * (part > 0.05 && part < 0.95 ? part : 0.5));
}

}  // namespace

std::string control_of(const Settings& settings, const std::string& variant) {
  require(settings.rule != Rule::target, Status::invalid_argument,
          "--match run: {} has rule target, which meets its density in every call; use --match call", variant);
  return row(settings.rule).rho ? "rho" : "density";
}

Settings Threshold::apply(Settings settings) const {
  if (alpha >= 0) settings.alpha = alpha;
  if (control == "density") {
    settings.density = value;
    return settings;
  }
  if (settings.profile != nullptr) {
    const double factor = value / settings.rho;
    settings.profile_low = std::min(1.0, factor * settings.profile_low);
    settings.profile_high = std::min(1.0, factor * settings.profile_high);
  }
  settings.rho = value;
  return settings;
}

Threshold find_threshold(const Settings& settings, const std::string& variant, double target, double start,
                         const std::function<double(const Settings&)>& density) {
  Threshold found{.control = control_of(settings, variant)};
  const double lowered = target / std::max(row(settings.rule).floor, 2);
  const bool floored = row(settings.rule).floor > 0 && settings.profile == nullptr;
  Tried low{kLeast, 0}, high{kMost, 1};
  // Single keys: a group keeps at least alpha of them, so that at this density the floor would decide alone.
  if (floored && !row(settings.rule).whole_codes && settings.alpha > (1 - kNear) * target) found.alpha = lowered;
  Threshold tried = found;
  tried.value = start;
  while (found.runs < kMostRuns) {
    tried.value = static_cast<double>(std::max(int64_t{1}, to_millionths(tried.value))) / 1e6;  // as settings hold it
    tried.density = density(tried.apply(settings));
    ++found.runs;
    if (found.runs == 1 || std::abs(tried.density - target) < std::abs(found.density - target)) {
      found.value = tried.value, found.density = tried.density;
    }
    // Even the least threshold keeps as much: the floor decides alone, and a threshold nothing.
    const bool at_floor = tried.value <= kLeast && tried.density > (1 - kNear) * target;
    if (at_floor && floored && tried.alpha < 0 && settings.alpha > lowered) {
      found.alpha = tried.alpha = lowered;  // and once more from the start
      low = {kLeast, 0}, high = {kMost, 1};
      tried.value = start;
      found.density = 0;
      continue;
    }
    if (std::abs(tried.density - target) <= kNear * target) break;
    (tried.density < target ? low : high) = {tried.value, tried.density};
    if (high.at - low.at < 2 * kLeast) break;  // no threshold lies between
    // Two tries above the target: perhaps the floor is, which the least threshold shows.
    const bool suspect = floored && tried.alpha < 0 && found.runs == 2 && low.density == 0;
    tried.value = suspect ? kLeast : between(low, high, target);
  }
  found.below = low.density, found.above = high.density;
  return found;
}

}  // namespace scope::cli::ablation
