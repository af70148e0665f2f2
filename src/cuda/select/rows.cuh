// Rows that need more than the fast passes.
#pragma once

#include "cuda/select/space.h"

namespace scope::cuda {

inline constexpr int kPickThreads = 128;

// Calls body(head, group) by the whole block for each of its rows that has a bit of `flags` to do.
template <class Body>
__device__ inline void for_rows(const ProxyLaunch& p, const SelectSpace& s, uint32_t flags, const Body& body) {
  __shared__ int32_t found[kPickThreads], n;
  const int rows = p.heads * p.groups, stride = static_cast<int>(gridDim.x);
  for (int64_t first = blockIdx.x; first < rows; first += int64_t{stride} * kPickThreads) {
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
    const int64_t row = first + int64_t{stride} * threadIdx.x;
    if (threadIdx.x < kPickThreads && row < rows) {
      const int at = static_cast<int>(row);
      if ((s.todo[at / p.groups][at % p.groups] & flags) != 0) found[atomicAdd(&n, 1)] = at;
    }
    __syncthreads();
    for (int i = 0; i < n; ++i) body(found[i] / p.groups, found[i] % p.groups);
    __syncthreads();
  }
}

}  // namespace scope::cuda
