// One call: check, then for each sample and head group, encode, score, select, attend.
#include "pipeline/call.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope {

namespace {

class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Timer() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

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
  check_lengths("q_lengths", args.q_lengths, shape.batch, shape.q_tokens);
  check_lengths("k_lengths", args.k_lengths, shape.batch, shape.k_tokens);
  require(args.dense_queries == nullptr || shape.dense_queries, Status::invalid_argument,
          "dense_queries: the plan was made without them (set dense_queries in its shape)");
}

// Non-finite q or k would poison every centroid, so they are refused before anything is written; so is what could overflow a
// product of up to 256 channels.
constexpr float kMostMagnitude = 1e18f;
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

// What one sample's tokens are: which take part in selection, which are always kept, which attend densely.
struct Sample {
  int64_t index;
  int64_t valid_q, valid_k;       // lengths
  int64_t queries = 0, keys = 0;  // that take part in selection
  int64_t kept = 0, dense = 0;    // always-kept keys, densely attending queries
};

class Call {
 public:
  Call(const Plan& plan, const CallArgs& args)
      : plan_(plan), args_(args), exec_(plan.context.exec()), at_(plan.layout(args.workspace, args.workspace_bytes)) {
    stats_.reason = schedule(plan.settings, args.place);
    stats_.instruction_set = exec_.kernels->name;
    const bool bf16 = plan.shape.dtype == DType::bf16 && exec_.attend_kernels_bf16 != nullptr;
    stats_.arithmetic = bf16 ? exec_.attend_kernels_bf16->name : exec_.attend_kernels->name;
    scale_ = 1.0f / std::sqrt(static_cast<float>(plan.shape.dim));
  }

  void run() {
    {
      const Timer total(stats_.total);
      {
        const Timer timer(stats_.check);
        if (plan_.settings.check_finite && clusters()) check_finite(plan_, args_);
      }
      stats_.warm = args_.state != nullptr && clusters();
      for (int64_t b = 0; b < plan_.shape.batch; ++b) sample(b);
    }
    if (sparse() && selecting_heads_ == 0) stats_.reason = Reason::nothing_to_select;
    stats_.density = selecting_heads_ == 0 ? 1.0 : stats_.density / static_cast<double>(selecting_heads_);
    stats_.total_density /= static_cast<double>(plan_.shape.batch * plan_.shape.heads);
    stats_.warm = stats_.warm && stats_.iterations > 0;
    if (args_.stats != nullptr) *args_.stats = stats_;
  }

  void run_selected(const SelectedArgs& selected) {
    stats_.reason = Reason::sparse;
    const Shape& shape = plan_.shape;
    const int64_t words = mask_words(shape.k_tokens), groups = plan_.selection_groups;
    for (int64_t b = 0; b < shape.batch; ++b) {
      Sample s = describe(b);
      std::fill_n(at_.keep, words, 0u);
      if (selected.keep != nullptr) std::copy_n(selected.keep + b * words, words, at_.keep);
      for (int64_t h = 0; h < shape.heads; ++h) {
        const int64_t head = b * shape.heads + h;
        const int32_t* labels = selected.labels + head * shape.q_tokens;
        std::fill_n(at_.offsets, groups + 1, 0);
        for (int64_t i = 0; i < s.valid_q; ++i) {
          if (labels[i] >= 0) ++at_.offsets[labels[i] + 1];
        }
        std::partial_sum(at_.offsets, at_.offsets + groups + 1, at_.offsets);
        int64_t idle = at_.offsets[groups];
        for (int64_t i = 0; i < shape.q_tokens; ++i) {
          if (i >= s.valid_q || labels[i] < 0) {
            at_.order[idle++] = static_cast<int32_t>(i);
          } else {
            at_.order[at_.offsets[labels[i]]++] = static_cast<int32_t>(i);
          }
        }
        std::copy_backward(at_.offsets, at_.offsets + groups, at_.offsets + groups + 1);
        at_.offsets[0] = 0;
        attend(s, h, groups, selected.mask + head * groups * words, false);
      }
    }
    if (args_.stats != nullptr) *args_.stats = stats_;
  }

 private:
  bool sparse() const { return stats_.reason == Reason::sparse; }
  bool in_prefix() const {
    return plan_.settings.warm_prefix && args_.state != nullptr && stats_.reason == Reason::dense_step;
  }
  bool clusters() const { return sparse() || in_prefix(); }

