// What scope ablate is asked for, and what it finds: videos of variants beside the dense ones of their seeds.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/built_from.h"
#include "machine.h"
#include "matching.h"
#include "method.h"
#include "pipeline/plan.h"
#include "plot.h"
#include "statistics.h"
#include "video_inputs.h"

namespace scope::cli::ablation {

struct AblateOptions : VideoInputs {
  std::string model = "tiny-wan", variants, suite, grid, clips, images, compute, profile, resume, output, csv, plot,
              commit = scope::built_from();
  PointFlags at{.set = {}, .density = "0.2", .rho = ""};
  int64_t seeds = 8, first_seed = 0, steps = 0;    // 0: the model's
  double shift = 0, guidance = 0, guidance_2 = 0;  // 0: the model's
  bool no_control = false;
  Match match = Match::call;
  std::string choose;
  MachineFlags machine;
};

// One table: its variants at each of its densities (or values of rho), judged against the first.
struct Table {
  std::string title, variants, points;
};

// One video of a variant beside the dense one of its seed. Seconds.
struct Result {
  double psnr = 0, pooled_psnr = 0, ssim = 0, worst_psnr = 0, density = 1;
  double total = 0, dense_calls = 0, attend = 0, selection = 0, rest = 0;
  double same_calls_dense = 0;  // the calls that ran sparse here, in the dense run
  double dense_total = 0;
  int64_t dense_count = 0, sparse_count = 0;  // calls

  double sparse_calls() const { return attend + selection; }
};

// A variant at a density, or at a rho; results by seed.
struct Row {
  std::string variant;
  double point = 1;  // NaN: it has densities of its own, and stands beside every point
  Settings settings;
  bool control = false, left_out = false;
  std::optional<Threshold> threshold = {};  // of a run
  std::vector<Result> results;
  std::vector<std::string> notes;
};

template <class F>
std::vector<double> each(const std::vector<Result>& results, F value) {
  std::vector<double> out;
  out.reserve(results.size());
  for (const Result& result : results) out.push_back(std::invoke(value, result));
  return out;
}

// How many times faster than dense, the median over seeds: self-attention of the calls that ran sparse, and the whole run.
double call_speedup(const Row& row);
double run_speedup(const Row& row);

struct Paired {
  double difference = 0, deviation = 0;  // dB
  int64_t wins = 0;
};
Paired paired(const Row& row, const Row& against);

struct Findings {
  std::string model;  // as it was asked for
  std::array<int64_t, 3> grid = {};
  std::string compute;
  PointFlags at;  // what rows' points are
  Match match = Match::call;
  bool rgb = false;          // frames are compared, otherwise latents
  int64_t given_frames = 1;  // the first, which do not count
  int64_t steps = 0, seeds = 0, clips = 0;
  std::vector<Table> tables;
  std::vector<Row> rows;
  std::vector<std::pair<std::string, std::string>> skipped;  // variants that cannot run, and why
  std::vector<Result> dense;                                 // by seed, of those that are done

  bool finished() const { return std::ssize(dense) == seeds; }
  // "call", "run" or "own", and "rho" where that is given.
  const char* match_name() const;
  // What a row's point is of: a target density, or rho.
  const char* point_name() const { return at.at_rho() ? "rho" : "target"; }
  std::vector<double> points(const Table& table) const;
  const Row* find_row(const std::string& variant, double point) const;
  std::vector<const Row*> table_rows(const Table& table, double point) const;
};

void print(const Findings& found, const Context& context);
std::string csv(const Findings& found);
Chart chart(const Findings& found);  // of the table with the most densities

// about: what the videos are of, the same for all that go into one result.
nlohmann::ordered_json to_json(const Findings& found, const nlohmann::ordered_json& about, const Context& context);
// The seeds of another run of these videos, from its JSON, which is not trusted.
void take_seeds(Findings& found, const std::string& path, const nlohmann::ordered_json& about, const Context& context);

}  // namespace scope::cli::ablation
