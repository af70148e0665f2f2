// What the two halves of select on the CPU share: by keys (select.cpp) and by codes (select_codes.cpp).
#pragma once

#include <algorithm>
#include <bit>

#include "stages/select.h"

namespace scope::cpu {

// Writes 32 bits of positions [first, first + 32) of `count` at the tokens they stand for.
inline void place_word(uint32_t* mask, const int32_t* rows, int64_t count, int64_t first, uint32_t word) {
  const int64_t last = std::min(first + 31, count - 1);
  if (rows[first] % 32 == 0 && rows[last] - rows[first] == last - first) {
    mask[rows[first] / 32] |= word;
    return;
  }
  for (; word != 0; word &= word - 1) set_mask_bit(mask, rows[first + std::countr_zero(word)]);
}

void select_codes(const Exec& exec, const SelectArgs& args);
int64_t select_codes_scratch(const Exec& exec, int64_t groups, int64_t codes);

}  // namespace scope::cpu
