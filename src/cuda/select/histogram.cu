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

// The same for a height: the bin above 7 bits of fraction, of which the highest 6 are summed.
__device__ inline void count_height(uint32_t counts, uint32_t column, float height) {
  constexpr uint32_t kOne = 1u << kCountShift, kBinBits = 1023u << 7, kMask = 2 * kMostMoment;
  const uint32_t bits = __float_as_uint(__fmaf_rd(height, kTop, 65536.0f + kLowest));
  uint32_t at, word;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(at) : "r"(bits), "r"(kBinBits), "r"(column));  // ~bits & kBinBits | column
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(word) : "r"(bits), "r"(kMask), "r"(kOne));
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(counts + at), "r"(word));
}

// Adds a block's histogram to the one in memory and clears it. to(i): the place of word i, null: none; `unused`: bits below
// the sums.
template <class To>
__device__ inline void flush(uint32_t* histogram, int n, int unused, const To& to) {
  constexpr int kAhead = 4;  // words that are read before the first is added
  __syncthreads();
  for (int i0 = threadIdx.x; i0 < n; i0 += kAhead * blockDim.x) {
    uint32_t words[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = i0 + j * blockDim.x;
      words[j] = i < n ? histogram[i] : 0;
      if (i < n) histogram[i] = 0;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t word = words[j];
      if (word == 0) continue;
      unsigned long long* place = to(i0 + j * blockDim.x);
      if (place == nullptr) continue;
      atomicAdd(place, (static_cast<unsigned long long>(word >> kCountShift) << 32) |
                           ((word & ((1u << kCountShift) - 1)) >> unused));
    }
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
  const int words = bins.count * kLanes;
  for (int i = threadIdx.x; i < words; i += kHistogramThreads) histogram[i] = 0;

  const int64_t tiles = (p.count + kHistogramTile - 1) / kHistogramTile;
  for (Share share(p.heads, RowSet{p.groups}, kLanes, tiles); share.next();) {
    const int head = share.head;
    auto* to = s.histogram[head] + int64_t{share.section} * words;
    load_tables<kSubspaces>(p, s, head, share.section * kLanes, nullptr, table);
    __syncthreads();
    Codes<kSubspaces> next(p, head, share.begin * kHistogramTile + threadIdx.x);
    for (int tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
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
        flush(histogram, words, 0, [&](int i) { return to + i; });
        counted = 0;
      }
    }
    flush(histogram, words, 0, [&](int i) { return to + i; });
  }
}

// ---- any proxy, from memory: tables that do not fit ----

constexpr int kPlainThreads = 256, kPlainTile = kPlainThreads;

__global__ void __launch_bounds__(kPlainThreads, 2) plain_histogram(ProxyLaunch p, SelectSpace s, Bins bins) {
  extern __shared__ uint4 shared[];
  auto* histogram = reinterpret_cast<uint32_t*>(shared);
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int words = bins.count * kLanes;
  for (int i = threadIdx.x; i < words; i += kPlainThreads) histogram[i] = 0;
  const int64_t tiles = (p.count + kPlainTile - 1) / kPlainTile;
  for (Share share(p.heads, RowSet{p.groups}, kLanes, tiles); share.next();) {
    const int head = share.head;
    const int group = share.section * kLanes + lane;
    auto* to = s.histogram[head] + int64_t{share.section} * words;
    __syncthreads();
    for (int tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int64_t first = tile * kPlainTile + warp * 32;
      for (int64_t key = first; key < min(first + 32, int64_t{p.count}) && group < p.groups; ++key) {
        const float logit = p.score(static_cast<int32_t>(head), group, static_cast<int32_t>(key));
        count_key(address_of(histogram + lane), depth_of(s.high[head][group], s.unit[head][group], logit), bins.sub_bits);
      }
      if (counted * kPlainTile + kPlainTile > kFlushKeys) {
        flush(histogram, words, 0, [&](int i) { return to + i; });
        counted = 0;
      }
    }
    flush(histogram, words, 0, [&](int i) { return to + i; });
  }
}

// ---- exact ----

// A height in 128ths of a bin: the bin's place in the histogram's bytes lies above them.
constexpr int kFlushExact = 4096;
static_assert(kFlushExact * 2 * kMostMoment < 1 << kCountShift && kBins * kLanes * 4 == kBins << 7);

