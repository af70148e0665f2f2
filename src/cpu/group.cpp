// group on the CPU: K-means over all channels, or raster blocks.
#include "stages/group.h"

#include <algorithm>
#include <numeric>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "stages/kmeans.h"

namespace scope::cpu {

namespace {

struct Layout {
  int32_t* channels;  // [dim] 0, 1, 2, …
  int32_t* labels;    // [tokens] by position
  Scratch kmeans;

  Layout(Arena arena, const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t* bytes = nullptr) {
    channels = arena.take<int32_t>(dim);
    labels = arena.take<int32_t>(tokens);
    kmeans.bytes = kmeans_scratch(exec, tokens, dim, groups);
    kmeans.data = arena.take<std::byte>(kmeans.bytes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// Block c holds positions [c n / groups, (c + 1) n / groups), and its centroid is their mean.
void raster(const Exec& exec, const GroupArgs& args, Scratch scratch) {
  for (int64_t c = 0; c <= args.groups; ++c) args.offsets[c] = c * args.count / args.groups;
  const int64_t stride = round_up(args.q.dim, kLanes);
  Arena arena(scratch.data, scratch.bytes);
  auto* rows = arena.take<float>(exec.pool->threads() * stride);
  exec.pool->run(args.groups, [&](int64_t c, int thread) {
    float* row = rows + thread * stride;
    const int64_t begin = args.offsets[c], end = args.offsets[c + 1];
    args.sizes[c] = static_cast<int32_t>(end - begin);
    double sum[256] = {};
    for (int64_t i = begin; i < end; ++i) {
      exec.kernels->load_rows(args.q, args.rows + i, 1, row, stride);
      for (int64_t k = 0; k < args.q.dim; ++k) sum[k] += static_cast<double>(row[k]);
    }
    for (int64_t k = 0; k < args.q.dim; ++k) {
      args.centroids[c * args.q.dim + k] = static_cast<float>(sum[k] / static_cast<double>(end - begin));
    }
  });
}

}  // namespace

int64_t group_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups) {
  int64_t bytes = 0;
  Layout(Arena(), exec, tokens, dim, groups, &bytes);
  return bytes;
}

void group(const Exec& exec, const GroupArgs& args) {
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.q.dim, args.groups);
  if (args.grouping == Grouping::raster) {
    raster(exec, args, at.kmeans);
    std::copy_n(args.rows, args.count, args.order);
  } else {
    std::iota(at.channels, at.channels + args.q.dim, 0);
    kmeans(exec, {.points = args.q,
                  .rows = args.rows,
                  .count = args.count,
                  .channels = at.channels,
                  .depth = args.q.dim,
                  .clusters = args.groups,
                  .iterations = args.iterations,
                  .sample = args.sample,
                  .warm = args.warm,
                  .random = {.seed = args.seed, .tensor = 0},
                  .centroids = args.centroids,
                  .labels = at.labels,
                  .sizes = args.sizes,
                  .order = args.order,
                  .offsets = args.offsets,
                  .scratch = at.kmeans});
    for (int64_t i = 0; i < args.count; ++i) args.order[i] = args.rows[args.order[i]];
  }
  std::fill_n(args.labels, args.q.tokens, -1);
  for (int64_t c = 0; c < args.groups; ++c) {
    for (int64_t i = args.offsets[c]; i < args.offsets[c + 1]; ++i) args.labels[args.order[i]] = static_cast<int32_t>(c);
  }
}

}  // namespace scope::cpu
