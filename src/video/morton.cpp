// Morton numbers, sorted.
#include "video/morton.h"

#include <algorithm>
#include <numeric>

namespace scope::video {

std::vector<int32_t> morton_places(const std::array<int64_t, 3>& grid) {
  std::vector<uint64_t> numbers;
  for (int64_t t = 0; t < grid[0]; ++t) {
    for (int64_t h = 0; h < grid[1]; ++h) {
      for (int64_t w = 0; w < grid[2]; ++w) {
        uint64_t number = 0;
        for (int bit = 0; bit < 21; ++bit) {
          const auto of = [&](int64_t x, int place) { return (static_cast<uint64_t>(x) >> bit & 1u) << (3 * bit + place); };
          number |= of(w, 0) | of(h, 1) | of(t, 2);
        }
        numbers.push_back(number);
      }
    }
  }
  std::vector<int32_t> order(numbers.size()), places(numbers.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return numbers[static_cast<size_t>(a)] < numbers[static_cast<size_t>(b)]; });
  for (size_t i = 0; i < order.size(); ++i) places[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  return places;
}

}  // namespace scope::video
