// Distances between names, in letters.
#include "core/nearest.h"

#include <algorithm>
#include <numeric>

namespace scope {

namespace {

constexpr size_t kLongest = 64;  // of what is compared: a longer text is no mistyped name

char lower(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter; }

// Letters to add, remove or change (Levenshtein); capitals are no difference.
size_t distance(std::string_view a, std::string_view b) {
  size_t row[kLongest + 1];
  std::iota(row, row + b.size() + 1, size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (lower(a[i]) == lower(b[j]) ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string did_you_mean(std::string_view typed, const std::vector<std::string_view>& names) {
  if (typed.empty() || typed.size() > kLongest) return "";
  std::string_view nearest;
  size_t least = std::max<size_t>(1, typed.size() / 3) + 1;
  for (const std::string_view name : names) {
    if (name.size() > kLongest) continue;
    const size_t letters = distance(typed, name);
    if (letters < least) nearest = name, least = letters;
  }
  return nearest.empty() ? "" : " (did you mean \"" + std::string(nearest) + "\"?)";
}

}  // namespace scope
