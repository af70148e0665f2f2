// Reads methods, their settings and the points at which they are compared.
#include "method.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "methods/methods.h"
#include "methods/models.h"
#include "parse.h"
#include "stages/choices.h"

namespace scope::cli {

namespace {

// One setting that the user gave.
struct Given {
  const char* flag;
  std::string name, value;
};

// In the order in which they apply: those of --set that the method does not have of its own, then its own.
std::vector<Given> given_settings(const std::string& text, const std::vector<std::string>& set) {
  const auto list = [](const char* flag, const std::vector<std::string>& items) {
    std::vector<Given> all;
    for (const std::string& item : items) {
      const size_t equals = item.find('=');
      require(equals != std::string::npos, Status::invalid_argument, "{}: got \"{}\", expected name=value", flag, item);
      const std::string name = item.substr(0, equals), value = item.substr(equals + 1);
      for (const Given& other : all) {
        require(other.name != name, Status::invalid_argument, "{}: {} is given twice, as {} and as {}", flag, name,
                other.value, value);
      }
      all.push_back({flag, name, value});
    }
    return all;
  };
  const size_t colon = text.find(':');
  const std::vector<Given> own =
      list("method", colon == std::string::npos ? std::vector<std::string>{} : split(text.substr(colon + 1), '+'));
  std::vector<Given> all = list("--set", set);
  std::erase_if(all, [&](const Given& given) {
    return std::any_of(own.begin(), own.end(), [&](const Given& other) { return other.name == given.name; });
  });
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

}  // namespace

std::vector<std::string> split_methods(std::string_view text) {
  std::vector<std::string> methods;
  for (const std::string& part : split(text, ',')) {
    if (!methods.empty() && !part.empty() && std::string_view(".0123456789").find(part[0]) != std::string_view::npos) {
      methods.back() += "," + part;
    } else {
      methods.push_back(part);
    }
  }
  return methods;
}

Settings parse_method(const std::string& text, const std::string& model, const std::vector<std::string>& set) {
  Settings settings = find_method(text.substr(0, text.find(':'))).settings();
  if (!model.empty()) apply_model(find_model(model), settings);
  for (const Given& given : given_settings(text, set)) set_setting(settings, given.name, given.value);
  return settings;
}

void refuse_profile(const std::string& methods) {
  std::string profiled;
  for (const Method& method : methods_table()) {
    if (method.profiled) profiled.append(profiled.empty() ? "" : ", ").append(method.name);
  }
  fail(Status::invalid_argument, "--profile: none of {} takes one; {} does", methods, profiled);
}

void check_effects(const std::string& text, const std::string& model, const std::vector<std::string>& set,
                   const Settings& settings, const Surroundings& with) {
  const Settings own = parse_method(text.substr(0, text.find(':')), model), asked = parse_method(text, model, set);
  for (const Given& given : given_settings(text, set)) {
    const std::string value = get_setting(settings, given.name);
    require(value == get_setting(asked, given.name), Status::invalid_argument,
            "{}: {} is given as {}, and another option makes it {}", given.flag, given.name, given.value, value);
    if (value == get_setting(own, given.name)) continue;
    const std::string why = why_idle(settings, given.name, with);
    require(why.empty(), Status::invalid_argument, "{}: {}={} would do nothing for {}: {}", given.flag, given.name,
            given.value, text, why);
  }
}

bool gives(const std::string& text, const std::vector<std::string>& set, std::string_view name) {
  const std::vector<Given> all = given_settings(text, set);
  return std::any_of(all.begin(), all.end(), [&](const Given& given) { return given.name == name; });
}

void MethodFlags::add(CLI::App& app) {
  app.add_option("--method", method, "a row of `scope methods`; settings may follow, as scope:partition=even:8+rho=0.8")
      ->capture_default_str();
  app.add_option("--model", model, "take rho and the schedule of a known model (see `scope methods`)");
  app.add_option("--set", set, "one setting, as name=value; repeat for more (see `scope methods`)")->allow_extra_args(false);
}

Settings MethodFlags::settings(const Surroundings& with, const std::string& target_density) const {
  for (const std::string& item : set) {
    for (const Given& own : given_settings(method, {})) {
      require(!item.starts_with(own.name + "="), Status::invalid_argument, "--set: {} is given twice, as {}={} in --method",
              item, own.name, own.value);
    }
  }
  Settings result = parse_method(method, model, set);
  if (!target_density.empty()) {
    set_setting(result, "target_density", target_density);
    require(result.target_density > 0, Status::invalid_argument, "--target-density: got {}, expected a share in (0, 1]",
            target_density);
  }
  check_effects(method, model, set, result, with);
  return result;
}

std::vector<double> parse_densities(const std::string& list) {
  std::vector<double> densities;
  for (const std::string& text : split(list, ',')) {
    Settings settings;
    set_setting(settings, "target_density", text);
    require(settings.target_density > 0, Status::invalid_argument, "--density: got \"{}\", expected shares in (0, 1]", text);
    densities.push_back(settings.target_density);
  }
  return densities;
}

void PointFlags::add(CLI::App& app) {
  CLI::Option* densities = app.add_option("--density", density, "shares of keys to compare at")->capture_default_str();
  app.add_option("--rho", rho, "values of rho to compare at, in the place of densities: what each keeps there is measured")
      ->excludes(densities);
  app.add_option("--set", set, "one setting of every method, as name=value; repeat for more (see `scope methods`)")
      ->allow_extra_args(false);
}

std::vector<double> PointFlags::points() const {
  if (!at_rho()) return parse_densities(density);
  std::vector<double> values;
  for (const std::string& text : split(rho, ',')) {
    Settings settings;
    set_setting(settings, "rho", text);
    values.push_back(settings.rho);
  }
  return values;
}

Settings PointFlags::at(Settings settings, double point, const std::string& name) const {
  require(settings.density_steps.empty(), Status::invalid_argument, "{}: {} has densities of its own, density_steps={}",
          at_rho() ? "--rho" : "--density", name, get_setting(settings, "density_steps"));
  if (!at_rho()) {
    settings.target_density = point;
    return settings;
  }
  require(row(settings.rule).rho, Status::invalid_argument, "--rho: {} has rule {}, which compares with none", name,
          row(settings.rule).name);
  settings.rho = point;
  settings.target_density = 0;
  return settings;
}

}  // namespace scope::cli
