// cocluster on the CPU: profiles are never made, since a profile's product with a centroid's is the token's product with one
// direction.
#include "stages/cocluster.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/numeric.h"
#include "cpu/group.h"
#include "cpu/kernels.h"
#include "cpu/kmeans.h"

namespace scope::cpu {

namespace {

struct Layout {
  int64_t stride, padded_others;
  int32_t* channels;    // [dim] 0, 1, 2, …
  int32_t* labels;      // [q_tokens] by position
  int32_t* sizes;       // [codes]
  int32_t* order;       // [k_tokens]
  int64_t* offsets;     // [codes + 1]
  float* others;        // [most clusters, stride] the other side's centroids over their largest element, padded with zeros
  float* other_panels;  // the other side's centroids, packed
  float* profiles;      // [threads, kStrip, padded_others]
  float* sums;          // [threads, kStrip, stride]
  float* directions;    // [most clusters, dim]
  Scratch kmeans;

  Layout(Arena arena, const Exec& exec, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups, int64_t codes,
         int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads(), most = std::max(groups, codes);
    stride = round_up(dim, kLanes);
    padded_others = round_up(most, exec.kernels->panel);
    channels = arena.take<int32_t>(dim);
    labels = arena.take<int32_t>(q_tokens);
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(k_tokens);
    offsets = arena.take<int64_t>(codes + 1);
    others = arena.take<float>(most * stride);
    other_panels = arena.take<float>(padded_others * dim);
    profiles = arena.take<float>(threads * kStrip * padded_others);
    sums = arena.take<float>(threads * kStrip * stride);
    directions = arena.take<float>(most * dim);
    kmeans.bytes = kmeans_scratch(exec, std::max(q_tokens, k_tokens), dim, most);
    kmeans.data = arena.take<std::byte>(kmeans.bytes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// With O the other side's centroids, the profiles of x and of centroid c are O x and O c over their lengths. x's own length
// moves no argmax, and O x . O c = x . O'(O c): so c's direction is O' times its profile, and an assignment costs what one
// of K-means does, whatever the number of others. The common factor 1 / largest keeps the largest inputs from overflowing.
void make_directions(const Exec& exec, const Layout& at, const KMeansArgs& args, const float* others, int64_t count) {
  const int64_t dim = args.depth;
  float largest = 0;
  for (int64_t i = 0; i < count * dim; ++i) largest = std::max(largest, std::abs(others[i]));
  const float factor = largest > 0 ? 1 / largest : 0.0f;
  std::fill_n(at.others, count * at.stride, 0.0f);
  for (int64_t o = 0; o < count; ++o) {
    for (int64_t i = 0; i < dim; ++i) at.others[o * at.stride + i] = others[o * dim + i] * factor;
  }
  exec.kernels->pack(others, dim, count, dim, at.other_panels);
  exec.pool->run(ceil_div(args.clusters, kStrip), [&](int64_t strip, int thread) {
    const int64_t first = strip * kStrip, rows = std::min(kStrip, args.clusters - first);
    float* profiles = at.profiles + thread * kStrip * at.padded_others;
    float* sums = at.sums + thread * kStrip * at.stride;
    exec.kernels->dot(args.centroids + first * dim, dim, rows, at.other_panels, count, dim, profiles, at.padded_others);
    for (int64_t r = 0; r < rows; ++r) {
      float* profile = profiles + r * at.padded_others;
      double square = 1e-8;
      for (int64_t o = 0; o < count; ++o) square += static_cast<double>(profile[o]) * static_cast<double>(profile[o]);
      const double length = std::sqrt(square);
      for (int64_t o = 0; o < count; ++o) profile[o] = static_cast<float>(static_cast<double>(profile[o]) / length);
    }
    const float zeros[kStrip] = {};
    std::fill_n(sums, rows * at.stride, 0.0f);
    exec.kernels->accumulate(profiles, at.padded_others, rows, at.others, at.stride, count, at.stride, zeros, sums,
                             at.stride);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(sums + r * at.stride, dim, at.directions + (first + r) * dim);
  });
}

// One side's half of a round.
void half_round(const Exec& exec, const Layout& at, const KMeansArgs& args, const float* others, int64_t count) {
  KMeansWork work(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.depth, args.depth, args.clusters);
  work.dots = dots_for(exec, args.points);
  make_directions(exec, at, args, others, count);
  pack_directions(exec, args, work, at.directions);
  assign(exec, args, work, true, args.rows, args.count);
  update(exec, args, work, true, args.rows, args.count);
}

void cocluster_head(const Exec& exec, const CoclusterArgs& args, int64_t head, const Layout& at) {
  const GroupArgs& q = args.queries;
  const EncodeArgs& k = args.keys;
  const int64_t dim = q.q.dim;
  std::iota(at.channels, at.channels + dim, 0);
  const KMeansArgs queries{.points = q.q[head],
                           .rows = q.rows,
                           .count = q.count,
                           .channels = at.channels,
                           .depth = dim,
                           .clusters = q.groups,
                           .random = {.seed = q.seed, .tensor = 0},
                           .centroids = q.centroids[head],
                           .labels = at.labels,
                           .sizes = q.sizes[head],
                           .order = q.order[head],
                           .offsets = q.offsets[head],
                           .scratch = at.kmeans};
  const KMeansArgs keys{.points = k.k[head],
                        .rows = k.rows,
                        .count = k.count,
                        .channels = at.channels,
                        .depth = dim,
                        .clusters = k.codes,
                        .random = {.seed = k.seed, .tensor = 1},
                        .centroids = k.codebooks[head],
                        .labels = k.labels[head],
                        .sizes = at.sizes,
                        .order = at.order,
                        .offsets = at.offsets,
                        .scratch = at.kmeans};
  for (const KMeansArgs* side : {&queries, &keys}) {
    const KMeansWork work(Arena(at.kmeans.data, at.kmeans.bytes), exec, side->count, dim, dim, side->clusters);
    start_from_random_rows(exec, *side, work, true);
  }
  for (int round = 0; round < q.iterations; ++round) {
    half_round(exec, at, keys, queries.centroids, q.groups);
    half_round(exec, at, queries, keys.centroids, k.codes);
  }
  k.empty[head][0] = std::count(at.sizes, at.sizes + k.codes, 0);
  label_tokens(q, head);
}

}  // namespace

int64_t cocluster_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.q_tokens, sizes.k_tokens, sizes.dim, sizes.groups, sizes.codes, &bytes);
  return bytes;
}

void cocluster(const Exec& exec, const CoclusterArgs& args) {
  const GroupArgs& q = args.queries;
  const EncodeArgs& k = args.keys;
  const Layout at(Arena(q.scratch.data, q.scratch.bytes), exec, q.count, k.count, q.q.dim, q.groups, k.codes);
  for (int64_t h = 0; h < q.heads; ++h) cocluster_head(exec, args, h, at);
}

}  // namespace scope::cpu
