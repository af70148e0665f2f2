// One call: check, then for each sample and head group, encode, score, select, attend.
#include "pipeline/call.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "pipeline/check_args.h"

namespace scope {

namespace {

void set_times(const double* seconds, CallStats& stats) {
  const auto at = [&](Moment moment) { return seconds[static_cast<int>(moment)]; };
  stats.check = at(Moment::check);
  stats.group = at(Moment::group);
  stats.encode = at(Moment::encode);
  stats.score = at(Moment::score);
  stats.select = at(Moment::select);
  stats.attend = at(Moment::attend);
  stats.total = std::accumulate(seconds, seconds + kMoments, 0.0);
}

// Means over the heads that selected; 1 where none did.
void set_densities(const HeadStats* heads, int64_t count, CallStats& stats) {
  double density = 0, total = 0;
  int64_t selecting = 0;
  for (int64_t i = 0; i < count; ++i) {
    total += heads[i].total_density;
    if (heads[i].groups == 0) continue;
    density += heads[i].density;
    ++selecting;
  }
  stats.density = selecting == 0 ? 1.0 : density / static_cast<double>(selecting);
  stats.total_density = total / static_cast<double>(count);
}

// One sample of a call.
struct Sample {
  int64_t index;
  Tokens tokens;
  bool prefix_q, prefix_k;  // the tokens that take part are the first ones
  bool can_select() const { return tokens.queries > 0 && tokens.keys > 0; }
};

// Set bits of [0, n).
int64_t count_bits(const uint32_t* mask, int64_t n) {
  int64_t count = 0;
  for (int64_t w = 0; mask != nullptr && w < n / 32; ++w) count += std::popcount(mask[w]);
  if (mask != nullptr && n % 32 != 0) count += std::popcount(mask[n / 32] & ~(~0u << (n % 32)));
  return count;
}

class Call {
 public:
  Call(const Plan& plan, const CallArgs& args)
      : plan_(plan),
        args_(args),
        backend_(*plan.backend),
        exec_(plan.exec),
        at_(plan.layout(args.workspace, args.workspace_bytes)),
        heads_(plan.shape.heads) {
    exec_.stream = args.stream;
    exec_.call = args.workspace;
    if (args.stats == nullptr) exec_.clock = nullptr;
    stats_.reason = schedule(plan.settings, args.place);
    stats_.kernel = plan.kernel();
    if (exec_.device != nullptr) {
      stats_.arithmetic = dtype_name(plan.shape.dtype);
    } else {
      const bool bf16 = plan.shape.dtype == DType::bf16 && exec_.attend_kernels_bf16 != nullptr;
      stats_.arithmetic = bf16 ? exec_.attend_kernels_bf16->name : exec_.attend_kernels->name;
    }
    scale_ = 1.0f / std::sqrt(static_cast<float>(plan.shape.dim));
  }

  void run() {
    const DeviceScope scope(plan_, exec_);
    check_start();
    begin();
    if (exec_.device == nullptr && plan_.settings.check_finite && clusters()) check_finite(plan_, args_);
    stats_.warm = args_.state != nullptr && clusters();
    for (int64_t b = 0; b < plan_.shape.batch; ++b) sample(b);
    if (sparse() && !selected_) stats_.reason = Reason::nothing_to_select;
    stats_.warm = stats_.warm && (stats_.iterations > 0 || reused_);
    end();
  }

  void run_selected(const SelectedArgs& selected) {
    const DeviceScope scope(plan_, exec_);
    begin();
    stats_.reason = Reason::sparse;
    const Shape& shape = plan_.shape;
    const int64_t words = mask_words(shape.k_tokens), groups = plan_.selection_groups;
    for (int64_t b = 0; b < shape.batch; ++b) {
      const Sample s = describe(b);
      for (int64_t h = 0; h < heads_; h += plan_.chunk) {
        const int64_t n = std::min(plan_.chunk, heads_ - h), head = b * heads_ + h;
        backend_.import_selection(exec_, {.tokens = s.tokens,
                                          .heads = n,
                                          .groups = groups,
                                          .row_groups = plan_.groups + 1,
                                          .labels = selected.labels + head * shape.q_tokens,
                                          .selected = selected.mask + head * groups * words,
                                          .keep = selected.keep == nullptr ? nullptr : selected.keep + b * words,
                                          .order = at_.order,
                                          .offsets = at_.offsets,
                                          .mask = at_.mask,
                                          .kept = at_.keep});
        attend(s, h, n, groups, selected.keep != nullptr, 0);
      }
      report_dense(s);
    }
    end();
  }

