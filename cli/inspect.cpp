// scope inspect: pictures and an account of what one file's heads look like to a method.
#include "inspect.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "bounds.h"
#include "commands.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "methods/methods.h"
#include "outputs.h"
#include "parse.h"
#include "plot.h"
#include "runner.h"
#include "statistics.h"
#include "terminal.h"

namespace scope::cli {

namespace {

constexpr double kOracle = 0.958;  // the recall at which the paper compares
constexpr double kRecalls[] = {0.5, 0.6, 0.7, 0.8, 0.9, 0.95, kOracle, 0.99};
constexpr size_t kMatched = 6;  // of kOracle
constexpr const char* kFiles[] = {"clusters.svg", "matched_recall.svg", "retention.svg", "histograms.svg", "inspect.json"};

struct InspectOptions {
  InputFlags input;
  MethodFlags method;
  MachineFlags machine;
  std::string scoring = "sparge,svg2,scope-paper", query, frames, samples = "64", output;
  int64_t head = 0, clusters = 10;
  int repeat = 3;
};

int64_t map_scale(const Grid& grid) { return std::clamp<int64_t>(160 / grid[2], 1, 10); }

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

// One way of scoring keys: a method's selection of the head, and how well its scores rank keys.
struct Scoring {
  std::string name;
  std::unique_ptr<Runner> runner;
  RecallMatch match;                              // of the query in the picture
  std::vector<double> scores;                     // of that query
  std::vector<std::vector<RecallMatch>> sampled;  // per sampled query, one per kRecalls

  std::vector<double> retentions(size_t recall) const {
    std::vector<double> values;
    for (const auto& matches : sampled) values.push_back(matches[recall].even_retention);
    return values;
  }
  double mean_retention(size_t recall, bool whole) const {
    double sum = 0;
    for (const auto& matches : sampled) sum += whole ? matches[recall].retention : matches[recall].even_retention;
    return sum / static_cast<double>(sampled.size());
  }
  double reached(size_t recall) const {
    double sum = 0;
    for (const auto& matches : sampled) sum += matches[recall].oracle_recall;
    return sum / static_cast<double>(sampled.size());
  }
  std::string described() const {
    const HeadStats& stats = runner->head_stats[0];
    const auto subspaces = runner->plan().partition.size();
    if (subspaces == 0) return fmt::format("{} groups, exact", stats.groups);
    if (row(runner->plan().settings.encode).blocks) return fmt::format("{} x {} blocks", stats.groups, stats.codes);
    return subspaces == 1 ? fmt::format("{} groups, {} clusters", stats.groups, stats.codes)
                          : fmt::format("{} groups, {} x {} codes", stats.groups, subspaces, stats.codes);
  }
};

std::vector<bool> oracle_keys(const ExactQuery& exact) {
  std::vector<bool> oracle(exact.mass.size());
  for (size_t j = 0; j < oracle.size(); ++j) oracle[j] = exact.mass[j] >= exact.least_top;
  return oracle;
}

// Least seconds of warm calls, each from the state that the first call left.
struct Times {
  CallStats first, warm;
};

class Inspection {
 public:
  explicit Inspection(const InspectOptions& options)
      : options_(options),
        settings_(options.method.settings(surroundings(true))),
        samples_(parse_samples(options.samples)),
        context_(options.machine.context()),
        input_(options.input.read(options.method.model)),
        grid_(video_grid(input_, options.input.text)),
        keys_(grid_tokens(grid_)),
        head_(one_head(input_, options.head)),
        frames_(parse_frames(options.frames, grid_[0], 5)),
        query_(checked_query()) {
    require(!settings_.dense, Status::invalid_argument, "--method: dense selects nothing; there is nothing to inspect");
    require(options.clusters >= 2 && options.clusters <= std::min(kMostColours, keys_), Status::invalid_argument,
            "--clusters: got {}, expected 2..{} for {} video tokens", options.clusters, std::min(kMostColours, keys_),
            keys_);
    input_.check_measurable("inspect");
    samples_ = std::min(samples_, keys_);
    // What cannot run is refused before anything is computed.
    for (const std::string& name : split_methods(options.scoring)) {
      Settings settings = parse_method(name, options.method.model);
      require(!settings.dense, Status::invalid_argument, "--scoring: dense scores nothing");
      check_effects(name, options.method.model, {}, settings, surroundings(false));
      options.input.reads_subspaces(head_, name, {}, settings);
      settings.tail = Tail::none;
      scorings_.push_back({name, std::make_unique<Runner>(context_, settings, head_.shape()), {}, {}, {}});
      scorings_.back().runner->attend = false;
      scorings_.back().runner->want_selection();
    }
    options.input.reads_subspaces(input_, options.method.method, options.method.set, settings_);
    runner_ = std::make_unique<Runner>(context_, settings_, input_.shape());
    runner_->want_selection();
  }

