// score on CUDA: tables of centroid products, and rows of logits for tests.
#include "core/numeric.h"
#include "cuda/proxy.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

constexpr int kGroupTile = 64, kCodeTile = 128, kDepth = 32;  // of a block; channels at a time

struct Channels {
  uint8_t channel[128];
  uint8_t begin[129];  // of each subspace
};

struct TablesLaunch {
  PerHead<const float> centroids, codebooks;
  PerHead<float> tables;
  int32_t groups, dim, subspaces, codes;
  float scale;
};

__global__ void __launch_bounds__(256) build_tables(TablesLaunch a, Channels partition, int group_tiles, int code_tiles) {
  __shared__ float q[kDepth][kGroupTile + 1], u[kDepth][kCodeTile + 1];
  int64_t block = blockIdx.x;
  const int code0 = static_cast<int>(block % code_tiles) * kCodeTile;
  block /= code_tiles;
  const int group0 = static_cast<int>(block % group_tiles) * kGroupTile;
  block /= group_tiles;
  const int m = static_cast<int>(block % a.subspaces);
  const int64_t head = block / a.subspaces;
  const int begin = partition.begin[m], depth = partition.begin[m + 1] - begin;
  const float* centroids = a.centroids[head];
  const float* codebook = a.codebooks[head] + int64_t{begin} * a.codes;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;

  float sum[4][8] = {};
  for (int i0 = 0; i0 < depth; i0 += kDepth) {
    const int n = min(kDepth, depth - i0), i = threadIdx.x % kDepth, first = threadIdx.x / kDepth;
    constexpr int kRows = 256 / kDepth;  // that are loaded at a time
    if (i < n) {
      const int channel = partition.channel[begin + i0 + i];
#pragma unroll
      for (int r = 0; r < kCodeTile; r += kRows) {
        const int64_t code = code0 + r + first;
        u[i][r + first] = code < a.codes ? codebook[code * depth + i0 + i] : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kGroupTile; r += kRows) {
        const int64_t group = group0 + r + first;
        q[i][r + first] = group < a.groups ? centroids[group * a.dim + channel] : 0.0f;
      }
    }
    __syncthreads();
    for (int k = 0; k < n; ++k) {
      float left[4], right[8];
      for (int r = 0; r < 4; ++r) left[r] = q[k][y + 16 * r];
      for (int c = 0; c < 8; ++c) right[c] = u[k][x + 16 * c];
      for (int r = 0; r < 4; ++r) {
        for (int c = 0; c < 8; ++c) sum[r][c] = fmaf(left[r], right[c], sum[r][c]);
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 8; ++c) {
      const int group = group0 + y + 16 * r, code = code0 + x + 16 * c;
      if (group >= a.groups || code >= a.codes) continue;
      a.tables[head][(int64_t{group} * a.subspaces + m) * a.codes + code] = sum[r][c] * a.scale;
    }
  }
}

__global__ void write_scores(ProxyLaunch proxy, int32_t first, int32_t n, float* out, int64_t stride) {
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < int64_t{n} * proxy.count;
       at += int64_t{gridDim.x} * blockDim.x) {
    const auto row = static_cast<int32_t>(at / proxy.count), key = static_cast<int32_t>(at % proxy.count);
    out[row * stride + key] = proxy.score(0, first + row, key);
  }
}

}  // namespace

void score(const Exec& exec, const ScoreArgs& args) {
  require(args.dim <= 128 && args.partition->size() <= 128, Status::unsupported, "score: more than 128 channels");
  Channels channels{};
  int n = 0;
  for (size_t m = 0; m < args.partition->size(); ++m) {
    for (const int32_t channel : (*args.partition)[m]) channels.channel[n++] = static_cast<uint8_t>(channel);
    channels.begin[m + 1] = static_cast<uint8_t>(n);
  }
  const TablesLaunch tables{args.centroids,
                            args.codebooks,
                            args.tables,
                            static_cast<int32_t>(args.groups),
                            static_cast<int32_t>(args.dim),
                            static_cast<int32_t>(args.partition->size()),
                            static_cast<int32_t>(args.codes),
                            args.scale};
  const int64_t group_tiles = ceil_div(args.groups, kGroupTile), code_tiles = ceil_div(args.codes, kCodeTile);
  const int64_t blocks = args.heads * tables.subspaces * group_tiles * code_tiles;
  launch(exec, "build_tables", build_tables, blocks, 256, 0, tables, channels, static_cast<int>(group_tiles),
         static_cast<int>(code_tiles));
}

void score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride) {
  launch(exec, "write_scores", write_scores, blocks_for(exec, 8, ceil_div(n * proxy.count, 256)), 256, 0,
         proxy_launch(proxy, 1), static_cast<int32_t>(first), static_cast<int32_t>(n), out, stride);
}

}  // namespace scope::cuda
