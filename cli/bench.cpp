// scope bench: stages and whole calls against our own dense attention, in one run, as a table and JSON.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bounds.h"
#include "commands.h"
#include "core/built_from.h"
#include "input.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "methods/methods.h"
#include "outputs.h"
#include "parse.h"
#include "qkv.h"
#include "runner.h"
#include "statistics.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct BenchOptions {
  std::string grid, rope = "44,42,42", dtype, density = "0.2", json, commit = scope::built_from();
  int64_t heads = 2, quality = 0;
  int repeat = 5;
  uint64_t seed = 1;
  bool suite = false, sweep = false;
  MethodFlags method;
  MachineFlags machine;
};

struct Case {
  std::vector<int64_t> grid;
  int64_t heads;
  double density;
};

// One way to run: a plan whose calls are first calls (cold), or continue from a state (warm).
struct Variant {
  std::string name;
  Settings settings;
  bool warm;
  std::unique_ptr<Runner> runner;
  std::vector<CallStats> runs;
};

double median(const std::vector<CallStats>& runs, double CallStats::*field) {
  std::vector<double> values;
  values.reserve(runs.size());
  for (const CallStats& run : runs) values.push_back(run.*field);
  return upper_median(std::move(values));
}

// Whether first_sample means something to the method.
bool samples_first(const Settings& settings) { return row(settings.group).iterates && row(settings.group).warm; }

std::vector<Variant> make_variants(const Settings& base, double density) {
  // The method's own rule, solved for the density in the call.
  const auto with = [&](std::initializer_list<std::pair<const char*, const char*>> more) {
    Settings settings = base;
    settings.target_density = density;
    for (const auto& [name, value] : more) set_setting(settings, name, value);
    return settings;
  };
  std::vector<Variant> variants;
  const auto add = [&](std::string name, Settings settings, bool warm) {
    variants.push_back({std::move(name), std::move(settings), warm, nullptr, {}});
  };
  add("dense", find_method("dense").settings(), false);
  add("warm", with({}), true);
  if (!row(base.rule).whole_codes) {  // which are neither a number of keys nor scored one by one
    add("warm, fixed k", with({{"rule", "fixed"}}), true);
    add("warm, exact proxy", with({{"proxy", "exact"}}), true);
  }
  add("cold", with({}), false);
  if (samples_first(base)) {
    const std::string other = fmt::format("{}", base.first_sample < 1 ? 1 : Settings{}.first_sample);
    add("cold, first_sample=" + other, with({{"first_sample", other.c_str()}}), false);
  }
  return variants;
}

void time_variants(std::vector<Variant>& variants, const Input& input, const BenchOptions& options, const Context& context) {
  Progress progress(fmt::format("{} heads x {} tokens", input.qkv.heads, input.qkv.q_tokens),
                    static_cast<int64_t>(variants.size()) * (options.repeat + 1));
  for (Variant& variant : variants) {
    variant.runner = std::make_unique<Runner>(context, variant.settings, input.shape());
    variant.runner->fetch = options.quality > 0;
    if (options.quality > 0 && !variant.settings.dense) variant.runner->want_selection();
    if (variant.warm) {
      variant.runner->init_state();
      variant.runner->run(input.args());
    }
    progress.step(variant.name);
  }
  // Interleaved, so that whatever else the machine does hits every variant alike.
  for (int i = 0; i < options.repeat; ++i) {
    for (Variant& variant : variants) {
      variant.runner->run(input.args());
      variant.runs.push_back(variant.runner->stats);
      progress.step(variant.name);
    }
  }
}

// Of a variant's runs.
struct Figures {
  double total = 0, speedup = 0, density = 0;
  double gflops = 0;     // of attend
  Quality quality = {};  // of no queries where it was not measured
};

