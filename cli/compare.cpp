// scope compare: methods side by side on one file's q, k, v, at matched density.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "bounds.h"
#include "commands.h"
#include "comparison.h"
#include "input.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "methods/methods.h"
#include "outputs.h"
#include "parse.h"
#include "qkv.h"
#include "runner.h"
#include "selection.h"
#include "statistics.h"
#include "target_notes.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct CompareOptions {
  InputFlags input;
  std::string methods = "scope,scope-exact,svg2,sparge", samples = "128", model, profile, json, csv, plots;
  std::vector<std::string> selections;
  PointFlags at{.set = {}, .density = "0.05,0.1,0.2,0.3", .rho = ""};
  Place place;
  int repeat = 3;
  MachineFlags machine;
};

struct Method {
  std::string name;
  Settings settings;
};

double selection_seconds(const CallStats& stats) { return stats.group + stats.encode + stats.score + stats.select; }

std::vector<GivenSelection> name_selections(const CompareOptions& options) {
  std::vector<GivenSelection> selections;
  for (const std::string& text : options.selections) selections.push_back(name_selection(text));
  return selections;
}

std::vector<Method> parse_methods(const CompareOptions& options) {
  std::vector<Method> methods;
  for (const std::string& name : split_methods(options.methods)) {
    methods.push_back({name, parse_method(name, options.model, options.at.set)});
    require(!methods.back().settings.dense, Status::invalid_argument,
            "--methods: dense is what the others are compared with; it has its own line");
  }
  if (options.profile.empty()) return methods;
  require(options.place.step >= 0 && options.place.layer >= 0, Status::invalid_argument,
          "--profile: needs --layer, --step and --steps, to know which densities these heads have");
  bool taken = false;
  for (Method& method : methods) {
    if (!method.settings.method->profiled) continue;
    set_setting(method.settings, "profile", options.profile);
    taken = true;
  }
  if (!taken) refuse_profile(options.methods);
  return methods;
}

class CompareRun {
 public:
  explicit CompareRun(const CompareOptions& options)
      : options_(options),
        methods_(parse_methods(options)),
        points_(options.at.points()),
        samples_(parse_samples(options.samples)),
        context_(options.machine.context()),
        input_(options.input.read(options.model)),
        selections_(name_selections(options)),
        dense_runner_(context_, parse_method("dense", ""), input_.shape()) {
    input_.check_measurable("compare");
    for (GivenSelection& selection : selections_) read_selection(selection, input_);
    const Surroundings with{
        .layer = options.place.layer >= 0, .step = options.place.step >= 0, .device = options.machine.on_device()};
    bool reads_subspaces = options.input.subspaces.empty();
    // What cannot run is refused before anything is measured.
    for (const Method& method : methods_) {
      const Settings settings = at(method, points_.front());
      check_effects(method.name, options.model, {}, settings, with);
      reads_subspaces = options.input.reads_subspaces(input_, method.name, {}, settings) || reads_subspaces;
      const Plan plan(context_, settings, input_.shape());
      const Reason reason = schedule(method.settings, options.place);
      require(reason == Reason::sparse, Status::invalid_argument, "--layer, --step: there {} is {}", method.name,
              reason_text(reason));
    }
    require(reads_subspaces, Status::invalid_argument, "--subspaces: none of --methods {} takes them", options.methods);
    samples_ = std::min(samples_, input_.qkv.q_tokens);
    found_.setting = setting_line();
    found_.at_rho = options.at.at_rho();
    found_.repeat = options.repeat;
  }

  void run() {
    Progress progress("compare", 2 + static_cast<int64_t>(methods_.size() * (1 + points_.size()) + selections_.size()));
    make_exact();
    progress.step("exact");
    found_.dense = run_dense();
    progress.step("dense");
    for (const Method& method : methods_) {
      Runner first(context_, at(method, points_.front()), input_.shape());
      first.init_state();
      first.run(args());
      progress.step(method.name);
      for (const double point : points_) {
        found_.rows.push_back(run_method(method, point, first));
        progress.step(fmt::format("{} at {}", method.name, point));
      }
    }
    for (const GivenSelection& selection : selections_) {
      found_.rows.push_back(run_selection(selection));
      progress.step(selection.name);
    }
  }

