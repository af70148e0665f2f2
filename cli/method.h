// Which method a command runs, with its settings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "methods/effects.h"
#include "methods/settings.h"

namespace CLI {
class App;
}

namespace scope::cli {

// Methods with their settings, separated by commas; one before a digit belongs to a value: scope:density_steps=0.2:0.3,1:0.1
std::vector<std::string> split_methods(std::string_view text);

// --profile, where none of the methods takes one.
[[noreturn]] void refuse_profile(const std::string& methods);

// A method by its name, or with settings: scope:partition=even:8+rule=hybrid. `model` may be empty; `set` holds values of
// --set, which come before the method's own.
Settings parse_method(const std::string& text, const std::string& model, const std::vector<std::string>& set = {});
// Refuses a setting that the text or `set` gives and that `settings`, what calls are made with, do not have or do not read.
// What the method has anyway may be said again.
void check_effects(const std::string& text, const std::string& model, const std::vector<std::string>& set,
                   const Settings& settings, const Surroundings& with);
// Whether the text or `set` gives this setting.
bool gives(const std::string& text, const std::vector<std::string>& set, std::string_view name);
// The value of --density: shares separated by commas.
std::vector<double> parse_densities(const std::string& list);

// What the methods of a comparison share: settings, and a density to meet or a rho to run at.
struct PointFlags {
  std::vector<std::string> set;
  std::string density, rho;  // lists; rho is empty or stands in the place of density
  void add(CLI::App& app);
  bool at_rho() const { return !rho.empty(); }
  std::vector<double> points() const;
  // `settings` at one of the points; throws where their rule compares with no rho.
  Settings at(Settings settings, double point, const std::string& name) const;
};

// The options of one method.
struct MethodFlags {
  std::string method = "scope", model;
  std::vector<std::string> set;
  void add(CLI::App& app);
  // target_density: the value of a command's own option; empty: not given.
  Settings settings(const Surroundings& with, const std::string& target_density = "") const;
};

}  // namespace scope::cli