 private:
  bool sparse() const { return stats_.reason == Reason::sparse; }
  bool in_prefix() const {
    return plan_.settings.warm_prefix && args_.state != nullptr && stats_.reason == Reason::dense_step;
  }
  bool clusters() const { return sparse() || in_prefix(); }

  void begin() {
    start_ = std::chrono::steady_clock::now();
    mark(Moment::check);
    backend_.fill(exec_, at_.status, 0, 0, 1, 1);
  }

  // From here on, time belongs to `moment`.
  void mark(Moment moment) {
    if (backend_.mark != nullptr) {
      backend_.mark(exec_, moment);
      return;
    }
    const auto now = std::chrono::steady_clock::now();
    if (moment_ != Moment::end) {
      seconds_[static_cast<size_t>(moment_)] += std::chrono::duration<double>(now - since_).count();
    }
    moment_ = moment;
    since_ = now;
  }

  void end() {
    mark(Moment::end);
    if (exec_.device != nullptr) {
      stats_.density = stats_.total_density = std::numeric_limits<double>::quiet_NaN();
      std::fill(std::begin(seconds_), std::end(seconds_), std::numeric_limits<double>::quiet_NaN());
      set_times(seconds_, stats_);
    } else {
      set_times(seconds_, stats_);
      stats_.total = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
      const int64_t heads = plan_.shape.batch * heads_;
      set_densities(at_.report, heads, stats_);
      if (args_.head_stats != nullptr) std::copy_n(at_.report, heads, args_.head_stats);
    }
    if (args_.stats != nullptr) *args_.stats = stats_;
  }

  // Host integers alone: nothing is written.
  Sample count(int64_t b) const {
    const Shape& shape = plan_.shape;
    const uint32_t *keep = keep_of(b), *dense = dense_of(b);
    Tokens t{.q_tokens = shape.q_tokens,
             .k_tokens = shape.k_tokens,
             .valid_q = args_.q_lengths == nullptr ? shape.q_tokens : args_.q_lengths[b],
             .valid_k = args_.k_lengths == nullptr ? shape.k_tokens : args_.k_lengths[b]};
    t.kept = count_bits(keep, t.valid_k);
    t.dense = count_bits(dense, t.valid_q);
    t.keys = t.valid_k - t.kept;
    t.queries = t.valid_q - t.dense;
    return {b, t, count_bits(dense, t.queries) == 0, count_bits(keep, t.keys) == 0};
  }
  const uint32_t* keep_of(int64_t b) const {
    return args_.keep == nullptr ? nullptr : args_.keep + b * mask_words(plan_.shape.k_tokens);
  }
  const uint32_t* dense_of(int64_t b) const {
    return args_.dense_queries == nullptr ? nullptr : args_.dense_queries + b * mask_words(plan_.shape.q_tokens);
  }

  Sample describe(int64_t b) {
    const Sample s = count(b);
    backend_.describe(exec_, {.tokens = s.tokens,
                              .keep = keep_of(b),
                              .dense_queries = dense_of(b),
                              .q_rows = at_.q_rows,
                              .k_rows = at_.k_rows,
                              .valid = at_.valid,
                              .kept = at_.keep,
                              .offsets = at_.all_queries});
    return s;
  }

  // The CPU walks the lists; a device need not read one that says 0, 1, 2, ….
  const int32_t* q_rows(const Sample& s) const { return exec_.device != nullptr && s.prefix_q ? nullptr : at_.q_rows; }
  const int32_t* k_rows(const Sample& s) const { return exec_.device != nullptr && s.prefix_k ? nullptr : at_.k_rows; }

  void sample(int64_t b) {
    mark(Moment::other);
    const Sample s = describe(b);
    if (args_.selection.keep != nullptr) {
      const int64_t words = mask_words(plan_.shape.k_tokens);
      backend_.copy(exec_, at_.keep, 0, args_.selection.keep + b * words, 0, words, 1);
    }
    const bool selects = sparse() && s.can_select(), clusters_here = clusters() && s.can_select();
    selected_ = selected_ || selects;

    StateSlot next{};
    bool warm = false, reused = false;
    if (clusters_here) {
      next = slot_of(s);
      reused = can_reuse(s, next);
      warm = reused || (open_state(b, next) && plan_.settings.group != Grouping::cocluster);
      stats_.warm = stats_.warm && warm;
      reused_ = reused_ || reused;
    }
    for (int64_t h = 0; h < heads_; h += plan_.chunk) {
      const int64_t n = std::min(plan_.chunk, heads_ - h);
      if (reused) {
        reuse(s, h, next);
      } else if (clusters_here) {
        cluster(s, h, n, next, warm);
      }
      if (selects) {
        sparse_heads(s, h, n, next);
      } else {
        dense_heads(s, h, n);
      }
    }
    if (!selects) report_dense(s);
    mark(Moment::other);
    if (clusters_here && args_.state != nullptr && !reused && !keeps_slot(warm)) {
      backend_.set_slot(exec_, StateView(plan_, args_.state, b).slot, next);
    }
  }

