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

constexpr int64_t kBlock = 256;      // keys that a thread scores at a time
constexpr float kMostFloat = 80;     // differences of logits past this leave the range of a float's exponential
constexpr double kMostDouble = 350;  // and past this the square leaves that of a double: a softmax is then one key anyway

struct Layout {
  int64_t stride;
  int32_t* sizes;    // [codes]
  int32_t* order;    // [tokens]
  int64_t* offsets;  // [codes + 1]
  double* square;    // [tokens] |v_t|^2
  double* apart;     // [tokens] (v_t - v_j) . v_t
  double* spread;    // [codes] sum of |v_t - v_j|^2
  float* row;        // [threads, stride]
  float* scores;     // [threads, kScoreRows, kBlock]
  float* exps;       // [threads, kBlock]
  float* buffer;     // [threads, score_rows_buffer]
  double* sums;      // [threads, kScoreRows, codes]
  Scratch kmeans;

  Layout(Arena arena, const Exec& exec, int64_t tokens, int64_t dim, int64_t codes, int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    stride = round_up(dim, kLanes);
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(tokens);
    offsets = arena.take<int64_t>(codes + 1);
    square = arena.take<double>(tokens);
    apart = arena.take<double>(tokens);
    spread = arena.take<double>(codes);
    row = arena.take<float>(threads * stride);
    scores = arena.take<float>(threads * kScoreRows * kBlock);
    exps = arena.take<float>(threads * kBlock);
    buffer = arena.take<float>(threads * score_rows_buffer(exec, dim));
    sums = arena.take<double>(threads * kScoreRows * codes);
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

// With x = e^(s_ct - s_cj) - 1 a key's term is e^(2 s_cj) |v_t - v_j + x v_t|^2: the mean's distance, which does not depend
// on the group, and two products by x. Nothing cancels where a cluster's keys are alike, and nothing needs a maximum.
void describe_values(const Exec& exec, const CompensateArgs& args, const Layout& at) {
  const int64_t dim = args.v.dim;
  exec.pool->run(args.proxy.codes, [&](int64_t j, int thread) {
    float* row = at.row + thread * at.stride;
    const float* mean = args.value + j * dim;
    at.spread[j] = 0;
    for (int64_t i = at.offsets[j]; i < at.offsets[j + 1]; ++i) {
      const int32_t position = at.order[i];
      exec.kernels->load_rows(args.v, args.proxy.rows + position, 1, row, at.stride);
      double square = 0, apart = 0, spread = 0;
      for (int64_t k = 0; k < dim; ++k) {
        const double v = row[k], away = v - static_cast<double>(mean[k]);
        square += v * v;
        apart += v * away;
        spread += away * away;
      }
      at.square[position] = square;
      at.apart[position] = apart;
      at.spread[j] += spread;
    }
  });
}

void error_rows(const Exec& exec, const CompensateArgs& args, const Layout& at, int64_t first, int64_t n, int thread) {
  const Proxy& proxy = args.proxy;
  const int64_t codes = proxy.codes;
  float* scores = at.scores + thread * kScoreRows * kBlock;
  float* exps = at.exps + thread * kBlock;
  double* sums = at.sums + thread * kScoreRows * codes;
  for (int64_t i = 0; i < n; ++i) std::copy_n(at.spread, codes, sums + i * codes);
  Proxy block = proxy;
  block.kind = ProxyKind::exact;
  for (int64_t t = 0; t < proxy.count; t += kBlock) {
    block.rows = proxy.rows + t;
    block.count = std::min(kBlock, proxy.count - t);
    score_rows(exec, block, first, n, scores, kBlock, at.buffer + thread * score_rows_buffer(exec, proxy.k.dim));
    for (int64_t i = 0; i < n; ++i) {
      const float* table = proxy.tables + (first + i) * codes;
      float* above = scores + i * kBlock;
      for (int64_t r = 0; r < block.count; ++r) exps[r] = above[r] -= table[proxy.labels[t + r]];
      exec.kernels->exp(exps, block.count);
      double* sum = sums + i * codes;
      for (int64_t r = 0; r < block.count; ++r) {
        const double e = above[r] < kMostFloat ? static_cast<double>(exps[r])
                                               : std::exp(std::min(static_cast<double>(above[r]), kMostDouble));
        const double x = e - 1;
        sum[proxy.labels[t + r]] += x * (2 * at.apart[t + r] + x * at.square[t + r]);
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const float* table = proxy.tables + (first + i) * codes;
    float* errors = args.errors + (first + i) * codes;
    for (int64_t j = 0; j < codes; ++j) {
      const double sum = sums[i * codes + j];
      errors[j] = sum > 0 ? static_cast<float>(2 * static_cast<double>(table[j]) + std::log(sum / at.sizes[j]))
                          : -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

int64_t compensate_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t codes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, tokens, dim, codes, &bytes);
  return bytes;
}

void compensate(const Exec& exec, const CompensateArgs& args) {
  const Proxy& proxy = args.proxy;
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, proxy.count, args.v.dim, proxy.codes);
  mean_values(exec, args, at);
  if (args.errors == nullptr) return;
  describe_values(exec, args, at);
  exec.pool->run(ceil_div(proxy.groups, kScoreRows), [&](int64_t chunk, int thread) {
    const int64_t first = chunk * kScoreRows;
    error_rows(exec, args, at, first, std::min(kScoreRows, proxy.groups - first), thread);
  });
}

}  // namespace scope::cpu
