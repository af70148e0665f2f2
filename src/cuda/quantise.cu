// Rounds queries and keys to s8 and values to e4m3, by factors that each head's own extremes give.
#include "core/numeric.h"
#include "cuda/device/softmax_sm90.cuh"
#include "cuda/quantise.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChannels = 128, kLanes = 16, kEach = kChannels / kLanes;  // half a warp has a row, a lane 8 channels of it
constexpr int kRows = kThreads / kLanes;                                 // rows of a block at a time
constexpr int kParts = 32;          // of a head's tokens; sums are added up in their order
constexpr float kTiny = 0x1p-100f;  // and below: as good as zero
constexpr float kMostByte = 127, kMostE4m3 = 448;

// What is known of a channel: of a part's rows, then of all.
enum Extreme { kHighQ, kLowK, kHighK, kLowV, kHighV, kSumV, kCountV, kBeyond, kExtremes };
// What follows.
enum Factor { kTimesQ, kCentreK, kTimesK, kCentreV, kTimesV, kUnitV, kUnitK, kFactors };  // kUnitK: the same in all

struct Rows {
  HeadRows<const uint16_t> real;
  const uint16_t* extra;  // [heads, extra_count, dim]
  int64_t count, extra_count;

  __device__ const uint16_t* row(int64_t head, int64_t i, int dim) const {
    return i < count ? real.row(head, i) : extra + (head * extra_count + i - count) * dim;
  }
};

struct Source {
  int dim;
  bool values;  // are rounded too
  HeadRows<const uint16_t> q;
  int64_t q_tokens, groups;
  PerHead<const int32_t> order;
  PerHead<const int64_t> offsets;
  Rows k, v;
  const uint32_t* valid;  // bits of the real keys; may be null

  // Queries that attend to something, and the i-th of them.
  __device__ int64_t queries(int64_t head) const { return offsets ? offsets[head][groups] : q_tokens; }
  __device__ const uint16_t* query(int64_t head, int64_t i) const { return q.row(head, order ? order[head][i] : i); }
  __device__ bool is_valid(int64_t i) const {
    return valid == nullptr || i >= k.count || (valid[i / 32] >> (i % 32) & 1) != 0;
  }
  __host__ __device__ int64_t keys() const { return k.count + k.extra_count; }
};

// This lane's channels of a row; zeros from dim on.
template <DType kType>
__device__ void load(float (&x)[kEach], const uint16_t* row, int dim) {
  const int first = kEach * (threadIdx.x % kLanes);
  const uint4 bits = first < dim ? *reinterpret_cast<const uint4*>(row + first) : uint4{};
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<kType>(pairs[i]);
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
}

__device__ float merge(int which, float a, float b) {
  switch (which) {
    case kSumV:
    case kCountV:
    case kBeyond:
      return a + b;
    case kLowK:
    case kLowV:
      return fminf(a, b);
    default:
      return fmaxf(a, b);
  }
}