  void run() {
    constexpr int64_t kBatch = 16;
    const int64_t batches = (samples_ + kBatch - 1) / kBatch;
    Progress progress("inspect", 3 + std::ssize(scorings_) + batches);
    maps_ = make_cluster_maps(context_, head_, grid_, settings_, options_.clusters);
    progress.step("cluster maps");
    times_ = time_calls(*runner_);
    progress.step("calls");
    if (row(settings_.proxy).codes && !row(settings_.rule).whole_codes) {
      Settings direct = settings_;
      direct.proxy = ProxyKind::exact;
      Runner runner(context_, direct, input_.shape());
      direct_ = time_calls(runner);
    }
    progress.step("direct scoring");
    for (Scoring& scoring : scorings_) {
      scoring.runner->run(head_.args());
      scoring.sampled.resize(static_cast<size_t>(samples_));
      progress.step(scoring.name);
    }
    match_query();
    for (int64_t first = 0; first < samples_; first += kBatch) {
      context_.exec().pool->run(std::min(kBatch, samples_ - first), [&](int64_t i, int) { match_sample(first + i); });
      progress.step("queries");
    }
    for (int64_t h = 0; h < input_.qkv.batch * input_.qkv.heads; ++h) {
      costs_.push_back(scoring_cost(head_proxy(*runner_, input_.qkv, h, keys_), runner_->head_stats[h].groups));
    }
  }

  void print() const {
    fmt::print("{}\n", bold(setting_line()));
    fmt::print(
        "\n{} clusters of the keys in each subspace; how much of a key's cluster each coordinate alone tells (0 to 1):\n",
        maps_.clusters);
    fmt::print("  {:<10}{:>9}{:>8}{:>8}{:>8}\n", "subspace", "channels", "frame", "row", "column");
    for (size_t m = 0; m < maps_.names.size(); ++m) {
      fmt::print("  {:<10}{:>9}{:>8.3f}{:>8.3f}{:>8.3f}\n", maps_.names[m], maps_.channels[m], maps_.shares[m][0],
                 maps_.shares[m][1], maps_.shares[m][2]);
    }
    print_matched();
    print_heads();
    print_cost();
    std::string files;
    for (const char* name : kFiles) files += fmt::format("{}{}/{}", files.empty() ? "" : "  ", options_.output, name);
    fmt::print("\n{}\n", files);
  }

  void write(Outputs& outputs) const {
    const auto& folder = options_.output;
    write_text(outputs.open(folder + "/clusters.svg"), svg(cluster_picture()));
    write_text(outputs.open(folder + "/matched_recall.svg"), svg(matched_picture()));
    write_text(outputs.open(folder + "/retention.svg"), svg(retention_chart()));
    write_text(outputs.open(folder + "/histograms.svg"), svg(histogram_picture()));
    write_json(outputs.open(folder + "/inspect.json"), json());
    outputs.place();
  }

 private:
  // maps: of the clusters too, which settings_ alone decides.
  Surroundings surroundings(bool maps) const {
    return {.layer = false, .step = false, .state = maps, .device = options_.machine.on_device(), .maps = maps};
  }

