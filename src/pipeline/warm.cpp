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

void move_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot, Move direction) {
  const Plan& plan = frame.plan;
  const StateView view(plan, frame.args.state->memory(), s.index);
  const DType type = plan.settings.state_dtype;
  // What the sample has of them, and no more.
  const auto move = [&](void* base, int64_t rows, int64_t used_rows, float* here) {
    const int64_t per_head = rows * plan.shape.dim, used = used_rows * plan.shape.dim;
    const int64_t steps = used == per_head ? 1 : chunk.count, count = used == per_head ? chunk.count * per_head : used;
    for (int64_t i = 0; i < steps; ++i) {
      void* there = static_cast<std::byte*>(base) + (chunk.first + i) * per_head * dtype_bytes(type);
      if (direction == Move::load) {
        frame.backend.convert(frame.exec, there, type, here + i * per_head, DType::f32, count);
      } else {
        frame.backend.convert(frame.exec, here + i * per_head, DType::f32, there, type, count);
      }
    }
  };
  move(view.centroids, plan.groups, slot.groups, frame.at.centroids);
  if (plan.codes > 0) move(view.codebooks, plan.codes, slot.codes, frame.at.codebooks);
}

// The labels and codes of a state, by token.
struct StateLabels {
  PerHead<int32_t> labels, codes;
  StateLabels(const Frame& frame, const Sample& s, Chunk chunk) {
    const StateView view(frame.plan, frame.args.state->memory(), s.index);
    const int64_t nq = frame.plan.shape.q_tokens, nk = frame.plan.subspaces() * frame.plan.shape.k_tokens;
    labels = {view.labels + chunk.first * nq, nq};
    codes = {view.codes + chunk.first * nk, nk};
  }
};

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
  StateSlot* slot = StateView(plan, state->memory(), s.index).slot;
  if (start.warm && !frame.backend.can.host) {
    const StateHeader header = StateLayout(plan).header;
    frame.backend.check_slot(frame.exec, state->memory(), &header, slot, found, frame.status);
  }
  if (start.reused || keeps_slot(frame, s, start)) return start;
  frame.backend.set_slot(frame.exec, slot, {});
  if (!frame.backend.capturing(frame.exec)) state->set_slot(s.index, {});
  return start;
}

void close_state(const Frame& frame, const Sample& s, const Start& start) {
  State* state = frame.args.state;
  if (state == nullptr || start.reused || keeps_slot(frame, s, start)) return;
  frame.backend.set_slot(frame.exec, StateView(frame.plan, state->memory(), s.index).slot, start.slot);
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
  const StateLabels to(frame, s, chunk);
  const int64_t subspaces = frame.plan.subspaces(), nk = shape.k_tokens;
  frame.backend.copy(frame.exec, frame.at.labels, shape.q_tokens, to.labels.base, to.labels.step, shape.q_tokens,
                     chunk.count);
  if (subspaces > 0) frame.backend.fill(frame.exec, to.codes.base, 0, ~0u, chunk.count * to.codes.step, 1);
  for (int64_t m = 0; m < subspaces; ++m) {
    frame.backend.scatter(frame.exec, frame.at.codes + m * s.tokens.keys, subspaces * nk, frame.k_rows(s), s.tokens.keys,
                          to.codes.base + m * nk, to.codes.step, chunk.count);
  }
}

void reuse_clusters(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
  load_clusters(frame, s, chunk, slot);
  const Plan& plan = frame.plan;
  const Shape& shape = plan.shape;
  const StateLabels from(frame, s, chunk);
  frame.backend.reuse(frame.exec, {.tokens = s.tokens,
                                   .heads = chunk.count,
                                   .groups = slot.groups,
                                   .codes = slot.codes,
                                   .subspaces = plan.subspaces(),
                                   .q_rows = frame.q_rows(s),
                                   .k_rows = frame.k_rows(s),
                                   .state_labels = from.labels,
                                   .state_codes = from.codes,
                                   .labels = {frame.at.labels, shape.q_tokens},
                                   .sizes = {frame.at.sizes, plan.groups + 1},
                                   .order = {frame.at.order, shape.q_tokens},
                                   .offsets = {frame.at.offsets, plan.groups + 2},
                                   .code_labels = {frame.at.codes, plan.subspaces() * shape.k_tokens},
                                   .empty = {frame.at.empty, plan.subspaces()},
                                   .scratch = frame.at.scratch});
}

}  // namespace scope
