// The parts that the commands share.
#include "common.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <numeric>

#include "core/numeric.h"
#include "stages/backends.h"

namespace scope::cli {

namespace {

DType dtype_of(const char* name, const io::Array& array) {
  switch (array.type) {
    case io::ElementType::f32:
      return DType::f32;
    case io::ElementType::f16:
      return DType::f16;
    case io::ElementType::bf16:
      return DType::bf16;
    default:
      fail(Status::dtype, "{}: got {}, expected f32, f16 or bf16", name, io::element_name(array.type));
  }
}

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// With every string and key as utf8_text gives it.
nlohmann::ordered_json escaped(const nlohmann::ordered_json& json) {
  if (json.is_string()) return utf8_text(json.get<std::string>());
  if (!json.is_structured()) return json;
  nlohmann::ordered_json out = json.is_array() ? nlohmann::ordered_json::array() : nlohmann::ordered_json::object();
  for (const auto& [key, value] : json.items()) {
    if (json.is_array()) {
      out.push_back(escaped(value));
    } else {
      out[utf8_text(key)] = escaped(value);
    }
  }
  return out;
}

}  // namespace

TensorView Qkv::view(const io::Array& x, int64_t tokens) const {
  return {x.data.data(), dtype, batch, heads, tokens, dim, heads * tokens * dim, tokens * dim, dim};
}

Qkv make_qkv_input(io::Array q, io::Array k, io::Array v) {
  Qkv out;
  out.dtype = dtype_of("q", q);
  for (const auto& [name, array] : {std::pair<const char*, const io::Array&>{"k", k}, {"v", v}}) {
    require(dtype_of(name, array) == out.dtype, Status::dtype, "{}: got {}, expected q's {}", name,
            io::element_name(array.type), dtype_name(out.dtype));
  }
  require(q.shape.size() == 3 || q.shape.size() == 4, Status::shape,
          "q: got shape {}, expected [batch, heads, tokens, dim] or [heads, tokens, dim]", shape_text(q.shape));
  require(k.shape.size() == q.shape.size(), Status::shape, "k: got shape {}, expected the rank of q's {}",
          shape_text(k.shape), shape_text(q.shape));
  require(v.shape == k.shape, Status::shape, "v: got shape {}, expected k's {}", shape_text(v.shape), shape_text(k.shape));
  const size_t at = q.shape.size() - 3;
  out.batched = at == 1;
  out.batch = out.batched ? q.shape[0] : 1;
  out.heads = q.shape[at];
  out.q_tokens = q.shape[at + 1];
  out.dim = q.shape[at + 2];
  out.k_tokens = k.shape[at + 1];
  require((!out.batched || k.shape[0] == out.batch) && k.shape[at] == out.heads && k.shape[at + 2] == out.dim, Status::shape,
          "k: got shape {}, expected q's {} but for the token count", shape_text(k.shape), shape_text(q.shape));
  out.q = std::move(q);
  out.k = std::move(k);
  out.v = std::move(v);
  return out;
}

Qkv synthetic_qkv(const SyntheticSpec& spec, const std::string& dtype, ThreadPool& pool, const std::function<void()>& done) {
  const SyntheticQkv made = make_qkv(spec, pool, done);
  const auto convert = [&](const std::vector<float>& x) {
    io::Array array{io::ElementType::f32, {made.heads, made.tokens, made.dim}, {}};
    if (dtype == "f32") {
      array.data.resize(x.size() * 4);
      std::memcpy(array.data.data(), x.data(), array.data.size());
      return array;
    }
    array.type = dtype == "f16" ? io::ElementType::f16 : io::ElementType::bf16;
    array.data.resize(x.size() * 2);
    for (size_t i = 0; i < x.size(); ++i) {
      const uint16_t bits = dtype == "f16" ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
      std::memcpy(array.data.data() + 2 * i, &bits, 2);
    }
    return array;
  };
  Qkv qkv = make_qkv_input(convert(made.q), convert(made.k), convert(made.v));
  qkv.rope = spec.rope;
  return qkv;
}

std::vector<int64_t> parse_list(const std::string& name, const std::string& text, char separator) {
  std::vector<int64_t> values;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    int64_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    require(error == std::errc() && value > 0 && (next == end || *next == separator), Status::invalid_argument,
            "{}: got \"{}\", expected positive integers separated by '{}'", name, text, separator);
    values.push_back(value);
    if (next == end) return values;
    at = next + 1;
  }
}

