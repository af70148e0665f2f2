// score on the CPU: tables of centroid products, and proxy rows from them (or from the keys themselves).
#include "stages/score.h"

#include <algorithm>

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

int64_t score_rows_buffer(const Exec& exec, int64_t dim) {
  const int64_t panel = exec.kernels->panel, stride = round_up(dim, kLanes);
  return panel * stride + panel * dim + kScoreRows * panel;
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
  const RowsView k = proxy.k[head];
  const int64_t dim = k.dim, panel = exec.kernels->panel, row_stride = round_up(dim, kLanes);
  float* rows = buffer;
  float* packed = rows + panel * row_stride;
  float* products = packed + panel * dim;
  for (int64_t j = keys.begin; j < keys.end; j += panel) {
    const int64_t width = std::min(panel, keys.end - j);
    exec.kernels->load_rows(k, proxy.rows + j, width, rows, row_stride);
    exec.kernels->pack(rows, row_stride, width, dim, packed);
    for (int64_t c = groups.begin; c < groups.end; c += kScoreRows) {
      const int64_t n = std::min(kScoreRows, groups.end - c);
      exec.kernels->dot(proxy.centroids[head] + c * dim, dim, n, packed, width, dim, products, panel);
      for (int64_t i = 0; i < n; ++i) {
        float* to = out + (c - groups.begin + i) * stride + j;
        for (int64_t x = 0; x < width; ++x) to[x] = products[i * panel + x] * proxy.scale;
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