  Sample describe(int64_t b) {
    const Shape& shape = plan_.shape;
    const int64_t words = mask_words(shape.k_tokens), q_words = mask_words(shape.q_tokens);
    Sample s{.index = b,
             .valid_q = args_.q_lengths == nullptr ? shape.q_tokens : args_.q_lengths[b],
             .valid_k = args_.k_lengths == nullptr ? shape.k_tokens : args_.k_lengths[b]};
    std::fill_n(at_.valid, words, 0u);
    std::fill_n(at_.keep, words, 0u);
    for (int64_t j = 0; j < s.valid_k; ++j) {
      const bool kept = args_.keep != nullptr && mask_bit(args_.keep + b * words, j);
      set_mask_bit(kept ? at_.keep : at_.valid, j);
      if (kept) {
        ++s.kept;
      } else {
        at_.k_rows[s.keys++] = static_cast<int32_t>(j);
      }
    }
    for (int64_t i = 0; i < s.valid_q; ++i) {
      const bool dense = args_.dense_queries != nullptr && mask_bit(args_.dense_queries + b * q_words, i);
      if (dense) {
        ++s.dense;
      } else {
        at_.q_rows[s.queries++] = static_cast<int32_t>(i);
      }
    }
    return s;
  }

  void sample(int64_t b) {
    const Sample s = describe(b);
    if (args_.selection.keep != nullptr) {
      const int64_t words = mask_words(plan_.shape.k_tokens);
      std::copy_n(at_.keep, words, args_.selection.keep + b * words);
    }
    const bool selects = sparse() && s.queries > 0 && s.keys > 0;
    const bool clusters_here = clusters() && s.queries > 0 && s.keys > 0;

    StateSlot next{};
    StateSlot before{};
    if (clusters_here) {
      next = {static_cast<int32_t>(effective_groups(plan_.settings, s.queries)),
              static_cast<int32_t>(plan_.codes == 0 ? 0 : effective_codes(plan_.settings, s.keys))};
      if (args_.state != nullptr) before = StateView(plan_, args_.state, b).slot();
    }
    const bool warm = clusters_here && args_.state != nullptr && before.groups == next.groups && before.codes == next.codes;
    stats_.warm = stats_.warm && (warm || !clusters_here);
    // A call that fails midway leaves the sample uninitialised, so that the next one starts cold instead of from a mixture.
    if (clusters_here && args_.state != nullptr) StateView(plan_, args_.state, b).set_slot({});
    for (int64_t h = 0; h < plan_.shape.heads; ++h) {
      if (clusters_here) cluster(s, h, next, warm);
      if (selects) {
        sparse_head(s, h, next);
      } else {
        dense_head(s, h);
      }
    }

    if (clusters_here && args_.state != nullptr) StateView(plan_, args_.state, b).set_slot(next);
  }

  // group and encode, from the state and back into it.
  void cluster(const Sample& s, int64_t h, const StateSlot& n, bool warm) {
    const Settings& settings = plan_.settings;
    const int iterations = warm ? settings.iterations : settings.first_iterations;
    stats_.iterations = iterations;
    if (warm) StateView(plan_, args_.state, s.index).load(h, n, at_.centroids, at_.codebooks);
    {
      const Timer timer(stats_.group);
      const GroupArgs group{.q = args_.q.head(s.index, h),
                            .rows = at_.q_rows,
                            .count = s.queries,
                            .groups = n.groups,
                            .grouping = settings.group,
                            .iterations = iterations,
                            .sample = warm ? s.queries : effective_sample(settings, s.queries, n.groups),
                            .warm = warm,
                            .seed = settings.seed,
                            .centroids = at_.centroids,
                            .labels = at_.labels,
                            .sizes = at_.sizes,
                            .order = at_.order,
                            .offsets = at_.offsets,
                            .scratch = at_.scratch};
      plan_.backend->group(exec_, {&group, 1});
    }
    if (n.codes > 0) {
      const Timer timer(stats_.encode);
      const EncodeArgs encode{.k = args_.k.head(s.index, h),
                              .rows = at_.k_rows,
                              .count = s.keys,
                              .partition = &plan_.partition,
                              .codes = n.codes,
                              .iterations = iterations,
                              .sample = warm ? s.keys : effective_sample(settings, s.keys, n.codes),
                              .warm = warm,
                              .seed = settings.seed,
                              .codebooks = at_.codebooks,
                              .labels = at_.codes,
                              .empty = at_.empty,
                              .scratch = at_.scratch};
      plan_.backend->encode(exec_, {&encode, 1});
    }
    if (args_.state != nullptr) StateView(plan_, args_.state, s.index).store(h, n, at_.centroids, at_.codebooks);
  }

