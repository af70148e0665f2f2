// The warpgroups of attend on Hopper that multiply: logits, softmax, outputs, and their rows.
#pragma once

#include <type_traits>

#include "cuda/attend_sm90.cuh"
#include "cuda/device/bundle.cuh"

namespace scope::cuda::attend90 {

// The two rows of a lane, as they are written.
template <DType kType>
struct Rows {
  uint16_t* to[2];  // null: there is no such query
  float scale[2];   // of sums of weighted values
  Mixed mixed[2];
  Bundle<Element<kType>> bundle;
};

// Writes the parts of rows that a quad holds: after a transpose each lane has eight consecutive channels of every 32.
template <DType kType, int kCount>
__device__ void store_rows(const float (&o)[kCount], const Rows<kType>& rows, int dim) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kCount / 16; ++g) {
    float2 column[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 16 * g + 4 * j;
      column[j] = rows.bundle.columns(o[i], o[i + 1], o[i + 2], o[i + 3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 16 * g + 4 * j + 2 * h;
        const int channel = 32 * g + 8 * j + 2 * lane;
        float2 x{o[i] * rows.scale[h] - rows.bundle.of(h, column[j].x),
                 o[i + 1] * rows.scale[h] - rows.bundle.of(h, column[j].y)};
        const Mixed& mixed = rows.mixed[h];
        if (mixed.row != nullptr && channel < dim) {
          const float2 added = *reinterpret_cast<const float2*>(mixed.row + channel);
          x = {fmaf(mixed.share, added.x, x.x), fmaf(mixed.share, added.y, x.y)};
        }
        w[j] = pack<kType>(x.x, x.y);
      }
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = lane & bit;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j & bit) continue;
          const uint32_t got = __shfl_xor_sync(~0u, upper ? w[j] : w[j | bit], bit);
          (upper ? w[j] : w[j | bit]) = got;
        }
      }
      const int channel = 32 * g + 8 * lane;
      if (rows.to[h] != nullptr && channel < dim) *reinterpret_cast<uint4*>(rows.to[h] + channel) = {w[0], w[1], w[2], w[3]};
    }
  }
}

// The same where a lane has four consecutive channels of every 16, and values are centre + unit * byte: no transpose.
template <DType kType, int kCount>
__device__ void store_rows_of_bytes(const float (&o)[kCount], const Rows<kType>& rows, const float* unit,
                                    const float* centre, int dim) {
#pragma unroll
  for (int g = 0; g < kCount / 8; ++g) {
    const int channel = 16 * g + 4 * (threadIdx.x % 4);
    const float2 even = rows.bundle.columns(o[8 * g], o[8 * g + 1], o[8 * g + 2], o[8 * g + 3]);
    const float2 odd = rows.bundle.columns(o[8 * g + 4], o[8 * g + 5], o[8 * g + 6], o[8 * g + 7]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rows.to[h] == nullptr || channel >= dim) continue;
      const int i = 8 * g + 2 * h;
      const Mixed& mixed = rows.mixed[h];
      const float scale = rows.scale[h];
      float4 x{fmaf(o[i], scale, -rows.bundle.of(h, even.x)), fmaf(o[i + 4], scale, -rows.bundle.of(h, odd.x)),
               fmaf(o[i + 1], scale, -rows.bundle.of(h, even.y)), fmaf(o[i + 5], scale, -rows.bundle.of(h, odd.y))};
      const float4 times = *reinterpret_cast<const float4*>(unit + channel);
      x = {x.x * times.x, x.y * times.y, x.z * times.z, x.w * times.w};
      const auto add = [&](float by, const float* row) {
        const float4 y = *reinterpret_cast<const float4*>(row + channel);
        x = {fmaf(by, y.x, x.x), fmaf(by, y.y, x.y), fmaf(by, y.z, x.z), fmaf(by, y.w, x.w)};
      };
      add(scale == 0 ? 0 : 1 - mixed.share, centre);
      if (mixed.row != nullptr) add(mixed.share, mixed.row);
      *reinterpret_cast<uint2*>(rows.to[h] + channel) = {pack<kType>(x.x, x.y), pack<kType>(x.z, x.w)};
    }
  }
}

