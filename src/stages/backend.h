// A backend is a struct of function pointers, one per stage; a missing backend is a null pointer.
#pragma once

#include <span>

#include "stages/attend.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"

namespace scope {

// Every stage takes a chunk of heads (a chunk of one on the CPU, as many as the workspace allows on a device) and
// must give each head the same bits whatever the chunk.
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
  int64_t (*select_scratch)(const Exec&, int64_t tokens, int64_t dim, int64_t groups);
  int64_t (*attend_scratch)(const Exec&, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups);
};

const Backend* cpu_backend();

}  // namespace scope
