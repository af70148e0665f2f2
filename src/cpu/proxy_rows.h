// Rows of one head's proxy matrix for the passes of select and tail over it: the matrix where it is small, else a few rows
// on every thread, computed anew for every pass.
#pragma once

#include <algorithm>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "stages/score.h"

namespace scope::cpu {

struct ProxyRows {
  static constexpr int64_t kMost = 80;  // rows of a block

  int64_t stride, height;  // height: rows that a thread holds, at most kMost
  bool whole;              // the matrix is held
  float* rows;             // [groups, stride], or [threads, height, stride]
  float* buffer;           // [threads, score_rows_buffer]

  ProxyRows(Arena& arena, const Exec& exec, int64_t groups, int64_t count, int64_t dim) {
    const int64_t threads = exec.pool->threads();
    stride = round_up(count, kLanes);
    const int64_t one = threads * std::max<int64_t>(stride, 1);
    height = std::clamp<int64_t>(exec.proxy_floats / one, 1, kMost);
    whole = groups * stride <= exec.proxy_floats;
    // Never less for more keys: a sample may have fewer than its plan.
    rows = arena.take<float>(whole ? groups * stride : std::max(exec.proxy_floats, one));
    buffer = arena.take<float>(threads * score_rows_buffer(exec, dim));
  }

  // Computes the matrix where it is held; before each_block.
  void fill(const Exec& exec, const Proxy& proxy, int64_t head) const {
    if (!whole) return;
    // Keys are packed once for all groups; a lookup has nothing to pack.
    const bool by_keys = proxy.kind == ProxyKind::exact;
    const int64_t step = by_keys ? kKeyBlock : kScoreRows, all = by_keys ? proxy.count : proxy.groups;
    exec.pool->run(ceil_div(all, step), [&](int64_t chunk, int thread) {
      const int64_t begin = chunk * step, end = std::min(begin + step, all);
      float* own = buffer + thread * score_rows_buffer(exec, proxy.k.dim);
      if (by_keys) {
        multiply_rows(exec, proxy, head, {0, proxy.groups}, {begin, end}, rows, stride, own);
      } else {
        score_rows(exec, proxy, head, begin, end - begin, rows + begin * stride, stride, own);
      }
    });
  }

  // Calls body(first, n, rows, thread) with rows [first, first + n), for blocks that cover all groups.
  template <class Body>
  void each_block(const Exec& exec, const Proxy& proxy, int64_t head, const Body& body) const {
    // Small blocks when there are few groups, so that every thread has work.
    const int64_t even = ceil_div(proxy.groups, 2 * exec.pool->threads());
    const int64_t block = std::clamp<int64_t>(even, 1, whole ? kMost : height);
    exec.pool->run(ceil_div(proxy.groups, block), [&](int64_t chunk, int thread) {
      const int64_t first = chunk * block, n = std::min(block, proxy.groups - first);
      float* mine = rows + (whole ? first : thread * height) * stride;
      if (!whole) {
        score_rows(exec, proxy, head, first, n, mine, stride, buffer + thread * score_rows_buffer(exec, proxy.k.dim));
      }
      body(first, n, mine, thread);
    });
  }
};

}  // namespace scope::cpu
