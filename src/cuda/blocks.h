// group and encode on CUDA in runs of consecutive tokens: their means, and how alike their rows are.
#pragma once

#include "stages/encode.h"
#include "stages/group.h"

namespace scope::cuda {

void group_blocks(const Exec& exec, const GroupArgs& args);
void encode_blocks(const Exec& exec, const EncodeArgs& args);
// Bytes for one head; group_blocks needs none.
int64_t encode_blocks_scratch(int64_t dim, int64_t codes);

}  // namespace scope::cuda
