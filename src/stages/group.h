// group: queries -> labels, sizes, centroids and the permutation that brings each group together.
#pragma once

#include "core/random.h"
#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

// raster: contiguous runs whose sizes differ by at most 1; blocks: runs of `block` queries, the last may be shorter;
// cocluster: together with the keys, by stages/cocluster.h instead of this stage.
enum class Grouping { kmeans, raster, blocks, cocluster };

struct GroupArgs {
  RowsView q;                     // [tokens, dim]
  const int32_t* rows = nullptr;  // [count] queries to group, ascending
  int64_t count = 0;              // >= 1
  int64_t groups = 0;             // 1 .. count; blocks: ceil(count / block)
  Grouping grouping = Grouping::kmeans;
  int64_t block = 0;   // blocks only
  int iterations = 0;  // K-means only, like the next three
  int64_t sample = 0;
  bool warm = false;
  uint64_t seed = 0;
  float* centroids = nullptr;  // [groups, dim] in when warm, out
  int32_t* labels = nullptr;   // [tokens] out; -1: not grouped
  int32_t* sizes = nullptr;    // [groups] out
  int32_t* order = nullptr;    // [count] out: tokens by group, ascending within a group
  int64_t* offsets = nullptr;  // [groups + 1] out
  // [groups] out, optional, blocks only: the mean of the Gram matrix of a block's rows, each scaled to length 1; NaN for a
  // block shorter than `block`, and where a row is zero (on a device: shorter than 1e-15).
  float* similarity = nullptr;
  uint32_t* status = nullptr;  // [1] device only: bit 0 is set when a row that takes part is not finite
  Scratch scratch;
};

namespace cpu {
void group(const Exec& exec, const GroupArgs& args);
int64_t group_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups);
}  // namespace cpu

}  // namespace scope
