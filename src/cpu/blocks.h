// Contiguous runs of tokens, for group and encode: their means, and how alike their rows are.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"

namespace scope::cpu {

struct BlocksArgs {
  RowsView x;                     // [tokens, dim]
  const int32_t* rows = nullptr;  // tokens, in order
  int64_t blocks = 0;
  const int64_t* offsets = nullptr;  // [blocks + 1] positions in `rows`; no block is empty
  float* row_buffer = nullptr;       // [threads, round_up(dim, kLanes)]
};

// out [blocks, dim]
void block_means(const Exec& exec, const BlocksArgs& args, float* out);
// out [blocks]: see GroupArgs::similarity, for blocks of `block`; `centre` [dim] is subtracted from every row, null:
// nothing.
void block_similarity(const Exec& exec, const BlocksArgs& args, int64_t block, const float* centre, float* out);

}  // namespace scope::cpu