  // How many groups and codes the sample has.
  StateSlot slot_of(const Sample& s) const {
    return {static_cast<int32_t>(effective_groups(plan_.settings, s.tokens.queries)),
            static_cast<int32_t>(plan_.codes == 0 ? 0 : effective_codes(plan_.settings, s.tokens.keys))};
  }

  // Host memory: whether the state holds what the sample needs.
  bool filled(int64_t b, const StateSlot& next) const {
    StateSlot found{};
    std::memcpy(&found, StateView(plan_, args_.state, b).slot, sizeof found);
    return found.groups == next.groups && found.codes == next.codes;
  }

  // A warm call that cannot be one is refused before anything is written.
  void check_start() const {
    if (exec_.device != nullptr || args_.state == nullptr || args_.start != Start::warm || !clusters()) return;
    for (int64_t b = 0; b < plan_.shape.batch; ++b) {
      const Sample s = count(b);
      if (!s.can_select()) continue;
      const StateSlot next = slot_of(s);
      require(filled(b, next), Status::invalid_argument,
              "start: got warm, and the state of sample {} was not filled by a call with {} groups and {} codes", b,
              next.groups, next.codes);
    }
  }

  // On a device a warm call leaves the slot alone: were it not the right one, the next call must find that out too.
  bool keeps_slot(bool warm) const { return exec_.device != nullptr && warm; }

  // Whether the sample starts warm. A call that fails midway leaves it uninitialised, so that the next one starts cold
  // instead of from a mixture.
  bool open_state(int64_t b, const StateSlot& next) {
    if (args_.state == nullptr) return false;
    StateSlot* slot = StateView(plan_, args_.state, b).slot;
    bool warm = args_.start == Start::warm;
    if (exec_.device == nullptr) {
      warm = args_.start != Start::first && filled(b, next);
    } else if (warm) {
      const StateHeader header = StateLayout(plan_).header;
      backend_.check_slot(exec_, args_.state, &header, slot, next, kStateNotStarted, at_.status);
    }
    if (!keeps_slot(warm)) backend_.set_slot(exec_, slot, {});
    return warm;
  }

  // Copies centroids and codebooks of a chunk between state and workspace: what the sample has of them, and no more.
  void move_state(const Sample& s, int64_t h, int64_t n, const StateSlot& slot, bool load) {
    const StateView view(plan_, args_.state, s.index);
    const DType type = plan_.settings.state_dtype;
    const auto move = [&](void* base, int64_t rows, int64_t used_rows, float* here) {
      const int64_t per_head = rows * plan_.shape.dim, used = used_rows * plan_.shape.dim;
      const int64_t steps = used == per_head ? 1 : n, count = used == per_head ? n * per_head : used;
      for (int64_t i = 0; i < steps; ++i) {
        void* there = static_cast<std::byte*>(base) + (h + i) * per_head * dtype_bytes(type);
        if (load) {
          backend_.convert(exec_, there, type, here + i * per_head, DType::f32, count);
        } else {
          backend_.convert(exec_, here + i * per_head, DType::f32, there, type, count);
        }
      }
    };
    move(view.centroids, plan_.groups, slot.groups, at_.centroids);
    if (plan_.codes > 0) move(view.codebooks, plan_.codes, slot.codes, at_.codebooks);
  }

  // Row i of an array that only some methods have.
  static float* of_head(float* base, int64_t i, int64_t width) { return base == nullptr ? nullptr : base + i * width; }

