// group on CUDA: K-means over all channels, or runs of tokens in raster order.
#include <numeric>
#include <vector>

#include "cuda/blocks.h"
#include "cuda/kmeans.h"
#include "cuda/stages.h"
#include "stages/group.h"

namespace scope::cuda {

int64_t group_scratch(const Exec&, int64_t tokens, int64_t, int64_t groups) { return kmeans_scratch(tokens, groups, true); }

void group(const Exec& exec, std::span<const GroupArgs> heads) {
  const GroupArgs& args = heads[0];
  if (args.grouping == Grouping::blocks) return group_blocks(exec, heads);
  std::vector<int32_t> channels(static_cast<size_t>(args.q.dim));
  std::iota(channels.begin(), channels.end(), 0);
  KMeansBatch batch;
  batch.dtype = args.q.dtype;
  batch.points = head_rows<const uint16_t>(heads, [](const GroupArgs& a) { return a.q; });
  batch.heads = static_cast<int>(heads.size());
  batch.subsets = 1;
  batch.tokens = args.q.tokens;
  batch.dim = args.q.dim;
  batch.rows = args.rows;
  batch.count = args.count;
  batch.clusters = args.groups;
  batch.iterations = args.iterations;
  batch.sample = args.sample;
  batch.warm = args.warm;
  batch.random = {.seed = args.seed, .tensor = 0};
  batch.channels[0] = channels;
  batch.centroids = per_head(heads, [](const GroupArgs& a) { return a.centroids; });
  batch.status = args.status;
  batch.token_labels = per_head(heads, [](const GroupArgs& a) { return a.labels; });
  batch.sizes = per_head(heads, [](const GroupArgs& a) { return a.sizes; });
  batch.order = per_head(heads, [](const GroupArgs& a) { return a.order; });
  batch.offsets = per_head(heads, [](const GroupArgs& a) { return a.offsets; });
  batch.scratch = args.scratch;
  args.grouping == Grouping::raster ? raster(exec, batch) : kmeans(exec, batch);
}

}  // namespace scope::cuda
