// Whole codes: masks of 32 groups at a time.
#include <algorithm>

#include "core/numeric.h"
#include "cuda/select/codes.h"
#include "cuda/select/mask.cuh"

namespace scope::cuda {

namespace {

constexpr int kEmitWarps = 8, kEmitThreads = kEmitWarps * 32;
constexpr int kEmitWords = 32, kEmitKeys = 32 * kEmitWords;  // of a warp at a time
constexpr int kPassKeys = kEmitWarps * kEmitKeys;            // of a block at a time

// Bit l of lane g becomes bit g of lane l.
__device__ uint32_t transpose(uint32_t x) {
  const int lane = threadIdx.x % 32;
  uint32_t low = 0x0000ffff;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, x, step);
    x = (lane & step) == 0 ? (x & low) | (other & low) << step : (x & ~low) | (other >> step & low);
    low ^= low << step / 2;
  }
  return x;
}

// A block for 32 groups and one of `parts` of the keys. In the table a code has one bit per group, so that one lookup
// answers for all of them; transposed, the bits of 32 keys are the groups' mask words.
__global__ void __launch_bounds__(kEmitThreads, 4)
    emit_codes(ProxyLaunch p, CodesSpace s, MaskLaunch mask, int tiles, int parts) {
  extern __shared__ uint32_t table[];                                                // [codes]
  auto* words = reinterpret_cast<uint32_t(*)[32][kEmitWords + 1]>(table + p.codes);  // [kEmitWarps]
  __shared__ int32_t kept[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t block = blockIdx.x;
  const auto part = static_cast<int>(block % parts);
  block /= parts;
  const int group = static_cast<int>(block % tiles) * 32, groups = min(32, p.groups - group);
  const int64_t head = block / tiles;
  if (threadIdx.x < 32) kept[lane] = lane < groups ? s.kept[head][group + lane] : 0;
  __syncthreads();
  const uint16_t* rank = s.rank[head] + int64_t{group} * p.codes;
  for (int r = threadIdx.x; r < p.codes; r += kEmitThreads) {
    uint32_t bits = 0;
#pragma unroll 8
    for (int g = 0; g < groups; ++g) bits |= uint32_t{rank[int64_t{g} * p.codes + r] < kept[g]} << g;
    table[r] = bits;
  }
  __syncthreads();

  const int32_t* labels = p.labels[head];
  // The same passes for all warps: where the compiler cannot see that a warp's lanes stay together, a shuffle is a call.
  for (int64_t pass = int64_t{part} * kPassKeys; pass < p.count; pass += int64_t{parts} * kPassKeys) {
    const int64_t first = pass + warp * kEmitKeys;
#pragma unroll 8
    for (int w = 0; w < kEmitWords; ++w) {
      const int64_t key = first + w * 32 + lane;
      words[warp][lane][w] = transpose(key < p.count ? table[labels[key]] : 0);
    }
    __syncwarp();
    const int64_t key = first + lane * 32;
    if (key < p.count) {
      for (int g = 0; g < groups; ++g) {
        uint32_t* row = mask.rows[head] + (group + g) * mask.words;
        if (mask.direct) {
          row[key / 32] = words[warp][g][lane];
        } else {
          add_bits(p, row, static_cast<int32_t>(key), words[warp][g][lane]);
        }
      }
    }
    __syncwarp();
  }
}

}  // namespace

void emit_codes_pass(const Exec& exec, const ProxyLaunch& p, const CodesSpace& space, const MaskLaunch& mask) {
  // Few parts, since each makes its table anew, but enough to keep the device busy.
  const int64_t tiles = ceil_div(p.groups, 32), wanted = ceil_div(8 * exec.device->multiprocessors, p.heads * tiles);
  const int64_t parts = std::min(wanted, ceil_div(p.count, kPassKeys));
  const int64_t bytes = int64_t{p.codes} * 4 + kEmitWarps * 32 * (kEmitWords + 1) * 4;
  launch(exec, "emit_codes", emit_codes, p.heads * tiles * parts, kEmitThreads, bytes, p, space, mask,
         static_cast<int>(tiles), static_cast<int>(parts));
}

}  // namespace scope::cuda
