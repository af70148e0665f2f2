// How much memory a model takes, known before any of it is asked for.
#pragma once

#include "video/folder.h"
#include "video/sampler.h"

namespace scope::video {

// Bytes of an engine like this for the weights and for a pass at a grid, without prompts and self-attention. config: the
// text of a config.json.
int64_t model_bytes(std::string_view config, const Engine& like, const std::array<int64_t, 3>& grid, bool morton);

// Bytes of an engine like this for a request that is run with both experts of a folder in memory. A pass is counted for
// each, though one runs at a time: that leaves room for prompts, latents and what linear layers round.
int64_t two_experts_bytes(const Folder& folder, const Request& request, const Engine& like);

}  // namespace scope::video
