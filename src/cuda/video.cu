// Norms, rotation, gates, sums and patches of a video model: memory-bound kernels, a block per row or an element per thread.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "core/normal.h"
#include "cuda/launch.h"
#include "cuda/video.h"

namespace scope::cuda {

namespace {

using video::Activation;
using video::ChannelOrder;
using video::Matrix;
using video::PatchGrid;

constexpr int kThreads = 128;

// Four neighbouring elements, which lie on 8 or 16 bytes: one access.
__device__ float4 load4(const __nv_bfloat16* p) {
  const uint2 bits = *reinterpret_cast<const uint2*>(p);
  return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000), __uint_as_float(bits.y << 16),
                     __uint_as_float(bits.y & 0xffff0000));
}
__device__ void store4(__nv_bfloat16* p, float4 v) {
  const __nv_bfloat162 both[] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(p) =
      make_uint2(reinterpret_cast<const uint32_t&>(both[0]), reinterpret_cast<const uint32_t&>(both[1]));
}
__device__ float4 load4(const Matrix& m, int64_t at) {
  if (m.dtype == DType::f32) return *reinterpret_cast<const float4*>(static_cast<const float*>(m.data) + at);
  return load4(static_cast<const __nv_bfloat16*>(m.data) + at);
}

__device__ void store4(const Matrix& m, int64_t at, float4 v) {
  if (m.dtype == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(m.data) + at) = v;
    return;
  }
  store4(static_cast<__nv_bfloat16*>(m.data) + at, v);
}

__device__ void store1(const Matrix& m, int64_t at, float v) {
  if (m.dtype == DType::f32) {
    static_cast<float*>(m.data)[at] = v;
  } else {
    static_cast<__nv_bfloat16*>(m.data)[at] = __float2bfloat16_rn(v);
  }
}

__device__ float load1(const Matrix& m, int64_t at) {
  return m.dtype == DType::f32 ? static_cast<const float*>(m.data)[at]
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(m.data)[at]);
}

// The same tree for every row: sums are repeatable.
__device__ float block_sum(float x) {
  __shared__ float parts[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();  // an earlier sum may still be read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (const float part : parts) sum += part;
  return sum;
}

__device__ float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}
__device__ float4 vector4(const float* x, int64_t at) { return *reinterpret_cast<const float4*>(x + at); }

__device__ float sum4(float4 v) { return v.x + v.y + (v.z + v.w); }
__device__ float squares4(float4 v, float mean) {
  const float a = v.x - mean, b = v.y - mean, c = v.z - mean, d = v.w - mean;
  return a * a + b * b + (c * c + d * d);
}
__device__ float4 normed4(float4 v, float mean, float factor, const float* scale, const float* shift, int64_t at) {
  v = make_float4((v.x - mean) * factor, (v.y - mean) * factor, (v.z - mean) * factor, (v.w - mean) * factor);
  return scale == nullptr ? v : fma4(v, vector4(scale, at), vector4(shift, at));
}

// Any row, read three times.
__global__ void __launch_bounds__(kThreads)
    wide_norm_kernel(Matrix x, const float* scale, const float* shift, float eps, Matrix out) {
  const int64_t row = blockIdx.x * x.columns, n = x.columns;
  float sum = 0;
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) sum += sum4(load4(x, row + i));
  const float mean = block_sum(sum) / static_cast<float>(n);
  float square = 0;
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) square += squares4(load4(x, row + i), mean);
  const float factor = 1.0f / sqrtf(block_sum(square) / static_cast<float>(n) + eps);
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) {
    store4(out, row + i, normed4(load4(x, row + i), mean, factor, scale, shift, i));
  }
}

// Rows of 4 kFours kThreads columns: read once, and added up in wide_norm_kernel's order. What is added to x before, gate *
// y, is none of them, y or both.
enum class Added { none, plain, gated };
constexpr int kNormBlocks = 4;  // on a multiprocessor, at least: without a bound a kernel for sm_80 spills at 32 registers
template <int kFours, Added kAdded>
__global__ void __launch_bounds__(kThreads, kNormBlocks)
    norm_kernel(float* x, const __nv_bfloat16* y, const float* gate, const float* scale, const float* shift, float eps,
                __nv_bfloat16* out) {
  constexpr int kColumns = 4 * kFours * kThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kColumns;
  float4 v[kFours];
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kFours; ++k) body(4 * (static_cast<int>(threadIdx.x) + k * kThreads), v[k]);
  };
  each([&](int i, float4& at) { at = vector4(x, row + i); });
  if constexpr (kAdded != Added::none) {
    each([&](int i, float4& at) {
      at = fma4(load4(y + row + i), kAdded == Added::gated ? vector4(gate, i) : make_float4(1, 1, 1, 1), at);
    });
    each([&](int i, float4& at) { *reinterpret_cast<float4*>(x + row + i) = at; });
  }
  float sum = 0;
  each([&](int, float4& at) { sum += sum4(at); });
  const float mean = block_sum(sum) / static_cast<float>(kColumns);
  float square = 0;
  each([&](int, float4& at) { square += squares4(at, mean); });
  const float factor = 1.0f / sqrtf(block_sum(square) / static_cast<float>(kColumns) + eps);
  each([&](int i, float4& at) { store4(out + row + i, normed4(at, mean, factor, scale, shift, i)); });
}

