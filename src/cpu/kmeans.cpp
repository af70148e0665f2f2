// K-means on the CPU: assignment as a blocked product with a fused argmax, update by a counting sort and ordered sums.
#include "cpu/kmeans.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

namespace {

constexpr int64_t kRowsPerChunk = 480;  // tokens that a thread assigns at a time; a multiple of kStrip
constexpr int64_t kSumBlock = 128;      // rows added in one run before the sum moves to double

// A run of consecutive channels is a narrower view of the same rows; anything else is picked out row by row.
bool is_run(const KMeansArgs& args) {
  for (int64_t c = 0; c < args.depth; ++c) {
    if (args.channels[c] != args.channels[0] + c) return false;
  }
  return true;
}

// Keeps the chosen channels of each row, in place.
void keep_channels(const KMeansArgs& args, float* rows, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i, rows += stride) {
    float kept[256];
    for (int64_t c = 0; c < args.depth; ++c) kept[c] = rows[args.channels[c]];
    std::copy_n(kept, args.depth, rows);
  }
}

}  // namespace

KMeansWork::KMeansWork(Arena arena, const Exec& exec, int64_t count, int64_t dim, int64_t depth, int64_t clusters,
                       int64_t* bytes) {
  const int64_t threads = exec.pool->threads();
  row_stride = round_up(std::max(dim, depth), kLanes);
  padded_clusters = round_up(clusters, exec.kernels->panel);
  panels = arena.take<float>(padded_clusters * depth);
  penalty = arena.take<float>(padded_clusters);
  points = arena.take<float>(threads * kRowsPerChunk * row_stride);
  strip = arena.take<float>(threads * kStrip * padded_clusters);
  block_sum = arena.take<float>(threads * row_stride);
  sum = arena.take<double>(threads * row_stride);
  sample = arena.take<int32_t>(count);
  mean = arena.take<double>(depth);
  rounded = arena.take<float>(clusters * depth);
  numbers = arena.take<int32_t>(clusters);
  if (bytes != nullptr) *bytes = arena.used();
}

namespace {

// What bf16 keeps of the directions once their mean is subtracted, which moves no argmax: a mean that all share would take
// most of 8 bits.
void round_directions(const KMeansArgs& args, const KMeansWork& at, const float* directions) {
  std::fill_n(at.mean, args.depth, 0.0);
  for (int64_t i = 0; i < args.clusters * args.depth; ++i) at.mean[i % args.depth] += static_cast<double>(directions[i]);
  for (int64_t k = 0; k < args.depth; ++k) at.mean[k] /= static_cast<double>(args.clusters);
  for (int64_t i = 0; i < args.clusters * args.depth; ++i) {
    const auto apart = static_cast<float>(static_cast<double>(directions[i]) - at.mean[i % args.depth]);
    at.rounded[i] = bf16_to_f32(f32_to_bf16(apart));
  }
}

}  // namespace

void pack_directions(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, const float* directions) {
  if (at.dots == nullptr) {
    exec.kernels->pack(directions, args.depth, args.clusters, args.depth, at.panels);
  } else {
    round_directions(args, at, directions);
    std::iota(at.numbers, at.numbers + args.clusters, 0);
    at.dots->pack_k(*exec.kernels, {at.rounded, DType::f32, args.clusters, args.depth, args.depth}, at.numbers,
                    args.clusters, at.panels, at.points, at.row_stride);
  }
  std::fill_n(at.penalty, args.clusters, 0.0f);
  std::fill(at.penalty + args.clusters, at.penalty + at.padded_clusters, std::numeric_limits<float>::infinity());
}

void assign(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, bool whole, const int32_t* rows, int64_t count) {
  exec.pool->run(ceil_div(count, kRowsPerChunk), [&](int64_t chunk, int thread) {
    const int64_t first = chunk * kRowsPerChunk;
    const int64_t n = std::min(kRowsPerChunk, count - first);
    float* points = at.points + thread * kRowsPerChunk * at.row_stride;
    float* strip = at.strip + thread * kStrip * at.padded_clusters;
    if (at.dots != nullptr) {
      at.dots->pack_q(*exec.kernels, args.points, rows + first, n, points, at.row_stride);
    } else {
      exec.kernels->load_rows(args.points, rows + first, n, points, at.row_stride);
      if (!whole) keep_channels(args, points, at.row_stride, n);
    }
    for (int64_t i = 0; i < n; i += kStrip) {
      const int64_t height = std::min(kStrip, n - i);
      if (at.dots != nullptr) {
        at.dots->dot(reinterpret_cast<std::byte*>(points) + i * at.row_stride * at.dots->element, at.row_stride, height,
                     at.panels, args.clusters, args.depth, strip, at.padded_clusters);
      } else {
        exec.kernels->dot(points + i * at.row_stride, at.row_stride, height, at.panels, args.clusters, args.depth, strip,
                          at.padded_clusters);
      }
      exec.kernels->argmax(strip, at.padded_clusters, height, args.clusters, at.penalty, args.labels + first + i);
    }
  });
}

