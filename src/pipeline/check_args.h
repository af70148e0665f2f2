// What a call refuses before anything is written.
#pragma once

#include "pipeline/call.h"

namespace scope {

// Shapes, strides, pointers, lengths, and what the backend asks of them. needs_v: the call attends, and has v and out.
void check_args(const Plan& plan, const CallArgs& args, bool needs_v);

// Non-finite q or k would poison every centroid; what could overflow a product of up to 256 channels is refused too. Where
// the backend can see that before the call.
void check_finite(const Plan& plan, const Exec& exec, const CallArgs& args);

// A selection from elsewhere, where the host can read it.
void check_selection(const Plan& plan, const CallArgs& args, const SelectedArgs& selected);

}  // namespace scope
