// group on the CPU: K-means over all channels, or runs of tokens in raster order.
#include "cpu/group.h"

#include <algorithm>
#include <numeric>

#include "core/numeric.h"
#include "cpu/blocks.h"
#include "cpu/kernels.h"
#include "stages/choices.h"
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
void group_runs(const Exec& exec, const GroupArgs& args, int64_t head, Scratch scratch) {
  int64_t* offsets = args.offsets[head];
  int32_t* sizes = args.sizes[head];
  int32_t* order = args.order[head];
  for (int64_t c = 0; c <= args.groups; ++c) {
    offsets[c] = row(args.grouping).blocks ? std::min(c * args.block, args.count) : c * args.count / args.groups;
  }
  for (int64_t c = 0; c < args.groups; ++c) sizes[c] = static_cast<int32_t>(offsets[c + 1] - offsets[c]);
  std::iota(order, order + args.count, 0);
  Arena arena(scratch.data, scratch.bytes);
  const BlocksArgs blocks{.x = args.q[head],
                          .rows = args.rows,
                          .blocks = args.groups,
                          .offsets = offsets,
                          .row_buffer = arena.take<float>(exec.pool->threads() * round_up(args.q.dim, kLanes))};
  block_means(exec, blocks, args.centroids[head]);
  if (args.similarity) block_similarity(exec, blocks, args.block, nullptr, args.similarity[head]);
}

void group_by_kmeans(const Exec& exec, const GroupArgs& args, int64_t head, const Layout& at) {
  std::iota(at.channels, at.channels + args.q.dim, 0);
  kmeans(exec, {.points = args.q[head],
                .rows = args.rows,
                .count = args.count,
                .channels = at.channels,
                .depth = args.q.dim,
                .clusters = args.groups,
                .iterations = args.iterations,
                .sample = args.sample,
                .full_iterations = args.full_iterations,
                .draw = args.draw,
                .warm = args.warm,
                .random = {.seed = args.seed, .tensor = 0},
                .centroids = args.centroids[head],
                .labels = at.labels,
                .sizes = args.sizes[head],
                .order = args.order[head],
                .offsets = args.offsets[head],
                .scratch = at.kmeans});
}

}  // namespace

void label_tokens(const GroupArgs& args, int64_t head) {
  int32_t* labels = args.labels[head];
  int32_t* order = args.order[head];
  const int64_t* offsets = args.offsets[head];
  std::fill_n(labels, args.q.tokens, -1);
  for (int64_t c = 0; c < args.groups; ++c) {
    for (int64_t i = offsets[c]; i < offsets[c + 1]; ++i) {
      order[i] = args.rows[order[i]];
      labels[order[i]] = static_cast<int32_t>(c);
    }
  }
}

int64_t group_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.q_tokens, sizes.dim, sizes.groups, &bytes);
  return bytes;
}

void group(const Exec& exec, const GroupArgs& args) {
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.q.dim, args.groups);
  for (int64_t h = 0; h < args.heads; ++h) {
    switch (args.grouping) {
      case Grouping::kmeans:
        group_by_kmeans(exec, args, h, at);
        break;
      case Grouping::raster:
      case Grouping::blocks:
        group_runs(exec, args, h, at.kmeans);
        break;
      case Grouping::cocluster:
        fail(Status::internal, "group: got cocluster, which is a stage of its own");
    }
    label_tokens(args, h);
  }
}

}  // namespace scope::cpu
