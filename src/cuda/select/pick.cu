// The last bin, key by key.
#include "cuda/device/reduce.cuh"
#include "cuda/select/passes.h"
#include "cuda/select/rows.cuh"

namespace scope::cuda {

namespace {

// Candidates are distinct integers, ordered by depth and then by key: the `need` smallest are kept. Byte by byte from the
// top, until what is left of a byte's candidates is kept as a whole.
__global__ void __launch_bounds__(kPickThreads)
    pick_candidates(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits) {
  extern __shared__ uint32_t list[];  // [most_candidates]
  __shared__ uint32_t counts[256];
  __shared__ uint32_t chosen, before, inside;
  const int bits = min(32, key_bits + bins.sub_bits), lane = threadIdx.x % 32;
  for (int64_t at = blockIdx.x; at < int64_t{p.heads} * p.groups; at += gridDim.x) {
    const int64_t head = at / p.groups, group = at % p.groups;
    auto need = static_cast<uint32_t>(s.need[head][group]);
    if (need == 0) continue;
    const auto n = static_cast<int>(s.found[head][group]);
    const uint32_t* from = s.candidates[head] + group * s.most_candidates;
    for (int i = threadIdx.x; i < n; i += kPickThreads) list[i] = from[i];
    uint32_t last = 0;  // the largest that is kept; known from bit `known` on
    for (int known = bits, shift = bits;;) {
      known = shift;
      shift = max(0, known - 8);
      for (int i = threadIdx.x; i < 256; i += kPickThreads) counts[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += kPickThreads) {
        if (uint64_t{list[i] ^ last} >> known == 0)
          atomicAdd(counts + (list[i] >> shift & ((1u << (known - shift)) - 1)), 1u);
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        uint32_t mine = 0;
        for (int i = 0; i < 8; ++i) mine += counts[lane * 8 + i];
        const uint32_t sum = warp_scan(mine);
        if (sum >= need && sum - mine < need) {  // one lane's
          uint32_t up_to = sum - mine;
          int digit = lane * 8;
          while (up_to + counts[digit] < need) up_to += counts[digit++];
          chosen = static_cast<uint32_t>(digit);
          before = up_to;
          inside = counts[digit];
        }
      }
      __syncthreads();
      last |= chosen << shift;
      need -= before;
      if (need == inside || shift == 0) {
        last |= (1u << shift) - 1;
        break;
      }
    }
    uint32_t* row = mask.rows[head] + group * mask.words;
    for (int i = threadIdx.x; i < n; i += kPickThreads) {
      if (list[i] > last) continue;
      const int32_t token = p.token(static_cast<int32_t>(list[i] & ((1u << key_bits) - 1)));
      atomicOr(row + token / 32, 1u << (token % 32));
    }
    __syncthreads();
  }
}

}  // namespace

void pick_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& s, Bins bins, const MaskLaunch& mask) {
  launch(exec, "pick_candidates", pick_candidates, blocks_for(exec, 16, int64_t{p.heads} * p.groups), kPickThreads,
         int64_t{s.most_candidates} * 4, p, s, bins, mask, index_bits(p.count));
}

}  // namespace scope::cuda
