// K-means on CUDA: tokens sorted by label, and their means in a fixed order.
#include "cuda/device/reduce.cuh"
#include "cuda/kmeans_work.cuh"

namespace scope::cuda::clustering {

namespace {

constexpr int kScanThreads = 512, kTallyThreads = 256;
constexpr int kPlaceWarps = 4, kUpdateWarps = 4;
constexpr int kBad = INT32_MIN;  // in `order`: the row is not finite and has no weight

// ---- sort: a stable counting sort of the tokens by label ----

// Offsets are known: what the update has to do. Every thread of the block takes part.
__device__ void list_items(const Work& w, int head, int m) {
  const int64_t* offsets = w.offsets[head] + m * (w.clusters + 1);
  uint64_t before = 0;  // items << 32 | slots
  __shared__ uint64_t total;
  int empty = 0;
  for (int64_t c0 = 0; c0 < w.clusters; c0 += blockDim.x) {
    const int64_t c = c0 + threadIdx.x;
    int64_t begin = 0, size = 0;
    if (c < w.clusters) {
      begin = offsets[c];
      size = offsets[c + 1] - begin;
      empty += size == 0;
    }
    const int64_t pieces = (size + kPiece - 1) / kPiece, slots = pieces > 1 ? pieces : 0;
    const uint64_t mine = static_cast<uint64_t>(pieces) << 32 | static_cast<uint64_t>(slots);
    const uint64_t up_to = before + block_scan<kScanThreads>(mine);
    if (c < w.clusters) {
      w.sizes[head][m * w.clusters + c] = static_cast<int32_t>(size);
      const auto item = static_cast<int64_t>((up_to - mine) >> 32),
                 slot = static_cast<int64_t>((up_to - mine) & 0xffffffffu);
      w.first_slot[head][m * w.clusters + c] = static_cast<int32_t>(slot);
      w.arrived[head][m * w.clusters + c] = 0;
      for (int64_t i = 0; i < pieces; ++i) {
        w.items[head][m * w.most_items + item + i] = {static_cast<int32_t>(c), static_cast<int32_t>(begin + i * kPiece),
                                                      static_cast<int32_t>(min(int64_t{kPiece}, size - i * kPiece)),
                                                      slots > 0 ? static_cast<int32_t>(slot + i) : -1};
      }
    }
    if (threadIdx.x == blockDim.x - 1) total = up_to;
    __syncthreads();
    before = total;
    __syncthreads();
  }
  if (threadIdx.x == 0) w.item_count[head][m] = static_cast<int32_t>(before >> 32);
  const uint64_t all_empty = block_scan<kScanThreads>(static_cast<uint64_t>(empty));
  if (w.last && w.empty && threadIdx.x == blockDim.x - 1) w.empty[head][m] = static_cast<int64_t>(all_empty);
}

// A digit of a label, for labels that need more than one pass.
struct Pass {
  int shift;
  bool only;            // the labels are the digits: offsets follow from the tally
  bool from_positions;  // sorted by the lower digit already
  bool to_positions;    // the higher digit follows
};

__device__ int digit_of(const Pass& pass, int32_t label) { return (max(label, 0) >> pass.shift) % kBins; }

__global__ void __launch_bounds__(kTallyThreads) tally_kernel(const __grid_constant__ Work w, Pass pass, int64_t stretches) {
  extern __shared__ int32_t counts[];  // [bins]
  const int64_t problem = blockIdx.x / stretches, stretch = blockIdx.x % stretches;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const int32_t* labels = w.labels[head] + m * w.count;
  const int32_t* from = pass.from_positions ? w.positions[head] + m * w.count : nullptr;
  const auto begin = static_cast<int>(stretch * kStretch), end = static_cast<int>(min(w.seen, (stretch + 1) * kStretch));
  int32_t label[kStretch / kTallyThreads];  // read before the first is counted
#pragma unroll
  for (int k = 0; k < kStretch / kTallyThreads; ++k) {
    const int i = begin + k * kTallyThreads + static_cast<int>(threadIdx.x);
    if (i < end) label[k] = labels[from == nullptr ? i : from[i]];
  }
  for (int c = static_cast<int>(threadIdx.x); c < w.bins; c += kTallyThreads) counts[c] = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kStretch / kTallyThreads; ++k) {
    if (begin + k * kTallyThreads + static_cast<int>(threadIdx.x) >= end) break;
    atomicAdd(counts + digit_of(pass, label[k]), 1);
    if (!pass.only && from == nullptr) atomicAdd(&w.sizes[head][m * w.clusters + max(label[k], 0)], 1);
  }
  __syncthreads();
  int32_t* tally = w.tally[head] + (m * w.most_stretches + stretch) * w.bins;
  for (int c = static_cast<int>(threadIdx.x); c < w.bins; c += kTallyThreads) tally[c] = counts[c];
}

// One block per problem turns the tally into places: a label's tokens after those of lower labels, and within a label
// stretch after stretch.
__global__ void __launch_bounds__(kScanThreads, 2) scan_kernel(const __grid_constant__ Work w, Pass pass) {
  __shared__ uint64_t carry;
  const auto head = static_cast<int>(blockIdx.x / w.subsets), m = static_cast<int>(blockIdx.x % w.subsets);
  const int stretches = static_cast<int>((w.seen + kStretch - 1) / kStretch);
  int32_t* tally = w.tally[head] + m * w.most_stretches * w.bins;
  int64_t* offsets = w.offsets[head] + m * (w.clusters + 1);
  uint64_t before = 0;
  for (int c0 = 0; c0 < w.bins; c0 += kScanThreads) {
    const int c = c0 + static_cast<int>(threadIdx.x);
    int total = 0;
    if (c < w.bins) {
#pragma unroll 16
      for (int i = 0; i < stretches; ++i) total += tally[i * w.bins + c];
    }
    const uint64_t up_to = before + block_scan<kScanThreads>(static_cast<uint64_t>(total));
    if (c < w.bins) {
      auto next = static_cast<int32_t>(up_to - static_cast<uint64_t>(total));
      if (pass.only) offsets[c] = next;
      constexpr int kAhead = 16;
      for (int i0 = 0; i0 < stretches; i0 += kAhead) {
        int32_t count[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) count[i] = i0 + i < stretches ? tally[(i0 + i) * w.bins + c] : 0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (i0 + i < stretches) tally[(i0 + i) * w.bins + c] = next;
          next += count[i];
        }
      }
    }
    if (threadIdx.x == kScanThreads - 1) carry = up_to;
    __syncthreads();
    before = carry;
    __syncthreads();
  }
  if (!pass.only) return;
  if (threadIdx.x == 0) offsets[w.clusters] = w.seen;
  __syncthreads();
  list_items(w, head, m);
}

