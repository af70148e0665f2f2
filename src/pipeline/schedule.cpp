// The dense layers and steps of a generation.
#include "pipeline/schedule.h"

#include <algorithm>

#include "core/numeric.h"

namespace scope {

Reason schedule(const Settings& settings, const Place& place) {
  require(place.layer >= -1, Status::invalid_argument, "layer: got {}, expected 0 or more, or -1 for none", place.layer);
  require(place.step >= -1, Status::invalid_argument, "step: got {}, expected 0 or more, or -1 for none", place.step);
  require(place.steps <= 1'000'000'000, Status::invalid_argument, "steps: got {}, expected at most 1000000000", place.steps);
  require(place.step < 0 || place.step < place.steps, Status::invalid_argument,
          "step: got {} of {} steps, expected 0..steps - 1", place.step, place.steps);
  if (settings.profile != nullptr && place.step >= 0) {
    require(settings.profile->steps <= place.steps, Status::shape, "profile: {} is of {} steps, the run has {}",
            settings.profile->path, settings.profile->steps, place.steps);
  }
  if (settings.dense) return Reason::method_dense;
  if (place.layer >= 0 && place.layer < settings.dense_layers) return Reason::dense_layer;
  if (place.step >= 0) {
    if (place.step < floor_share(settings.dense_steps, place.steps)) return Reason::dense_step;
    if (place.step >= place.steps - floor_share(settings.dense_last_steps, place.steps)) return Reason::dense_last_step;
  }
  return density_at(settings, place, 0) == 1 ? Reason::dense_step : Reason::sparse;
}

double density_at(const Settings& settings, const Place& place, double otherwise) {
  for (const DensityStep& entry : settings.density_steps) {
    if (place.step >= 0 && place.step < ceil_share(entry.until, place.steps)) return entry.density;
  }
  return settings.density_steps.empty() ? otherwise : settings.density_steps.back().density;
}

bool clusters_in_prefix(const Settings& settings, Reason reason) {
  return settings.warm_prefix && reason == Reason::dense_step;
}

bool reuses_clusters(const Settings& settings, const Place& place) {
  if (place.step < 0 || settings.reuse_interval == 1) return false;
  // A prefix rounds down, as the dense steps do, and an interval up: what clusters once in its own steps does so in any.
  const int64_t of = settings.reuse_steps == 0 ? place.steps : settings.reuse_steps;
  const int64_t before = (settings.reuse_start - 1) * place.steps / of;
  const int64_t interval = ceil_div(settings.reuse_interval * place.steps, of);
  return place.step >= before && (place.step - before) % interval != 0;
}

double least_share(const Settings& settings, const Place& place, int64_t head) {
  if (settings.profile == nullptr) return settings.alpha;
  const auto found = settings.profile->densities.find({place.step, place.layer, head});
  if (found == settings.profile->densities.end()) return settings.alpha;
  return std::clamp(found->second, settings.profile_low, settings.profile_high);
}

const char* reason_text(Reason reason) {
  switch (reason) {
    case Reason::sparse:
      return "sparse";
    case Reason::method_dense:
      return "dense: the method is dense";
    case Reason::dense_layer:
      return "dense: the layer is below dense_layers";
    case Reason::dense_step:
      return "dense: the step is within dense_steps, or its density in density_steps is 1";
    case Reason::dense_last_step:
      return "dense: the step is within dense_last_steps";
    case Reason::nothing_to_select:
      return "dense: no query or no key takes part in selection";
  }
  return "unknown";
}

}  // namespace scope
