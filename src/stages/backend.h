// A backend is a struct of function pointers, one per stage; a missing backend is a null pointer.
#pragma once

#include <span>

#include "stages/attend.h"
#include "stages/bookkeeping.h"
#include "stages/cocluster.h"
#include "stages/compensate.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"

namespace scope {

// Every stage takes a chunk of heads (a chunk of one on the CPU, as many as the workspace allows on a device) and
// must give each head the same bits whatever the chunk. On a device:
//   - every pointer but `partition` is device memory, and so are the scalars that a stage returns;
//   - the heads of a chunk belong to one sample: they share every count, setting, stride and `rows` pointer, and each of
//     their other pointers advances by one constant step from head to head;
//   - the chunk's scratch is that of its first head: heads x what the *_scratch function says;
//   - `rows` may be null: the first `count` tokens.
struct Backend {
  const char* name;
  void (*group)(const Exec&, std::span<const GroupArgs> heads);
  void (*encode)(const Exec&, std::span<const EncodeArgs> heads);
  void (*score)(const Exec&, std::span<const ScoreArgs> heads);
  void (*select)(const Exec&, std::span<const SelectArgs> heads);
  void (*attend)(const Exec&, std::span<const AttendArgs> heads);
  // Scratch of each stage in bytes, an upper bound for every call of the given sizes.
  int64_t (*group_scratch)(const Exec&, int64_t tokens, int64_t dim, int64_t groups);
  int64_t (*encode_scratch)(const Exec&, int64_t tokens, int64_t dim, int64_t codes);
  int64_t (*select_scratch)(const Exec&, int64_t tokens, int64_t dim, int64_t groups, int64_t codes);
  int64_t (*attend_scratch)(const Exec&, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups);

  void (*describe)(const Exec&, const DescribeArgs&);
  void (*finish)(const Exec&, const FinishArgs&);
  void (*import_selection)(const Exec&, const ImportArgs&);
  void (*set_slot)(const Exec&, StateSlot* slot, StateSlot value);
  // `rows` pieces of `count` 32-bit words, each one `step` words after the last; a copy's from_step may be 0.
  void (*fill)(const Exec&, void* to, int64_t step, uint32_t value, int64_t count, int64_t rows);
  void (*copy)(const Exec&, const void* from, int64_t from_step, void* to, int64_t to_step, int64_t count, int64_t rows);
  // f32 <-> f32 or bf16.
  void (*convert)(const Exec&, const void* from, DType from_type, void* to, DType to_type, int64_t count);
  // to[h * to_step + rows[j]] = from[h * from_step + j] for j < count; null rows: to[h * to_step + j].
  void (*scatter)(const Exec&, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                  int64_t to_step, int64_t heads);

  // The rest is null on the CPU, where memory is the host's and time is the wall's.
  int (*enter)(const Exec&);    // makes the device current and returns the one that was; throws if it is lost
  void (*leave)(int previous);  // noexcept
  // Sets `flag` in *status unless the state begins with `header` [64 bytes, host] and its slot holds `expected`.
  void (*check_slot)(const Exec&, const void* state, const void* header, const StateSlot* slot, StateSlot expected,
                     uint32_t flag, uint32_t* status);
  void (*mark)(const Exec&, Moment);            // from here on, time belongs to `moment`
  bool (*times)(const Exec&, double* seconds);  // [kMoments] of the last call, after `read`; false: not recorded
  void (*read)(const Exec&, const void* from, void* host, int64_t bytes);  // waits for the stream
  void (*write)(const Exec&, const void* host, void* to, int64_t bytes);   // waits; never in a call

  // Stages that a backend may lack; plans refuse what needs them.
  void (*cocluster)(const Exec&, std::span<const CoclusterArgs> heads) = nullptr;
  int64_t (*cocluster_scratch)(const Exec&, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups,
                               int64_t codes) = nullptr;
  void (*compensate)(const Exec&, std::span<const CompensateArgs> heads) = nullptr;
  int64_t (*compensate_scratch)(const Exec&, int64_t tokens, int64_t dim, int64_t groups, int64_t codes) = nullptr;
};

const Backend* cpu_backend();
const Backend* cuda_backend();  // null in a build without CUDA

}  // namespace scope
