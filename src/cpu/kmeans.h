// The steps of a clustering on the CPU, which K-means and co-clustering share.
#pragma once

#include "cpu/kernels.h"
#include "stages/kmeans.h"

namespace scope::cpu {

struct KMeansWork {
  int64_t row_stride, padded_clusters;
  const AttendKernels* dots = nullptr;  // that compare bf16 points and rounded centroids; null: f32
  float* panels;                        // directions, packed
  float* penalty;                       // [padded_clusters] what a direction's product is lowered by; +inf on padding
  float* points;                        // [threads, rows of a chunk, row_stride]
  float* strip;                         // [threads, kStrip, padded_clusters]
  float* block_sum;                     // [threads, row_stride]
  double* sum;                          // [threads, depth]
  int32_t* sample;                      // [count] positions in `rows`
  float* rounded;                       // [clusters, depth] centroids as `dots` compares them
  int32_t* numbers;                     // [clusters] 0, 1, ...
  double* mean;                         // [depth] of the directions

  KMeansWork(Arena arena, const Exec& exec, int64_t count, int64_t dim, int64_t depth, int64_t clusters,
             int64_t* bytes = nullptr);
};

// The dot products that compare these points with rounded directions; null: f32, exactly.
inline const AttendKernels* dots_for(const Exec& exec, const RowsView& points) {
  return points.dtype == DType::bf16 ? exec.attend_kernels_bf16 : nullptr;
}

// `whole`: the channels that take part are all of args.points, in order.
void start_from_random_rows(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, bool whole);
// What assign compares with: x . directions[c] - at.penalty[c]; penalties are 0 after this. at.dots compares directions less
// their mean, rounded.
void pack_directions(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, const float* directions);
// Labels of the tokens rows[i], i in [0, count): the highest, ties to the lowest index.
void assign(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, bool whole, const int32_t* rows, int64_t count);
// Positions in `order` by label, ascending within one, so that every sum over a cluster has one order.
void sort_by_label(const int32_t* labels, int64_t count, int64_t clusters, int32_t* sizes, int32_t* order, int64_t* offsets);
// Sizes, order and offsets from the labels, and every centroid the mean of its tokens; an empty one stays.
void update(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, bool whole, const int32_t* rows, int64_t count);

}  // namespace scope::cpu