nlohmann::ordered_json row_json(const Variant& variant, const Figures& figures) {
  nlohmann::ordered_json row{{"name", variant.name},
                             {"density", figures.density},
                             {"seconds", figures.total},
                             {"speedup", figures.speedup},
                             {"attend_gflops", figures.gflops}};
  for (const auto& [name, field] :
       std::initializer_list<std::pair<const char*, double CallStats::*>>{{"check", &CallStats::check},
                                                                          {"group", &CallStats::group},
                                                                          {"encode", &CallStats::encode},
                                                                          {"score", &CallStats::score},
                                                                          {"select", &CallStats::select},
                                                                          {"attend", &CallStats::attend}}) {
    row["stages"][name] = median(variant.runs, field);
  }
  if (figures.quality.queries > 0) {
    row["quality"] = {{"queries", figures.quality.queries},
                      {"mass_recall", figures.quality.mass_recall},
                      {"mass_interval", figures.quality.mass_interval},
                      {"oracle_recall", figures.quality.oracle_recall},
                      {"error", figures.quality.error}};
  }
  if (!variant.settings.dense) row["settings"] = settings_json(variant.runner->plan().settings);
  row["groups"] = variant.runner->plan().groups;
  row["codes"] = variant.runner->plan().codes;
  row["arithmetic"] = variant.runner->stats.arithmetic;
  row["kernel"] = variant.runner->stats.kernel;
  return row;
}

void print_heading(const Case& c, const Qkv& qkv, const BenchOptions& options, const Context& context) {
  fmt::print("\n{}\n", bold(fmt::format("{} heads x {} tokens ({}) x {}, {}, density {}, {} threads, {}", c.heads,
                                        qkv.q_tokens, fmt::join(c.grid, "x"), qkv.dim, options.dtype, c.density,
                                        context.threads(), context.instruction_set())));
  fmt::print("  {:<22} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}{}\n", "", "density", "total ms",
             "speedup", "group", "encode", "score", "select", "attend", "GFLOP/s", "products",
             options.quality > 0 ? "  mass recall" : "");
}

void print_row(const Variant& variant, const Figures& figures) {
  const auto ms = [&](double CallStats::*field) { return 1e3 * median(variant.runs, field); };
  const std::string recall = figures.quality.queries > 0 ? fmt::format("  {:.4f} ± {:.4f}", figures.quality.mass_recall,
                                                                       figures.quality.mass_interval)
                                                         : "";
  fmt::print("  {:<22} {:>8.4f} {:>9.1f} {:>8.2f}x {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>9.1f} {:>8}{}\n",
             variant.name, figures.density, 1e3 * figures.total, figures.speedup, ms(&CallStats::group),
             ms(&CallStats::encode), ms(&CallStats::score), ms(&CallStats::select), ms(&CallStats::attend), figures.gflops,
             variant.runner->stats.arithmetic, recall);
}

nlohmann::ordered_json run_case(const Case& c, const BenchOptions& options, const Context& context) {
  const SyntheticSpec spec{
      {c.grid[0], c.grid[1], c.grid[2]}, parse_list("--rope", options.rope, ','), c.heads, options.seed};
  const Input input{.qkv = synthetic_qkv(spec, options.dtype, *context.exec().pool)};
  const Qkv& qkv = input.qkv;
  std::vector<Variant> variants =
      make_variants(options.method.settings({.layer = false, .step = false, .device = options.machine.on_device()},
                                            fmt::format("{}", c.density)),
                    c.density);
  time_variants(variants, input, options, context);
  const double dense = median(variants[0].runs, &CallStats::total);
  const double flop = 4.0 * static_cast<double>(qkv.q_tokens) * static_cast<double>(qkv.k_tokens) *
                      static_cast<double>(qkv.dim) * static_cast<double>(qkv.heads);
  print_heading(c, qkv, options, context);
  nlohmann::ordered_json result{{"grid", c.grid},          {"heads", c.heads},       {"tokens", qkv.q_tokens},
                                {"dim", qkv.dim},          {"dtype", options.dtype}, {"density", c.density},
                                {"repeat", options.repeat}};
  for (const Variant& variant : variants) {
    const double total = median(variant.runs, &CallStats::total), attend = median(variant.runs, &CallStats::attend);
    const double density = variant.runner->stats.density;
    Figures figures{.total = total, .speedup = dense / total, .density = density, .gflops = flop * density / attend / 1e9};
    if (options.quality > 0) {
      figures.quality = measure(context, qkv, *variant.runner, variant.settings.dense, options.quality);
    }
    print_row(variant, figures);
    result["rows"].push_back(row_json(variant, figures));
  }
  const Settings& method = variants[1].settings;
  if (samples_first(method)) {
    fmt::print(
        "  cold: {} iterations of K-means, all but the last 2 over the share {} of the tokens, at least 8 a cluster (scope: "
        "{}, svg2: "
        "{})\n",
        method.first_iterations, method.first_sample, Settings{}.first_sample, find_method("svg2").settings().first_sample);
  }
  return result;
}

