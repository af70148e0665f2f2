// The centroid tail on CUDA: which codes each group drops.
#include "core/numeric.h"
#include "cuda/proxy.h"
#include "cuda/tail.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 256;

struct DroppedLaunch {
  PerHead<int32_t> a_key;        // [codes] the last key of each code, as a token; -1: it has none
  PerHead<const int32_t> sizes;  // [groups]
  PerHead<const uint32_t> kept;  // [groups, kept_words]
  PerHead<uint32_t> mask;        // [rows, words] out
  int64_t kept_words, rows, words;
};

__global__ void __launch_bounds__(kThreads) find_keys(ProxyLaunch p, DroppedLaunch a) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < int64_t{p.heads} * p.count; i += step) {
    const int64_t head = i / p.count, key = i % p.count;
    atomicMax(a.a_key[head] + p.labels[head][key], p.token(static_cast<int32_t>(key)));
  }
}

// A block per row of a head, a lane for each code.
__global__ void __launch_bounds__(kThreads) mask_dropped(ProxyLaunch p, DroppedLaunch a) {
  const int64_t head = blockIdx.x / a.rows, row = blockIdx.x % a.rows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool sees = row < p.groups && a.sizes[head][row] > 0;
  for (int64_t word = warp_index(); word < a.words; word += kThreads / 32) {
    const int64_t code = word * 32 + lane;
    const int32_t key = sees && code < p.codes ? a.a_key[head][code] : -1;
    const bool dropped = key >= 0 && !mask_bit(a.kept[head] + row * a.kept_words, key);
    const uint32_t bits = __ballot_sync(~0u, dropped);
    if (lane == 0) a.mask[head][row * a.words + word] = bits;
  }
}

}  // namespace

int64_t mask_dropped_codes_scratch(const Sizes& sizes) { return sizes.heads * sizes.codes * 4; }

void mask_dropped_codes(const Exec& exec, const TailArgs& args) {
  const ProxyLaunch p = proxy_launch(args.proxy, args.heads);
  const int64_t bytes = args.heads * p.codes * 4;
  require(bytes <= args.scratch.bytes, Status::internal, "tail: scratch is smaller than its plan");
  const DroppedLaunch a{{static_cast<int32_t*>(args.scratch.data), p.codes},
                        args.sizes,
                        args.kept,
                        args.mask,
                        mask_words(args.proxy.k.tokens),
                        args.rows,
                        mask_words(p.codes)};
  check(cudaMemsetAsync(args.scratch.data, 0xff, static_cast<size_t>(bytes), stream(exec)), "tail: keys of codes");
  launch(exec, "find_keys", find_keys, blocks_for(exec, 8, ceil_div(args.heads * p.count, kThreads)), kThreads, 0, p, a);
  launch(exec, "mask_dropped", mask_dropped, args.heads * args.rows, kThreads, 0, p, a);
}

}  // namespace scope::cuda
