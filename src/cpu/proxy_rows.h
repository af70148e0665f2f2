// Rows of one head's proxy matrix, a few at a time on every thread, for the passes of select and tail over it.
#pragma once

#include <algorithm>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "stages/score.h"

namespace scope::cpu {

struct ProxyRows {
  static constexpr int64_t kFloats = 8 << 20;  // that all threads together hold at a time, or one row each

  int64_t stride, height;  // height: rows that a thread holds, at most kScoreRows
  float* rows;             // [threads, height, stride]
  float* buffer;           // [threads, score_rows_buffer]

  ProxyRows(Arena& arena, const Exec& exec, int64_t count, int64_t dim) {
    const int64_t threads = exec.pool->threads();
    stride = round_up(count, kLanes);
    const int64_t one = threads * std::max<int64_t>(stride, 1);
    height = std::clamp<int64_t>(kFloats / one, 1, kScoreRows);
    // At least what `height` asks for, and never less for more keys: a sample may have fewer than its plan.
    rows = arena.take<float>(std::min(kScoreRows * one, std::max(kFloats, one)));
    buffer = arena.take<float>(threads * score_rows_buffer(exec, dim));
  }

  // Calls body(first, n, rows, thread) with rows [first, first + n), for blocks that cover all groups.
  template <class Body>
  void each_block(const Exec& exec, const Proxy& proxy, int64_t head, const Body& body) const {
    // Small blocks when there are few groups, so that every thread has work.
    const int64_t block = std::clamp<int64_t>(proxy.groups / (4 * exec.pool->threads()), 1, height);
    exec.pool->run(ceil_div(proxy.groups, block), [&](int64_t chunk, int thread) {
      const int64_t first = chunk * block, n = std::min(block, proxy.groups - first);
      float* mine = rows + thread * height * stride;
      score_rows(exec, proxy, head, first, n, mine, stride, buffer + thread * score_rows_buffer(exec, proxy.k.dim));
      body(first, n, mine, thread);
    });
  }
};

}  // namespace scope::cpu
