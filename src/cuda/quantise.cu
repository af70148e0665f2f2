// Rounds queries and keys to s8 and values to e4m3, by factors that each head's own extremes give.
#include <cuda_bf16.h>

#include <type_traits>

#include "core/numeric.h"
#include "cuda/device/softmax_sm90.cuh"
#include "cuda/quantise.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChannels = 128, kLanes = 16, kEach = kChannels / kLanes;  // half a warp has a row, a lane 8 channels of it
constexpr int kSlots = kThreads / kLanes;                                // rows of a block at a time
constexpr int kRun = 4;                        // rows that half a warp reads before it uses any: memory is far
constexpr int kBlockRows = 4 * kRun * kSlots;  // rows that a block rounds
constexpr int kParts = 32;                     // of a head's tokens; sums are added up in their order
constexpr float kTiny = 0x1p-100f;             // and below: as good as zero
constexpr uint32_t kNotFinite = 0x7f800000;    // bits of a magnitude, and above
constexpr float kUnseen = -0.0f;               // a factor: the sample held nothing in this channel
constexpr float kMostByte = 127, kMostE4m3 = 448, kLeastUnit = 0x1p-100f;
// Blocks on a multiprocessor at a time: for sm_120 the same loops are given more registers.
#if __CUDA_ARCH__ >= 1000
constexpr int kBlocksAtOnce = 2, kRoundAtOnce = 2;
#else
constexpr int kBlocksAtOnce = 4, kRoundAtOnce = 3;
#endif

enum class Kind { queries, keys, values };

// What is known of a channel: of a part's rows (of queries and keys perhaps a sample), then of all. Beyond: NaN where
// something is not finite.
enum Extreme { kHighQ, kBeyondQ, kLowK, kHighK, kBeyondK, kLowV, kHighV, kBeyondV, kSumV, kCountV, kExtremes };
// What follows.
enum Factor { kTimesQ, kCentreK, kTimesK, kCentreV, kTimesV, kUnitV, kFactors };

struct Rows {
  HeadRows<const uint16_t> real;
  const uint16_t* extra;  // [heads, extra_count, dim]
  int64_t count, extra_count;

  __device__ const uint16_t* row(int64_t head, int64_t i, int dim) const {
    return i < count ? real.row(head, i) : extra + (head * extra_count + i - count) * dim;
  }
};

struct Source {
  int dim, channels;  // channels: of rotated rows
  bool values;        // are rounded too
  HeadRows<const uint16_t> q;
  int64_t q_tokens, groups;
  PerHead<const int32_t> order;
  PerHead<const int64_t> offsets;
  Rows k, v;
  const uint32_t *valid, *keep;  // bits of the real keys that count; null: all do, and none beside those of `valid`

  // Queries that attend to something, and the i-th of them.
  __device__ int64_t queries(int64_t head) const { return offsets ? offsets[head][groups] : q_tokens; }
  __device__ const uint16_t* query(int64_t head, int64_t i) const { return q.row(head, order ? order[head][i] : i); }
  __device__ bool samples_queries(int64_t head) const { return queries(head) >= kBalanceSample; }
  __device__ bool samples_keys() const { return k.count >= kBalanceSample; }
  __device__ bool counts(uint32_t key) const {
    if (valid == nullptr) return true;
    const uint32_t word = keep == nullptr ? valid[key / 32] : valid[key / 32] | keep[key / 32];
    return (word >> (key % 32) & 1) != 0;
  }
  __host__ __device__ int64_t keys() const { return k.count + k.extra_count; }
};

// This lane's channels of a row, in 16 bits; zeros from dim on.
__device__ uint4 load(const uint16_t* row, int dim) {
  const int first = kEach * (threadIdx.x % kLanes);
  return first < dim ? *reinterpret_cast<const uint4*>(row + first) : uint4{};
}

template <DType kType>
__device__ void unpack_row(float (&x)[kEach], const uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<kType>(pairs[i]);
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
}
template <DType kType>
__device__ void unpack_row(float (&x)[kEach], const uint4& bits) {
  unpack_row<kType>(x, {bits.x, bits.y, bits.z, bits.w});
}

__device__ float merge(int which, float a, float b) {
  switch (which) {
    case kSumV:
    case kCountV:
    case kBeyondQ:
    case kBeyondK:
    case kBeyondV:
      return a + b;
    case kLowK:
    case kLowV:
      return fminf(a, b);
    default:
      return fmaxf(a, b);
  }
}

