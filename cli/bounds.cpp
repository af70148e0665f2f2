// Holds the text of a number against its bounds, before CLI11 makes it one.
#include "bounds.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <string>

#include "core/parallel.h"
#include "io/file.h"

namespace scope::cli {

namespace {

template <class Number>
bool parse(const std::string& text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string wrong(const std::string& text, const std::string& expected) {
  return fmt::format("got {}, expected {}", text.empty() ? "nothing" : io::printable(text, 40), expected);
}

}  // namespace

CLI::Validator whole(int64_t low, int64_t high) {
  const std::string most = high == std::numeric_limits<int64_t>::max() ? "2^63 - 1" : std::to_string(high);
  return {[=](const std::string& text) {
            int64_t value = 0;
            const bool inside = parse(text, value) && value >= low && value <= high;
            return inside ? "" : wrong(text, fmt::format("a whole number from {} to {}", low, most));
          },
          fmt::format("{}..{}", low, most)};
}

CLI::Validator above(double low, double high) {
  return {[=](const std::string& text) {
            double value = 0;
            const bool inside = parse(text, value) && value > low && value <= high;  // NaN is not
            return inside ? "" : wrong(text, fmt::format("a number above {} and up to {}", low, high));
          },
          fmt::format("({}, {}]", low, high)};
}

void add_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "CPU threads; 0 = one per core")
      ->check(whole(0, kMostThreads))
      ->capture_default_str();
}

}  // namespace scope::cli
