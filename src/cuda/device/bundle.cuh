// What attend's queries take from the mean of the 16 queries of a bundle: see Mix.
#pragma once

#include "cuda/attend.h"
#include "cuda/device/ptx_sm80.cuh"

namespace scope::cuda {

// The 16 rows of a warp, where a lane has columns 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8. The mean is
// that of rows rounded to T: a product with ones.
template <class T>
struct Bundle {
  float kept[2];         // of each row, beside what is mixed in
  float inverse[2];      // of its sum of weights, where it is in the mean; 0: it is not
  float subtracted = 0;  // of the sum of the rows in the mean, from each of them; 0: nothing follows

  // real: whether there is such a query. Divisions are approximate, because a call of the exact one spills registers.
  __device__ Bundle(const AttendLaunch& at, float share, const float (&sums)[2], bool upper, bool lower)
      : kept{1 - share, 1 - share}, inverse{0, 0} {
    if (!(share > 0) || !(at.follow > 0)) return;
    const bool real[2] = {upper, lower};
    int rows = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool counts = real[h] && sums[h] > 0 && sums[h] < INFINITY;
      rows += __popc(__ballot_sync(~0u, counts)) / 4;
      if (counts) kept[h] += share * at.follow, inverse[h] = __fdividef(1, sums[h]);
    }
    if (rows > 0) subtracted = __fdividef(share * at.follow, static_cast<float>(rows));
  }
  // Of the lane's two columns, of sums of weighted values; by the whole warp.
  __device__ float2 columns(float x0, float x1, float y0, float y1) const {
    if (subtracted == 0) return {0, 0};
    const uint32_t upper = inverse[0] > 0 ? pack<T>(x0 * inverse[0], x1 * inverse[0]) : 0;
    const uint32_t lower = inverse[1] > 0 ? pack<T>(y0 * inverse[1], y1 * inverse[1]) : 0;
    const uint32_t one = pack<T>(1, 1), ones[4] = {one, one, one, one};
    float sum[4] = {0, 0, 0, 0};
    mma_16x8x16<T>(sum, ones, transposed_8x8(upper), transposed_8x8(lower));
    return {subtracted * sum[0], subtracted * sum[1]};
  }
  // What columns() said, of row h.
  __device__ float of(int h, float column) const { return inverse[h] > 0 ? column : 0; }
};

}  // namespace scope::cuda