// Two channels in 16 bits.
template <DType kType>
using Two = std::conditional_t<kType == DType::bf16, __nv_bfloat162, __half2>;

// Extremes of a part of a head's rows, two channels an instruction: they are values, so 16 bits hold them.
template <DType kType, Kind kKind>
__device__ void measure_rows(const Source& in, int64_t head, int64_t part, float* to) {
  constexpr bool queries = kKind == Kind::queries;
  constexpr uint32_t kInf = kType == DType::bf16 ? 0x7f807f80 : 0x7c007c00, kSigns = 0x80008000;
  const auto as_two = [](uint32_t bits) { return *reinterpret_cast<const Two<kType>*>(&bits); };
  const auto as_bits = [](Two<kType> two) { return *reinterpret_cast<const uint32_t*>(&two); };
  uint32_t low[4], high[4], beyond[4];
  float sum[kEach], rows = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) low[i] = kInf, high[i] = queries ? 0 : kInf | kSigns, beyond[i] = 0;
#pragma unroll
  for (int c = 0; c < kEach; ++c) sum[c] = 0;

  const auto add = [&](const uint4& row) {
    const uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto x = as_two(queries ? pairs[i] & ~kSigns : pairs[i]);
      high[i] = as_bits(__hmax2(as_two(high[i]), x));
      low[i] = as_bits(__hmin2(as_two(low[i]), x));
      beyond[i] = as_bits(__hfma2(x, as_two(0), as_two(beyond[i])));
    }
    if constexpr (kKind == Kind::values) {
      float x[kEach];
      unpack_row<kType>(x, row);
#pragma unroll
      for (int c = 0; c < kEach; ++c) sum[c] += x[c];
      rows += 1;
    }
  };
  // This part of `count` rows: row(i) is the i-th, and counts(i) whether it does.
  const auto scan = [&](int64_t count, const auto& row, const auto& counts) {
    const auto end = static_cast<uint32_t>(count * (part + 1) / kParts);
    auto i = static_cast<uint32_t>(count * part / kParts) + threadIdx.x / kLanes;
    for (; i + (kRun - 1) * kSlots < end; i += kRun * kSlots) {
      uint4 run[kRun];
#pragma unroll
      for (int r = 0; r < kRun; ++r) run[r] = load(row(i + r * kSlots), in.dim);
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
        if (counts(i + r * kSlots)) add(run[r]);
      }
    }
#pragma unroll 1
    for (; i < end; i += kSlots) {
      if (counts(i)) add(load(row(i), in.dim));
    }
  };
  const auto any = [](uint32_t) { return true; };
  if constexpr (queries) {
    const int64_t count = in.queries(head), every = in.samples_queries(head) ? kBalanceEvery : 1;
    if (count < in.q_tokens) {
      scan(
          count, [&](uint32_t i) { return in.query(head, i); },
          [&](uint32_t i) { return (in.order ? in.order[head][i] : i) % every == 0; });
    } else {  // all of them, in any order
      scan((count + every - 1) / every, [&](uint32_t i) { return in.q.row(head, i * every); }, any);
    }
  } else {
    const Rows& from = kKind == Kind::keys ? in.k : in.v;
    const uint32_t every = kKind == Kind::keys && in.samples_keys() ? kBalanceEvery : 1;
    scan((from.count + every - 1) / every, [&](uint32_t i) { return from.real.row(head, i * every); },
         [&](uint32_t i) { return in.counts(i * every); });
    scan(
        from.extra_count, [&](uint32_t i) { return from.row(head, from.count + i, in.dim); }, any);
  }

  __shared__ float warps[kWarps][kChannels];
  const auto write = [&](Extreme which, const float(&found)[kEach]) {
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const float both = merge(which, found[c], __shfl_xor_sync(~0u, found[c], kLanes));
      if (threadIdx.x % 32 < kLanes) warps[threadIdx.x / 32][kEach * (threadIdx.x % kLanes) + c] = both;
    }
    __syncthreads();
    if (threadIdx.x < kChannels) {
      float all = warps[0][threadIdx.x];
      for (int w = 1; w < kWarps; ++w) all = merge(which, all, warps[w][threadIdx.x]);
      to[which * kChannels + threadIdx.x] = all;
    }
    __syncthreads();
  };
  float x[kEach];
  const auto write_pairs = [&](Extreme which, const uint32_t(&found)[4]) {
    unpack_row<kType>(x, found);
    write(which, x);
  };
  constexpr Extreme kHigh = queries ? kHighQ : kKind == Kind::keys ? kHighK : kHighV;
  constexpr Extreme kBeyond = queries ? kBeyondQ : kKind == Kind::keys ? kBeyondK : kBeyondV;
  write_pairs(kHigh, high);
  write_pairs(kBeyond, beyond);
  if constexpr (!queries) write_pairs(kKind == Kind::keys ? kLowK : kLowV, low);
  if constexpr (kKind == Kind::values) {
    write(kSumV, sum);
    for (int c = 0; c < kEach; ++c) x[c] = rows;
    write(kCountV, x);
  }
}

