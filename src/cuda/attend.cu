// attend on CUDA, first half: counts keys, cuts the groups into a list of tiles on the device, and starts the kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "core/numeric.h"
#include "cuda/attend.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A chunk's scratch.
struct Layout {
  int32_t* counter;   // [2, 2] tiles in a list, and the next one to take
  int32_t* keys;      // [heads, groups] set bits of mask | keep
  int32_t* extras;    // [heads, groups] set bits of the extra keys' mask
  int32_t* cuts;      // [heads, groups] tiles of the group
  AttendTile* tiles;  // [heads * most_tiles]
  uint16_t* extra_k;  // [heads, extra, dim]
  uint16_t* extra_v;  // [heads, extra, dim]
  // 8-bit products: the bytes, and a second list for the heads that need 16 bits.
  std::optional<Quantiser> quantiser;
  AttendTile* other_tiles;

  static int64_t most_tiles(int64_t q_tokens, int64_t groups) {
    return q_tokens / std::min(kTileRows80, kTileRows90) + groups;
  }

  Layout(Arena arena, int64_t heads, int64_t q_tokens, int64_t k_tokens, int64_t dim, int64_t groups, int64_t extra,
         Products products, int64_t* bytes = nullptr) {
    counter = arena.take<int32_t>(4);
    keys = arena.take<int32_t>(heads * groups);
    extras = arena.take<int32_t>(heads * groups);
    cuts = arena.take<int32_t>(heads * groups);
    tiles = arena.take<AttendTile>(heads * most_tiles(q_tokens, groups));
    extra_k = arena.take<uint16_t>(heads * extra * dim);
    extra_v = arena.take<uint16_t>(heads * extra * dim);
    other_tiles = tiles;
    if (products != Products::bf16) {
      quantiser.emplace(arena, products, heads, q_tokens, k_tokens + extra, dim);
      other_tiles = arena.take<AttendTile>(heads * most_tiles(q_tokens, groups));
    }
    // Rounded up, so that n heads fit into n times one head's size.
    if (bytes != nullptr) *bytes = round_up(arena.used(), Arena::kAlignment);
  }
};

// What the kernels below read; null pointers as in AttendArgs.
struct Groups {
  int64_t heads, groups, q_tokens, k_tokens, words, extra_count;
  int64_t tile_rows;  // most rows of a tile
  PerHead<const int64_t> offsets;
  PerHead<const uint32_t> mask, extra_mask;
  const uint32_t* keep;
  const uint32_t* beyond = nullptr;  // [heads] 8-bit products: the heads that need 16 bits; null: all have them
  bool lists_beyond = true;          // which heads are listed

  __device__ bool listed(int64_t head) const { return beyond == nullptr || (beyond[head] != 0) == lists_beyond; }
  __device__ int64_t begin(int64_t head, int64_t group) const { return offsets ? offsets[head][group] : group * q_tokens; }
  __device__ int64_t size(int64_t head, int64_t group) const { return begin(head, group + 1) - begin(head, group); }
};

// A warp per group of a head.
__global__ void __launch_bounds__(kThreads) count_keys(Groups in, int32_t* keys, int32_t* extras, int32_t* cuts) {
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, head = at / in.groups, group = at % in.groups;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (head >= in.heads) return;
  int key = 0, extra = 0;
  if (in.mask) {
    const uint32_t* row = in.mask[head] + group * in.words;
#pragma unroll 8
    for (int64_t w = lane; w < in.words; w += 32) key += __popc(in.keep == nullptr ? row[w] : row[w] | in.keep[w]);
  }
  if (in.extra_count > 0) {
    const int64_t words = (in.extra_count + 31) / 32;
    for (int64_t w = lane; w < words; w += 32) extra += __popc(in.extra_mask[head][group * words + w]);
  }
  key = __reduce_add_sync(~0u, key);
  extra = __reduce_add_sync(~0u, extra);
  if (lane == 0) {
    keys[at] = in.mask ? key : static_cast<int32_t>(in.k_tokens);
    extras[at] = extra;
    cuts[at] = static_cast<int32_t>((in.size(head, group) + in.tile_rows - 1) / in.tile_rows);
  }
}

