// One bound for all heads of a sample: where its search keeps what it knows from one round to the next.
#pragma once

#include "core/tensor.h"

namespace scope::cuda {

// Each round halves the interval twice; the first looks at 0 alone.
inline constexpr int kKeyRounds = 21, kCodeRounds = 31;

// An interval that holds the bound, the pairs of queries and keys that all heads keep at its ends, and their queries.
struct Bracket {
  double low, high;
  int64_t at_low, at_high, queries;
};

struct SampleSpace {
  Bracket* brackets;  // [kCodeRounds] by round
  int64_t* found;     // [2, heads, 4] by the round's parity: pairs kept at three points of the interval, and queries
  double* bound;      // [1] out

  static SampleSpace of(Arena arena, int64_t heads, double* bound, int64_t* bytes = nullptr) {
    SampleSpace s{};
    s.brackets = arena.take<Bracket>(kCodeRounds);
    s.found = arena.take<int64_t>(2 * heads * 4);
    s.bound = bound;
    if (bytes != nullptr) *bytes = arena.used();
    return s;
  }
};

}  // namespace scope::cuda
