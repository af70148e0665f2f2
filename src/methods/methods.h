// The method table: a method is a row of settings.
#pragma once

#include <span>
#include <string_view>

#include "methods/settings.h"

namespace scope {

struct Method {
  const char* name;
  const char* help;
  Settings (*settings)();
};

std::span<const Method> methods_table();
// Throws Status::invalid_argument; an unknown name lists those that exist.
const Method& find_method(std::string_view name);

}  // namespace scope
