// stats: what a call says of itself, at once or when it is asked.
#pragma once

#include "pipeline/call.h"

namespace scope {

// Densities, stage times and per-head statistics that are not known yet.
void clear_measured(CallStats& stats);
// Completes *stats (optional) and args.head_stats from a report in the backend's memory; waits for it.
void finish_stats(const Plan& plan, const Exec& exec, const CallArgs& args, const void* report, CallStats* stats);

}  // namespace scope
