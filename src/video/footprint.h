// How much memory a model takes, known before any of it is asked for.
#pragma once

#include "video/model.h"

namespace scope::video {

// Bytes of an engine like this for the weights and for a pass at a grid, without prompts and self-attention. config: the
// text of a config.json.
int64_t model_bytes(std::string_view config, const Engine& like, const std::array<int64_t, 3>& grid, bool morton);

}  // namespace scope::video
