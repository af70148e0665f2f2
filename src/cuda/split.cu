// split on CUDA: a block for each group, whose warps pass its queries through shared memory 16 at a time, once a round.
#include <type_traits>

#include "cuda/device/ptx_sm80.cuh"
#include "cuda/launch.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

// A warp has tiles of its own, so warps wait for one another only between rounds. A tile's scores are its rows times the
// centroids; its part of the sums is its rows, transposed, times a matrix of ones and zeros [rows, parts].
constexpr int kWarps = 4, kThreads = 32 * kWarps, kMostDim = 128;
constexpr int kRows = 16, kStages = 2;  // queries of a tile; tiles of a warp in shared memory
constexpr int kStep = kWarps * kRows;   // from one tile of a warp to its next
constexpr int kNoPart = 32;             // added to the part of a query that no sum has

struct SplitLaunch {
  HeadRows<const uint16_t> q;
  int32_t groups, parts, dim, rounds;
  bool warm;
  PerHead<const int32_t> order;
  PerHead<const int64_t> offsets;
  PerHead<float> centroids;
  PerHead<int32_t> sizes, labels;
};

template <int kDim, int kParts>
struct Shared {
  union {
    uint16_t rows[kWarps][kStages][kRows][kDim];
    float sums[kWarps][kParts][kDim];  // once all rows have been read
  };
  alignas(16) float centroids[kParts][kDim + 8];  // 8 more, so that 4 rows of 8 floats use all banks
  uint4 fragments[kDim / 16][kParts / 8][32];     // of each lane: the centroids' high parts, then what these leave
  float half[kParts];                             // of a centroid's squared length
  int32_t sizes[kParts];
};

// Where 8 channels of a row lie, in bytes: a column of eight rows uses all banks.
template <int kDim>
__device__ uint32_t chunk_place(int row, int chunk) {
  return row * kDim * 2 + (chunk ^ (row % 8)) * 16;
}
// Where a channel of a part's sum lies, for the same reason.
__device__ int sum_place(int part, int channel) { return channel ^ (part / 2 % 4 * 8); }

template <class T>
__device__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Two floats as sums of two 16-bit numbers each: of bf16 these have 16 bits or more, of f16 22.
template <class T>
struct TwoParts {
  uint32_t high, rest;

  __device__ explicit TwoParts(float2 x) : high(pack<T>(x.x, x.y)) {
    const float2 rounded = unpack<T>(high);
    rest = pack<T>(x.x - rounded.x, x.y - rounded.y);
  }
  __device__ float squares() const {
    const float2 x = unpack<T>(high), y = unpack<T>(rest);
    return (x.x + y.x) * (x.x + y.x) + (x.y + y.y) * (x.y + y.y);
  }
};

// Of the centroids in shared memory: what the products take, and half the squared lengths of just that.
template <class T, int kDim, int kParts>
__device__ void prepare(Shared<kDim, kParts>& shared, int parts) {
  const int thread = threadIdx.x;
  const auto two = [&](int part, int channel) {
    return TwoParts<T>(*reinterpret_cast<const float2*>(&shared.centroids[part][channel]));
  };
  for (int i = thread; i < kDim / 16 * kParts / 8 * 32; i += kThreads) {
    const int lane = i % 32, n = i / 32 % (kParts / 8), c = i / 32 / (kParts / 8);
    const int part = 8 * n + lane / 4, channel = 16 * c + lane % 4 * 2;
    const TwoParts<T> x = two(part, channel), y = two(part, channel + 8);
    shared.fragments[c][n][lane] = {x.high, y.high, x.rest, y.rest};
  }
  constexpr int kLanes = kThreads / kParts;  // of a part
  const int part = thread / kLanes;
  float length = 0;
  for (int channel = thread % kLanes * 2; channel < kDim; channel += 2 * kLanes) length += two(part, channel).squares();
  for (int step = 1; step < kLanes; step *= 2) length += __shfl_xor_sync(~0u, length, step);
  if (thread % kLanes == 0) {
    shared.half[part] = part < parts ? length / 2 : INFINITY;
    shared.sizes[part] = 0;
  }
}

// Blocks of a multiprocessor: as many as their registers leave room for.
constexpr int blocks_of(int dim, int parts) { return (dim == 64 ? 5 : 4) - (parts == 8 ? 0 : 2); }

