// encode on CUDA: one K-means per channel subset, several subsets at a time, or the means of key blocks.
#include <algorithm>

#include "cuda/blocks.h"
#include "cuda/kmeans.h"
#include "cuda/stages.h"
#include "stages/encode.h"

namespace scope::cuda {

int64_t encode_scratch(const Exec&, const Sizes& sizes) {
  return sizes.heads *
         std::max(kmeans_scratch(sizes.k_tokens, sizes.codes, false), encode_blocks_scratch(sizes.dim, sizes.codes));
}

KMeansBatch batch_of(const EncodeArgs& args) {
  KMeansBatch batch;
  batch.dtype = args.k.dtype;
  batch.points = head_rows(args.k);
  batch.heads = static_cast<int>(args.heads);
  batch.tokens = args.k.tokens;
  batch.dim = args.k.dim;
  batch.rows = args.rows;
  batch.count = args.count;
  batch.clusters = args.codes;
  batch.iterations = args.iterations;
  batch.sample = args.sample;
  batch.full_iterations = args.full_iterations;
  batch.draw = args.draw;
  batch.warm = args.warm;
  batch.random = {.seed = args.seed, .tensor = 1};
  batch.centroids = args.codebooks;
  batch.status = args.status;
  batch.labels = args.labels;
  batch.empty = args.empty;
  batch.scratch = args.scratch;
  return batch;
}

namespace {

void encode_kmeans(const Exec& exec, const EncodeArgs& args) {
  KMeansBatch batch = batch_of(args);
  const Partition& partition = *args.partition;
  for (size_t first = 0; first < partition.size(); first += kMostSubsets) {
    batch.subsets = static_cast<int>(std::min<size_t>(kMostSubsets, partition.size() - first));
    int64_t depth = 0;
    for (int m = 0; m < batch.subsets; ++m) {
      batch.channels[m] = partition[first + static_cast<size_t>(m)];
      depth += static_cast<int64_t>(batch.channels[m].size());
    }
    kmeans(exec, batch);
    batch.random.subspace += static_cast<uint32_t>(batch.subsets);
    batch.centroids.base += args.codes * depth;
    batch.labels.base += args.count * batch.subsets;
    batch.empty.base += batch.subsets;
  }
}

}  // namespace

void encode(const Exec& exec, const EncodeArgs& args) {
  switch (args.encoding) {
    case Encoding::kmeans:
      return encode_kmeans(exec, args);
    case Encoding::blocks:
    case Encoding::means:
      return encode_blocks(exec, args);
    case Encoding::cocluster:
      fail(Status::internal, "encode: got cocluster, which is a stage of its own");
  }
}

}  // namespace scope::cuda
