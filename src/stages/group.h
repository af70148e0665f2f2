// group: queries -> labels, sizes, centroids and the permutation that brings each group together.
#pragma once

#include "core/random.h"
#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

// raster: contiguous runs whose sizes differ by at most 1; blocks: runs of `block` queries, the last may be shorter;
// cocluster: together with the keys, by stages/cocluster.h instead of this stage.
enum class Grouping { kmeans, raster, blocks, cocluster };

// A chunk of heads of one sample, like every stage's arguments: counts, settings and `rows` are the same for all of them,
// and shapes are those of one head.
struct GroupArgs {
  int64_t heads = 1;
  HeadsView q = {};               // [tokens, dim]
  const int32_t* rows = nullptr;  // [count] queries to group, ascending; on a device null stands for the first `count`
  int64_t count = 0;              // >= 1
  int64_t groups = 0;             // 1 .. count; blocks: ceil(count / block)
  Grouping grouping = Grouping::kmeans;
  int64_t block = 0;   // blocks only
  int iterations = 0;  // K-means only, like the next five; these three as KMeansArgs says
  int64_t sample = 0;
  int full_iterations = 2;
  uint64_t draw = 0;
  bool warm = false;
  uint64_t seed = 0;
  PerHead<float> centroids = {};   // [groups, dim] in when warm, out
  PerHead<int32_t> labels = {};    // [tokens] out; -1: not grouped
  PerHead<int32_t> sizes = {};     // [groups] out
  PerHead<int32_t> order = {};     // [count] out: tokens by group, ascending within a group
  PerHead<int64_t> offsets = {};   // [groups + 1] out
  PerHead<float> similarity = {};  // [groups] out, optional, blocks only: docs/reference/algorithm.md, "Blocks"
  uint32_t* status = nullptr;      // [1] of the call; device only: bit 0 is set when a row that takes part is not finite
  Scratch scratch = {};
};

namespace cpu {
void group(const Exec& exec, const GroupArgs& args);
int64_t group_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
