// The mean's sums on Hopper: 64 groups a warpgroup multiply with all keys, as attend does, and weigh the values of those
// they drop.
#include "cuda/device/softmax_sm90.cuh"
#include "cuda/tail_sums.cuh"

namespace scope::cuda {

namespace {

// A block: warpgroup 0 copies keys and values, the others have 64 groups each.
template <DType kType_, int kDim_>
struct Config {
  static constexpr DType kType = kType_;
  static constexpr int kDim = kDim_, kKeys = kTailKeys;
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 3, kGroups = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kPanels = kDim / 64;                                          // 64 channels, 128 bytes of a row
  static constexpr int kPanelBytes = 64 * 128, kBlockBytes = kPanels * kPanelBytes;  // of 64 keys, or of 64 groups
  static constexpr int kFeederRegisters = kDim == 64 ? 80 : 56, kConsumerRegisters = kDim == 64 ? 144 : 152;
};

template <class C>
struct Shared {
  alignas(1024) uint8_t q[C::kConsumers][C::kBlockBytes];
  alignas(1024) uint8_t k[C::kStages][C::kBlockBytes];
  alignas(1024) uint8_t v[C::kStages][C::kBlockBytes];
  uint2 kept[C::kStages][C::kGroups];  // bits of the block's keys; ones for groups that have no mean
  uint64_t kept_full[C::kStages];      // emptied with v
  uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
  uint64_t have_read[4 * C::kConsumers];  // a warp's lanes, before one of them releases the keys that they read
};

// The highest bits of byte `byte` of x and y, each 16 times: x's in the lower half.
__device__ uint32_t signs(uint32_t x, uint32_t y, int byte) {
  uint32_t both;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(x), "r"(y), "r"(0xcc88 + 0x1111 * byte));
  return both;
}

// Copies blocks of keys and of values, of which eight threads take 128 bytes of a row, and what is kept of them. kEven: all
// keys are as far apart, so that a thread's places only move on from block to block; kByKey: and the words of a mask do.
template <class C, bool kEven, bool kByKey>
__device__ void load(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, const TailKeys& all, KeyRange keys,
                     int group0, Shared<C>& shared) {
  const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;
  const uint32_t place = row0 * 128 + ((chunk ^ row0 % 8) << 4);
  constexpr int kOwn = 2 * C::kGroups / 128;  // words of the mask for a thread
  const auto mask_of = [&](int i) { return kept_row(p, tail, head, group0 + static_cast<int>(threadIdx.x) / 2 + 64 * i); };
  const uint32_t* kept[kOwn];  // kByKey: the next words
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    kept[i] = kByKey ? mask_of(i) : nullptr;
    if (kept[i] != nullptr) kept[i] += keys.begin / 32 + threadIdx.x % 2;
  }
  const auto first_row = [&](const HeadRows<const uint16_t>& rows) {
    return rows.row(head, all.first + int64_t{keys.begin + row0} * tail.stride) + 8 * chunk;
  };
  const uint16_t *k_row = first_row(p.k), *v_row = first_row(tail.v);  // kEven: what this thread copies next
  Ring<C::kStages> stage;
  const auto copy_block = [&](int32_t first, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    const auto copy = [&](const HeadRows<const uint16_t>& rows, const uint16_t*& next, uint32_t to) {
#pragma unroll
      for (int i = 0; i < C::kKeys / 16; ++i) {
        const int32_t key = first + row0 + 16 * i;
        const bool real = kWhole || key < keys.end;
        const uint16_t* from = next;
        if (!real) from = rows.base;
        if (!kEven && real) from = rows.row(head, all.token(p, tail, key)) + 8 * chunk;
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
          copy_16(to + place + i * 2048 + panel * C::kPanelBytes, from + 64 * panel,
                  real && 64 * panel + 8 * chunk < p.dim ? 16 : 0);
        }
        if (kEven) next += 16 * tail.stride * rows.row_step;
      }
    };
    barrier_wait(shared_address(&shared.k_empty[stage.slot()]), stage.parity() ^ 1);
    copy(p.k, k_row, shared_address(shared.k[stage.slot()]));
    barrier_arrive_after_copies(shared_address(&shared.k_full[stage.slot()]));
    barrier_wait(shared_address(&shared.v_empty[stage.slot()]), stage.parity() ^ 1);
    const int32_t word = first + threadIdx.x % 2 * 32;  // its first key
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      uint32_t* to = &shared.kept[stage.slot()][64 * i].x + threadIdx.x;
      if (!kWhole && word >= keys.end) continue;
      if (!kByKey) {
        if (const uint32_t* row = mask_of(i)) *to = kept_bits(p, tail, row, word);
      } else if (kept[i] != nullptr) {
        copy_4(shared_address(to), kept[i]);
        kept[i] += C::kKeys / 32;
      }
    }
    const uint32_t full = shared_address(&shared.kept_full[stage.slot()]);
    kByKey ? barrier_arrive_after_copies(full) : barrier_arrive(full);
    copy(tail.v, v_row, shared_address(shared.v[stage.slot()]));
    barrier_arrive_after_copies(shared_address(&shared.v_full[stage.slot()]));
    stage.next();
  };
  int32_t first = keys.begin;
  for (; first + C::kKeys <= keys.end; first += C::kKeys) copy_block(first, std::true_type());
  if (first < keys.end) copy_block(first, std::false_type());
  wait_all_copies();
}

