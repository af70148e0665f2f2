// cocluster on CUDA: K-means with directions in the place of centroids where tokens are assigned.
#include <algorithm>
#include <cfloat>

#include "cuda/device/reduce.cuh"
#include "cuda/kmeans_work.cuh"
#include "cuda/stages.h"
#include "stages/cocluster.h"

namespace scope::cuda {

namespace {

using namespace clustering;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kEach = 4, kClusters = kWarps * kEach;  // clusters of a warp and of a block
constexpr int kOthers = 32;                           // centroids of the other side at a time

// A chunk's scratch.
struct Layout {
  PerHead<float> profiles;    // [clusters, others]: groups x codes, whichever side is which
  PerHead<float> directions;  // [clusters, dim]
  Scratch kmeans;             // of each side in turn

  Layout(Arena arena, const Sizes& sizes, int64_t* bytes = nullptr) {
    const int64_t products = sizes.groups * sizes.codes, channels = std::max(sizes.groups, sizes.codes) * sizes.dim;
    profiles = {arena.take<float>(sizes.heads * products), products};
    directions = {arena.take<float>(sizes.heads * channels), channels};
    kmeans.bytes = sizes.heads * std::max(kmeans_scratch(sizes.q_tokens, sizes.groups, true),
                                          kmeans_scratch(sizes.k_tokens, sizes.codes, false));
    kmeans.data = arena.take<std::byte>(kmeans.bytes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

struct DirectionsLaunch {
  PerHead<const float> profiles;  // [clusters, count] products of both sides' centroids
  PerHead<const float> others;    // [count, dim]
  PerHead<float> directions;      // [clusters, dim] out
  int32_t clusters, count, dim;
};

__device__ double warp_sum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// With O the others, a cluster's direction is O' times its profile O c / |O c|: then x . O'(O c) is O x . O c, and x's own
// length moves no argmax. The common factor 1 / largest of O keeps products with the largest tokens from overflowing, and
// directions among the numbers of 16 bits. A block has kClusters clusters of a head, a lane channels 32 apart.
__global__ void __launch_bounds__(kThreads) make_directions(DirectionsLaunch a, int blocks) {
  __shared__ float others[kOthers][kMostDim];
  __shared__ float profiles[kClusters][kOthers];
  __shared__ double shorten[kClusters];  // 1 / length of a profile
  __shared__ float highest[kWarps];
  const int64_t head = blockIdx.x / blocks;
  const int first = static_cast<int>(blockIdx.x % blocks) * kClusters;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = warp_index();
  const float* from = a.others[head];
  const float* products = a.profiles[head];

  float largest = 0;
  for (int64_t i = threadIdx.x; i < int64_t{a.count} * a.dim / 4; i += kThreads) {
    const float4 x = reinterpret_cast<const float4*>(from)[i];
    largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
  }
  largest = warp_max(largest);
  if (lane == 0) highest[warp] = largest;
  for (int r = 0; r < kEach; ++r) {
    const int cluster = first + warp * kEach + r;
    double square = 0;
    if (cluster < a.clusters) {
      for (int o = lane; o < a.count; o += 32) {
        const auto x = static_cast<double>(products[int64_t{cluster} * a.count + o]);
        square += x * x;
      }
    }
    square = warp_sum(square);
    if (lane == 0) shorten[warp * kEach + r] = 1 / sqrt(square + 1e-8);
  }
  __syncthreads();
  for (const float x : highest) largest = fmaxf(largest, x);
  const float factor = largest >= FLT_MIN ? 1 / largest : 0.0f;

  float sum[kEach][kMostDim / 32] = {};
  for (int first_other = 0; first_other < a.count; first_other += kOthers) {
    const int n = min(kOthers, a.count - first_other);
    __syncthreads();  // everyone is done with the last ones
    for (int o = warp; o < n; o += kWarps) {
      for (int channel = lane; channel < a.dim; channel += 32) {
        others[o][channel] = from[int64_t{first_other + o} * a.dim + channel] * factor;
      }
    }
    for (int r = warp; r < kClusters; r += kWarps) {
      const bool real = first + r < a.clusters && lane < n;
      const float product = real ? products[int64_t{first + r} * a.count + first_other + lane] : 0.0f;
      profiles[r][lane] = static_cast<float>(static_cast<double>(product) * shorten[r]);
    }
    __syncthreads();
    for (int o = 0; o < n; ++o) {
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int c = 0; c < kMostDim / 32; ++c) {
          sum[r][c] = fmaf(profiles[warp * kEach + r][o], others[o][c * 32 + lane], sum[r][c]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int cluster = first + warp * kEach + r;
#pragma unroll
    for (int c = 0; c < kMostDim / 32; ++c) {  // beyond dim, a sum is of nothing that was stored
      const int channel = c * 32 + lane;
      if (cluster < a.clusters && channel < a.dim) a.directions[head][int64_t{cluster} * a.dim + channel] = sum[r][c];
    }
  }
}

// One side's half of a round.
void half_round(const Exec& exec, const KMeansBatch& batch, const Layout& at, const Partition& all,
                PerHead<const float> others, int64_t count, bool last) {
  ScoreArgs products;
  products.heads = batch.heads;
  products.centroids = batch.centroids;
  products.groups = batch.clusters;
  products.dim = batch.dim;
  products.partition = &all;
  products.codebooks = others;
  products.codes = count;
  products.scale = 1;
  products.tables = at.profiles;
  score(exec, products);
  const DirectionsLaunch directions{at.profiles,
                                    others,
                                    at.directions,
                                    static_cast<int32_t>(batch.clusters),
                                    static_cast<int32_t>(count),
                                    static_cast<int32_t>(batch.dim)};
  const int64_t blocks = ceil_div(batch.clusters, kClusters);
  launch(exec, "make_directions", make_directions, batch.heads * blocks, kThreads, 0, directions, static_cast<int>(blocks));
  Work w = plan_work(exec, batch);
  w.directions = at.directions;
  w.last = last;
  write_tables(exec, w);
  assign(exec, batch.dtype, w);
  sort(exec, w);
  update(exec, batch.dtype, w);
}

void start_side(const Exec& exec, const KMeansBatch& batch) {
  const Work w = plan_work(exec, batch);
  write_tables(exec, w);
  clear_labels(exec, batch);
  start_from_random_rows(exec, batch, w);
}

}  // namespace

int64_t cocluster_scratch(const Exec&, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), sizes, &bytes);
  return bytes;
}

void cocluster(const Exec& exec, const CoclusterArgs& args) {
  const GroupArgs& q = args.queries;
  const EncodeArgs& k = args.keys;
  const Partition& all = *k.partition;
  Sizes sizes;
  sizes.heads = q.heads;
  sizes.q_tokens = q.count;
  sizes.k_tokens = k.count;
  sizes.dim = q.q.dim;
  sizes.groups = q.groups;
  sizes.codes = k.codes;
  const Layout at(Arena(q.scratch.data, q.scratch.bytes), sizes);
  KMeansBatch queries = batch_of(q, all[0]), keys = batch_of(k);
  keys.subsets = 1;
  keys.channels[0] = all[0];
  queries.scratch = keys.scratch = at.kmeans;
  start_side(exec, queries);
  start_side(exec, keys);
  for (int round = 0; round < q.iterations; ++round) {
    const bool last = round == q.iterations - 1;
    half_round(exec, keys, at, all, queries.centroids, q.groups, last);
    half_round(exec, queries, at, all, keys.centroids, k.codes, last);
  }
}

}  // namespace scope::cuda