void sort_by_label(const int32_t* labels, int64_t count, int64_t clusters, int32_t* sizes, int32_t* order,
                   int64_t* offsets) {
  std::fill_n(sizes, clusters, 0);
  for (int64_t i = 0; i < count; ++i) ++sizes[labels[i]];
  offsets[0] = 0;
  for (int64_t c = 0; c < clusters; ++c) offsets[c + 1] = offsets[c] + sizes[c];
  for (int64_t i = 0; i < count; ++i) order[offsets[labels[i]]++] = static_cast<int32_t>(i);
  for (int64_t c = clusters; c > 0; --c) offsets[c] = offsets[c - 1];
  offsets[0] = 0;
}

void update(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, bool whole, const int32_t* rows, int64_t count) {
  sort_by_label(args.labels, count, args.clusters, args.sizes, args.order, args.offsets);
  exec.pool->run(args.clusters, [&](int64_t c, int thread) {
    const int64_t begin = args.offsets[c], end = args.offsets[c + 1];
    if (begin == end) return;  // an empty cluster keeps its centroid
    float* points = at.points + thread * kRowsPerChunk * at.row_stride;
    int32_t tokens[kSumBlock];
    float* block_sum = at.block_sum + thread * at.row_stride;
    double* sum = at.sum + thread * at.row_stride;
    std::fill_n(sum, args.depth, 0.0);
    for (int64_t block = begin; block < end; block += kSumBlock) {
      const int64_t n = std::min(kSumBlock, end - block);
      for (int64_t i = 0; i < n; ++i) tokens[i] = rows[args.order[block + i]];
      exec.kernels->load_rows(args.points, tokens, n, points, at.row_stride);
      if (!whole) keep_channels(args, points, at.row_stride, n);
      std::fill_n(block_sum, args.depth, 0.0f);
      for (int64_t i = 0; i < n; ++i) exec.kernels->add(points + i * at.row_stride, args.depth, block_sum);
      for (int64_t k = 0; k < args.depth; ++k) sum[k] += static_cast<double>(block_sum[k]);
    }
    const auto members = static_cast<double>(end - begin);
    for (int64_t k = 0; k < args.depth; ++k) args.centroids[c * args.depth + k] = static_cast<float>(sum[k] / members);
  });
}

void start_from_random_rows(const Exec& exec, const KMeansArgs& args, const KMeansWork& at, bool whole) {
  for (int64_t c = 0; c < args.clusters; ++c) {
    const int32_t token = args.rows[args.random.index(static_cast<uint64_t>(c), args.count)];
    exec.kernels->load_rows(args.points, &token, 1, at.points, at.row_stride);
    if (!whole) keep_channels(args, at.points, at.row_stride, 1);
    std::copy_n(at.points, args.depth, args.centroids + c * args.depth);
  }
}

namespace {

// Half the squared length: argmax of x . c - |c|^2 / 2 is the nearest centroid. Of a rounded centroid m + r, compared by r
// alone, it is m . r + |r|^2 / 2.
void pack_centroids(const Exec& exec, const KMeansArgs& args, const KMeansWork& at) {
  pack_directions(exec, args, at, args.centroids);
  for (int64_t c = 0; c < args.clusters; ++c) {
    double half = 0;
    for (int64_t i = 0; i < args.depth; ++i) {
      const double x = (at.dots == nullptr ? args.centroids : at.rounded)[c * args.depth + i];
      half += x * (0.5 * x + (at.dots == nullptr ? 0.0 : at.mean[i]));
    }
    at.penalty[c] = static_cast<float>(half);
  }
}

// One token from each of `n` equal stretches: a sample that covers the whole video, ascending. Each iteration draws its own,
// so that no centroid settles on the accidents of one sample.
void draw_sample(const KMeansArgs& args, int64_t n, uint64_t draw, int32_t* tokens) {
  RandomStream random = args.random;
  random.purpose = 1;
  const uint64_t key = random.bits(draw);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t jitter = (splitmix(key, static_cast<uint64_t>(i)) >> 32) * static_cast<uint64_t>(args.count) >> 32;
    tokens[i] = args.rows[(i * args.count + static_cast<int64_t>(jitter)) / n];
  }
}

}  // namespace

int64_t kmeans_scratch(const Exec& exec, int64_t count, int64_t dim, int64_t clusters) {
  int64_t bytes = 0;
  KMeansWork(Arena(), exec, count, dim, dim, clusters, &bytes);
  return bytes;
}

void kmeans(const Exec& exec, const KMeansArgs& given) {
  KMeansArgs args = given;
  KMeansWork at(Arena(args.scratch.data, args.scratch.bytes), exec, args.count, args.points.dim, args.depth, args.clusters);
  const bool whole = is_run(args);
  if (whole) at.dots = dots_for(exec, args.points);
  if (whole) {
    args.points.data = args.points.row(0) + args.channels[0] * dtype_bytes(args.points.dtype);
    args.points.dim = args.depth;
  }
  if (!args.warm) start_from_random_rows(exec, args, at, whole);
  for (int i = 0; i < args.iterations; ++i) {
    const bool small = args.sample < args.count && i < args.iterations - args.full_iterations;
    if (small) draw_sample(args, args.sample, args.draw + static_cast<uint64_t>(i), at.sample);
    const int32_t* rows = small ? at.sample : args.rows;
    const int64_t count = small ? args.sample : args.count;
    pack_centroids(exec, args, at);
    assign(exec, args, at, whole, rows, count);
    update(exec, args, at, whole, rows, count);
  }
}

}  // namespace scope::cpu