// A warp places the tokens of one stretch, in order.
__global__ void __launch_bounds__(kPlaceWarps * 32) place_kernel(const __grid_constant__ Work w, Pass pass, int64_t blocks) {
  extern __shared__ int32_t places[];  // [kPlaceWarps, bins]
  const int64_t problem = blockIdx.x / blocks;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = warp_index();
  const auto stretch = static_cast<int>(blockIdx.x % blocks * kPlaceWarps + warp), seen = static_cast<int>(w.seen);
  const int begin = stretch * kStretch, end = min(begin + kStretch, seen);
  if (begin >= end) return;
  int32_t* labels = w.labels[head] + m * w.count;
  const int32_t* from = pass.from_positions ? w.positions[head] + m * w.count : nullptr;
  int32_t* to = (pass.to_positions ? w.positions : w.order)[head] + m * w.count;
  const int32_t* tally = w.tally[head] + (m * w.most_stretches + stretch) * w.bins;
  int32_t* next = places + warp * w.bins;
#pragma unroll 4
  for (int c = lane; c < w.bins; c += 32) next[c] = tally[c];
  __syncwarp();
  constexpr int kAhead = 8;  // labels read before the first is placed
  for (int i0 = begin; i0 < end; i0 += 32 * kAhead) {
    int32_t position[kAhead], label[kAhead], token[kAhead];
    unsigned same[kAhead];  // lanes with the same digit
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = min(i0 + k * 32 + lane, end - 1);
      position[k] = from == nullptr ? i : from[i];
      label[k] = labels[position[k]];
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) token[k] = pass.to_positions ? position[k] : token_at(w, m, position[k]);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int d = digit_of(pass, label[k]);
      same[k] = __ballot_sync(~0u, i0 + k * 32 + lane < end);
#pragma unroll
      for (int bit = 1; bit < kBins; bit *= 2) {
        const unsigned set = __ballot_sync(~0u, (d & bit) != 0);
        same[k] &= (d & bit) != 0 ? set : ~set;
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool active = i0 + k * 32 + lane < end;
      const int d = digit_of(pass, label[k]);
      const int32_t rank = __popc(same[k] & ((1u << lane) - 1));
      const int32_t place = active ? next[d] : 0;
      __syncwarp();
      if (active && rank == 0) next[d] = place + __popc(same[k]);
      __syncwarp();
      if (!active) continue;
      to[place + rank] = label[k] < 0 && !pass.to_positions ? token[k] | kBad : token[k];
      if (pass.to_positions || !w.last) continue;
      if (w.token_labels) w.token_labels[head][token[k]] = max(label[k], 0);
      if (label[k] < 0) labels[position[k]] = 0;
    }
  }
}

