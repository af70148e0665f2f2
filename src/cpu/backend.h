// The CPU's row of the backend table.
#pragma once

#include "stages/backend.h"

namespace scope {

const Backend* cpu_backend();

}  // namespace scope
