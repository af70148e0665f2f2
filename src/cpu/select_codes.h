// The half of select on the CPU that keeps whole codes, for the other, which keeps keys; and what both do alike.
#pragma once

#include <algorithm>

#include "core/numeric.h"
#include "stages/choices.h"

namespace scope::cpu {

void weigh_codes(const Exec& exec, const WeighArgs& args, int64_t head);
void keep_codes(const Exec& exec, const KeepArgs& args, int64_t head);
int64_t code_weights_bytes(int64_t count, int64_t groups, int64_t codes);  // of one head
int64_t weigh_codes_scratch(const Exec& exec, int64_t groups, int64_t codes);

// Where one head's weights lie, `bytes` of them.
inline Arena weights_of(const WeighArgs& args, int64_t head, int64_t bytes) {
  const int64_t begin = head * round_up(bytes, Arena::kAlignment);
  return {static_cast<std::byte*>(args.weights.data) + begin, args.weights.bytes - begin};
}

}  // namespace scope::cpu
