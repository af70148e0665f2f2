// scope demo: dense and SCOPE on one synthetic video grid, in one table.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "bounds.h"
#include "commands.h"
#include "input.h"
#include "machine.h"
#include "methods/methods.h"
#include "parse.h"
#include "qkv.h"
#include "runner.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct DemoOptions {
  std::string grid = "13x30x52";
  int64_t heads = 2, samples = 96;
  MachineFlags machine;
};

struct DemoRow {
  std::string name, method;
  std::vector<std::pair<const char*, const char*>> set;
};

void run(const DemoOptions& options) {
  const auto grid = parse_list("--grid", options.grid, 'x');
  require(grid.size() == 3, Status::invalid_argument, "--grid: got \"{}\", expected TxHxW", options.grid);
  const Context context = options.machine.context();
  const SyntheticSpec spec{{grid[0], grid[1], grid[2]}, {44, 42, 42}, options.heads, 1};
  const std::vector<DemoRow> rows{
      {"dense", "dense", {}},
      {"scope, rule=target 0.20", "scope", {{"rule", "target"}, {"density", "0.2"}}},
      {"scope, rule=target 0.10", "scope", {{"rule", "target"}, {"density", "0.1"}}},
      {"scope-exact, target 0.10", "scope-exact", {{"rule", "target"}, {"density", "0.1"}}},
      {"+ first-order tail", "scope-exact", {{"rule", "target"}, {"density", "0.1"}, {"tail", "first_order"}}},
      {"scope, rule=online", "scope", {}}};
  auto progress = std::make_unique<Progress>("scope demo", static_cast<int64_t>(3 * rows.size() + 1));
  const Input input{.qkv = synthetic_qkv(spec, dtype_name(finest_dtype(context)), *context.exec().pool)};
  const Qkv& qkv = input.qkv;
  progress->step("data");

  std::string table, stages;
  double dense_seconds = 0, top_mass = 0;
  for (const DemoRow& row : rows) {
    Settings settings = find_method(row.method).settings();
    for (const auto& [name, value] : row.set) set_setting(settings, name, value);
    Runner runner(context, settings, input.shape());
    if (!settings.dense) {
      runner.want_selection();
      runner.init_state();
    }
    runner.run(input.args());
    const double cold = runner.stats.total;
    progress->step(row.name);
    runner.run(input.args());
    const double warm = runner.stats.total;
    const CallStats& s = runner.stats;
    progress->step(row.name);
    const Quality quality = measure(context, qkv, runner, settings.dense, options.samples);
    progress->step(row.name);
    if (settings.dense) {
      dense_seconds = warm;
      top_mass = quality.top_mass;
    }
    const std::string first = settings.dense ? "" : fmt::format("{:.2f}x", dense_seconds / cold);
    table += fmt::format("  {:<26} {:>8.3f} {:>12.4f} {:>14.4f} {:>10.5f} {:>9.0f} {:>8} {:>8.2f}x\n", row.name, s.density,
                         quality.mass_recall, quality.oracle_recall, quality.error, 1e3 * warm, first, dense_seconds / warm);
    stages += fmt::format("  {:<26} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>9.1f}\n", row.name, 1e3 * s.group, 1e3 * s.encode,
                          1e3 * s.score, 1e3 * s.select, 1e3 * s.attend);
  }
  progress.reset();
  const Settings defaults;
  fmt::print("{}\n",
             bold(fmt::format("Attention over {} heads x {} tokens (grid {}), dim {}, f32, {} threads, {}", qkv.heads,
                              qkv.q_tokens, options.grid, qkv.dim, context.threads(), context.instruction_set())));
  fmt::print("Synthetic q, k, v with 3D RoPE 44,42,42 (seed 1); the exact top 10 % of keys hold {:.2f} of the mass.\n",
             top_mass);
  fmt::print("SCOPE: {} groups, {} codes per subspace, {} warm and {} first K-means iterations.\n\n",
             effective_groups(defaults, qkv.q_tokens), effective_codes(defaults, qkv.k_tokens), defaults.iterations,
             defaults.first_iterations);
  fmt::print("  {:<26} {:>8} {:>12} {:>14} {:>10} {:>9} {:>8} {:>9}\n{}", "", "density", "mass recall", "oracle recall",
             "error", "warm ms", "cold", "warm", table);
  fmt::print("\n  {:<26} {:>8} {:>8} {:>8} {:>8} {:>9}\n{}", "warm, ms per stage", "group", "encode", "score", "select",
             "attend", stages);
  fmt::print(
      "\nmass recall: exact softmax mass on the selected keys; oracle recall: share of the exact top 10 % that was "
      "selected;\n"
      "error: |o - o*| / |o*| against float64, on {} queries per head; cold and warm: speedup over dense in this run.\n",
      options.samples);
}

}  // namespace

void add_demo(CLI::App& app) {
  auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand("demo", "Dense attention and SCOPE side by side on a synthetic video grid.");
  command->add_option("--grid", options->grid, "tokens along T, H and W")->capture_default_str();
  command->add_option("--heads", options->heads, "heads")->check(whole(1, kMostHeads))->capture_default_str();
  command->add_option("--samples", options->samples, "queries per head on which recall and error are measured")
      ->check(whole(1, kMostSamples))
      ->capture_default_str();
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
