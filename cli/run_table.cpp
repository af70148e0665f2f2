// The table of a demo: what each run kept, how close it came to the first one, and what it cost.
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <vector>

#include "clip.h"

namespace scope::cli {

namespace {

struct Seconds {
  double own = 0, reference = 0;
};

// Self-attention, selection included, of the calls that ran sparse, and of the same calls in the reference. Zeros where
// either has no such calls or the two do not line up.
Seconds sparse_calls(const nlohmann::ordered_json& run, const nlohmann::ordered_json& reference) {
  Seconds sum;
  if (!run.contains("layers") || !reference.contains("layers")) return {};
  const auto &steps = run["layers"], &same = reference["layers"];
  if (steps.size() != same.size()) return {};
  const auto seconds = [](const auto& call) {
    return call.value("attention_seconds", 0.0) + call.value("selection_seconds", 0.0);
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].size() != same[i].size()) return {};
    for (size_t j = 0; j < steps[i].size(); ++j) {
      if (steps[i][j].value("dense", true)) continue;
      sum.own += seconds(steps[i][j]);
      sum.reference += seconds(same[i][j]);
    }
  }
  return sum;
}

double total_seconds(const nlohmann::ordered_json& run) {
  return run.contains("seconds") ? run["seconds"].value("total", 0.0) : 0.0;
}

std::string times(double reference, double own) {
  return own > 0 && reference > 0 ? fmt::format("{:.2f}x", reference / own) : "";
}

std::string number(double value, const char* format) { return value > 0 ? fmt::format(fmt::runtime(format), value) : ""; }

}  // namespace

void print_run_table(const std::vector<Clip>& clips, const std::vector<nlohmann::ordered_json>& qualities) {
  fmt::print("  {:<12} {:>8} {:>9} {:>7} {:>10} {:>9} {:>16} {:>9}\n", "", "density", "PSNR", "SSIM", "whole run", "speedup",
             "sparse calls", "speedup");
  const double reference_total = total_seconds(clips[0].run);
  for (size_t i = 0; i < clips.size(); ++i) {
    const auto& run = clips[i].run;
    const Seconds sparse = sparse_calls(run, clips[0].run);
    const double total = total_seconds(run);
    std::string psnr, ssim;
    if (i > 0) {
      const auto& value = qualities[i]["psnr"];
      psnr = decibel(value.is_number() && std::isfinite(value.get<double>()) ? value.get<double>() : INFINITY);
      ssim = fmt::format("{:.4f}", qualities[i]["ssim"].get<double>());
    }
    const double density =
        run.is_object() && run.contains("density") && run["density"].is_number() ? run["density"].get<double>() : 0;
    fmt::print("  {:<12} {:>8} {:>9} {:>7} {:>10} {:>9} {:>16} {:>9}\n", clips[i].name, number(density, "{:.3f}"), psnr,
               ssim, number(total, "{:.1f} s"), i == 0 ? "" : times(reference_total, total), number(sparse.own, "{:.1f} s"),
               times(sparse.reference, sparse.own));
  }
  fmt::print(
      "PSNR and SSIM against {}; sparse calls: self-attention, selection included, of the calls that ran sparse, and their\n"
      "speedup over the same calls of {}; density: share of keys that they kept.\n",
      clips[0].name, clips[0].name);
}

}  // namespace scope::cli
