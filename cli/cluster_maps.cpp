// Clusters one head's keys and draws them on its frames.
#include "cluster_maps.h"

#include <fmt/format.h>

#include <algorithm>

#include "methods/methods.h"
#include "parse.h"
#include "runner.h"

namespace scope::cli {

int64_t map_scale(const Grid& grid) { return std::clamp<int64_t>(160 / grid[2], 1, 10); }

Grid video_grid(const Input& input, int64_t text) {
  require(!input.grid.empty(), Status::invalid_argument,
          "--grid: the file does not say its grid; expected --grid TxHxW with {} tokens", input.qkv.q_tokens - text);
  const auto sizes = parse_list("grid", input.grid, 'x');
  require(sizes.size() == 3, Status::invalid_argument, "grid: got \"{}\", expected TxHxW", input.grid);
  require(input.qkv.k_tokens == input.qkv.q_tokens, Status::shape, "k: got {} tokens, expected the {} of q and the grid {}",
          input.qkv.k_tokens, input.qkv.q_tokens, input.grid);
  require(text > 0 || (input.keep.empty() && input.dense_queries.empty()), Status::unsupported,
          "keep, dense_queries: the file marks tokens of its own; only text at the end (--text) can be drawn");
  return {sizes[0], sizes[1], sizes[2]};
}

int64_t grid_tokens(const Grid& grid) { return grid[0] * grid[1] * grid[2]; }

Input one_head(const Input& input, int64_t head) {
  const Qkv& all = input.qkv;
  require(head >= 0 && head < all.batch * all.heads, Status::invalid_argument,
          "--head: got {}, expected 0..{} ({} samples x {} heads)", head, all.batch * all.heads - 1, all.batch, all.heads);
  const auto cut = [&](const io::Array& x) {
    const auto bytes = static_cast<int64_t>(x.data.size()) / (all.batch * all.heads);
    const auto tokens = x.shape[x.shape.size() - 2];
    return io::Array{x.type, {1, tokens, all.dim}, {x.data.begin() + head * bytes, x.data.begin() + (head + 1) * bytes}};
  };
  Input out{.qkv = make_qkv_input(cut(all.q), cut(all.k), cut(all.v)), .grid = input.grid};
  out.qkv.rope = all.rope;
  out.qkv.subspaces = all.subspaces;
  const auto sample = [&](const std::vector<uint32_t>& words) {
    const auto each = static_cast<int64_t>(words.size()) / all.batch, at = head / all.heads * each;
    return std::vector<uint32_t>(words.begin() + at, words.begin() + at + each);
  };
  out.keep = sample(input.keep);
  out.dense_queries = sample(input.dense_queries);
  return out;
}

std::vector<int64_t> parse_frames(const std::string& text, int64_t end, int64_t most) {
  std::vector<int64_t> frames;
  if (text.empty()) {
    const int64_t count = std::min(most, end);
    for (int64_t i = 0; i < count; ++i) frames.push_back(count == 1 ? 0 : i * (end - 1) / (count - 1));
    return frames;
  }
  frames = parse_indices("--frames", text);
  for (const int64_t frame : frames) {
    require(frame < end, Status::invalid_argument, "--frames: got {}, expected 0..{}: the grid has {} frames", frame,
            end - 1, end);
  }
  return frames;
}

ClusterMaps make_cluster_maps(const Context& context, const Input& head, const Grid& grid, const Settings& settings,
                              int64_t clusters) {
  Settings clustering = find_method("scope-paper").settings();
  clustering.partition = settings.partition;
  clustering.seed = settings.seed;
  clustering.codes = clusters;
  clustering.groups = 1;
  Runner runner(context, clustering, head.shape());
  runner.attend = false;
  runner.want_selection();
  runner.run(head.args());
  ClusterMaps maps{.grid = grid, .clusters = clusters, .names = {}, .channels = {}, .labels = {}, .shares = {}};
  const Partition& partition = runner.plan().partition;
  const bool rope = clustering.partition == "rope" && head.qkv.subspaces.empty() && partition.size() == 3;
  for (size_t m = 0; m < partition.size(); ++m) {
    maps.names.push_back(rope ? std::string(1, "THW"[m]) : std::to_string(m));
    maps.channels.push_back(std::ssize(partition[m]));
    const int32_t* codes = runner.codes.data() + static_cast<int64_t>(m) * head.qkv.k_tokens;
    maps.labels.emplace_back(codes, codes + grid_tokens(grid));
    maps.shares.push_back(axis_shares(codes, grid));
  }
  return maps;
}

PanelSection cluster_section(const ClusterMaps& maps, const std::vector<int64_t>& frames) {
  PanelSection section;
  section.title = "Subspaces down, frames across";
  for (const int64_t frame : frames) section.columns.push_back(fmt::format("frame {}", frame));
  for (size_t m = 0; m < maps.names.size(); ++m) {
    PanelRow row{fmt::format("{} ({} ch.)", maps.names[m], maps.channels[m]), {}};
    for (const int64_t frame : frames) {
      row.panels.push_back({map_image(maps.grid[1], maps.grid[2], map_scale(maps.grid), [&](int64_t y, int64_t x) {
        return cluster_colour(maps.labels[m][(frame * maps.grid[1] + y) * maps.grid[2] + x]);
      })});
    }
    section.rows.push_back(std::move(row));
  }
  return section;
}

}  // namespace scope::cli