// Moves sums that have grown long into the totals, each with the base that it was made under.
template <class C, bool = C::kByteValues>
struct Promotion {
  __device__ void after_block(float (&)[C::kDim / 2], const float (&)[2], Shared<C>&, int) {}
  __device__ void finish(float (&)[C::kDim / 2], const float (&)[2], Shared<C>&, int) {}
  __device__ float* sums(Shared<C>& shared) const { return reinterpret_cast<float*>(shared.q); }
};
template <class C>
struct Promotion<C, true> {
  static constexpr int kSpan = 4;  // blocks after which a sum is long: what it loses, always towards zero, grows with it
  int blocks = 0;
  float base[2];  // that the totals were made under

  __device__ void after_block(float (&o)[C::kDim / 2], const float (&now)[2], Shared<C>& shared, int group) {
    if (++blocks % kSpan != 0) return;
    if (blocks > kSpan) add(o, now, shared, group);
    float4(*totals)[128] = shared.totals[group];
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
      totals[i][threadIdx.x % 128] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
      for (int j = 0; j < 4; ++j) o[4 * i + j] = 0;
    }
    base[0] = now[0], base[1] = now[1];
  }
  __device__ void finish(float (&o)[C::kDim / 2], const float (&now)[2], Shared<C>& shared, int group) {
    if (blocks >= kSpan) add(o, now, shared, group);
  }
  // The warpgroups that share a tile hand their sums over where their totals were.
  __device__ float* sums(Shared<C>& shared) const { return reinterpret_cast<float*>(shared.totals); }

 private:
  __device__ void add(float (&o)[C::kDim / 2], const float (&now)[2], const Shared<C>& shared, int group) const {
    const float factor[2] = {exp2_approx(base[0] - now[0]), exp2_approx(base[1] - now[1])};
    const float4(*totals)[128] = shared.totals[group];
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
      const float4 four = totals[i][threadIdx.x % 128];
      o[4 * i] = fmaf(four.x, factor[0], o[4 * i]), o[4 * i + 1] = fmaf(four.y, factor[0], o[4 * i + 1]);
      o[4 * i + 2] = fmaf(four.z, factor[1], o[4 * i + 2]), o[4 * i + 3] = fmaf(four.w, factor[1], o[4 * i + 3]);
    }
  }
};

// Copies a warpgroup's queries, rows first .. first + 63 of the tile; those past its end are zero.
template <class C>
__device__ void load_queries(const AttendLaunch& at, const AttendTile& tile, int first, uint32_t to, float* unit) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
  to += thread / 8 * 128 + ((chunk ^ thread / 8 % 8) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = first + thread / 8 + 16 * i;
    const bool real = r < tile.rows;
    if constexpr (C::kByteKeys) {
      const int place = tile.begin + (real ? r : 0);
      copy_16(to + i * 2048, at.eight.q.row(tile.head, place) + 16 * chunk, real && 16 * chunk < C::kDim ? 16 : 0);
      if (chunk == 0) copy_4(shared_address(unit + thread / 8 + 16 * i), at.eight.q_unit[tile.head] + place);
    } else {
      const int64_t token = !real ? 0 : at.order ? at.order[tile.head][tile.begin + r] : tile.begin + r;
      const uint16_t* from = at.q.row(tile.head, token) + 8 * chunk;
#pragma unroll
      for (int p = 0; p < C::kKeyPanels; ++p) {
        copy_16(to + p * C::kQueryPanelBytes + i * 2048, from + 64 * p, real && 64 * p + 8 * chunk < at.dim ? 16 : 0);
      }
    }
  }
}

