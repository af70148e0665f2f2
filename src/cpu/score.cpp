// score on the CPU: tables of centroid products, and proxy rows from them (or from the keys themselves).
#include "stages/score.h"

#include <algorithm>
#include <numeric>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

namespace {

// Sums in f64: a table's error is that of every key with its code.
void score_head(const Exec& exec, const ScoreArgs& args, int64_t head) {
  const float* centroids = args.centroids[head];
  const float* codebooks = args.codebooks[head];
  float* tables = args.tables[head];
  const auto subspaces = static_cast<int64_t>(args.partition->size());
  exec.pool->run(ceil_div(args.groups, kScoreRows), [&](int64_t chunk, int) {
    const int64_t first = chunk * kScoreRows, rows = std::min(kScoreRows, args.groups - first);
    const int64_t panel = exec.kernels->panel;
    float slices[kScoreRows * 256], packed[kMostPanel * 256];
    const float* codebook = codebooks;
    for (int64_t m = 0; m < subspaces; ++m) {
      const auto& channels = (*args.partition)[static_cast<size_t>(m)];
      const auto depth = static_cast<int64_t>(channels.size());
      for (int64_t c = 0; c < rows; ++c) {
        for (int64_t i = 0; i < depth; ++i) {
          slices[c * depth + i] = centroids[(first + c) * args.dim + channels[static_cast<size_t>(i)]];
        }
      }
      for (int64_t r = 0; r < args.codes; r += panel) {
        const int64_t n = std::min(panel, args.codes - r);
        exec.kernels->pack(codebook + r * depth, depth, n, depth, packed);
        exec.kernels->dot_wide(slices, depth, rows, packed, n, depth, static_cast<double>(args.scale),
                               tables + (first * subspaces + m) * args.codes + r, subspaces * args.codes);
      }
      codebook += args.codes * depth;
    }
  });
}

}  // namespace

void score(const Exec& exec, const ScoreArgs& args) {
  for (int64_t h = 0; h < args.heads; ++h) score_head(exec, args, h);
}

namespace {

constexpr int64_t kKeys = 2 * kMostPanel;  // packed at a time

// What multiply_rows works with, of kKeys keys and kStrip groups at a time.
struct ProductBuffers {
  float* rows;      // [panel, stride]
  float* keys;      // [kKeys, dim] in panels
  float* groups;    // [kStrip, stride]
  float* products;  // [kStrip, kKeys]
  int64_t stride;

  ProductBuffers(Arena arena, const Exec& exec, int64_t dim, int64_t* bytes = nullptr) : stride(round_up(dim, kLanes)) {
    rows = arena.take<float>(exec.kernels->panel * stride);
    keys = arena.take<float>(kKeys * stride);
    groups = arena.take<float>(kStrip * stride);
    products = arena.take<float>(kStrip * kKeys);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

}  // namespace

int64_t score_rows_buffer(const Exec& exec, int64_t dim) {
  int64_t bytes = 0;
  ProductBuffers(Arena(), exec, dim, &bytes);
  return ceil_div(bytes, static_cast<int64_t>(sizeof(float)));
}

namespace {

void look_up_rows(const Exec& exec, const Proxy& proxy, int64_t head, int64_t first, int64_t n, float* out, int64_t stride) {
  const float* tables = proxy.tables[head] + first * proxy.subspaces * proxy.codes;
  for (int64_t i = 0; i < n; ++i) {
    exec.kernels->lookup(tables + i * proxy.subspaces * proxy.codes, proxy.codes, proxy.subspaces, proxy.labels[head],
                         proxy.count, out + i * stride);
  }
}

}  // namespace

void multiply_rows(const Exec& exec, const Proxy& proxy, int64_t head, Span groups, Span keys, float* out, int64_t stride,
                   float* buffer) {
  const RowsView k = proxy.k[head], centroids{proxy.centroids[head], DType::f32, proxy.groups, k.dim, k.dim};
  const AttendKernels& dots = attend_kernels(exec, k.dtype);
  const float scale = proxy.scale;  // the compiler cannot tell that `out` leaves it alone
  const ProductBuffers at(Arena(buffer, score_rows_buffer(exec, k.dim) * int64_t{sizeof(float)}), exec, k.dim);
  for (int64_t j = keys.begin; j < keys.end; j += kKeys) {
    const int64_t width = std::min(kKeys, keys.end - j);
    dots.pack_k(*exec.kernels, k, proxy.rows + j, width, at.keys, at.rows, at.stride);
    for (int64_t c = groups.begin; c < groups.end; c += kStrip) {
      const int64_t n = std::min(kStrip, groups.end - c);
      int32_t strip[kStrip];
      std::iota(strip, strip + n, static_cast<int32_t>(c));
      dots.pack_q(*exec.kernels, centroids, strip, n, at.groups, at.stride);
      dots.dot(at.groups, at.stride, n, at.keys, width, k.dim, at.products, kKeys);
      for (int64_t i = 0; i < n; ++i) {
        float* to = out + (c - groups.begin + i) * stride + j;
        for (int64_t x = 0; x < width; ++x) to[x] = at.products[i * kKeys + x] * scale;
      }
    }
  }
}

void score_rows(const Exec& exec, const Proxy& proxy, int64_t head, int64_t first, int64_t n, float* out, int64_t stride,
                float* buffer) {
  switch (proxy.kind) {
    case ProxyKind::codes:
      look_up_rows(exec, proxy, head, first, n, out, stride);
      return;
    case ProxyKind::exact:
      multiply_rows(exec, proxy, head, {first, first + n}, {0, proxy.count}, out, stride, buffer);
      return;
  }
}

}  // namespace scope::cpu