template <class Products>
__global__ void __launch_bounds__(Products::kThreads, 1)
    exact_histogram(ProxyLaunch p, SelectSpace s, Bins bins, RowSet rows, int chunk, bool side_by_side) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  auto* row = reinterpret_cast<Height*>(shared + chunk / kLanes * Products::kPairWords);  // [chunk]
  auto* histogram = reinterpret_cast<uint32_t*>(row + chunk);                             // [chunk / 32, bins, 32]
  constexpr int kWords = kBins * kLanes;
  for (int i = threadIdx.x; i < kWords * (chunk / kLanes); i += Products::kThreads) histogram[i] = 0;
  uint32_t column[4];  // of the thread's groups, below
#pragma unroll
  for (int u = 0; u < 4; ++u) column[u] = 4 * (8 * ((u + quad) % 4) + lane / 4);

  const int tiles = (p.count + Products::kTile - 1) / Products::kTile;
  for (Share share(p.heads, rows, chunk, tiles, side_by_side); share.next();) {
    const int head = share.head;
    const int row0 = share.section * chunk, pairs = (min(chunk, rows.count(head) - row0) + kLanes - 1) / kLanes;
    const auto empty = [&] {
      flush(histogram, kWords * pairs, 1, [&](int i) {
        if (!rows.list) return s.histogram[head] + int64_t{row0} * kBins + i;
        const int group = rows.at(head, row0 + i / kWords * kLanes + i % kLanes), bin = i % kWords / kLanes;
        return group < 0 ? nullptr : s.histogram[head] + (int64_t{group / kLanes} * kBins + bin) * kLanes + group % kLanes;
      });
    };
    Products::load_centroids(
        p, head, chunk, [&](int i) { return rows.at(head, row0 + i); }, shared);
    for (int i = threadIdx.x; i < chunk; i += Products::kThreads) {
      const int group = rows.at(head, row0 + i);
      row[i] = group >= 0 ? Height{s.unit[head][group], s.high[head][group]} : Height{0, 0};
    }
    __syncthreads();
    for (int tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int first = tile * Products::kTile + warp * 32, left = min(32, p.count - first);
      if (left > 0) {
        typename Products::KeyTile keys;
        Products::load_keys(
            p, head, [&](int i) { return i < left ? first + i : -1; }, keys);
        for (int pair = 0; pair < pairs; ++pair) {
          float sum[2][4][4];
          Products::multiply(shared + pair * Products::kPairWords, keys, sum);
          // The quad's four threads hold the same groups. In round u thread t takes the (u + t mod 4)th of its four, so
          // that the 32 lanes count 32 groups.
          Height height[4];
#pragma unroll
          for (int u = 0; u < 4; ++u) height[u] = row[pair * kLanes + column[u] / 4];
          const uint32_t counts = address_of(histogram + pair * kWords);
          const auto count = [&](auto whole) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float x[4] = {sum[0][n][e], sum[0][n][e + 2], sum[1][n][e], sum[1][n][e + 2]}, y[4], z[4];
#pragma unroll
                for (int u = 0; u < 4; ++u) y[u] = (quad & 1) != 0 ? x[(u + 1) % 4] : x[u];
#pragma unroll
                for (int u = 0; u < 4; ++u) z[u] = (quad & 2) != 0 ? y[(u + 2) % 4] : y[u];
                if (decltype(whole)::value || 8 * quad + 2 * n + e < left) {
#pragma unroll
                  for (int u = 0; u < 4; ++u) count_height(counts, column[u], height[u].of(z[u]));
                }
              }
            }
          };
          if (left == 32) {
            count(std::true_type());
          } else {
            count(std::false_type());
          }
        }
      }
      if ((counted + 1) * Products::kTile > kFlushExact) {
        empty();
        counted = 0;
      }
    }
    empty();
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

void histogram_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins, const RowSet& rows) {
  const int64_t lane_blocks = int64_t{p.heads} * ceil_div(p.groups, kLanes);
  if (p.exact) {
    with_products<16>(p, [&](auto products) {
      using P = decltype(products);
      const auto bytes = [&](int chunk) {
        return chunk / kLanes * (P::kPairBytes + histogram_bytes(bins)) + chunk * int64_t{sizeof(Height)};
      };
      const bool wide = !rows.list && p.groups > kLanes && bytes(2 * kLanes) <= exec.device->shared_bytes;
      const int chunk = wide ? 2 * kLanes : kLanes;
      const int64_t sections = ceil_div(p.groups, chunk);
      int64_t blocks = blocks_for(exec, 1, p.heads * sections * ceil_div(p.count, P::kTile));
      const bool side_by_side = !rows.list && blocks >= sections;
      if (side_by_side) blocks -= blocks % sections;
      launch(exec, "exact_histogram", exact_histogram<P>, blocks, P::kThreads, bytes(chunk), p, space, bins, rows, chunk,
             side_by_side);
    });
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
