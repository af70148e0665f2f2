// Makes calls on the host or a device, and measures them.
#include "runner.h"

namespace scope::cli {

Runner::Runner(const Context& context, const Settings& settings, const Shape& shape) : plan_(context, settings, shape) {
  workspace_ = make_memory(plan_.workspace_bytes);
  const int64_t heads = shape.batch * shape.heads;
  out.resize(static_cast<size_t>(heads * shape.q_tokens * shape.dim * dtype_bytes(shape.dtype)));
  head_stats.resize(static_cast<size_t>(heads));
}

Runner::Memory Runner::make_memory(int64_t bytes) const {
  const DeviceScope scope(plan_);
  return {plan_.backend->allocate(plan_.exec, bytes), plan_.backend->release};
}

void Runner::want_selection() {
  const Shape& shape = plan_.shape;
  const auto heads = static_cast<size_t>(shape.batch * shape.heads);
  const auto groups = static_cast<size_t>(plan_.selection_groups), words = static_cast<size_t>(mask_words(shape.k_tokens));
  labels.resize(heads * static_cast<size_t>(shape.q_tokens));
  sizes.resize(heads * groups);
  counts.resize(heads * groups);
  mask.resize(heads * groups * words);
  keep.resize(static_cast<size_t>(shape.batch) * words);
  centroids.resize(heads * static_cast<size_t>(plan_.groups * shape.dim));
  codebooks.resize(heads * static_cast<size_t>(plan_.codes * shape.dim));
  codes.resize(heads * plan_.partition.size() * static_cast<size_t>(shape.k_tokens));
}

void Runner::take_selection(const std::vector<int32_t>& labels_given, const std::vector<uint32_t>& mask_given,
                            const std::vector<uint32_t>& keep_given) {
  given_ = true;
  labels = labels_given;
  mask = mask_given;
  keep = keep_given;
}

void Runner::launch(const CallArgs& args, const SelectedArgs& selected) const {
  if (given_) {
    attend_selected(plan_, args, selected);
  } else {
    call(plan_, args);
  }
}

void Runner::init_state() {
  if (plan_.state_bytes == 0) return;
  if (state_memory_ == nullptr) state_memory_ = make_memory(plan_.state_bytes);
  state_.emplace(plan_, state_memory_.get());
}

std::vector<std::byte> Runner::save_state() const {
  if (!state_) return {};
  std::vector<std::byte> saved(static_cast<size_t>(state_->bytes()));
  state_->save(nullptr, saved.data());
  return saved;
}

void Runner::load_state(std::span<const std::byte> saved) { state_->load(nullptr, saved); }

void Runner::run(CallArgs args) {
  const Shape& shape = plan_.shape;
  const int64_t tokens = shape.q_tokens, dim = shape.dim;
  args.out = {out.data(), shape.dtype, shape.batch, shape.heads, tokens, dim, shape.heads * tokens * dim, tokens * dim, dim};
  if (!attend) args.out = {};
  args.workspace = workspace_.get();
  args.workspace_bytes = plan_.workspace_bytes;
  args.state = state_ ? &*state_ : nullptr;
  if (!labels.empty() && !given_) {
    args.selection = {labels.data(),
                      sizes.data(),
                      counts.data(),
                      mask.data(),
                      keep.data(),
                      centroids.data(),
                      codebooks.empty() ? nullptr : codebooks.data(),
                      codes.empty() ? nullptr : codes.data()};
  }
  args.stats = &stats;
  if (!plan_.context.host()) return run_on_device(args);
  args.head_stats = head_stats.data();
  launch(args, {labels.data(), mask.data(), keep.empty() ? nullptr : keep.data()});
}

void Runner::run_on_device(CallArgs args) {
  const DeviceScope scope(plan_);
  const Backend& backend = *plan_.backend;
  const Shape& shape = plan_.shape;
  const int64_t heads = shape.batch * shape.heads, each = dtype_bytes(shape.dtype);
  const bool fresh = device_.uploaded != args.q.data;
  const auto input = [&](Memory& memory, TensorView& x) {
    const int64_t bytes = heads * x.tokens * x.dim * each;
    if (fresh) {
      memory = make_memory(bytes);
      backend.write(plan_.exec, x.data, memory.get(), bytes);
    }
    x.data = memory.get();
  };
  const void* source = args.q.data;
  input(device_.q, args.q);
  input(device_.k, args.k);
  input(device_.v, args.v);
  device_.uploaded = source;
  // Device memory for a host array, and a copy of the result into it at the end.
  std::vector<std::function<void()>> fetches;
  const auto output = [&](Memory& memory, auto*& pointer, int64_t bytes) {
    if (pointer == nullptr || bytes == 0) return;
    if (memory == nullptr) memory = make_memory(bytes);
    fetches.push_back([&, from = memory.get(), to = pointer, bytes] { backend.read(plan_.exec, from, to, bytes); });
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(memory.get());
  };
  output(device_.out, args.out.data, static_cast<int64_t>(out.size()));
  output(device_.lse, args.lse, heads * shape.q_tokens * 4);
  SelectionOut& s = args.selection;
  const auto bytes = [](const auto& x) { return static_cast<int64_t>(x.size() * sizeof(x[0])); };
  output(device_.labels, s.labels, bytes(labels));
  output(device_.sizes, s.sizes, bytes(sizes));
  output(device_.counts, s.counts, bytes(counts));
  output(device_.mask, s.mask, bytes(mask));
  output(device_.keep, s.keep, bytes(keep));
  output(device_.centroids, s.centroids, bytes(centroids));
  output(device_.codebooks, s.codebooks, bytes(codebooks));
  output(device_.codes, s.codes, bytes(codes));
  SelectedArgs selected;
  const auto given = [&](Memory& memory, auto*& pointer, const auto& values) {
    if (!given_ || values.empty()) return;
    memory = make_memory(bytes(values));
    backend.write(plan_.exec, values.data(), memory.get(), bytes(values));
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(memory.get());
  };
  given(device_.labels, selected.labels, labels);
  given(device_.mask, selected.mask, mask);
  given(device_.keep, selected.keep, keep);
  launch(args, selected);
  args.head_stats = head_stats.data();
  read_stats(plan_, args);
  if (!fetch) return;
  for (const auto& take : fetches) take();
}

Quality measure(const Context& context, const Qkv& qkv, const Runner& runner, bool dense, int64_t samples,
                const ExactHeads* exact) {
  std::vector<Quality> heads;
  const Shape& shape = runner.plan().shape;
  const int64_t words = mask_words(shape.k_tokens), groups = runner.plan().selection_groups;
  const TensorView out{runner.out.data(),
                       shape.dtype,
                       shape.batch,
                       shape.heads,
                       shape.q_tokens,
                       shape.dim,
                       shape.heads * shape.q_tokens * shape.dim,
                       shape.q_tokens * shape.dim,
                       shape.dim};
  for (int64_t b = 0; b < qkv.batch; ++b) {
    for (int64_t h = 0; h < qkv.heads; ++h) {
      const int64_t head = b * qkv.heads + h;
      HeadSelection selection;
      if (!dense) {
        selection = {runner.labels.data() + head * shape.q_tokens, runner.mask.data() + head * groups * words,
                     runner.keep.empty() ? nullptr : runner.keep.data() + b * words};
      }
      ThreadPool& pool = *context.exec().pool;
      heads.push_back(exact != nullptr
                          ? measure_head(pool, (*exact)[static_cast<size_t>(head)], out.head(b, h), selection)
                          : measure_head(pool, qkv.view(qkv.q, qkv.q_tokens).head(b, h),
                                         qkv.view(qkv.k, qkv.k_tokens).head(b, h), qkv.view(qkv.v, qkv.k_tokens).head(b, h),
                                         out.head(b, h), selection, samples));
    }
  }
  return mean_quality(heads.data(), static_cast<int64_t>(heads.size()));
}

nlohmann::ordered_json stats_json(const Runner& runner) {
  const CallStats& s = runner.stats;
  const Plan& plan = runner.plan();
  nlohmann::ordered_json json{{"ran", reason_text(s.reason)},
                              {"warm", s.warm},
                              {"iterations", s.iterations},
                              {"arithmetic", s.arithmetic},
                              {"kernel", s.kernel},
                              {"instruction_set", plan.context.instruction_set()},
                              {"threads", plan.context.threads()},
                              {"density", s.density},
                              {"total_density", s.total_density},
                              {"workspace_bytes", plan.workspace_bytes},
                              {"state_bytes", plan.state_bytes},
                              {"seconds",
                               {{"check", s.check},
                                {"group", s.group},
                                {"encode", s.encode},
                                {"score", s.score},
                                {"select", s.select},
                                {"attend", s.attend},
                                {"total", s.total}}}};
  for (size_t i = 0; i < runner.head_stats.size(); ++i) {
    const HeadStats& h = runner.head_stats[i];
    nlohmann::ordered_json head{{"batch", static_cast<int64_t>(i) / plan.shape.heads},
                                {"head", static_cast<int64_t>(i) % plan.shape.heads},
                                {"density", h.density},
                                {"total_density", h.total_density},
                                {"rho", h.rho},
                                {"alpha", h.alpha},
                                {"k_head", h.head_budget},
                                {"queries", h.queries},
                                {"keys", h.keys},
                                {"groups", h.groups},
                                {"codes", h.codes},
                                {"empty_groups", h.empty_groups},
                                {"empty_codes", h.empty_codes},
                                {"min_count", h.min_count},
                                {"max_count", h.max_count}};
    if (!runner.sizes.empty()) {
      const auto groups = static_cast<size_t>(plan.selection_groups);
      head["group_sizes"] = std::vector<int32_t>(runner.sizes.begin() + i * groups, runner.sizes.begin() + (i + 1) * groups);
    }
    json["heads"].push_back(head);
  }
  return json;
}

}  // namespace scope::cli