// Offsets from sizes, where one pass does not tell all labels apart.
__global__ void __launch_bounds__(kScanThreads) offsets_kernel(const __grid_constant__ Work w) {
  __shared__ uint64_t carry;
  const auto head = static_cast<int>(blockIdx.x / w.subsets), m = static_cast<int>(blockIdx.x % w.subsets);
  const int32_t* sizes = w.sizes[head] + m * w.clusters;
  int64_t* offsets = w.offsets[head] + m * (w.clusters + 1);
  uint64_t before = 0;
  for (int64_t c0 = 0; c0 < w.clusters; c0 += kScanThreads) {
    const int64_t c = c0 + threadIdx.x;
    const uint64_t up_to = before + block_scan<kScanThreads>(c < w.clusters ? static_cast<uint64_t>(sizes[c]) : 0);
    if (c < w.clusters) offsets[c + 1] = static_cast<int64_t>(up_to);
    if (threadIdx.x == kScanThreads - 1) carry = up_to;
    __syncthreads();
    before = carry;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[0] = 0;
  __syncthreads();
  list_items(w, head, m);
}
__global__ void clear_sizes_kernel(const __grid_constant__ Work w, int64_t blocks) {
  const int64_t problem = blockIdx.x / blocks, i = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  if (i < w.clusters) w.sizes[problem / w.subsets][problem % w.subsets * w.clusters + i] = 0;
}

// ---- update: means in a fixed order ----

// A warp adds up to kPiece members of one cluster. Every 16-byte chunk of a row belongs to one thread, so the warp works on
// 32 / chunks rows at a time; f32 runs are short, and what follows them is f64.
template <class T>
__global__ void __launch_bounds__(kUpdateWarps * 32, 7) update_kernel(const __grid_constant__ Work w, int64_t blocks) {
  __shared__ __align__(16) float shared[kUpdateWarps][32 * 8];
  const int64_t problem = blockIdx.x / blocks;
  const auto head = static_cast<int>(problem / w.subsets), m = static_cast<int>(problem % w.subsets);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = warp_index();
  const auto number = static_cast<int>(blockIdx.x % blocks * kUpdateWarps + warp);
  if (number >= w.most_items) return;
  const Item item = w.items[head][m * w.most_items + number];  // of any value where there is none
  if (number >= w.item_count[head][m]) return;
  const Subset& subset = w.subset[m];
  int32_t* order = w.order[head] + m * w.count + item.begin;
  const int chunks = subset.chunks, at_once = 32 / chunks;
  const int run = lane / chunks, piece = lane % chunks;
  const uint16_t* points = w.points.row(head, 0) + (subset.chunk >> (4 * piece) & 15) * 8;

  int32_t tokens[kPiece / 32];
#pragma unroll
  for (int j = 0; j < kPiece / 32; ++j) tokens[j] = j * 32 + lane < item.rows ? order[j * 32 + lane] : kBad;
  float sum[8] = {};
  int rows = 0;
#pragma unroll
  for (int j = 0; j < kPiece / 32; ++j) {
    if (j * 32 >= item.rows) break;
    rows += __popc(__ballot_sync(~0u, tokens[j] >= 0));
    if (w.last && tokens[j] < 0 && j * 32 + lane < item.rows) order[j * 32 + lane] = tokens[j] & ~kBad;
    const int here = min(32, item.rows - j * 32);
    constexpr int kAhead = 4;
    for (int r0 = 0; r0 < here; r0 += kAhead * at_once) {
      uint4 bits[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int r = r0 + k * at_once + run;
        const int32_t token = __shfl_sync(~0u, tokens[j], r);
        const auto* row = reinterpret_cast<const uint4*>(points + token * w.points.row_step);
        bits[k] = run < at_once && r < here && token >= 0 ? __ldg(row) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const uint32_t words[4] = {bits[k].x, bits[k].y, bits[k].z, bits[k].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = Pair<T>::floats(words[i]);
          sum[i * 2] += x.x;
          sum[i * 2 + 1] += x.y;
        }
      }
    }
  }
  auto* mine = reinterpret_cast<float4*>(shared[warp] + lane * 8);
  mine[0] = {sum[0], sum[1], sum[2], sum[3]};
  mine[1] = {sum[4], sum[5], sum[6], sum[7]};
  __syncwarp();

  const int width = chunks * 8;
  const int64_t cluster = m * w.clusters + item.cluster;
  float* partial = w.partial[head] + w.most_slots * (subset.offset / w.clusters);
  int32_t* partial_rows = w.partial_rows[head] + m * w.most_slots;
  float* centroid = w.centroids[head] + subset.offset + int64_t{item.cluster} * subset.depth;
  for (int at = lane; at < width; at += 32) {
    const int column = w.column[m * kMostDim + static_cast<int>(subset.chunk >> (at / 8 * 4) & 15) * 8 + at % 8];
    if (column < 0) continue;
    double total = 0;
    for (int i = 0; i < at_once; ++i) total += static_cast<double>(shared[warp][i * width + at]);
    if (item.slot >= 0) {
      partial[int64_t{item.slot} * subset.depth + column] = static_cast<float>(total);
    } else if (rows > 0) {
      centroid[column] = static_cast<float>(total / rows);
    }
  }
  if (item.slot < 0) return;

  // One of several pieces: the last to arrive adds them all, in order.
  const int pieces = (w.sizes[head][cluster] + kPiece - 1) / kPiece;
  if (lane == 0) partial_rows[item.slot] = rows;
  __threadfence();
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = atomicAdd(&w.arrived[head][cluster], 1);
  if (__shfl_sync(~0u, arrived, 0) != pieces - 1) return;
  __threadfence();
  const int64_t first = w.first_slot[head][cluster];
  rows = 0;
  for (int i = lane; i < pieces; i += 32) rows += __ldcg(partial_rows + first + i);
  rows = __reduce_add_sync(~0u, rows);
  for (int k = lane; k < subset.depth && rows > 0; k += 32) {
    double total = 0;
#pragma unroll 4
    for (int i = 0; i < pieces; ++i) total += static_cast<double>(__ldcg(partial + (first + i) * subset.depth + k));
    centroid[k] = static_cast<float>(total / rows);
  }
}

// ---- raster: contiguous blocks of positions ----

// A warp looks at one row; the update follows as after a sort.
template <class T>
__global__ void raster_kernel(const __grid_constant__ Work w, int64_t blocks) {
  const int64_t head = blockIdx.x / blocks;
  const int64_t i = (blockIdx.x % blocks * blockDim.x + threadIdx.x) / 32;
  if (i >= w.count) return;
  const int32_t token = w.rows == nullptr ? static_cast<int32_t>(i) : w.rows[i];
  const auto* row = reinterpret_cast<const T*>(w.points.row(head, token));
  bool bad = false;
  for (int k = static_cast<int>(threadIdx.x) % 32; k < w.dim; k += 32) bad |= !isfinite(to_float(row[k]));
  bad = __any_sync(~0u, bad);
  if (threadIdx.x % 32 != 0) return;
  w.order[head][i] = bad ? token | kBad : token;
  w.token_labels[head][token] = static_cast<int32_t>(((i + 1) * w.clusters - 1) / w.count);
  if (bad && w.status != nullptr) atomicOr(w.status, 1u);
}
__global__ void __launch_bounds__(kScanThreads) raster_items_kernel(const __grid_constant__ Work w) {
  int64_t* offsets = w.offsets[blockIdx.x];
  for (int64_t c = threadIdx.x; c <= w.clusters; c += kScanThreads) offsets[c] = c * w.count / w.clusters;
  __syncthreads();
  list_items(w, static_cast<int>(blockIdx.x), 0);
}

}  // namespace

