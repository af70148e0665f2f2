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

void apply(Settings& settings, std::string_view item, const char* flag) {
  const size_t equals = item.find('=');
  require(equals != std::string_view::npos, Status::invalid_argument, "{}: got \"{}\", expected name=value", flag, item);
  set_setting(settings, item.substr(0, equals), item.substr(equals + 1));
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

Settings parse_method(const std::string& text, const std::string& model) {
  const size_t colon = text.find(':');
  Settings settings = find_method(text.substr(0, colon)).settings();
  if (!model.empty()) apply_model(find_model(model), settings);
  if (colon == std::string::npos) return settings;
  for (const std::string& item : split(text.substr(colon + 1), '+')) apply(settings, item, "method");
  return settings;
}

void MethodFlags::add(CLI::App& app, bool with_method) {
  if (with_method) {
    app.add_option("--method", method, "a row of `scope methods`; settings may follow, as scope:partition=even:8+rho=0.8")
        ->capture_default_str();
  }
  app.add_option("--model", model, "take rho and the schedule of a known model (see `scope methods`)");
  app.add_option("--set", set, "one setting, as name=value; repeat for more (see `scope methods`)")->allow_extra_args(false);
}

Settings MethodFlags::settings() const {
  Settings result = parse_method(method, model);
  for (const std::string& item : set) apply(result, item, "--set");
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
  if (floor > 0 && settings.profile != nullptr && lowered > 0) {
    notes.push_back(
        fmt::format("{}: least shares of the profile lowered to {}, 1/{} of the target density, in {} of {} heads", method,
                    most, floor, lowered, heads.size()));
  } else if (settings.alpha > most) {
    notes.push_back(
        fmt::format("{}: alpha lowered from {} to {}, 1/{} of the target density", method, settings.alpha, most, floor));
  }
  if (std::abs(density - target) > kCloseEnough) {
    notes.push_back(fmt::format("{}: density {:.4f} is the nearest to {} that can be reached", method, density, target));
  }
  return notes;
}

}  // namespace scope::cli
