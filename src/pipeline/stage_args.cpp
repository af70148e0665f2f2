// Fills every stage's argument struct from plan, call and workspace.
#include "pipeline/stage_args.h"

#include <algorithm>

namespace scope {

namespace {

// The workspace's arrays, as the stages take them.
PerHead<float> centroids(const Frame& f) { return {f.at.centroids, f.plan.groups * f.plan.shape.dim}; }
PerHead<float> codebooks(const Frame& f) { return {f.at.codebooks, f.plan.codes * f.plan.shape.dim}; }
PerHead<int32_t> codes(const Frame& f) { return {f.at.codes, f.plan.subspaces() * f.plan.shape.k_tokens}; }
PerHead<int32_t> sizes(const Frame& f) { return {f.at.sizes, f.plan.groups + 1}; }
PerHead<float> tables(const Frame& f) { return {f.at.tables, f.plan.groups * f.plan.subspaces() * f.plan.codes}; }
PerHead<float> errors(const Frame& f) { return {f.at.errors, f.plan.groups * f.plan.codes}; }
PerHead<uint32_t> mask(const Frame& f) { return {f.at.mask, (f.plan.groups + 1) * mask_words(f.plan.shape.k_tokens)}; }

PerHead<float> tail_k(const Frame& f) { return {f.at.tail_k, f.plan.groups * f.plan.shape.dim}; }
PerHead<float> tail_v(const Frame& f) { return {f.at.tail_v, f.plan.tail_values() * f.plan.shape.dim}; }
PerHead<float> tail_bias(const Frame& f) { return {f.at.tail_bias, f.plan.tail_values()}; }
PerHead<float> tail_share(const Frame& f) { return {f.at.tail_share, f.plan.groups + 1}; }
PerHead<float> part_centroids(const Frame& f) {
  return {f.at.part_centroids, f.plan.groups * f.plan.parts() * f.plan.shape.dim};
}
PerHead<int32_t> part_labels(const Frame& f) { return {f.at.part_labels, f.plan.shape.q_tokens}; }
PerHead<int32_t> part_sizes(const Frame& f) { return {f.at.part_sizes, f.plan.groups * f.plan.parts()}; }
PerHead<float> log_mass(const Frame& f) { return {f.at.log_mass, f.plan.groups}; }
// Whether keep says what share of the mass each group drops.
bool keep_weighs(const Frame& f) { return f.plan.tail().splits && f.plan.selects_exact_keys(); }
PerHead<uint32_t> tail_mask(const Frame& f, const StateSlot& slot) {
  return {f.at.tail_mask, (f.plan.groups + 1) * mask_words(f.plan.tail().per_group ? slot.groups : slot.codes)};
}

// Videos do not tell one, two and three apart (docs/notebook/choices.md).
constexpr int kSplitRounds = 2;

Proxy proxy(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot) {
  Proxy proxy{.kind = f.plan.settings.proxy,
              .groups = slot.groups,
              .count = s.tokens.keys,
              .scale = f.scale,
              .centroids = centroids(f),
              .k = f.args.k.from(s.index, chunk.first),
              .rows = f.k_rows(s)};
  if (row(f.plan.settings.proxy).codes) {
    proxy.subspaces = f.plan.subspaces();
    proxy.codes = slot.codes;
    proxy.tables = tables(f);
    proxy.labels = codes(f);
  }
  return proxy;
}

// Which tokens a sample has changes from step to step and from layer to layer, and not from run to run.
int64_t sample_phase(const Frame& f) {
  return std::max<int64_t>(f.args.place.layer, 0) + std::max<int64_t>(f.args.place.step, 0);
}

// Tokens that all but the last full_iterations see.
int64_t seen(const Frame& f, const Start& start, int64_t tokens, int64_t clusters) {
  return effective_sample(start.warm ? f.plan.settings.warm_sample : f.plan.settings.first_sample, tokens, clusters);
}
// A warm call's centroids have seen all tokens before.
int full_iterations(const Start& start) { return start.warm ? 1 : 2; }
// No two steps of a layer share a draw.
uint64_t first_draw(const Frame& f, const Start& start) {
  return start.warm ? static_cast<uint64_t>(sample_phase(f)) * static_cast<uint64_t>(f.plan.settings.iterations) : 0;
}

HeadStats* report(const Frame& f, const Sample& s, Chunk chunk) {
  return f.report + s.index * f.plan.shape.heads + chunk.first;
}

// One field of every head's report.
template <class T>
PerHead<T> field(T* first) {
  static_assert(sizeof(HeadStats) % sizeof(T) == 0);
  return {first, static_cast<int64_t>(sizeof(HeadStats) / sizeof(T))};
}

AttendArgs attend_all(const Frame& f, const Sample& s, Chunk chunk) {
  const int64_t nq = f.plan.shape.q_tokens, head = s.index * f.plan.shape.heads + chunk.first;
  return {.heads = chunk.count,
          .q = f.args.q.from(s.index, chunk.first),
          .k = f.args.k.from(s.index, chunk.first),
          .v = f.args.v.from(s.index, chunk.first),
          .scale = f.scale,
          .groups = 1,
          .valid = s.tokens.valid_k < f.plan.shape.k_tokens ? f.at.valid : nullptr,
          .products = f.plan.settings.products,
          .out = f.args.out.from(s.index, chunk.first),
          .lse = {f.args.lse == nullptr ? nullptr : f.args.lse + head * nq, nq},
          .scratch = f.at.scratch};
}

}  // namespace

int iterations_of(const Settings& settings, const Start& start) {
  const bool encodes = start.slot.codes > 0 && row(settings.encode).iterates;
  if (!row(settings.group).iterates && !encodes) return 0;
  return start.warm || row(settings.group).with_keys ? settings.iterations : settings.first_iterations;
}

GroupArgs group_args(const Frame& f, const Sample& s, Chunk chunk, const Start& start) {
  const Settings& settings = f.plan.settings;
  const int64_t groups = start.slot.groups;
  return {.heads = chunk.count,
          .q = f.args.q.from(s.index, chunk.first),
          .rows = f.q_rows(s),
          .count = s.tokens.queries,
          .groups = groups,
          .grouping = settings.group,
          .block = settings.q_block,
          .iterations = iterations_of(settings, start),
          .sample = seen(f, start, s.tokens.queries, groups),
          .full_iterations = full_iterations(start),
          .draw = first_draw(f, start),
          .warm = start.warm,
          .seed = settings.seed,
          .centroids = centroids(f),
          .labels = {f.at.labels, f.plan.shape.q_tokens},
          .sizes = sizes(f),
          .order = {f.at.order, f.plan.shape.q_tokens},
          .offsets = {f.at.offsets, f.plan.groups + 2},
          .similarity = {f.at.q_similarity, f.plan.groups},
          .status = f.status,
          .scratch = f.at.scratch};
}

SplitArgs split_args(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot) {
  return {.heads = chunk.count,
          .q = f.args.q.from(s.index, chunk.first),
          .groups = slot.groups,
          .parts = f.plan.parts(),
          .order = {f.at.order, f.plan.shape.q_tokens},
          .offsets = {f.at.offsets, f.plan.groups + 2},
          .rounds = kSplitRounds,
          .centroids = part_centroids(f),
          .sizes = part_sizes(f),
          .labels = part_labels(f),
          .scratch = f.at.beside_weights};
}

EncodeArgs encode_args(const Frame& f, const Sample& s, Chunk chunk, const Start& start) {
  const Settings& settings = f.plan.settings;
  const int64_t most = start.slot.codes;
  return {.heads = chunk.count,
          .k = f.args.k.from(s.index, chunk.first),
          .rows = f.k_rows(s),
          .count = s.tokens.keys,
          .partition = &f.plan.partition,
          .codes = most,
          .encoding = settings.encode,
          .block = settings.k_block,
          .iterations = iterations_of(settings, start),
          .sample = seen(f, start, s.tokens.keys, most),
          .full_iterations = full_iterations(start),
          .draw = first_draw(f, start),
          .warm = start.warm,
          .seed = settings.seed,
          .codebooks = codebooks(f),
          .labels = codes(f),
          .empty = {f.at.empty, f.plan.subspaces()},
          .similarity = {f.at.k_similarity, f.plan.codes},
          .status = f.status,
          .scratch = f.at.scratch};
}

ScoreArgs score_args(const Frame& f, Chunk chunk, const StateSlot& slot) {
  return {.heads = chunk.count,
          .centroids = centroids(f),
          .groups = slot.groups,
          .dim = f.plan.shape.dim,
          .partition = &f.plan.partition,
          .codebooks = codebooks(f),
          .codes = slot.codes,
          .scale = f.scale,
          .tables = tables(f)};
}

CompensateArgs compensate_args(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot) {
  return {.heads = chunk.count,
          .proxy = proxy(f, s, chunk, slot),
          .v = f.args.v.from(s.index, chunk.first),
          .value = tail_v(f),
          .bias = tail_bias(f),
          .errors = errors(f),
          .scratch = f.at.scratch};
}

namespace {

// The weights of a chunk's heads. Those of a sample lie one after the other, as far apart as its own sizes ask for.
Scratch weights(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot) {
  if (!f.plan.solves_sample()) return f.at.weights;
  const int64_t before = f.backend.weights_bytes(f.exec, {.heads = chunk.first,
                                                          .k_tokens = s.tokens.keys,
                                                          .dim = f.plan.shape.dim,
                                                          .groups = slot.groups,
                                                          .codes = slot.codes,
                                                          .whole_codes = f.plan.rule().whole_codes});
  return {static_cast<std::byte*>(f.at.weights.data) + before, f.at.weights.bytes - before};
}

// What the least shares of a sample's heads have as their mean.
double mean_alpha(const Frame& f) {
  const Settings& settings = f.plan.settings;
  if (!f.plan.solves_sample()) return 0;
  if (settings.profile == nullptr) return settings.alpha;
  double sum = 0;
  for (int64_t h = 0; h < f.plan.shape.heads; ++h) sum += least_share(settings, f.args.place, h);
  return sum / static_cast<double>(f.plan.shape.heads);
}

}  // namespace

WeighArgs weigh_args(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot, const double* alpha) {
  const Settings& settings = f.plan.settings;
  const int64_t stride = s.tokens.keys / f.plan.select_stride() < kFewestSampledKeys ? 1 : f.plan.select_stride();
  return {.heads = chunk.count,
          .proxy = proxy(f, s, chunk, slot),
          .sizes = sizes(f),
          .rule = settings.rule,
          .rho = settings.rho,
          .alpha = settings.profile == nullptr ? f.plan.alphas.data() : alpha,
          .density = density_at(settings, f.args.place, settings.density),
          .target = settings.target_density == 0 ? 0 : density_at(settings, f.args.place, settings.target_density),
          .mean_alpha = mean_alpha(f),
          .alpha_first = settings.alpha_first,
          .stride = stride,
          .phase = stride == 1 ? 0 : sample_phase(f) % stride,
          .q_similarity = {f.at.q_similarity, f.plan.groups},
          .k_similarity = {f.at.k_similarity, f.plan.codes},
          .similar = settings.similarity,
          .errors = errors(f),
          .top_p = {f.at.top_p, f.plan.groups + 1},
          .weights = weights(f, s, chunk, slot),
          .scratch = f.at.beside_weights};
}

SolveArgs solve_args(const Frame& f, const Sample& s, const StateSlot& slot) {
  SolveArgs solve{
      .weighed = weigh_args(f, s, {0, f.plan.shape.heads}, slot, nullptr), .rho = f.at.rho, .scratch = f.at.scratch};
  solve.weighed.top_p = {};  // a chunk's, like the scratch
  solve.weighed.scratch = {};
  return solve;
}

KeepArgs keep_args(const Frame& f, const Sample& s, Chunk chunk, const WeighArgs& weighed) {
  HeadStats* first = report(f, s, chunk);
  const bool weighs = keep_weighs(f);
  return {.weighed = weighed,
          .rho = f.at.rho,
          .counts = {f.at.counts, f.plan.groups + 1},
          .head_budget = field(&first->head_budget),
          .rho_used = field(&first->rho),
          .alpha_used = field(&first->alpha),
          .mask = mask(f),
          .dropped = weighs ? tail_share(f) : PerHead<float>(),
          .log_mass = weighs ? log_mass(f) : PerHead<float>()};
}

TailArgs tail_args(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot) {
  Parts parts;
  if (f.plan.tail().splits) {
    parts = {.each = f.plan.parts(),
             .centroids = part_centroids(f),
             .sizes = part_sizes(f),
             .stride = f.plan.settings.tail_stride,
             .phase = sample_phase(f),  // of every head, so that ranks give the bits of one
             .log_mass = keep_weighs(f) ? log_mass(f) : PerHead<float>()};
  }
  return {.heads = chunk.count,
          .tail = f.plan.settings.tail,
          .proxy = proxy(f, s, chunk, slot),
          .v = f.args.v.from(s.index, chunk.first),
          .sizes = sizes(f),
          .kept = mask(f),
          .weight = f.plan.settings.tail_weight,
          .keep = s.tokens.kept > 0 ? f.at.keep : nullptr,
          .centred = f.plan.codes > 0 && !row(f.plan.settings.encode).means,
          .rows = f.plan.selection_groups,
          .k = tail_k(f),
          .value = tail_v(f),
          .bias = tail_bias(f),
          .mask = tail_mask(f, slot),
          .share = tail_share(f),
          .parts = parts,
          .scratch = f.at.scratch};
}

FinishArgs finish_args(const Frame& f, const Sample& s, Chunk chunk, const StateSlot& slot) {
  return {.tokens = s.tokens,
          .heads = chunk.count,
          .groups = slot.groups,
          .all_groups = f.plan.selection_groups,
          .row_groups = f.plan.groups + 1,
          .subspaces = f.plan.subspaces(),
          .codes = slot.codes,
          .q_rows = f.at.q_rows,
          .valid = f.at.valid,
          .labels = f.at.labels,
          .sizes = f.at.sizes,
          .counts = f.at.counts,
          .order = f.at.order,
          .offsets = f.at.offsets,
          .mask = f.at.mask,
          .empty = f.at.empty,
          .report = report(f, s, chunk)};
}

FinishArgs finish_dense_args(const Frame& f, const Sample& s) {
  return {.tokens = s.tokens, .heads = f.plan.shape.heads, .report = report(f, s, {0, 0})};
}

AttendArgs attend_args(const Frame& f, const Sample& s, Chunk chunk) {
  AttendArgs attend = attend_all(f, s, chunk);
  attend.groups = f.plan.selection_groups;
  attend.order = {f.at.order, f.plan.shape.q_tokens};
  attend.offsets = {f.at.offsets, f.plan.groups + 2};
  attend.mask = mask(f);
  if (s.tokens.kept > 0) attend.keep = f.at.keep;
  return attend;
}

void add_tail(const Frame& f, const StateSlot& slot, AttendArgs& attend) {
  if (f.plan.tail().per_group) attend.extra = {slot.groups, tail_k(f), tail_v(f), tail_bias(f), tail_mask(f, slot)};
  if (f.plan.tail().per_code) attend.extra = {slot.codes, codebooks(f), tail_v(f), tail_bias(f), tail_mask(f, slot)};
  if (f.plan.tail().mixes) attend.mix = {.share = tail_share(f), .row = tail_v(f)};
  if (f.plan.tail().splits) {
    attend.mix.part = part_labels(f);
    attend.mix.follow = static_cast<float>(f.plan.settings.tail_follow);
  }
}

AttendArgs attend_dense_args(const Frame& f, const Sample& s, Chunk chunk) {
  AttendArgs attend = attend_all(f, s, chunk);
  if (s.tokens.valid_q < f.plan.shape.q_tokens) {
    attend.order = f.at.q_rows;
    attend.offsets = f.at.all_queries;
  }
  if (s.prefix_valid) {
    attend.k.tokens = attend.v.tokens = s.tokens.valid_k;
    attend.valid = nullptr;  // every key that is left is valid
  } else {
    // Holes among the keys.
    attend.mask = f.at.valid;
    if (s.tokens.kept > 0) attend.keep = f.at.keep;
  }
  return attend;
}

}  // namespace scope
