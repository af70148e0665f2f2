// What scope inspect finds in one head, and what is said, drawn and written of it.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cluster_maps.h"
#include "input.h"
#include "measure/scoring.h"
#include "plot.h"
#include "runner.h"

namespace scope::cli {

inline constexpr double kOracle = 0.958;  // the recall at which the paper compares
inline constexpr double kRecalls[] = {0.5, 0.6, 0.7, 0.8, 0.9, 0.95, kOracle, 0.99};
inline constexpr size_t kMatched = 6;  // of kOracle

// One way of scoring keys: a method's selection of the head, and how well its scores rank keys.
struct Scoring {
  std::string name;
  std::unique_ptr<Runner> runner;
  RecallMatch match;                              // of the query in the picture
  std::vector<double> scores;                     // of that query
  std::vector<std::vector<RecallMatch>> sampled;  // per sampled query, one per kRecalls

  std::vector<double> retentions(size_t recall) const;
  double mean_retention(size_t recall, bool whole) const;
  double reached(size_t recall) const;
  std::string described() const;
};

// Least seconds of warm calls, each from the state that the first call left.
struct Times {
  CallStats first, warm;
};

struct Inspection {
  std::string source, method;  // the input's file, empty where it is .npy files, and the method that selected
  Settings settings;
  Input input = {}, of_head = {};  // of_head: of that head alone
  Grid grid = {};
  int64_t keys = 0;  // video tokens
  int64_t head = 0, samples = 0, repeat = 0;
  std::vector<int64_t> frames;
  Grid query = {};
  std::string setting;  // a line on all of these
  std::vector<Scoring> scorings;
  std::unique_ptr<Runner> runner;
  ClusterMaps maps;
  Times times, direct;
  ExactQuery exact;  // of the query in the picture
  std::vector<ScoringCost> costs;

  // Of the groups that selected; a group of densely attending queries comes after them.
  std::vector<double> group_values(const std::vector<int32_t>& all, int64_t of, bool with_empty) const;
};

std::vector<bool> oracle_keys(const ExactQuery& exact);

void print(const Inspection& found);
nlohmann::ordered_json to_json(const Inspection& found, const Context& context);
PanelPicture cluster_picture(const Inspection& found);
PanelPicture matched_picture(const Inspection& found);
Chart retention_chart(const Inspection& found);
HistogramPicture histogram_picture(const Inspection& found);

}  // namespace scope::cli
