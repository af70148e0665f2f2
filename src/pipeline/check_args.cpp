// Refuses a call's arguments by name, with what was got and what is expected.
#include "pipeline/check_args.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope {

namespace {

constexpr float kMostMagnitude = 1e18f;  // its square, summed over 256 channels, is still a float

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

// Kernels move 16 bytes at a time, and never copy a tensor to make that possible.
template <class View>
void check_device_tensor(const char* name, const View& x) {
  if (x.tokens == 0) return;
  require(reinterpret_cast<uintptr_t>(x.data) % 16 == 0, Status::alignment, "{}: address {} is not a multiple of 16", name,
          x.data);
  require(x.batch_stride % 8 == 0 && x.head_stride % 8 == 0 && x.token_stride % 8 == 0, Status::alignment,
          "{}: strides [{}, {}, {}, 1] are not multiples of 8 elements", name, x.batch_stride, x.head_stride,
          x.token_stride);
}

void check_device_words(const char* name, const void* pointer) {
  require(reinterpret_cast<uintptr_t>(pointer) % 4 == 0, Status::alignment, "{}: address {} is not a multiple of 4", name,
          pointer);
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
    require(args.out.data != args.q.data || args.out.data == nullptr ||
                (args.out.batch_stride == args.q.batch_stride && args.out.head_stride == args.q.head_stride &&
                 args.out.token_stride == args.q.token_stride),
            Status::invalid_argument, "out: it is q's memory with other strides");
    require(args.out.data == nullptr || (args.out.data != args.k.data && args.out.data != args.v.data),
            Status::invalid_argument, "out: it is the same memory as {}", args.out.data == args.k.data ? "k" : "v");
  }
  if (plan.exec.device != nullptr) {
    check_device_tensor("q", args.q);
    check_device_tensor("k", args.k);
    if (needs_v) {
      check_device_tensor("v", args.v);
      check_device_tensor("out", args.out);
    }
    check_device_words("lse", args.lse);
    const SelectionOut& s = args.selection;
    for (const void* pointer :
         {static_cast<const void*>(s.labels), static_cast<const void*>(s.sizes), static_cast<const void*>(s.counts),
          static_cast<const void*>(s.mask), static_cast<const void*>(s.keep), static_cast<const void*>(s.centroids),
          static_cast<const void*>(s.codebooks), static_cast<const void*>(s.codes)}) {
      check_device_words("selection", pointer);
    }
    require(args.head_stats == nullptr, Status::invalid_argument,
            "head_stats: a GPU call cannot wait for them; read them after it");
    require(args.state == nullptr || args.start != Start::automatic, Status::invalid_argument,
            "start: a GPU call cannot read its state; say first or warm");
  }
  check_lengths("q_lengths", args.q_lengths, shape.batch, shape.q_tokens);
  check_lengths("k_lengths", args.k_lengths, shape.batch, shape.k_tokens);
  require(args.dense_queries == nullptr || shape.dense_queries, Status::invalid_argument,
          "dense_queries: the plan was made without them (set dense_queries in its shape)");
}

void check_finite(const Plan& plan, const CallArgs& args) {
  const Exec& exec = plan.context.exec();
  const auto check = [&](const char* name, const TensorView& x, const int64_t* lengths) {
    if (x.tokens == 0) return;
    std::atomic<int64_t> bad{-1};
    constexpr int64_t kRows = 2048;
    const int64_t blocks = ceil_div(x.tokens, kRows);
    exec.pool->run(x.batch * x.heads * blocks, [&](int64_t i, int) {
      const int64_t head = i / blocks, b = head / x.heads, first = i % blocks * kRows;
      const int64_t end = std::min(first + kRows, lengths == nullptr ? x.tokens : lengths[b]);
      int32_t rows[kRows];
      if (end <= first) return;
      std::iota(rows, rows + (end - first), static_cast<int32_t>(first));
      if (!exec.kernels->all_within(x.head(b, head % x.heads), rows, end - first, kMostMagnitude)) bad = head;
    });
    require(bad < 0, Status::non_finite,
            "{}: NaN, Inf or a magnitude over 1e18 among the valid tokens of sample {}, head {}", name, bad / x.heads,
            bad % x.heads);
  };
  check("q", args.q, args.q_lengths);
  check("k", args.k, args.k_lengths);
}

}  // namespace scope
