// What 8-bit products in attend read: queries, keys and values in bytes, with the factors that turn them back.
#pragma once

#include "cuda/launch.h"
#include "stages/attend.h"

namespace scope::cuda {

// With bytes a_i of a query and b_i of a key, q.k = unit * sum(a_i b_i) + shift. The shift is the query's own, so softmax
// does not see it. A value is centre + unit * byte, in each channel.
struct EightBits {
  // Rows of 64 or 128 bytes, of queries and keys rotated, of values with zeros from dim on.
  HeadRows<const uint8_t> q;              // s8 [q_tokens], in the order of the groups
  HeadRows<const uint8_t> k, v;           // s8 and e4m3 [k_tokens + extra]; v only for qkv8
  PerHead<const float> q_unit, q_shift;   // [q_tokens], in the order of the groups
  PerHead<const float> v_unit, v_centre;  // [128]
  const uint32_t* beyond;                 // [heads] not 0: the head needs 16 bits
};

// A chunk's scratch.
class Quantiser {
 public:
  Quantiser(Arena& arena, Products products, int64_t heads, int64_t q_tokens, int64_t k_rows, int64_t dim);
  // extra_k, extra_v: [heads, args.extra.count, dim] in the element type.
  EightBits run(const Exec& exec, const AttendArgs& args, const uint16_t* extra_k, const uint16_t* extra_v) const;

 private:
  Products products_;
  int64_t pitch_;
  uint8_t *q_, *k_, *v_;
  float *q_unit_, *q_shift_;
  float *parts_, *channels_;
  uint32_t *most_, *beyond_;
};

}  // namespace scope::cuda
