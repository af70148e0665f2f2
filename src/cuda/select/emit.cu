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
  const int shift = max(0, bins.sub_bits - (32 - key_bits));  // of a fraction that does not fit beside its key

  for (Share share(p.heads, RowSet{p.groups}, kLanes, (p.count + kEmitKeys - 1) / kEmitKeys); share.next();) {
    const int head = share.head;
    const int group0 = share.section * kLanes, group = group0 + lane;
    const bool valid = group < p.groups;
    // Depths are relative to the limit from here on: the sign bit says that a key is kept, or before the end.
    const uint32_t width = valid ? s.end[head][group] - s.limit[head][group] : 0;
    if (!mask.rows && !__any_sync(~0u, width > 0)) continue;
    __syncthreads();
    load_tables<kSubspaces>(p, s, head, group0, s.limit[head], table);
    __syncthreads();
    for (int tile = share.begin + warp; tile < share.end; tile += warps) {
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
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int shift = max(0, bins.sub_bits - (32 - key_bits));
  const int64_t tiles = (p.count + kPlainTile - 1) / kPlainTile;
  for (Share share(p.heads, RowSet{p.groups}, kLanes, tiles); share.next();) {
    const int head = share.head;
    const int group = share.section * kLanes + lane;
    if (group >= p.groups) continue;
    const float high = s.high[head][group], unit = s.unit[head][group];
    const uint32_t limit = s.limit[head][group], end = s.end[head][group];
    uint32_t* list = s.candidates[head] + int64_t{group} * s.most_candidates;
    if (!mask.rows && limit == end) continue;
    for (int64_t first = share.begin * kPlainTile + warp * 32;
         first < min(int64_t{share.end} * kPlainTile, int64_t{p.count}); first += kPlainTile) {
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

constexpr int kAgainRows = 64;  // in a section: few, so that heads with more of them are shared by more blocks

// From `kept` up a height is kept, from `end` up it is a candidate.
struct __align__(16) EmitRow {
  Height height;
  float kept, end;
};

// 4 x 4 bytes over the threads of a quad: byte t of thread c becomes byte c of thread t.
__device__ inline uint32_t transposed_in_quad(uint32_t bytes) {
  const bool odd = (threadIdx.x & 1) != 0, second = (threadIdx.x & 2) != 0;
  bytes = __byte_perm(bytes, __shfl_xor_sync(~0u, bytes, 1), odd ? 0x3715 : 0x6240);
  return __byte_perm(bytes, __shfl_xor_sync(~0u, bytes, 2), second ? 0x3276 : 0x5410);
}

// kCounts: there are no candidates, and kept keys are counted.
template <class Products, bool kCounts>
__global__ void __launch_bounds__(Products::kThreads, 1)
    exact_emit(ProxyLaunch p, SelectSpace s, Bins bins, MaskLaunch mask, RowSet rows, int key_bits, int chunk) {
  extern __shared__ uint4 shared[];
  const int warp = warp_index(), lane = threadIdx.x % 32, quad = lane % 4;
  auto* row = reinterpret_cast<EmitRow*>(shared + chunk / kLanes * Products::kPairWords);  // [chunk]
  auto* counts = reinterpret_cast<int32_t*>(row + chunk);  // [chunk], in the place of the queues
  Queue queue(reinterpret_cast<char*>(row + chunk) + warp * Queue::kBytes);
  const int shift = max(0, bins.sub_bits - (32 - key_bits));
  const int tiles = (p.count + Products::kTile - 1) / Products::kTile;
  for (Share share(p.heads, rows, chunk, tiles); share.next();) {
    const int head = share.head;
    const int row0 = share.section * chunk, pairs = (min(chunk, rows.count(head) - row0) + kLanes - 1) / kLanes;
    const auto group_at = [&](int i) { return rows.at(head, row0 + i); };
    __syncthreads();
    for (int i = threadIdx.x; i < chunk; i += Products::kThreads) {
      const int group = group_at(i);
      row[i] = {{0, 0}, 2, 2};
      if (group < 0) continue;
      const uint32_t limit = s.limit[head][group], end = s.end[head][group];
      row[i] = {{s.unit[head][group], s.high[head][group]}, lowest_above(limit), lowest_above(end)};
    }
    for (int i = threadIdx.x; kCounts && i < chunk; i += Products::kThreads) counts[i] = 0;
    Products::load_centroids(p, head, chunk, group_at, shared);
    __syncthreads();
    for (int tile = share.begin; tile < share.end; ++tile) {
      const int first = tile * Products::kTile + warp * 32, left = min(32, p.count - first);
      if (left <= 0) continue;
      typename Products::KeyTile keys;
      Products::load_keys(
          p, head, [&](int i) { return i < left ? first + i : -1; }, keys);
      const uint32_t inside = left == 32 ? ~0u : (1u << left) - 1, mine = (inside >> 8 * quad & 255) * 0x01010101u;
      for (int pair = 0; pair < pairs; ++pair) {
        float sum[2][4][4];
        Products::multiply(shared + pair * Products::kPairWords, keys, sum);
        // Sign bits say what is below: bit 8 c + i is of group 8 c + lane / 4 and key 8 quad + i.
        uint32_t dropped = 0, past_end = 0;
#pragma unroll
        for (int c = 3; c >= 0; --c) {
          const EmitRow at = row[pair * kLanes + 8 * c + lane / 4];
#pragma unroll
          for (int i = 7; i >= 0; --i) {
            float& x = sum[c / 2][i / 2][2 * (c % 2) + i % 2];
            x = at.height.of(x);
            dropped = __funnelshift_l(__float_as_uint(x - at.kept), dropped, 1);
            if (!kCounts) past_end = __funnelshift_l(__float_as_uint(x - at.end), past_end, 1);
          }
        }
        const uint32_t candidates = kCounts ? 0 : dropped & ~past_end & mine;
        if (!kCounts && __any_sync(~0u, candidates != 0)) {
          queue.add(s, head, candidates, sum, [&](int bit, float height) {
            const uint32_t fraction = depth_of(height) & ((1u << kSubBits) - 1);
            return uint2{static_cast<uint32_t>(group_at(pair * kLanes + bit / 8 * 8 + lane / 4)),
                         (fraction >> shift) << key_bits | static_cast<uint32_t>(first + 8 * quad + bit % 8)};
          });
        }
        const uint32_t kept = transposed_in_quad(~dropped) & inside;
        const int group = row0 + pair * kLanes + 8 * quad + lane / 4;
        if (mask.rows && group < p.groups) put_word(p, mask, head, group, first, kept);
        if (kCounts) atomicAdd(counts + pair * kLanes + 8 * quad + lane / 4, __popc(kept));
      }
    }
    if (kCounts) {
      __syncthreads();
      for (int i = threadIdx.x; i < chunk; i += Products::kThreads) {
        if (counts[i] > 0) atomicAdd(mask.counts[head] + row0 + i, counts[i]);
      }
    } else {
      queue.flush(s, head);
    }
  }
}

}  // namespace

void emit_pass(const Exec& exec, const ProxyLaunch& p, const SelectSpace& space, Bins bins, const MaskLaunch& mask) {
  const int64_t lane_blocks = int64_t{p.heads} * ceil_div(p.groups, kLanes);
  const int key_bits = index_bits(p.count);
  if (p.exact) {
    with_products<12>(p, [&](auto products) {
      using P = decltype(products);
      const auto bytes = [&](int64_t chunk) {
        return chunk / kLanes * P::kPairBytes + chunk * int64_t{sizeof(EmitRow)} + P::kWarps * Queue::kBytes;
      };
      const RowSet rows = mask.rows ? RowSet{p.groups} : RowSet{p.groups, space.again, space.again_size};
      int chunk = static_cast<int>(std::min<int64_t>(mask.rows ? kEmitGroups : kAgainRows, round_up(p.groups, kLanes)));
      while (bytes(chunk) > exec.device->shared_bytes) chunk -= kLanes;
      const int64_t blocks = blocks_for(exec, 1, int64_t{p.heads} * ceil_div(p.groups, chunk) * ceil_div(p.count, P::kTile));
      const auto run = [&](auto* kernel) {
        launch(exec, "exact_emit", kernel, blocks, P::kThreads, bytes(chunk), p, space, bins, mask, rows, key_bits, chunk);
      };
      mask.counts ? run(exact_emit<P, true>) : run(exact_emit<P, false>);
    });
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
