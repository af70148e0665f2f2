// Masks up to each row's limit, and the keys of its last bin as candidates.
#include <algorithm>

#include "cuda/select/mask.cuh"
#include "cuda/select/passes.h"
#include "cuda/select/products.cuh"
#include "cuda/select/queue.cuh"
#include "cuda/select/tables.cuh"

namespace scope::cuda {

namespace {

// ---- codes: tables in shared memory ----

constexpr int kMostEmitThreads = 768, kEmitKeys = 256;  // of a warp at a time

// Candidates of a lane's group until there are many: an atomic in memory takes as long as many lookups.
struct LaneList {
  uint32_t address;  // of [kListSize, 32 lanes], at this lane
  uint32_t n = 0;

  // By the whole warp.
  __device__ void flush(const SelectSpace& s, int64_t head, int group) {
    if (n > 0) {
      const uint32_t at = atomicAdd(s.found[head] + group, n);
      uint32_t* list = s.candidates[head] + int64_t{group} * s.most_candidates + at;
      for (uint32_t i = 0; i < n; ++i) list[i] = load_shared(address + i * 32 * 4);
    }
    n = 0;
  }
};

// A warp takes 256 keys at a time, 32 groups: eight words of each lane's row.
template <int kSubspaces>
__global__ void __launch_bounds__(kMostEmitThreads, 1)
    codes_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int subspace_bytes = p.codes * kTableStride;
  auto* kept_words = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + warp * kWordsBytes);
  char* lists = reinterpret_cast<char*>(shared) + warps * kWordsBytes;
  char* table = lists + warps * kListBytes;
  const uint32_t column = address_of(table) + 4 * lane;
  LaneList list{address_of(lists) + (warp * kListSize * 32 + lane) * 4};
  const int blocks = (p.groups + kLanes - 1) / kLanes;
  const int shift = max(0, bins.sub_bits - (32 - key_bits));  // of a fraction that does not fit beside its key

  for (Share share(p.heads, blocks, (p.count + kEmitKeys - 1) / kEmitKeys); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * kLanes, group = group0 + lane;
    const bool valid = group < p.groups;
    // Depths are relative to the limit from here on: the sign bit says that a key is kept, or before the end.
    const uint32_t width = valid ? s.end[head][group] - s.limit[head][group] : 0;
    if (!mask.rows && !__any_sync(~0u, width > 0)) continue;
    __syncthreads();
    load_tables<kSubspaces>(p, s, head, group0, s.limit[head], table);
    __syncthreads();
    for (int64_t tile = share.begin + warp; tile < share.end; tile += warps) {
      const int64_t first = tile * kEmitKeys;
      const int parts = static_cast<int>(min(int64_t{8}, (p.count - first + 31) / 32));
      Codes<kSubspaces> next(p, head, first + lane);
      for (int part = 0; part < parts; ++part) {
        const Codes<kSubspaces> codes = next;
        if (part + 1 < parts) next = Codes<kSubspaces>(p, head, first + (part + 1) * 32 + lane);
        uint32_t kept = 0, before_end = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const uint32_t depth = codes.of_lane(i).lookup(column, subspace_bytes);
          kept = __funnelshift_l(depth, kept, 1);
          before_end = __funnelshift_l(depth - width, before_end, 1);
        }
        const int64_t left = p.count - first - part * 32;
        const uint32_t inside = !valid ? 0 : left >= 32 ? ~0u : (1u << left) - 1;
        kept = __brev(kept) & inside;
        kept_words[lane * kWordStride + part] = kept;
        uint32_t candidates = __brev(before_end) & inside & ~kept;
        while (__any_sync(~0u, candidates != 0)) {
          const int at = __ffs(static_cast<int>(candidates)) - 1;
          const uint32_t depth = codes.of_lane(max(at, 0)).lookup(column, subspace_bytes);
          if (candidates != 0) {
            const auto key = static_cast<uint32_t>(first + part * 32 + at);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(list.address + list.n * 32 * 4),
                         "r"((depth >> shift) << key_bits | key));
            ++list.n;
          }
          candidates &= candidates - 1;
          if (__any_sync(~0u, list.n == kListSize)) list.flush(s, head, group);
        }
      }
      __syncwarp();
      if (mask.direct) {
        for (int i = 0; i < 8; ++i) {  // four rows at a time, eight words of each
          const int row = 4 * i + lane / 8, part = lane % 8;
          if (group0 + row < p.groups && part < parts) {
            mask.rows[head][(group0 + row) * mask.words + first / 32 + part] = kept_words[row * kWordStride + part];
          }
        }
      } else if (mask.rows && valid) {
        for (int part = 0; part < parts; ++part) {
          add_bits(p, mask.rows[head] + group * mask.words, static_cast<int32_t>(first) + part * 32,
                   kept_words[lane * kWordStride + part]);
        }
      }
      __syncwarp();
    }
    list.flush(s, head, group);
  }
}