// Channels i .. i + 3 of a head, turned by its token's cosines, then sines; null: as they are.
__device__ float4 turned(float4 y, const float* angles, int i, int head_dim) {
  if (angles == nullptr) return y;
  const int pair = i / 2;
  const float c0 = angles[pair], c1 = angles[pair + 1];
  const float s0 = angles[head_dim / 2 + pair], s1 = angles[head_dim / 2 + pair + 1];
  return make_float4(y.x * c0 - y.y * s0, y.x * s0 + y.y * c0, y.z * c1 - y.w * s1, y.z * s1 + y.w * c1);
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(Matrix x, const float* weight, float eps, const float* rotation, int head_dim, Matrix out) {
  const int64_t row = blockIdx.x * x.columns, n = x.columns;
  float square = 0;
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) {
    const float4 v = load4(x, row + i);
    square += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
  }
  const float factor = 1.0f / sqrtf(block_sum(square) / static_cast<float>(n) + eps);
  const float* angles = rotation == nullptr ? nullptr : rotation + static_cast<int64_t>(blockIdx.x) * head_dim;
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) {
    const float4 v = load4(x, row + i), w = vector4(weight, i);
    const float4 y = make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
    store4(out, row + i, turned(y, angles, static_cast<int>(i % head_dim), head_dim));
  }
}

// A warp for each head: rows are dense, so that heads follow one another across them.
__global__ void __launch_bounds__(kThreads)
    head_norm_kernel(Matrix x, const float* weight, float eps, const float* rotation, int head_dim, Matrix out) {
  const int64_t head = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32, heads = x.columns / head_dim;
  if (head >= x.rows * heads) return;
  const int first = 4 * static_cast<int>(threadIdx.x % 32);
  const int64_t at = head * head_dim;
  float square = 0;
  for (int i = first; i < head_dim; i += 128) {
    const float4 v = load4(x, at + i);
    square += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
  }
  for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
  const float factor = 1.0f / sqrtf(square / static_cast<float>(head_dim) + eps);
  const float* angles = rotation == nullptr ? nullptr : rotation + head / heads * head_dim;
  for (int i = first; i < head_dim; i += 128) {
    const float4 v = load4(x, at + i), w = vector4(weight, i);
    const float4 y = make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
    store4(out, at + i, turned(y, angles, i, head_dim));
  }
}

__global__ void __launch_bounds__(kThreads) convert_kernel(Matrix x, Matrix out, int64_t n) {
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (i < n) store4(out, i, load4(x, i));
}

// The largest of the block's.
__device__ uint32_t block_max(uint32_t x) {
  __shared__ uint32_t parts[kThreads / 32];
  x = __reduce_max_sync(~0u, x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  uint32_t most = 0;
  for (const uint32_t part : parts) most = max(most, part);
  return most;
}

__device__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }
__device__ uint32_t e4m3_pair(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

__global__ void __launch_bounds__(kThreads) quantise_rows_kernel(Matrix x, uint8_t* out, float* scales) {
  constexpr float kMost = 448, kTiny = 0x1p-100f;
  constexpr uint32_t kInf = 0x7f800000;
  const int64_t row = blockIdx.x * x.columns, n = x.columns;
  uint32_t most = 0;  // as bits: those of NaN are above those of Inf, and these above all numbers'
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) {
    const float4 v = load4(x, row + i);
    most = max(max(most, max(magnitude(v.x), magnitude(v.y))), max(magnitude(v.z), magnitude(v.w)));
  }
  most = block_max(most);
  const float scale = most == 0     ? 1.0f
                      : most < kInf ? fmaxf(__uint_as_float(most), kTiny) / kMost
                                    : __uint_as_float(0x7fffffff);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  const float times = 1.0f / scale;
  for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * kThreads) {
    const float4 v = load4(x, row + i);
    *reinterpret_cast<uint32_t*>(out + row + i) = e4m3_pair(v.x * times, v.y * times) | e4m3_pair(v.z * times, v.w * times)
                                                                                            << 16;
  }
}

__global__ void __launch_bounds__(kThreads) widen_kernel(Matrix x, Matrix out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t column = i % out.columns;
  store1(out, i, column < x.columns ? load1(x, i / out.columns * x.columns + column) : 0.0f);
}

