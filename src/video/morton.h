// Morton order of a grid's tokens: neighbours in space and time stay near one another.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace scope::video {

// Where each token of grid T, H, W, taken in raster order, stands by the number whose bits are those of w, h and t in turn,
// w lowest.
std::vector<int32_t> morton_places(const std::array<int64_t, 3>& grid);

}  // namespace scope::video
