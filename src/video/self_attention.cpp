// The plan and the states of self-attention, and one call of it.
#include "video/self_attention.h"

#include <algorithm>
#include <utility>

#include "core/numeric.h"
#include "methods/methods.h"

namespace scope::video {

namespace {

int64_t branches_with_states(const Settings& settings, int64_t branches) {
  return settings.method->shares_branches ? 1 : branches;
}

// An error of a call says which one it was.
template <class Body>
void name_place(const CallReport& call, Body body) {
  try {
    body();
  } catch (const Error& error) {
    fail(error.status(), "step {}, layer {}{}: {}", call.step, call.layer, call.branch == 0 ? "" : ", negative prompt",
         error.what());
  }
}

}  // namespace

Shape attention_shape(const ModelConfig& config, const std::array<int64_t, 3>& grid, DType dtype) {
  return {.heads = config.heads,
          .q_tokens = config.tokens(grid),
          .k_tokens = config.tokens(grid),
          .dim = config.head_dim,
          .dtype = dtype,
          .rope = config.rope,
          .subspaces = {},
          .dense_queries = config.text_tokens > 0};
}

SelfAttention::SelfAttention(Engine& engine, const ModelConfig& config, const Settings& settings,
                             const std::array<int64_t, 3>& grid, int64_t branches)
    : engine_(engine),
      config_(config),
      plan_(engine.context, settings, attention_shape(config, grid, engine.attention)),
      workspace_(engine.allocate(plan_.workspace_bytes)),
      branches_(branches_with_states(settings, branches)),
      reports_(engine.allocate(plan_.report_bytes * config.layers * branches)) {
  for (int64_t i = 0; i < config.layers * branches; ++i) clocks_.push_back(plan_.backend->make_clock());
  for (int64_t i = 0; i < config.layers * branches_ && plan_.state_bytes > 0; ++i) {
    state_memory_.push_back(engine.allocate(plan_.state_bytes));
  }
  forget();
}

int64_t SelfAttention::bytes(const Engine& engine, const ModelConfig& config, const Settings& settings,
                             const std::array<int64_t, 3>& grid, int64_t branches) {
  const Plan plan(engine.context, settings, attention_shape(config, grid, engine.attention));
  return plan.workspace_bytes + plan.report_bytes * config.layers * branches +
         plan.state_bytes * config.layers * branches_with_states(settings, branches);
}

void SelfAttention::forget() {
  states_.clear();
  for (const Buffer& memory : state_memory_) states_.emplace_back(plan_, memory.get());
}

std::vector<std::vector<std::byte>> SelfAttention::save() const {
  std::vector<std::vector<std::byte>> saved;
  for (const State& state : states_) {
    saved.emplace_back(static_cast<size_t>(state.bytes()));
    state.save(engine_.stream, saved.back().data());
  }
  return saved;
}

void SelfAttention::load(const std::vector<std::vector<std::byte>>& saved) {
  require(saved.size() == states_.size(), Status::format, "states: got {}, expected {}", saved.size(), states_.size());
  for (size_t i = 0; i < saved.size(); ++i) states_[i].load(engine_.stream, saved[i]);
}

CallArgs SelfAttention::args_of(CallReport& report, size_t slot) const {
  CallArgs args;
  args.stream = engine_.stream;
  args.workspace = workspace_.get();
  args.workspace_bytes = plan_.workspace_bytes;
  args.report = static_cast<std::byte*>(reports_.get()) + static_cast<int64_t>(slot) * plan_.report_bytes;
  args.clock = clocks_[slot].get();
  args.stats = &report.stats;
  return args;
}

void SelfAttention::run(const Place& place, int64_t branch, Matrix q, Matrix k, Matrix v, Matrix out,
                        const TextTokens& text) {
  const size_t slot = queued_.size();
  require(slot < clocks_.size(), Status::internal, "self-attention: the reports of {} calls were not taken", slot);
  CallReport report{place.step, place.layer, branch, {}, {}};
  CallArgs args = args_of(report, slot);
  args.q = view(q);
  args.k = view(k);
  args.v = view(v);
  const TensorView to = view(out);
  args.out = {out.data, to.dtype, to.batch, to.heads, to.tokens, to.dim, to.batch_stride, to.head_stride, to.token_stride};
  const int64_t valid = q.rows - text.padding;
  std::vector<uint32_t> text_bits(static_cast<size_t>(mask_words(q.rows)));
  for (int64_t i = text.first; i < std::min(text.first + text.count, valid); ++i) set_mask_bit(text_bits.data(), i);
  if (text.count > 0) args.keep = args.dense_queries = text_bits.data();
  if (text.padding > 0) args.q_lengths = args.k_lengths = &valid;
  args.place = place;
  const auto state = static_cast<size_t>(place.layer * branches_ + std::min(branch, branches_ - 1));
  args.state = states_.empty() ? nullptr : &states_[state];
  name_place(report, [&] { call(plan_, args); });
  queued_.push_back(std::move(report));
}

std::vector<CallReport> SelfAttention::take_reports() {
  std::vector<CallReport> reports = std::exchange(queued_, {});
  for (size_t i = 0; i < reports.size(); ++i) {  // the first waits for all of them
    reports[i].heads.resize(static_cast<size_t>(config_.heads));
    CallArgs args = args_of(reports[i], i);
    args.head_stats = reports[i].heads.data();
    name_place(reports[i], [&] { read_stats(plan_, args); });
  }
  return reports;
}

TensorView SelfAttention::view(Matrix x) const {
  return {x.data, x.dtype, 1, config_.heads, x.rows, config_.head_dim, x.rows * x.columns, config_.head_dim, x.columns};
}

}  // namespace scope::video