__global__ void __launch_bounds__(kThreads) add_kernel(Matrix x, Matrix y, const float* gate, int64_t n) {
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (i >= n) return;
  const float4 one = make_float4(1, 1, 1, 1);
  store4(x, i, fma4(load4(y, i), gate == nullptr ? one : vector4(gate, i % x.columns), load4(x, i)));
}

__device__ float activated(float x, Activation then) {
  if (then == Activation::silu) return x / (1.0f + expf(-x));
  if (then == Activation::gelu) return 0.5f * x * erfcf(-0.70710678f * x);
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

__global__ void __launch_bounds__(kThreads) activate_kernel(Matrix x, Activation then, int64_t n) {
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (i >= n) return;
  const float4 v = load4(x, i);
  store4(x, i, make_float4(activated(v.x, then), activated(v.y, then), activated(v.z, then), activated(v.w, then)));
}

__global__ void __launch_bounds__(kThreads)
    modulation_kernel(const float* table, const float* time, int64_t n, int64_t columns, uint32_t plus_one, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) out[i] = table[i] + time[i] + static_cast<float>(plus_one >> (i / columns) & 1u);
}

__global__ void __launch_bounds__(kThreads) axpy_kernel(float factor, const float* y, int64_t n, float* x) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) x[i] += factor * y[i];
}

struct Terms {
  video::Term term[video::kMostTerms];
  int64_t count;
};
__global__ void __launch_bounds__(kThreads) combine_kernel(Terms terms, int64_t n, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
#pragma unroll
  for (int64_t k = 0; k < video::kMostTerms; ++k) {
    if (k < terms.count) sum += terms.term[k].factor * terms.term[k].x[i];
  }
  out[i] = sum;
}

// Where latent element `at` of a channel lies: its token, and its place in the token's patch.
struct Spot {
  int64_t token, place;
};
__device__ Spot spot_of(const PatchGrid& g, int64_t at) {
  const int64_t height = g.h * g.ph, width = g.w * g.pw;
  const int64_t x = at % width, y = at / width % height, t = at / width / height;
  const int64_t patch = (t / g.pt * g.h + y / g.ph) * g.w + x / g.pw;
  return {g.places == nullptr ? patch : g.places[patch], (t % g.pt * g.ph + y % g.ph) * g.pw + x % g.pw};
}

__global__ void __launch_bounds__(kThreads)
    patchify_kernel(PatchGrid g, const float* latent, int64_t channels, const float* more, Matrix out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t patch = g.pt * g.ph * g.pw, volume = g.t * g.h * g.w * patch, channel = i / volume;
  const Spot spot = spot_of(g, i % volume);
  const float value = channel < channels ? latent[i] : more[i - channels * volume];
  store1(out, spot.token * out.columns + channel * patch + spot.place, value);
}

__global__ void __launch_bounds__(kThreads)
    unpatchify_kernel(PatchGrid g, Matrix x, int64_t channels, ChannelOrder order, float* latent, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t patch = g.pt * g.ph * g.pw, volume = g.t * g.h * g.w * patch, channel = i / volume;
  const Spot spot = spot_of(g, i % volume);
  const int64_t at = order == ChannelOrder::slowest ? channel * patch + spot.place : spot.place * channels + channel;
  latent[i] = load1(x, spot.token * x.columns + at);
}

// A thread makes four numbers, which follow one another in a row or go on in the next.
__global__ void __launch_bounds__(kThreads)
    draw_kernel(RandomStream from, float mean, float deviation, int64_t drawn, Matrix x, int64_t n) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (4 * block >= n) return;
  const FourNormals four = four_normals(from, static_cast<uint64_t>(block));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t i = 4 * block + j;
    if (i < n) store1(x, i / drawn * x.columns + i % drawn, fmaf(deviation, four.number[j], mean));
  }
}

cudaStream_t on(void* stream) { return static_cast<cudaStream_t>(stream); }

// Blocks for n threads; 2^31 blocks of 128 are more than any tensor here has.
unsigned blocks(int64_t n) { return static_cast<unsigned>(std::max<int64_t>(1, (n + kThreads - 1) / kThreads)); }

// Whether a row has the columns of a known model, and so a kernel that keeps it in registers.
template <Added kAdded>
bool norm_in_registers(void* stream, Matrix x, Matrix y, const float* gate, const float* scale, const float* shift,
                       float eps, Matrix out) {
  if (out.dtype != DType::bf16 || (kAdded != Added::none && y.dtype != DType::bf16)) return false;
  const auto fits = [&]<int kFours>() {
    if (x.columns != 4 * kFours * kThreads) return false;
    norm_kernel<kFours, kAdded><<<static_cast<unsigned>(x.rows), kThreads, 0, on(stream)>>>(
        static_cast<float*>(x.data), static_cast<const __nv_bfloat16*>(y.data), gate, scale, shift, eps,
        static_cast<__nv_bfloat16*>(out.data));
    check_launch("norm");
    return true;
  };
  return fits.template operator()<3>() || fits.template operator()<6>() || fits.template operator()<10>();
}

}  // namespace