// A block per head. The list goes head by head, because one head's keys and values fill the L2 cache, and within a head
// from the most keys to the fewest, so that blocks finish together.
__global__ void __launch_bounds__(kThreads) list_tiles(Groups in, const int32_t* keys, const int32_t* extras,
                                                       const int32_t* cuts, AttendTile* tiles, int32_t* counter) {
  const auto head = static_cast<int32_t>(blockIdx.x), groups = static_cast<int32_t>(in.groups);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  __shared__ int32_t before;         // tiles of the heads before this one
  __shared__ int2 others[kThreads];  // keys and tiles of groups, as many as there are threads at a time
  if (thread == 0) before = 0;
  __syncthreads();
  int32_t sum = 0, own = 0;
#pragma unroll 8
  for (int32_t i = thread; i < head * groups; i += kThreads) sum += in.listed(i / groups) ? cuts[i] : 0;
  atomicAdd(&before, sum);
  keys += int64_t{head} * groups, extras += int64_t{head} * groups, cuts += int64_t{head} * groups;

  for (int32_t first = 0; in.listed(head) && first < groups; first += kThreads) {
    const int32_t group = first + thread, count = group < groups ? keys[group] : 0;
    int32_t at = 0;
    for (int32_t from = 0; from < groups; from += kThreads) {
      __syncthreads();
      if (from + thread < groups) others[thread] = {keys[from + thread], cuts[from + thread]};
      __syncthreads();
      const int32_t end = min(kThreads, groups - from);
#pragma unroll 8
      for (int32_t i = 0; i < end; ++i) {
        const int2 other = others[i];
        at += other.x > count || (other.x == count && from + i < group) ? other.y : 0;
      }
    }
    if (group >= groups) continue;
    own += cuts[group];
    at += before;
    const int64_t begin = in.begin(head, group), size = in.size(head, group);
    for (int64_t row = 0; row < size; row += in.tile_rows) {
      tiles[at++] = {
          head,  group,        static_cast<int32_t>(begin + row), static_cast<int32_t>(min(size - row, in.tile_rows)),
          count, extras[group]};
    }
  }
  if (head == in.heads - 1) {
    __syncthreads();  // every thread has read `before`
    atomicAdd(&before, own);
    __syncthreads();
    if (thread == 0) {
      counter[0] = before;
      counter[1] = 0;
    }
  }
}

// Queries past offsets[groups] attend to nothing; a warp per query, and few blocks because there are usually none.
constexpr int kIdleBlocks = 16;
__global__ void __launch_bounds__(kThreads)
    clear_idle(Groups in, PerHead<const int32_t> order, HeadRows<uint16_t> out, int dim, PerHead<float> lse) {
  const int64_t head = blockIdx.x / kIdleBlocks;
  const int64_t first = in.begin(head, in.groups) + blockIdx.x % kIdleBlocks * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int64_t i = first; i < in.q_tokens; i += kIdleBlocks * kWarps) {
    const int64_t token = order ? order[head][i] : i;
    if (8 * lane < dim) *reinterpret_cast<uint4*>(out.row(head, token) + 8 * lane) = {};
    if (lane == 0 && lse) lse[head][token] = -INFINITY;
  }
}

__device__ uint16_t to_bits(float value, DType type) {
  return type == DType::bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : __half_as_ushort(__float2half_rn(value));
}

// The extra keys in the element type; `size` elements for each head.
__global__ void __launch_bounds__(kThreads) round_extra(PerHead<const float> k, PerHead<const float> v, int64_t size,
                                                        int64_t heads, DType type, uint16_t* to_k, uint16_t* to_v) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < heads * size; i += int64_t{gridDim.x} * kThreads) {
    to_k[i] = to_bits(k[i / size][i % size], type);
    to_v[i] = to_bits(v[i / size][i % size], type);
  }
}

}  // namespace

int64_t attend_scratch(const Exec&, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), sizes.heads, sizes.q_tokens, sizes.k_tokens, sizes.dim, sizes.groups + 1, sizes.extra, sizes.products,
         &bytes);
  return bytes;
}

