// The name that a mistyped one was meant to be, for errors.
#pragma once

#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace scope {

// ` (did you mean "rho"?)` for the name that needs the fewest letters changed, the first of several; empty where that is
// more than a third of what was typed.
std::string did_you_mean(std::string_view typed, const std::vector<std::string_view>& names);

// Of the rows of a table.
template <class Rows>
std::string did_you_mean_row(std::string_view typed, const Rows& rows) {
  std::vector<std::string_view> names;
  names.reserve(std::size(rows));
  for (const auto& row : rows) names.emplace_back(row.name);
  return did_you_mean(typed, names);
}

}  // namespace scope
