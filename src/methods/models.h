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
  // As SVG2 publishes it; Wan2.1's groups and the dense steps above where it does not. Its p is 0.9 everywhere.
  struct Svg2 {
    int64_t groups;
    double dense_steps;
  } svg2;
  // As SVOO publishes it; Wan2.1 T2V's where it does not. Its dense steps are those above.
  struct Svoo {
    double p, low, high;      // the least share of clusters is kept between the two
    int64_t start, interval;  // of reuse, in steps from 1
    int64_t steps;            // of the run that it is published for
  } svoo;
};

std::span<const Model> models_table();
const Model& find_model(std::string_view name);
// Those with this many layers, heads and channels of a head along T, H and W.
std::vector<const Model*> fitting_models(int64_t layers, int64_t heads, std::span<const int64_t> rope);
// The settings of a method that some known model changes.
std::vector<const Setting*> settings_of_models(const Method& method);
// The schedule of the model, then what its row says for the settings' method.
void apply_model(const Model& model, Settings& settings);

}  // namespace scope
