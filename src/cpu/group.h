// What group and cocluster on the CPU share.
#pragma once

#include "stages/group.h"

namespace scope::cpu {

// `order` holds positions in `rows` by group: turns them into tokens, and writes the labels.
void label_tokens(const GroupArgs& args, int64_t head);

}  // namespace scope::cpu
