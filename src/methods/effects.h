// Which settings count beside the others, so that a command can refuse one that would do nothing.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "methods/settings.h"

namespace scope {

// What calls come with; some settings only matter there.
struct Surroundings {
  bool layer = true, step = true, state = true, device = true;
  bool maps = false;  // keys are clustered for pictures too, whatever the method
};

// Why no value of the setting would change a result or a cost: "rule is target". Empty: it counts.
std::string why_idle(const Settings& settings, std::string_view name, const Surroundings& with = {});

// Throws Status::invalid_argument if another setting makes one of these (name, value) idle.
void refuse_idle(const Settings& settings, const std::map<std::string, std::string>& given);

}  // namespace scope
