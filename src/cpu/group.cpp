// group on the CPU: K-means over all channels, or runs of tokens in raster order.
#include "cpu/group.h"

#include <algorithm>
#include <numeric>

#include "core/numeric.h"
#include "cpu/blocks.h"
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

// Contiguous runs of positions, and their means as centroids.
void runs(const Exec& exec, const GroupArgs& args, Scratch scratch) {
  for (int64_t c = 0; c <= args.groups; ++c) {
    args.offsets[c] =
        args.grouping == Grouping::blocks ? std::min(c * args.block, args.count) : c * args.count / args.groups;
  }
  for (int64_t c = 0; c < args.groups; ++c) args.sizes[c] = static_cast<int32_t>(args.offsets[c + 1] - args.offsets[c]);
  Arena arena(scratch.data, scratch.bytes);
  const BlocksArgs blocks{.x = args.q,
                          .rows = args.rows,
                          .blocks = args.groups,
                          .offsets = args.offsets,
                          .row_buffer = arena.take<float>(exec.pool->threads() * round_up(args.q.dim, kLanes))};
  block_means(exec, blocks, args.centroids);
  if (args.similarity != nullptr) block_similarity(exec, blocks, args.block, nullptr, args.similarity);
}

}  // namespace

void label_tokens(const GroupArgs& args) {
  std::fill_n(args.labels, args.q.tokens, -1);
  for (int64_t c = 0; c < args.groups; ++c) {
    for (int64_t i = args.offsets[c]; i < args.offsets[c + 1]; ++i) {
      args.order[i] = args.rows[args.order[i]];
      args.labels[args.order[i]] = static_cast<int32_t>(c);
    }
  }
}

int64_t group_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups) {
  int64_t bytes = 0;
  Layout(Arena(), exec, tokens, dim, groups, &bytes);
  return bytes;
}

void group(const Exec& exec, const GroupArgs& args) {
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.q.dim, args.groups);
  if (args.grouping != Grouping::kmeans) {
    runs(exec, args, at.kmeans);
    std::iota(args.order, args.order + args.count, 0);
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
  }
  label_tokens(args);
}

}  // namespace scope::cpu