  // group and encode, from the state and back into it.
  void cluster(const Sample& s, int64_t h, int64_t n, const StateSlot& slot, bool warm) {
    const Settings& settings = plan_.settings;
    const Shape& shape = plan_.shape;
    const bool together = settings.group == Grouping::cocluster;
    const int iterations = warm || together ? settings.iterations : settings.first_iterations;
    const auto subspaces = static_cast<int64_t>(plan_.partition.size());
    const bool keys = slot.codes > 0 && settings.encode == Encoding::kmeans;
    stats_.iterations = together || settings.group == Grouping::kmeans || keys ? iterations : 0;
    mark(Moment::other);
    if (warm) move_state(s, h, n, slot, true);
    mark(Moment::group);
    std::array<GroupArgs, kMostChunk> group;
    for (int64_t i = 0; i < n; ++i) {
      group[static_cast<size_t>(i)] = {
          .q = args_.q.head(s.index, h + i),
          .rows = q_rows(s),
          .count = s.tokens.queries,
          .groups = slot.groups,
          .grouping = settings.group,
          .block = settings.q_block,
          .iterations = iterations,
          .sample = warm ? s.tokens.queries : effective_sample(settings, s.tokens.queries, slot.groups),
          .warm = warm,
          .seed = settings.seed,
          .centroids = at_.centroids + i * plan_.groups * shape.dim,
          .labels = at_.labels + i * shape.q_tokens,
          .sizes = at_.sizes + i * (plan_.groups + 1),
          .order = at_.order + i * shape.q_tokens,
          .offsets = at_.offsets + i * (plan_.groups + 2),
          .similarity = of_head(at_.q_similarity, i, plan_.groups),
          .status = at_.status,
          .scratch = at_.scratch};
    }
    if (!together) backend_.group(exec_, {group.data(), static_cast<size_t>(n)});
    if (slot.codes > 0) {
      if (!together) mark(Moment::encode);
      std::array<EncodeArgs, kMostChunk> encode;
      for (int64_t i = 0; i < n; ++i) {
        encode[static_cast<size_t>(i)] = {
            .k = args_.k.head(s.index, h + i),
            .rows = k_rows(s),
            .count = s.tokens.keys,
            .partition = &plan_.partition,
            .codes = slot.codes,
            .encoding = settings.encode,
            .block = settings.k_block,
            .iterations = iterations,
            .sample = warm ? s.tokens.keys : effective_sample(settings, s.tokens.keys, slot.codes),
            .warm = warm,
            .seed = settings.seed,
            .codebooks = at_.codebooks + i * plan_.codes * shape.dim,
            .labels = at_.codes + i * subspaces * shape.k_tokens,
            .empty = at_.empty + i * subspaces,
            .similarity = of_head(at_.k_similarity, i, plan_.codes),
            .status = at_.status,
            .scratch = at_.scratch};
      }
      if (!together) backend_.encode(exec_, {encode.data(), static_cast<size_t>(n)});
      for (int64_t i = 0; i < n && together; ++i) {
        const CoclusterArgs both{group[static_cast<size_t>(i)], encode[static_cast<size_t>(i)]};
        backend_.cocluster(exec_, {&both, 1});
      }
    }
    mark(Moment::other);
    if (args_.state != nullptr) move_state(s, h, n, slot, false);
    if (args_.state != nullptr && plan_.reuses()) save_labels(s, h);
  }

  // Reuse is the CPU's alone: the state is host memory, and a chunk is one head.
  int32_t* state_labels(const Sample& s, int64_t h) const {
    return StateView(plan_, args_.state, s.index).labels + h * plan_.shape.q_tokens;
  }
  int32_t* state_codes(const Sample& s, int64_t h, int64_t m) const {
    const auto subspaces = static_cast<int64_t>(plan_.partition.size());
    return StateView(plan_, args_.state, s.index).codes + (h * subspaces + m) * plan_.shape.k_tokens;
  }

  void save_labels(const Sample& s, int64_t h) {
    std::copy_n(at_.labels, plan_.shape.q_tokens, state_labels(s, h));
    for (int64_t m = 0; m < static_cast<int64_t>(plan_.partition.size()); ++m) {
      int32_t* codes = state_codes(s, h, m);
      std::fill_n(codes, plan_.shape.k_tokens, -1);
      backend_.scatter(exec_, at_.codes + m * s.tokens.keys, 0, at_.k_rows, s.tokens.keys, codes, 0, 1);
    }
  }

  // Whether the state's clusters stay as they are in this call: the step says so, and they are those of the same tokens.
  bool can_reuse(const Sample& s, const StateSlot& next) const {
    if (!plan_.reuses() || args_.state == nullptr || args_.start == Start::first ||
        !reuses_clusters(plan_.settings, args_.place) || !filled(s.index, next)) {
      return false;
    }
    const auto fits = [](const int32_t* found, const int32_t* rows, int64_t count, int64_t tokens, int32_t clusters) {
      for (int64_t t = 0, i = 0; t < tokens; ++t) {
        const bool takes_part = i < count && rows[i] == t;
        if (takes_part ? found[t] < 0 || found[t] >= clusters : found[t] != -1) return false;
        i += takes_part ? 1 : 0;
      }
      return true;
    };
    for (int64_t h = 0; h < heads_; ++h) {
      if (!fits(state_labels(s, h), at_.q_rows, s.tokens.queries, plan_.shape.q_tokens, next.groups)) return false;
      for (int64_t m = 0; m < static_cast<int64_t>(plan_.partition.size()); ++m) {
        if (!fits(state_codes(s, h, m), at_.k_rows, s.tokens.keys, plan_.shape.k_tokens, next.codes)) return false;
      }
    }
    return true;
  }

