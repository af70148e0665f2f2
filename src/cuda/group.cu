// group on CUDA: K-means over all channels, or runs of tokens in raster order.
#include <numeric>
#include <vector>

#include "cuda/blocks.h"
#include "cuda/kmeans.h"
#include "cuda/stages.h"
#include "stages/group.h"

namespace scope::cuda {

int64_t group_scratch(const Exec&, const Sizes& sizes) {
  return sizes.heads * kmeans_scratch(sizes.q_tokens, sizes.groups, true);
}

KMeansBatch batch_of(const GroupArgs& args, std::span<const int32_t> channels) {
  KMeansBatch batch;
  batch.dtype = args.q.dtype;
  batch.points = head_rows(args.q);
  batch.heads = static_cast<int>(args.heads);
  batch.subsets = 1;
  batch.tokens = args.q.tokens;
  batch.dim = args.q.dim;
  batch.rows = args.rows;
  batch.count = args.count;
  batch.clusters = args.groups;
  batch.iterations = args.iterations;
  batch.sample = args.sample;
  batch.full_iterations = args.full_iterations;
  batch.draw = args.draw;
  batch.warm = args.warm;
  batch.random = {.seed = args.seed, .tensor = 0};
  batch.channels[0] = channels;
  batch.centroids = args.centroids;
  batch.status = args.status;
  batch.token_labels = args.labels;
  batch.sizes = args.sizes;
  batch.order = args.order;
  batch.offsets = args.offsets;
  batch.scratch = args.scratch;
  return batch;
}

void group(const Exec& exec, const GroupArgs& args) {
  std::vector<int32_t> channels(static_cast<size_t>(args.q.dim));
  std::iota(channels.begin(), channels.end(), 0);
  switch (args.grouping) {
    case Grouping::kmeans:
      return kmeans(exec, batch_of(args, channels));
    case Grouping::raster:
      return raster(exec, batch_of(args, channels));
    case Grouping::blocks:
      return group_blocks(exec, args);
    case Grouping::cocluster:
      fail(Status::internal, "group: got cocluster, which is a stage of its own");
  }
}

}  // namespace scope::cuda
