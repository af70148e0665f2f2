// compensate on the CPU: mean values by the update of K-means, errors from one exact product of centroids and keys.
#include "stages/compensate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/kmeans.h"

namespace scope::cpu {

namespace {

constexpr int64_t kBlock = 256;      // keys that a thread scores at a time, for kScoreRows groups at a time
constexpr int64_t kTaskKeys = 512;   // keys of a task, give or take those of its last cluster
constexpr float kMostFloat = 80;     // differences of logits past this leave the range of a float's exponential
constexpr double kMostDouble = 350;  // and past this the square leaves that of a double: a softmax is then one key anyway

struct Layout {
  int64_t stride;
  int32_t* sizes;    // [codes]
  int32_t* order;    // [tokens] positions by cluster
  int64_t* offsets;  // [codes + 1] where each cluster starts there
  int32_t* rows;     // [tokens] tokens in that order; like the next three
  int32_t* labels;   // [tokens]
  double* square;    // [tokens] |v_t|^2
  double* apart;     // [tokens] 2 (v_t - v_j) . v_t
  double* spread;    // [codes] sum of |v_t - v_j|^2
  float* keys;       // [threads, kBlock, stride]
  float* panels;     // [threads, kBlock, dim]
  float* scores;     // [threads, kScoreRows, kBlock]
  float* exps;       // [threads, kBlock]; like the next two
  float* centres;
  double* terms;
  double* sums;  // [threads, groups] of the cluster at hand
  Scratch kmeans;

