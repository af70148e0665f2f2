// scope attend: one call on q, k, v from a file.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bounds.h"
#include "commands.h"
#include "input.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "outputs.h"
#include "qkv.h"
#include "runner.h"
#include "target_notes.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct AttendOptions {
  std::string output, stats, state, target_density;
  int64_t layer = -1, step = -1, steps = 0, quality = 0;
  bool dump = false, lse = false;
  InputFlags input;
  MethodFlags method;
  MachineFlags machine;
};

template <class T>
io::Array to_array(io::ElementType type, std::vector<int64_t> shape, const T* data, size_t count) {
  io::Array array{type, std::move(shape), std::vector<std::byte>(count * sizeof(T))};
  if (count > 0) std::memcpy(array.data.data(), data, count * sizeof(T));
  return array;
}

void add_dump(const Runner& runner, const Qkv& qkv, io::SafeTensors& out) {
  const Plan& plan = runner.plan();
  const int64_t b = qkv.batch, h = qkv.heads, g = plan.selection_groups, words = mask_words(qkv.k_tokens), heads = b * h;
  const auto i32 = io::ElementType::i32;
  out.tensors["labels"] = to_array(i32, {b, h, qkv.q_tokens}, runner.labels.data(), runner.labels.size());
  out.tensors["sizes"] = to_array(i32, {b, h, g}, runner.sizes.data(), runner.sizes.size());
  out.tensors["counts"] = to_array(i32, {b, h, g}, runner.counts.data(), runner.counts.size());
  out.tensors["mask"] = to_array(io::ElementType::u32, {b, h, g, words}, runner.mask.data(), runner.mask.size());
  if (std::any_of(runner.keep.begin(), runner.keep.end(), [](uint32_t word) { return word != 0; })) {
    out.tensors["keep"] = to_array(io::ElementType::u32, {b, words}, runner.keep.data(), runner.keep.size());
  }
  out.tensors["q_centroids"] =
      to_array(io::ElementType::f32, {b, h, plan.groups, qkv.dim}, runner.centroids.data(), runner.centroids.size());
  int64_t at = 0;
  nlohmann::json sets = nlohmann::json::array();
  for (size_t m = 0; m < plan.partition.size(); ++m) {
    const auto depth = static_cast<int64_t>(plan.partition[m].size()), count = heads * plan.codes * depth;
    out.tensors[fmt::format("codebook.{}", m)] =
        to_array(io::ElementType::f32, {b, h, plan.codes, depth}, runner.codebooks.data() + at, static_cast<size_t>(count));
    at += count;
    const int64_t each = heads * qkv.k_tokens;
    out.tensors[fmt::format("codes.{}", m)] =
        to_array(i32, {b, h, qkv.k_tokens}, runner.codes.data() + static_cast<int64_t>(m) * each, static_cast<size_t>(each));
    sets.push_back(plan.partition[m]);
  }
  if (!plan.partition.empty()) out.metadata["subspaces"] = sets.dump();
}

bool writes_npy(const AttendOptions& options) { return options.output.ends_with(".npy"); }

Settings checked_settings(const AttendOptions& options) {
  Settings settings = options.method.settings({.layer = options.layer >= 0,
                                               .step = options.step >= 0,
                                               .state = !options.state.empty(),
                                               .device = options.machine.on_device()},
                                              options.target_density);
  require(!options.dump || !settings.dense, Status::invalid_argument, "--dump: method dense has no selection");
  require(options.state.empty() || !settings.dense, Status::invalid_argument, "--state: method dense keeps none");
  require((options.step < 0) == (options.steps == 0), Status::invalid_argument,
          "--step: needs --steps, and --steps needs --step");
  require(!settings.dense || (options.layer < 0 && options.step < 0), Status::invalid_argument,
          "{}: method dense has no schedule", options.layer >= 0 ? "--layer" : "--step");
  require(!writes_npy(options) || (!options.dump && !options.lse), Status::invalid_argument,
          "--output: a .npy file holds one array; --dump and --lse need .safetensors");
  return settings;
}

void check_subspaces(const AttendOptions& options, const Input& input, const Settings& settings) {
  if (options.input.reads_subspaces(input, options.method.method, options.method.set, settings)) return;
  const std::string why = why_idle(settings, "partition");
  require(options.input.subspaces.empty(), Status::invalid_argument, "--subspaces: would do nothing for --method {}: {}",
          options.method.method,
          why.empty() ? fmt::format("rule {} keeps whole codes of one subspace", row(settings.rule).name) : why);
}

void load_state(const std::string& path, Runner& runner) {
  runner.init_state();
  if (!io::exists(path)) return;
  const auto saved = io::read_file(path, runner.plan().state_bytes);
  try {
    runner.load_state(saved);
  } catch (const Error& error) {
    fail(Status::format, "{}: {}", path, error.what());
  }
}

void write_out(const AttendOptions& options, const Qkv& qkv, const Settings& settings, const Runner& runner,
               const std::vector<float>& lse, Outputs& outputs) {
  std::vector<int64_t> shape{qkv.heads, qkv.q_tokens, qkv.dim};
  if (qkv.batched) shape.insert(shape.begin(), qkv.batch);
  const io::Array out{qkv.q.type, shape, runner.out};
  if (writes_npy(options)) {
    io::write_npy(outputs.open(options.output), out);
    return;
  }
  io::SafeTensors result;
  result.tensors["out"] = out;
  result.metadata["settings"] = json_text(settings_json(settings));
  if (options.lse) {
    result.tensors["lse"] = to_array(io::ElementType::f32, {qkv.batch, qkv.heads, qkv.q_tokens}, lse.data(), lse.size());
  }
  if (options.dump) add_dump(runner, qkv, result);
  io::write_safetensors(outputs.open(options.output), result);
}

