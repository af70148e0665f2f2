// The table of what each setting needs of the others.
#include "methods/effects.h"

#include <algorithm>

#include "stages/choices.h"

namespace scope {

namespace {

bool encodes(const Settings& s) { return row(s.proxy).codes; }
bool iterates(const Settings& s) { return row(s.group).iterates || (encodes(s) && row(s.encode).iterates); }
bool random_partition(const Settings& s) { return encodes(s) && s.partition.starts_with("random"); }

// A setting counts where every one of its rows holds.
struct Need {
  const char* setting;
  const char* decided_by;  // another setting, or one of Surroundings
  bool (*holds)(const Settings&, const Surroundings&);
  const char* instead = nullptr;  // what the user may have meant
};

constexpr Need kNeeds[] = {
    {"groups", "group", [](const Settings& s, const Surroundings&) { return !row(s.group).blocks; }},
    {"q_block", "group", [](const Settings& s, const Surroundings&) { return row(s.group).blocks; }},
    {"encode", "proxy", [](const Settings& s, const Surroundings&) { return encodes(s); }},
    {"partition", "proxy", [](const Settings& s, const Surroundings& with) { return encodes(s) || with.maps; }},
    {"codes", "proxy", [](const Settings& s, const Surroundings&) { return encodes(s); }},
    {"codes", "encode", [](const Settings& s, const Surroundings&) { return !row(s.encode).blocks; }},
    {"k_block", "proxy", [](const Settings& s, const Surroundings&) { return encodes(s); }},
    {"k_block", "encode", [](const Settings& s, const Surroundings&) { return row(s.encode).blocks; }},
    {"iterations", "group", [](const Settings& s, const Surroundings&) { return iterates(s); }},
    {"iterations", "state",
     [](const Settings& s, const Surroundings& with) { return row(s.group).with_keys || with.state; }},
    {"first_iterations", "group",
     [](const Settings& s, const Surroundings&) { return iterates(s) && !row(s.group).with_keys; }},
    {"first_sample", "group", [](const Settings& s, const Surroundings&) { return iterates(s) && !row(s.group).with_keys; }},
    {"warm_sample", "group", [](const Settings& s, const Surroundings&) { return iterates(s) && !row(s.group).with_keys; }},
    {"warm_sample", "state", [](const Settings&, const Surroundings& with) { return with.state; }},
    {"warm_sample", "iterations", [](const Settings& s, const Surroundings&) { return s.iterations > 1; }},
    {"seed", "group",
     [](const Settings& s, const Surroundings& with) { return iterates(s) || random_partition(s) || with.maps; }},
    {"rho", "rule", [](const Settings& s, const Surroundings&) { return row(s.rule).rho; },
     "density sets the share of keys that it keeps"},
    {"rho", "target_density", [](const Settings& s, const Surroundings&) { return s.target_density == 0; }},
    {"rho", "density_steps", [](const Settings& s, const Surroundings&) { return s.density_steps.empty(); }},
    {"alpha", "rule", [](const Settings& s, const Surroundings&) { return row(s.rule).floor > 0; }},
    {"alpha_first", "rule", [](const Settings& s, const Surroundings&) { return row(s.rule).floor > 0; }},
    {"alpha_first", "target_density",
     [](const Settings& s, const Surroundings&) {
       return s.target_density > 0 || !s.density_steps.empty() || row(s.rule).meets == Meets::by_rho;
     }},
    {"profile", "layer", [](const Settings&, const Surroundings& with) { return with.layer; }},
    {"profile", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"profile_low", "profile", [](const Settings& s, const Surroundings&) { return s.profile != nullptr; }},
    {"profile_high", "profile", [](const Settings& s, const Surroundings&) { return s.profile != nullptr; }},
    {"density", "rule", [](const Settings& s, const Surroundings&) { return !row(s.rule).rho; },
     "target_density sets the share of keys that any rule keeps"},
    {"density", "target_density", [](const Settings& s, const Surroundings&) { return s.target_density == 0; }},
    {"density", "density_steps", [](const Settings& s, const Surroundings&) { return s.density_steps.empty(); }},
    {"density_steps", "target_density", [](const Settings& s, const Surroundings&) { return s.target_density == 0; }},
    {"target_scope", "target_density",
     [](const Settings& s, const Surroundings&) {
       return s.target_density > 0 || !s.density_steps.empty() || row(s.rule).meets == Meets::by_rho;
     }},
    {"select_stride", "proxy", [](const Settings& s, const Surroundings&) { return !row(s.proxy).codes; }},
    {"select_stride", "rule", [](const Settings& s, const Surroundings&) { return !row(s.rule).whole_codes; }},
    {"similarity", "rule", [](const Settings& s, const Surroundings&) { return row(s.rule).similarity; }},
    {"tail_weight", "tail", [](const Settings& s, const Surroundings&) { return row(s.tail).mixes; }},
    {"tail_parts", "tail", [](const Settings& s, const Surroundings&) { return row(s.tail).splits; }},
    {"tail_follow", "tail", [](const Settings& s, const Surroundings&) { return row(s.tail).splits; }},
    {"tail_stride", "tail", [](const Settings& s, const Surroundings&) { return row(s.tail).splits; }},
    {"dense_layers", "layer", [](const Settings&, const Surroundings& with) { return with.layer; }},
    {"dense_steps", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"dense_last_steps", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"warm_prefix", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"warm_prefix", "state", [](const Settings&, const Surroundings& with) { return with.state; }},
    {"reuse_start", "reuse_interval", [](const Settings& s, const Surroundings&) { return s.reuse_interval > 1; }},
    {"reuse_start", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"reuse_start", "state", [](const Settings&, const Surroundings& with) { return with.state; }},
    {"reuse_steps", "reuse_interval", [](const Settings& s, const Surroundings&) { return s.reuse_interval > 1; }},
    {"reuse_steps", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"reuse_steps", "state", [](const Settings&, const Surroundings& with) { return with.state; }},
    {"reuse_interval", "step", [](const Settings&, const Surroundings& with) { return with.step; }},
    {"reuse_interval", "state", [](const Settings&, const Surroundings& with) { return with.state; }},
    {"layers", "profile", [](const Settings& s, const Surroundings&) { return s.profile != nullptr; }},
    {"state_dtype", "state", [](const Settings&, const Surroundings& with) { return with.state; }},
    {"workspace_limit", "device", [](const Settings&, const Surroundings& with) { return with.device; }},
};

// What a dense call reads; a plan refuses target_density itself.
constexpr std::string_view kOfDense[] = {"check_finite", "kernel", "products", "workspace_limit", "target_density"};

}  // namespace

std::string why_idle(const Settings& settings, std::string_view name, const Surroundings& with) {
  if (settings.dense && std::find(std::begin(kOfDense), std::end(kOfDense), name) == std::end(kOfDense)) {
    return "method dense selects nothing";
  }
  for (const Need& need : kNeeds) {
    if (name != need.setting || need.holds(settings, with)) continue;
    for (const Setting& setting : settings_table()) {
      if (setting.name == std::string_view(need.decided_by)) {
        const std::string why = fmt::format("{} is {}", need.decided_by, setting.get(settings));
        return need.instead == nullptr ? why : fmt::format("{}; {}", why, need.instead);
      }
    }
    return fmt::format("calls have no {} here", need.decided_by);
  }
  return "";
}

void refuse_idle(const Settings& settings, const std::map<std::string, std::string>& given) {
  for (const auto& [name, value] : given) {
    if (value == "none" || get_setting(settings, name) != value) continue;  // the latter: a known model overrode it
    const std::string why = why_idle(settings, name);
    require(why.empty(), Status::invalid_argument, "{}: got {}, which would do nothing: {}", name, value, why);
  }
}

}  // namespace scope