// kParts: as many as `p.parts` or more.
template <class T, int kDim, int kParts>
__global__ void __launch_bounds__(kThreads, blocks_of(kDim, kParts)) split_groups(SplitLaunch p) {
  constexpr int kChunks = kDim / 8, kTileBytes = kRows * kDim * 2;
  constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x3c00 : 0x3f80;
  extern __shared__ __align__(256) char memory[];  // places are XORed with channel offsets
  auto& shared = *reinterpret_cast<Shared<kDim, kParts>*>(memory);
  const int64_t head = blockIdx.x / p.groups;
  const auto group = static_cast<int32_t>(blockIdx.x % p.groups);
  const auto begin = static_cast<int32_t>(p.offsets[head][group]), end = static_cast<int32_t>(p.offsets[head][group + 1]);
  const int32_t* order = p.order[head];
  const int32_t row0 = group * p.parts;
  float* const centroids = p.centroids[head] + int64_t{row0} * p.dim;
  const int thread = threadIdx.x, warp = warp_index(), lane = thread % 32;
  const uint32_t tiles = shared_address(shared.rows[warp]);

  // The query of one of a tile's rows, that of lane % 16; -1: past the last.
  const auto query = [&](int32_t first) { return first + lane % 16 < end ? order[first + lane % 16] : -1; };
  const uint32_t place = tiles + chunk_place<kDim>(lane / kChunks, lane % kChunks);
  const auto fetch = [&](int32_t first, int32_t token, int stage) {
    if (first < end) {
#pragma unroll
      for (int i = 0; i < kRows * kChunks / 32; ++i) {
        const int row = i * (32 / kChunks), chunk = lane % kChunks;  // beside lane / kChunks, which has other bits
        const int32_t from = __shfl_sync(~0u, token, row + lane / kChunks);
        const bool real = from >= 0 && 8 * chunk < p.dim;
        copy_async_16(((place + stage * kTileBytes) ^ (row % 8 * 16)) + row * kDim * 2,
                      real ? p.q.row(head, from) + 8 * chunk : p.q.base, real);
      }
    }
    copy_async_commit();
  };
  const int32_t first0 = begin + warp * kRows;
  const int32_t token0 = query(first0), token1 = query(first0 + kStep);

#pragma unroll
  for (int u = 0; u < kParts; ++u) {
    if (thread >= kDim) break;
    float x = 0;
    if (u < p.parts && thread < p.dim) {
      const int64_t member = begin + (2 * u + 1) * int64_t{end - begin} / (2 * p.parts);
      if (p.warm) {
        x = centroids[u * p.dim + thread];
      } else if (begin < end) {
        x = unpack<T>(p.q.row(head, order[member])[thread]).x;
      }
    }
    shared.centroids[u][thread] = x;
  }

  for (int round = 0; round < p.rounds; ++round) {
    const bool last = round + 1 == p.rounds;
    __syncthreads();  // the centroids are there, and the sums have been read
    fetch(first0, token0, 0);
    fetch(first0 + kStep, token1, 1);
    prepare<T>(shared, p.parts);
    __syncthreads();
    float sum[kDim / 16][kParts / 8][4] = {};  // entry 2 r + e: channel lane / 4 + 8 r of 16, part 2 (lane % 4) + e of 8
    int32_t token = token0, next = token1;
    int stage = 0;
#pragma unroll 1
    for (int32_t first = first0; first < end; first += kStep, stage ^= 1) {
      const int32_t after = query(first + 2 * kStep);
      copy_async_wait_but<1>();
      __syncwarp();
      const uint32_t rows = tiles + stage * kTileBytes;

      float high[kParts / 8][4] = {}, rest[kParts / 8][4] = {};  // entry 2 r + e: row lane / 4 + 8 r, part as above
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        uint32_t a[4];
        load_matrix_x4(a, (rows + chunk_place<kDim>(lane % 16, lane / 16)) ^ (c * 32));
#pragma unroll
        for (int n = 0; n < kParts / 8; ++n) {
          const uint4 b = shared.fragments[c][n][lane];
          mma_16x8x16<T>(rest[n], a, b.z, b.w);
          mma_16x8x16<T>(high[n], a, b.x, b.y);
        }
      }
      __syncwarp();        // the tile has been read: rows may be cleared
      uint32_t parts = 0;  // of rows lane / 4 and, 8 bits higher, lane / 4 + 8
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float best = -INFINITY;
        int part = 0;
#pragma unroll
        for (int i = 0; i < kParts / 4; ++i) {
          const int n = i / 2, e = i % 2;
          const float score = high[n][2 * r + e] + rest[n][2 * r + e] - shared.half[8 * n + lane % 4 * 2 + e];
          if (score > best) best = score, part = 8 * n + lane % 4 * 2 + e;
        }
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
          const float other = __shfl_xor_sync(~0u, best, step);
          const int its = __shfl_xor_sync(~0u, part, step);
          if (other > best || (other == best && its < part)) best = other, part = its;
        }
        if (!isfinite(best)) {  // as the row is, which would reach every sum: times zero it is NaN
          part = kNoPart;
          for (int chunk = lane % 4; chunk < kChunks; chunk += 4) {
            char* const row = reinterpret_cast<char*>(shared.rows[warp][stage]);
            *reinterpret_cast<uint4*>(row + chunk_place<kDim>(lane / 4 + 8 * r, chunk)) = {0, 0, 0, 0};
          }
        }
        parts |= part << (8 * r);
      }
      int part = __shfl_sync(~0u, parts, lane % 8 * 4) >> (lane / 8 % 2 * 8) & 0xff;  // of row lane % 16
      if (lane < 16 && token >= 0) {
        if (part < kNoPart) atomicAdd(&shared.sizes[part], 1);
        if (last) p.labels[head][token] = row0 + part % kNoPart;
      }
      if (token < 0) part = kNoPart;
      int of[4];  // parts of rows 2 (lane % 4) and the next, and of those 8 further on
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] = __shfl_sync(~0u, part, lane % 4 * 2 + i % 2 + i / 2 * 8);
      uint32_t ones[kParts / 8][2];
