// The tables of scope ablate, its CSV and its chart.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ablation.h"
#include "io/file.h"
#include "method.h"
#include "parse.h"
#include "plot.h"
#include "statistics.h"
#include "terminal.h"

namespace scope::cli::ablation {

namespace {

constexpr double kRunTolerance = 0.03;  // of a target density that a run is to meet

std::string decibel_text(double psnr) { return std::isinf(psnr) ? "equal" : fmt::format("{:.2f}", psnr); }
std::string spread(double deviation) { return std::isfinite(deviation) ? fmt::format(" ± {:.2f}", deviation) : ""; }
std::string psnr_text(const Row& row) {
  const auto psnr = each(row.results, &Result::psnr);
  return decibel_text(mean(psnr)) + spread(deviation(psnr));
}

std::string matching_text(const Findings& found) {
  if (found.at.at_rho()) return "rho is given; the density is what each variant keeps there";
  switch (found.match) {
    case Match::call:
      return "density matched in every call: the threshold is solved again in each (--match call)";
    case Match::run:
      return "density matched over the run: one threshold for all calls of a variant, found on the videos of --choose "
             "(--match run)";
    case Match::own:
      return "each method at its own settings; the density is what it keeps there (--match own)";
  }
  return "";
}

// A density is in the table anyway.
std::string label(const Findings& found, const Row& row) {
  return found.at.at_rho() ? fmt::format("{} at rho {}", row.variant, row.point) : row.variant;
}

// What K-means costs in the first sparse call of a layer, which calls, run and selection hold.
void print_first_calls(const Findings& found) {
  std::map<std::pair<double, int>, std::set<std::string>> variants;
  for (const Row& row : found.rows) {
    const GroupingRow& group = scope::row(row.settings.group);
    if (row.control || !group.iterates || !group.warm) continue;
    variants[{row.settings.first_sample, row.settings.first_iterations}].insert(row.variant);
  }
  for (const auto& [at, names] : variants) {
    fmt::print(
        "first call of a layer: {} iterations of K-means, all but the last 2 over the share {} of the tokens, at least 8 "
        "a cluster: {}\n",
        at.second, at.first, fmt::join(names, ", "));
  }
}

// Notes that say the same of several variants are one line.
void print_notes(const Findings& found) {
  for (const Row& row : found.rows) {
    if (!row.threshold) continue;
    const Threshold& by = *row.threshold;
    const double density = mean(each(row.results, &Result::density));
    fmt::print("{} at {}: {} {}{}, density {:.4f} on the choosing videos", row.variant, row.point, by.control, by.value,
               by.alpha < 0 ? "" : fmt::format(" and alpha {}", by.alpha), by.density);
    if (std::abs(density - row.point) > kRunTolerance * row.point) {
      fmt::print(" and {:.4f} on these, {:.1f} % off; there the nearest thresholds that were tried gave {:.4f} and {:.4f}",
                 density, 100 * std::abs(density - row.point) / row.point, by.below, by.above);
    }
    fmt::print("\n");
  }
  std::map<std::string, std::set<std::string>> variants;
  for (const Row& row : found.rows) {
    for (const std::string& note : row.notes) variants[note.substr(row.variant.size() + 2)].insert(row.variant);
  }
  for (const auto& [note, names] : variants) fmt::print("{}: {}\n", note, fmt::join(names, ", "));
}

}  // namespace

double call_speedup(const Row& row) {
  return median(each(row.results, [](const Result& r) { return r.same_calls_dense / r.sparse_calls(); }));
}
double run_speedup(const Row& row) {
  return median(each(row.results, [](const Result& r) { return r.dense_total / r.total; }));
}

Paired paired(const Row& row, const Row& against) {
  std::vector<double> differences;
  Paired out;
  for (size_t i = 0; i < row.results.size(); ++i) {
    differences.push_back(row.results[i].psnr - against.results[i].psnr);
    out.wins += differences.back() > 0 ? 1 : 0;
  }
  out.difference = mean(differences);
  out.deviation = deviation(differences);
  return out;
}

const char* Findings::match_name() const {
  if (at.at_rho()) return "rho";
  return match == Match::call ? "call" : match == Match::run ? "run" : "own";
}

std::vector<double> Findings::points(const Table& table) const {
  if (match == Match::own) return {std::nan("")};
  return at.at_rho() ? at.points() : parse_densities(table.points);
}

const Row* Findings::find_row(const std::string& variant, double point) const {
  for (const Row& row : rows) {
    if (!row.control && row.variant == variant && (row.point == point || std::isnan(row.point))) return &row;
  }
  return nullptr;
}

std::vector<const Row*> Findings::table_rows(const Table& table, double point) const {
  std::vector<const Row*> out;
  for (const std::string& variant : split_methods(table.variants)) {
    if (const Row* row = find_row(variant, point); row != nullptr) out.push_back(row);
  }
  return out;
}

void print(const Findings& found, const Context& context) {
  fmt::print("{}\n",
             bold(fmt::format("{} at {}, {} steps, {} seeds of {} clips, {}; {} threads, {}", found.model,
                              io::join(found.grid, "x"), found.steps, found.seeds, found.clips, found.compute,
                              context.threads(), context.device().empty() ? context.instruction_set() : context.device())));
  fmt::print("dense: {:.2f} s a video (median)\n", median(each(found.dense, [](const Result& r) { return r.total; })));
  for (const Row& row : found.rows) {
    if (!row.control) continue;
    fmt::print("control, {}: {}{} (pooled {}), SSIM {:.4f}; what is near it cannot be told from rounding\n", row.variant,
               found.rgb ? "" : "latents ", psnr_text(row), decibel_text(mean(each(row.results, &Result::pooled_psnr))),
               mean(each(row.results, &Result::ssim)));
  }
  for (const Table& table : found.tables) {
    size_t width = 8;
    for (const double point : found.points(table)) {
      for (const Row* row : found.table_rows(table, point)) width = std::max(width, label(found, *row).size());
    }
    fmt::print("\n{}\n{:<{}}  {:>7}  {:>13}  {:>6}  {:>6}  {:>15}  {:>6}  {:>7}  {:>7}\n",
               bold(found.rgb ? table.title : table.title + ", by latents"), "", width, "density", "PSNR ± sd", "pooled",
               "SSIM", "paired ± sd", "wins", "calls", "run");
    for (const double point : found.points(table)) {
      const Row* first = nullptr;
      for (const Row* row : found.table_rows(table, point)) {
        if (first == nullptr) first = row;
        const Paired pair = paired(*row, *first);
        fmt::print("{:<{}}  {:>7.4f}  {:>13}  {:>6.2f}  {:>6.4f}  {:>15}  {:>6}  {:>6.2f}x  {:>6.2f}x\n", label(found, *row),
                   width, mean(each(row->results, &Result::density)), psnr_text(*row),
                   mean(each(row->results, &Result::pooled_psnr)), mean(each(row->results, &Result::ssim)),
                   row == first ? "" : fmt::format("{:+.2f}{}", pair.difference, spread(pair.deviation)),
                   row == first ? "" : fmt::format("{}/{}", pair.wins, row->results.size()), call_speedup(*row),
                   run_speedup(*row));
      }
    }
  }
  fmt::print("\n{}\n", matching_text(found));
  for (const auto& [variant, why] : found.skipped) fmt::print("not run: {}: {}\n", variant, why);
  print_notes(found);
  print_first_calls(found);
  if (!found.rgb) {
    fmt::print(
        "PSNR and SSIM are of latents, each channel in [0, 1] by the dense video's least and greatest: they rank\n"
        "variants of this model, and are no figures of frames.\n");
  }
  fmt::print(
      "PSNR in dB and SSIM against the dense video of the same seed{}: mean and standard\n"
      "deviation over seeds; paired: difference from the first line of the density or rho, seed by seed, and how many of "
      "them "
      "are\n"
      "ahead; calls: self-attention of the calls that ran sparse, selection included, dense ÷ variant; run: whole video, "
      "dense ÷\n"
      "variant; both medians over seeds.\n",
      found.given_frames > 0 ? ", without frame 0, which is given" : "");
}

std::string csv(const Findings& found) {
  std::string out = fmt::format(
      "variant,{0},seed,density,{1}psnr,{1}pooled_psnr,{1}ssim,"
      "seconds,sparse_seconds,dense_seconds,same_calls_dense_seconds\n",
      found.point_name(), found.rgb ? "" : "latents_");
  for (const Row& row : found.rows) {
    for (size_t i = 0; i < row.results.size(); ++i) {
      const Result& r = row.results[i];
      out += fmt::format("\"{}\",{},{},{:.6f},{:.6f},{:.6f},{:.8f},{:.6f},{:.6f},{:.6f},{:.6f}\n", row.variant, row.point, i,
                         r.density, r.psnr, r.pooled_psnr, r.ssim, r.total, r.sparse_calls(), r.dense_total,
                         r.same_calls_dense);
    }
  }
  return out;
}

Chart chart(const Findings& found) {
  const Table& table = *std::max_element(found.tables.begin(), found.tables.end(), [](const Table& a, const Table& b) {
    return split(a.points, ',').size() < split(b.points, ',').size();
  });
  Chart out{.title = found.rgb ? "PSNR against dense, by density" : "PSNR of latents against dense, by density",
            .x_label = "density of the sparse calls",
            .y_label = "dB, mean over seeds",
            .note = fmt::format("{} at {}, {} steps, {} seeds, {}", found.model, io::join(found.grid, "x"), found.steps,
                                found.seeds, found.compute),
            .series = {}};
  for (const std::string& variant : split_methods(table.variants)) {
    Series series{variant, {}};
    for (const Row& row : found.rows) {
      if (row.variant != variant || row.control) continue;
      const double psnr = mean(each(row.results, &Result::psnr));
      if (std::isfinite(psnr)) series.points.emplace_back(mean(each(row.results, &Result::density)), psnr);
    }
    std::sort(series.points.begin(), series.points.end());
    if (!series.points.empty()) out.series.push_back(series);
  }
  return out;
}

}  // namespace scope::cli::ablation
