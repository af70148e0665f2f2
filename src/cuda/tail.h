// The first-order tail on CUDA, between its kernels and what calls them.
#pragma once

#include "cuda/proxy.h"

namespace scope::cuda {

inline constexpr int kTailParts = 8;  // of the keys; a constant, so that the sums do not depend on the chunk

struct TailLaunch {
  HeadRows<const uint16_t> v;
  PerHead<float> k, value, bias;
  PerHead<const int32_t> sizes;
  PerHead<float> parts;  // scratch [groups, kTailParts, 2 + 2 dim]
};

inline int64_t tail_parts_size(int64_t groups, int64_t dim) { return groups * kTailParts * (2 + 2 * dim); }
void tail_pass(const Exec& exec, const ProxyLaunch& proxy, const MaskLaunch& mask, const TailLaunch& tail);

}  // namespace scope::cuda