  // score, select, attend.
  void sparse_head(const Sample& s, int64_t h, const StateSlot& n) {
    const Settings& settings = plan_.settings;
    const int64_t words = mask_words(plan_.shape.k_tokens);
    const auto subspaces = static_cast<int64_t>(plan_.partition.size());
    Proxy proxy{.kind = settings.proxy,
                .groups = n.groups,
                .count = s.keys,
                .scale = scale_,
                .centroids = at_.centroids,
                .k = args_.k.head(s.index, h),
                .rows = at_.k_rows};
    if (settings.proxy == ProxyKind::codes) {
      const Timer timer(stats_.score);
      proxy.subspaces = subspaces;
      proxy.codes = n.codes;
      proxy.tables = at_.tables;
      proxy.labels = at_.codes;
      const ScoreArgs score{.centroids = at_.centroids,
                            .groups = n.groups,
                            .dim = plan_.shape.dim,
                            .partition = &plan_.partition,
                            .codebooks = at_.codebooks,
                            .codes = n.codes,
                            .scale = scale_,
                            .tables = at_.tables};
      plan_.backend->score(exec_, {&score, 1});
    }
    HeadStats head{.queries = s.queries, .keys = s.keys, .groups = n.groups, .codes = n.codes};
    const TailArgs tail{args_.v.head(s.index, h), at_.tail_k, at_.tail_v, at_.tail_bias};
    {
      const Timer timer(stats_.select);
      const SelectArgs select{.proxy = proxy,
                              .sizes = at_.sizes,
                              .rule = settings.rule,
                              .rho = settings.rho,
                              .alpha = settings.alpha,
                              .density = settings.density,
                              .counts = at_.counts,
                              .top_p = at_.top_p,
                              .head_budget = &head.head_budget,
                              .rho_used = &head.rho,
                              .alpha_used = &head.alpha,
                              .mask = at_.mask,
                              .tail = settings.tail == Tail::none ? nullptr : &tail,
                              .scratch = at_.scratch};
      plan_.backend->select(exec_, {&select, 1});
    }
    // The unused groups of a short sample, then the densely attending queries as the last group.
    const int64_t groups = plan_.selection_groups;
    std::fill(at_.sizes + n.groups, at_.sizes + groups, 0);
    std::fill(at_.counts + n.groups, at_.counts + groups, 0);
    std::fill(at_.mask + n.groups * words, at_.mask + groups * words, 0u);
    for (int64_t c = n.groups; c < groups; ++c) at_.offsets[c + 1] = at_.offsets[n.groups];
    if (s.dense > 0) add_dense_group(s, groups - 1);
    int64_t idle = s.queries + s.dense;
    for (int64_t i = s.valid_q; i < plan_.shape.q_tokens; ++i) at_.order[idle++] = static_cast<int32_t>(i);
    report(s, h, head, groups);
    write_selection(s, h, n, groups);
    if (args_.out.data != nullptr) attend(s, h, groups, at_.mask, settings.tail != Tail::none);
  }

  void add_dense_group(const Sample& s, int64_t group) {
    const int64_t words = mask_words(plan_.shape.k_tokens), q_words = mask_words(plan_.shape.q_tokens);
    int64_t at = s.queries;
    for (int64_t i = 0; i < s.valid_q; ++i) {
      if (!mask_bit(args_.dense_queries + s.index * q_words, i)) continue;
      at_.order[at++] = static_cast<int32_t>(i);
      at_.labels[i] = static_cast<int32_t>(group);
    }
    at_.offsets[group + 1] = at;
    at_.sizes[group] = static_cast<int32_t>(s.dense);
    at_.counts[group] = static_cast<int32_t>(s.keys);
    std::copy_n(at_.valid, words, at_.mask + group * words);
  }

  // One group with every valid query and a full row.
  void dense_head(const Sample& s, int64_t h) {
    const int64_t head = s.index * plan_.shape.heads + h;
    std::iota(at_.order, at_.order + plan_.shape.q_tokens, 0);
    at_.offsets[0] = 0;
    at_.offsets[1] = s.valid_q;
    stats_.total_density += 1;
    if (args_.head_stats != nullptr) {
      args_.head_stats[head] = {.density = 1, .total_density = 1, .queries = s.queries, .keys = s.keys};
    }
    clear_selection(head);
    if (sparse()) write_dense_selection(s, head);
    if (args_.out.data != nullptr) attend(s, h, 1, at_.valid, false);
  }