std::vector<Case> cases(const BenchOptions& options) {
  if (options.suite) return {{{16, 32, 32}, 2, 0.20}, {{21, 45, 80}, 1, 0.15}};
  std::vector<double> densities;
  for (const std::string& text : split(options.density, ',')) {
    Settings check;
    set_setting(check, "density", text);
    densities.push_back(check.density);
  }
  std::vector<Case> list;
  if (options.sweep) {
    for (const std::vector<int64_t>& grid : std::vector<std::vector<int64_t>>{
             {4, 8, 16}, {4, 16, 16}, {8, 16, 16}, {8, 16, 32}, {8, 32, 32}, {16, 32, 32}, {16, 40, 52}}) {
      for (const double density : {0.05, 0.1, 0.2, 0.3, 0.5}) list.push_back({grid, options.heads, density});
    }
    return list;
  }
  const auto grid = parse_list("--grid", options.grid.empty() ? "16x32x32" : options.grid, 'x');
  require(grid.size() == 3, Status::invalid_argument, "--grid: got \"{}\", expected TxHxW", options.grid);
  for (const double density : densities) list.push_back({grid, options.heads, density});
  return list;
}

void run(BenchOptions options) {
  Outputs outputs;
  outputs.reads(parse_method(options.method.method, options.method.model, options.method.set));
  outputs.writes("--json", options.json);
  const Context context = options.machine.context();
  if (options.dtype.empty()) options.dtype = dtype_name(finest_dtype(context));
  nlohmann::ordered_json json{{"machine", machine_json(context)},
                              {"finished", false},
                              {"commit", options.commit},
                              {"data", {{"source", "scope make-qkv"}, {"seed", options.seed}, {"rope", options.rope}}}};
  for (const Case& c : cases(options)) {
    json["cases"].push_back(run_case(c, options, context));
    if (!options.json.empty()) outputs.keep_unfinished(options.json, json);  // whatever comes next
  }
  json["finished"] = true;
  if (!options.json.empty()) write_json(outputs.open(options.json), json);
  outputs.place();
}

}  // namespace

void add_bench(CLI::App& app) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench",
      "Time the stages and whole calls on synthetic q, k, v: dense, warm and cold, the method's own rule solved for the\n"
      "given density, and, where it keeps single keys, fixed k and the exact proxy beside it. Medians of interleaved runs;\n"
      "the speedup is over our own dense attention in the same run.");
  CLI::Option* grid = command->add_option("--grid", options->grid, "tokens along T, H and W (default 16x32x32)");
  command->add_option("--rope", options->rope, "channels along T, H and W")->capture_default_str();
  CLI::Option* heads =
      command->add_option("--heads", options->heads, "heads")->check(whole(1, kMostHeads))->capture_default_str();
  command->add_option("--dtype", options->dtype, "f32, f16 or bf16 (default: f32 on the CPU, bf16 on a GPU)")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}));
  CLI::Option* density =
      command->add_option("--density", options->density, "one or more, separated by commas")->capture_default_str();
  command->add_option("--repeat", options->repeat, "runs of each variant")
      ->check(whole(1, kMostRepeats))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "of the data")->check(whole(0, kMostSeed))->capture_default_str();
  command->add_option("--quality", options->quality, "also measure recall on N queries per head")
      ->check(whole(0, kMostSamples))
      ->capture_default_str();
  CLI::Option* suite = command->add_flag("--suite", options->suite,
                                         "the two shapes of the speed table: 2 x 16,384 at 0.20, 1 x 75,600 at 0.15");
  suite->excludes(grid)->excludes(heads)->excludes(density);
  command->add_flag("--sweep", options->sweep, "tokens x density, for the break-even table")
      ->excludes(suite)
      ->excludes(grid)
      ->excludes(density);
  CLI::Option* json = command->add_option("--json", options->json, "write the figures here");
  command
      ->add_option("--commit", options->commit,
                   "recorded in the JSON; by default the commit that this command was built from")
      ->needs(json);
  options->method.add(*command);
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
