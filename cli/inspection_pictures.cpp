// The pictures of scope inspect.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "inspection.h"
#include "plot.h"
#include "statistics.h"

namespace scope::cli {

PanelPicture cluster_picture(const Inspection& found) {
  PanelPicture picture{.title = fmt::format("{} clusters of the keys in each subspace", found.maps.clusters),
                       .notes = {found.setting, "Colours mean the same within a row only."},
                       .sections = {cluster_section(found.maps, found.frames)}};
  return picture;
}

PanelPicture matched_picture(const Inspection& found) {
  std::vector<int64_t> frames = found.frames;
  frames.push_back(found.query[0]);
  std::sort(frames.begin(), frames.end());
  frames.erase(std::unique(frames.begin(), frames.end()), frames.end());
  const int64_t scale = map_scale(found.grid);
  std::vector<double> logits;
  for (const double p : found.exact.mass) logits.push_back(std::log(std::max(p, 1e-300)));
  const double centre = mean(logits);
  const double low = quantile(logits, 0.01) - centre, high = quantile(logits, 0.99) - centre;
  const std::vector<bool> oracle = oracle_keys(found.exact);
  std::vector<std::string> names{"exact"}, score_details{"the query's own"}, mask_details;
  std::vector<const std::vector<double>*> scores{&logits};
  std::vector<double> thresholds{std::log(found.exact.least_top)};
  mask_details.push_back("its top 10 %");
  for (const Scoring& scoring : found.scorings) {
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
      Panel panel{map_image(found.grid[1], found.grid[2], scale, [&](int64_t y, int64_t x) {
        return colour(i, (frame * found.grid[1] + y) * found.grid[2] + x);
      })};
      panel.marked = frame == found.query[0];
      panel.x = (static_cast<double>(found.query[2]) + 0.5) * static_cast<double>(scale);
      panel.y = (static_cast<double>(found.query[1]) + 0.5) * static_cast<double>(scale);
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
      .title = fmt::format("Query at frame {}, row {}, column {}: keys kept for {:.1f} % of its exact top 10 %",
                           found.query[0], found.query[1], found.query[2], 100 * kOracle),
      .notes = {found.setting,
                fmt::format("Scores: logits less their mean, {:.1f} (dark) to {:.1f} (light) in every panel.", low, high),
                "Kept keys: yellow, of the exact top 10 %; grey, not of it; red, missed. Shares are of all keys, of "
                "these frames and the others."},
      .sections = {score, mask}};
}

Chart retention_chart(const Inspection& found) {
  Chart chart{.title = "Keys to keep for a share of the exact top 10 %",
              .x_label = "oracle recall",
              .y_label = fmt::format("share of keys kept, mean of {} queries", found.samples),
              .note = found.setting,
              .series = {}};
  for (const Scoring& scoring : found.scorings) {
    Series series{scoring.name, {}};
    for (size_t i = 0; i < std::size(kRecalls); ++i) {
      series.points.emplace_back(kRecalls[i], scoring.mean_retention(i, false));
    }
    chart.series.push_back(series);
  }
  return chart;
}

HistogramPicture histogram_picture(const Inspection& found) {
  HistogramPicture picture{.title = fmt::format("Groups of {}, by head", found.method),
                           .notes = {found.setting, "Bars count groups; the red line is k_head."},
                           .columns = {"queries of a group", "keys that a group keeps"},
                           .rows = {}};
  for (int64_t h = 0; h < std::ssize(found.runner->head_stats); ++h) {
    const HeadStats& stats = found.runner->head_stats[h];
    HistogramRow row{
        fmt::format("head {}", h),
        fmt::format("{} groups, k_head {}, density {:.4f}", stats.groups, stats.head_budget, stats.density),
        {{found.group_values(found.runner->sizes, h, true)}, {found.group_values(found.runner->counts, h, false)}}};
    if (stats.head_budget > 0) row.columns[1].mark = static_cast<double>(stats.head_budget);
    picture.rows.push_back(std::move(row));
  }
  return picture;
}

}  // namespace scope::cli
