// K-means: the one clustering primitive, used by group (all channels) and encode (a subset of channels).
#pragma once

#include "core/random.h"
#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

// Assignment: argmin over c of |c|^2 - 2 x.c, ties to the lowest index. Update: mean of the members, in a fixed order;
// an empty cluster keeps its old centroid. The labels returned are those of the last assignment and the centroids are
// the means of exactly those labels. Bitwise repeatable for any thread count.
struct KMeansArgs {
  RowsView points;                    // [tokens, dim]
  const int32_t* rows = nullptr;      // [count] tokens that take part, ascending
  int64_t count = 0;                  // >= 1
  const int32_t* channels = nullptr;  // [depth] channels that take part
  int64_t depth = 0;                  // >= 1
  int64_t clusters = 0;               // 1 .. count
  int iterations = 0;                 // >= 1
  int64_t sample = INT64_MAX;  // tokens that all but the last `full_iterations` see, drawn anew for each; >= count: all
  int full_iterations = 2;     // >= 1
  uint64_t draw = 0;           // number of the first iteration's sample; the others follow it
  bool warm = false;           // start from `centroids` instead of from random rows
  RandomStream random;
  float* centroids = nullptr;  // [clusters, depth] in when warm, out
  int32_t* labels = nullptr;   // [count] out
  int32_t* sizes = nullptr;    // [clusters] out
  int32_t* order = nullptr;    // [count] out: positions in `rows` by label, ascending within one label
  int64_t* offsets = nullptr;  // [clusters + 1] out: where each label's run starts in `order`
  Scratch scratch = {};
};

namespace cpu {
void kmeans(const Exec& exec, const KMeansArgs& args);
// dim: of the points, however few channels take part.
int64_t kmeans_scratch(const Exec& exec, int64_t count, int64_t dim, int64_t clusters);
}  // namespace cpu

}  // namespace scope
