// frame: what every part of one call works with.
#pragma once

#include "pipeline/call.h"
#include "pipeline/tokens.h"

namespace scope {

struct Frame {
  const Plan& plan;
  const CallArgs& args;
  const Backend& backend;
  Exec exec;
  Workspace at;
  uint32_t* status;   // of the report, like the next
  HeadStats* report;  // [batch, heads]
  float scale;

  // From here on, time belongs to `moment`.
  void mark(Moment moment) const {
    if (exec.call != nullptr) exec.clock->mark(exec, moment);
  }
  // The CPU walks the lists; a device need not read one that says 0, 1, 2, ….
  const int32_t* q_rows(const Sample& s) const { return !backend.can.host && s.prefix_q ? nullptr : at.q_rows; }
  const int32_t* k_rows(const Sample& s) const { return !backend.can.host && s.prefix_k ? nullptr : at.k_rows; }
};

// Heads [first, first + count) of one sample, which go through the stages together.
struct Chunk {
  int64_t first, count;
};

}  // namespace scope
