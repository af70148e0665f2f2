// compensate on CUDA: mean values, and errors from one product of centroids and keys on tensor cores.
#include <vector>

#include "core/numeric.h"
#include "cuda/device/ptx_sm80.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/kmeans.h"
#include "cuda/proxy.h"
#include "cuda/stages.h"
#include "stages/compensate.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kGroups = 32, kKeys = 32;  // that a warp multiplies at a time
constexpr int kParts = 3;                // of a centroid, 16 bits each: three bf16 are an f32
constexpr int kWarpClusters = 8;         // of a warp in a launch, or about so many

// A chunk's scratch.
struct Layout {
  Scratch sort;
  PerHead<float2> moments;
  PerHead<double> spread;

  Layout(Arena arena, int64_t heads, int64_t count, int64_t codes, int64_t* bytes = nullptr) {
    sort.bytes = heads * kmeans_scratch(count, codes, false);
    sort.data = arena.take<std::byte>(sort.bytes);
    moments = {arena.take<float2>(heads * count), count};
    spread = {arena.take<double>(heads * codes), codes};
    if (bytes != nullptr) *bytes = arena.used();
  }
};

struct CompensateLaunch {
  HeadRows<const uint16_t> v;
  PerHead<const int32_t> order;    // [count] tokens of the keys by cluster
  PerHead<const int64_t> offsets;  // [codes + 1] where each cluster begins there
  PerHead<float> value, bias, errors;
  // With x = e^(s_ct - s_cj) - 1 a key's term is e^(2 s_cj) |v_t - v_j + x v_t|^2: the mean's distance, which does not
  // depend on the group, and two products by x. Nothing cancels where a cluster's keys are alike.
  PerHead<float2> moments;  // [count] in that order: 2 (v_t - v_j) . v_t and |v_t|^2
  PerHead<double> spread;   // [codes] sum of |v_t - v_j|^2

  // Shuffled, as warp_index is, so that the compiler knows that all lanes have the same.
  __device__ int begin(int64_t head, int64_t cluster) const {
    return __shfl_sync(~0u, static_cast<int>(offsets[head][cluster]), 0);
  }
};

// ---- what may stand for a cluster: a warp for each, a lane for four channels ----

__device__ float4 load_value(const ProxyLaunch& p, const uint16_t* row) {
  const int channel = static_cast<int>(threadIdx.x) % 32 * 4;
  if (channel >= p.dim) return {0, 0, 0, 0};
  const uint2 bits = *reinterpret_cast<const uint2*>(row + channel);
  return {p.element(static_cast<uint16_t>(bits.x)), p.element(static_cast<uint16_t>(bits.x >> 16)),
          p.element(static_cast<uint16_t>(bits.y)), p.element(static_cast<uint16_t>(bits.y >> 16))};
}

__global__ void __launch_bounds__(kThreads) describe_clusters(ProxyLaunch p, CompensateLaunch a) {
  const int64_t number = int64_t{blockIdx.x} * kWarps + warp_index();
  if (number >= int64_t{p.heads} * p.codes) return;
  const int64_t head = number / p.codes, cluster = number % p.codes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = a.begin(head, cluster), end = a.begin(head, cluster + 1);
  const int32_t* order = a.order[head];

  double total[4] = {};
  for (int first = begin; first < end; first += 32) {
    const int n = min(32, end - first);
    const int32_t token = order[first + min(lane, n - 1)];
    float sum[4] = {};
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const float4 x = load_value(p, a.v.row(head, __shfl_sync(~0u, token, i)));
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
    for (int c = 0; c < 4; ++c) total[c] += static_cast<double>(sum[c]);
  }
  const double count = end - begin, share = end > begin ? 1 / count : 0.0;
  const float4 mean = {static_cast<float>(total[0] * share), static_cast<float>(total[1] * share),
                       static_cast<float>(total[2] * share), static_cast<float>(total[3] * share)};
  if (lane * 4 < p.dim) *reinterpret_cast<float4*>(a.value[head] + cluster * p.dim + lane * 4) = mean;
  if (lane == 0) a.bias[head][cluster] = static_cast<float>(log(count));  // -inf without keys
  if (!a.errors) return;

  double spread = 0;
  for (int first = begin; first < end; first += 32) {
    const int n = min(32, end - first);
    const int32_t token = order[first + min(lane, n - 1)];
    float2 mine{0, 0};
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const float4 x = load_value(p, a.v.row(head, __shfl_sync(~0u, token, i)));
      const float4 d = {x.x - mean.x, x.y - mean.y, x.z - mean.z, x.w - mean.w};
      const float apart = lanes_sum<32>(d.x * x.x + d.y * x.y + d.z * x.z + d.w * x.w);
      const float square = lanes_sum<32>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
      spread += static_cast<double>(lanes_sum<32>(d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w));
      if (lane == i) mine = {2 * apart, square};
    }
    if (lane < n) a.moments[head][first + lane] = mine;
  }
  if (lane == 0) a.spread[head][cluster] = spread;
}

