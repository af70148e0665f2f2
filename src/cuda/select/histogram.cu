// Histograms of depths, 32 groups at a time.
#include "cuda/select/passes.h"
#include "cuda/select/products.cuh"
#include "cuda/select/tables.cuh"

namespace scope::cuda {

namespace {

// Counts a key in its column of a histogram [bins, 32].
__device__ inline void count_key(uint32_t column_address, uint32_t depth, int sub_bits) {
  constexpr uint32_t kOne = 1u << kCountShift, kMask = kMostMoment;
  uint32_t word;  // (depth >> …) & kMask | kOne
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(word) : "r"(depth >> (sub_bits - kMomentBits)), "r"(kMask), "r"(kOne));
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(column_address + (depth >> sub_bits) * (kLanes * 4)), "r"(word));
}

// Adds a block's histogram to the one in memory and clears it.
__device__ inline void flush(uint32_t* histogram, int n, unsigned long long* to) {
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t word = histogram[i];
    if (word == 0) continue;
    histogram[i] = 0;
    atomicAdd(to + i, (static_cast<unsigned long long>(word >> kCountShift) << 32) | (word & ((1u << kCountShift) - 1)));
  }
  __syncthreads();
}

// ---- codes: tables in shared memory ----

constexpr int kHistogramThreads = 1024, kHistogramTile = kHistogramThreads;  // a lane's key at a time

template <int kSubspaces>
__global__ void __launch_bounds__(kHistogramThreads, 1) codes_histogram(ProxyLaunch p, SelectSpace s, Bins bins) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, subspace_bytes = p.codes * kTableStride;
  char* table = reinterpret_cast<char*>(shared);
  auto* histogram = reinterpret_cast<uint32_t*>(table + kSubspaces * subspace_bytes);
  const uint32_t column = address_of(table) + 4 * lane, counts = address_of(histogram) + 4 * lane;
  const int words = bins.count * kLanes, blocks = (p.groups + kLanes - 1) / kLanes;
  for (int i = threadIdx.x; i < words; i += kHistogramThreads) histogram[i] = 0;

  const int64_t tiles = (p.count + kHistogramTile - 1) / kHistogramTile;
  for (Share share(p.heads, blocks, tiles); share.next();) {
    const int64_t head = share.head;
    auto* to = s.histogram[head] + int64_t{share.section} * words;
    load_tables<kSubspaces>(p, s, head, share.section * kLanes, nullptr, table);
    __syncthreads();
    Codes<kSubspaces> next(p, head, share.begin * kHistogramTile + threadIdx.x);
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const Codes<kSubspaces> codes = next;
      const int64_t first = tile * kHistogramTile + warp * 32;
      if (tile + 1 < share.end) next = Codes<kSubspaces>(p, head, first + kHistogramTile + lane);
      const int n = static_cast<int>(min(int64_t{32}, p.count - first));
      // Lookups first: none of them would overtake an addition.
#pragma unroll
      for (int i0 = 0; i0 < 32; i0 += 8) {
        uint32_t depth[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) depth[i] = codes.of_lane(i0 + i).lookup(column, subspace_bytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i0 + i < n) count_key(counts, depth[i], bins.sub_bits);
        }
      }
      if (counted * kHistogramTile + kHistogramTile > kFlushKeys) {
        flush(histogram, words, to);
        counted = 0;
      }
    }
    flush(histogram, words, to);
  }
}

// ---- any proxy, from memory: tables that do not fit ----

constexpr int kPlainThreads = 256, kPlainTile = kPlainThreads;

__global__ void __launch_bounds__(kPlainThreads) plain_histogram(ProxyLaunch p, SelectSpace s, Bins bins) {
  extern __shared__ uint4 shared[];
  auto* histogram = reinterpret_cast<uint32_t*>(shared);
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int words = bins.count * kLanes, blocks = (p.groups + kLanes - 1) / kLanes;
  for (int i = threadIdx.x; i < words; i += kPlainThreads) histogram[i] = 0;
  const int64_t tiles = (p.count + kPlainTile - 1) / kPlainTile;
  for (Share share(p.heads, blocks, tiles); share.next();) {
    const int64_t head = share.head;
    const int group = share.section * kLanes + lane;
    auto* to = s.histogram[head] + int64_t{share.section} * words;
    __syncthreads();
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int64_t first = tile * kPlainTile + warp * 32;
      for (int64_t key = first; key < min(first + 32, int64_t{p.count}) && group < p.groups; ++key) {
        const float logit = p.score(static_cast<int32_t>(head), group, static_cast<int32_t>(key));
        count_key(address_of(histogram + lane), depth_of(s.high[head][group], s.unit[head][group], logit), bins.sub_bits);
      }
      if (counted * kPlainTile + kPlainTile > kFlushKeys) {
        flush(histogram, words, to);
        counted = 0;
      }
    }
    flush(histogram, words, to);
  }
}

// ---- exact ----

