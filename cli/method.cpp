// Which method a command runs, with its settings, and what a target density took.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "common.h"
#include "methods/methods.h"
#include "methods/models.h"

namespace scope::cli {

namespace {

constexpr double kCloseEnough = 0.005;  // of a density to its target

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

// Samples whose heads have floors with a mean of `most`; all heads of each follow one another.
int64_t scaled_samples(const Settings& settings, std::span<const HeadStats> heads, double most) {
  const auto n = static_cast<size_t>(settings.profile->heads);
  int64_t found = 0;
  for (size_t first = 0; first + n <= heads.size(); first += n) {
    double mean = 0;
    for (const HeadStats& head : heads.subspan(first, n)) mean += head.alpha / static_cast<double>(n);
    found += heads[first].groups > 0 && std::abs(mean - most) < 1e-9 ? 1 : 0;
  }
  return found;
}

}  // namespace

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

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

void MethodFlags::add(CLI::App& app, bool with_method) {
  if (with_method) {
    app.add_option("--method", method, "a row of `scope methods`; settings may follow, as scope:partition=even:8+rho=0.8")
        ->capture_default_str();
  }
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

std::vector<std::string> target_notes(const Runner& runner, double target, const std::string& method) {
  if (target == 0 || runner.stats.reason != Reason::sparse) return {};
  return target_notes(runner.plan().settings, runner.stats.density, runner.head_stats, target, method);
}

std::vector<std::string> target_notes(const Settings& settings, double density, std::span<const HeadStats> heads,
                                      double target, const std::string& method) {
  const bool least =
      std::all_of(heads.begin(), heads.end(), [](const HeadStats& head) { return head.groups == 0 || head.rho == 0; });
  require(!least || density <= target + kCloseEnough, Status::unsupported,
          "target density: got {}, and the least that {} keeps here is {:.4f}", target, method, density);
  std::vector<std::string> notes;
  const int floor = row(settings.rule).floor;
  const double most = floor > 0 ? target / floor : 1;
  const auto lowered = std::count_if(heads.begin(), heads.end(),
                                     [&](const HeadStats& head) { return head.groups > 0 && head.alpha == most; });
  if (floor > 0 && settings.profile != nullptr && settings.target_scope == TargetScope::sample) {
    const int64_t samples = scaled_samples(settings, heads, most);
    if (samples > 0) {
      notes.push_back(
          fmt::format("{}: least shares of the profile scaled to a mean of {}, 1/{} of the target density, in {} "
                      "samples",
                      method, most, floor, samples));
    }
  } else if (floor > 0 && settings.profile != nullptr && lowered > 0) {
    notes.push_back(
        fmt::format("{}: least shares of the profile lowered to {}, 1/{} of the target density, in {} of {} heads", method,
                    most, floor, lowered, heads.size()));
  } else if (settings.alpha > most && !(settings.alpha_first && settings.alpha < target)) {
    notes.push_back(
        fmt::format("{}: alpha lowered from {} to {}, 1/{} of the target density", method, settings.alpha, most, floor));
  }
  if (std::abs(density - target) > kCloseEnough) {
    notes.push_back(fmt::format("{}: density {:.4f} is the nearest to {} that can be reached", method, density, target));
  }
  return notes;
}

}  // namespace scope::cli