// ---- errors ----

// Fragments of kGroups centroids in the order in which lanes read them: [part][16 groups][16 channels][lane]. A thread of a
// quad has eight consecutive channels of a key in one load, which serve two steps; the centroids' channels are dealt out
// alike. A part is what the ones before it leave.
template <class T>
__device__ void split_centroids(const ProxyLaunch& p, int64_t head, int group0, uint4* fragments) {
  const int steps = (p.dim + 31) / 32 * 2;
  for (int i = static_cast<int>(threadIdx.x); i < kGroups / 16 * steps * 32; i += kThreads) {
    const int lane = i % 32, step = i / 32 % steps, tile = i / 32 / steps;
    const int channel = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
    uint32_t bits[kParts][4];
#pragma unroll
    for (int place = 0; place < 4; ++place) {  // rows +0, +8, +0, +8; channels +0, +0, +2, +2
      const int group = group0 + tile * 16 + lane / 4 + place % 2 * 8, at = channel + place / 2 * 2;
      float2 x{0, 0};
      if (group < p.groups && at < p.dim) {
        x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group} * p.dim + at);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        bits[part][place] = pack<T>(x.x, x.y);
        x.x -= p.element(static_cast<uint16_t>(bits[part][place]));
        x.y -= p.element(static_cast<uint16_t>(bits[part][place] >> 16));
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      fragments[part * (kGroups / 16) * steps * 32 + i] = {bits[part][0], bits[part][1], bits[part][2], bits[part][3]};
    }
  }
}

// product[t][n][e] is group 16 t + 8 (e / 2) + lane / 4 and key 8 n + 2 (lane % 4) + e % 2. Small parts first, so that
// little is rounded at the size of the whole.
template <class T>
__device__ void multiply(const uint4* fragments, const uint4 (&keys)[4][4], int dim, float (&product)[2][4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, steps = (dim + 31) / 32 * 2;
#pragma unroll
  for (int i = 0; i < 32; ++i) product[i / 16][i / 4 % 4][i % 4] = 0;
#pragma unroll
  for (int part = kParts - 1; part >= 0; --part) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      if (32 * g >= dim) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint4 f = fragments[((part * 2 + t) * steps + 2 * g + half) * 32 + lane];
          const uint32_t a[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const uint4& k = keys[n][g];
            mma_16x8x16<T>(product[t][n], a, half == 0 ? k.x : k.z, half == 0 ? k.y : k.w);
          }
        }
      }
    }
  }
}

// The sum over a cluster's keys again, one after the other and in f64, for what f32 does not hold; a quarter of it for each
// lane of a quad.
__device__ double plain_sum(const ProxyLaunch& p, const CompensateLaunch& a, int64_t head, int group, int begin, int end,
                            float centre) {
  double sum = 0;
  for (int t = begin + static_cast<int>(threadIdx.x) % 4; t < end; t += 4) {
    const float2 moment = a.moments[head][t];
    const float logit = p.product(static_cast<int32_t>(head), group, a.order[head][t]);
    const double x = expm1(fmin(static_cast<double>(logit - centre), 350.0));
    sum += x * (static_cast<double>(moment.x) + x * static_cast<double>(moment.y));
  }
  return sum;
}