template <class T>
__global__ void __launch_bounds__(kExactThreads, 1) exact_histogram(ProxyLaunch p, SelectSpace s, Bins bins, int chunk) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  const int fragment_words = chunk / 16 * ((p.dim + 31) / 32 * 2) * 2 * 32;
  auto* row = reinterpret_cast<float2*>(shared + fragment_words);  // [chunk] high, unit
  auto* histogram = reinterpret_cast<uint32_t*>(row + chunk);      // [chunk / 32, bins, 32]
  const uint32_t counts = address_of(histogram + lane / 4);
  const int words = bins.count * kLanes, sections = (p.groups + chunk - 1) / chunk;
  for (int i = threadIdx.x; i < words * (chunk / kLanes); i += kExactThreads) histogram[i] = 0;

  const int64_t tiles = (p.count + kExactTile - 1) / kExactTile;
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, pairs = (min(chunk, p.groups - group0) + kLanes - 1) / kLanes;
    auto* to = s.histogram[head] + int64_t{group0 / kLanes} * words;
    load_centroids<T>(p, head, group0, chunk, shared);
    for (int g = threadIdx.x; g < chunk; g += kExactThreads) {
      row[g] = group0 + g < p.groups ? float2{s.high[head][group0 + g], s.unit[head][group0 + g]} : float2{0, 0};
    }
    __syncthreads();
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int64_t first = tile * kExactTile + warp * 32;
      if (first < p.count) {
        KeyTile keys;
        load_keys(p, head, first, keys);
        const int left = static_cast<int>(min(int64_t{32}, p.count - first));
        for (int pair = 0; pair < pairs; ++pair) {
          float sum[2][4][4];
          multiply<T>(shared + pair * (fragment_words / (chunk / kLanes)), keys, p.dim, sum);
          // The quad's four threads hold the same groups. In round u thread t takes the (u + t mod 4)th of its four, so
          // that the 32 lanes count 32 groups.
          float2 bounds[4];
#pragma unroll
          for (int u = 0; u < 4; ++u) bounds[u] = row[pair * kLanes + 8 * ((u + quad) % 4) + lane / 4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float x[4] = {sum[0][n][e], sum[0][n][e + 2], sum[1][n][e], sum[1][n][e + 2]}, y[4], z[4];
#pragma unroll
              for (int u = 0; u < 4; ++u) y[u] = (quad & 1) != 0 ? x[(u + 1) % 4] : x[u];
#pragma unroll
              for (int u = 0; u < 4; ++u) z[u] = (quad & 2) != 0 ? y[(u + 2) % 4] : y[u];
              if (8 * n + 2 * quad + e < left) {
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                  count_key(counts + (pair * words + 8 * ((u + quad) % 4)) * 4, depth_of(bounds[u].x, bounds[u].y, z[u]),
                            bins.sub_bits);
                }
              }
            }
          }
        }
      }
      if (counted * kExactTile + kExactTile > kFlushKeys) {
        flush(histogram, words * pairs, to);
        counted = 0;
      }
    }
    flush(histogram, words * pairs, to);
  }
}

}  // namespace

Bins select_bins(const Exec& exec, const ProxyLaunch& proxy) {
  Bins bins;
  for (int halvings = 0; halvings <= 2; ++halvings) {
    bins = {kBins >> halvings, kSubBits + halvings};
    if (proxy.exact || tables_fit(exec, proxy, bins)) return bins;
  }
  return Bins();
}

void histogram_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins) {
  const int64_t lane_blocks = int64_t{p.heads} * ceil_div(p.groups, kLanes);
  if (p.exact) {
    const auto bytes = [&](int chunk) {
      return fragment_bytes(p, chunk) + chunk * int64_t{sizeof(float2)} + chunk / kLanes * histogram_bytes(bins);
    };
    const int chunk = p.groups > kLanes && bytes(64) <= exec.device->shared_bytes ? 64 : 32;
    const int64_t blocks = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kExactTile));
    const auto kernel = p.f16 ? exact_histogram<__half> : exact_histogram<__nv_bfloat16>;
    launch(exec, "exact_histogram", kernel, blocks, kExactThreads, bytes(chunk), p, space, bins, chunk);
  } else if (tables_fit(exec, p, bins)) {
    const int64_t blocks = blocks_for(exec, 1, lane_blocks * ceil_div(p.count, kHistogramTile));
    with_subspaces(p.subspaces, [&](auto n) {
      launch(exec, "codes_histogram", codes_histogram<n()>, blocks, kHistogramThreads,
             table_bytes(p) + histogram_bytes(bins), p, space, bins);
    });
  } else {
    const int64_t blocks = blocks_for(exec, 2, lane_blocks * ceil_div(p.count, kPlainTile));
    launch(exec, "plain_histogram", plain_histogram, blocks, kPlainThreads, histogram_bytes(bins), p, space, bins);
  }
}

}  // namespace scope::cuda
