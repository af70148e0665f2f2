// scope inspect: pictures and an account of what one file's heads look like to a method.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bounds.h"
#include "commands.h"
#include "input.h"
#include "inspection.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "outputs.h"
#include "parse.h"
#include "qkv.h"
#include "runner.h"
#include "terminal.h"

namespace scope::cli {

namespace {

constexpr const char* kFiles[] = {"clusters.svg", "matched_recall.svg", "retention.svg", "histograms.svg", "inspect.json"};

struct InspectOptions {
  InputFlags input;
  MethodFlags method;
  MachineFlags machine;
  std::string scoring = "sparge,svg2,scope-paper", query, frames, samples = "64", output;
  int64_t head = 0, clusters = 10;
  int repeat = 3;
};

// What a run wrote of one head, over the first `keys` keys.
HeadProxy head_proxy(const Runner& runner, const Qkv& qkv, int64_t head, int64_t keys) {
  const Plan& plan = runner.plan();
  const int64_t heads = qkv.batch * qkv.heads;
  HeadProxy proxy;
  proxy.centroids = runner.centroids.data() + head * plan.groups * qkv.dim;
  proxy.k = qkv.view(qkv.k, qkv.k_tokens).head(head / qkv.heads, head % qkv.heads);
  proxy.k.tokens = keys;
  proxy.partition = plan.partition;
  proxy.codes = plan.partition.empty() ? 0 : runner.head_stats[static_cast<size_t>(head)].codes;
  int64_t at = 0;
  for (size_t m = 0; m < plan.partition.size(); ++m) {
    const int64_t each = plan.codes * std::ssize(plan.partition[m]);
    proxy.codebooks.push_back(runner.codebooks.data() + at + head * each);
    proxy.key_codes.push_back(runner.codes.data() + (static_cast<int64_t>(m) * heads + head) * qkv.k_tokens);
    at += heads * each;
  }
  return proxy;
}

class Inspector {
 public:
  explicit Inspector(const InspectOptions& options)
      : options_(options), found_(asked()), context_(options.machine.context()) {
    found_.input = options.input.read(options.method.model);
    found_.grid = video_grid(found_.input, options.input.text);
    found_.keys = grid_tokens(found_.grid);
    found_.of_head = one_head(found_.input, options.head);
    found_.frames = parse_frames(options.frames, found_.grid[0], 5);
    found_.query = checked_query();
    require(!found_.settings.dense, Status::invalid_argument,
            "--method: dense selects nothing; there is nothing to inspect");
    require(options.clusters >= 2 && options.clusters <= std::min(kMostColours, found_.keys), Status::invalid_argument,
            "--clusters: got {}, expected 2..{} for {} video tokens", options.clusters, std::min(kMostColours, found_.keys),
            found_.keys);
    found_.input.check_measurable("inspect");
    found_.samples = std::min(found_.samples, found_.keys);
    // What cannot run is refused before anything is computed.
    for (const std::string& name : split_methods(options.scoring)) {
      Settings settings = parse_method(name, options.method.model);
      require(!settings.dense, Status::invalid_argument, "--scoring: dense scores nothing");
      check_effects(name, options.method.model, {}, settings, surroundings(false));
      options.input.reads_subspaces(found_.of_head, name, {}, settings);
      settings.tail = Tail::none;
      found_.scorings.push_back({name, std::make_unique<Runner>(context_, settings, found_.of_head.shape()), {}, {}, {}});
      found_.scorings.back().runner->attend = false;
      found_.scorings.back().runner->want_selection();
    }
    options.input.reads_subspaces(found_.input, options.method.method, options.method.set, found_.settings);
    found_.runner = std::make_unique<Runner>(context_, found_.settings, found_.input.shape());
    found_.runner->want_selection();
    found_.setting = setting_line();
  }