// ---- host ----

void sort(const Exec& exec, const Work& w) {
  const int64_t problems = w.heads * w.subsets;
  const int64_t stretches = ceil_div(w.seen, kStretch), blocks = ceil_div(stretches, kPlaceWarps);
  const int64_t bins = int64_t{w.bins} * 4;
  const auto pass = [&](const Pass& p) {
    launch(exec, "K-means tally", tally_kernel, problems * stretches, kTallyThreads, bins, w, p, stretches);
    launch(exec, "K-means scan", scan_kernel, problems, kScanThreads, 0, w, p);
    launch(exec, "K-means place", place_kernel, problems * blocks, kPlaceWarps * 32, kPlaceWarps * bins, w, p, blocks);
  };
  if (w.clusters <= kBins) return pass({.shift = 0, .only = true, .from_positions = false, .to_positions = false});
  const int64_t clear_blocks = ceil_div(w.clusters, 256);
  launch(exec, "K-means sizes", clear_sizes_kernel, problems * clear_blocks, 256, 0, w, clear_blocks);
  pass({.shift = 0, .only = false, .from_positions = false, .to_positions = true});
  launch(exec, "K-means offsets", offsets_kernel, problems, kScanThreads, 0, w);
  pass({.shift = 10, .only = false, .from_positions = true, .to_positions = false});
}

void update(const Exec& exec, DType dtype, const Work& w) {
  const int64_t blocks = ceil_div(w.clusters + w.seen / kPiece, kUpdateWarps);
  auto* kernel = dtype == DType::f16 ? update_kernel<__half> : update_kernel<__nv_bfloat16>;
  launch(exec, "K-means update", kernel, w.heads * w.subsets * blocks, kUpdateWarps * 32, 0, w, blocks);
}

void list_blocks(const Exec& exec, DType dtype, const Work& w) {
  const int64_t blocks = ceil_div(w.count * 32, 256);
  auto* kernel = dtype == DType::f16 ? raster_kernel<__half> : raster_kernel<__nv_bfloat16>;
  launch(exec, "raster", kernel, w.heads * blocks, 256, 0, w, blocks);
  launch(exec, "raster items", raster_items_kernel, w.heads, kScanThreads, 0, w);
}

}  // namespace scope::cuda::clustering