  Grid checked_query() const {
    if (options_.query.empty()) return {grid_[0] / 2, grid_[1] / 2, grid_[2] / 2};
    const auto at = parse_indices("--query", options_.query);
    require(at.size() == 3, Status::invalid_argument, "--query: got \"{}\", expected frame,row,column", options_.query);
    require(at[0] < grid_[0] && at[1] < grid_[1] && at[2] < grid_[2], Status::invalid_argument,
            "--query: got {}, expected less than {},{},{} (the grid)", options_.query, grid_[0], grid_[1], grid_[2]);
    return {at[0], at[1], at[2]};
  }
  int64_t query_token() const { return (query_[0] * grid_[1] + query_[1]) * grid_[2] + query_[2]; }

  Times time_calls(Runner& runner) {
    Times times;
    runner.init_state();
    runner.run(input_.args());
    times.first = runner.stats;
    const std::vector<std::byte> state = runner.save_state();
    for (int i = 0; i < options_.repeat; ++i) {
      runner.load_state(state);
      runner.run(input_.args());
      if (i == 0) times.warm = runner.stats;
      for (double CallStats::*part : {&CallStats::group, &CallStats::encode, &CallStats::score, &CallStats::select,
                                      &CallStats::attend, &CallStats::total}) {
        times.warm.*part = std::min(times.warm.*part, runner.stats.*part);
      }
    }
    return times;
  }

  RowsView rows(const io::Array& x) const {
    RowsView view = head_.qkv.view(x, head_.qkv.k_tokens).head(0, 0);
    view.tokens = keys_;
    return view;
  }
  ExactQuery exact(int64_t token) const {
    const Qkv& qkv = head_.qkv;
    return exact_query(rows(qkv.q), rows(qkv.k), rows(qkv.v), token);
  }
  std::vector<double> scores_of(const Scoring& scoring, int64_t token) const {
    return proxy_scores(head_proxy(*scoring.runner, head_.qkv, 0, keys_), scoring.runner->labels[token]);
  }

  void match_query() {
    exact_ = exact(query_token());
    const double recall[] = {kOracle};
    for (Scoring& scoring : scorings_) {
      scoring.scores = scores_of(scoring, query_token());
      scoring.match = match_recall(scoring.scores, oracle_keys(exact_), recall)[0];
    }
  }
  void match_sample(int64_t i) {
    const ExactQuery query = exact(sampled_token(i, samples_, keys_));
    const std::vector<bool> oracle = oracle_keys(query);
    for (Scoring& scoring : scorings_) {
      scoring.sampled[i] = match_recall(scores_of(scoring, query.token), oracle, kRecalls);
    }
  }

  std::string setting_line() const {
    const Qkv& qkv = input_.qkv;
    return fmt::format("{}: head {} of {}, grid {}x{}x{} = {} video tokens, {} channels, {}; {} threads, {}",
                       options_.input.path.empty() ? options_.input.q : options_.input.path, options_.head,
                       qkv.batch * qkv.heads, grid_[0], grid_[1], grid_[2], keys_, qkv.dim, dtype_name(qkv.dtype),
                       context_.threads(), context_.instruction_set());
  }

  void print_matched() const {
    fmt::print("\nShare of all keys to keep, best score first, for {:.1f} % of the exact top 10 % of the keys:\n",
               100 * kOracle);
    size_t width = 8;
    for (const Scoring& scoring : scorings_) width = std::max(width, scoring.name.size());
    const std::string query = fmt::format("query {},{},{}", query_[0], query_[1], query_[2]);
    fmt::print("  {:<{}}  {:>20}  {:>8}  {:>38}  {:>9}  {:>8}\n", "", width, query, "recalled",
               fmt::format("mean of {} queries (quartiles)", samples_), "in wholes", "recalled");
    for (const Scoring& scoring : scorings_) {
      const auto values = scoring.retentions(kMatched);
      fmt::print("  {:<{}}  {:>18.1f} %  {:>6.1f} %  {:>38}  {:>7.1f} %  {:>6.1f} %   {}\n", scoring.name, width,
                 100 * scoring.match.retention, 100 * scoring.match.oracle_recall,
                 fmt::format("{:.1f} % ({:.1f}, {:.1f}, {:.1f})", 100 * mean(values), 100 * quantile(values, 0.25),
                             100 * quantile(values, 0.5), 100 * quantile(values, 0.75)),
                 100 * scoring.mean_retention(kMatched, true), 100 * scoring.reached(kMatched), scoring.described());
    }
    fmt::print(
        "  The best that any score can do is {:.1f} %. In wholes: keys of equal score kept together, as the query's; the "
        "mean\n"
        "  keeps the last of them in part, so that all methods recall the same.\n",
        100 * kOracle * static_cast<double>(std::max<int64_t>(1, (keys_ + 9) / 10)) / static_cast<double>(keys_));
  }