  void run() {
    constexpr int64_t kBatch = 16;
    const int64_t batches = (found_.samples + kBatch - 1) / kBatch;
    Progress progress("inspect", 3 + std::ssize(found_.scorings) + batches);
    found_.maps = make_cluster_maps(context_, found_.of_head, found_.grid, found_.settings, options_.clusters);
    progress.step("cluster maps");
    found_.times = time_calls(*found_.runner);
    progress.step("calls");
    if (row(found_.settings.proxy).codes && !row(found_.settings.rule).whole_codes) {
      Settings direct = found_.settings;
      direct.proxy = ProxyKind::exact;
      Runner runner(context_, direct, found_.input.shape());
      found_.direct = time_calls(runner);
    }
    progress.step("direct scoring");
    for (Scoring& scoring : found_.scorings) {
      scoring.runner->run(found_.of_head.args());
      scoring.sampled.resize(static_cast<size_t>(found_.samples));
      progress.step(scoring.name);
    }
    match_query();
    for (int64_t first = 0; first < found_.samples; first += kBatch) {
      context_.exec().pool->run(std::min(kBatch, found_.samples - first), [&](int64_t i, int) { match_sample(first + i); });
      progress.step("queries");
    }
    for (int64_t h = 0; h < found_.input.qkv.batch * found_.input.qkv.heads; ++h) {
      found_.costs.push_back(
          scoring_cost(head_proxy(*found_.runner, found_.input.qkv, h, found_.keys), found_.runner->head_stats[h].groups));
    }
  }

  const Inspection& found() const { return found_; }
  const Context& context() const { return context_; }

 private:
  // What the options say by themselves.
  Inspection asked() const {
    Inspection found;
    found.source = options_.input.path;
    found.method = options_.method.method;
    found.head = options_.head;
    found.repeat = options_.repeat;
    found.settings = options_.method.settings(surroundings(true));
    found.samples = parse_samples(options_.samples);
    return found;
  }

  std::string setting_line() const {
    const Qkv& qkv = found_.input.qkv;
    const Grid& grid = found_.grid;
    return fmt::format("{}: head {} of {}, grid {}x{}x{} = {} video tokens, {} channels, {}; {} threads, {}",
                       options_.input.path.empty() ? options_.input.q : options_.input.path, options_.head,
                       qkv.batch * qkv.heads, grid[0], grid[1], grid[2], found_.keys, qkv.dim, dtype_name(qkv.dtype),
                       context_.threads(), context_.instruction_set());
  }

  // maps: of the clusters too, which the method's settings alone decide.
  Surroundings surroundings(bool maps) const {
    return {.layer = false, .step = false, .state = maps, .device = options_.machine.on_device(), .maps = maps};
  }

  Grid checked_query() const {
    if (options_.query.empty()) return {found_.grid[0] / 2, found_.grid[1] / 2, found_.grid[2] / 2};
    const auto at = parse_indices("--query", options_.query);
    require(at.size() == 3, Status::invalid_argument, "--query: got \"{}\", expected frame,row,column", options_.query);
    require(at[0] < found_.grid[0] && at[1] < found_.grid[1] && at[2] < found_.grid[2], Status::invalid_argument,
            "--query: got {}, expected less than {},{},{} (the grid)", options_.query, found_.grid[0], found_.grid[1],
            found_.grid[2]);
    return {at[0], at[1], at[2]};
  }
  int64_t query_token() const {
    return (found_.query[0] * found_.grid[1] + found_.query[1]) * found_.grid[2] + found_.query[2];
  }

  Times time_calls(Runner& runner) const {
    Times times;
    runner.init_state();
    runner.run(found_.input.args());
    times.first = runner.stats;
    const std::vector<std::byte> state = runner.save_state();
    for (int i = 0; i < found_.repeat; ++i) {
      runner.load_state(state);
      runner.run(found_.input.args());
      if (i == 0) times.warm = runner.stats;
      for (double CallStats::*part : {&CallStats::group, &CallStats::encode, &CallStats::score, &CallStats::select,
                                      &CallStats::attend, &CallStats::total}) {
        times.warm.*part = std::min(times.warm.*part, runner.stats.*part);
      }
    }
    return times;
  }

  RowsView rows(const io::Array& x) const {
    RowsView view = found_.of_head.qkv.view(x, found_.of_head.qkv.k_tokens).head(0, 0);
    view.tokens = found_.keys;
    return view;
  }
  ExactQuery exact(int64_t token) const {
    const Qkv& qkv = found_.of_head.qkv;
    return exact_query(rows(qkv.q), rows(qkv.k), rows(qkv.v), token);
  }
  std::vector<double> scores_of(const Scoring& scoring, int64_t token) const {
    return proxy_scores(head_proxy(*scoring.runner, found_.of_head.qkv, 0, found_.keys), scoring.runner->labels[token]);
  }

