// split on CUDA: a block for each group, which passes its queries through shared memory once a round.
#include <cuda_fp16.h>

#include "cuda/launch.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

// Threads are queries while these look for their parts, and channels while these are added up.
constexpr int kThreads = 128, kMostDim = 128;
constexpr int kPad = 8;  // elements after a query in shared memory: eight threads then read 16 bytes each from all banks

struct SplitLaunch {
  HeadRows<const uint16_t> q;
  bool f16;
  int32_t groups, parts, dim, rounds;
  bool warm;
  PerHead<const int32_t> order;
  PerHead<const int64_t> offsets;
  PerHead<float> centroids;
  PerHead<int32_t> sizes, labels;

  __device__ float2 pair(uint32_t bits) const {
    if (f16) return __half22float2(*reinterpret_cast<const __half2*>(&bits));
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
  __device__ float element(uint16_t bits) const {
    return f16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
  }
};

template <int kDim, int kParts>
struct Shared {
  alignas(16) uint16_t rows[kThreads][kDim + kPad];
  alignas(16) float centroids[kParts][kDim];
  float half[kParts];                     // of a centroid's squared length
  int32_t before[kThreads / 32][kParts];  // queries of a part in each warp, then in those before it
  int32_t first[kParts + 1];              // where a part begins in `sorted`
  uint8_t sorted[kThreads];               // queries by part
  int32_t sizes[kParts];
};

// kParts: as many as `p.parts` or more.
template <int kDim, int kParts>
__global__ void __launch_bounds__(kThreads) split_groups(SplitLaunch p) {
  __shared__ Shared<kDim, kParts> shared;
  const int64_t head = blockIdx.x / p.groups;
  const auto group = static_cast<int32_t>(blockIdx.x % p.groups);
  const int64_t begin = p.offsets[head][group], end = p.offsets[head][group + 1];
  const int32_t* order = p.order[head];
  const int64_t row0 = int64_t{group} * p.parts;
  float* const centroids = p.centroids[head] + row0 * p.dim;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  for (int u = 0; u < kParts; ++u) {
    if (thread >= kDim) break;
    float x = 0;
    if (u < p.parts && thread < p.dim) {
      const int64_t member = begin + (2 * u + 1) * (end - begin) / (2 * p.parts);
      if (p.warm) {
        x = centroids[u * p.dim + thread];
      } else if (begin < end) {
        x = p.element(p.q.row(head, order[member])[thread]);
      }
    }
    shared.centroids[u][thread] = x;
  }

  for (int round = 0; round < p.rounds; ++round) {
    const bool last = round + 1 == p.rounds;
    __syncthreads();
    if (thread < kParts) {
      float length = 0;
      for (int c = 0; c < kDim; ++c) length = fmaf(shared.centroids[thread][c], shared.centroids[thread][c], length);
      shared.half[thread] = thread < p.parts ? length / 2 : INFINITY;
      shared.sizes[thread] = 0;
    }
    float sum[kParts] = {};
    for (int64_t first = begin; first < end; first += kThreads) {
      const auto n = static_cast<int>(min(end - first, int64_t{kThreads}));
      __syncthreads();  // the rows before have been read
      for (int i = thread; i < n * (kDim / 8); i += kThreads) {
        const int row = i / (kDim / 8), channel = i % (kDim / 8) * 8;
        uint4 eight{};
        if (channel < p.dim) eight = *reinterpret_cast<const uint4*>(p.q.row(head, order[first + row]) + channel);
        *reinterpret_cast<uint4*>(&shared.rows[row][channel]) = eight;
      }
      __syncthreads();

      int part = kParts;  // of no query
      if (thread < n) {
        float score[kParts];
#pragma unroll
        for (int u = 0; u < kParts; ++u) score[u] = -shared.half[u];
        for (int c = 0; c < kDim; c += 8) {
          const uint4 eight = *reinterpret_cast<const uint4*>(&shared.rows[thread][c]);
          const float2 x[4] = {p.pair(eight.x), p.pair(eight.y), p.pair(eight.z), p.pair(eight.w)};
#pragma unroll
          for (int u = 0; u < kParts; ++u) {
            const float4 a = *reinterpret_cast<const float4*>(&shared.centroids[u][c]);
            const float4 b = *reinterpret_cast<const float4*>(&shared.centroids[u][c + 4]);
            score[u] = fmaf(x[0].x, a.x, fmaf(x[0].y, a.y, fmaf(x[1].x, a.z, fmaf(x[1].y, a.w, score[u]))));
            score[u] = fmaf(x[2].x, b.x, fmaf(x[2].y, b.y, fmaf(x[3].x, b.z, fmaf(x[3].y, b.w, score[u]))));
          }
        }
        part = 0;
        float best = score[0];
#pragma unroll
        for (int u = 1; u < kParts; ++u) {
          if (score[u] > best) best = score[u], part = u;
        }
        if (last) p.labels[head][order[first + thread]] = static_cast<int32_t>(row0 + part);
      }
      // Queries by part, in their order.
      int rank = 0;
#pragma unroll
      for (int u = 0; u < kParts; ++u) {
        const uint32_t same = __ballot_sync(~0u, part == u);
        if (lane == u) shared.before[warp][u] = __popc(same);
        if (part == u) rank = __popc(same & ((1u << lane) - 1));
      }
      __syncthreads();
      if (thread == 0) {
        int32_t all = 0;
        for (int u = 0; u < kParts; ++u) {
          shared.first[u] = all;
          for (int w = 0; w < kThreads / 32; ++w) {
            const int32_t here = shared.before[w][u];
            shared.before[w][u] = all;
            all += here;
          }
          shared.sizes[u] += all - shared.first[u];
        }
        shared.first[kParts] = all;
      }
      __syncthreads();
      if (part < kParts) shared.sorted[shared.before[warp][part] + rank] = static_cast<uint8_t>(thread);
      __syncthreads();
      if (thread < kDim) {
#pragma unroll
        for (int u = 0; u < kParts; ++u) {
          for (int i = shared.first[u]; i < shared.first[u + 1]; ++i)
            sum[u] += p.element(shared.rows[shared.sorted[i]][thread]);
        }
      }
    }
    __syncthreads();
    if (thread < kDim) {
#pragma unroll
      for (int u = 0; u < kParts; ++u) {
        if (shared.sizes[u] > 0) shared.centroids[u][thread] = sum[u] / static_cast<float>(shared.sizes[u]);
      }
    }
  }

  for (int u = 0; u < p.parts && thread < p.dim; ++u) centroids[u * p.dim + thread] = shared.centroids[u][thread];
  if (thread < p.parts) p.sizes[head][row0 + thread] = shared.sizes[thread];
}

}  // namespace

