// score on the CPU: tables of centroid products, and proxy rows from them (or from the keys themselves).
#include "stages/score.h"

#include <algorithm>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

void score(const Exec& exec, const ScoreArgs& args) {
  const auto subspaces = static_cast<int64_t>(args.partition->size());
  exec.pool->run(args.groups, [&](int64_t c, int) {
    const float* codebook = args.codebooks;
    for (int64_t m = 0; m < subspaces; ++m) {
      const auto& channels = (*args.partition)[static_cast<size_t>(m)];
      const auto depth = static_cast<int64_t>(channels.size());
      float slice[256];
      for (int64_t i = 0; i < depth; ++i) slice[i] = args.centroids[c * args.dim + channels[static_cast<size_t>(i)]];
      float* table = args.tables + (c * subspaces + m) * args.codes;
      for (int64_t r = 0; r < args.codes; ++r, codebook += depth) {
        double sum = 0;
        for (int64_t i = 0; i < depth; ++i) sum += static_cast<double>(slice[i]) * static_cast<double>(codebook[i]);
        table[r] = static_cast<float>(sum * static_cast<double>(args.scale));
      }
    }
  });
}

int64_t score_rows_buffer(const Exec& exec, int64_t dim) {
  const int64_t panel = exec.kernels->panel, stride = round_up(dim, kLanes);
  return panel * stride + panel * dim + kScoreRows * panel;
}

void score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride, float* buffer) {
  if (proxy.kind == ProxyKind::codes) {
    for (int64_t i = 0; i < n; ++i) {
      exec.kernels->lookup(proxy.tables + (first + i) * proxy.subspaces * proxy.codes, proxy.codes, proxy.subspaces,
                           proxy.labels, proxy.count, out + i * stride);
    }
    return;
  }
  const int64_t dim = proxy.k.dim, panel = exec.kernels->panel, row_stride = round_up(dim, kLanes);
  float* rows = buffer;
  float* packed = rows + panel * row_stride;
  float* products = packed + panel * dim;
  for (int64_t j = 0; j < proxy.count; j += panel) {
    const int64_t width = std::min(panel, proxy.count - j);
    exec.kernels->load_rows(proxy.k, proxy.rows + j, width, rows, row_stride);
    exec.kernels->pack(rows, row_stride, width, dim, packed);
    exec.kernels->dot(proxy.centroids + first * dim, dim, n, packed, width, dim, products, panel);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < width; ++c) out[i * stride + j + c] = products[i * panel + c] * proxy.scale;
    }
  }
}

}  // namespace scope::cpu