// A block for each part of a head's queries, keys or values.
template <DType kType>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) measure_channels(Source in, int64_t heads, float* parts) {
  const int64_t part = blockIdx.x % (heads * kParts), head = part / kParts;
  float* to = parts + part * kExtremes * kChannels;
  switch (static_cast<Kind>(blockIdx.x / (heads * kParts))) {
    case Kind::queries:
      return measure_rows<kType, Kind::queries>(in, head, part % kParts, to);
    case Kind::keys:
      return measure_rows<kType, Kind::keys>(in, head, part % kParts, to);
    case Kind::values:
      return measure_rows<kType, Kind::values>(in, head, part % kParts, to);
  }
}

// A block for each head, a thread for each channel. Keys are taken off the middle of their range, which leaves the least to
// be rounded, and queries and keys share their channels' ranges, so that one that stands out costs both the same.
__global__ void __launch_bounds__(kChannels)
    choose_factors(Source in, const float* parts, float* channels, uint32_t* most, uint32_t* beyond) {
  const int64_t head = blockIdx.x;
  const int c = static_cast<int>(threadIdx.x);
  float found[kExtremes] = {};
#pragma unroll
  for (int which = 0; which < kExtremes; ++which) {
    if (which >= kLowV && !in.values) break;
    const float* from = parts + (head * kParts * kExtremes + which) * kChannels + c;
    float each[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) each[part] = from[int64_t{part} * kExtremes * kChannels];
    found[which] = each[0];
#pragma unroll
    for (int part = 1; part < kParts; ++part) found[which] = merge(which, found[which], each[part]);
  }
  // Sums, so that nothing overflows while halves are finite.
  const bool any_key = found[kLowK] <= found[kHighK];
  const float centre = any_key ? 0.5f * found[kLowK] + 0.5f * found[kHighK] : 0;
  const float reach = any_key ? fmaxf(found[kHighK] - centre, centre - found[kLowK]) : 0;
  const bool counts = found[kHighQ] > kTiny && reach > kTiny;  // a channel of zeros, or of one value, gives shifts alone
  // Queries or keys that were not measured may differ from those that were: who reads them all finds them.
  const bool unseen_q = in.samples_queries(head) && found[kHighQ] <= kTiny && reach > kTiny;
  const bool unseen_k = c < in.dim && in.samples_keys() && reach <= kTiny;
  const float mean = found[kCountV] > 0 ? found[kSumV] / found[kCountV] : 0;
  const float far = fmaxf(found[kHighV] - mean, mean - found[kLowV]);
  const bool spread = far > kTiny;

  float* to = channels + head * kFactors * kChannels + c;
  const float times_q = counts ? sqrtf(reach / found[kHighQ]) : 0, times_k = counts ? sqrtf(found[kHighQ] / reach) : 0;
  to[kTimesQ * kChannels] = unseen_q ? kUnseen : times_q;
  to[kCentreK * kChannels] = centre;
  to[kTimesK * kChannels] = unseen_k ? kUnseen : times_k;
  to[kCentreV * kChannels] = mean;
  to[kTimesV * kChannels] = spread ? kMostE4m3 / far : 0;
  to[kUnitV * kChannels] = spread ? far / kMostE4m3 : 0;
  const bool mine = isnan(found[kBeyondQ] + found[kBeyondK] + found[kBeyondV]) || !isfinite(times_q) || !isfinite(times_k);
  const bool any = __syncthreads_or(mine ? 1 : 0) != 0;
  if (c == 0) most[head] = 0, beyond[head] = any ? 1 : 0;
}

