// Refuses a call's arguments by name, with what was got and what is expected.
#include "pipeline/check_args.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/numeric.h"

namespace scope {

namespace {

template <class View>
void check_tensor(const char* name, const View& x, const Shape& shape, int64_t tokens) {
  require(x.dtype == shape.dtype, Status::dtype, "{}: got {}, the plan has {}", name, dtype_name(x.dtype),
          dtype_name(shape.dtype));
  require(x.batch == shape.batch && x.heads == shape.heads && x.tokens == tokens && x.dim == shape.dim, Status::shape,
          "{}: got [batch {}, heads {}, tokens {}, dim {}], the plan has [{}, {}, {}, {}]", name, x.batch, x.heads, x.tokens,
          x.dim, shape.batch, shape.heads, tokens, shape.dim);
  if (tokens == 0) return;
  require(x.data != nullptr, Status::invalid_argument, "{}: got null, expected a pointer", name);
  require(reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(dtype_bytes(x.dtype)) == 0, Status::alignment,
          "{}: address {} is not a multiple of its element's {} bytes", name, x.data, dtype_bytes(x.dtype));
  const auto extent = [&](const char* what, int64_t stride, int64_t n) {
    require(stride >= 0, Status::shape, "{}: got {} {}, expected >= 0", name, what, stride);
    checked_mul(checked_mul(stride, n, what), 4, what);
  };
  extent("batch_stride", x.batch_stride, x.batch);
  extent("head_stride", x.head_stride, x.heads);
  extent("token_stride", x.token_stride, x.tokens);
}

// Kernels move whole pieces of a row at a time, and never copy a tensor to make that possible.
template <class View>
void check_rows(const char* name, const View& x, int64_t bytes) {
  if (x.tokens == 0) return;
  const int64_t elements = bytes / dtype_bytes(x.dtype);
  require(reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(bytes) == 0, Status::alignment,
          "{}: address {} is not a multiple of {}", name, x.data, bytes);
  require(x.batch_stride % elements == 0 && x.head_stride % elements == 0 && x.token_stride % elements == 0,
          Status::alignment, "{}: strides [{}, {}, {}, 1] are not multiples of {} elements", name, x.batch_stride,
          x.head_stride, x.token_stride, elements);
}

void check_aligned(const char* name, const void* pointer, uintptr_t bytes) {
  require(reinterpret_cast<uintptr_t>(pointer) % bytes == 0, Status::alignment, "{}: address {} is not a multiple of {}",
          name, pointer, bytes);
}

// An array of a call, besides its tensors.
struct Part {
  const char* name;
  const void* pointer;
  int64_t elements;
  int64_t element_bytes = 4;
};

std::array<Part, 15> parts_of(const Plan& plan, const CallArgs& args) {
  const Shape& shape = plan.shape;
  const SelectionOut& s = args.selection;
  const int64_t heads = shape.batch * shape.heads, rows = heads * plan.selection_groups;
  const int64_t q_words = shape.batch * mask_words(shape.q_tokens), k_words = shape.batch * mask_words(shape.k_tokens);
  return {{{"lse", args.lse, heads * shape.q_tokens},
           {"q_lengths", args.q_lengths, shape.batch, 8},
           {"k_lengths", args.k_lengths, shape.batch, 8},
           {"valid_queries", args.valid_queries, q_words},
           {"valid_keys", args.valid_keys, k_words},
           {"keep", args.keep, k_words},
           {"dense_queries", args.dense_queries, q_words},
           {"selection.labels", s.labels, heads * shape.q_tokens},
           {"selection.sizes", s.sizes, rows},
           {"selection.counts", s.counts, rows},
           {"selection.mask", s.mask, rows * mask_words(shape.k_tokens)},
           {"selection.keep", s.keep, k_words},
           {"selection.centroids", s.centroids, heads * plan.groups * shape.dim},
           {"selection.codebooks", s.codebooks, heads * plan.codes * shape.dim},
           {"selection.codes", s.codes, heads * plan.subspaces() * shape.k_tokens}}};
}

// What `out` must not touch: bytes that a call reads or writes besides it.
void check_apart(const MutableTensorView& out, const char* name, const void* other, int64_t bytes) {
  require(!overlaps(out.data, extent_bytes(out), other, bytes), Status::invalid_argument, "out: it overlaps {}", name);
}

// Elements that a tensor spans along the axes whose stride is below `period`, if all others step by whole periods; else 0.
template <class View>
int64_t span_within(const View& x, int64_t period) {
  int64_t span = x.dim;
  for (const auto& [stride, n] :
       {std::pair(x.batch_stride, x.batch), {x.head_stride, x.heads}, {x.token_stride, x.tokens}}) {
    if (n <= 1) continue;
    if (stride < period) {
      span += stride * (n - 1);
    } else if (stride % period != 0) {
      return 0;
    }
  }
  return span;
}

// Tensors cut from one buffer, such as fused projections, share a range of addresses and no element.
bool interleaved(const MutableTensorView& a, const TensorView& b) {
  const int64_t bytes = dtype_bytes(a.dtype);
  const auto apart = static_cast<const std::byte*>(b.data) - static_cast<const std::byte*>(a.data);
  for (const int64_t period : {a.batch_stride, a.head_stride, a.token_stride}) {
    if (period <= 0 || apart % bytes != 0) continue;
    const int64_t of_a = span_within(a, period), of_b = span_within(b, period);
    const int64_t offset = (apart / bytes % period + period) % period;
    if (of_a > 0 && of_b > 0 && offset >= of_a && offset + of_b <= period) return true;
  }
  return false;
}

void check_apart(const MutableTensorView& out, const char* name, const TensorView& other) {
  if (out.data != nullptr && other.data != nullptr && interleaved(out, other)) return;
  check_apart(out, name, other.data, extent_bytes(other));
}

// Two different outputs must not share an element: with strides in ascending order, each step clears what lies below.
void check_no_overlap(const MutableTensorView& x) {
  if (x.tokens == 0) return;
  struct Axis {
    int64_t stride, n;
  } axes[] = {{x.token_stride, x.tokens}, {x.head_stride, x.heads}, {x.batch_stride, x.batch}};
  std::sort(std::begin(axes), std::end(axes), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  int64_t reach = x.dim;
  for (const Axis& axis : axes) {
    if (axis.n <= 1) continue;
    require(axis.stride >= reach, Status::shape, "out: strides [{}, {}, {}, 1] make its elements overlap", x.batch_stride,
            x.head_stride, x.token_stride);
    reach += axis.stride * (axis.n - 1);
  }
}

void check_lengths(const char* name, const int64_t* lengths, int64_t batch, int64_t tokens) {
  for (int64_t b = 0; lengths != nullptr && b < batch; ++b) {
    require(lengths[b] >= 0 && lengths[b] <= tokens, Status::shape, "{}[{}]: got {}, expected 0..{}", name, b, lengths[b],
            tokens);
  }
}

}  // namespace

void check_args(const Plan& plan, const CallArgs& args, bool needs_v) {
  const Shape& shape = plan.shape;
  check_tensor("q", args.q, shape, shape.q_tokens);
  check_tensor("k", args.k, shape, shape.k_tokens);
  if (needs_v) {
    check_tensor("v", args.v, shape, shape.k_tokens);
    check_tensor("out", args.out, shape, shape.q_tokens);
    check_no_overlap(args.out);
    const bool in_place = args.out.data == args.q.data && args.out.batch_stride == args.q.batch_stride &&
                          args.out.head_stride == args.q.head_stride && args.out.token_stride == args.q.token_stride;
    if (!in_place) check_apart(args.out, "q, and is not q itself with q's strides", args.q);
    check_apart(args.out, "k", args.k);
    check_apart(args.out, "v", args.v);
    check_apart(args.out, "the workspace", args.workspace, args.workspace_bytes);
    for (const Part& part : parts_of(plan, args)) {
      check_apart(args.out, part.name, part.pointer, part.elements * part.element_bytes);
    }
    check_apart(args.out, "the report", args.report, plan.report_bytes);
    if (args.state != nullptr) check_apart(args.out, "the state", args.state->memory(), args.state->bytes());
  }
  require(std::isfinite(args.scale) && args.scale >= 0, Status::invalid_argument,
          "scale: got {}, expected a number above 0, or 0 for 1 / sqrt(dim)", args.scale);
  check_aligned("report", args.report, 16);
  for (const Part& part : parts_of(plan, args)) {
    check_aligned(part.name, part.pointer, static_cast<uintptr_t>(part.element_bytes));
  }
  const Capabilities& can = plan.backend->can;
  if (can.row_bytes > 0) {
    check_rows("q", args.q, can.row_bytes);
    check_rows("k", args.k, can.row_bytes);
    if (needs_v) {
      check_rows("v", args.v, can.row_bytes);
      check_rows("out", args.out, can.row_bytes);
    }
  }
  if (!can.host) {
    require(args.head_stats == nullptr, Status::invalid_argument,
            "head_stats: a call on a device cannot wait for them; read them after it");
  }
  check_lengths("q_lengths", args.q_lengths, shape.batch, shape.q_tokens);
  check_lengths("k_lengths", args.k_lengths, shape.batch, shape.k_tokens);
  require(args.dense_queries == nullptr || shape.dense_queries, Status::invalid_argument,
          "dense_queries: the plan was made without them (set dense_queries in its shape)");
}

void check_finite(const Plan& plan, const Exec& exec, const CallArgs& args) {
  if (plan.backend->check_finite == nullptr) return;
  plan.backend->check_finite(exec, "q", args.q, args.q_lengths, args.valid_queries);
  plan.backend->check_finite(exec, "k", args.k, args.k_lengths, args.valid_keys);
}

void check_selection(const Plan& plan, const CallArgs& args, const SelectedArgs& selected) {
  require(!plan.settings.dense, Status::invalid_argument, "plan: method dense has no selection");
  require(selected.labels != nullptr && selected.mask != nullptr, Status::invalid_argument,
          "selection: labels and mask are needed, got null");
  check_aligned("selection.labels", selected.labels, 4);
  check_aligned("selection.mask", selected.mask, 4);
  check_aligned("selection.keep", selected.keep, 4);
  if (!plan.backend->can.host) return;  // what is in device memory cannot be refused: it is dropped, see ImportArgs
  const Shape& shape = plan.shape;
  const int64_t heads = shape.batch * shape.heads, words = mask_words(shape.k_tokens);
  for (int64_t i = 0; i < heads * shape.q_tokens; ++i) {
    require(selected.labels[i] >= -1 && selected.labels[i] < plan.selection_groups, Status::invalid_argument,
            "selection.labels[{}]: got {}, expected -1..{}", i, selected.labels[i], plan.selection_groups - 1);
  }
  // Bits of padding would read it, or past k and v.
  const auto check_row = [&](const char* name, const uint32_t* row, int64_t b) {
    const int64_t length = args.k_lengths == nullptr ? shape.k_tokens : args.k_lengths[b];
    for (int64_t w = 0; w < words; ++w) {
      const uint32_t inside = length >= 32 * (w + 1) ? ~0u : length <= 32 * w ? 0u : ~(~0u << (length % 32));
      const uint32_t valid = args.valid_keys == nullptr ? inside : inside & args.valid_keys[b * words + w];
      require((row[w] & ~valid) == 0, Status::invalid_argument,
              "selection.{}: sample {} has bits of keys that are not valid", name, b);
    }
  };
  for (int64_t r = 0; r < heads * plan.selection_groups; ++r) {
    check_row("mask", selected.mask + r * words, r / (shape.heads * plan.selection_groups));
  }
  for (int64_t b = 0; selected.keep != nullptr && b < shape.batch; ++b) check_row("keep", selected.keep + b * words, b);
}

}  // namespace scope
