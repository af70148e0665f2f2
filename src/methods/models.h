// What SCOPE needs to know of a video model, as data.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "methods/settings.h"

namespace scope {

struct Model {
  const char* name;
  const char* help;
  int64_t layers, heads, dim;
  int64_t rope[3];  // channels along T, H and W
  int64_t grid[3];  // tokens along T, H and W at the usual size
  int64_t steps;
  double rho;  // our starting point: the paper does not publish one
  double dense_steps;
  bool warm_prefix;
  int64_t svg2_groups;  // as SVG2 publishes it; its p is 0.9 everywhere
  // As SVOO publishes it; Wan2.1 T2V's where it does not. Its dense steps are those above.
  struct Svoo {
    double p, low, high;      // the least share of clusters is kept between the two
    int64_t start, interval;  // of reuse
  } svoo;
};

std::span<const Model> models_table();
const Model& find_model(std::string_view name);
// The schedule of the model, then what its row says for the settings' method.
void apply_model(const Model& model, Settings& settings);

}  // namespace scope
