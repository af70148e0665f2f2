// What scope steps finds: seconds of passes by variant, and what is said and written of them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "methods/settings.h"
#include "pipeline/plan.h"
#include "video/engine.h"

namespace scope::cli {

// Seconds of a pass, and what they are made of.
struct PassTime {
  double total = 0, dense_attention = 0, attend = 0, selection = 0, linear = 0;
  double clusters = 0;  // of selection: K-means, which a dense prefix may run too
  double density = 0;   // mean over the calls that ran sparse

  double rest() const { return total - dense_attention - attend - selection - linear; }
};

// The mean of the middle one or two, so that parts still add up.
PassTime median_pass(std::vector<PassTime> passes);

// A method with its settings, and its steps by what their passes do.
struct StepsVariant {
  std::string name;
  Settings settings;
  int64_t dense = 0, clustering = 0, sparse = 0;  // clustering: dense too, and K-means runs beside them
  int64_t first_sparse = 0;
};

struct StepsCase {
  const StepsVariant* variant = nullptr;
  PassTime dense, first, warm;  // dense: without clustering
  int64_t peak_bytes = 0;
  std::string output;  // names the bits of the last pass
  double run = 0;
};

struct StepTimes {
  std::string model, folder;  // model: as it was asked for
  std::string config;         // config.json of what runs
  std::string known;          // the known model's row; empty: none
  std::array<int64_t, 3> grid = {};
  int64_t layers = 0, model_layers = 0, text_tokens = 0, steps = 0, branches = 1;
  std::string compute, commit;
  std::string linear_mode;  // the value of --linear
  std::map<std::pair<int64_t, int64_t>, int64_t>
      not_quantised;  // matrices that --linear had to leave, by inputs and outputs
  uint64_t seed = 0;
  int64_t repeat = 0;
  std::vector<StepsVariant> variants;  // the dense one first
  std::vector<StepsCase> cases;        // of the variants that are done
  video::LinearTimes linears;          // of a dense pass
  std::map<video::LinearShape, std::vector<double>> algorithms;
};

// Where the dense calls of a schedule are not those of `dense`; its own are.
bool has_own_dense(const StepTimes& found, const StepsVariant& variant);
// Every pass of the schedule, by those that were measured. A state's first call takes longer, wherever it stands.
double run_seconds(const StepTimes& found, const StepsCase& c);
std::string gigabytes(int64_t bytes);
void print_title(const StepTimes& found, const Context& context);
// A run of minutes shows what it has.
void print_case(const StepTimes& found, const StepsCase& c);
void print_linear(const StepTimes& found);
nlohmann::ordered_json to_json(const StepTimes& found, const Context& context);

}  // namespace scope::cli
