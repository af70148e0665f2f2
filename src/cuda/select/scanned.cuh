// What a scanned histogram says of its row.
#pragma once

#include "cuda/select/space.h"

namespace scope::cuda {

// One group's scanned histogram.
struct Scanned {
  const unsigned long long* words;
  int bins;
  float mass, width;

  __device__ Scanned(const SelectSpace& s, Bins b, int64_t head, int group)
      : words(s.histogram[head] + int64_t{group / kLanes} * b.count * kLanes + group % kLanes),
        bins(b.count),
        mass(s.mass[head][group]),
        width(s.step[head][group] * static_cast<float>(1 << b.sub_bits)) {}
  __device__ int32_t keys(int b) const { return b < 0 ? 0 : static_cast<int32_t>(words[b * kLanes] >> 32); }
  __device__ float below(int b) const { return b < 0 ? mass : __uint_as_float(static_cast<uint32_t>(words[b * kLanes])); }

  // The first bin of [from, to] by whose end `test` holds; `to` when none before it does.
  template <class Test>
  __device__ int search(int from, int to, const Test& test) const {
    while (from < to) {
      const int middle = (from + to) / 2;
      if (test(middle)) {
        to = middle;
      } else {
        from = middle + 1;
      }
    }
    return from;
  }

  struct Crossing {
    int bin;
    int32_t n;      // keys in it
    int32_t count;  // t: keys that reach rho, linear inside the bin
    float part;     // the share of the bin's mass that they need
    float doubt;    // how far from rho, in mass, t's true sum can be
  };
  // Where rho, rho + step, … are crossed in [from, to], together: what a search costs is the latency of its loads.
  template <int kCount>
  __device__ void cross(double rho, double step, int from, int to, Crossing (&at)[kCount]) const {
    float left[kCount];
    int low[kCount], high[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      left[i] = static_cast<float>((1.0 - rho - i * step) * mass), low[i] = from, high[i] = to;
    for (int span = to - from; span > 0; span /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int middle = (low[i] + high[i]) / 2;
        if (below(middle) <= left[i]) {
          high[i] = middle;
        } else {
          low[i] = min(middle + 1, high[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) at[i] = crossing(low[i], left[i]);
  }

 private:
  __device__ Crossing crossing(int b, float left) const {
    const int32_t before = keys(b - 1), n = keys(b) - before;
    const float above = below(b - 1), inside = above - below(b);
    const float part = inside > 0 ? fminf(fmaxf((above - left) / inside, 0.0f), 1.0f) : 1.0f;
    const int32_t taken = max(1, static_cast<int32_t>(ceilf(part * static_cast<float>(n) - 1e-3f)));
    // At worst half of the bin's keys are at its top and half at its bottom.
    return {b, n, before + min(taken, max(n, 1)), part, n < 2 ? 0.0f : inside / mass * fminf(width, 4.0f) / 4};
  }
};

inline constexpr int kSolveThreads = 512;

}  // namespace scope::cuda
