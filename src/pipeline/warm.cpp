// Moves centroids, codebooks, labels and codes between a state and the workspace.
#include "pipeline/warm.h"

namespace scope {

namespace {

bool same_counts(const StateSlot& a, const StateSlot& b) { return a.groups == b.groups && a.codes == b.codes; }

// On a device a warm call leaves the slot alone: were it not the right one, the next call must find that out too. Clusters
// of other tokens change it.
bool keeps_slot(const Frame& frame, const Sample& s, const Start& start) {
  return !frame.backend.can.host && start.warm && frame.args.state->slot(s.index) == start.slot;
}

enum class Move { load, save };

// What the sample has of each array of means, and no more.
void move_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot, Move direction) {
  const StateLayout layout(frame.plan);
  const DType type = frame.plan.settings.state_dtype;
  for (const StateArray& array : layout.arrays) {
    if (!array.means()) continue;
    const int64_t per_head = array.size(), used = array.filled(slot);
    const int64_t steps = used == per_head ? 1 : chunk.count, count = used == per_head ? chunk.count * per_head : used;
    for (int64_t i = 0; i < steps; ++i) {
      float* here = frame.at.*array.here + i * per_head;
      void* there = layout.head(array, frame.args.state->memory(), s.index, chunk.first + i);
      if (direction == Move::load) {
        frame.backend.convert(frame.exec, there, type, here, DType::f32, count);
      } else {
        frame.backend.convert(frame.exec, here, DType::f32, there, type, count);
      }
    }
  }
}

// The labels or codes of a state, by token.
PerHead<int32_t> kept_labels(const Frame& frame, const Sample& s, Chunk chunk, StateLayout::Row row) {
  const StateLayout layout(frame.plan);
  void* first = layout.head(layout[row], frame.args.state->memory(), s.index, chunk.first);
  return {static_cast<int32_t*>(first), layout[row].size()};
}

}  // namespace

Start open_state(const Frame& frame, const Sample& s) {
  const Plan& plan = frame.plan;
  const Settings& settings = plan.settings;
  Start start{.slot = {static_cast<int32_t>(effective_groups(settings, s.tokens.queries)),
                       static_cast<int32_t>(plan.codes == 0 ? 0 : effective_codes(settings, s.tokens.keys)),
                       plan.reuses() ? s.hash : 0}};
  State* state = frame.args.state;
  if (state == nullptr) return start;
  const StateSlot& found = state->slot(s.index);
  const bool filled = same_counts(found, start.slot);
  start.reused = plan.reuses() && reuses_clusters(settings, frame.args.place) && found == start.slot;
  start.warm = start.reused || (filled && row(settings.group).warm);
  const StateLayout layout(plan);
  StateSlot* slot = layout.slot(state->memory(), s.index);
  if (start.warm && !frame.backend.can.host) {
    frame.backend.check_slot(frame.exec, state->memory(), &layout.header, slot, found, frame.status);
  }
  if (start.reused || keeps_slot(frame, s, start)) return start;
  frame.backend.set_slot(frame.exec, slot, {});
  if (!frame.backend.capturing(frame.exec)) state->set_slot(s.index, {});
  return start;
}

void close_state(const Frame& frame, const Sample& s, const Start& start) {
  State* state = frame.args.state;
  if (state == nullptr || start.reused || keeps_slot(frame, s, start)) return;
  frame.backend.set_slot(frame.exec, StateLayout(frame.plan).slot(state->memory(), s.index), start.slot);
  if (frame.backend.capturing(frame.exec)) {
    state->set_pending(s.index, start.slot);
  } else {
    state->set_slot(s.index, start.slot);
  }
}

void load_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
  move_clusters(frame, s, chunk, slot, Move::load);
}

void save_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
  move_clusters(frame, s, chunk, slot, Move::save);
  if (!frame.plan.reuses()) return;
  const Shape& shape = frame.plan.shape;
  const PerHead<int32_t> labels = kept_labels(frame, s, chunk, StateLayout::labels);
  const PerHead<int32_t> codes = kept_labels(frame, s, chunk, StateLayout::codes);
  const int64_t subspaces = frame.plan.subspaces(), nk = shape.k_tokens;
  frame.backend.copy(frame.exec, frame.at.labels, shape.q_tokens, labels.base, labels.step, shape.q_tokens, chunk.count);
  if (subspaces > 0) frame.backend.fill(frame.exec, codes.base, 0, ~0u, chunk.count * codes.step, 1);
  for (int64_t m = 0; m < subspaces; ++m) {
    frame.backend.scatter(frame.exec, frame.at.codes + m * s.tokens.keys, subspaces * nk, frame.k_rows(s), s.tokens.keys,
                          codes.base + m * nk, codes.step, chunk.count);
  }
}

void reuse_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
  load_clusters(frame, s, chunk, slot);
  const Plan& plan = frame.plan;
  const Shape& shape = plan.shape;
  frame.backend.reuse(frame.exec, {.tokens = s.tokens,
                                   .heads = chunk.count,
                                   .groups = slot.groups,
                                   .codes = slot.codes,
                                   .subspaces = plan.subspaces(),
                                   .q_rows = frame.q_rows(s),
                                   .k_rows = frame.k_rows(s),
                                   .state_labels = kept_labels(frame, s, chunk, StateLayout::labels),
                                   .state_codes = kept_labels(frame, s, chunk, StateLayout::codes),
                                   .labels = {frame.at.labels, shape.q_tokens},
                                   .sizes = {frame.at.sizes, plan.groups + 1},
                                   .order = {frame.at.order, shape.q_tokens},
                                   .offsets = {frame.at.offsets, plan.groups + 2},
                                   .code_labels = {frame.at.codes, plan.subspaces() * shape.k_tokens},
                                   .empty = {frame.at.empty, plan.subspaces()},
                                   .scratch = frame.at.scratch});
}

}  // namespace scope