// This lane's channels of a head's factor.
__device__ void read_factor(float (&x)[kEach], const float* channels, int64_t head, Factor which) {
  const float* from = channels + (head * kFactors + which) * kChannels + kEach * (threadIdx.x % kLanes);
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// A row's part times its factors. What the sample held nothing of becomes NaN, by which the head is found to need 16 bits.
struct Balance {
  float times[kEach];
  bool any_unseen = false;

  __device__ Balance(const float* channels, int64_t head, Factor which) {
    read_factor(times, channels, head, which);
#pragma unroll
    for (int c = 0; c < kEach; ++c) any_unseen |= is_unseen(c);
  }
  __device__ bool is_unseen(int c) const { return __float_as_uint(times[c]) == __float_as_uint(kUnseen); }
  __device__ void apply(float (&x)[kEach]) const {
    if (any_unseen) {
#pragma unroll
      for (int c = 0; c < kEach; ++c) x[c] = is_unseen(c) && x[c] != 0 ? kInfinity : x[c];
    }
#pragma unroll
    for (int c = 0; c < kEach; ++c) x[c] = __fmul_rn(x[c], times[c]);
  }
};

// Multiplies a row by the Hadamard matrix of `channels`, without its factor. In steps between lanes each keeps half of its
// values and sends half. So results lie in an order of their own, and some have the other sign: the same in queries and
// keys.
__device__ void rotate(float (&x)[kEach], int channels) {
#pragma unroll
  for (int step = 1; step < kEach; step *= 2) {
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      if ((c & step) != 0) continue;
      const float a = x[c], b = x[c + step];
      x[c] = a + b, x[c + step] = a - b;
    }
  }
  const auto exchange = [&](int step) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int c = 0; c < kEach / 2; ++c) {
      const float keeps = upper ? x[c + kEach / 2] : x[c];
      const float gets = __shfl_xor_sync(~0u, upper ? x[c] : x[c + kEach / 2], step);
      x[c] = keeps + gets, x[c + kEach / 2] = keeps - gets;
    }
  };
#pragma unroll
  for (int step = 1; step < kLanes / 2; step *= 2) exchange(step);
  if (channels == kChannels) exchange(kLanes / 2);
}

// The bits of the largest magnitude: as whole numbers, what is not finite is above all others.
__device__ uint32_t largest(uint32_t most, const float (&x)[kEach]) {
#pragma unroll
  for (int c = 0; c < kEach; ++c) most = max(most, __float_as_uint(fabsf(x[c])));
  return most;
}

// To the nearest whole numbers, of which the lowest bytes remain: only keys that do not count lie beyond -127 to 127.
__device__ uint2 to_s8(const float (&x)[kEach]) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t whole[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) whole[c] = __float_as_uint(__fadd_rn(x[4 * i + c], kWhole));
    words[i] = __byte_perm(__byte_perm(whole[0], whole[1], 0x0040), __byte_perm(whole[2], whole[3], 0x0040), 0x5410);
  }
  return {words[0], words[1]};
}

__device__ uint2 to_e4m3(const float (&x)[kEach]) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) words[i] = pack_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  return {words[0], words[1]};
}

// Where bytes go, and with queries their factors, and the heads in which they cannot be.
struct Bytes {
  int pitch;
  uint8_t *q, *k, *v;
  float *unit, *shift;
  uint32_t* most;  // [heads] bits of the largest magnitude in the rotated keys
  uint32_t* beyond;

  // This lane's part of a row.
  __device__ void write(uint8_t* row, const uint2& bytes) const {
    const int first = kEach * (threadIdx.x % kLanes);
    if (first < pitch) *reinterpret_cast<uint2*>(row + first) = bytes;
  }
};

