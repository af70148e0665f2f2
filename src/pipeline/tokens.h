// tokens: which tokens of each sample take part, are text or are padding, in the host's integers.
#pragma once

#include "pipeline/call.h"

namespace scope {

// One sample of a call.
struct Sample {
  int64_t index = 0;
  TokenMasks masks;
  Tokens tokens;
  bool prefix_q = false, prefix_k = false;  // the tokens that take part are the first ones
  bool prefix_valid = false;                // the valid keys are the first ones
  uint64_t hash = 0;                        // of the masks: which tokens clusters are of
  bool can_select() const { return tokens.queries > 0 && tokens.keys > 0; }
};

// Nothing is written.
Sample describe_sample(const Shape& shape, const CallArgs& args, int64_t index);

}  // namespace scope