void layer_norm(void* stream, Matrix x, const float* scale, const float* shift, float eps, Matrix out) {
  if (norm_in_registers<Added::none>(stream, x, {}, nullptr, scale, shift, eps, out)) return;
  wide_norm_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, on(stream)>>>(x, scale, shift, eps, out);
  check_launch("layer_norm");
}

void add_norm(void* stream, Matrix x, Matrix y, const float* gate, const float* scale, const float* shift, float eps,
              Matrix out) {
  if (gate != nullptr ? norm_in_registers<Added::gated>(stream, x, y, gate, scale, shift, eps, out)
                      : norm_in_registers<Added::plain>(stream, x, y, gate, scale, shift, eps, out)) {
    return;
  }
  add(stream, x, y, gate);
  layer_norm(stream, x, scale, shift, eps, out);
}

void rms_norm(void* stream, Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) {
  rms_norm_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, on(stream)>>>(x, weight, eps, rotation,
                                                                              static_cast<int>(head_dim), out);
  check_launch("rms_norm");
}

void head_norm(void* stream, Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) {
  head_norm_kernel<<<blocks(x.rows * x.columns / head_dim * 32), kThreads, 0, on(stream)>>>(x, weight, eps, rotation,
                                                                                            static_cast<int>(head_dim), out);
  check_launch("head_norm");
}

void convert(void* stream, Matrix x, Matrix out) {
  const int64_t n = out.rows * out.columns;
  if (x.columns == out.columns) {
    convert_kernel<<<blocks(n / 4), kThreads, 0, on(stream)>>>(x, out, n);
  } else {
    widen_kernel<<<blocks(n), kThreads, 0, on(stream)>>>(x, out, n);
  }
  check_launch("convert");
}

void quantise_rows(void* stream, Matrix x, uint8_t* out, float* scales) {
  quantise_rows_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, on(stream)>>>(x, out, scales);
  check_launch("quantise_rows");
}

void add(void* stream, Matrix x, Matrix y, const float* gate) {
  const int64_t n = x.rows * x.columns;
  add_kernel<<<blocks(n / 4), kThreads, 0, on(stream)>>>(x, y, gate, n);
  check_launch("add");
}

void activate(void* stream, Matrix x, Activation then) {
  const int64_t n = x.rows * x.columns;
  activate_kernel<<<blocks(n / 4), kThreads, 0, on(stream)>>>(x, then, n);
  check_launch("activate");
}

void modulation(void* stream, const float* table, const float* time, int64_t rows, int64_t columns, uint32_t plus_one,
                float* out) {
  modulation_kernel<<<blocks(rows * columns), kThreads, 0, on(stream)>>>(table, time, rows * columns, columns, plus_one,
                                                                         out);
  check_launch("modulation");
}

void patchify(void* stream, const PatchGrid& grid, const float* latent, int64_t channels, const float* more,
              int64_t more_channels, Matrix out) {
  const int64_t n = (channels + more_channels) * grid.tokens() * grid.patch();
  patchify_kernel<<<blocks(n), kThreads, 0, on(stream)>>>(grid, latent, channels, more, out, n);
  check_launch("patchify");
}

void unpatchify(void* stream, const PatchGrid& grid, Matrix x, int64_t channels, ChannelOrder order, float* latent) {
  const int64_t n = channels * grid.tokens() * grid.patch();
  unpatchify_kernel<<<blocks(n), kThreads, 0, on(stream)>>>(grid, x, channels, order, latent, n);
  check_launch("unpatchify");
}

void axpy(void* stream, float factor, const float* y, int64_t n, float* x) {
  axpy_kernel<<<blocks(n), kThreads, 0, on(stream)>>>(factor, y, n, x);
  check_launch("axpy");
}

void combine(void* stream, std::span<const video::Term> terms, int64_t n, float* out) {
  Terms all{{}, static_cast<int64_t>(terms.size())};
  std::copy(terms.begin(), terms.end(), all.term);
  combine_kernel<<<blocks(n), kThreads, 0, on(stream)>>>(all, n, out);
  check_launch("combine");
}

void draw(void* stream, const RandomStream& from, float mean, float deviation, int64_t drawn, Matrix x) {
  const int64_t n = x.rows * drawn;
  draw_kernel<<<blocks((n + 3) / 4), kThreads, 0, on(stream)>>>(from, mean, deviation, drawn, x, n);
  check_launch("draw");
}

}  // namespace scope::cuda