// Multiplies: 64 queries of each tile with all its keys, or, where a tile has no more queries, with a share of them.
template <class C>
__device__ void consume(const AttendLaunch& at, Shared<C>& shared) {
  constexpr int kKeys = C::kKeys;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float unit[2] = {at.scale * kLog2e, at.scale * kLog2e};
  const uint64_t q_at = panel_descriptor(shared_address(shared.q) + group * C::kQueryBytes, 16);
  const uint64_t k_at = panel_descriptor(shared_address(shared.k), 16);
  const uint64_t v_at = C::kByteValues ? core_descriptor(shared_address(shared.v), 16 * C::kDim)
                                       : panel_descriptor(shared_address(shared.v), C::kPanelBytes);
  Ring<C::kStages> k;
  Ring<kTiles> ring;

  const auto await_tile = [&] { barrier_wait(shared_address(&shared.tile_full[ring.slot()]), ring.parity()); };
  const auto last_slot = [&] { return ring.slot() == 0 ? kTiles - 1 : ring.slot() - 1; };
  const auto release_tile = [&] { barrier_arrive(shared_address(&shared.tile_empty[last_slot()])); };
  // Queries for one warpgroup alone are shared: the warpgroups take blocks of keys in turn, and the first adds up.
  const auto is_split = [&](const AttendTile& tile) { return tile.rows <= 64; };
  const auto fetch_queries = [&](const AttendTile& tile) {
    const int first = is_split(tile) ? 0 : 64 * group;
    if (first < tile.rows) {
      load_queries<C>(at, tile, first, shared_address(shared.q) + group * C::kQueryBytes, shared.unit[group]);
    }
  };
  await_tile();
  fetch_queries(shared.tiles[0]);

  for (;;) {
    if (shared.tiles[ring.slot()].rows == 0) return;
    ring.next();
    const AttendTile& tile = shared.tiles[last_slot()];
    const bool split = is_split(tile);
    const int blocks = block_count<C>(tile);
    const auto release = [&](uint64_t* barrier) {
      if (lane == 0) barrier_arrive(shared_address(barrier), split ? C::kConsumers : 1);
    };
    if (!split && 64 * group >= tile.rows) {  // idle, but in step: parities tell only neighbouring phases apart
      for (int b = 0; b < blocks; ++b, k.next()) {
        barrier_wait(shared_address(&shared.k_full[k.slot()]), k.parity());
        release(&shared.k_empty[k.slot()]);
        barrier_wait(shared_address(&shared.v_full[k.slot()]), k.parity());
        release(&shared.v_empty[k.slot()]);
      }
      release_tile();
      await_tile();
      fetch_queries(shared.tiles[ring.slot()]);
      continue;
    }
    wait_all_copies();
    fence_async_proxy();
    named_sync(1 + group, 128);

    const int keys = tile.keys, extra = tile.extra, plain = keys / kKeys;  // blocks of real keys alone
    Ring<C::kStages> v = k;
    float o[C::kDim / 2], s[kKeys / 2];
    int32_t bytes[kKeys / 2];  // logits before they are floats
    uint32_t p[C::kByteValues ? kKeys / 32 : kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) o[i] = 0;
    using Range = std::conditional_t<C::kByteValues, E4m3, SixteenBits<C::kType>>;
    Softmax<Range> softmax;
    if constexpr (C::kByteKeys) {
      for (int h = 0; h < 2; ++h) unit[h] = shared.unit[group][16 * warp + 8 * h + lane / 4] * (at.scale * kLog2e);
    }
    Promotion<C> promotion;

    const auto pack_p = [&] {
      if constexpr (C::kByteValues) {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          const int j = i / 2 * 8 + i % 2 * 2;  // of every 16 keys a thread has four, and two rows
          p[i / 4][i % 4] = pack_e4m3(s[j], s[j + 1], s[j + 4], s[j + 5]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) p[i / 4][i % 4] = pack<C::kType>(s[2 * i], s[2 * i + 1]);
      }
    };
    const auto await_values = [&] { barrier_wait(shared_address(&shared.v_full[v.slot()]), v.parity()); };
    const auto start_qk = [&] {
      const uint64_t b = k_at + k.slot() * (C::kKeyBytes >> 4);
      if constexpr (C::kByteKeys) {
#pragma unroll
        for (int i = 0; i < C::kDim / 32; ++i) wgmma_s8(bytes, q_at + (i * 32 >> 4), b + (i * 32 >> 4));
      } else {
        multiply_rows<C::kType, C::kDim, C::kQueryPanelBytes, C::kPanelBytes>(s, q_at, b);
      }
      wgmma_commit();
    };
    const auto start_pv = [&] {
      const uint64_t b = v_at + v.slot() * (C::kValueBytes >> 4);
      if constexpr (C::kByteValues) {
#pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) wgmma_e4m3(o, p[i], b + (i * 32 * C::kDim >> 4));
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) wgmma_rs<C::kType>(o, p[i], b + (i * 2048 >> 4));
      }
      wgmma_commit();
    };
    const auto finish_pv = [&] {
      wgmma_wait<0>();
      pin(o);
      release(&shared.v_empty[v.slot()]);
      split ? v.skip(C::kConsumers) : v.next();
    };
    // Where block b has extra keys or padding.
    const auto mask = [&](int b) {
      const int column = 2 * (lane % 4), left = keys - b * kKeys;
      float per_unit[2] = {1, 1};
      if constexpr (C::kByteKeys) {
        for (int h = 0; h < 2; ++h) per_unit[h] = __fdividef(at.scale * kLog2e, unit[h]);
      }
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int j = i / 4 * 8 + i % 2 + column;
        if (j >= left + extra) {
          s[i] = -kInfinity;
        } else if (j >= left) {
          s[i] = fmaf(shared.bias[k.slot()][j], per_unit[i / 2 % 2], s[i]);
        }
      }
      __syncwarp();
    };
    // Block b: the probabilities of its keys, while the values of the block before are multiplied with theirs. The highest
    // logits are looked for in the first block, and in those with extra keys or padding; in a plain one they are taken to
    // be no higher than before, and only if that was wrong its logits are made once more and looked through.
    const auto block = [&]<bool kFirst, bool kPlain>(int b, std::bool_constant<kFirst>, std::bool_constant<kPlain>) {
      if constexpr (C::kByteKeys) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) bytes[i] = __float_as_int(kWhole);
      }
      barrier_wait(shared_address(&shared.k_full[k.slot()]), k.parity());
      fence_async_proxy();
      wgmma_begin();
      start_qk();
      if constexpr (!kFirst) {
        if (C::kByteValues) await_values();  // those of 16 bits came before these keys, by the same threads
        start_pv();
      }
      wgmma_wait<kPlain ? 1 : 0>();
      if constexpr (C::kByteKeys) {
        pin(bytes);
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = __int_as_float(bytes[i]);
      } else {
        pin(s);
      }
      float added[2];
      const auto raise = [&](bool upper, bool lower) {  // which of the rows
        float top[2];
        row_tops(s, top);
        softmax.raise({upper ? top[0] : -kInfinity, lower ? top[1] : -kInfinity}, unit);
      };
      bool raised = !kPlain;
      if constexpr (!kPlain) {
        if (!kFirst || b >= plain) mask(b);
        raise(true, true);
      }
