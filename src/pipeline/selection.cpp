// Copies selections from the workspace into the public format.
#include "pipeline/selection.h"

namespace scope {

namespace {

// Rows of the selection's arrays for a chunk of heads of one sample.
class Rows {
 public:
  Rows(const Frame& frame, const Sample& s, Chunk chunk)
      : frame_(frame), head_(s.index * frame.plan.shape.heads + chunk.first), n_(chunk.count) {}

  // The workspace's heads, `room` words each, into the selection's, `wide` words each.
  void copy(const void* from, int64_t room, void* to, int64_t wide) const {
    if (to != nullptr) frame_.backend.copy(frame_.exec, from, room, at(to, wide, 0), wide, wide, n_);
  }
  // Words [first, first + count) of each of the selection's heads.
  void fill(void* to, int64_t wide, int64_t first, int64_t count, int32_t value) const {
    if (to == nullptr || count == 0) return;
    frame_.backend.fill(frame_.exec, at(to, wide, first), wide, static_cast<uint32_t>(value), count, n_);
  }
  uint32_t* at(void* to, int64_t wide, int64_t first) const { return static_cast<uint32_t*>(to) + head_ * wide + first; }

 private:
  const Frame& frame_;
  int64_t head_, n_;
};

// Calls each(m, depth, codebooks, codes) for the arrays of every subspace; null where they are not wanted.
template <class Each>
void each_subspace(const Frame& frame, const Each& each) {
  const SelectionOut& to = frame.args.selection;
  const Plan& plan = frame.plan;
  const int64_t heads = plan.shape.batch * plan.shape.heads;
  int64_t base = 0;
  for (int64_t m = 0; m < plan.subspaces(); ++m) {
    const auto depth = static_cast<int64_t>(plan.partition[static_cast<size_t>(m)].size());
    each(m, depth, to.codebooks == nullptr ? nullptr : to.codebooks + base,
         to.codes == nullptr ? nullptr : to.codes + m * heads * plan.shape.k_tokens);
    base += heads * plan.codes * depth;
  }
}

}  // namespace

void write_keep(const Frame& frame, const Sample& s) {
  const int64_t words = mask_words(frame.plan.shape.k_tokens);
  uint32_t* to = frame.args.selection.keep;
  if (to != nullptr) frame.backend.copy(frame.exec, frame.at.keep, 0, to + s.index * words, 0, words, 1);
}

void write_selection(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
  const SelectionOut& to = frame.args.selection;
  const Plan& plan = frame.plan;
  const Workspace& at = frame.at;
  const Shape& shape = plan.shape;
  const int64_t words = mask_words(shape.k_tokens), groups = plan.selection_groups, row_groups = plan.groups + 1;
  const Rows rows(frame, s, chunk);
  rows.copy(at.labels, shape.q_tokens, to.labels, shape.q_tokens);
  rows.copy(at.sizes, row_groups, to.sizes, groups);
  rows.copy(at.counts, row_groups, to.counts, groups);
  rows.copy(at.mask, row_groups * words, to.mask, groups * words);
  const int64_t width = plan.groups * shape.dim, used = slot.groups * shape.dim;
  rows.copy(at.centroids, width, to.centroids, width);
  rows.fill(to.centroids, width, used, width - used, 0);
  int64_t from = 0;
  each_subspace(frame, [&](int64_t m, int64_t depth, float* codebooks, int32_t* codes) {
    const int64_t wide = plan.codes * depth, filled = slot.codes * depth;
    if (codebooks != nullptr) {
      rows.fill(codebooks, wide, filled, wide - filled, 0);
      frame.backend.copy(frame.exec, at.codebooks + from, plan.codes * shape.dim, rows.at(codebooks, wide, 0), wide, filled,
                         chunk.count);
    }
    from += filled;
    if (codes == nullptr) return;
    rows.fill(codes, shape.k_tokens, 0, shape.k_tokens, -1);
    frame.backend.scatter(frame.exec, at.codes + m * s.tokens.keys, plan.subspaces() * shape.k_tokens, frame.k_rows(s),
                          s.tokens.keys, reinterpret_cast<int32_t*>(rows.at(codes, shape.k_tokens, 0)), shape.k_tokens,
                          chunk.count);
  });
}

void write_dense(const Frame& frame, const Sample& s, Chunk chunk, bool scheduled) {
  const SelectionOut& to = frame.args.selection;
  const Plan& plan = frame.plan;
  const Shape& shape = plan.shape;
  const int64_t groups = plan.selection_groups, words = mask_words(shape.k_tokens), last = groups - 1;
  const Rows rows(frame, s, chunk);
  const auto clear = [&](void* array, int64_t wide, int32_t value) { rows.fill(array, wide, 0, wide, value); };
  clear(to.labels, shape.q_tokens, -1);
  clear(to.sizes, groups, 0);
  clear(to.counts, groups, 0);
  clear(to.mask, groups * words, 0);
  clear(to.centroids, plan.groups * shape.dim, 0);
  each_subspace(frame, [&](int64_t, int64_t depth, float* codebooks, int32_t* codes) {
    clear(codebooks, plan.codes * depth, 0);
    clear(codes, shape.k_tokens, -1);
  });
  if (scheduled || groups == 0) return;
  rows.fill(to.sizes, groups, last, 1, static_cast<int32_t>(s.tokens.valid_q));
  rows.fill(to.counts, groups, last, 1, static_cast<int32_t>(s.tokens.keys));
  if (to.mask != nullptr) {
    frame.backend.copy(frame.exec, frame.at.valid, 0, rows.at(to.mask, groups * words, last * words), groups * words, words,
                       chunk.count);
  }
  if (to.labels == nullptr) return;
  // The valid queries come first in the sample's list, wherever they lie.
  frame.backend.fill(frame.exec, frame.at.order, 0, static_cast<uint32_t>(last), s.tokens.valid_q, 1);
  frame.backend.scatter(frame.exec, frame.at.order, 0, frame.at.q_rows, s.tokens.valid_q,
                        reinterpret_cast<int32_t*>(rows.at(to.labels, shape.q_tokens, 0)), shape.q_tokens, chunk.count);
}

}  // namespace scope