  // What group and encode write, from the state.
  void reuse(const Sample& s, int64_t h, const StateSlot& slot) {
    mark(Moment::group);
    move_state(s, h, 1, slot, true);
    std::copy_n(state_labels(s, h), plan_.shape.q_tokens, at_.labels);
    std::fill_n(at_.offsets, slot.groups + 1, 0);
    for (int64_t i = 0; i < s.tokens.queries; ++i) ++at_.offsets[at_.labels[at_.q_rows[i]] + 1];
    std::copy_n(at_.offsets + 1, slot.groups, at_.sizes);
    std::partial_sum(at_.offsets, at_.offsets + slot.groups + 1, at_.offsets);
    for (int64_t i = 0; i < s.tokens.queries; ++i) at_.order[at_.offsets[at_.labels[at_.q_rows[i]]]++] = at_.q_rows[i];
    std::copy_backward(at_.offsets, at_.offsets + slot.groups, at_.offsets + slot.groups + 1);
    at_.offsets[0] = 0;
    mark(Moment::encode);
    for (int64_t m = 0; m < static_cast<int64_t>(plan_.partition.size()); ++m) {
      const int32_t* codes = state_codes(s, h, m);
      auto* sizes = Arena(at_.scratch.data, at_.scratch.bytes).take<int32_t>(slot.codes);
      std::fill_n(sizes, slot.codes, 0);
      for (int64_t j = 0; j < s.tokens.keys; ++j) {
        at_.codes[m * s.tokens.keys + j] = codes[at_.k_rows[j]];
        ++sizes[codes[at_.k_rows[j]]];
      }
      at_.empty[m] = std::count(sizes, sizes + slot.codes, 0);
    }
    mark(Moment::other);
  }

