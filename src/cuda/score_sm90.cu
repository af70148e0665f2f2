// The exact proxy's two passes by wgmma (sm_90a): keys from registers, centroids in two 16-bit parts from shared memory.
#include "core/numeric.h"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/device/select_passes.cuh"

namespace scope::cuda {

namespace {

constexpr int kHistogramThreads = 512, kEmitThreads = 384, kEmitWarps = kEmitThreads / 32;
constexpr int kBlockGroups = 64;                         // groups of one product: N of wgmma
constexpr int kHistogramGroups = 64, kEmitGroups = 320;  // groups whose centroids are in shared memory
constexpr int kHistogramTile = kHistogramThreads / 32 * 16, kEmitTile = kEmitWarps * 32;
constexpr int kPanelRow = 128;  // bytes: 64 channels
constexpr int kAlignment = 1024;

// All products of a head are scaled so that |centroid| is about 1 and depths are `factor` times as large: the centroids'
// low parts then stay in f16's range whatever the logits' scale.
__device__ float depth_factor(const SelectSpace& s, int64_t head) {
  const float factor = kUsedDepths / (2 * kReachMargin * __uint_as_float(*s.radius[head]));
  return factor > 0x1p-60f && factor < 0x1p60f ? __uint_as_float(__float_as_uint(factor) & 0xff800000u) : 1.0f;
}

template <DType kType>
__device__ uint16_t to_bits(float x) {
  if constexpr (kType == DType::f16) return __half_as_ushort(__float2half_rn(x));
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Centroids as panels [high, low][2][groups, 64 channels], in the order of channels in which a thread loads its keys: of
// 32 channels thread q of a quad has 8 q .. 8 q + 7, and step s multiplies 8 q + 4 s + {0, 1 | 2, 3}.
template <DType kType>
__device__ void load_centroids(const ProxyLaunch& p, const SelectSpace& s, int64_t head, int group0, int groups,
                               float factor, char* panels) {
  for (int i = threadIdx.x; i < groups * 64; i += blockDim.x) {
    const int row = i / 64, pair = i % 64;  // two channels
    const int step = pair / 8 % 2, place = pair % 8;
    const int channel = pair / 16 * 32 + place % 4 * 8 + 4 * step + place / 4 * 2;
    const int group = group0 + row;
    uint32_t high = 0, low = 0;
    if (group < p.groups && channel < p.dim) {
      const float2 x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group} * p.dim + channel);
      const float unit = s.unit[head][group] / factor, a = x.x * unit, b = x.y * unit;
      const uint16_t high_a = to_bits<kType>(a), high_b = to_bits<kType>(b);
      high = high_a | uint32_t{high_b} << 16;
      low = to_bits<kType>(a - p.element(high_a)) | uint32_t{to_bits<kType>(b - p.element(high_b))} << 16;
    }
    const int byte = pair % 32 * 4;
    char* at = panels + (pair / 32 * groups + row) * kPanelRow + (((byte >> 4) ^ (row & 7)) << 4 | (byte & 15));
    *reinterpret_cast<uint32_t*>(at) = high;
    *reinterpret_cast<uint32_t*>(at + 2 * groups * kPanelRow) = low;
  }
}

struct Keys {
  uint4 row[2][4];  // keys r and r + 8 of the warp's 16; 32 channels
};

__device__ void load_keys(const ProxyLaunch& p, int64_t head, int64_t first, Keys& keys) {
  const int lane = threadIdx.x % 32, channel = lane % 4 * 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t key = first + lane / 4 + 8 * h;
    const bool valid = key < p.count;
    const uint16_t* row = p.k.row(head, valid ? p.token(static_cast<int32_t>(key)) : 0) + channel;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      keys.row[h][g] = valid && 32 * g + channel < p.dim ? *reinterpret_cast<const uint4*>(row + 32 * g) : uint4{0, 0, 0, 0};
    }
  }
}

// d[4 j + 2 h + i]: key r + 8 h of the warp, group 8 j + 2 q + i of the 64 at `panels`.
template <DType kType>
__device__ void multiply(uint32_t panels, int groups, const Keys& keys, float (&d)[32]) {
  wgmma_begin();
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint4 &top = keys.row[0][step / 2], &bottom = keys.row[1][step / 2];
      const uint32_t a[4] = {step % 2 == 0 ? top.x : top.z, step % 2 == 0 ? bottom.x : bottom.z,
                             step % 2 == 0 ? top.y : top.w, step % 2 == 0 ? bottom.y : bottom.w};
      const uint64_t b = panel_descriptor(panels + (2 * part + step / 4) * groups * kPanelRow + step % 4 * 32, 0);
      if (part == 0 && step == 0) {
        wgmma_rs<kType, false, false>(d, a, b);
      } else {
        wgmma_rs<kType, true, false>(d, a, b);
      }
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
}

// 2^23 + depth, an integer; NaN is the lowest.
__device__ float raised_depth(float offset, float factor, float product) {
  return fmaxf(fminf(fmaf(product, -factor, offset), static_cast<float>(kDepths - 1)), 0.0f) + 8388608.0f;
}