// Centroids of 64 groups from `group0` on.
template <class C>
__device__ void load_centroids(const ProxyLaunch& p, int64_t head, int group0, uint8_t* to) {
  for (int i = threadIdx.x % 128; i < 64 * C::kDim / 2; i += 128) {
    const int row = i / (C::kDim / 2), channel = i % (C::kDim / 2) * 2;
    float2 x{0, 0};
    if (group0 + row < p.groups && channel < p.dim) {
      x = *reinterpret_cast<const float2*>(p.centroids[head] + int64_t{group0 + row} * p.dim + channel);
    }
    const int at = channel / 64 * C::kPanelBytes + row * 128 + ((channel / 8 ^ row) % 8 << 4) + channel % 8 * 2;
    *reinterpret_cast<uint32_t*>(to + at) = pack<C::kType>(x.x, x.y);
  }
}

template <class C>
__device__ void consume(const ProxyLaunch& p, const TailLaunch& tail, int64_t head, int part, KeyRange keys, int group0,
                        int warpgroup, Shared<C>& shared) {
  constexpr int kKeys = C::kKeys;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  load_centroids<C>(p, head, group0, shared.q[warpgroup]);
  fence_async_proxy();
  named_sync(1 + warpgroup, 128);

  const float unit[2] = {p.scale * kLog2e, p.scale * kLog2e};
  const uint64_t q_at = panel_descriptor(shared_address(shared.q[warpgroup]), 16);
  const uint64_t k_at = panel_descriptor(shared_address(shared.k), 16);
  const uint64_t v_at = panel_descriptor(shared_address(shared.v), C::kPanelBytes);
  Ring<C::kStages> k, v;
  float o[C::kDim / 2], s[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
#pragma unroll
  for (int i = 0; i < C::kDim / 2; ++i) o[i] = 0;
  Softmax<SixteenBits<C::kType>> softmax;
  // Of the weights of dropped keys, as rounded: the product with ones has each row's twice.
  float total[4] = {0, 0, 0, 0};
  constexpr uint32_t kOnes = C::kType == DType::bf16 ? 0x3f803f80 : 0x3c003c00;

  const auto start_qk = [&] {
    const uint64_t b = k_at + k.slot() * (C::kBlockBytes >> 4);
    multiply_rows<C::kType, C::kDim, C::kPanelBytes, C::kPanelBytes>(s, q_at, b);
    wgmma_commit();
  };
  const auto start_pv = [&] {
    const uint64_t b = v_at + v.slot() * (C::kBlockBytes >> 4);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) wgmma_rs<C::kType>(o, weights[i], b + (i * 2048 >> 4));
    wgmma_commit();
  };
  const auto finish_pv = [&] {
    wgmma_wait<0>();
    pin(o);
    barrier_arrive(shared_address(&shared.v_empty[v.slot()]));  // each thread, because it has read what is kept
    v.next();
  };
  // Where the keys from `first` on end, and where a logit is NaN, which weighs nothing.
  const auto mask = [&](int32_t first) {
    const int left = keys.end - first - 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = i / 4 * 8 + i % 2 >= left ? -kInfinity : fmaxf(s[i], -kInfinity);
  };
  // Rounds the weights of dropped keys, and leaves out the others.
  const auto pack_weights = [&] {
    barrier_wait(shared_address(&shared.kept_full[v.slot()]), v.parity());
    uint32_t even[2][2], odd[2][2];  // [row][word]: of every 8 keys the thread's two, in the highest bit of their byte
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint2 words = shared.kept[v.slot()][64 * warpgroup + 16 * warp + lane / 4 + 8 * h];
      const int shift = 6 - lane % 4 * 2;
      even[h][0] = words.x << (shift + 1), even[h][1] = words.y << (shift + 1);
      odd[h][0] = words.x << shift, odd[h][1] = words.y << shift;
    }
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int h = i % 2, word = i / 8, byte = i / 2 % 4;
      weights[i / 4][i % 4] = pack<C::kType>(s[2 * i], s[2 * i + 1]) & ~signs(even[h][word], odd[h][word], byte);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) mma_16x8x16<Element<C::kType>>(total, weights[i], kOnes, kOnes);
  };

  // As attend's: the highest logits are looked for in the first block and in one that is not whole, and in another only
  // where they are too high for what was found before.
  const auto block = [&]<bool kFirst, bool kPlain>(int32_t first, std::bool_constant<kFirst>, std::bool_constant<kPlain>) {
    barrier_wait(shared_address(&shared.k_full[k.slot()]), k.parity());
    fence_async_proxy();
    wgmma_begin();
    start_qk();
    if constexpr (!kFirst) start_pv();  // values came before these keys, by the same threads
    wgmma_wait<kFirst ? 0 : 1>();
    pin(s);
    float added[2];
    const auto raise = [&](bool upper, bool lower) {  // which of the rows
      mask(first);
      float top[2];
      row_tops(s, top);
      softmax.raise({upper ? top[0] : -kInfinity, lower ? top[1] : -kInfinity}, unit);
    };
    bool raised = !kPlain;
    if constexpr (!kPlain) raise(true, true);
#pragma unroll 1
    for (;;) {
      const bool fits = softmax.weigh(s, unit, added);
      if (!kPlain || raised || !__any_sync(~0u, !fits)) break;
      raised = true;
      wgmma_wait<0>();
      pin(o);
      multiply_again<C::kType, false, C::kPanels, C::kPanelBytes, C::kPanelBytes>(
          s, shared_address(shared.q[warpgroup]) + warp * 2048, shared_address(shared.k[k.slot()]));
      barrier_meet(shared_address(&shared.have_read[4 * warpgroup + warp]));
      raise(!softmax.fits(added[0]), !softmax.fits(added[1]));
    }
    for (int h = 0; h < 2; ++h) softmax.sum[h] += added[h];
    if (lane == 0) barrier_arrive(shared_address(&shared.k_empty[k.slot()]));
    k.next();
    if constexpr (!kFirst) {
      finish_pv();
      if (raised) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) o[i] *= softmax.factor[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] *= softmax.factor[i / 2];
      }
    }
    pack_weights();
  };

  if (keys.begin < keys.end) {
    block(keys.begin, std::true_type(), std::false_type());
    int32_t first = keys.begin + kKeys;
    for (; first + kKeys <= keys.end; first += kKeys) block(first, std::false_type(), std::true_type());
    if (first < keys.end) block(first, std::false_type(), std::false_type());
    barrier_wait(shared_address(&shared.v_full[v.slot()]), v.parity());
    fence_async_proxy();
    wgmma_begin();
    start_pv();
    finish_pv();
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float dropped = total[2 * h], all = quad_sum(softmax.sum[h]), high = softmax.base[h] * kLn2;
    const int group = group0 + 16 * warp + lane / 4 + 8 * h;
    if (group >= p.groups) continue;
    float* out = tail.sums[head] + (int64_t{group} * tail.partials + part) * tail.width;
    if (lane % 4 == 0) *reinterpret_cast<float4*>(out) = {high, dropped, fmaxf(all - dropped, 0), 0};
#pragma unroll
    for (int j = 0; j < C::kDim / 8; ++j) {
      const int channel = 8 * j + 2 * (lane % 4);
      if (channel < p.dim)
        *reinterpret_cast<float2*>(out + kTailHeader + channel) = {o[4 * j + 2 * h], o[4 * j + 2 * h + 1]};
    }
  }
}

