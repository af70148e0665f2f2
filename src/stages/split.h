// split: the queries of each group -> a few parts of it, each with a centroid of its own.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

inline constexpr int64_t kMostParts = 16;

// K-means inside each group: part u of group c is row c * parts + u. A cold start takes members at even distances of the
// group's order, so a group smaller than its parts leaves some empty. Assignment and update are those of K-means: ties go to
// the lowest part, an empty part keeps its centroid, and centroids are the means of the labels returned. A query that is not
// finite has some label and counts nowhere.
struct SplitArgs {
  int64_t heads = 1;
  HeadsView q = {};  // [tokens, dim]
  int64_t groups = 0;
  int64_t parts = 0;                    // >= 1
  PerHead<const int32_t> order = {};    // [tokens] by group, as GroupArgs has them
  PerHead<const int64_t> offsets = {};  // [groups + 1]
  int rounds = 0;                       // >= 1
  bool warm = false;                    // from `centroids`: so tests follow each round; calls start anew
  PerHead<float> centroids = {};        // [groups * parts, dim] in when warm, out
  PerHead<int32_t> sizes = {};          // [groups * parts] out
  PerHead<int32_t> labels = {};         // [tokens] out; -1: not grouped
  Scratch scratch = {};
};

namespace cpu {
void split(const Exec& exec, const SplitArgs& args);
int64_t split_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
