// The table of scope compare, its CSV and its charts.
#include "comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "terminal.h"

namespace scope::cli {

namespace {

// A density is in the table anyway.
std::string label(const Comparison& found, const CompareRow& row) {
  return found.at_rho && &row != &found.dense && !std::isnan(row.point) ? fmt::format("{} at rho {}", row.method, row.point)
                                                                        : row.method;
}

std::vector<const CompareRow*> all_rows(const Comparison& found) {
  std::vector<const CompareRow*> rows{&found.dense};
  for (const CompareRow& row : found.rows) rows.push_back(&row);
  return rows;
}

template <class Point>
Chart chart(const Comparison& found, const char* title, const char* x, const char* y, bool log, const Point& point) {
  Chart chart{.title = title, .x_label = x, .y_label = y, .note = found.setting, .log_x = log, .log_y = log, .series = {}};
  for (const CompareRow& row : found.rows) {
    const auto same = [&](const Series& series) { return series.name == row.method; };
    auto series = std::find_if(chart.series.begin(), chart.series.end(), same);
    if (series == chart.series.end()) series = chart.series.insert(series, Series{row.method, {}});
    series->points.push_back(point(row));
  }
  return chart;
}

}  // namespace

void print(const Comparison& found) {
  fmt::print("{}\n\n", bold(found.setting));
  size_t width = 6;
  for (const CompareRow& row : found.rows) width = std::max(width, label(found, row).size());
  fmt::print("{:<{}}  {:>7}  {:>17}  {:>13}  {:>8}  {:>8}  {:>9}  {:>9}  {:>7}\n", "", width, "density", "mass recall",
             "oracle recall", "error", "cosine", "select ms", "attend ms", "speedup");
  const auto line = [&](const CompareRow& row) {
    const std::string select = std::isnan(row.selection) ? "not timed" : fmt::format("{:.1f}", 1e3 * row.selection);
    fmt::print("{:<{}}  {:>7.4f}  {:>8.4f} ± {:.4f}  {:>13.4f}  {:>8.5f}  {:>8.5f}  {:>9}  {:>9.1f}  {:>6.2f}x\n",
               label(found, row), width, row.density, row.quality.mass_recall, row.quality.mass_interval,
               row.quality.oracle_recall, row.quality.error, row.quality.cosine, select, 1e3 * row.attend,
               row.dense / row.total);
  };
  line(found.dense);
  for (const CompareRow& row : found.rows) line(row);
  fmt::print("\n");
  for (const CompareRow& row : found.rows) {
    for (const std::string& note : row.notes) fmt::print("{}\n", note);
  }
  fmt::print(
      "mass recall: exact softmax mass on the selected keys, with its 95 % interval over the sampled queries;\n"
      "oracle recall: share of the exact top 10 % of keys that was selected; error: |o - o*| / |o*| against float64;\n"
      "times: median of {} warm calls; speedup: over a dense call just before them.\n",
      found.repeat);
}

nlohmann::ordered_json row_json(const Comparison& found, const CompareRow& row) {
  return {{"method", row.method},
          {found.at_rho ? "rho" : "target", row.point},
          {"density", row.density},
          {"mass_recall", row.quality.mass_recall},
          {"mass_interval", row.quality.mass_interval},
          {"oracle_recall", row.quality.oracle_recall},
          {"retention", row.quality.retention},
          {"error", row.quality.error},
          {"cosine", row.quality.cosine},
          {"selection_seconds", row.selection},
          {"first_selection_seconds", row.first_selection},
          {"attend_seconds", row.attend},
          {"total_seconds", row.total},
          {"dense_seconds", row.dense},
          {"speedup", row.dense / row.total},
          {"notes", row.notes}};
}

std::string csv(const Comparison& found) {
  std::string out;
  for (const CompareRow* row : all_rows(found)) {
    const auto json = row_json(found, *row);
    std::vector<std::string> names, values;
    for (const auto& [name, value] : json.items()) {
      if (name == "notes") continue;
      names.push_back(name);
      values.push_back(value.is_string() ? "\"" + value.get<std::string>() + "\"" : value.dump());
    }
    if (out.empty()) out = fmt::format("{}\n", fmt::join(names, ","));
    out += fmt::format("{}\n", fmt::join(values, ","));
  }
  return out;
}

Chart recall_chart(const Comparison& found) {
  return chart(found, "Mass recall against density", "density", "mass recall", false, [](const CompareRow& row) {
    return std::pair{row.density, row.quality.mass_recall};
  });
}
Chart error_chart(const Comparison& found) {
  return chart(found, "Output error against time", "milliseconds of a warm call", "relative error", true,
               [](const CompareRow& row) {
                 return std::pair{1e3 * row.total, std::max(row.quality.error, 1e-9)};
               });
}

}  // namespace scope::cli
