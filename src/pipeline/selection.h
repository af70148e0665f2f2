// selection: what a call writes of its selection for the caller.
#pragma once

#include "pipeline/frame.h"

namespace scope {

// The keys that every query of the sample sees.
void write_keep(const Frame& frame, const Sample& s);
// A chunk's groups, keys, centroids and codes.
void write_selection(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
// Nothing was selected: by the schedule, or because the sample has nothing to select from, and then all its queries are the
// last group.
void write_dense(const Frame& frame, const Sample& s, Chunk chunk, bool scheduled);

}  // namespace scope