  // score, select, attend.
  void sparse_heads(const Sample& s, int64_t h, int64_t n, const StateSlot& slot) {
    const Settings& settings = plan_.settings;
    const Shape& shape = plan_.shape;
    const int64_t words = mask_words(shape.k_tokens);
    const auto subspaces = static_cast<int64_t>(plan_.partition.size());
    const bool codes = settings.proxy == ProxyKind::codes, tail = settings.tail == Tail::first_order;
    HeadStats* report = at_.report + s.index * heads_ + h;
    if (codes) {
      mark(Moment::score);
      std::array<ScoreArgs, kMostChunk> score;
      for (int64_t i = 0; i < n; ++i) {
        score[static_cast<size_t>(i)] = {.centroids = at_.centroids + i * plan_.groups * shape.dim,
                                         .groups = slot.groups,
                                         .dim = shape.dim,
                                         .partition = &plan_.partition,
                                         .codebooks = at_.codebooks + i * plan_.codes * shape.dim,
                                         .codes = slot.codes,
                                         .scale = scale_,
                                         .tables = at_.tables + i * plan_.groups * subspaces * plan_.codes};
      }
      backend_.score(exec_, {score.data(), static_cast<size_t>(n)});
    }
    mark(Moment::select);
    const int64_t drop_words = mask_words(slot.codes);
    const bool drops = settings.tail == Tail::centroids;
    if (drops) backend_.fill(exec_, at_.tail_mask, 0, 0, n * (plan_.groups + 1) * drop_words, 1);
    std::array<SelectArgs, kMostChunk> select;
    std::array<TailArgs, kMostChunk> tails;
    for (int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(i);
      if (tail) {
        tails[at] = {args_.v.head(s.index, h + i), at_.tail_k + i * plan_.groups * shape.dim,
                     at_.tail_v + i * plan_.groups * shape.dim, at_.tail_bias + i * plan_.groups};
      }
      Proxy proxy{.kind = settings.proxy,
                  .groups = slot.groups,
                  .count = s.tokens.keys,
                  .scale = scale_,
                  .centroids = at_.centroids + i * plan_.groups * shape.dim,
                  .k = args_.k.head(s.index, h + i),
                  .rows = k_rows(s)};
      if (codes) {
        proxy.subspaces = subspaces;
        proxy.codes = slot.codes;
        proxy.tables = at_.tables + i * plan_.groups * subspaces * plan_.codes;
        proxy.labels = at_.codes + i * subspaces * shape.k_tokens;
      }
      float* errors = of_head(at_.errors, i, plan_.groups * plan_.codes);
      if (plan_.compensates()) {
        const CompensateArgs compensate{.proxy = proxy,
                                        .v = args_.v.head(s.index, h + i),
                                        .value = at_.tail_v + i * plan_.codes * shape.dim,
                                        .bias = at_.tail_bias + i * plan_.codes,
                                        .errors = errors,
                                        .scratch = at_.scratch};
        backend_.compensate(exec_, {&compensate, 1});
      }
      select[at] = {.proxy = proxy,
                    .sizes = at_.sizes + i * (plan_.groups + 1),
                    .rule = settings.rule,
                    .rho = settings.rho,
                    .alpha = least_share(settings, args_.place, h + i),
                    .density = settings.density,
                    .target = settings.target_density,
                    .q_similarity = of_head(at_.q_similarity, i, plan_.groups),
                    .k_similarity = of_head(at_.k_similarity, i, plan_.codes),
                    .similar = settings.similarity,
                    .errors = errors,
                    .counts = at_.counts + i * (plan_.groups + 1),
                    .top_p = at_.top_p + i * (plan_.groups + 1),
                    .head_budget = &report[i].head_budget,
                    .rho_used = &report[i].rho,
                    .alpha_used = &report[i].alpha,
                    .mask = at_.mask + i * (plan_.groups + 1) * words,
                    .tail = tail ? &tails[at] : nullptr,
                    .dropped = drops ? at_.tail_mask + i * (plan_.groups + 1) * drop_words : nullptr,
                    .scratch = at_.scratch};
    }
    backend_.select(exec_, {select.data(), static_cast<size_t>(n)});
    mark(Moment::other);
    backend_.finish(exec_, {.tokens = s.tokens,
                            .heads = n,
                            .groups = slot.groups,
                            .all_groups = plan_.selection_groups,
                            .row_groups = plan_.groups + 1,
                            .subspaces = subspaces,
                            .codes = slot.codes,
                            .q_rows = at_.q_rows,
                            .valid = at_.valid,
                            .labels = at_.labels,
                            .sizes = at_.sizes,
                            .counts = at_.counts,
                            .order = at_.order,
                            .offsets = at_.offsets,
                            .mask = at_.mask,
                            .empty = at_.empty,
                            .tail_groups = tail ? plan_.groups : 0,
                            .tail_bias = at_.tail_bias,
                            .tail_mask = at_.tail_mask,
                            .report = report});
    write_selection(s, h, n, slot);
    const int64_t extra = tail ? plan_.groups : drops ? slot.codes : 0;
    if (args_.out.data != nullptr) attend(s, h, n, plan_.selection_groups, s.tokens.kept > 0, extra);
  }

  // One group with every valid query and every valid key.
  void dense_heads(const Sample& s, int64_t h, int64_t n) {
    mark(Moment::other);
    clear_selection(s, h, n);
    if (sparse()) write_dense_selection(s, h, n);
    if (args_.out.data != nullptr) attend(s, h, n, 0, false, 0);
  }

  void report_dense(const Sample& s) {
    backend_.finish(exec_, {.tokens = s.tokens, .heads = heads_, .report = at_.report + s.index * heads_});
  }

  // groups == 0: dense. extra: virtual keys, one per group or one per code.
  void attend(const Sample& s, int64_t h, int64_t n, int64_t groups, bool keeps, int64_t extra) {
    mark(Moment::attend);
    const Shape& shape = plan_.shape;
    const int64_t row_groups = plan_.groups + 1, words = mask_words(shape.k_tokens);
    std::array<AttendArgs, kMostChunk> attend;
    for (int64_t i = 0; i < n; ++i) {
      AttendArgs& args = attend[static_cast<size_t>(i)];
      args = {.q = args_.q.head(s.index, h + i),
              .k = args_.k.head(s.index, h + i),
              .v = args_.v.head(s.index, h + i),
              .scale = scale_,
              .groups = std::max<int64_t>(groups, 1),
              .extra = {},
              .out = args_.out.head(s.index, h + i),
              .scratch = at_.scratch};
      if (args_.lse != nullptr) args.lse = args_.lse + (s.index * heads_ + h + i) * shape.q_tokens;
      if (groups > 0) {
        args.order = at_.order + i * shape.q_tokens;
        args.offsets = at_.offsets + i * (row_groups + 1);
        args.mask = at_.mask + i * row_groups * words;
        if (keeps) args.keep = at_.keep;
      } else {
        args.k.tokens = args.v.tokens = s.tokens.valid_k;
        if (s.tokens.valid_q < shape.q_tokens) {
          args.order = at_.q_rows;
          args.offsets = at_.all_queries;
        }
      }
      if (extra > 0) {
        const bool each_code = plan_.has_tail(Tail::centroids);
        const int64_t room = each_code ? plan_.codes : plan_.groups;
        args.extra = {extra, (each_code ? at_.codebooks : at_.tail_k) + i * room * shape.dim,
                      at_.tail_v + i * room * shape.dim, at_.tail_bias + i * room,
                      at_.tail_mask + i * row_groups * mask_words(extra)};
      }
    }
    backend_.attend(exec_, {attend.data(), static_cast<size_t>(n)});
  }

