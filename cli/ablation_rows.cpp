// Makes the rows of an ablation's tables.
#include "ablation_rows.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "methods/methods.h"
#include "video/self_attention.h"

namespace scope::cli::ablation {

namespace {

// The ablations of the paper, which meet a density by the mean of the heads and let these differ, as the rows of SCOPE do,
// the methods side by side, and what may stand in the place of a dense prefix.
const Table kPaper[] = {
    {"Key partitions",
     "scope-paper,scope-paper:partition=even:1,scope-paper:partition=even:2,scope-paper:partition=random:3,"
     "scope-paper:partition=even:4,scope-paper:partition=even:8",
     "0.1,0.2"},
    {"Rules", "scope-paper,scope-paper:rule=hybrid,scope-paper:rule=top_p", "0.1,0.2"},
    {"Where a density is met", "scope-paper:target_scope=head,scope-paper,scope:target_scope=head,scope",
     "0.05,0.1,0.2,0.4"},
    {"Proxy and tail",
     "scope,scope-paper,scope-exact,scope:tail=first_order,scope-exact:tail=first_order,scope:tail=mean,"
     "scope-exact:tail=mean",
     "0.1,0.2"},
    {"Methods", "scope,scope-paper,scope-exact,scope-mean,svg2,svg2:first_sample=0.1,svg2-ear,svoo,sparge,sol",
     "0.05,0.1,0.2,0.3"},
    {"Schedules", "scope-paper,scope,scope-mean,scope-mean:dense_steps=0+dense_layers=0,fast,quality", "0.2"},
};

}  // namespace

std::string other_compute(const Findings& found) { return found.compute == "bf16" ? "f32" : "bf16"; }

Plan make_plan(const video::ModelConfig& config, const Context& context, const Findings& found, const Settings& settings) {
  return {context, settings, video::attention_shape(config, found.grid, found.compute == "bf16" ? DType::bf16 : DType::f32)};
}

void leave_out(const AblateOptions& options, Findings& found, const std::string& variant, const Error& error) {
  if (options.suite.empty() || error.status() != Status::unsupported) throw error;
  const std::pair<std::string, std::string> entry{variant, error.what()};
  if (std::find(found.skipped.begin(), found.skipped.end(), entry) == found.skipped.end()) found.skipped.push_back(entry);
}

void make_rows(const AblateOptions& options, const video::ModelConfig& config, const Context& context, Findings& found) {
  const bool takes_f32 = finest_dtype(context) == DType::f32;
  if (options.suite.empty()) {
    found.tables = {{"Variants", options.variants.empty() ? "scope" : options.variants,
                     options.at.at_rho() ? options.at.rho : options.at.density}};
  } else {
    found.tables.assign(std::begin(kPaper), std::end(kPaper));
  }
  if (!options.no_control) {
    Row row{.variant = takes_f32 ? "dense in " + other_compute(found) : "dense:kernel=portable",
            .settings = parse_method(takes_f32 ? "dense" : "dense:kernel=portable", ""),
            .control = true,
            .threshold = {},
            .results = {},
            .notes = {}};
    found.rows.push_back(std::move(row));
  }
  bool profiled = false;
  for (const Table& table : found.tables) {
    for (const std::string& variant : split_methods(table.variants)) {
      for (const double point : found.points(table)) {
        if (found.find_row(variant, point) != nullptr) continue;
        Settings settings = parse_method(variant, "", options.at.set);
        require(!settings.dense, Status::invalid_argument,
                "--variants: dense is what the others are compared with, and runs anyway");
        const bool own = options.match == Match::own ||
                         ((!settings.density_steps.empty() || settings.target_density > 0) && !options.at.at_rho());
        if (!own && options.match == Match::run) control_of(settings, variant);  // refuses
        if (!own && options.match == Match::call) settings = options.at.at(settings, point, variant);
        if (settings.method->profiled && !options.profile.empty()) {
          set_setting(settings, "profile", options.profile);
          profiled = true;
        }
        check_effects(variant, "", {}, settings, {.device = options.machine.on_device()});
        try {
          make_plan(config, context, found, settings);  // refuses what cannot run
          found.rows.push_back({variant, own ? std::nan("") : point, settings, false, false, {}, {}, {}});
        } catch (const Error& error) {
          leave_out(options, found, variant, error);
        }
      }
    }
  }
  if (!options.profile.empty() && !profiled) refuse_profile(found.tables.front().variants);
}

}  // namespace scope::cli::ablation