// Merged over half a warp.
template <class T, class Merge>
__device__ T merge_half(T x, const Merge& merge) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = merge(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// The kernels below: half a warp for each run of rows, a block for kBlockRows.

template <DType kType>
__device__ void round_queries(const Source& in, int64_t head, int64_t block, const float* channels, const Bytes& to) {
  const int lane = threadIdx.x % kLanes;
  const int64_t start = block * kBlockRows, place = head * in.q_tokens + start;
  const int count = static_cast<int>(min(in.queries(head) - start, int64_t{kBlockRows}));
  const uint32_t most_k = to.most[head];
  if (most_k >= kNotFinite) to.beyond[head] = 1;
  // Of a byte in both. Rotating both multiplies products by the number of channels.
  const float high_k = __uint_as_float(most_k);
  const float unit = (high_k > kTiny ? high_k : kMostByte) / (kMostByte * kMostByte * static_cast<float>(in.channels));
  const Balance balance(channels, head, kTimesQ);
  float centre[kEach];
  read_factor(centre, channels, head, kCentreK);
  for (int turn = 0; turn < count; turn += kRun * kSlots) {
    const int first = turn + static_cast<int>(threadIdx.x) / kLanes * kRun;
    uint4 run[kRun];
#pragma unroll
    for (int r = 0; r < kRun; ++r) run[r] = load(in.query(head, start + min(first + r, count - 1)), in.dim);
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      float x[kEach], along = 0;
      unpack_row<kType>(x, run[r]);
#pragma unroll
      for (int c = 0; c < kEach; ++c) along = fmaf(x[c], centre[c], along);
      balance.apply(x);
      rotate(x, in.channels);
      const uint32_t most = merge_half(largest(0, x), [](uint32_t a, uint32_t b) { return max(a, b); });
      const float shift = merge_half(along, [](float a, float b) { return a + b; });
      const float high = __uint_as_float(most), over = high > kTiny ? kMostByte / high : 0;
#pragma unroll
      for (int c = 0; c < kEach; ++c) x[c] *= over;
      if (first + r < count) {
        const int64_t at = place + first + r;
        to.write(to.q + at * to.pitch, to_s8(x));
        if (lane == 0) {
          to.unit[at] = fmaxf((high > kTiny ? high : kMostByte) * unit, kLeastUnit);  // biases are divided by it
          to.shift[at] = shift;
          if (most >= kNotFinite || !isfinite(shift)) to.beyond[head] = 1;
        }
      }
    }
  }
}

// The blocks of the extra rows follow those of the real ones. Calls use(row, whether it is one, x) for this lane's part of
// each row, scaled and of keys rotated; half warps call it together.
template <DType kType, Kind kKind, class Use>
__device__ void each_row(const Source& in, int64_t head, int64_t block, const float* channels, const Use& use) {
  constexpr bool keys = kKind == Kind::keys;
  const Rows& rows = keys ? in.k : in.v;
  const int64_t real_blocks = (rows.count + kBlockRows - 1) / kBlockRows;
  const bool extra = block >= real_blocks;
  const int64_t start = (extra ? block - real_blocks : block) * kBlockRows;
  const int count = static_cast<int>(min((extra ? rows.extra_count : rows.count) - start, int64_t{kBlockRows}));
  const int64_t place = (extra ? rows.count : 0) + start, step = extra ? in.dim : rows.real.row_step;
  const uint16_t* from = rows.row(head, place, in.dim);
  const Balance balance(channels, head, keys ? kTimesK : kTimesV);
  float centre[kEach];
  read_factor(centre, channels, head, keys ? kCentreK : kCentreV);
  for (int turn = 0; turn < count; turn += kRun * kSlots) {
    const int first = turn + static_cast<int>(threadIdx.x) / kLanes * kRun;
    uint4 run[kRun];
#pragma unroll
    for (int r = 0; r < kRun; ++r) run[r] = load(from + step * min(first + r, count - 1), in.dim);
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      float x[kEach];
      unpack_row<kType>(x, run[r]);
#pragma unroll
      for (int c = 0; c < kEach; ++c) x[c] -= centre[c];
      balance.apply(x);
      if constexpr (keys) rotate(x, in.channels);
      use(place + first + r, first + r < count, x);
    }
  }
}

// The largest magnitude in every head's rotated keys. A maximum does not depend on the order.
template <DType kType>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    measure_keys(Source in, int64_t key_blocks, const float* channels, uint32_t* most) {
  const int64_t head = blockIdx.x / key_blocks;
  uint32_t mine = 0;
  each_row<kType, Kind::keys>(in, head, blockIdx.x % key_blocks, channels,
                              [&](int64_t row, bool real, const float(&x)[kEach]) {
                                if (real && (row >= in.k.count || in.counts(row))) mine = largest(mine, x);
                              });
  mine = __reduce_max_sync(~0u, mine);
  if (threadIdx.x % 32 == 0 && mine > 0) atomicMax(most + head, mine);
}

template <DType kType, Kind kKind>
__device__ void round_rows(const Source& in, int64_t head, int64_t block, const float* channels, const Bytes& to) {
  constexpr bool keys = kKind == Kind::keys;
  uint8_t* bytes = (keys ? to.k : to.v) + head * in.keys() * to.pitch;
  const float high = keys ? __uint_as_float(to.most[head]) : 0, over = high > kTiny ? kMostByte / high : 0;
  each_row<kType, kKind>(in, head, block, channels, [&](int64_t row, bool real, float(&x)[kEach]) {
    if constexpr (keys) {
#pragma unroll
      for (int c = 0; c < kEach; ++c) x[c] *= over;
    }
    if (real) to.write(bytes + row * to.pitch, keys ? to_s8(x) : to_e4m3(x));
  });
}

