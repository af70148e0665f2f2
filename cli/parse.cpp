// Reads lists and grids from what an option says.
#include "parse.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "core/error.h"

namespace scope::cli {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

std::vector<int64_t> parse_list(const std::string& name, const std::string& text, char separator) {
  std::vector<int64_t> values;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    int64_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    require(error == std::errc() && value > 0 && (next == end || *next == separator), Status::invalid_argument,
            "{}: got \"{}\", expected positive integers separated by '{}'", name, text, separator);
    values.push_back(value);
    if (next == end) return values;
    at = next + 1;
  }
}

std::vector<int64_t> parse_indices(const char* name, const std::string& text) {
  std::vector<int64_t> values;
  for (const std::string& item : split(text, ',')) {
    int64_t value = -1;
    const auto [next, error] = std::from_chars(item.data(), item.data() + item.size(), value);
    require(error == std::errc() && next == item.data() + item.size() && value >= 0, Status::invalid_argument,
            "{}: got \"{}\", expected indices from 0, separated by ','", name, text);
    values.push_back(value);
  }
  return values;
}

int64_t parse_samples(const std::string& text, const std::string& flag) {
  if (text == "all") return std::numeric_limits<int64_t>::max();
  const auto values = parse_list(flag, text, ',');
  require(values.size() == 1, Status::invalid_argument, "{}: got \"{}\", expected a number or all", flag, text);
  return values[0];
}

std::array<int64_t, 3> parse_grid(const std::string& text) {
  const auto values = parse_list("--grid", text, 'x');
  require(values.size() == 3, Status::invalid_argument, "--grid: got \"{}\", expected TxHxW in tokens", text);
  return {values[0], values[1], values[2]};
}

std::set<int64_t> parse_set(const char* name, const std::string& text, int64_t end) {
  std::set<int64_t> out;
  for (int64_t i = 0; text.empty() && i < end; ++i) out.insert(i);
  if (text.empty()) return out;
  for (const std::string& item : split(text, ',')) {
    const bool digits = !item.empty() && item.size() < 10 && item.find_first_not_of("0123456789") == std::string::npos;
    require(digits && std::stoll(item) < end, Status::invalid_argument,
            "{}: got \"{}\", expected numbers in 0..{} separated by commas", name, text, end - 1);
    out.insert(std::stoll(item));
  }
  return out;
}

}  // namespace scope::cli
