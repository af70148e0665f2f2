// Values of options that are lists, grids and counts, as text.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace scope::cli {

std::vector<std::string> split(std::string_view text, char separator);
// Positive numbers.
std::vector<int64_t> parse_list(const std::string& name, const std::string& text, char separator);
// Numbers from 0, separated by commas.
std::vector<int64_t> parse_indices(const char* name, const std::string& text);
// A count, or `all`.
int64_t parse_samples(const std::string& text, const std::string& flag = "--samples");
// The value of --grid.
std::array<int64_t, 3> parse_grid(const std::string& text);
// Numbers in 0..end - 1, separated by commas; all of them where nothing is said.
std::set<int64_t> parse_set(const char* name, const std::string& text, int64_t end);

}  // namespace scope::cli