// The blocks of every head's queries come first, then those of its keys and its values.
template <DType kType>
__global__ void __launch_bounds__(kThreads, kRoundAtOnce)
    round_all(Source in, int64_t heads, int64_t query_blocks, int64_t key_blocks, const float* channels, Bytes to) {
  int64_t block = blockIdx.x;
  if (block < heads * query_blocks) {
    return round_queries<kType>(in, block / query_blocks, block % query_blocks, channels, to);
  }
  block -= heads * query_blocks;
  if (block < heads * key_blocks) {
    return round_rows<kType, Kind::keys>(in, block / key_blocks, block % key_blocks, channels, to);
  }
  block -= heads * key_blocks;
  round_rows<kType, Kind::values>(in, block / key_blocks, block % key_blocks, channels, to);
}

template <DType kType>
void quantise(const Exec& exec, const Source& in, int64_t heads, float* parts, float* channels, const Bytes& to) {
  const int kinds = in.values ? 3 : 2;
  launch(exec, "measure_channels", measure_channels<kType>, kinds * heads * kParts, kThreads, 0, in, heads, parts);
  launch(exec, "choose_factors", choose_factors, heads, kChannels, 0, in, parts, channels, to.most, to.beyond);
  const int64_t query_blocks = ceil_div(in.q_tokens, kBlockRows);
  const int64_t key_blocks = ceil_div(in.k.count, kBlockRows) + ceil_div(in.k.extra_count, kBlockRows);
  if (key_blocks > 0)
    launch(exec, "measure_keys", measure_keys<kType>, heads * key_blocks, kThreads, 0, in, key_blocks, channels, to.most);
  launch(exec, "round_all", round_all<kType>, heads * (query_blocks + (kinds - 1) * key_blocks), kThreads, 0, in, heads,
         query_blocks, key_blocks, channels, to);
}

}  // namespace

Quantiser::Quantiser(Arena& arena, Products products, int64_t heads, int64_t q_tokens, int64_t k_rows, int64_t dim)
    : products_(products), pitch_(rotated_channels(dim)) {
  q_ = arena.take<uint8_t>(heads * q_tokens * pitch_);
  k_ = arena.take<uint8_t>(heads * k_rows * pitch_);
  v_ = products == Products::qkv8 ? arena.take<uint8_t>(heads * k_rows * pitch_) : nullptr;
  q_unit_ = arena.take<float>(heads * q_tokens);
  q_shift_ = arena.take<float>(heads * q_tokens);
  parts_ = arena.take<float>(heads * kParts * kExtremes * kChannels);
  channels_ = arena.take<float>(heads * kFactors * kChannels);
  most_ = arena.take<uint32_t>(heads);
  beyond_ = arena.take<uint32_t>(heads);
}

EightBits Quantiser::run(const Exec& exec, const AttendArgs& args, const uint16_t* extra_k, const uint16_t* extra_v) const {
  const int64_t extra = args.extra.count, keys = args.k.tokens + extra;
  const Source in{.dim = static_cast<int>(args.q.dim),
                  .channels = static_cast<int>(pitch_),
                  .values = products_ == Products::qkv8,
                  .q = head_rows(args.q),
                  .q_tokens = args.q.tokens,
                  .groups = args.groups,
                  .order = args.order,
                  .offsets = args.offsets,
                  .k = {head_rows(args.k), extra_k, args.k.tokens, extra},
                  .v = {head_rows(args.v), extra_v, args.k.tokens, extra},
                  .valid = args.valid,
                  .keep = args.keep};
  const auto work = args.q.dtype == DType::bf16 ? quantise<DType::bf16> : quantise<DType::f16>;
  work(exec, in, args.heads, parts_, channels_, {static_cast<int>(pitch_), q_, k_, v_, q_unit_, q_shift_, most_, beyond_});
  return {.q = {q_, args.q.tokens * pitch_, pitch_},
          .k = {k_, keys * pitch_, pitch_},
          .v = {v_, keys * pitch_, pitch_},
          .q_unit = {q_unit_, args.q.tokens},
          .q_shift = {q_shift_, args.q.tokens},
          .v_unit = {channels_ + kUnitV * kChannels, kFactors * kChannels},
          .v_centre = {channels_ + kCentreV * kChannels, kFactors * kChannels},
          .beyond = beyond_};
}

}  // namespace scope::cuda
