// The search for one bound of all heads of a sample, in rounds: a block looks at its head, and all of them sum up what every
// head found in the round before. Between rounds lies a launch, or a wait of all blocks.
#pragma once

#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/select/sample.h"

namespace scope::cuda {

__device__ inline double density_of(int64_t pairs, int64_t queries, int keys) {
  return static_cast<double>(pairs) / static_cast<double>(queries) / keys;
}

// What the rounds before `round` leave of the interval; `target` is the mean density, of `keys` keys. On every thread.
template <int kThreads>
__device__ Bracket narrowed(const SampleSpace& s, int heads, int keys, double target, int round) {
  if (round == 0) return {};
  int64_t sums[4] = {};  // in integers: any order gives the same
  const int64_t* found = s.found + int64_t{(round - 1) % 2} * heads * 4;
  for (int h = threadIdx.x; h < heads; h += kThreads) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += found[h * 4 + i];
  }
  block_sums<kThreads>(sums);
  bool enough[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) enough[i] = density_of(sums[i], sums[3], keys) >= target;
  if (round == 1) {
    return enough[0] ? Bracket{0, 0, sums[0], sums[0], sums[3]} : Bracket{0, 1, sums[0], sums[3] * keys, sums[3]};
  }
  Bracket b = s.brackets[round - 1];
  const double start = b.low, quarter = 0.25 * (b.high - b.low);
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    if (!enough[i]) continue;
    b.high = start + (i + 1) * quarter;
    b.at_high = sums[i];
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (enough[i]) break;
    b.low = start + (i + 1) * quarter;
    b.at_low = sums[i];
  }
  return b;
}

// One round of a head's block. pairs_at(low, quarter, pairs): what the head keeps at low + (i + 1) * quarter; `queries` are
// the head's.
template <int kThreads, class PairsAt>
__device__ void look(const SampleSpace& s, int heads, int keys, double target, int round, int64_t head, int64_t queries,
                     const PairsAt& pairs_at) {
  const Bracket b = narrowed<kThreads>(s, heads, keys, target, round);
  int64_t pairs[3] = {};
  pairs_at(b.low, 0.25 * (b.high - b.low), pairs);
  if (threadIdx.x != 0) return;
  int64_t* found = s.found + (int64_t{round % 2} * heads + head) * 4;
#pragma unroll
  for (int i = 0; i < 3; ++i) found[i] = pairs[i];
  found[3] = queries;
  if (head == 0) s.brackets[round] = b;
}

}  // namespace scope::cuda