  void match_query() {
    found_.exact = exact(query_token());
    const double recall[] = {kOracle};
    for (Scoring& scoring : found_.scorings) {
      scoring.scores = scores_of(scoring, query_token());
      scoring.match = match_recall(scoring.scores, oracle_keys(found_.exact), recall)[0];
    }
  }
  void match_sample(int64_t i) {
    const ExactQuery query = exact(sampled_token(i, found_.samples, found_.keys));
    const std::vector<bool> oracle = oracle_keys(query);
    for (Scoring& scoring : found_.scorings) {
      scoring.sampled[i] = match_recall(scores_of(scoring, query.token), oracle, kRecalls);
    }
  }

  const InspectOptions& options_;
  Inspection found_;
  Context context_;
};

void run(const InspectOptions& options) {
  Outputs outputs;
  outputs.reads(options.input);
  outputs.reads(parse_method(options.method.method, options.method.model, options.method.set));
  for (const std::string& name : split_methods(options.scoring)) outputs.reads(parse_method(name, options.method.model));
  for (const char* name : kFiles) outputs.writes_into("--output", options.output, name);
  Inspector inspector(options);
  inspector.run();
  const Inspection& found = inspector.found();
  const std::string folder = options.output + "/";
  write_text(outputs.open(folder + "clusters.svg"), svg(cluster_picture(found)));
  write_text(outputs.open(folder + "matched_recall.svg"), svg(matched_picture(found)));
  write_text(outputs.open(folder + "retention.svg"), svg(retention_chart(found)));
  write_text(outputs.open(folder + "histograms.svg"), svg(histogram_picture(found)));
  write_json(outputs.open(folder + "inspect.json"), to_json(found, inspector.context()));
  outputs.place();
  print(found);
  std::string files;
  for (const char* name : kFiles) files += fmt::format("{}{}{}", files.empty() ? "" : "  ", folder, name);
  fmt::print("\n{}\n", files);
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand(
      "inspect",
      "Look into one head of a q, k, v file (see `scope attend --help`). It draws, into a folder:\n\n"
      "  clusters.svg        where on the frames the clusters of each key subspace (T, H, W) lie\n"
      "  matched_recall.svg  for one query, the keys' scores by each way of scoring, and the keys that each must keep to\n"
      "                      recall 95.8 % of the query's exact top 10 %\n"
      "  retention.svg       how many keys that takes, by recall, as a mean over queries\n"
      "  histograms.svg      sizes and key counts of the groups, and k_head, head by head\n"
      "  inspect.json        every number of these, and the account that is printed: what scoring costs in products and\n"
      "                      lookups, how many codes the keys use, and how long the stages took\n\n"
      "  scope make-qkv --grid 21x20x32 -o qkv.safetensors\n"
      "  scope inspect qkv.safetensors -o look\n"
      "  scope inspect qkv.safetensors --head 1 --query 10,4,7 --frames 0,5,10,15,20 -o look\n"
      "  scope inspect qkv.safetensors --scoring sparge,svg2:codes=333,scope-paper,scope-exact:groups=300 -o look");
  options->input.add(*command);
  command->add_option("-o,--output", options->output, "folder for the pictures; made if it is not there")->required();
  command->add_option("--head", options->head, "which head to draw, counted over samples and heads")
      ->check(whole(0, kMostSamples))
      ->capture_default_str();
  command->add_option("--query", options->query, "its frame,row,column, from 0; default: the middle of the grid");
  command->add_option("--frames", options->frames, "frames to draw, from 0; default: five, evenly from first to last");
  command->add_option("--clusters", options->clusters, "clusters per subspace in clusters.svg")->capture_default_str();
  command
      ->add_option("--scoring", options->scoring,
                   "ways of scoring: methods, with settings as name:setting=value+setting=value")
      ->capture_default_str();
  command->add_option("--samples", options->samples, "queries over which retention is averaged, or all")
      ->capture_default_str();
  command->add_option("--repeat", options->repeat, "warm calls; times are the least")
      ->check(whole(1, kMostRepeats))
      ->capture_default_str();
  options->method.add(*command);
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