// A block for each part of a head's tokens.
template <DType kType>
__global__ void __launch_bounds__(kThreads) measure_channels(Source in, float* parts) {
  const int64_t head = blockIdx.x / kParts, part = blockIdx.x % kParts;
  const int slot = threadIdx.x / kLanes;
  float found[kExtremes][kEach];
  for (int c = 0; c < kEach; ++c) {
    found[kHighQ][c] = found[kSumV][c] = found[kCountV][c] = found[kBeyond][c] = 0;
    found[kLowK][c] = found[kLowV][c] = kInfinity;
    found[kHighK][c] = found[kHighV][c] = -kInfinity;
  }
  float x[kEach];
  const auto each = [&](int64_t count, const auto& body) {
    for (int64_t i = count * part / kParts + slot; i < count * (part + 1) / kParts; i += kRows) body(i);
  };
  each(in.queries(head), [&](int64_t i) {
    load<kType>(x, in.query(head, i), in.dim);
    for (int c = 0; c < kEach; ++c) {
      found[kHighQ][c] = fmaxf(found[kHighQ][c], fabsf(x[c]));
      found[kBeyond][c] = fmaf(x[c], 0, found[kBeyond][c]);  // NaN once x is not finite
    }
  });
  each(in.keys(), [&](int64_t i) {
    if (!in.is_valid(i)) return;
    load<kType>(x, in.k.row(head, i, in.dim), in.dim);
    for (int c = 0; c < kEach; ++c) {
      found[kLowK][c] = fminf(found[kLowK][c], x[c]);
      found[kHighK][c] = fmaxf(found[kHighK][c], x[c]);
      found[kBeyond][c] = fmaf(x[c], 0, found[kBeyond][c]);
    }
    if (!in.values) return;
    load<kType>(x, in.v.row(head, i, in.dim), in.dim);
    for (int c = 0; c < kEach; ++c) {
      found[kLowV][c] = fminf(found[kLowV][c], x[c]);
      found[kHighV][c] = fmaxf(found[kHighV][c], x[c]);
      found[kSumV][c] += x[c];
      found[kCountV][c] += 1;
      found[kBeyond][c] = fmaf(x[c], 0, found[kBeyond][c]);
    }
  });
  __shared__ float warps[kWarps][kChannels];
#pragma unroll
  for (int which = 0; which < kExtremes; ++which) {
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const float both = merge(which, found[which][c], __shfl_xor_sync(~0u, found[which][c], kLanes));
      if (threadIdx.x % 32 < kLanes) warps[threadIdx.x / 32][kEach * (threadIdx.x % kLanes) + c] = both;
    }
    __syncthreads();
    if (threadIdx.x < kChannels) {
      float all = warps[0][threadIdx.x];
      for (int w = 1; w < kWarps; ++w) all = merge(which, all, warps[w][threadIdx.x]);
      parts[(blockIdx.x * int64_t{kExtremes} + which) * kChannels + threadIdx.x] = all;
    }
    __syncthreads();
  }
}

// A block for each head, a thread for each channel. Keys are taken off the middle of their range, which leaves the least to
// be rounded, and queries and keys share their channels' ranges, so that one that stands out costs both the same.
__global__ void __launch_bounds__(kChannels) choose_factors(const float* parts, float* channels, uint32_t* beyond) {
  const int64_t head = blockIdx.x;
  const int c = static_cast<int>(threadIdx.x);
  float found[kExtremes];
#pragma unroll
  for (int which = 0; which < kExtremes; ++which) {
    const float* from = parts + (head * kParts * kExtremes + which) * kChannels + c;
    found[which] = from[0];
    for (int part = 1; part < kParts; ++part) {
      found[which] = merge(which, found[which], from[int64_t{part} * kExtremes * kChannels]);
    }
  }
  // Sums, so that nothing overflows while halves are finite.
  const float centre = 0.5f * found[kLowK] + 0.5f * found[kHighK];
  const float reach = fmaxf(found[kHighK] - centre, centre - found[kLowK]);
  const bool counts = found[kHighQ] > kTiny && reach > kTiny;  // a channel of zeros, or of one value, gives shifts alone
  const float even = counts ? sqrtf(reach) * sqrtf(found[kHighQ]) : 0;

  __shared__ float most[kChannels];
  most[c] = even;
  __syncthreads();
  for (int half = kChannels / 2; half > 0; half /= 2) {
    if (c < half) most[c] = fmaxf(most[c], most[c + half]);
    __syncthreads();
  }
  const float unit = most[0] > 0 ? most[0] / kMostByte : 1;
  const float mean = found[kCountV] > 0 ? found[kSumV] / found[kCountV] : 0;
  const float far = fmaxf(found[kHighV] - mean, mean - found[kLowV]);
  const bool spread = far > kTiny;

  float* to = channels + head * kFactors * kChannels + c;
  to[kTimesQ * kChannels] = counts ? sqrtf(reach / found[kHighQ]) : 0;
  to[kCentreK * kChannels] = found[kLowK] <= found[kHighK] ? centre : 0;
  to[kTimesK * kChannels] = counts ? sqrtf(found[kHighQ] / reach) / unit : 0;
  to[kUnitK * kChannels] = unit;
  to[kCentreV * kChannels] = mean;
  to[kTimesV * kChannels] = spread ? kMostE4m3 / far : 0;
  to[kUnitV * kChannels] = spread ? far / kMostE4m3 : 0;
  const bool any = __syncthreads_or(isnan(found[kBeyond]) ? 1 : 0) != 0;
  if (c == 0) beyond[head] = any ? 1 : 0;
}

