// state: the centroids that a layer and branch hands from one call to the next, in caller-provided memory.
#pragma once

#include <cstdint>

#include "pipeline/plan.h"
#include "stages/bookkeeping.h"

namespace scope {

// Layout, all little-endian, offsets from the start of the block:
//   0                 StateHeader (64 bytes)
//   slots             [batch] StateSlot: how many groups and codes are initialised, 0 before the first call
//   centroids         [batch, heads, groups, dim] in state_dtype
//   codebooks         [batch, heads, codes * dim] in state_dtype, subspace after subspace
//   labels, codes     [batch, heads, q_tokens] and [batch, heads, subspaces, k_tokens] i32 by token, -1: does not take part;
//                     only where reuse_interval > 1
// Every part starts at a multiple of 64. Saving a state is copying it.
struct StateHeader {
  uint64_t magic;
  uint32_t version, dtype;
  int64_t batch, heads, groups, codes, dim;
  uint64_t partition;  // hash of the channel sets, and of the token counts where there are labels
};
static_assert(sizeof(StateHeader) == 64);

struct StateLayout {
  explicit StateLayout(const Plan& plan);
  StateHeader header;
  int64_t slots, centroids, codebooks, labels, codes, bytes;
};

// Marks every slot as uninitialised; in device memory it waits for the copy.
void init_state(const Plan& plan, void* state);
// Throws unless the block was initialised for a plan of the same shape and method. Host memory.
void check_state(const Plan& plan, const void* state);

// Where the parts of one sample lie in a state.
struct StateView {
  StateView(const Plan& plan, void* state, int64_t sample);
  StateSlot* slot;
  void* centroids;  // [heads, groups, dim] in state_dtype
  void* codebooks;  // [heads, codes * dim]
  int32_t* labels;  // [heads, q_tokens]; null but where clusters are reused, like the next
  int32_t* codes;   // [heads, subspaces, k_tokens]
};

}  // namespace scope