// ---- any proxy, from memory: tables that do not fit ----

constexpr int kPlainThreads = 256, kPlainTile = kPlainThreads;

__global__ void __launch_bounds__(kPlainThreads)
    plain_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits) {
  const int warp = warp_index(), lane = threadIdx.x % 32, blocks = (p.groups + kLanes - 1) / kLanes;
  const int shift = max(0, bins.sub_bits - (32 - key_bits));
  const int64_t tiles = (p.count + kPlainTile - 1) / kPlainTile;
  for (Share share(p.heads, blocks, tiles); share.next();) {
    const int64_t head = share.head;
    const int group = share.section * kLanes + lane;
    if (group >= p.groups) continue;
    const float high = s.high[head][group], unit = s.unit[head][group];
    const uint32_t limit = s.limit[head][group], end = s.end[head][group];
    uint32_t* list = s.candidates[head] + int64_t{group} * s.most_candidates;
    if (!mask.rows && limit == end) continue;
    for (int64_t first = share.begin * kPlainTile + warp * 32; first < min(share.end * kPlainTile, int64_t{p.count});
         first += kPlainTile) {
      uint32_t kept = 0;
      for (int i = 0; i < min(int64_t{32}, p.count - first); ++i) {
        const auto key = static_cast<int32_t>(first) + i;
        const uint32_t depth = depth_of(high, unit, p.score(static_cast<int32_t>(head), group, key));
        if (depth < limit) kept |= 1u << i;
        if (depth < limit || depth >= end) continue;
        list[atomicAdd(s.found[head] + group, 1u)] = ((depth - limit) >> shift) << key_bits | static_cast<uint32_t>(key);
      }
      if (mask.rows) put_word(p, mask, head, group, first, kept);
    }
  }
}

// ---- exact ----

struct EmitRow {
  float high, unit;
  uint32_t limit, end;
};

