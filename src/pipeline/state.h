// state: the centroids that a layer and branch hands from one call to the next: memory of the caller, and what the host
// knows of it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "pipeline/plan.h"
#include "stages/bookkeeping.h"

namespace scope {

// Layout of the memory, all little-endian:
//   StateHeader (64 bytes)
//   slots [batch] StateSlot: how many groups and codes are filled, 0 before the first call
//   arrays [batch, heads, rows, columns], one after the other: the table in state.cpp
// Every part starts at a multiple of 64. A saved state is this, with the slots as the host knows them.
struct StateHeader {
  uint64_t magic;
  uint32_t version, dtype;
  int64_t batch, heads, groups, codes, dim;
  uint64_t partition;  // hash of the channel sets, and of the columns of arrays that are `hashed`
};
static_assert(sizeof(StateHeader) == 64);

// An array that calls hand on, of each head: means of rows in state_dtype, or labels in i32, which are indices or -1.
// Layout, load's checks and the moves between state and workspace follow from these fields.
struct StateArray {
  const char* name;
  int64_t rows, columns;           // no columns: the plan keeps none of it
  int32_t StateSlot::*clusters;    // of a sample: as many rows of means are filled, and labels are below it
  float* Workspace::*here;         // where a call has the means; null: labels, which `warm` moves by token
  bool hashed = false;             // the header does not say its columns
  int64_t at = 0, head_bytes = 0;  // its first byte in the state, and from one head to the next

  bool means() const { return here != nullptr; }
  int64_t size() const { return rows * columns; }
  int64_t filled(const StateSlot& slot) const { return means() ? slot.*clusters * columns : size(); }
};

struct StateLayout {
  enum Row { centroids, codebooks, labels, codes, count };

  explicit StateLayout(const Plan& plan);
  StateSlot* slot(void* memory, int64_t sample) const;
  void* head(const StateArray& array, void* memory, int64_t sample, int64_t head) const;
  const StateArray& operator[](Row row) const { return arrays[row]; }

  std::array<StateArray, count> arrays;
  StateHeader header;
  int64_t slots, bytes;
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
  // Of one head that is loaded: means are no larger than rows may be, since others would draw tokens to themselves, or none;
  // labels are indices from there on.
  void check_values(const StateArray& array, int64_t sample, int64_t head, const StateSlot& slot,
                    const std::byte* values) const;

  const Backend* backend_;
  Exec exec_;
  StateLayout layout_;
  float most_;  // magnitude of a centroid
  void* memory_;
  std::vector<StateSlot> slots_, pending_;  // [batch]
};

}  // namespace scope
