// What SCOPE needs to know of a video model, as data.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "methods/settings.h"

namespace scope {

struct Model {  // NOLINT(clang-analyzer-optin.performance.Padding): read in this order, and few
  const char* name;
  const char* help;
  int64_t layers, heads, dim;
  int64_t rope[3];          // channels along T, H and W, one range after the other; all 0: its heads have no such ranges
  int64_t grid[3];          // tokens along T, H and W at the usual size
  bool from_image = false;  // image to video
  int64_t experts = 1;      // transformers that share the steps
  int64_t steps;
  double rho;  // our starting point: the paper does not publish one
  double dense_steps;
  bool warm_prefix = false;
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

  bool has_rope() const { return rope[0] > 0; }
};

std::span<const Model> models_table();
const Model& find_model(std::string_view name);
// A transformer, as a host or a config.json tells of it.
struct ModelQuery {
  std::string_view family = {};            // how names of rows begin, such as wan; empty: any
  int64_t layers = 0, heads = 0, dim = 0;  // 0: not said
  int64_t rope[3] = {};                    // all 0: not said
  bool from_image = false;
  int64_t experts = 1;   // 1 or 2
  bool nearest = false;  // take the row that is most alike where none has the shape
};
struct ModelFit {
  const Model* model = nullptr;  // null: none
  bool exact = false;            // it has the shape
  std::string why;               // one sentence
};
// Whether a row has what is said of layers, heads, channels and RoPE.
bool same_shape(const Model& model, const ModelQuery& query);
// The row whose settings fit. Rows of the shape come first, then those of as many experts, then those from an image or from
// text as asked, then the table's order; without the shape, RoPE weighs more than layers, heads and channels.
ModelFit fit_model(const ModelQuery& query);

// The settings of a method that some known model changes.
std::vector<const Setting*> settings_of_models(const Method& method);
// The schedule of the model, then what its row says for the settings' method.
void apply_model(const Model& model, Settings& settings);

}  // namespace scope
