// state: the centroids that a layer and branch hands from one call to the next: memory of the caller, and what the host
// knows of it.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/plan.h"
#include "stages/bookkeeping.h"

namespace scope {

// Layout of the memory, all little-endian, offsets from its start:
//   0                 StateHeader (64 bytes)
//   slots             [batch] StateSlot: how many groups and codes are filled, 0 before the first call
//   centroids         [batch, heads, groups, dim] in state_dtype
//   codebooks         [batch, heads, codes * dim] in state_dtype, subspace after subspace
//   labels, codes     [batch, heads, q_tokens] and [batch, heads, subspaces, k_tokens] i32 by token, -1: does not take part;
//                     only where reuse_interval > 1
// Every part starts at a multiple of 64. A saved state is this, with the slots as the host knows them.
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

class State {
 public:
  // Over plan.state_bytes of the backend's memory at a multiple of 16, which it initialises (waiting for the copy on a
  // device). Neither the memory nor the context may go before it; the plan may.
  State(const Plan& plan, void* memory);

  void* memory() const { return memory_; }
  const StateSlot& slot(int64_t sample) const { return slots_[static_cast<size_t>(sample)]; }
  // Every sample was filled by a call.
  bool filled() const;
  // What a call does: the slot of its sample as the host knows it from now on.
  void set_slot(int64_t sample, const StateSlot& slot) { slots_[static_cast<size_t>(sample)] = slot; }
  // What a captured call would have filled: known once the host says that its graph has run.
  void set_pending(int64_t sample, const StateSlot& slot) { pending_[static_cast<size_t>(sample)] = slot; }
  // Filled: what the last captured first call fills, or a whole plan's groups and codes where there was none.
  void set_filled(bool filled);
  // Throws unless it was made for a plan of the same shape and method, and where the host can see the memory, unless that
  // holds what the host knows.
  void check(const Plan& plan) const;

  int64_t bytes() const { return layout_.bytes; }
  // Waits for the stream.
  void save(void* stream, std::byte* to) const;
  // Throws, and leaves the state alone, unless the bytes are a saved state of the same shape and method, with centroids that
  // rows of its plan's type can have.
  void load(void* stream, std::span<const std::byte> from);

 private:
  const Backend* backend_;
  Exec exec_;
  StateLayout layout_;
  int64_t q_tokens_, k_tokens_, subspaces_;
  float most_;  // magnitude of a centroid
  void* memory_;
  std::vector<StateSlot> slots_, pending_;  // [batch]
};

// Where the parts of one sample lie in a state.
struct StateView {
  StateView(const Plan& plan, void* memory, int64_t sample);
  StateSlot* slot;
  void* centroids;  // [heads, groups, dim] in state_dtype
  void* codebooks;  // [heads, codes * dim]
  int32_t* labels;  // [heads, q_tokens]; null but where clusters are reused, like the next
  int32_t* codes;   // [heads, subspaces, k_tokens]
};

}  // namespace scope