template <DType kType>
__global__ void __launch_bounds__(kHistogramThreads, 1) exact_histogram(ProxyLaunch p, SelectSpace s, Bins bins) {
  extern __shared__ __align__(kAlignment) char shared[];
  constexpr int kPanels = 4 * kHistogramGroups * kPanelRow;
  auto* offset = reinterpret_cast<float*>(shared + kPanels);                 // [64]
  auto* histogram = reinterpret_cast<uint32_t*>(offset + kHistogramGroups);  // [2, bins, 32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const int words = bins.count * kLanes, sections = (p.groups + kHistogramGroups - 1) / kHistogramGroups;
  for (int i = threadIdx.x; i < 2 * words; i += kHistogramThreads) histogram[i] = 0;

  const int64_t tiles = (p.count + kHistogramTile - 1) / kHistogramTile;
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * kHistogramGroups;
    const int used = p.groups - group0 > kLanes ? 2 * words : words;
    auto* to = s.histogram[head] + int64_t{group0 / kLanes} * words;
    const float factor = depth_factor(s, head);
    load_centroids<kType>(p, s, head, group0, kHistogramGroups, factor, shared);
    for (int g = threadIdx.x; g < kHistogramGroups; g += kHistogramThreads) {
      offset[g] = group0 + g < p.groups ? s.high[head][group0 + g] * s.unit[head][group0 + g] : 0.0f;
    }
    fence_async_proxy();
    __syncthreads();
    // The eight threads of a column of the product hold the same groups. In round u thread r takes the (u + r mod 8)th of
    // its eight, so that the 32 lanes count 32 groups.
    float offsets[2][8];
    uint32_t column[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const int m = (u + r) % 8;
      const int group = 8 * (m / 2) + 2 * q + m % 2;
      column[u] = address_of(histogram + group);
      offsets[0][u] = offset[group];
      offsets[1][u] = offset[group + 32];
    }
    Keys keys;
    load_keys(p, head, share.begin * kHistogramTile + warp * 16, keys);
    for (int64_t tile = share.begin, counted = 1; tile < share.end; ++tile, ++counted) {
      const int64_t first = tile * kHistogramTile + warp * 16;
      float d[32];
      multiply<kType>(shared_address(shared), kHistogramGroups, keys, d);
      if (tile + 1 < share.end) load_keys(p, head, first + kHistogramTile, keys);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool inside = first + r + 8 * h < p.count;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[8], y[8], z[8], w[8];
#pragma unroll
          for (int m = 0; m < 8; ++m) x[m] = d[16 * half + 4 * (m / 2) + 2 * h + m % 2];
#pragma unroll
          for (int u = 0; u < 8; ++u) y[u] = (r & 1) != 0 ? x[(u + 1) % 8] : x[u];
#pragma unroll
          for (int u = 0; u < 8; ++u) z[u] = (r & 2) != 0 ? y[(u + 2) % 8] : y[u];
#pragma unroll
          for (int u = 0; u < 8; ++u) w[u] = (r & 4) != 0 ? z[(u + 4) % 8] : z[u];
          if (!inside) continue;
#pragma unroll
          for (int u = 0; u < 8; ++u) {
            const uint32_t depth = __float_as_uint(raised_depth(offsets[half][u], factor, w[u])) & 0x7fffffu;
            count_key(column[u] + half * words * 4, depth, bins.sub_bits);
          }
        }
      }
      if (counted * kHistogramTile + kHistogramTile > kFlushKeys) {
        flush(histogram, used, to);
        counted = 0;
      }
    }
    flush(histogram, used, to);
  }
}

