// warm: how a sample's clustering starts, and what passes between a state and a call's workspace.
#pragma once

#include "pipeline/frame.h"

namespace scope {

struct Start {
  StateSlot slot;       // how many groups and codes the sample has, and of which tokens
  bool warm = false;    // from the state's centroids
  bool reused = false;  // the state's clusters stay as they are
};

// Decides, and marks the sample's state as unfilled until close_state: a call that fails midway makes the next one start
// cold instead of from a mixture.
Start open_state(const Frame& frame, const Sample& s);
void close_state(const Frame& frame, const Sample& s, const Start& start);

// Centroids and codebooks of a chunk.
void load_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
void save_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);
// What group and encode write, from the state.
void reuse_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot);

}  // namespace scope
