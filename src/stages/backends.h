// The list of backends: the one place that names them.
#pragma once

#include "stages/backend.h"

namespace scope {

// Those of this build.
std::span<const Backend* const> backends();
// Throws with the list of those that this build has.
const Backend& find_backend(std::string_view name);

}  // namespace scope