  // Of the groups that selected; a group of densely attending queries comes after them.
  std::vector<double> group_values(const std::vector<int32_t>& all, int64_t head, bool with_empty) const {
    const int64_t groups = runner_->plan().selection_groups, used = runner_->head_stats[head].groups;
    std::vector<double> values;
    for (int64_t c = 0; c < used; ++c) {
      if (with_empty || runner_->sizes[head * groups + c] > 0) values.push_back(all[head * groups + c]);
    }
    return values;
  }

  void print_heads() const {
    fmt::print("\nGroups of {} (sizes and counts: least, median, most):\n", options_.method.method);
    fmt::print("  {:<6}{:>8}{:>22}{:>26}{:>9}{:>10}\n", "head", "groups", "queries of a group", "keys of a group", "k_head",
               "density");
    const auto three = [](const std::vector<double>& values) {
      return values.empty()
                 ? std::string("-")
                 : fmt::format("{:.0f}, {:.0f}, {:.0f}", quantile(values, 0), quantile(values, 0.5), quantile(values, 1));
    };
    for (int64_t h = 0; h < std::ssize(runner_->head_stats); ++h) {
      const HeadStats& stats = runner_->head_stats[h];
      fmt::print("  {:<6}{:>8}{:>22}{:>26}{:>9}{:>10.4f}\n", h, stats.groups, three(group_values(runner_->sizes, h, true)),
                 three(group_values(runner_->counts, h, false)), stats.head_budget, stats.density);
    }
  }

  void print_cost() const {
    const ScoringCost& cost = costs_[options_.head];
    fmt::print("\nScoring head {} ({} groups, {} keys, {} subspaces of {} codes):\n", options_.head, cost.groups, cost.keys,
               cost.subspaces, cost.codes);
    const auto line = [](const char* name, double value, const char* more) {
      fmt::print("  {:<34}{:>16}   {}\n", name, fmt::format("{:.6g}", value), more);
    };
    line("direct multiply-adds", cost.direct_macs, "groups x keys x channels");
    if (cost.subspaces > 0) {
      line("table multiply-adds", cost.table_macs, "groups x codes x channels");
      line("ratio", cost.mac_reduction, "keys / codes");
      line("lookups", cost.lookups, "groups x keys x subspaces");
      line("additions", cost.additions, "groups x keys x (subspaces - 1)");
      line("codes that a key can have", cost.code_space, "codes ^ subspaces");
      line("over one codebook as large", cost.code_space_gain, "codes ^ (subspaces - 1)");
      line("codes that the keys have", static_cast<double>(cost.distinct_codes),
           fmt::format("of at most {:.6g}", std::min(cost.code_space, static_cast<double>(cost.keys))).c_str());
      line("numbers in the codebooks", cost.centroid_scalars, "codes x channels");
      line("numbers in one of all those codes", cost.monolithic_scalars, "codes ^ subspaces x channels");
    }
    fmt::print("\nMilliseconds of a call over all heads, here {} (warm: least of {}):\n",
               input_.qkv.batch * input_.qkv.heads, options_.repeat);
    fmt::print("  {:<26}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}\n", "", "group", "encode", "score", "select", "attend", "total");
    const auto row = [](const char* name, const CallStats& s) {
      fmt::print("  {:<26}{:>9.1f}{:>9.1f}{:>9.1f}{:>9.1f}{:>9.1f}{:>9.1f}\n", name, 1e3 * s.group, 1e3 * s.encode,
                 1e3 * s.score, 1e3 * s.select, 1e3 * s.attend, 1e3 * s.total);
    };
    row("first call", times_.first);
    row("warm call", times_.warm);
    if (direct_.warm.total > 0) row("warm call, scored directly", direct_.warm);
    fmt::print("  score makes the tables; the lookups (or, directly, the products) are part of select.\n");
  }