#pragma unroll 1
      for (;;) {
        const bool fits = softmax.weigh(s, unit, added);
        if (!kPlain || raised || !__any_sync(~0u, !fits)) break;
        raised = true;
        if (C::kByteValues && !__any_sync(~0u, !(added[0] + added[1] < kInfinity))) {
          softmax.lower(s, added);
          break;
        }
        wgmma_wait<0>();  // so that the registers of its probabilities are free
        pin(o);
        multiply_again<C::kType, C::kByteKeys, C::kKeyPanels, C::kQueryPanelBytes, C::kPanelBytes>(
            s, shared_address(shared.q) + group * C::kQueryBytes + warp * 2048,
            shared_address(shared.k) + k.slot() * C::kKeyBytes);
        barrier_meet(shared_address(&shared.have_read[4 * group + warp]));
        raise(!softmax.fits(added[0]), !softmax.fits(added[1]));  // other rows do not see it
      }
      for (int h = 0; h < 2; ++h) softmax.sum[h] += added[h];
      release(&shared.k_empty[k.slot()]);
      split ? k.skip(C::kConsumers) : k.next();
      if constexpr (!kFirst) {
        finish_pv();
        if (raised) {
#pragma unroll
          for (int i = 0; i < C::kDim / 2; ++i) o[i] *= softmax.factor[i / 2 % 2];
        }
      }
      pack_p();
      if constexpr (!kFirst) promotion.after_block(o, softmax.base, shared, group);
    };

    const int first = split ? group : 0, step = split ? C::kConsumers : 1;
    if (split) k.skip(group), v.skip(group);
    if (first < blocks) block(first, std::true_type(), std::false_type());
    int b = first + step;
    for (; b < plain; b += step) block(b, std::false_type(), std::true_type());
