// schedule: which calls of a generation attend densely, and why.
#pragma once

#include "methods/settings.h"

namespace scope {

// Where a call stands in a generation; a negative index means "not said", and that part of the schedule is skipped.
struct Place {
  int64_t layer = -1;
  int64_t step = -1;
  int64_t steps = 0;
};

// Values are those of scope_reason in scope.h.
enum class Reason : int {
  sparse = 0,        // the call selected keys
  method_dense = 1,  // the method is dense
  dense_layer = 2,   // layer < dense_layers
  dense_step = 3,    // within the first dense_steps, or of density 1 in density_steps
  dense_last_step = 4,
  nothing_to_select = 5,  // no query or no key takes part in selection
};

Reason schedule(const Settings& settings, const Place& place);
// What density_steps has for the call: the first entry whose share of the steps lies past its step, the last where it says
// none; `otherwise` without entries.
double density_at(const Settings& settings, const Place& place, double otherwise);
// Whether a dense call that has a state clusters all the same, so that the first sparse one is warm.
bool clusters_in_prefix(const Settings& settings, Reason reason);
// Whether the clusters that a state holds stay as they are: from reuse_start on, which counts steps from 1, at all but every
// reuse_interval-th step; both scaled from reuse_steps to the steps of the run.
bool reuses_clusters(const Settings& settings, const Place& place);
// The least share of keys or codes that a head's groups keep: alpha, or the profile's entry within its bounds.
double least_share(const Settings& settings, const Place& place, int64_t head);
const char* reason_text(Reason reason);

}  // namespace scope