  PanelPicture cluster_picture() const {
    PanelPicture picture{.title = fmt::format("{} clusters of the keys in each subspace", maps_.clusters),
                         .notes = {setting_line(), "Colours mean the same within a row only."},
                         .sections = {cluster_section(maps_, frames_)}};
    return picture;
  }

  PanelPicture matched_picture() const {
    std::vector<int64_t> frames = frames_;
    frames.push_back(query_[0]);
    std::sort(frames.begin(), frames.end());
    frames.erase(std::unique(frames.begin(), frames.end()), frames.end());
    const int64_t scale = map_scale(grid_);
    std::vector<double> logits;
    for (const double p : exact_.mass) logits.push_back(std::log(std::max(p, 1e-300)));
    const double centre = mean(logits);
    const double low = quantile(logits, 0.01) - centre, high = quantile(logits, 0.99) - centre;
    const std::vector<bool> oracle = oracle_keys(exact_);
    std::vector<std::string> names{"exact"}, score_details{"the query's own"}, mask_details;
    std::vector<const std::vector<double>*> scores{&logits};
    std::vector<double> thresholds{std::log(exact_.least_top)};
    mask_details.push_back("its top 10 %");
    for (const Scoring& scoring : scorings_) {
      names.push_back(scoring.name);
      score_details.push_back(scoring.described());
      scores.push_back(&scoring.scores);
      thresholds.push_back(scoring.match.threshold);
      mask_details.push_back(
          fmt::format("keeps {:.1f} % for {:.1f} %", 100 * scoring.match.retention, 100 * scoring.match.oracle_recall));
    }
    const auto panels = [&](int64_t frame, const std::function<Colour(size_t, int64_t)>& colour) {
      PanelRow row{fmt::format("frame {}", frame), {}};
      for (size_t i = 0; i < scores.size(); ++i) {
        Panel panel{map_image(grid_[1], grid_[2], scale,
                              [&](int64_t y, int64_t x) { return colour(i, (frame * grid_[1] + y) * grid_[2] + x); })};
        panel.marked = frame == query_[0];
        panel.x = (static_cast<double>(query_[2]) + 0.5) * static_cast<double>(scale);
        panel.y = (static_cast<double>(query_[1]) + 0.5) * static_cast<double>(scale);
        row.panels.push_back(std::move(panel));
      }
      return row;
    };
    PanelSection score{"Scores of the keys", names, score_details, {}}, mask{"Kept keys", names, mask_details, {}};
    std::vector<double> centres;
    centres.reserve(scores.size());
    for (const auto* s : scores) centres.push_back(mean(*s));
    for (const int64_t frame : frames) {
      score.rows.push_back(panels(frame, [&](size_t i, int64_t j) {
        return ramp_colour(((*scores[i])[j] - centres[i] - low) / std::max(high - low, 1e-12));
      }));
      mask.rows.push_back(panels(frame, [&](size_t i, int64_t j) -> Colour {
        const bool kept = i == 0 ? oracle[j] : (*scores[i])[j] >= thresholds[i];
        if (!oracle[j]) return kept ? Colour{150, 160, 172} : Colour{28, 30, 38};
        return kept ? Colour{250, 208, 90} : Colour{222, 60, 75};
      }));
    }
    return {
        .title = fmt::format("Query at frame {}, row {}, column {}: keys kept for {:.1f} % of its exact top 10 %", query_[0],
                             query_[1], query_[2], 100 * kOracle),
        .notes = {setting_line(),
                  fmt::format("Scores: logits less their mean, {:.1f} (dark) to {:.1f} (light) in every panel.", low, high),
                  "Kept keys: yellow, of the exact top 10 %; grey, not of it; red, missed. Shares are of all keys, of "
                  "these frames and the others."},
        .sections = {score, mask}};
  }

