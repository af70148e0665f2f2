// Every CUDA stage's host function; contracts in src/stages, rules for devices in stages/backend.h.
#pragma once

#include <span>

#include "stages/attend.h"
#include "stages/bookkeeping.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"

namespace scope::cuda {

void group(const Exec& exec, std::span<const GroupArgs> heads);
void encode(const Exec& exec, std::span<const EncodeArgs> heads);
void score(const Exec& exec, std::span<const ScoreArgs> heads);
void select(const Exec& exec, std::span<const SelectArgs> heads);
void attend(const Exec& exec, std::span<const AttendArgs> heads);
int64_t group_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups);
int64_t encode_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t codes);
int64_t select_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes);
int64_t attend_scratch(const Exec& exec, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups);
// Rows [first, first + n) of one head's proxy matrix into out [n, stride], for tests.
void score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride);

void describe(const Exec& exec, const DescribeArgs& args);
void finish(const Exec& exec, const FinishArgs& args);
void import_selection(const Exec& exec, const ImportArgs& args);
void set_slot(const Exec& exec, StateSlot* slot, StateSlot value);
void fill(const Exec& exec, void* to, int64_t step, uint32_t value, int64_t count, int64_t rows);
void copy(const Exec& exec, const void* from, int64_t from_step, void* to, int64_t to_step, int64_t count, int64_t rows);
void convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count);
void scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
             int64_t to_step, int64_t heads);
void check_slot(const Exec& exec, const void* state, const void* header, const StateSlot* slot, StateSlot expected,
                uint32_t flag, uint32_t* status);

}  // namespace scope::cuda