// A warp takes 32 keys, in two products of 16: a product gives half a word of each of 64 rows.
template <DType kType>
__global__ void __launch_bounds__(kEmitThreads, 1)
    exact_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits, int chunk) {
  extern __shared__ __align__(kAlignment) char shared[];
  auto* offset = reinterpret_cast<float*>(shared + 4 * chunk * kPanelRow);  // [chunk] each
  float *limit = offset + chunk, *end = limit + chunk;
  auto* halves = reinterpret_cast<uint32_t*>(end + chunk);  // [kEmitWarps, chunk / 2]
  char* queues = reinterpret_cast<char*>(halves + kEmitWarps * chunk / 2);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const int sections = (p.groups + chunk - 1) / chunk, shift = max(0, bins.sub_bits - (32 - key_bits));
  Queue queue(queues + warp * Queue::kBytes);
  uint32_t* half_words = halves + warp * (chunk / 2);

  const int64_t tiles = (p.count + kEmitTile - 1) / kEmitTile;
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, blocks = (min(chunk, p.groups - group0) + kBlockGroups - 1) / kBlockGroups;
    const float factor = depth_factor(s, head);
    __syncthreads();
    bool any = false;
    for (int g = threadIdx.x; g < chunk; g += kEmitThreads) {
      const int group = group0 + g;
      const bool valid = group < p.groups;
      offset[g] = valid ? s.high[head][group] * s.unit[head][group] : 0.0f;
      limit[g] = (valid ? static_cast<float>(s.limit[head][group]) : 0.0f) + 8388608.0f;
      end[g] = (valid ? static_cast<float>(s.end[head][group]) : 0.0f) + 8388608.0f;
      any = any || limit[g] < end[g];
    }
    if (__syncthreads_or(any) == 0 && !mask.rows) continue;
    load_centroids<kType>(p, s, head, group0, chunk, factor, shared);
    fence_async_proxy();
    __syncthreads();
    Keys keys;
    load_keys(p, head, share.begin * kEmitTile + warp * 32, keys);
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const int64_t first = tile * kEmitTile + warp * 32 + part * 16;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          float d[32];
          multiply<kType>(shared_address(shared) + block * kBlockGroups * kPanelRow, chunk, keys, d);
          if (block + 1 == blocks && (part == 0 || tile + 1 < share.end)) {
            load_keys(p, head, part == 0 ? first + 16 : first - 16 + kEmitTile, keys);
          }
          const bool inside[2] = {first + r < p.count, first + r + 8 < p.count};
          const uint32_t bit[2] = {inside[0] ? 1u << r : 0, inside[1] ? 256u << r : 0};
          uint32_t word[8];  // groups 8 j + 2 q, low half, and 8 j + 2 q + 1, high half: bit = key
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const int at = block * kBlockGroups + 8 * j + 2 * q;
            const auto pair = [&](const float* from) { return *reinterpret_cast<const float2*>(from + at); };
            const float2 offsets = pair(offset), limits = pair(limit), ends = pair(end);
            word[j] = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float begin = i == 0 ? limits.x : limits.y, stop = i == 0 ? ends.x : ends.y;
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const float depth = raised_depth(i == 0 ? offsets.x : offsets.y, factor, d[4 * j + 2 * h + i]);
                if (depth < begin) word[j] |= bit[h] << (16 * i);
                queue.note(depth >= begin && depth < stop && inside[h], __float_as_uint(depth) << 5 | (4 * j + 2 * i + h));
              }
            }
            if (j % 4 == 3) {
              queue.drain(s, head, [&](uint32_t note) {
                const uint32_t in_chunk = block * kBlockGroups + (note >> 2 & 7) * 8 + 2 * q + (note >> 1 & 1);
                const uint32_t fraction = (note >> 5) - (__float_as_uint(limit[in_chunk]) & 0x7ffffffu);
                return uint2{group0 + in_chunk,
                             (fraction >> shift) << key_bits | static_cast<uint32_t>(first + r + 8 * (note & 1))};
              });
            }
          }
          // Lanes that differ in r exchange halves of their words until lane r has the 16 keys of j = r.
#pragma unroll
          for (int width = 4; width > 0; width /= 2) {
            const bool upper = (r & width) != 0;
#pragma unroll
            for (int j = 0; j < width; ++j) {
              const uint32_t sent = upper ? word[j] : word[j + width];
              const uint32_t got = __shfl_xor_sync(~0u, sent, 4 * width);
              word[j] = (upper ? word[j + width] : word[j]) | got;
            }
          }
          if (part == 0) {
            half_words[block * 32 + lane] = word[0];
          } else if (mask.rows && first - 16 < p.count) {
            const uint32_t before = half_words[block * 32 + lane];
            const int group = group0 + block * kBlockGroups + 8 * r + 2 * q;
            if (group < p.groups) put_word(p, mask, head, group, first - 16, (before & 0xffff) | word[0] << 16);
            if (group + 1 < p.groups) {
              put_word(p, mask, head, group + 1, first - 16, before >> 16 | (word[0] & 0xffff0000u));
            }
          }
        }
      }
    }
    queue.flush(s, head);
  }
}

}  // namespace

void exact_histogram_sm90(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins) {
  const int64_t bytes = 4 * kHistogramGroups * kPanelRow + kHistogramGroups * 4 + 2 * int64_t{bins.count} * kLanes * 4;
  const int64_t most = int64_t{p.heads} * ceil_div(p.groups, kHistogramGroups) * ceil_div(p.count, kHistogramTile);
  launch(exec, "exact_histogram", p.f16 ? exact_histogram<DType::f16> : exact_histogram<DType::bf16>,
         blocks_for(exec, 1, most), kHistogramThreads, bytes, p, space, bins);
}

void exact_emit_sm90(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins, const MaskLaunch& mask,
                     int key_bits) {
  const auto chunk = static_cast<int>(std::min<int64_t>(kEmitGroups, round_up(p.groups, kBlockGroups)));
  const int64_t bytes = 4 * chunk * kPanelRow + 3 * chunk * 4 + kEmitWarps * (Queue::kBytes + chunk / 2 * 4);
  const int64_t most = int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kEmitTile);
  launch(exec, "exact_emit", p.f16 ? exact_emit<DType::f16> : exact_emit<DType::bf16>, blocks_for(exec, 1, most),
         kEmitThreads, bytes, p, space, bins, mask, key_bits, chunk);
}

}  // namespace scope::cuda