template <class T>
__global__ void __launch_bounds__(kExactThreads, 1)
    exact_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, int key_bits, int chunk) {
  extern __shared__ uint4 shared[];
  __shared__ __align__(8) char queues[kExactWarps][Queue::kBytes];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  const int fragment_words = chunk / 16 * ((p.dim + 31) / 32 * 2) * 2 * 32;
  auto* row = reinterpret_cast<EmitRow*>(shared + fragment_words);  // [chunk]
  const int sections = (p.groups + chunk - 1) / chunk, shift = max(0, bins.sub_bits - (32 - key_bits));
  const int64_t tiles = (p.count + kExactTile - 1) / kExactTile;
  Queue queue(queues[warp]);
  for (Share share(p.heads, sections, tiles); share.next();) {
    const int64_t head = share.head;
    const int group0 = share.section * chunk, pairs = (min(chunk, p.groups - group0) + kLanes - 1) / kLanes;
    __syncthreads();
    bool any = false;
    for (int g = threadIdx.x; g < chunk; g += kExactThreads) {
      const int group = group0 + g;
      row[g] = group < p.groups ? EmitRow{s.high[head][group], s.unit[head][group], s.limit[head][group], s.end[head][group]}
                                : EmitRow{0, 0, 0, 0};
      any = any || row[g].limit < row[g].end;
    }
    if (__syncthreads_or(any) == 0 && !mask.rows) continue;
    load_centroids<T>(p, head, group0, chunk, shared);
    __syncthreads();
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      const int64_t first = tile * kExactTile + warp * 32;
      if (first >= p.count) continue;
      KeyTile keys;
      load_keys(p, head, first, keys);
      const uint32_t inside = p.count - first >= 32 ? ~0u : (1u << (p.count - first)) - 1;
      for (int pair = 0; pair < pairs; ++pair) {
        if (!mask.rows) {
          const EmitRow& mine = row[pair * kLanes + lane];
          if (!__any_sync(~0u, mine.limit < mine.end)) continue;
        }
        float sum[2][4][4];
        multiply<T>(shared + pair * (fragment_words / (chunk / kLanes)), keys, p.dim, sum);
        uint32_t kept = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {  // groups 8 c + lane / 4
          const EmitRow at = row[pair * kLanes + 8 * c + lane / 4];
          uint32_t word = 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int bit = 8 * (i / 2) + 2 * quad + i % 2;
            const uint32_t depth = depth_of(at.high, at.unit, sum[c / 2][i / 2][2 * (c % 2) + i % 2]);
            word |= (depth < at.limit ? 1u : 0u) << bit;
            queue.note(depth >= at.limit && depth < at.end && (inside >> bit & 1) != 0, depth | (8 * c + i) << 23);
          }
          word |= __shfl_xor_sync(~0u, word, 1);
          word |= __shfl_xor_sync(~0u, word, 2);
          if (quad == c) kept = word & inside;
          if (c % 2 == 1) {
            queue.drain(s, head, [&](uint32_t note) {
              const int c = static_cast<int>(note >> 26), i = static_cast<int>(note >> 23 & 7);
              const int in_pair = 8 * c + lane / 4, bit = 8 * (i / 2) + 2 * quad + i % 2;
              const uint32_t fraction = (note & 0x7fffff) - row[pair * kLanes + in_pair].limit;
              return uint2{static_cast<uint32_t>(group0 + pair * kLanes + in_pair),
                           (fraction >> shift) << key_bits | static_cast<uint32_t>(first + bit)};
            });
          }
        }
        const int group = group0 + pair * kLanes + 8 * quad + lane / 4;
        if (mask.rows && group < p.groups) put_word(p, mask, head, group, first, kept);
      }
    }
    queue.flush(s, head);
  }
}

}  // namespace

void emit_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins, const MaskLaunch& mask) {
  const int64_t lane_blocks = int64_t{p.heads} * ceil_div(p.groups, kLanes);
  const int key_bits = index_bits(p.count);
  if (p.exact) {
    const auto bytes = [&](int64_t chunk) { return fragment_bytes(p, chunk) + chunk * int64_t{sizeof(EmitRow)}; };
    const int64_t queues = kExactWarps * Queue::kBytes;
    int chunk = static_cast<int>(std::min<int64_t>(kEmitGroups, round_up(p.groups, kLanes)));
    while (bytes(chunk) + queues > exec.device->shared_bytes) chunk -= kLanes;
    const int64_t blocks = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, kExactTile));
    const auto kernel = p.f16 ? exact_emit<__half> : exact_emit<__nv_bfloat16>;
    launch(exec, "exact_emit", kernel, blocks, kExactThreads, bytes(chunk), p, space, bins, mask, key_bits, chunk);
  } else if (tables_fit(exec, p, bins)) {
    const int64_t blocks = blocks_for(exec, 1, lane_blocks * ceil_div(p.count, kEmitKeys));
    const int64_t left = exec.device->shared_bytes - table_bytes(p), warp_bytes = kWordsBytes + kListBytes;
    const auto warps = static_cast<int>(std::min<int64_t>(kMostEmitThreads / 32, left / warp_bytes));
    with_subspaces(p.subspaces, [&](auto n) {
      launch(exec, "codes_emit", codes_emit<n()>, blocks, 32 * warps, warps * warp_bytes + table_bytes(p), p, space, bins,
             mask, key_bits);
    });
  } else {
    const int64_t blocks = blocks_for(exec, 8, lane_blocks * ceil_div(p.count, kPlainTile));
    launch(exec, "plain_emit", plain_emit, blocks, kPlainThreads, 0, p, space, bins, mask, key_bits);
  }
}

}  // namespace scope::cuda
