// compensate on the CPU: mean values, and errors from one exact product of centroids and keys.
#include "stages/compensate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/kmeans.h"

namespace scope::cpu {

namespace {

constexpr int64_t kBlock = 96;      // keys that a thread scores at a time; a multiple of kStrip
constexpr int64_t kTaskKeys = 512;  // keys of a task, give or take those of its last cluster

struct Layout {
  int64_t stride;
  int32_t* sizes;    // [codes]
  int32_t* order;    // [tokens] positions by cluster
  int64_t* offsets;  // [codes + 1] where each cluster starts there
  int32_t* rows;     // [tokens] tokens in that order; like the next two
  float* square;     // [tokens] |v_t|^2
  float* apart;      // [tokens] 2 (v_t - v_j) . v_t
  double* spread;    // [codes] sum of |v_t - v_j|^2
  float* panels;     // [dim, groups] centroids, packed
  int64_t columns;   // groups, rounded up to panels
  float* centres;    // [codes, columns] tables, transposed
  float* keys;       // [threads, kBlock, stride]
  float* scores;     // [threads, kBlock, columns]
  double* sums;      // [threads, groups] of the cluster at hand

  Layout(Arena arena, const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes,
         int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    stride = round_up(dim, kLanes);
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(tokens);
    offsets = arena.take<int64_t>(codes + 1);
    rows = arena.take<int32_t>(tokens);
    square = arena.take<float>(tokens);
    apart = arena.take<float>(tokens);
    spread = arena.take<double>(codes);
    columns = round_up(groups, exec.kernels->panel);
    panels = arena.take<float>(dim * columns);
    centres = arena.take<float>(codes * columns);
    keys = arena.take<float>(threads * kBlock * stride);
    scores = arena.take<float>(threads * kBlock * columns);
    sums = arena.take<double>(threads * groups);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// With x = e^(s_ct - s_cj) - 1 a key's term is e^(2 s_cj) |v_t - v_j + x v_t|^2: the mean's distance, which does not depend
// on the group, and two products by x. Nothing cancels where a cluster's keys are alike, and nothing needs a maximum.
void describe_cluster(const Exec& exec, const CompensateArgs& args, int64_t head, const Layout& at, int64_t j, int thread) {
  const Proxy& proxy = args.proxy;
  const RowsView v = args.v[head];
  const int64_t dim = v.dim, begin = at.offsets[j], end = at.offsets[j + 1];
  float* values = at.keys + thread * kBlock * at.stride;
  const auto load = [&](int64_t t) {
    const int64_t n = std::min(kBlock, end - t);
    for (int64_t i = t; i < t + n; ++i) at.rows[i] = proxy.rows[at.order[i]];
    exec.kernels->load_rows(v, at.rows + t, n, values, at.stride);
    return n;
  };
  double sum[256] = {};
  for (int64_t t = begin; t < end; t += kBlock) {
    const int64_t n = load(t);
    float block_sum[256] = {};
    for (int64_t i = 0; i < n; ++i) exec.kernels->add(values + i * at.stride, dim, block_sum);
    for (int64_t k = 0; k < dim; ++k) sum[k] += static_cast<double>(block_sum[k]);
  }
  const auto count = static_cast<double>(end - begin);
  float mean[256] = {};
  for (int64_t k = 0; k < dim && count > 0; ++k) mean[k] = static_cast<float>(sum[k] / count);
  std::copy_n(mean, dim, args.value[head] + j * dim);
  args.bias[head][j] = static_cast<float>(std::log(count));  // -inf without keys
  if (!args.errors) return;
  at.spread[j] = 0;
  for (int64_t t = begin; t < end; t += kBlock) {
    const int64_t n = end - begin > kBlock ? load(t) : end - begin;
    for (int64_t i = 0; i < n; ++i) {
      float moments[3];
      exec.kernels->moments(values + i * at.stride, mean, at.stride, moments);
      at.square[t + i] = moments[0];
      at.apart[t + i] = moments[1];
      at.spread[j] += static_cast<double>(moments[2]);
    }
  }
  const float* tables = proxy.tables[head];
  for (int64_t c = 0; c < at.columns; ++c) {
    at.centres[j * at.columns + c] = c < proxy.groups ? tables[c * proxy.codes + j] : 0.0f;
  }
}

// The errors of clusters [first, end) for every group. Keys lie by cluster, so that each is scored once, and no two tasks
// add to one sum.
void error_columns(const Exec& exec, const CompensateArgs& args, int64_t head, const Layout& at, int64_t first, int64_t end,
                   int thread) {
  const Proxy& proxy = args.proxy;
  const RowsView k = proxy.k[head];
  float* errors = args.errors[head];
  const int64_t dim = k.dim, groups = proxy.groups;
  float* keys = at.keys + thread * kBlock * at.stride;
  float* scores = at.scores + thread * kBlock * at.columns;
  double* sums = at.sums + thread * groups;
  int64_t j = first;
  for (int64_t t = at.offsets[first]; t < at.offsets[end]; t += kBlock) {
    const int64_t n = std::min(kBlock, at.offsets[end] - t);
    exec.kernels->load_rows(k, at.rows + t, n, keys, at.stride);
    exec.kernels->dot(keys, at.stride, n, at.panels, groups, dim, scores, at.columns);
    for (; j < end && at.offsets[j] < t + n; ++j) {
      const int64_t begin = std::max(at.offsets[j], t), stop = std::min(at.offsets[j + 1], t + n);
      if (begin == stop) continue;  // a cluster without keys
      if (begin == at.offsets[j]) std::fill_n(sums, groups, at.spread[j]);
      const float* centres = at.centres + j * at.columns;
      exec.kernels->excess(scores + (begin - t) * at.columns, at.columns, stop - begin, groups, proxy.scale, centres,
                           at.apart + begin, at.square + begin, sums);
      if (stop < at.offsets[j + 1]) break;  // goes on in the next block
      for (int64_t c = 0; c < groups; ++c) {
        if (!(sums[c] > 0)) continue;
        const double mean = sums[c] / at.sizes[j];
        const auto short_mean = static_cast<float>(mean);  // whose logarithm is made in a third of the time
        errors[c * proxy.codes + j] =
            2 * centres[c] + (std::isnormal(short_mean) ? std::log(short_mean) : static_cast<float>(std::log(mean)));
      }
    }
  }
}

void compensate_head(const Exec& exec, const CompensateArgs& args, int64_t head, const Layout& at) {
  const Proxy& proxy = args.proxy;
  sort_by_label(proxy.labels[head], proxy.count, proxy.codes, at.sizes, at.order, at.offsets);
  exec.pool->run(proxy.codes, [&](int64_t j, int thread) { describe_cluster(exec, args, head, at, j, thread); });
  if (!args.errors) return;
  exec.kernels->pack(proxy.centroids[head], proxy.k.dim, proxy.groups, proxy.k.dim, at.panels);
  // Clusters without keys, or without an error.
  std::fill_n(args.errors[head], proxy.groups * proxy.codes, -std::numeric_limits<float>::infinity());
  // Task i has the clusters that start in its stretch of keys.
  const auto starts = [&](int64_t task) {
    return std::lower_bound(at.offsets, at.offsets + proxy.codes, task * kTaskKeys) - at.offsets;
  };
  exec.pool->run(ceil_div(proxy.count, kTaskKeys), [&](int64_t task, int thread) {
    error_columns(exec, args, head, at, starts(task), starts(task + 1), thread);
  });
}

}  // namespace

int64_t compensate_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.k_tokens, sizes.dim, sizes.groups, sizes.codes, &bytes);
  return bytes;
}

void compensate(const Exec& exec, const CompensateArgs& args) {
  const Proxy& proxy = args.proxy;
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, proxy.count, args.v.dim, proxy.groups, proxy.codes);
  for (int64_t h = 0; h < args.heads; ++h) compensate_head(exec, args, h, at);
}

}  // namespace scope::cpu
