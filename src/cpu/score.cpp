// score on the CPU: tables of centroid products, and proxy rows from them (or from the keys themselves).
#include "stages/score.h"

#include <algorithm>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

namespace {

// Products of one slice with n <= kCodes codes: sums that do not wait for one another.
constexpr int64_t kCodes = 8;
void products(const double* slice, int64_t depth, const float* codes, int64_t n, double scale, float* out) {
  double sum[kCodes] = {};
  if (n == kCodes) {
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t r = 0; r < kCodes; ++r) sum[r] += slice[i] * static_cast<double>(codes[r * depth + i]);
    }
  } else {
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t r = 0; r < n; ++r) sum[r] += slice[i] * static_cast<double>(codes[r * depth + i]);
    }
  }
  for (int64_t r = 0; r < n; ++r) out[r] = static_cast<float>(sum[r] * scale);
}

}  // namespace

void score(const Exec& exec, const ScoreArgs& args) {
  const auto subspaces = static_cast<int64_t>(args.partition->size());
  exec.pool->run(args.groups, [&](int64_t c, int) {
    const float* codebook = args.codebooks;
    for (int64_t m = 0; m < subspaces; ++m) {
      const auto& channels = (*args.partition)[static_cast<size_t>(m)];
      const auto depth = static_cast<int64_t>(channels.size());
      double slice[256];
      for (int64_t i = 0; i < depth; ++i) {
        slice[i] = static_cast<double>(args.centroids[c * args.dim + channels[static_cast<size_t>(i)]]);
      }
      float* table = args.tables + (c * subspaces + m) * args.codes;
      for (int64_t r = 0; r < args.codes; r += kCodes) {
        const int64_t n = std::min(kCodes, args.codes - r);
        products(slice, depth, codebook, n, static_cast<double>(args.scale), table + r);
        codebook += n * depth;
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