#pragma unroll
      for (int i = 0; i < kParts / 4; ++i) {
        const int n = i / 2, e = i % 2, here = 8 * n + lane / 4;
        ones[n][e] = (of[2 * e] == here ? kOne : 0) | (of[2 * e + 1] == here ? kOne << 16 : 0);
      }
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        uint32_t a[4];
        load_matrix_x4_transposed(a, (rows + chunk_place<kDim>(lane % 8 + lane / 16 * 8, lane / 8 % 2)) ^ (c * 32));
#pragma unroll
        for (int n = 0; n < kParts / 8; ++n) mma_16x8x16<T>(sum[c][n], a, ones[n][0], ones[n][1]);
      }
      __syncwarp();  // the tile has been read
      fetch(first + 2 * kStep, after, stage);
      token = next;
      next = after;
    }
    __syncthreads();  // all warps have read their tiles, over which the sums of others go
#pragma unroll
    for (int i = 0; i < kDim / 16 * kParts / 8 * 4; ++i) {
      const int e = i % 4, n = i / 4 % (kParts / 8), c = i / 4 / (kParts / 8);
      const int part = 8 * n + lane % 4 * 2 + e % 2;
      shared.sums[warp][part][sum_place(part, 16 * c + lane / 4 + e / 2 * 8)] = sum[c][n][e];
    }
    __syncthreads();
    if (thread < kDim) {
#pragma unroll
      for (int u = 0; u < kParts; ++u) {
        float all = 0;
        for (int w = 0; w < kWarps; ++w) all += shared.sums[w][u][sum_place(u, thread)];
        if (shared.sizes[u] > 0) shared.centroids[u][thread] = all / static_cast<float>(shared.sizes[u]);
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
  const auto run = [&]<class T, int kDim, int kParts>() {
    launch(exec, "split_groups", split_groups<T, kDim, kParts>, args.heads * args.groups, kThreads,
           int64_t{sizeof(Shared<kDim, kParts>)}, p);
  };
  const auto of = [&]<class T, int kDim>() {
    args.parts <= 8 ? run.template operator()<T, kDim, 8>() : run.template operator()<T, kDim, kMostParts>();
  };
  const auto with = [&]<class T>() {
    args.q.dim <= 64 ? of.template operator()<T, 64>() : of.template operator()<T, kMostDim>();
  };
  args.q.dtype == DType::f16 ? with.template operator()<__half>() : with.template operator()<__nv_bfloat16>();
}

}  // namespace scope::cuda