int64_t split_scratch(const Exec&, const Sizes&) { return 0; }

void split(const Exec& exec, const SplitArgs& args) {
  require(args.q.dtype != DType::f32, Status::dtype, "split on CUDA takes f16 or bf16");
  const SplitLaunch p{.q = head_rows(args.q),
                      .f16 = args.q.dtype == DType::f16,
                      .groups = static_cast<int32_t>(args.groups),
                      .parts = static_cast<int32_t>(args.parts),
                      .dim = static_cast<int32_t>(args.q.dim),
                      .rounds = args.rounds,
                      .warm = args.warm,
                      .order = args.order,
                      .offsets = args.offsets,
                      .centroids = args.centroids,
                      .sizes = args.sizes,
                      .labels = args.labels};
  fill(exec, args.labels.base, args.labels.step, ~0u, args.q.tokens, args.heads);  // those of no group
  const auto run = [&]<int kDim, int kParts>() {
    launch(exec, "split_groups", split_groups<kDim, kParts>, args.heads * args.groups, kThreads, 0, p);
  };
  const auto of = [&]<int kDim>() {
    if (args.parts <= 4) return run.template operator()<kDim, 4>();
    if (args.parts <= 8) return run.template operator()<kDim, 8>();
    return run.template operator()<kDim, kMostParts>();
  };
  args.q.dim <= 64 ? of.template operator()<64>() : of.template operator()<kMostDim>();
}

}  // namespace scope::cuda
