// What scope compare finds: a row for each method and point, and what is said and drawn of them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "measure/recall.h"
#include "plot.h"

namespace scope::cli {

// One line of the table: medians over the repeated warm calls, quality of the last.
struct CompareRow {
  std::string method;
  double point = 1;  // target density, or rho; NaN: a selection that was given
  double density = 1;
  double selection = 0, attend = 0, total = 0;  // seconds
  double first_selection = 0;                   // of the first call, from random rows
  double dense = 0;                             // a dense call just before, so that a machine that slows down slows both
  Quality quality;
  std::vector<std::string> notes;
};

struct Comparison {
  std::string setting;  // a line on the input and the machine
  bool at_rho = false;  // rows' points are values of rho, otherwise densities
  int repeat = 0;
  CompareRow dense;
  std::vector<CompareRow> rows;
};

void print(const Comparison& found);
nlohmann::ordered_json row_json(const Comparison& found, const CompareRow& row);
std::string csv(const Comparison& found);
Chart recall_chart(const Comparison& found);
Chart error_chart(const Comparison& found);

}  // namespace scope::cli
