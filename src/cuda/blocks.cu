// Means and self-similarity of runs of consecutive tokens, and the codebooks that are made of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/numeric.h"
#include "cuda/blocks.h"
#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "stages/choices.h"

namespace scope::cuda {

namespace {

constexpr int kMostDim = 128, kThreads = 128;
constexpr int kEach = 8;                                             // channels of a thread: 16 bytes
constexpr int kLanes = kMostDim / kEach, kRows = kThreads / kLanes;  // threads of a row, rows at a time
constexpr int kAhead = 4;                                            // rows that a thread reads before it uses the first
static_assert(kThreads == kMostDim && kLanes == 16);

// A block of threads for each run of each head.
struct RunsLaunch {
  HeadRows<const uint16_t> x;
  const int32_t* rows;  // null: 0, 1, …
  int64_t count, block, runs;
  int dim;
  PerHead<const float> centre;  // [dim] subtracted from every row; null: nothing
  // Each of these may be null.
  PerHead<float> means;         // [runs, dim] of x itself, over the rows that are finite; 0 where none is
  PerHead<int32_t> finite;      // [runs] how many those are
  PerHead<float> similarity;    // [runs]
  PerHead<int32_t> order;       // [count]
  PerHead<int32_t> labels;      // by token
  PerHead<int32_t> run_labels;  // [copies, count] by position
  int copies;
  PerHead<int32_t> sizes;    // [runs]
  PerHead<int64_t> offsets;  // [runs + 1]
  uint32_t* status;