  nlohmann::ordered_json json() const {
    nlohmann::ordered_json out{
        {"input", options_.input.path},  {"grid", input_.grid},       {"heads", input_.qkv.batch * input_.qkv.heads},
        {"tokens", input_.qkv.q_tokens}, {"dim", input_.qkv.dim},     {"dtype", dtype_name(input_.qkv.dtype)},
        {"queries_per_head", samples_},  {"repeat", options_.repeat}, {"machine", machine_json(context_)}};
    for (const Method& method : methods_) out["settings"][method.name] = settings_json(method.settings);
    for (const GivenSelection& selection : selections_) out["selections"][selection.name] = selection.path;
    out["rows"].push_back(row_json(found_, found_.dense));
    for (const CompareRow& row : found_.rows) out["rows"].push_back(row_json(found_, row));
    return out;
  }

  const Comparison& found() const { return found_; }

 private:
  Settings at(const Method& method, double point) const { return options_.at.at(method.settings, point, method.name); }
  CallArgs args() const {
    CallArgs args = input_.args();
    args.place = options_.place;
    return args;
  }

  // Exact attention is the dearest part, and the same for all; without room for it, each measurement computes its own.
  void make_exact() {
    const Qkv& qkv = input_.qkv;
    constexpr int64_t kMostValues = int64_t{1} << 27;
    if (qkv.batch * qkv.heads * samples_ * qkv.k_tokens > kMostValues) return;
    for (int64_t b = 0; b < qkv.batch; ++b) {
      for (int64_t h = 0; h < qkv.heads; ++h) {
        exact_.push_back(exact_queries(*context_.exec().pool, qkv.view(qkv.q, qkv.q_tokens).head(b, h),
                                       qkv.view(qkv.k, qkv.k_tokens).head(b, h), qkv.view(qkv.v, qkv.k_tokens).head(b, h),
                                       samples_));
      }
    }
  }

  // Medians over `repeat` calls, each from the same state.
  CompareRow measure_row(Runner& runner, const std::string& name, const std::vector<std::byte>& state,
                         const CallArgs& call_args) {
    std::vector<double> selection, attend, total;
    dense_runner_.run(args());
    const double dense = dense_runner_.stats.total;
    for (int i = 0; i < options_.repeat; ++i) {
      if (!state.empty()) {
        runner.init_state();
        runner.load_state(state);
      }
      runner.run(call_args);
      selection.push_back(selection_seconds(runner.stats));
      attend.push_back(runner.stats.attend);
      total.push_back(runner.stats.total);
    }
    CompareRow row{.method = name,
                   .density = runner.stats.density,
                   .selection = upper_median(selection),
                   .attend = upper_median(attend),
                   .total = upper_median(total),
                   .dense = dense,
                   .quality = {},
                   .notes = {}};
    row.quality = measure(context_, input_.qkv, runner, runner.stats.reason != Reason::sparse, samples_,
                          exact_.empty() ? nullptr : &exact_);
    return row;
  }

  CompareRow run_dense() {
    CompareRow row = measure_row(dense_runner_, "dense", {}, args());
    row.dense = row.total;
    return row;
  }

  CompareRow run_method(const Method& method, double point, Runner& first) {
    Runner runner(context_, at(method, point), input_.shape());
    runner.want_selection();
    CompareRow row = measure_row(runner, method.name, first.save_state(), args());
    row.point = point;
    row.first_selection = selection_seconds(first.stats);
    if (!options_.at.at_rho()) row.notes = target_notes(runner, point, method.name);
    return row;
  }

  // attend alone, on a selection from a file.
  CompareRow run_selection(const GivenSelection& selection) {
    Settings settings = parse_method("scope-exact", "");
    set_setting(settings, "groups", std::to_string(selection.groups));
    Shape shape = input_.shape();
    shape.dense_queries = false;  // it says of every query what it sees
    Runner runner(context_, settings, shape);
    runner.take_selection(selection.labels, selection.mask, selection.keep);
    CallArgs call = args();
    call.keep = call.dense_queries = nullptr;
    call.place = {};
    CompareRow row;
    try {
      row = measure_row(runner, selection.name, {}, call);
    } catch (const Error& error) {
      fail(Status::format, "{}: {}", selection.path, error.what());
    }
    row.point = row.selection = row.first_selection = std::numeric_limits<double>::quiet_NaN();
    row.density = selection.density(input_);
    row.notes = {
        fmt::format("{}: as its file has it, at no other density; its speedup is that of attend alone", row.method)};
    return row;
  }