nlohmann::ordered_json quality_json(const Quality& quality) {
  return {{"queries", quality.queries},
          {"mass_recall", quality.mass_recall},
          {"mass_interval", quality.mass_interval},
          {"oracle_recall", quality.oracle_recall},
          {"retention", quality.retention},
          {"top_10_percent_mass", quality.top_mass},
          {"error", quality.error},
          {"cosine", quality.cosine}};
}

void run(const AttendOptions& options) {
  const Settings settings = checked_settings(options);
  Outputs outputs;
  outputs.reads(options.input);
  outputs.reads(settings);
  outputs.writes("--output", options.output);
  outputs.writes("--state", options.state);
  outputs.writes("--stats", options.stats);
  const Context context = options.machine.context();
  auto progress = std::make_unique<Progress>("attend", options.quality > 0 ? 4 : 3);
  const Input input = options.input.read(options.method.model);
  const Qkv& qkv = input.qkv;
  progress->step("read");
  if (options.quality > 0) input.check_measurable("--quality");
  check_subspaces(options, input, settings);
  Runner runner(context, settings, input.shape());
  if (!settings.dense) runner.want_selection();
  if (!options.state.empty()) load_state(options.state, runner);
  std::vector<float> lse(options.lse ? static_cast<size_t>(qkv.batch * qkv.heads * qkv.q_tokens) : 0);
  CallArgs args = input.args();
  args.lse = options.lse ? lse.data() : nullptr;
  args.place = {options.layer, options.step, options.steps};
  runner.run(args);
  const auto notes = target_notes(runner, density_at(settings, args.place, settings.target_density), options.method.method);
  progress->step("attended");

  write_out(options, qkv, settings, runner, lse, outputs);
  if (!options.state.empty()) {
    const std::vector<std::byte> saved = runner.save_state();
    const std::span<const std::byte> part = saved;
    io::write_file(outputs.open(options.state), {&part, 1});
  }
  progress->step("written");
  auto stats = stats_json(runner);
  if (!notes.empty()) stats["notes"] = notes;
  stats["settings"] = settings_json(settings);
  std::optional<Quality> quality;
  if (options.quality > 0) {
    quality = measure(context, qkv, runner, runner.stats.reason != Reason::sparse, options.quality);
    stats["quality"] = quality_json(*quality);
  }
  progress.reset();
  if (!options.stats.empty()) write_json(outputs.open(options.stats), stats);
  outputs.place();
  if (quality) {
    fmt::print(
        "mass recall {:.4f} ± {:.4f}, oracle recall {:.4f}, error {:.5f} over {} queries; exact top 10 % hold {:.3f}\n",
        quality->mass_recall, quality->mass_interval, quality->oracle_recall, quality->error, quality->queries,
        quality->top_mass);
  }
  for (const std::string& note : notes) fmt::print("{}\n", note);
  fmt::print("{}: {}, density {:.4f}, {:.1f} ms ({} threads, {})\n", options.output, reason_text(runner.stats.reason),
             runner.stats.density, 1e3 * runner.stats.total, context.threads(), context.instruction_set());
}

}  // namespace

void add_attend(CLI::App& app) {
  auto options = std::make_shared<AttendOptions>();
  CLI::App* command = app.add_subcommand(
      "attend",
      "Attend over q, k, v from a file: tensors q, k, v as [batch, heads, tokens, dim] or [heads, tokens, dim] in f32, f16 "
      "or\n"
      "bf16; metadata grid (13x30x52), rope (44,42,42) or subspaces (JSON index lists), or the flags of those names.\n"
      "Optional tensors: q_lengths, k_lengths (i64 [batch]); keep, dense_queries (u32 bitmasks [batch, words]).\n"
      "It is one sparse call; the schedule applies only with --layer and --step.\n\n"
      "  scope attend qkv.safetensors -o out.safetensors --method scope --set rho=0.9 --set alpha=0.1 --stats stats.json "
      "--dump\n"
      "  scope attend qkv.safetensors -o out.safetensors --method svg2 --target-density 0.2\n"
      "  scope attend --q q.npy --k k.npy --v v.npy --rope 44,42,42 -o out.npy");
  options->input.add(*command);
  command->add_option("-o,--output", options->output, "file to write: .safetensors, or .npy for the output alone")
      ->required();
  options->method.add(*command);
  command->add_option("--target-density", options->target_density,
                      "share of keys that heads keep on average (target_scope=head: each of them), under any method: solved "
                      "in the call, within "
                      "0.005 or the nearest");
  command->add_option("--layer", options->layer, "this call's layer, for the schedule")->check(whole(0, kMostLayers));
  command->add_option("--step", options->step, "this call's denoising step, for the schedule")->check(whole(0, kMostSteps));
  command->add_option("--steps", options->steps, "how many denoising steps there are")->check(whole(1, kMostSteps));
  command->add_option("--state", options->state, "warm-start file: read if it exists, written after the call");
  command->add_option("--stats", options->stats, "write the call's statistics as JSON");
  command->add_option("--quality", options->quality, "measure recall and error on N sampled queries per head, in float64")
      ->check(whole(0, kMostSamples));
  command->add_flag("--dump", options->dump, "add the selection, centroids, codebooks and codes to the output file");
  command->add_flag("--lse", options->lse, "add the log-sum-exp to the output file");
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