Partition parse_subspaces(const std::string& text) {
  const auto bad = [&](const char* why) {
    fail(Status::invalid_argument, "subspaces: {}; expected JSON lists of channels such as [[0,1],[2,3]], got \"{}\"", why,
         text.substr(0, 80));
  };
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_array() || json.empty()) bad("not a list");
  Partition partition;
  for (const auto& set : json) {
    if (!set.is_array()) bad("not a list of lists");
    auto& channels = partition.emplace_back();
    for (const auto& channel : set) {
      if (!channel.is_number_integer() || channel < 0 || channel > 100000) bad("a channel is not an index");
      channels.push_back(channel.get<int32_t>());
    }
  }
  return partition;
}

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

nlohmann::ordered_json settings_json(const Settings& settings) {
  nlohmann::ordered_json json;
  for (const Setting& setting : settings_table()) json[setting.name] = setting.get(settings);
  return json;
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

nlohmann::ordered_json machine_json(const Context& context) {
  std::string cpu = "unknown", line;
  std::ifstream info("/proc/cpuinfo");
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) {
      cpu = line.substr(line.find(':') + 2);
      break;
    }
  }
  utsname system{};
  uname(&system);
  nlohmann::ordered_json json{{"cpu", cpu},
                              {"system", fmt::format("{} {}", system.sysname, system.machine)},
                              {"threads", context.threads()},
                              {"instruction_set", context.instruction_set()}};
  if (!context.device().empty()) json["gpu"] = context.device();
  return json;
}

std::string utf8_text(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return text;
  } catch (const nlohmann::json::type_error&) {
    std::string out;
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      out += byte < 0x80 ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
    }
    return out;
  }
}

std::string json_text(const nlohmann::ordered_json& json, int indent, bool ascii) {
  try {
    return json.dump(indent, ' ', ascii);
  } catch (const nlohmann::json::type_error&) {
    return escaped(json).dump(indent, ' ', ascii);
  }
}

std::string version() { return fmt::format("{} (commit {})", SCOPE_VERSION, built_from()); }

void write_json(const std::string& path, const nlohmann::ordered_json& json) {
  nlohmann::ordered_json whole{{"version", SCOPE_VERSION}, {"commit", built_from()}};
  whole.update(json);
  write_text(path, json_text(whole, 2) + "\n");
}

void write_text(const std::string& path, const std::string& text) {
  const std::span<const std::byte> part = std::as_bytes(std::span(text));
  io::write_file(path, {&part, 1});
}

void MachineFlags::add(CLI::App& app) {
  std::vector<std::string> names;
  for (const Backend* each : backends()) names.emplace_back(each->name);
  add_host(app);
  app.add_option("--backend", backend, fmt::format("what calls run on: {}", fmt::join(names, " or ")))
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_option("--device", device, "which GPU, on a backend of GPUs")->check(whole(0, 1023))->capture_default_str();
}

void MachineFlags::add_host(CLI::App& app) {
  add_threads(app, threads);
  app.add_option("--instruction-set", instruction_set, "the CPU's: auto, avx512, avx2 or portable")->capture_default_str();
}

bool MachineFlags::on_device() const { return !find_backend(backend).can.host; }

Context MachineFlags::context() const {
  require(on_device() || device == 0, Status::invalid_argument, "--device: got {}, and --backend {} has no devices", device,
          backend);
  require(!on_device() || instruction_set == "auto", Status::invalid_argument,
          "--instruction-set: got {}, and --backend {} does not run on the CPU", instruction_set, backend);
  return Context(
      ContextOptions{.backend = backend, .threads = threads, .instruction_set = instruction_set, .device = device});
}

DType finest_dtype(const Context& context) {
  return context.backend().can.dtypes.has(DType::f32) ? DType::f32 : DType::bf16;
}

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::string bold(const std::string& text) { return isatty(STDOUT_FILENO) == 1 ? "\x1b[1m" + text + "\x1b[0m" : text; }

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)), total_(total), shown_(isatty(STDERR_FILENO) == 1), start_(now_seconds()) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::step(const std::string& note) {
  ++done_;
  if (!shown_) return;
  constexpr int64_t kWidth = 30;
  const int64_t filled = kWidth * done_ / std::max<int64_t>(total_, 1);
  const double left = (now_seconds() - start_) / static_cast<double>(done_) * static_cast<double>(total_ - done_);
  tell("\r\x1b[K{} [{}{}] {}/{} {:.0f} s left  {}", what_, std::string(static_cast<size_t>(filled), '#'),
       std::string(static_cast<size_t>(kWidth - filled), '.'), done_, total_, left, note);
  std::fflush(stderr);
}

}  // namespace scope::cli
