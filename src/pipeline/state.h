// state: the centroids that a layer and branch hands from one call to the next, in caller-provided memory.
#pragma once

#include <cstdint>

#include "pipeline/plan.h"

namespace scope {

// Layout, all little-endian, offsets from the start of the block:
//   0                 StateHeader (64 bytes)
//   slots             [batch] StateSlot: how many groups and codes are initialised, 0 before the first call
//   centroids         [batch, heads, groups, dim] in state_dtype
//   codebooks         [batch, heads, codes * dim] in state_dtype, subspace after subspace
// Every part starts at a multiple of 64. Saving a state is copying it.
struct StateHeader {
  uint64_t magic;
  uint32_t version, dtype;
  int64_t batch, heads, groups, codes, dim;
  uint64_t partition;  // hash of the channel sets
};
static_assert(sizeof(StateHeader) == 64);

struct StateSlot {
  int32_t groups, codes;
};

struct StateLayout {
  explicit StateLayout(const Plan& plan);
  StateHeader header;
  int64_t slots, centroids, codebooks, bytes;
};

// Marks every slot as uninitialised.
void init_state(const Plan& plan, void* state);
// Throws unless the block was initialised for a plan of the same shape and method.
void check_state(const Plan& plan, const void* state);

// Reads and writes one (sample, head) of a state.
class StateView {
 public:
  StateView(const Plan& plan, void* state, int64_t sample) : plan_(plan), layout_(plan), state_(state), sample_(sample) {}
  StateSlot slot() const;
  void set_slot(StateSlot slot);
  void load(int64_t head, const StateSlot& slot, float* centroids, float* codebooks) const;
  void store(int64_t head, const StateSlot& slot, const float* centroids, const float* codebooks);

 private:
  const Plan& plan_;
  StateLayout layout_;
  void* state_;
  int64_t sample_;
};

}  // namespace scope
