// The account of scope inspect, and its JSON.
#include "inspection.h"

#include <fmt/format.h>

#include <algorithm>

#include "json.h"
#include "machine.h"
#include "stages/choices.h"
#include "statistics.h"
#include "terminal.h"

namespace scope::cli {

std::vector<double> Scoring::retentions(size_t recall) const {
  std::vector<double> values;
  for (const auto& matches : sampled) values.push_back(matches[recall].even_retention);
  return values;
}

double Scoring::mean_retention(size_t recall, bool whole) const {
  double sum = 0;
  for (const auto& matches : sampled) sum += whole ? matches[recall].retention : matches[recall].even_retention;
  return sum / static_cast<double>(sampled.size());
}

double Scoring::reached(size_t recall) const {
  double sum = 0;
  for (const auto& matches : sampled) sum += matches[recall].oracle_recall;
  return sum / static_cast<double>(sampled.size());
}

std::string Scoring::described() const {
  const HeadStats& stats = runner->head_stats[0];
  const auto subspaces = runner->plan().partition.size();
  if (subspaces == 0) return fmt::format("{} groups, exact", stats.groups);
  if (row(runner->plan().settings.encode).blocks) return fmt::format("{} x {} blocks", stats.groups, stats.codes);
  return subspaces == 1 ? fmt::format("{} groups, {} clusters", stats.groups, stats.codes)
                        : fmt::format("{} groups, {} x {} codes", stats.groups, subspaces, stats.codes);
}

std::vector<double> Inspection::group_values(const std::vector<int32_t>& all, int64_t of, bool with_empty) const {
  const int64_t groups = runner->plan().selection_groups, used = runner->head_stats[of].groups;
  std::vector<double> values;
  for (int64_t c = 0; c < used; ++c) {
    if (with_empty || runner->sizes[of * groups + c] > 0) values.push_back(all[of * groups + c]);
  }
  return values;
}

std::vector<bool> oracle_keys(const ExactQuery& exact) {
  std::vector<bool> oracle(exact.mass.size());
  for (size_t j = 0; j < oracle.size(); ++j) oracle[j] = exact.mass[j] >= exact.least_top;
  return oracle;
}

namespace {

void print_matched(const Inspection& found) {
  fmt::print("\nShare of all keys to keep, best score first, for {:.1f} % of the exact top 10 % of the keys:\n",
             100 * kOracle);
  size_t width = 8;
  for (const Scoring& scoring : found.scorings) width = std::max(width, scoring.name.size());
  const std::string query = fmt::format("query {},{},{}", found.query[0], found.query[1], found.query[2]);
  fmt::print("  {:<{}}  {:>20}  {:>8}  {:>38}  {:>9}  {:>8}\n", "", width, query, "recalled",
             fmt::format("mean of {} queries (quartiles)", found.samples), "in wholes", "recalled");
  for (const Scoring& scoring : found.scorings) {
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
      100 * kOracle * static_cast<double>(std::max<int64_t>(1, (found.keys + 9) / 10)) / static_cast<double>(found.keys));
}

void print_heads(const Inspection& found) {
  fmt::print("\nGroups of {} (sizes and counts: least, median, most):\n", found.method);
  fmt::print("  {:<6}{:>8}{:>22}{:>26}{:>9}{:>10}\n", "head", "groups", "queries of a group", "keys of a group", "k_head",
             "density");
  const auto three = [](const std::vector<double>& values) {
    return values.empty()
               ? std::string("-")
               : fmt::format("{:.0f}, {:.0f}, {:.0f}", quantile(values, 0), quantile(values, 0.5), quantile(values, 1));
  };
  for (int64_t h = 0; h < std::ssize(found.runner->head_stats); ++h) {
    const HeadStats& stats = found.runner->head_stats[h];
    fmt::print("  {:<6}{:>8}{:>22}{:>26}{:>9}{:>10.4f}\n", h, stats.groups,
               three(found.group_values(found.runner->sizes, h, true)),
               three(found.group_values(found.runner->counts, h, false)), stats.head_budget, stats.density);
  }
}

void print_cost(const Inspection& found) {
  const ScoringCost& cost = found.costs[found.head];
  fmt::print("\nScoring head {} ({} groups, {} keys, {} subspaces of {} codes):\n", found.head, cost.groups, cost.keys,
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
             found.input.qkv.batch * found.input.qkv.heads, found.repeat);
  fmt::print("  {:<26}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}\n", "", "group", "encode", "score", "select", "attend", "total");
  const auto row = [](const char* name, const CallStats& s) {
    fmt::print("  {:<26}{:>9.1f}{:>9.1f}{:>9.1f}{:>9.1f}{:>9.1f}{:>9.1f}\n", name, 1e3 * s.group, 1e3 * s.encode,
               1e3 * s.score, 1e3 * s.select, 1e3 * s.attend, 1e3 * s.total);
  };
  row("first call", found.times.first);
  row("warm call", found.times.warm);
  if (found.direct.warm.total > 0) row("warm call, scored directly", found.direct.warm);
  fmt::print("  score makes the tables; the lookups (or, directly, the products) are part of select.\n");
}

}  // namespace

void print(const Inspection& found) {
  fmt::print("{}\n", bold(found.setting));
  fmt::print(
      "\n{} clusters of the keys in each subspace; how much of a key's cluster each coordinate alone tells (0 to 1):\n",
      found.maps.clusters);
  fmt::print("  {:<10}{:>9}{:>8}{:>8}{:>8}\n", "subspace", "channels", "frame", "row", "column");
  for (size_t m = 0; m < found.maps.names.size(); ++m) {
    fmt::print("  {:<10}{:>9}{:>8.3f}{:>8.3f}{:>8.3f}\n", found.maps.names[m], found.maps.channels[m],
               found.maps.shares[m][0], found.maps.shares[m][1], found.maps.shares[m][2]);
  }
  print_matched(found);
  print_heads(found);
  print_cost(found);
}

namespace {

nlohmann::ordered_json match_json(const RecallMatch& match) {
  return {{"recall", match.recall},
          {"kept", match.kept},
          {"oracle_recall", match.oracle_recall},
          {"retention", match.retention},
          {"even_retention", match.even_retention}};
}
nlohmann::ordered_json cost_json(const ScoringCost& cost) {
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
nlohmann::ordered_json times_json(const CallStats& s) {
  return {{"group", s.group},   {"encode", s.encode}, {"score", s.score},
          {"select", s.select}, {"attend", s.attend}, {"total", s.total}};
}

}  // namespace

nlohmann::ordered_json to_json(const Inspection& found, const Context& context) {
  const Qkv& qkv = found.input.qkv;
  nlohmann::ordered_json out{{"input", found.source},
                             {"grid", found.grid},
                             {"heads", qkv.batch * qkv.heads},
                             {"head", found.head},
                             {"dim", qkv.dim},
                             {"dtype", dtype_name(qkv.dtype)},
                             {"machine", machine_json(context)},
                             {"method", found.method},
                             {"settings", settings_json(found.settings)}};
  nlohmann::ordered_json& clusters = out["clusters"];
  clusters = {{"count", found.maps.clusters}, {"frames", found.frames}};
  for (size_t m = 0; m < found.maps.names.size(); ++m) {
    std::vector<int64_t> sizes(static_cast<size_t>(found.maps.clusters), 0);
    for (const int32_t label : found.maps.labels[m]) ++sizes[label];
    clusters["subspaces"].push_back({{"name", found.maps.names[m]},
                                     {"channels", found.maps.channels[m]},
                                     {"sizes", sizes},
                                     {"axis_shares", found.maps.shares[m]}});
  }
  nlohmann::ordered_json& matched = out["matched_recall"];
  matched = {{"query", found.query}, {"queries", found.samples}};
  for (const Scoring& scoring : found.scorings) {
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
  for (int64_t h = 0; h < std::ssize(found.runner->head_stats); ++h) {
    const HeadStats& stats = found.runner->head_stats[h];
    out["by_head"].push_back({{"density", stats.density},
                              {"k_head", stats.head_budget},
                              {"group_sizes", found.group_values(found.runner->sizes, h, true)},
                              {"counts", found.group_values(found.runner->counts, h, true)},
                              {"cost", cost_json(found.costs[h])}});
  }
  out["seconds"] = {{"first", times_json(found.times.first)}, {"warm", times_json(found.times.warm)}};
  if (found.direct.warm.total > 0) out["seconds"]["warm_scored_directly"] = times_json(found.direct.warm);
  return out;
}

}  // namespace scope::cli