  Chart retention_chart() const {
    Chart chart{.title = "Keys to keep for a share of the exact top 10 %",
                .x_label = "oracle recall",
                .y_label = fmt::format("share of keys kept, mean of {} queries", samples_),
                .note = setting_line(),
                .series = {}};
    for (const Scoring& scoring : scorings_) {
      Series series{scoring.name, {}};
      for (size_t i = 0; i < std::size(kRecalls); ++i) {
        series.points.emplace_back(kRecalls[i], scoring.mean_retention(i, false));
      }
      chart.series.push_back(series);
    }
    return chart;
  }

  HistogramPicture histogram_picture() const {
    HistogramPicture picture{.title = fmt::format("Groups of {}, by head", options_.method.method),
                             .notes = {setting_line(), "Bars count groups; the red line is k_head."},
                             .columns = {"queries of a group", "keys that a group keeps"},
                             .rows = {}};
    for (int64_t h = 0; h < std::ssize(runner_->head_stats); ++h) {
      const HeadStats& stats = runner_->head_stats[h];
      HistogramRow row{fmt::format("head {}", h),
                       fmt::format("{} groups, k_head {}, density {:.4f}", stats.groups, stats.head_budget, stats.density),
                       {{group_values(runner_->sizes, h, true)}, {group_values(runner_->counts, h, false)}}};
      if (stats.head_budget > 0) row.columns[1].mark = static_cast<double>(stats.head_budget);
      picture.rows.push_back(std::move(row));
    }
    return picture;
  }

  static nlohmann::ordered_json match_json(const RecallMatch& match) {
    return {{"recall", match.recall},
            {"kept", match.kept},
            {"oracle_recall", match.oracle_recall},
            {"retention", match.retention},
            {"even_retention", match.even_retention}};
  }
  static nlohmann::ordered_json cost_json(const ScoringCost& cost) {
    return {{"groups", cost.groups},
            {"keys", cost.keys},
            {"dim", cost.dim},
            {"subspaces", cost.subspaces},
            {"codes", cost.codes},
            {"direct_macs", cost.direct_macs},
            {"table_macs", cost.table_macs},
            {"lookups", cost.lookups},
            {"additions", cost.additions},
            {"mac_reduction", cost.mac_reduction},
            {"code_space", cost.code_space},
            {"code_space_gain", cost.code_space_gain},
            {"centroid_scalars", cost.centroid_scalars},
            {"monolithic_scalars", cost.monolithic_scalars},
            {"distinct_codes", cost.distinct_codes}};
  }
  static nlohmann::ordered_json times_json(const CallStats& s) {
    return {{"group", s.group},   {"encode", s.encode}, {"score", s.score},
            {"select", s.select}, {"attend", s.attend}, {"total", s.total}};
  }