  std::string setting_line() const {
    const Qkv& qkv = input_.qkv;
    return fmt::format("{}: {} heads x {} tokens{}{} x {}, {}; {} queries per head; {} threads, {}", options_.input.path,
                       qkv.batch * qkv.heads, qkv.q_tokens, input_.grid.empty() ? "" : " = ", input_.grid, qkv.dim,
                       dtype_name(qkv.dtype), samples_, context_.threads(), context_.instruction_set());
  }

  const CompareOptions& options_;
  std::vector<Method> methods_;
  std::vector<double> points_;
  int64_t samples_;
  Context context_;
  Input input_;
  std::vector<GivenSelection> selections_;
  Runner dense_runner_;
  ExactHeads exact_;
  Comparison found_;
};

void run(const CompareOptions& options) {
  Outputs outputs;
  outputs.reads(options.input);
  outputs.reads("--profile", options.profile);
  for (const Method& method : parse_methods(options)) outputs.reads(method.settings);
  for (const GivenSelection& selection : name_selections(options)) outputs.reads("--selection", selection.path);
  outputs.writes("--json", options.json);
  outputs.writes("--csv", options.csv);
  const std::string recall = options.plots + "recall.svg", error = options.plots + "error.svg";
  if (!options.plots.empty()) {
    outputs.writes("--plots", recall);
    outputs.writes("--plots", error);
  }
  CompareRun comparison(options);
  comparison.run();
  const Comparison& found = comparison.found();
  if (!options.json.empty()) write_json(outputs.open(options.json), comparison.json());
  if (!options.csv.empty()) write_text(outputs.open(options.csv), csv(found));
  if (!options.plots.empty()) {
    write_text(outputs.open(recall), svg(recall_chart(found)));
    write_text(outputs.open(error), svg(error_chart(found)));
  }
  outputs.place();
  print(found);
}

}  // namespace

void add_compare(CLI::App& app) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* command = app.add_subcommand(
      "compare",
      "Run methods side by side on the q, k, v of a file (see `scope attend --help`), at matched density.\n"
      "Every method is solved for each density in the call, within 0.005 or, where its steps are coarse, the nearest;\n"
      "with --rho each runs at that rho, and the density is what it keeps there.\n"
      "Each runs once from random rows, and is then timed in warm calls, as a video model makes them at every later step.\n"
      "A method may carry settings, separated by +, for ablations:\n\n"
      "  scope compare qkv.safetensors --methods scope,scope-exact,svg2,sparge --density 0.05,0.1,0.2,0.3 --plots compare-\n"
      "  scope compare qkv.safetensors --methods scope,scope:partition=even:8,scope:partition=random:3+rule=hybrid\n"
      "  scope compare qkv.safetensors --selection mine=mine.safetensors    # a selector of your own beside ours\n\n"
      "A selection is a .safetensors file with labels i32 [heads, tokens], the group of each query or -1, and mask u32\n"
      "[heads, groups, words], bit j of word w being key 32 w + j; keep u32 [1, words], keys that every query sees, may be\n"
      "left out. `scope attend --dump` writes such a file.");
  options->input.add(*command);
  command
      ->add_option("--methods", options->methods,
                   "rows of `scope methods`, with settings as name:setting=value+setting=value")
      ->capture_default_str();
  options->at.add(*command);
  command->add_option("--selection", options->selections,
                      "[NAME=]FILE with the selection of another selector; repeat for more");
  command->add_option("--samples", options->samples, "queries per head on which recall and error are measured, or all")
      ->capture_default_str();
  command->add_option("--repeat", options->repeat, "warm calls of each; times are medians")
      ->check(whole(1, kMostRepeats))
      ->capture_default_str();
  command->add_option("--model", options->model, "take settings of a known model (see `scope methods`)");
  command->add_option("--profile", options->profile, "the setting `profile` for svoo: a CSV of `scope profile`");
  command->add_option("--layer", options->place.layer, "the calls' layer, which must not be a dense one")
      ->check(whole(0, kMostLayers));
  CLI::Option* step = command->add_option("--step", options->place.step, "their denoising step, likewise");
  CLI::Option* steps = command->add_option("--steps", options->place.steps, "how many denoising steps there are");
  step->check(whole(0, kMostSteps))->needs(steps);
  steps->check(whole(1, kMostSteps))->needs(step);
  command->add_option("--json", options->json, "write everything as JSON");
  command->add_option("--csv", options->csv, "write the table as CSV");
  command->add_option("--plots", options->plots,
                      "write PREFIXrecall.svg (recall against density) and PREFIXerror.svg (error against time)");
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