  __device__ int32_t token(int64_t i) const { return rows == nullptr ? static_cast<int32_t>(i) : rows[i]; }
};

template <class T>
__device__ float2 to_floats(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(bits));
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// What says where the tokens of a run are.
__device__ void list_run(const RunsLaunch& a, int64_t head, int64_t run, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    if (a.order) {
      const int32_t token = a.token(i);
      a.order[head][i] = token;
      a.labels[head][token] = static_cast<int32_t>(run);
    }
    for (int m = 0; m < a.copies; ++m) a.run_labels[head][m * a.count + i] = static_cast<int32_t>(run);
  }
  if (!a.sizes || threadIdx.x != 0) return;
  a.sizes[head][run] = static_cast<int32_t>(end - begin);
  a.offsets[head][run] = begin;
  if (run == a.runs - 1) a.offsets[head][a.runs] = end;
}

// The mean of a Gram matrix of unit vectors is the square of the length of their mean. A row whose length is below 1e-15
// counts as zero: it has no direction.
template <class T>
__global__ void __launch_bounds__(kThreads, 5) runs_kernel(const RunsLaunch a) {
  __shared__ float sums[kRows][kMostDim], units[kRows][kMostDim];  // [.., k x kLanes + lane]: channel lane x kEach + k
  __shared__ int finite_rows[kRows];
  __shared__ float squares[kThreads / 32];
  const int64_t head = blockIdx.x / a.runs, run = blockIdx.x % a.runs;
  const int64_t begin = run * a.block, end = min(begin + a.block, a.count);
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes, channel = lane * kEach;
  const bool inside = channel < a.dim;
  list_run(a, head, run, begin, end);

  float centre[kEach] = {};
  for (int k = 0; k < kEach && inside && a.centre; ++k) centre[k] = a.centre[head][channel + k];
  double sum[kEach] = {}, unit[kEach] = {};
  int finite = 0;
  for (int64_t first = begin; first < end; first += kAhead * kRows) {
    uint4 bits[kAhead];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      const int64_t i = first + r * kRows + row;
      bits[r] = {0, 0, 0, 0};
      if (i < end && inside) bits[r] = *reinterpret_cast<const uint4*>(a.x.row(head, a.token(i)) + channel);
    }
    float few_sum[kEach] = {}, few_unit[kEach] = {};  // of so few rows, f32 is enough
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      const uint32_t pairs[kEach / 2] = {bits[r].x, bits[r].y, bits[r].z, bits[r].w};
      float x[kEach], square = 0;
#pragma unroll
      for (int k = 0; k < kEach; k += 2) {
        const float2 two = to_floats<T>(pairs[k / 2]);
        x[k] = two.x;
        x[k + 1] = two.y;
        square = fmaf(two.x - centre[k], two.x - centre[k], square);
        square = fmaf(two.y - centre[k + 1], two.y - centre[k + 1], square);
      }
      square = lanes_sum<kLanes>(square);
      const bool listed = first + r * kRows + row < end, good = listed && square < INFINITY;
      const float scale = square > 1e-30f && good ? rsqrtf(square) : listed ? NAN : 0.0f;
      finite += good ? 1 : 0;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        few_sum[k] += good ? x[k] : 0.0f;
        few_unit[k] = fmaf(x[k] - centre[k], scale, few_unit[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      sum[k] += static_cast<double>(few_sum[k]);
      unit[k] += static_cast<double>(few_unit[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    sums[row][k * kLanes + lane] = static_cast<float>(sum[k]);
    units[row][k * kLanes + lane] = static_cast<float>(unit[k]);
  }
  if (lane == 0) finite_rows[row] = finite;
  __syncthreads();

  double total = 0, direction = 0;
  finite = 0;
  for (int r = 0; r < kRows; ++r) {
    total += static_cast<double>(sums[r][threadIdx.x]);
    direction += static_cast<double>(units[r][threadIdx.x]);
    finite += finite_rows[r];
  }
  const int mine = lane * kEach + row;  // the channel that this thread has added up
  if (a.means && mine < a.dim) {
    a.means[head][run * a.dim + mine] = finite > 0 ? static_cast<float>(total) / static_cast<float>(finite) : 0.0f;
  }
  if (threadIdx.x == 0) {
    if (a.finite) a.finite[head][run] = finite;
    if (a.status != nullptr && finite < end - begin) atomicOr(a.status, 1u);
  }
  if (!a.similarity) return;
  const float part = static_cast<float>(direction) / static_cast<float>(a.block);
  const float square = lanes_sum<32>(mine < a.dim ? part * part : 0.0f);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float all = 0;
  for (const float x : squares) all += x;
  a.similarity[head][run] = end - begin < a.block ? NAN : all;
}

// Where channel c of code r lies among the codebooks: base[c] x codes + r x depth[c] + column[c].
struct Places {
  uint8_t base[kMostDim], depth[kMostDim], column[kMostDim];
};

constexpr int kCentreParts = 8;

// The mean of all keys of a head, or 0, and the codebooks: the means of its blocks less it.
__global__ void __launch_bounds__(kCentreParts* kMostDim)
    centre_kernel(bool centred, int64_t codes, int dim, PerHead<const float> means, PerHead<const int32_t> finite,
                  PerHead<float> centres, PerHead<float> codebooks, const __grid_constant__ Places places) {
  __shared__ double sums[kCentreParts][kMostDim];
  __shared__ int32_t rows[kCentreParts];
  const int64_t head = blockIdx.x;
  const int k = threadIdx.x % kMostDim, part = threadIdx.x / kMostDim;
  double sum = 0;
  int32_t count = 0;
  for (int64_t r = part; r < codes; r += kCentreParts) {
    const int32_t n = finite[head][r];
    count += n;
    if (k < dim) sum += static_cast<double>(n) * static_cast<double>(means[head][r * dim + k]);
  }
  sums[part][k] = sum;
  if (k == 0) rows[part] = count;
  __syncthreads();
  sum = 0;
  count = 0;
  for (int i = 0; i < kCentreParts; ++i) {
    sum += sums[i][k];
    count += rows[i];
  }
  if (k >= dim) return;
  const auto centre = static_cast<float>(centred && count > 0 ? sum / static_cast<double>(count) : 0.0);
  if (part == 0) centres[head][k] = centre;
  float* codebook = codebooks[head] + places.base[k] * codes + places.column[k];
  for (int64_t r = part; r < codes; r += kCentreParts) codebook[r * places.depth[k]] = means[head][r * dim + k] - centre;
}

void launch_runs(const Exec& exec, DType dtype, int64_t heads, const RunsLaunch& a) {
  require(a.dim <= kMostDim && a.dim % 8 == 0, Status::unsupported,
          "blocks on CUDA take head dimensions up to 128, multiples of 8");
  auto* kernel = dtype == DType::f16 ? runs_kernel<__half> : runs_kernel<__nv_bfloat16>;
  launch(exec, "blocks", kernel, heads * a.runs, kThreads, 0, a);
}

struct EncodeLayout {
  PerHead<float> means;     // [codes, dim]
  PerHead<int32_t> finite;  // [codes]
  PerHead<float> centre;    // [dim]
  int64_t bytes;            // per head

  EncodeLayout(Arena arena, int64_t dim, int64_t codes) {
    means.base = arena.take<float>(codes * dim);
    finite.base = arena.take<int32_t>(codes);
    centre.base = arena.take<float>(dim);
    bytes = round_up(arena.used(), Arena::kAlignment);
    means.step = finite.step = centre.step = bytes / 4;
  }
};

}  // namespace

void group_blocks(const Exec& exec, const GroupArgs& args) {
  const int64_t n = args.heads;
  RunsLaunch a{};
  a.x = head_rows(args.q);
  a.rows = args.rows;
  a.count = args.count;
  a.block = args.block;
  a.runs = args.groups;
  a.dim = static_cast<int>(args.q.dim);
  a.means = args.centroids;
  a.similarity = args.similarity;
  a.order = args.order;
  a.labels = args.labels;
  a.sizes = args.sizes;
  a.offsets = args.offsets;
  a.status = args.status;
  if (args.rows != nullptr || args.count < args.q.tokens) {  // tokens outside `rows` have label -1
    const auto bytes = static_cast<size_t>(args.q.tokens) * sizeof(int32_t);
    const size_t pitch = n == 1 ? bytes : static_cast<size_t>(a.labels.step) * sizeof(int32_t);
    check(cudaMemset2DAsync(a.labels.base, pitch, 0xff, bytes, static_cast<size_t>(n), stream(exec)), "clear labels");
  }
  launch_runs(exec, args.q.dtype, n, a);
}

int64_t encode_blocks_scratch(int64_t dim, int64_t codes) { return EncodeLayout(Arena(), dim, codes).bytes; }

void encode_blocks(const Exec& exec, const EncodeArgs& args) {
  const int64_t n = args.heads;
  const EncodeLayout at(Arena(args.scratch.data, args.scratch.bytes), args.k.dim, args.codes);
  require(at.bytes * n <= args.scratch.bytes, Status::internal, "workspace layout exceeds its plan");
  RunsLaunch a{};
  a.x = head_rows(args.k);
  a.rows = args.rows;
  a.count = args.count;
  a.block = args.block;
  a.runs = args.codes;
  a.dim = static_cast<int>(args.k.dim);
  a.means = at.means;
  a.finite = at.finite;
  a.run_labels = args.labels;
  a.copies = static_cast<int>(args.partition->size());
  a.status = args.status;
  launch_runs(exec, args.k.dtype, n, a);

  Places places{};
  uint8_t base = 0;
  for (const auto& channels : *args.partition) {
    for (size_t i = 0; i < channels.size(); ++i) {
      const auto channel = static_cast<size_t>(channels[i]);
      places.base[channel] = base;
      places.depth[channel] = static_cast<uint8_t>(channels.size());
      places.column[channel] = static_cast<uint8_t>(i);
    }
    base = static_cast<uint8_t>(base + channels.size());
  }
  launch(exec, "blocks: codebooks", centre_kernel, n, kCentreParts * kMostDim, 0, !row(args.encoding).means, args.codes,
         a.dim, PerHead<const float>(at.means), PerHead<const int32_t>(at.finite), at.centre, args.codebooks, places);
  const auto empty = args.empty;
  const size_t empty_bytes = args.partition->size() * sizeof(int64_t);
  check(cudaMemset2DAsync(empty.base, n == 1 ? empty_bytes : static_cast<size_t>(empty.step) * sizeof(int64_t), 0,
                          empty_bytes, static_cast<size_t>(n), stream(exec)),
        "blocks: empty");

  if (!args.similarity) return;
  RunsLaunch again{};  // of what is left of k
  again.x = a.x;
  again.rows = a.rows;
  again.count = a.count;
  again.block = a.block;
  again.runs = a.runs;
  again.dim = a.dim;
  again.centre = at.centre;
  again.similarity = args.similarity;
  launch_runs(exec, args.k.dtype, n, again);
}

}  // namespace scope::cuda