  nlohmann::ordered_json json() const {
    const Qkv& qkv = input_.qkv;
    nlohmann::ordered_json out{{"input", options_.input.path},
                               {"grid", grid_},
                               {"heads", qkv.batch * qkv.heads},
                               {"head", options_.head},
                               {"dim", qkv.dim},
                               {"dtype", dtype_name(qkv.dtype)},
                               {"machine", machine_json(context_)},
                               {"method", options_.method.method},
                               {"settings", settings_json(settings_)}};
    nlohmann::ordered_json& clusters = out["clusters"];
    clusters = {{"count", maps_.clusters}, {"frames", frames_}};
    for (size_t m = 0; m < maps_.names.size(); ++m) {
      std::vector<int64_t> sizes(static_cast<size_t>(maps_.clusters), 0);
      for (const int32_t label : maps_.labels[m]) ++sizes[label];
      clusters["subspaces"].push_back(
          {{"name", maps_.names[m]}, {"channels", maps_.channels[m]}, {"sizes", sizes}, {"axis_shares", maps_.shares[m]}});
    }
    nlohmann::ordered_json& matched = out["matched_recall"];
    matched = {{"query", query_}, {"queries", samples_}};
    for (const Scoring& scoring : scorings_) {
      nlohmann::ordered_json row{{"method", scoring.name},
                                 {"settings", settings_json(scoring.runner->plan().settings)},
                                 {"groups", scoring.runner->head_stats[0].groups},
                                 {"codes", scoring.runner->head_stats[0].codes},
                                 {"of_query", match_json(scoring.match)}};
      for (size_t i = 0; i < std::size(kRecalls); ++i) {
        const auto values = scoring.retentions(i);
        row["of_queries"].push_back({{"recall", kRecalls[i]},
                                     {"mean_retention", mean(values)},
                                     {"quartiles", {quantile(values, 0.25), quantile(values, 0.5), quantile(values, 0.75)}},
                                     {"mean_whole_retention", scoring.mean_retention(i, true)},
                                     {"mean_oracle_recall", scoring.reached(i)}});
      }
      matched["methods"].push_back(row);
    }
    for (int64_t h = 0; h < std::ssize(runner_->head_stats); ++h) {
      const HeadStats& stats = runner_->head_stats[h];
      out["by_head"].push_back({{"density", stats.density},
                                {"k_head", stats.head_budget},
                                {"group_sizes", group_values(runner_->sizes, h, true)},
                                {"counts", group_values(runner_->counts, h, true)},
                                {"cost", cost_json(costs_[h])}});
    }
    out["seconds"] = {{"first", times_json(times_.first)}, {"warm", times_json(times_.warm)}};
    if (direct_.warm.total > 0) out["seconds"]["warm_scored_directly"] = times_json(direct_.warm);
    return out;
  }