#pragma unroll 1
    for (; b < blocks; b += step) block(b, std::false_type(), std::false_type());

    // The next queries and this tile's places arrive while the last product runs.
    await_tile();
    if (!split) {
      named_sync(1 + group, 128);  // all four warps have read their queries
      fetch_queries(shared.tiles[ring.slot()]);
    }
    int32_t token[2];
    for (int h = 0; h < 2; ++h) {
      const int row = (split ? 0 : 64 * group) + 16 * warp + 8 * h + lane / 4;
      token[h] = row >= tile.rows ? kNoKey : at.order ? at.order[tile.head][tile.begin + row] : tile.begin + row;
    }
    if (first < blocks) {
      await_values();
      fence_async_proxy();
      wgmma_begin();
      start_pv();
      finish_pv();
      promotion.finish(o, softmax.base, shared, group);
    }
    for (int h = 0; h < 2; ++h) softmax.sum[h] = quad_sum(softmax.sum[h]);

    if (split) {
      // From the block after this warpgroup's last to the next tile's first, which may be behind it.
      const int taken = (blocks - group + C::kConsumers - 1) / C::kConsumers;
      k.skip(2 * C::kStages + blocks - group - C::kConsumers * taken);
      float* sums = promotion.sums(shared);  // [kDim / 2][128]
      float2* parts = shared.parts + 16 * warp + lane / 4;
      named_sync(8, 128 * C::kConsumers);  // the queries have been read
      for (int other = 1; other < C::kConsumers; ++other) {
        if (group == other) {
#pragma unroll
          for (int i = 0; i < C::kDim / 2; ++i) sums[128 * i + threadIdx.x % 128] = o[i];
          if (lane % 4 == 0) {
            for (int h = 0; h < 2; ++h) parts[8 * h] = {softmax.base[h], softmax.sum[h]};
          }
        }
        named_sync(8, 128 * C::kConsumers);
        if (group == 0) {
          float ours[2], theirs[2];
          for (int h = 0; h < 2; ++h) {
            const float2 part = parts[8 * h];
            const float base = fmaxf(softmax.base[h], part.x);
            ours[h] = exp2_approx(softmax.base[h] - base);
            theirs[h] = exp2_approx(part.x - base);
            softmax.base[h] = base;
            softmax.sum[h] = softmax.sum[h] * ours[h] + part.y * theirs[h];
          }
#pragma unroll
          for (int i = 0; i < C::kDim / 2; ++i) {
            o[i] = o[i] * ours[i / 2 % 2] + sums[128 * i + threadIdx.x % 128] * theirs[i / 2 % 2];
          }
        }
        named_sync(8, 128 * C::kConsumers);
      }
      fetch_queries(shared.tiles[ring.slot()]);
    }
    if (!split || group == 0) {
      Rows<C::kType> rows{{},
                          {},
                          {Mixed(at, tile, token[0]), Mixed(at, tile, token[1])},
                          {at, Mixed(at, tile, -1).share, softmax.sum, token[0] != kNoKey, token[1] != kNoKey}};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows.to[h] = token[h] == kNoKey ? nullptr : at.out.row(tile.head, token[h]);
        rows.scale[h] = softmax.sum[h] == 0.0f ? 0.0f : rows.bundle.kept[h] / softmax.sum[h];
        if (at.lse && rows.to[h] != nullptr && lane % 4 == 0) {
          float high = softmax.base[h] * kLn2;
          if constexpr (C::kByteKeys) {
            const int place = tile.begin + (split ? 0 : 64 * group) + 16 * warp + 8 * h + lane / 4;
            high = fmaf(fmaf(-kWhole, unit[h], softmax.base[h]), kLn2, at.eight.q_shift[tile.head][place] * at.scale);
          }
          at.lse[tile.head][token[h]] = high + logf(softmax.sum[h]) - log1pf(-rows.mixed[h].share);
        }
      }
      if constexpr (C::kByteValues) {
        store_rows_of_bytes<C::kType>(o, rows, at.eight.v_unit[tile.head], at.eight.v_centre[tile.head], at.dim);
      } else {
        store_rows<C::kType>(o, rows, at.dim);
      }
    }
    release_tile();
  }
}

}  // namespace scope::cuda::attend90