void attend(const Exec& exec, const AttendArgs& args) {
  const int64_t count = args.heads;
  if (count == 0 || args.q.tokens == 0) return;
  const int64_t groups = args.offsets ? args.groups : 1, dim = args.q.dim, extra = args.extra.count;
  require(args.q.dtype != DType::f32, Status::dtype, "attend on CUDA takes f16 or bf16");
  require(dim % 8 == 0 && dim <= 128, Status::shape, "attend on CUDA takes a head_dim that is a multiple of 8, up to 128");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;  // room for positions past the last key
  const int64_t most_tiles = count * Layout::most_tiles(args.q.tokens, groups);
  require(std::max({args.q.tokens, args.k.tokens + extra, most_tiles}) <= kMost, Status::size_limit,
          "attend on CUDA takes fewer than 2^31 tokens");
  int64_t bytes = 0;
  // The wgmma kernel counts a row's bytes in 32 bits.
  const bool wgmma =
      exec.wgmma && 2 * std::max(args.k.row_stride, args.v.row_stride) <= std::numeric_limits<uint32_t>::max();
  require(args.products != Products::qkv8 || wgmma, Status::unsupported,
          "values in 8 bits take the wgmma kernel, and row strides below 2^31 elements");
  Layout(Arena(), count, args.q.tokens, args.k.tokens, dim, groups, extra, args.products, &bytes);
  require(bytes <= args.scratch.bytes, Status::workspace, "attend: more extra keys than the scratch holds");
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), count, args.q.tokens, args.k.tokens, dim, groups, extra,
                  args.products);

  Groups in{.heads = count,
            .groups = groups,
            .q_tokens = args.q.tokens,
            .k_tokens = args.k.tokens,
            .words = mask_words(args.k.tokens),
            .extra_count = extra,
            .tile_rows = wgmma ? kTileRows90 : kTileRows80,
            .offsets = args.offsets,
            .mask = args.mask,
            .extra_mask = args.extra.mask,
            .keep = args.keep};
  AttendLaunch work{.dtype = args.q.dtype,
                    .dim = static_cast<int>(dim),
                    .q = head_rows(args.q),
                    .k = head_rows(args.k),
                    .v = head_rows(args.v),
                    .out = head_rows(args.out),
                    .lse = args.lse,
                    .order = args.order,
                    .mask = in.mask,
                    .keep = in.keep,
                    .words = in.words,
                    .k_tokens = static_cast<int32_t>(args.k.tokens),
                    .scale = args.scale,
                    .extra_count = static_cast<int32_t>(extra),
                    .extra_k = {at.extra_k, extra * dim},
                    .extra_v = {at.extra_v, extra * dim},
                    .extra_bias = args.extra.bias,
                    .extra_mask = in.extra_mask,
                    .mix_share = args.mix.share,
                    .mix_row = args.mix.row,
                    .mix_part = args.mix.part,
                    .follow = args.mix.follow,
                    .tiles = nullptr,
                    .tile_count = nullptr,
                    .next_tile = nullptr,
                    .most_tiles = static_cast<int32_t>(most_tiles),
                    .products = Products::bf16,
                    .eight = {}};

  if (args.offsets) {
    launch(exec, "clear_idle", clear_idle, count * kIdleBlocks, kThreads, 0, in, work.order, work.out, work.dim, work.lse);
  }
  if (extra > 0) {
    const int64_t blocks = blocks_for(exec, 8, ceil_div(count * extra * dim, kThreads));
    launch(exec, "round_extra", round_extra, blocks, kThreads, 0, args.extra.k, args.extra.v, extra * dim, count,
           args.q.dtype, at.extra_k, at.extra_v);
  }
  if (groups == 0) return;
  launch(exec, "count_keys", count_keys, ceil_div(count * groups, kWarps), kThreads, 0, in, at.keys, at.extras, at.cuts);
  const auto run = [&](AttendTile* tiles, int32_t* counter) {
    launch(exec, "list_tiles", list_tiles, count, kThreads, 0, in, at.keys, at.extras, at.cuts, tiles, counter);
    work.tiles = tiles;
    work.tile_count = counter;
    work.next_tile = counter + 1;
    wgmma ? attend_sm90(exec, work) : attend_sm80(exec, work);
  };
  if (!at.quantiser) return run(at.tiles, at.counter);
  work.eight = at.quantiser->run(exec, args, at.extra_k, at.extra_v);
  in.beyond = work.eight.beyond;
  run(at.other_tiles, at.counter + 2);  // nothing to do where all is finite
  in.lists_beyond = false;
  work.products = args.products;
  run(at.tiles, at.counter);
}

}  // namespace scope::cuda
