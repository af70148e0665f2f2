// The means of the keys that groups drop, one for each part of a group, from a sample of the keys.
#pragma once

#include "cpu/mean.h"
#include "cpu/proxy_rows.h"
#include "stages/tail.h"

namespace scope::cpu {

struct PartMeansBuffers {
  ProxyRows rows;
  MeanBuffers means;
  int32_t* sampled;  // [keys] tokens of the keys that are weighed
  float* row;        // [threads, padded dim]
  double* sum;       // [threads, dim]

  PartMeansBuffers(Arena& arena, const Exec& exec, int64_t rows, int64_t keys, int64_t dim);
};

// One head's values, once its shares are there.
void part_means(const Exec& exec, const TailArgs& args, int64_t head, const PartMeansBuffers& at);

}  // namespace scope::cpu