  // The workspace's heads, `room` words each, into the selection's, `wide` words each.
  void copy_rows(const void* from, int64_t room, void* to, int64_t wide, int64_t head, int64_t n) {
    if (to != nullptr) backend_.copy(exec_, from, room, static_cast<uint32_t*>(to) + head * wide, wide, wide, n);
  }
  // Words [first, first + count) of each of the selection's heads.
  void fill_rows(void* to, int64_t wide, int64_t first, int64_t count, int32_t value, int64_t head, int64_t n) {
    if (to == nullptr || count == 0) return;
    backend_.fill(exec_, static_cast<uint32_t*>(to) + head * wide + first, wide, static_cast<uint32_t>(value), count, n);
  }

  void write_selection(const Sample& s, int64_t h, int64_t n, const StateSlot& slot) {
    const SelectionOut& to = args_.selection;
    const Shape& shape = plan_.shape;
    const int64_t head = s.index * heads_ + h, words = mask_words(shape.k_tokens), groups = plan_.selection_groups;
    const int64_t row_groups = plan_.groups + 1, all_heads = shape.batch * heads_;
    copy_rows(at_.labels, shape.q_tokens, to.labels, shape.q_tokens, head, n);
    copy_rows(at_.sizes, row_groups, to.sizes, groups, head, n);
    copy_rows(at_.counts, row_groups, to.counts, groups, head, n);
    copy_rows(at_.mask, row_groups * words, to.mask, groups * words, head, n);
    const int64_t width = plan_.groups * shape.dim, used = slot.groups * shape.dim;
    copy_rows(at_.centroids, width, to.centroids, width, head, n);
    fill_rows(to.centroids, width, used, width - used, 0, head, n);
    int64_t from = 0, base = 0;
    for (size_t m = 0; m < plan_.partition.size(); ++m) {
      const auto depth = static_cast<int64_t>(plan_.partition[m].size());
      if (to.codebooks != nullptr) {
        const int64_t wide = plan_.codes * depth, filled = slot.codes * depth;
        fill_rows(to.codebooks + base, wide, filled, wide - filled, 0, head, n);
        backend_.copy(exec_, at_.codebooks + from, plan_.codes * shape.dim, to.codebooks + base + head * wide, wide, filled,
                      n);
      }
      from += slot.codes * depth;
      base += all_heads * plan_.codes * depth;
      if (to.codes == nullptr) continue;
      const auto index = static_cast<int64_t>(m);
      int32_t* codes = to.codes + (index * all_heads + head) * shape.k_tokens;
      backend_.fill(exec_, codes, 0, ~0u, n * shape.k_tokens, 1);
      backend_.scatter(exec_, at_.codes + index * s.tokens.keys,
                       static_cast<int64_t>(plan_.partition.size()) * shape.k_tokens, k_rows(s), s.tokens.keys, codes,
                       shape.k_tokens, n);
    }
  }

  // A sample without anything to select from attends densely: all its queries are the last group.
  void write_dense_selection(const Sample& s, int64_t h, int64_t n) {
    const SelectionOut& to = args_.selection;
    const int64_t groups = plan_.selection_groups, last = groups - 1, head = s.index * heads_ + h;
    const int64_t words = mask_words(plan_.shape.k_tokens);
    if (groups == 0) return;
    fill_rows(to.labels, plan_.shape.q_tokens, 0, s.tokens.valid_q, static_cast<int32_t>(last), head, n);
    fill_rows(to.sizes, groups, last, 1, static_cast<int32_t>(s.tokens.valid_q), head, n);
    fill_rows(to.counts, groups, last, 1, static_cast<int32_t>(s.tokens.keys), head, n);
    if (to.mask == nullptr) return;
    backend_.copy(exec_, at_.valid, 0, to.mask + (head * groups + last) * words, groups * words, words, n);
  }

