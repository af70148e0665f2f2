// The CPU's side of stages/bookkeeping.h.
#pragma once

#include "stages/bookkeeping.h"

namespace scope::cpu {

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

}  // namespace scope::cpu