  void attend(const Sample& s, int64_t h, int64_t groups, const uint32_t* mask, bool with_tail) {
    const Timer timer(stats_.attend);
    AttendArgs attend{.q = args_.q.head(s.index, h),
                      .k = args_.k.head(s.index, h),
                      .v = args_.v.head(s.index, h),
                      .scale = scale_,
                      .groups = groups,
                      .order = at_.order,
                      .offsets = at_.offsets,
                      .mask = mask,
                      .keep = at_.keep,
                      .extra = {},
                      .out = args_.out.head(s.index, h),
                      .scratch = at_.scratch};
    if (args_.lse != nullptr) attend.lse = args_.lse + (s.index * plan_.shape.heads + h) * plan_.shape.q_tokens;
    if (with_tail) {
      // Group c sees virtual key c, unless it dropped nothing.
      const int64_t count = plan_.groups, words = mask_words(count);
      std::fill_n(at_.tail_mask, (count + 1) * words, 0u);
      for (int64_t c = 0; c < count; ++c) {
        if (at_.sizes[c] > 0 && std::isfinite(at_.tail_bias[c])) set_mask_bit(at_.tail_mask + c * words, c);
      }
      attend.extra = {count, at_.tail_k, at_.tail_v, at_.tail_bias, at_.tail_mask};
    }
    plan_.backend->attend(exec_, {&attend, 1});
  }

  void report(const Sample& s, int64_t h, HeadStats& head, int64_t groups) {
    double pairs = 0, total = 0;
    head.min_count = s.keys;
    for (int64_t c = 0; c < groups; ++c) {
      const double size = at_.sizes[c];
      total += size * static_cast<double>(at_.counts[c] + s.kept);
      if (c >= head.groups) continue;
      if (at_.sizes[c] == 0) {
        ++head.empty_groups;
        continue;
      }
      pairs += size * at_.counts[c];
      head.min_count = std::min<int64_t>(head.min_count, at_.counts[c]);
      head.max_count = std::max<int64_t>(head.max_count, at_.counts[c]);
    }
    if (head.codes > 0) head.empty_codes = std::accumulate(at_.empty, at_.empty + plan_.partition.size(), int64_t{0});
    head.density = pairs / (static_cast<double>(s.queries) * static_cast<double>(s.keys));
    head.total_density = total / (static_cast<double>(s.valid_q) * static_cast<double>(s.valid_k));
    ++selecting_heads_;
    stats_.density += head.density;
    stats_.total_density += head.total_density;
    if (args_.head_stats != nullptr) args_.head_stats[s.index * plan_.shape.heads + h] = head;
  }

  void write_selection(const Sample& s, int64_t h, const StateSlot& n, int64_t groups) {
    const SelectionOut& to = args_.selection;
    const Shape& shape = plan_.shape;
    const int64_t head = s.index * shape.heads + h, words = mask_words(shape.k_tokens);
    if (to.labels != nullptr) std::copy_n(at_.labels, shape.q_tokens, to.labels + head * shape.q_tokens);
    if (to.sizes != nullptr) std::copy_n(at_.sizes, groups, to.sizes + head * groups);
    if (to.counts != nullptr) std::copy_n(at_.counts, groups, to.counts + head * groups);
    if (to.mask != nullptr) std::copy_n(at_.mask, groups * words, to.mask + head * groups * words);
    if (to.centroids != nullptr) {
      float* centroids = to.centroids + head * plan_.groups * shape.dim;
      std::fill_n(std::copy_n(at_.centroids, n.groups * shape.dim, centroids), (plan_.groups - n.groups) * shape.dim, 0.0f);
    }
    const int64_t heads = shape.batch * shape.heads;
    int64_t from = 0, base = 0;
    for (size_t m = 0; m < plan_.partition.size(); ++m) {
      const auto depth = static_cast<int64_t>(plan_.partition[m].size());
      if (to.codebooks != nullptr) {
        float* book = to.codebooks + base + head * plan_.codes * depth;
        std::fill_n(std::copy_n(at_.codebooks + from, n.codes * depth, book), (plan_.codes - n.codes) * depth, 0.0f);
      }
      from += n.codes * depth;
      base += heads * plan_.codes * depth;
      if (to.codes == nullptr) continue;
      int32_t* codes = to.codes + (static_cast<int64_t>(m) * heads + head) * shape.k_tokens;
      std::fill_n(codes, shape.k_tokens, -1);
      for (int64_t j = 0; j < s.keys; ++j) codes[at_.k_rows[j]] = at_.codes[static_cast<int64_t>(m) * s.keys + j];
    }
  }

