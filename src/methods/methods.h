// The method table: a method is a row of settings, and what no setting says of it.
#pragma once

#include <span>
#include <string_view>

#include "methods/settings.h"

namespace scope {

struct Model;

struct Method {
  const char* name;
  const char* help;
  bool shares_branches = false;                  // the branches of guidance go on from one state
  bool profiled = false;                         // published with least shares from a profile
  bool morton = false;                           // its blocks are meant for tokens in Morton order
  void (*apply_model)(const Model&, Settings&);  // what a known model overrides, besides its schedule
  Settings (*defaults)();

  Settings settings() const {
    Settings made = defaults();
    made.method = this;
    return made;
  }
};

std::span<const Method> methods_table();
// Throws Status::invalid_argument; an unknown name lists those that exist.
const Method& find_method(std::string_view name);

}  // namespace scope
