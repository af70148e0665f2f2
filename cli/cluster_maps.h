// Cluster maps of one head's keys, which scope inspect and scope report draw.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "input.h"
#include "measure/scoring.h"
#include "picture.h"

namespace scope::cli {

// The grid as numbers; an input without one, or with more keys or queries than the grid and its text, is refused.
Grid video_grid(const Input& input, int64_t text);
int64_t grid_tokens(const Grid& grid);
// One head of the batch x heads of the input, with its text.
Input one_head(const Input& input, int64_t head);
// "0,5,10": indices below `end`. Empty: `most` of them, spread evenly from the first to the last.
std::vector<int64_t> parse_frames(const std::string& text, int64_t end, int64_t most);

struct ClusterMaps {
  Grid grid;
  int64_t clusters = 0;
  std::vector<std::string> names;  // of the subspaces: T, H and W where they are RoPE's
  std::vector<int64_t> channels;
  std::vector<std::vector<int32_t>> labels;   // [video tokens]
  std::vector<std::array<double, 3>> shares;  // axis_shares
};
// K-means of the keys in each subspace of `settings`, 50 iterations over all of them.
ClusterMaps make_cluster_maps(const Context& context, const Input& head, const Grid& grid, const Settings& settings,
                              int64_t clusters);
// Pixels of a token's square.
int64_t map_scale(const Grid& grid);
// Subspaces down, frames across; a colour means the same in all of a row.
PanelSection cluster_section(const ClusterMaps& maps, const std::vector<int64_t>& frames);

}  // namespace scope::cli