  // A call that ran dense by its schedule selected nothing.
  void clear_selection(const Sample& s, int64_t h, int64_t n) {
    const SelectionOut& to = args_.selection;
    const Shape& shape = plan_.shape;
    const int64_t groups = plan_.selection_groups, words = mask_words(shape.k_tokens), head = s.index * heads_ + h;
    const int64_t all_heads = shape.batch * heads_;
    const auto clear = [&](void* rows, int64_t wide, int32_t value) { fill_rows(rows, wide, 0, wide, value, head, n); };
    clear(to.labels, shape.q_tokens, -1);
    clear(to.sizes, groups, 0);
    clear(to.counts, groups, 0);
    clear(to.mask, groups * words, 0);
    clear(to.centroids, plan_.groups * shape.dim, 0);
    int64_t base = 0;
    for (size_t m = 0; m < plan_.partition.size(); ++m) {
      const auto depth = static_cast<int64_t>(plan_.partition[m].size());
      if (to.codebooks != nullptr) clear(to.codebooks + base, plan_.codes * depth, 0);
      base += all_heads * plan_.codes * depth;
      if (to.codes != nullptr) clear(to.codes + static_cast<int64_t>(m) * all_heads * shape.k_tokens, shape.k_tokens, -1);
    }
  }

  const Plan& plan_;
  const CallArgs& args_;
  const Backend& backend_;
  Exec exec_;
  Workspace at_;
  int64_t heads_;
  CallStats stats_;
  bool selected_ = false, reused_ = false;
  float scale_ = 0;
  std::chrono::steady_clock::time_point start_, since_;
  Moment moment_ = Moment::end;
  double seconds_[kMoments] = {};
};

}  // namespace

void call(const Plan& plan, const CallArgs& args) {
  const bool attends = args.out.data != nullptr || plan.shape.q_tokens == 0;
  check_args(plan, args, attends);
  require(attends || !plan.settings.dense, Status::invalid_argument, "out: got null, and method dense selects nothing");
  require(attends || args.lse == nullptr, Status::invalid_argument, "lse: got one without out");
  require(attends || (plan.settings.tail == Tail::none && !plan.compensates()), Status::invalid_argument,
          "out: got null, and tail {} with rule {} needs v and out", get_setting(plan.settings, "tail"),
          get_setting(plan.settings, "rule"));
  if (args.state != nullptr) {
    require(!plan.settings.dense, Status::invalid_argument, "state: got one, and method dense keeps none");
    if (plan.exec.device == nullptr) check_state(plan, args.state);
  }
  Call(plan, args).run();
}

void read_stats(const Plan& plan, const CallArgs& args) {
  const Workspace at = plan.layout(args.workspace, args.workspace_bytes);
  const int64_t heads = plan.shape.batch * plan.shape.heads;
  if (plan.exec.device == nullptr) {
    if (args.head_stats != nullptr) std::copy_n(at.report, heads, args.head_stats);
    return;
  }
  Exec exec = plan.exec;
  exec.stream = args.stream;
  exec.call = args.workspace;
  const DeviceScope scope(plan, exec);
  uint32_t status = 0;
  std::vector<HeadStats> report(static_cast<size_t>(heads));
  plan.backend->read(exec, at.status, &status, sizeof status);
  plan.backend->read(exec, at.report, report.data(), heads * static_cast<int64_t>(sizeof(HeadStats)));
  if (args.stats != nullptr) {
    set_densities(report.data(), heads, *args.stats);
    double seconds[kMoments];
    if (plan.backend->times(exec, seconds)) set_times(seconds, *args.stats);
  }
  if (args.head_stats != nullptr) std::copy_n(report.data(), heads, args.head_stats);
  require((status & kStateNotStarted) == 0, Status::invalid_argument,
          "state: a warm call found one that was not initialised for this plan, or not filled by a first call; its output "
          "means nothing");
  require((status & kNotFinite) == 0 || !plan.settings.check_finite, Status::non_finite,
          "q or k: a row that was to be clustered holds NaN or Inf, or its norm overflows; such rows were left out");
}

void attend_selected(const Plan& plan, const CallArgs& args, const SelectedArgs& selected) {
  check_args(plan, args, true);
  require(!plan.settings.dense, Status::invalid_argument, "plan: method dense has no selection");
  require(selected.labels != nullptr && selected.mask != nullptr, Status::invalid_argument,
          "selection: labels and mask are needed, got null");
  if (plan.exec.device != nullptr) {  // what is in device memory cannot be refused: it is dropped, see ImportArgs
    Call(plan, args).run_selected(selected);
    return;
  }
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
