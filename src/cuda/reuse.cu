// reuse on CUDA: a state's labels and codes -> what group and encode would have written.
#include "core/numeric.h"
#include "cuda/launch.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 256;

// A state's label of a token that takes part. One from a broken file stays inside the arrays.
__device__ int32_t inside(int32_t label, int64_t clusters) {
  return label < 0 ? 0 : label >= clusters ? static_cast<int32_t>(clusters) - 1 : label;
}

__device__ int32_t label_of(const ReuseArgs& args, int64_t head, int32_t token) {
  return inside(args.state_labels[head][token], args.groups);
}

__device__ int32_t token_of(const int32_t* rows, int64_t i) { return rows == nullptr ? static_cast<int32_t>(i) : rows[i]; }

// A block per head.
__global__ void __launch_bounds__(kThreads) count_groups(const ReuseArgs args) {
  const int64_t head = blockIdx.x;
  int64_t* offsets = args.offsets[head];
  for (int64_t c = threadIdx.x; c <= args.groups; c += kThreads) offsets[c] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < args.tokens.queries; i += kThreads) {
    auto* count = reinterpret_cast<unsigned long long*>(offsets + label_of(args, head, token_of(args.q_rows, i)) + 1);
    atomicAdd(count, 1ull);
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < args.groups; c += kThreads) args.sizes[head][c] = static_cast<int32_t>(offsets[c + 1]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int64_t c = 0; c < args.groups; ++c) offsets[c + 1] += offsets[c];
}

// A warp per group of a head: its queries, ascending.
__global__ void __launch_bounds__(kThreads) place_queries(const ReuseArgs args) {
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t head = warp / args.groups, group = warp % args.groups;
  if (head >= args.heads) return;
  int64_t at = args.offsets[head][group];
  for (int64_t first = 0; first < args.tokens.queries; first += 32) {
    const int64_t i = first + lane;
    const int32_t token = i < args.tokens.queries ? token_of(args.q_rows, i) : 0;
    const bool mine = i < args.tokens.queries && label_of(args, head, token) == group;
    const uint32_t vote = __ballot_sync(~0u, mine);
    if (mine) args.order[head][at + __popc(vote & ~(~0u << lane))] = token;
    at += __popc(vote);
  }
}

// The codes of one subspace, and which of them have a key.
__global__ void __launch_bounds__(kThreads) gather_codes(const ReuseArgs args, int64_t subspace, int32_t* used) {
  const int64_t keys = args.tokens.keys, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.heads * keys; i += step) {
    const int64_t head = i / keys, key = i % keys;
    const int32_t* codes = args.state_codes[head] + subspace * args.tokens.k_tokens;
    const int32_t code = inside(codes[token_of(args.k_rows, key)], args.codes);
    args.code_labels[head][subspace * keys + key] = code;
    used[head * args.codes + code] = 1;
  }
}

// A block per head.
__global__ void __launch_bounds__(kThreads) count_empty(const ReuseArgs args, int64_t subspace, const int32_t* used) {
  __shared__ int32_t total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  int32_t empty = 0;
  for (int64_t c = threadIdx.x; c < args.codes; c += kThreads) empty += used[blockIdx.x * args.codes + c] == 0 ? 1 : 0;
  atomicAdd(&total, empty);
  __syncthreads();
  if (threadIdx.x == 0) args.empty[blockIdx.x][subspace] = total;
}

}  // namespace

void reuse(const Exec& exec, const ReuseArgs& args) {
  const int64_t tokens = args.tokens.q_tokens, keys = args.tokens.keys;
  copy(exec, args.state_labels.base, args.state_labels.step, args.labels.base, args.labels.step, tokens, args.heads);
  launch(exec, "count_groups", count_groups, args.heads, kThreads, 0, args);
  launch(exec, "place_queries", place_queries, ceil_div(args.heads * args.groups * 32, kThreads), kThreads, 0, args);
  auto* used = static_cast<int32_t*>(args.scratch.data);  // [heads, codes]
  for (int64_t m = 0; m < args.subspaces; ++m) {
    fill(exec, used, 0, 0, args.heads * args.codes, 1);
    const int64_t blocks = std::min<int64_t>(ceil_div(args.heads * keys, kThreads), 8 * exec.device->multiprocessors);
    launch(exec, "gather_codes", gather_codes, blocks, kThreads, 0, args, m, used);
    launch(exec, "count_empty", count_empty, args.heads, kThreads, 0, args, m, static_cast<const int32_t*>(used));
  }
}

}  // namespace scope::cuda