__device__ float half_warp(float x, bool sum) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, x, step);
    x = sum ? x + other : fmaxf(x, other);
  }
  return x;
}

__device__ uint2 to_s8(const float (&x)[kEach]) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const int whole = max(-127, min(127, __float2int_rn(x[c])));
    words[c / 4] |= (static_cast<uint32_t>(whole) & 255u) << (8 * (c % 4));
  }
  return {words[0], words[1]};
}

__device__ uint2 to_e4m3(const float (&x)[kEach]) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) words[i] = pack_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  return {words[0], words[1]};
}

enum class Kind { queries, keys, values };

// Half a warp for each row, blocks one after the other over the heads.
template <DType kType, Kind kKind>
__global__ void __launch_bounds__(kThreads)
    round_rows(Source in, int64_t rows, int64_t blocks_of_head, const float* channels, int pitch, uint8_t* to, float* unit,
               float* shift) {
  const int64_t head = blockIdx.x / blocks_of_head;
  const int lane = threadIdx.x % kLanes;
  const float* factors = channels + head * kFactors * kChannels + kEach * lane;
  constexpr int kTimes = kKind == Kind::queries ? kTimesQ : kKind == Kind::keys ? kTimesK : kTimesV;
  constexpr int kCentre = kKind == Kind::values ? kCentreV : kCentreK;
  float times[kEach], centre[kEach], x[kEach];
  for (int c = 0; c < kEach; ++c) {
    times[c] = factors[kTimes * kChannels + c];
    centre[c] = factors[kCentre * kChannels + c];
  }
  const int64_t count = kKind == Kind::queries ? in.queries(head) : rows;
  for (int64_t first = blockIdx.x % blocks_of_head * kRows; first < count; first += blocks_of_head * kRows) {
    const int64_t i = first + threadIdx.x / kLanes;
    const bool real = i < count;
    const int64_t from = real ? i : count - 1;
    if constexpr (kKind == Kind::queries) {
      load<kType>(x, in.query(head, from), in.dim);
      float high = 0, along = 0;
      for (int c = 0; c < kEach; ++c) {
        along = fmaf(x[c], centre[c], along);
        x[c] *= times[c];
        high = fmaxf(high, fabsf(x[c]));
      }
      high = half_warp(high, false);
      along = half_warp(along, true);
      const float over = high > kTiny ? kMostByte / high : 0;
      for (int c = 0; c < kEach; ++c) x[c] *= over;
      if (real && lane == 0) {
        unit[head * rows + i] = (high > kTiny ? high / kMostByte : 1) * factors[kUnitK * kChannels];
        shift[head * rows + i] = along;
      }
    } else {
      load<kType>(x, (kKind == Kind::keys ? in.k : in.v).row(head, from, in.dim), in.dim);
      for (int c = 0; c < kEach; ++c) x[c] = (x[c] - centre[c]) * times[c];
    }
    if (real && kEach * lane < pitch) {
      const uint2 bytes = kKind == Kind::values ? to_e4m3(x) : to_s8(x);
      *reinterpret_cast<uint2*>(to + (head * rows + i) * pitch + kEach * lane) = bytes;
    }
  }
}

