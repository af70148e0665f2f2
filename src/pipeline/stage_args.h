// stage_args: the arguments of each stage for a chunk of heads, from a call's frame. Each is made after the stages before
// it.
#pragma once

#include "pipeline/frame.h"
#include "pipeline/warm.h"

namespace scope {

// Of K-means, or rounds of co-clustering; 0: neither queries nor keys are clustered so.
int iterations_of(const Settings& settings, const Start& start);

GroupArgs group_args(const Frame& frame, const Sample& s, Chunk chunk, const Start& start);
SplitArgs split_args(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
EncodeArgs encode_args(const Frame& frame, const Sample& s, Chunk chunk, const Start& start);
ScoreArgs score_args(const Frame& frame, Chunk chunk, const StateSlot& slot);
CompensateArgs compensate_args(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
// alpha: [1], for a head that has a floor of its own.
WeighArgs weigh_args(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot, const double* alpha);
// Of the sample; the frame is its first chunk's.
SolveArgs solve_args(const Frame& frame, const Sample& s, const StateSlot& slot);
KeepArgs keep_args(const Frame& frame, const Sample& s, Chunk chunk, const WeighArgs& weighed);
TailArgs tail_args(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
FinishArgs finish_args(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
// A heads' report of a sample that attended densely.
FinishArgs finish_dense_args(const Frame& frame, const Sample& s);

// On a selection that finish or import completed; without tail.
AttendArgs attend_args(const Frame& frame, const Sample& s, Chunk chunk);
// What the tail yields to attend.
void add_tail(const Frame& frame, const StateSlot& slot, AttendArgs& attend);
// One group with every valid query and every valid key.
AttendArgs attend_dense_args(const Frame& frame, const Sample& s, Chunk chunk);

}  // namespace scope
