// K-means on CUDA: the iterations, and the scratch that they share.
#include <algorithm>

#include "cuda/kmeans.h"
#include "cuda/kmeans_work.cuh"

namespace scope::cuda {

namespace {

using namespace clustering;

// The tables that threads read at different places.
__global__ void tables_kernel(const __grid_constant__ Work w) {
  for (int m = 0; m < w.subsets; ++m) w.column[m * kMostDim + threadIdx.x] = w.subset[m].column[threadIdx.x];
}

// Rows drawn by Philox.
template <class T>
__global__ void start_kernel(const __grid_constant__ Work w, RandomStream random) {
  const int64_t problem = blockIdx.x / w.clusters, c = blockIdx.x % w.clusters;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const Subset& subset = w.subset[m];
  random.subspace += static_cast<uint32_t>(m);
  const int64_t i = random.index(static_cast<uint64_t>(c), w.count);
  const auto* row = reinterpret_cast<const T*>(w.points.row(head, w.rows == nullptr ? i : w.rows[i]));
  float* centroid = w.centroids[head] + subset.offset + c * subset.depth;
  for (int channel = static_cast<int>(threadIdx.x); channel < w.dim; channel += static_cast<int>(blockDim.x)) {
    const int column = w.column[m * kMostDim + channel];
    if (column < 0) continue;
    const float x = to_float(row[channel]);
    centroid[column] = isfinite(x) ? x : 0;
  }
}

// One head's scratch; also fills `w` when there is memory.
int64_t lay_out(Arena arena, int64_t count, int64_t clusters, bool for_group, Work& w) {
  const int subsets = for_group ? 1 : kMostSubsets;
  w.pairs = ceil_div(clusters, kPair) + kMostWide / kPair;  // wgmma may round up to one more of its blocks
  w.most_items = clusters + count / kPiece;                 // every piece but a cluster's last is full
  w.most_slots = 2 * (count / kPiece) + 1;  // a cluster of p >= 2 pieces has more than (p - 1) x kPiece members
  w.most_stretches = ceil_div(count, kStretch);
  w.bins = static_cast<int>(std::min<int64_t>(clusters, kBins));
  w.column = arena.take<int8_t>(subsets * kMostDim);
  w.fragments.base = arena.take<uint4>(subsets * w.pairs * kMostSteps * 32);
  w.bias.base = arena.take<float4>(subsets * w.pairs * 4);
  w.limits.base = arena.take<float2>(subsets * kPrepareBlocks);
  w.items.base = arena.take<Item>(subsets * w.most_items);
  w.item_count.base = arena.take<int32_t>(subsets);
  w.first_slot.base = arena.take<int32_t>(subsets * clusters);
  w.arrived.base = arena.take<int32_t>(subsets * clusters);
  w.partial.base = arena.take<float>(w.most_slots * kMostDim);
  w.partial_rows.base = arena.take<int32_t>(subsets * w.most_slots);
  w.tally.base = arena.take<int32_t>(subsets * w.most_stretches * w.bins);
  w.positions.base = arena.take<int32_t>(clusters > kBins ? subsets * count : 0);
  if (for_group) {
    w.labels.base = arena.take<int32_t>(count);
  } else {
    w.sizes.base = arena.take<int32_t>(subsets * clusters);
    w.order.base = arena.take<int32_t>(subsets * count);
    w.offsets.base = arena.take<int64_t>(subsets * (clusters + 1));
  }
  return round_up(arena.used(), Arena::kAlignment);
}

Subset plan_subset(std::span<const int32_t> channels) {
  Subset s{};
  s.depth = static_cast<int>(channels.size());
  std::fill_n(s.column, kMostDim, int8_t{-1});
  for (int k = 0; k < s.depth; ++k) s.column[channels[static_cast<size_t>(k)]] = static_cast<int8_t>(k);
  const auto touched = [&](int from, int n) {
    return std::any_of(s.column + from, s.column + from + n, [](int8_t c) { return c >= 0; });
  };
  for (int i = 0; i < kMostSteps; ++i) {
    if (touched(i * 16, 16)) s.step[s.steps++] = static_cast<uint8_t>(i);
  }
  for (int i = 0; i < kMostDim / 8; ++i) {
    if (touched(i * 8, 8)) s.chunk |= static_cast<uint64_t>(i) << (4 * s.chunks++);
  }
  return s;
}

}  // namespace

namespace clustering {

Work plan_work(const Exec& exec, const KMeansBatch& batch) {
  require(batch.dim <= kMostDim && batch.dim % 8 == 0, Status::unsupported,
          "K-means on CUDA takes head dimensions up to 128, multiples of 8");
  require(batch.count < INT32_MAX - 1024, Status::size_limit, "K-means on CUDA takes up to 2^31 - 1025 tokens");
  require(batch.clusters <= int64_t{kBins} * kBins, Status::size_limit, "K-means on CUDA takes up to 2^20 clusters");
  Work w{};
  const bool for_group = !batch.labels;
  w.labels = batch.labels;
  w.sizes = batch.sizes;
  w.order = batch.order;
  w.offsets = batch.offsets;
  const Arena arena(batch.scratch.data, batch.scratch.bytes);
  const int64_t bytes = lay_out(arena, batch.count, batch.clusters, for_group, w);
  require(bytes * batch.heads <= batch.scratch.bytes, Status::internal, "workspace layout exceeds its plan");
  const auto step = [&](auto&... arrays) { ((arrays.step = bytes / static_cast<int64_t>(sizeof(*arrays.base))), ...); };
  step(w.fragments, w.bias, w.limits, w.items, w.item_count, w.first_slot, w.arrived, w.partial, w.partial_rows, w.tally,
       w.positions);
  if (for_group) {
    step(w.labels);
  } else {
    step(w.sizes, w.order, w.offsets);
  }
  w.points = batch.points;
  w.rows = batch.rows;
  w.heads = batch.heads;
  w.subsets = batch.subsets;
  w.dim = static_cast<int>(batch.dim);
  w.count = w.seen = batch.count;
  w.clusters = batch.clusters;
  w.centroids = batch.centroids;
  w.status = batch.status;
  w.token_labels = batch.token_labels;
  w.empty = batch.empty;
  int64_t offset = 0;
  for (int m = 0; m < batch.subsets; ++m) {
    w.subset[m] = plan_subset(batch.channels[m]);
    w.subset[m].offset = offset;
    offset += batch.clusters * w.subset[m].depth;
  }
  plan_assign(exec, w);
  return w;
}

void write_tables(const Exec& exec, const Work& w) { launch(exec, "K-means tables", tables_kernel, 1, kMostDim, 0, w); }

void clear_labels(const Exec& exec, const KMeansBatch& batch) {
  if (!batch.token_labels || (batch.rows == nullptr && batch.count == batch.tokens)) return;
  const auto bytes = static_cast<size_t>(batch.tokens) * sizeof(int32_t);
  const size_t pitch = batch.heads == 1 ? bytes : static_cast<size_t>(batch.token_labels.step) * sizeof(int32_t);
  const auto heads = static_cast<size_t>(batch.heads);
  check(cudaMemset2DAsync(batch.token_labels.base, pitch, 0xff, bytes, heads, stream(exec)), "clear labels");
}

void start_from_random_rows(const Exec& exec, const KMeansBatch& batch, const Work& w) {
  auto* kernel = batch.dtype == DType::f16 ? start_kernel<__half> : start_kernel<__nv_bfloat16>;
  launch(exec, "K-means start", kernel, w.heads * w.subsets * w.clusters, kMostDim, 0, w, batch.random);
}

}  // namespace clustering

void kmeans(const Exec& exec, const KMeansBatch& batch) {
  Work w = plan_work(exec, batch);
  write_tables(exec, w);
  clear_labels(exec, batch);
  if (!batch.warm) start_from_random_rows(exec, batch, w);
  for (int i = 0; i < batch.iterations; ++i) {
    w.seen = i < batch.iterations - batch.full_iterations ? std::min(batch.sample, batch.count) : batch.count;
    w.last = i == batch.iterations - 1;
    for (int m = 0; m < w.subsets; ++m) {
      RandomStream random = batch.random;
      random.subspace += static_cast<uint32_t>(m);
      random.purpose = 1;
      w.subset[m].key = random.bits(batch.draw + static_cast<uint64_t>(i));
    }
    assign(exec, batch.dtype, w);
    sort(exec, w);
    update(exec, batch.dtype, w);
  }
}

void raster(const Exec& exec, const KMeansBatch& batch) {
  Work w = plan_work(exec, batch);
  w.last = true;
  write_tables(exec, w);
  clear_labels(exec, batch);
  list_blocks(exec, batch.dtype, w);
  update(exec, batch.dtype, w);
}

Sorted sort_by_label(const Exec& exec, const KMeansBatch& batch) {
  const Work w = plan_work(exec, batch);
  sort(exec, w);
  return {w.order, w.offsets};
}

int64_t kmeans_scratch(int64_t count, int64_t clusters, bool for_group) {
  Work w{};
  return lay_out(Arena(), count, clusters, for_group, w);
}

}  // namespace scope::cuda