// A block has kGroups groups and one of `parts` of the clusters; each warp takes whole clusters, so that no sum depends on
// how they are dealt out.
template <class T>
__global__ void __launch_bounds__(kThreads, 3) cluster_errors(ProxyLaunch p, CompensateLaunch a, int tiles, int parts) {
  extern __shared__ uint4 fragments[];
  int64_t block = blockIdx.x;
  const auto part = static_cast<int>(block % parts);
  block /= parts;
  const int group0 = static_cast<int>(block % tiles) * kGroups;
  const int64_t head = block / tiles;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  split_centroids<T>(p, head, group0, fragments);
  __syncthreads();

  const int32_t* order = a.order[head];
  const float2* moments = a.moments[head];
  const auto group_of = [&](int r) { return group0 + r * 8 + lane / 4; };  // a thread's four rows
  for (int cluster = part * kWarps + warp_index(); cluster < p.codes; cluster += parts * kWarps) {
    const int begin = a.begin(head, cluster), end = a.begin(head, cluster + 1);
    float centre[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      centre[r] = group_of(r) < p.groups ? p.tables[head][int64_t{group_of(r)} * p.codes + cluster] : 0;
    }
    double total[4] = {};
    for (int first = begin; first < end; first += kKeys) {
      uint4 keys[4][4];  // [8 keys][32 channels]
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int t = first + 8 * n + lane / 4;
        const uint16_t* row = p.k.row(head, order[min(t, end - 1)]) + lane % 4 * 8;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          keys[n][g] =
              t < end && 32 * g + lane % 4 * 8 < p.dim ? *reinterpret_cast<const uint4*>(row + 32 * g) : uint4{0, 0, 0, 0};
        }
      }
      float product[2][4][4];
      multiply<T>(fragments, keys, p.dim, product);
      float2 moment[8];  // of a thread's eight keys; nothing beyond the last one
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int t = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
        moment[i] = t < end ? moments[t] : float2{0, 0};
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float exponent = fmaf(product[r / 2][i / 2][r % 2 * 2 + i % 2], p.scale, -centre[r]) * 1.44269504f;
          const float x = exp2_fast(fminf(exponent, 126.0f)) - 1;
          sum = fmaf(x, fmaf(x, moment[i].y, moment[i].x), sum);
        }
        total[r] += static_cast<double>(sum);
      }
    }
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
      finite &= isfinite(total[r]);
    }
    if (!__all_sync(~0u, finite)) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const bool again = !isfinite(total[r]) && group_of(r) < p.groups;
        double sum = again ? plain_sum(p, a, head, group_of(r), begin, end, centre[r]) : 0.0;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (again) total[r] = sum;
      }
    }
    // The four lanes of a quad know all four rows, and each writes one.
    double sum = total[0];
    float at = centre[0];
#pragma unroll
    for (int r = 1; r < 4; ++r) {
      if (lane % 4 == r) sum = total[r], at = centre[r];
    }
    const int group = group_of(lane % 4);
    if (group < p.groups) {
      sum += a.spread[head][cluster];
      a.errors[head][int64_t{group} * p.codes + cluster] =
          sum > 0 ? 2 * at + static_cast<float>(log(sum / (end - begin))) : -INFINITY;
    }
  }
}

}  // namespace

int64_t compensate_scratch(const Exec&, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), sizes.heads, sizes.k_tokens, sizes.codes, &bytes);
  return bytes;
}

void compensate(const Exec& exec, const CompensateArgs& args) {
  ProxyLaunch p = proxy_launch(args.proxy, args.heads);
  p.dim = static_cast<int32_t>(args.v.dim);
  p.f16 = args.v.dtype == DType::f16;
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), args.heads, p.count, p.codes);
  std::vector<int32_t> channels(static_cast<size_t>(p.dim));
  for (size_t i = 0; i < channels.size(); ++i) channels[i] = static_cast<int32_t>(i);
  KMeansBatch batch;
  batch.heads = p.heads;
  batch.subsets = 1;
  batch.dim = p.dim;
  batch.rows = p.rows;
  batch.count = p.count;
  batch.clusters = p.codes;
  batch.channels[0] = channels;
  batch.labels = {const_cast<int32_t*>(p.labels.base), p.labels.step};  // which the sort reads alone
  batch.scratch = at.sort;
  const Sorted sorted = sort_by_label(exec, batch);
  const CompensateLaunch a{head_rows(args.v), sorted.order, sorted.offsets, args.value,
                           args.bias,         args.errors,  at.moments,     at.spread};
  launch(exec, "describe_clusters", describe_clusters, ceil_div(int64_t{p.heads} * p.codes, kWarps), kThreads, 0, p, a);
  if (!args.errors) return;
  const int64_t tiles = ceil_div(p.groups, kGroups), parts = ceil_div(p.codes, kWarps * kWarpClusters);
  const int64_t bytes = int64_t{kParts} * kGroups * round_up(p.dim, 32) * 2;
  auto* kernel = p.f16 ? cluster_errors<__half> : cluster_errors<__nv_bfloat16>;
  launch(exec, "cluster_errors", kernel, p.heads * tiles * parts, kThreads, bytes, p, a, static_cast<int>(tiles),
         static_cast<int>(parts));
}

}  // namespace scope::cuda