  Layout(Arena arena, const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes,
         int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    stride = round_up(dim, kLanes);
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(tokens);
    offsets = arena.take<int64_t>(codes + 1);
    rows = arena.take<int32_t>(tokens);
    labels = arena.take<int32_t>(tokens);
    square = arena.take<double>(tokens);
    apart = arena.take<double>(tokens);
    spread = arena.take<double>(codes);
    keys = arena.take<float>(threads * kBlock * stride);
    panels = arena.take<float>(threads * kBlock * dim);
    scores = arena.take<float>(threads * kScoreRows * kBlock);
    exps = arena.take<float>(threads * kBlock);
    centres = arena.take<float>(threads * kBlock);
    terms = arena.take<double>(threads * kBlock);
    sums = arena.take<double>(threads * groups);
    kmeans.bytes = kmeans_scratch(exec, tokens, dim, codes);
    kmeans.data = arena.take<std::byte>(kmeans.bytes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

void mean_values(const Exec& exec, const CompensateArgs& args, const Layout& at) {
  const Proxy& proxy = args.proxy;
  const int64_t dim = args.v.dim;
  std::fill_n(args.value, proxy.codes * dim, 0.0f);
  const KMeansWork work(Arena(at.kmeans.data, at.kmeans.bytes), exec, proxy.count, dim, dim, proxy.codes);
  update(exec,
         {.points = args.v,
          .rows = proxy.rows,
          .count = proxy.count,
          .channels = nullptr,
          .depth = dim,
          .clusters = proxy.codes,
          .random = {},
          .centroids = args.value,
          .labels = const_cast<int32_t*>(proxy.labels),  // the update reads them
          .sizes = at.sizes,
          .order = at.order,
          .offsets = at.offsets,
          .scratch = {}},
         work, true, proxy.rows, proxy.count);
  for (int64_t j = 0; j < proxy.codes; ++j) {
    args.bias[j] = at.sizes[j] == 0 ? -std::numeric_limits<float>::infinity()
                                    : static_cast<float>(std::log(static_cast<double>(at.sizes[j])));
  }
}

// Sums that do not wait for one another.
constexpr int64_t kSums = 4;

// With x = e^(s_ct - s_cj) - 1 a key's term is e^(2 s_cj) |v_t - v_j + x v_t|^2: the mean's distance, which does not depend
// on the group, and two products by x. Nothing cancels where a cluster's keys are alike, and nothing needs a maximum.
void describe_values(const Exec& exec, const CompensateArgs& args, const Layout& at) {
  const int64_t dim = args.v.dim;
  exec.pool->run(args.proxy.codes, [&](int64_t j, int thread) {
    float* row = at.keys + thread * kBlock * at.stride;
    float mean[256 + kSums] = {};
    std::copy_n(args.value + j * dim, dim, mean);
    at.spread[j] = 0;
    for (int64_t i = at.offsets[j]; i < at.offsets[j + 1]; ++i) {
      at.rows[i] = args.proxy.rows[at.order[i]];
      at.labels[i] = static_cast<int32_t>(j);
      exec.kernels->load_rows(args.v, at.rows + i, 1, row, at.stride);  // and zeros up to a multiple of kSums
      double square[kSums] = {}, apart[kSums] = {}, spread[kSums] = {};
      for (int64_t k = 0; k < dim; k += kSums) {
        for (int64_t r = 0; r < kSums; ++r) {
          const double v = row[k + r], away = v - static_cast<double>(mean[k + r]);
          square[r] += v * v;
          apart[r] += v * away;
          spread[r] += away * away;
        }
      }
      at.square[i] = (square[0] + square[1]) + (square[2] + square[3]);
      at.apart[i] = 2 * ((apart[0] + apart[1]) + (apart[2] + apart[3]));
      at.spread[j] += (spread[0] + spread[1]) + (spread[2] + spread[3]);
    }
  });
}

// terms = x (apart + x square) of n keys whose logits are scale * scores and whose clusters' logits are `centres`; exps is
// scratch.
void make_terms(const Exec& exec, float scale, float* scores, const float* centres, int64_t n, const double* apart,
                const double* square, float* exps, double* terms) {
  float high = 0;
  for (int64_t r = 0; r < n; ++r) {
    exps[r] = scores[r] = scores[r] * scale - centres[r];
    high = std::max(high, scores[r]);
  }
  exec.kernels->exp(exps, n);
  for (int64_t r = 0; r < n; ++r) {
    const double x = static_cast<double>(exps[r]) - 1;
    terms[r] = x * (apart[r] + x * square[r]);
  }
  if (high < kMostFloat) return;
  for (int64_t r = 0; r < n; ++r) {
    if (scores[r] < kMostFloat) continue;
    const double x = std::exp(std::min(static_cast<double>(scores[r]), kMostDouble));
    terms[r] = x * (apart[r] + x * square[r]);
  }
}

// The errors of clusters [first, end) for every group. Keys lie by cluster, so that each is packed once, and no two tasks
// add to one sum.
void error_columns(const Exec& exec, const CompensateArgs& args, const Layout& at, int64_t first, int64_t end, int thread) {
  const Proxy& proxy = args.proxy;
  const int64_t dim = proxy.k.dim, groups = proxy.groups;
  float* keys = at.keys + thread * kBlock * at.stride;
  float* panels = at.panels + thread * kBlock * dim;
  float* scores = at.scores + thread * kScoreRows * kBlock;
  float* centres = at.centres + thread * kBlock;
  double* terms = at.terms + thread * kBlock;
  double* sums = at.sums + thread * groups;
  int64_t from = first;  // the cluster that the block starts in
  for (int64_t t = at.offsets[first]; t < at.offsets[end]; t += kBlock) {
    const int64_t n = std::min(kBlock, at.offsets[end] - t);
    exec.kernels->load_rows(proxy.k, at.rows + t, n, keys, at.stride);
    exec.kernels->pack(keys, at.stride, n, dim, panels);
    while (at.offsets[from + 1] <= t) ++from;
    for (int64_t c = 0; c < groups; c += kScoreRows) {
      const int64_t rows = std::min(kScoreRows, groups - c);
      exec.kernels->dot(proxy.centroids + c * dim, dim, rows, panels, n, dim, scores, kBlock);
      for (int64_t i = 0; i < rows; ++i) {
        const float* table = proxy.tables + (c + i) * proxy.codes;
        exec.kernels->lookup(table, proxy.codes, 1, at.labels + t, n, centres);
        make_terms(exec, proxy.scale, scores + i * kBlock, centres, n, at.apart + t, at.square + t,
                   at.exps + thread * kBlock, terms);
        for (int64_t j = from; j < end && at.offsets[j] < t + n; ++j) {
          const int64_t begin = std::max(at.offsets[j], t), stop = std::min(at.offsets[j + 1], t + n);
          if (begin == stop) continue;  // a cluster without keys
          double sum = begin == at.offsets[j] ? at.spread[j] : sums[c + i];
          for (int64_t r = begin; r < stop; ++r) sum += terms[r - t];
          sums[c + i] = sum;
          if (stop < at.offsets[j + 1]) continue;
          args.errors[(c + i) * proxy.codes + j] =
              sum > 0 ? static_cast<float>(2 * static_cast<double>(table[j]) + std::log(sum / at.sizes[j]))
                      : -std::numeric_limits<float>::infinity();
        }
      }
    }
  }
}

}  // namespace

int64_t compensate_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, tokens, dim, groups, codes, &bytes);
  return bytes;
}

void compensate(const Exec& exec, const CompensateArgs& args) {
  const Proxy& proxy = args.proxy;
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, proxy.count, args.v.dim, proxy.groups, proxy.codes);
  mean_values(exec, args, at);
  if (args.errors == nullptr) return;
  describe_values(exec, args, at);
  std::fill_n(args.errors, proxy.groups * proxy.codes, -std::numeric_limits<float>::infinity());  // those without keys
  // Task i has the clusters that start in its stretch of keys.
  const auto starts = [&](int64_t task) {
    return std::lower_bound(at.offsets, at.offsets + proxy.codes, task * kTaskKeys) - at.offsets;
  };
  exec.pool->run(ceil_div(proxy.count, kTaskKeys),
                 [&](int64_t task, int thread) { error_columns(exec, args, at, starts(task), starts(task + 1), thread); });
}

}  // namespace scope::cpu
