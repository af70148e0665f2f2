// K-means on CUDA: what group, encode, cocluster and compensate share.
#pragma once

#include <span>

#include "core/random.h"
#include "cuda/launch.h"
#include "stages/encode.h"
#include "stages/group.h"

namespace scope::cuda {

// Channel subsets that are clustered at the same time; more of them run batch after batch in the same scratch.
inline constexpr int kMostSubsets = 4;

// All heads of a chunk, each with `subsets` independent problems. Contract of each: stages/kmeans.h.
struct KMeansBatch {
  DType dtype = DType::bf16;
  HeadRows<const uint16_t> points;
  int heads = 0, subsets = 0;
  int64_t tokens = 0, dim = 0;
  const int32_t* rows = nullptr;  // [count]; null: 0, 1, …
  int64_t count = 0, clusters = 0;
  int iterations = 0;
  int64_t sample = 0;
  int full_iterations = 2;
  uint64_t draw = 0;
  bool warm = false;
  RandomStream random;                              // of the first subset; the others follow it
  std::span<const int32_t> channels[kMostSubsets];  // disjoint
  PerHead<float> centroids;                         // [clusters, depth], subset after subset
  uint32_t* status = nullptr;                       // bit 0: a row is not finite; may be null
  // encode's results
  PerHead<int32_t> labels;  // [subsets, count] by position in `rows`; null: not wanted
  PerHead<int64_t> empty;   // [subsets]
  // group's results (one subset); null: not wanted
  PerHead<int32_t> token_labels;  // [tokens]; -1: not in `rows`
  PerHead<int32_t> sizes;         // [clusters]
  PerHead<int32_t> order;         // [count]
  PerHead<int64_t> offsets;       // [clusters + 1]
  Scratch scratch;                // heads x kmeans_scratch
};

// What the stages ask for; of encode's, all but the subsets.
KMeansBatch batch_of(const GroupArgs& args, std::span<const int32_t> channels);
KMeansBatch batch_of(const EncodeArgs& args);

void kmeans(const Exec& exec, const KMeansBatch& batch);
// Contiguous blocks of positions and their means, with group's results.
void raster(const Exec& exec, const KMeansBatch& batch);
// Tokens by label, ascending within one, and where each label's begin.
struct Sorted {
  PerHead<const int32_t> order;    // [count]
  PerHead<const int64_t> offsets;  // [clusters + 1]
};
// By the labels of a batch with one subset, which are read alone; in the batch's scratch, as for encode.
Sorted sort_by_label(const Exec& exec, const KMeansBatch& batch);
// Bytes for one head; for group (one subset) or encode (batches of kMostSubsets).
int64_t kmeans_scratch(int64_t count, int64_t clusters, bool for_group);

}  // namespace scope::cuda