  // A sample without anything to select from attends densely: all its queries are the last group.
  void write_dense_selection(const Sample& s, int64_t head) {
    const SelectionOut& to = args_.selection;
    const int64_t groups = plan_.selection_groups, words = mask_words(plan_.shape.k_tokens),
                  last = head * groups + groups - 1;
    if (groups == 0) return;
    if (to.labels != nullptr)
      std::fill_n(to.labels + head * plan_.shape.q_tokens, s.valid_q, static_cast<int32_t>(groups - 1));
    if (to.sizes != nullptr) to.sizes[last] = static_cast<int32_t>(s.valid_q);
    if (to.counts != nullptr) to.counts[last] = static_cast<int32_t>(s.keys);
    if (to.mask != nullptr) std::copy_n(at_.valid, words, to.mask + last * words);
  }

  // A call that ran dense by its schedule selected nothing.
  void clear_selection(int64_t head) {
    const SelectionOut& to = args_.selection;
    const Shape& shape = plan_.shape;
    const int64_t groups = plan_.selection_groups, words = mask_words(shape.k_tokens);
    if (to.labels != nullptr) std::fill_n(to.labels + head * shape.q_tokens, shape.q_tokens, -1);
    if (to.sizes != nullptr) std::fill_n(to.sizes + head * groups, groups, 0);
    if (to.counts != nullptr) std::fill_n(to.counts + head * groups, groups, 0);
    if (to.mask != nullptr) std::fill_n(to.mask + head * groups * words, groups * words, 0u);
    if (to.centroids != nullptr) std::fill_n(to.centroids + head * plan_.groups * shape.dim, plan_.groups * shape.dim, 0.0f);
    const int64_t heads = shape.batch * shape.heads;
    int64_t base = 0;
    for (size_t m = 0; m < plan_.partition.size(); ++m) {
      const auto depth = static_cast<int64_t>(plan_.partition[m].size());
      if (to.codebooks != nullptr) std::fill_n(to.codebooks + base + head * plan_.codes * depth, plan_.codes * depth, 0.0f);
      base += heads * plan_.codes * depth;
      if (to.codes != nullptr) {
        std::fill_n(to.codes + (static_cast<int64_t>(m) * heads + head) * shape.k_tokens, shape.k_tokens, -1);
      }
    }
  }

  const Plan& plan_;
  const CallArgs& args_;
  const Exec& exec_;
  Workspace at_;
  CallStats stats_;
  int64_t selecting_heads_ = 0;
  float scale_ = 0;
};

}  // namespace

void call(const Plan& plan, const CallArgs& args) {
  const bool attends = args.out.data != nullptr || plan.shape.q_tokens == 0;
  check_args(plan, args, attends);
  require(attends || !plan.settings.dense, Status::invalid_argument, "out: got null, and method dense selects nothing");
  require(attends || args.lse == nullptr, Status::invalid_argument, "lse: got one without out");
  require(attends || plan.settings.tail == Tail::none, Status::invalid_argument,
          "out: got null, and tail first_order needs v and out");
  if (args.state != nullptr) {
    require(!plan.settings.dense, Status::invalid_argument, "state: got one, and method dense keeps none");
    check_state(plan, args.state);
  }
  Call(plan, args).run();
}

void attend_selected(const Plan& plan, const CallArgs& args, const SelectedArgs& selected) {
  check_args(plan, args, true);
  require(!plan.settings.dense, Status::invalid_argument, "plan: method dense has no selection");
  require(selected.labels != nullptr && selected.mask != nullptr, Status::invalid_argument,
          "selection: labels and mask are needed, got null");
  const Shape& shape = plan.shape;
  const int64_t heads = shape.batch * shape.heads, words = mask_words(shape.k_tokens);
  for (int64_t i = 0; i < heads * shape.q_tokens; ++i) {
    require(selected.labels[i] >= -1 && selected.labels[i] < plan.selection_groups, Status::invalid_argument,
            "selection.labels[{}]: got {}, expected -1..{}", i, selected.labels[i], plan.selection_groups - 1);
  }
  // Bits past the valid keys would read padding, or past k and v.
  const auto check_row = [&](const char* name, const uint32_t* row, int64_t b) {
    const int64_t valid = args.k_lengths == nullptr ? shape.k_tokens : args.k_lengths[b];
    for (int64_t w = valid / 32; w < words; ++w) {
      const uint32_t past = w == valid / 32 ? ~0u << (valid % 32) : ~0u;
      require((row[w] & past) == 0, Status::invalid_argument, "selection.{}: sample {} has bits past its {} valid keys",
              name, b, valid);
    }
  };
  for (int64_t row = 0; row < heads * plan.selection_groups; ++row) {
    check_row("mask", selected.mask + row * words, row / (shape.heads * plan.selection_groups));
  }
  for (int64_t b = 0; selected.keep != nullptr && b < shape.batch; ++b) check_row("keep", selected.keep + b * words, b);
  Call(plan, args).run_selected(selected);
}

}  // namespace scope
