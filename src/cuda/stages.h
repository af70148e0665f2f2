// Every CUDA stage's host function; contracts in src/stages, rules for devices in stages/backend.h.
#pragma once

#include "stages/attend.h"
#include "stages/bookkeeping.h"
#include "stages/cocluster.h"
#include "stages/compensate.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"
#include "stages/split.h"
#include "stages/tail.h"

namespace scope::cuda {

void group(const Exec& exec, const GroupArgs& args);
int64_t group_scratch(const Exec& exec, const Sizes& sizes);
void split(const Exec& exec, const SplitArgs& args);
int64_t split_scratch(const Exec& exec, const Sizes& sizes);
void encode(const Exec& exec, const EncodeArgs& args);
int64_t encode_scratch(const Exec& exec, const Sizes& sizes);
void cocluster(const Exec& exec, const CoclusterArgs& args);
int64_t cocluster_scratch(const Exec& exec, const Sizes& sizes);
void score(const Exec& exec, const ScoreArgs& args);
void compensate(const Exec& exec, const CompensateArgs& args);
int64_t compensate_scratch(const Exec& exec, const Sizes& sizes);
void weigh(const Exec& exec, const WeighArgs& args);
void solve(const Exec& exec, const SolveArgs& args);
int64_t solve_scratch(const Exec& exec, const Sizes& sizes);
void keep(const Exec& exec, const KeepArgs& args);
int64_t weights_bytes(const Exec& exec, const Sizes& sizes);
int64_t weigh_scratch(const Exec& exec, const Sizes& sizes);
void tail(const Exec& exec, const TailArgs& args);
int64_t tail_scratch(const Exec& exec, const Sizes& sizes);
void attend(const Exec& exec, const AttendArgs& args);
int64_t attend_scratch(const Exec& exec, const Sizes& sizes);
// Rows [first, first + n) of the first head's proxy matrix into out [n, stride], for tests.
void score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride);

void describe(const Exec& exec, const DescribeArgs& args);
void finish(const Exec& exec, const FinishArgs& args);
void import_selection(const Exec& exec, const ImportArgs& args);
void reuse(const Exec& exec, const ReuseArgs& args);
void set_slot(const Exec& exec, StateSlot* slot, StateSlot value);
void check_slot(const Exec& exec, const void* state, const void* header, const StateSlot* slot, StateSlot expected,
                uint32_t* status);
void fill(const Exec& exec, void* to, int64_t step, uint32_t value, int64_t count, int64_t rows);
void copy(const Exec& exec, const void* from, int64_t from_step, void* to, int64_t to_step, int64_t count, int64_t rows);
void round_to(const Exec& exec, DType type, const float* from, float* to, int64_t count);
void convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count);
void scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
             int64_t to_step, int64_t heads);

}  // namespace scope::cuda