// Blocks of the same keys and other groups are neighbours, so that keys and values come from memory once.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    mean_sums(const __grid_constant__ ProxyLaunch p, const __grid_constant__ TailLaunch tail, int group_blocks) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  const int group0 = static_cast<int>(blockIdx.x) % group_blocks * C::kGroups;
  const int part = static_cast<int>(blockIdx.x) / group_blocks % tail.partials;
  const int64_t head = blockIdx.x / group_blocks / tail.partials;
  const int busy = min(C::kConsumers, (p.groups - group0 + 63) / 64);  // warpgroups
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), 128);
      barrier_init(shared_address(&shared.v_full[i]), 128);
      barrier_init(shared_address(&shared.kept_full[i]), 128);
      barrier_init(shared_address(&shared.k_empty[i]), 4 * busy);
      barrier_init(shared_address(&shared.v_empty[i]), 128 * busy);
    }
    for (int i = 0; i < 4 * C::kConsumers; ++i) barrier_init(shared_address(&shared.have_read[i]), 32);
    fence_barrier_init();
  }
  for (int i = threadIdx.x; i < C::kStages * C::kGroups; i += C::kThreads) {
    shared.kept[i / C::kGroups][i % C::kGroups] = {~0u, ~0u};
  }
  __syncthreads();
  const TailKeys all(p, tail);
  const KeyRange keys = keys_of_part(all.count, part, tail.partials);
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  if (warpgroup < 0) {
    shrink_registers<C::kFeederRegisters>();
    if (p.rows == nullptr) {
      load<C, true, true>(p, tail, head, all, keys, group0, shared);
    } else if (tail.by_key) {
      load<C, false, true>(p, tail, head, all, keys, group0, shared);
    } else {
      load<C, false, false>(p, tail, head, all, keys, group0, shared);
    }
  } else {
    grow_registers<C::kConsumerRegisters>();
    if (warpgroup < busy) consume<C>(p, tail, head, part, keys, group0 + 64 * warpgroup, warpgroup, shared);
  }
}

template <class C>
void launch_kernel(const Exec& exec, const ProxyLaunch& p, const TailLaunch& tail) {
  static_assert(sizeof(Shared<C>) <= 227 * 1024);
  const int group_blocks = (p.groups + C::kGroups - 1) / C::kGroups;
  launch(exec, "mean_sums", mean_sums<C>, int64_t{p.heads} * tail.partials * group_blocks, C::kThreads, sizeof(Shared<C>), p,
         tail, group_blocks);
}

}  // namespace

void mean_sums_sm90(const Exec& exec, const ProxyLaunch& p, const TailLaunch& tail) {
  if (p.f16) {
    p.dim <= 64 ? launch_kernel<Config<DType::f16, 64>>(exec, p, tail)
                : launch_kernel<Config<DType::f16, 128>>(exec, p, tail);
  } else {
    p.dim <= 64 ? launch_kernel<Config<DType::bf16, 64>>(exec, p, tail)
                : launch_kernel<Config<DType::bf16, 128>>(exec, p, tail);
  }
}

}  // namespace scope::cuda