template <DType kType, Kind kKind>
void launch_round(const Exec& exec, const char* name, const Source& in, int64_t heads, int64_t rows, const float* channels,
                  int pitch, uint8_t* to, float* unit = nullptr, float* shift = nullptr) {
  if (rows == 0) return;
  const int64_t blocks =
      std::min(ceil_div(rows, kRows), std::max<int64_t>(1, ceil_div(8 * exec.device->multiprocessors, heads)));
  launch(exec, name, round_rows<kType, kKind>, heads * blocks, kThreads, 0, in, rows, blocks, channels, pitch, to, unit,
         shift);
}

template <DType kType>
void quantise(const Exec& exec, const Source& in, int64_t heads, float* parts, float* channels, uint32_t* beyond, int pitch,
              uint8_t* q, uint8_t* k, uint8_t* v, float* q_unit, float* q_shift) {
  launch(exec, "measure_channels", measure_channels<kType>, heads * kParts, kThreads, 0, in, parts);
  launch(exec, "choose_factors", choose_factors, heads, kChannels, 0, parts, channels, beyond);
  launch_round<kType, Kind::queries>(exec, "round_queries", in, heads, in.q_tokens, channels, pitch, q, q_unit, q_shift);
  launch_round<kType, Kind::keys>(exec, "round_keys", in, heads, in.keys(), channels, pitch, k);
  if (in.values) launch_round<kType, Kind::values>(exec, "round_values", in, heads, in.keys(), channels, pitch, v);
}

}  // namespace

Quantiser::Quantiser(Arena& arena, Products products, int64_t heads, int64_t q_tokens, int64_t k_rows, int64_t dim)
    : products_(products), pitch_(dim <= 64 ? 64 : kChannels) {
  q_ = arena.take<uint8_t>(heads * q_tokens * pitch_);
  k_ = arena.take<uint8_t>(heads * k_rows * pitch_);
  v_ = products == Products::qkv8 ? arena.take<uint8_t>(heads * k_rows * pitch_) : nullptr;
  q_unit_ = arena.take<float>(heads * q_tokens);
  q_shift_ = arena.take<float>(heads * q_tokens);
  parts_ = arena.take<float>(heads * kParts * kExtremes * kChannels);
  channels_ = arena.take<float>(heads * kFactors * kChannels);
  beyond_ = arena.take<uint32_t>(heads);
}

EightBits Quantiser::run(const Exec& exec, const AttendArgs& args, const uint16_t* extra_k, const uint16_t* extra_v) const {
  const int64_t extra = args.extra.count, keys = args.k.tokens + extra;
  const Source in{.dim = static_cast<int>(args.q.dim),
                  .values = products_ == Products::qkv8,
                  .q = head_rows(args.q),
                  .q_tokens = args.q.tokens,
                  .groups = args.groups,
                  .order = args.order,
                  .offsets = args.offsets,
                  .k = {head_rows(args.k), extra_k, args.k.tokens, extra},
                  .v = {head_rows(args.v), extra_v, args.k.tokens, extra},
                  .valid = args.valid};
  const auto work = args.q.dtype == DType::bf16 ? quantise<DType::bf16> : quantise<DType::f16>;
  work(exec, in, args.heads, parts_, channels_, beyond_, static_cast<int>(pitch_), q_, k_, v_, q_unit_, q_shift_);
  return {.pitch = static_cast<int32_t>(pitch_),
          .q = {q_, args.q.tokens * pitch_, pitch_},
          .k = {k_, keys * pitch_, pitch_},
          .v = {v_, keys * pitch_, pitch_},
          .q_unit = {q_unit_, args.q.tokens},
          .q_shift = {q_shift_, args.q.tokens},
          .v_unit = {channels_ + kUnitV * kChannels, kFactors * kChannels},
          .v_centre = {channels_ + kCentreV * kChannels, kFactors * kChannels},
          .beyond = beyond_};
}

}  // namespace scope::cuda
