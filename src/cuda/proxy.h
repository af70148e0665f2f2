// The proxy and the mask of a chunk of heads, as the kernels of score, select and the tail see them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.h"
#include "stages/score.h"

namespace scope::cuda {

// What logits are computed from.
struct ProxyLaunch {
  bool exact, f16;
  int32_t heads, groups, count, dim, subspaces, codes;
  float scale;
  PerHead<const float> centroids;  // [groups, dim]
  PerHead<const float> tables;     // [groups, subspaces, codes]
  PerHead<const int32_t> labels;   // [subspaces, count]
  HeadRows<const uint16_t> k;
  const int32_t* rows;  // null: 0, 1, …
  int32_t stride = 1;   // above 1: key i is that at place i * stride of `rows`, or where that is null k has only such keys

  __device__ int32_t token(int32_t key) const { return rows == nullptr ? key : rows[int64_t{key} * stride]; }
  __device__ float element(uint16_t bits) const {
    return f16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
  }
  // A centroid's product with the key at a token, in f32, for everything that need not be fast; so the next.
  __device__ float product(int32_t head, int32_t group, int32_t at) const {
    float sum = 0;
    const float* q = centroids[head] + int64_t{group} * dim;
    const uint16_t* x = k.row(head, at);
    for (int i = 0; i < dim; i += 8) {
      const uint4 eight = *reinterpret_cast<const uint4*>(x + i);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
      for (int p = 0; p < 4; ++p) {
        sum = fmaf(q[i + 2 * p], element(static_cast<uint16_t>(pairs[p])), sum);
        sum = fmaf(q[i + 2 * p + 1], element(static_cast<uint16_t>(pairs[p] >> 16)), sum);
      }
    }
    return sum * scale;
  }
  // One logit.
  __device__ float score(int32_t head, int32_t group, int32_t key) const {
    if (exact) return product(head, group, token(key));
    float sum = 0;
    const float* table = tables[head] + int64_t{group} * subspaces * codes;
    for (int m = 0; m < subspaces; ++m) sum += table[m * codes + labels[head][int64_t{m} * count + key]];
    return sum;
  }
};

inline ProxyLaunch proxy_launch(const Proxy& proxy, int64_t heads) {
  require(proxy.kind == ProxyKind::codes || proxy.k.dtype != DType::f32, Status::dtype,
          "scores on CUDA are of f16 or bf16 keys");
  ProxyLaunch p{};
  p.exact = proxy.kind == ProxyKind::exact;
  p.f16 = proxy.k.dtype == DType::f16;
  p.heads = static_cast<int32_t>(heads);
  p.groups = static_cast<int32_t>(proxy.groups);
  p.count = static_cast<int32_t>(proxy.count);
  p.dim = static_cast<int32_t>(proxy.k.dim);
  p.subspaces = static_cast<int32_t>(proxy.subspaces);
  p.codes = static_cast<int32_t>(proxy.codes);
  p.scale = proxy.scale;
  p.centroids = proxy.centroids;
  p.tables = proxy.tables;
  p.labels = proxy.labels;
  p.k = head_rows(proxy.k);
  p.rows = proxy.rows;
  return p;
}

struct MaskLaunch {
  PerHead<uint32_t> rows;  // [groups, words]; null: only candidates are wanted
  int64_t words;
  bool direct;                   // key j is token j and there are no others: words are stored; else bits are added to zeros
  PerHead<int32_t> counts = {};  // [groups] of kept keys, to be added to; null: known before
};

}  // namespace scope::cuda