  const InspectOptions& options_;
  Settings settings_;
  int64_t samples_;
  Context context_;
  Input input_;
  Grid grid_;
  int64_t keys_;  // video tokens
  Input head_;    // of that head alone
  std::vector<int64_t> frames_;
  Grid query_;
  std::vector<Scoring> scorings_;
  std::unique_ptr<Runner> runner_;
  ClusterMaps maps_;
  Times times_, direct_;
  ExactQuery exact_;
  std::vector<ScoringCost> costs_;
};

void run(const InspectOptions& options) {
  Outputs outputs;
  outputs.reads(options.input);
  outputs.reads(parse_method(options.method.method, options.method.model, options.method.set));
  for (const std::string& name : split_methods(options.scoring)) outputs.reads(parse_method(name, options.method.model));
  for (const char* name : kFiles) outputs.writes_into("--output", options.output, name);
  Inspection inspection(options);
  inspection.run();
  inspection.write(outputs);
  inspection.print();
}

}  // namespace

Grid video_grid(const Input& input, int64_t text) {
  require(!input.grid.empty(), Status::invalid_argument,
          "--grid: the file does not say its grid; expected --grid TxHxW with {} tokens", input.qkv.q_tokens - text);
  const auto sizes = parse_list("grid", input.grid, 'x');
  require(sizes.size() == 3, Status::invalid_argument, "grid: got \"{}\", expected TxHxW", input.grid);
  require(input.qkv.k_tokens == input.qkv.q_tokens, Status::shape, "k: got {} tokens, expected the {} of q and the grid {}",
          input.qkv.k_tokens, input.qkv.q_tokens, input.grid);
  require(text > 0 || (input.keep.empty() && input.dense_queries.empty()), Status::unsupported,
          "keep, dense_queries: the file marks tokens of its own; only text at the end (--text) can be drawn");
  return {sizes[0], sizes[1], sizes[2]};
}

int64_t grid_tokens(const Grid& grid) { return grid[0] * grid[1] * grid[2]; }

Input one_head(const Input& input, int64_t head) {
  const Qkv& all = input.qkv;
  require(head >= 0 && head < all.batch * all.heads, Status::invalid_argument,
          "--head: got {}, expected 0..{} ({} samples x {} heads)", head, all.batch * all.heads - 1, all.batch, all.heads);
  const auto cut = [&](const io::Array& x) {
    const auto bytes = static_cast<int64_t>(x.data.size()) / (all.batch * all.heads);
    const auto tokens = x.shape[x.shape.size() - 2];
    return io::Array{x.type, {1, tokens, all.dim}, {x.data.begin() + head * bytes, x.data.begin() + (head + 1) * bytes}};
  };
  Input out{.qkv = make_qkv_input(cut(all.q), cut(all.k), cut(all.v)), .grid = input.grid};
  out.qkv.rope = all.rope;
  out.qkv.subspaces = all.subspaces;
  const auto sample = [&](const std::vector<uint32_t>& words) {
    const auto each = static_cast<int64_t>(words.size()) / all.batch, at = head / all.heads * each;
    return std::vector<uint32_t>(words.begin() + at, words.begin() + at + each);
  };
  out.keep = sample(input.keep);
  out.dense_queries = sample(input.dense_queries);
  return out;
}

std::vector<int64_t> parse_frames(const std::string& text, int64_t end, int64_t most) {
  std::vector<int64_t> frames;
  if (text.empty()) {
    const int64_t count = std::min(most, end);
    for (int64_t i = 0; i < count; ++i) frames.push_back(count == 1 ? 0 : i * (end - 1) / (count - 1));
    return frames;
  }
  frames = parse_indices("--frames", text);
  for (const int64_t frame : frames) {
    require(frame < end, Status::invalid_argument, "--frames: got {}, expected 0..{}: the grid has {} frames", frame,
            end - 1, end);
  }
  return frames;
}

ClusterMaps make_cluster_maps(const Context& context, const Input& head, const Grid& grid, const Settings& settings,
                              int64_t clusters) {
  Settings clustering = find_method("scope-paper").settings();
  clustering.partition = settings.partition;
  clustering.seed = settings.seed;
  clustering.codes = clusters;
  clustering.groups = 1;
  Runner runner(context, clustering, head.shape());
  runner.attend = false;
  runner.want_selection();
  runner.run(head.args());
  ClusterMaps maps{.grid = grid, .clusters = clusters, .names = {}, .channels = {}, .labels = {}, .shares = {}};
  const Partition& partition = runner.plan().partition;
  const bool rope = clustering.partition == "rope" && head.qkv.subspaces.empty() && partition.size() == 3;
  for (size_t m = 0; m < partition.size(); ++m) {
    maps.names.push_back(rope ? std::string(1, "THW"[m]) : std::to_string(m));
    maps.channels.push_back(std::ssize(partition[m]));
    const int32_t* codes = runner.codes.data() + static_cast<int64_t>(m) * head.qkv.k_tokens;
    maps.labels.emplace_back(codes, codes + grid_tokens(grid));
    maps.shares.push_back(axis_shares(codes, grid));
  }
  return maps;
}

PanelSection cluster_section(const ClusterMaps& maps, const std::vector<int64_t>& frames) {
  PanelSection section;
  section.title = "Subspaces down, frames across";
  for (const int64_t frame : frames) section.columns.push_back(fmt::format("frame {}", frame));
  for (size_t m = 0; m < maps.names.size(); ++m) {
    PanelRow row{fmt::format("{} ({} ch.)", maps.names[m], maps.channels[m]), {}};
    for (const int64_t frame : frames) {
      row.panels.push_back({map_image(maps.grid[1], maps.grid[2], map_scale(maps.grid), [&](int64_t y, int64_t x) {
        return cluster_colour(maps.labels[m][(frame * maps.grid[1] + y) * maps.grid[2] + x]);
      })});
    }
    section.rows.push_back(std::move(row));
  }
  return section;
}

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
