// Means and self-similarity of contiguous runs of tokens.
#include "cpu/blocks.h"

#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

void block_means(const Exec& exec, const BlocksArgs& args, float* out) {
  const int64_t dim = args.x.dim, stride = round_up(dim, kLanes);
  exec.pool->run(args.blocks, [&](int64_t b, int thread) {
    float* row = args.row_buffer + thread * stride;
    const int64_t begin = args.offsets[b], end = args.offsets[b + 1];
    double sum[256] = {};
    for (int64_t i = begin; i < end; ++i) {
      exec.kernels->load_rows(args.x, args.rows + i, 1, row, stride);
      for (int64_t k = 0; k < dim; ++k) sum[k] += static_cast<double>(row[k]);
    }
    for (int64_t k = 0; k < dim; ++k) out[b * dim + k] = static_cast<float>(sum[k] / static_cast<double>(end - begin));
  });
}

void block_similarity(const Exec& exec, const BlocksArgs& args, int64_t block, const float* centre, float* out) {
  const int64_t dim = args.x.dim, stride = round_up(dim, kLanes);
  exec.pool->run(args.blocks, [&](int64_t b, int thread) {
    const int64_t begin = args.offsets[b], end = args.offsets[b + 1];
    if (end - begin < block) {
      out[b] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    float* row = args.row_buffer + thread * stride;
    double sum[256] = {};  // of the unit vectors: the mean of their Gram matrix is the square of its length / block^2
    for (int64_t i = begin; i < end; ++i) {
      exec.kernels->load_rows(args.x, args.rows + i, 1, row, stride);
      double square = 0;
      for (int64_t k = 0; k < dim; ++k) {
        if (centre != nullptr) row[k] -= centre[k];
        square += static_cast<double>(row[k]) * static_cast<double>(row[k]);
      }
      const double length = std::sqrt(square);  // 0 makes the similarity NaN, as it should
      for (int64_t k = 0; k < dim; ++k) sum[k] += static_cast<double>(row[k]) / length;
    }
    double square = 0;
    for (int64_t k = 0; k < dim; ++k) square += sum[k] * sum[k];
    out[b] = static_cast<float>(square / static_cast<double>(block * block));
  });
}

}  // namespace scope::cpu
