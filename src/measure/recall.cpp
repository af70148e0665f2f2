// Exact attention of sampled queries, and what a selection kept of it.
#include "measure/recall.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "core/numeric.h"
#include "core/random.h"

namespace scope {

namespace {

struct Query {
  double mass = 0, oracle = 0, retention = 0, top = 0, difference = 0, norm = 0, cosine = 0;
};

Query measure_query(const ExactQuery& exact, const RowsView& out, const HeadSelection& selection) {
  const auto n = static_cast<int64_t>(exact.mass.size()), dim = static_cast<int64_t>(exact.out.size());
  const int64_t words = mask_words(n);
  const auto selected = [&](int64_t j) {
    if (selection.labels == nullptr) return true;
    const int32_t label = selection.labels[exact.token];
    if (label < 0) return false;
    if (selection.keep != nullptr && mask_bit(selection.keep, j)) return true;
    return mask_bit(selection.mask + label * words, j);
  };
  Query result;
  int64_t kept = 0, hits = 0, tops = 0;
  for (int64_t j = 0; j < n; ++j) {
    const double p = exact.mass[j];
    const bool is_top = p >= exact.least_top;
    tops += is_top ? 1 : 0;
    if (is_top) result.top += p;
    if (!selected(j)) continue;
    ++kept;
    result.mass += p;
    hits += is_top ? 1 : 0;
  }
  result.oracle = static_cast<double>(hits) / static_cast<double>(tops);
  result.retention = static_cast<double>(kept) / static_cast<double>(n);
  if (out.data == nullptr) return result;
  double dot = 0, size = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const double o = element(out, exact.token, c);
    result.difference += (o - exact.out[c]) * (o - exact.out[c]);
    result.norm += exact.out[c] * exact.out[c];
    dot += o * exact.out[c];
    size += o * o;
  }
  result.cosine = dot / std::sqrt(std::max(size * result.norm, 1e-300));
  return result;
}

constexpr int64_t kTile = 512;  // keys, whose channels stay in cache

// How many of the weights, the largest first, it takes to reach `mass`, which is at most their sum up to rounding.
int64_t fewest(std::vector<double>& weights, double mass) {
  auto begin = weights.begin(), end = weights.end();  // what is before `begin` is not enough, what is before `end` is
  double sum = 0;
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, std::greater<>());
    const double more = std::accumulate(begin, middle, 0.0);
    if (sum + more >= mass) {
      end = middle;
    } else {
      sum += more;
      begin = middle;
    }
  }
  return begin - weights.begin() + 1;
}

Quality summary(const std::vector<Query>& queries) {
  Quality quality;
  const auto count = static_cast<double>(queries.size());
  double squares = 0, difference = 0, norm = 0;
  for (const Query& x : queries) {
    quality.mass_recall += x.mass / count;
    quality.oracle_recall += x.oracle / count;
    quality.retention += x.retention / count;
    quality.top_mass += x.top / count;
    quality.cosine += x.cosine / count;
    squares += x.mass * x.mass / count;
    difference += x.difference;
    norm += x.norm;
  }
  quality.queries = static_cast<int64_t>(queries.size());
  const double variance = std::max(0.0, squares - quality.mass_recall * quality.mass_recall);
  quality.mass_interval = 1.96 * std::sqrt(variance / count);
  quality.error = std::sqrt(difference / std::max(norm, 1e-300));
  return quality;
}

}  // namespace

double element(const RowsView& x, int64_t token, int64_t c) {
  const std::byte* row = x.row(token);
  if (x.dtype == DType::f32) return reinterpret_cast<const float*>(row)[c];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[c];
  return x.dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

ExactQuery exact_query(const RowsView& q, const RowsView& k, const RowsView& v, int64_t token) {
  const int64_t n = k.tokens, dim = q.dim;
  ExactQuery exact{token, std::vector<double>(static_cast<size_t>(n)), 0,
                   std::vector<double>(static_cast<size_t>(dim), 0.0)};
  std::vector<double>& p = exact.mass;
  std::vector<double> query(static_cast<size_t>(dim));
  for (int64_t c = 0; c < dim; ++c) query[c] = element(q, token, c) / std::sqrt(static_cast<double>(dim));
  double high = -INFINITY;
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < dim; ++c) sum += query[c] * element(k, j, c);
    p[j] = sum;
    high = std::max(high, sum);
  }
  double total = 0;
  for (double& x : p) total += x = std::exp(x - high);
  for (double& x : p) x /= total;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t c = 0; c < dim; ++c) exact.out[c] += p[j] * element(v, j, c);
  }
  const int64_t best = std::max<int64_t>(1, ceil_share(0.1, n));
  std::vector<double> sorted = p;
  std::nth_element(sorted.begin(), sorted.begin() + (best - 1), sorted.end(), std::greater<>());
  exact.least_top = sorted[best - 1];
  return exact;
}

int64_t sampled_token(int64_t i, int64_t samples, int64_t tokens) {
  const int64_t begin = i * tokens / samples, end = (i + 1) * tokens / samples;
  return begin + static_cast<int64_t>(splitmix(0, static_cast<uint64_t>(i)) % static_cast<uint64_t>(end - begin));
}

std::vector<ExactQuery> exact_queries(ThreadPool& pool, const RowsView& q, const RowsView& k, const RowsView& v,
                                      int64_t samples) {
  const int64_t n = k.tokens == 0 ? 0 : std::min(samples, q.tokens);
  std::vector<ExactQuery> exact(static_cast<size_t>(std::max<int64_t>(n, 0)));
  pool.run(n, [&](int64_t i, int) { exact[i] = exact_query(q, k, v, sampled_token(i, n, q.tokens)); });
  return exact;
}

Quality measure_head(ThreadPool& pool, const std::vector<ExactQuery>& exact, const RowsView& out,
                     const HeadSelection& selection) {
  if (exact.empty()) return {};
  std::vector<Query> queries(exact.size());
  pool.run(static_cast<int64_t>(exact.size()),
           [&](int64_t i, int) { queries[i] = measure_query(exact[i], out, selection); });
  return summary(queries);
}

Quality measure_head(ThreadPool& pool, const RowsView& q, const RowsView& k, const RowsView& v, const RowsView& out,
                     const HeadSelection& selection, int64_t samples) {
  const int64_t n = std::min(samples, q.tokens);
  if (n <= 0 || k.tokens == 0) return {};
  std::vector<Query> queries(static_cast<size_t>(n));
  pool.run(n, [&](int64_t i, int) {
    queries[i] = measure_query(exact_query(q, k, v, sampled_token(i, n, q.tokens)), out, selection);
  });
  return summary(queries);
}

double exact_density(ThreadPool& pool, const RowsView& q, const RowsView& k, double share, int64_t samples) {
  const int64_t n = std::min(samples, q.tokens), dim = q.dim, tiles = ceil_div(k.tokens, kTile);
  if (n <= 0 || k.tokens == 0) return 0;
  // Keys side by side, [tile, channel, key of the tile], so that a query meets many at a time; 0 past the last.
  std::vector<float> keys(static_cast<size_t>(tiles * dim * kTile));
  pool.run(tiles, [&](int64_t tile, int) {
    for (int64_t j = tile * kTile; j < std::min((tile + 1) * kTile, k.tokens); ++j) {
      for (int64_t c = 0; c < dim; ++c) keys[(tile * dim + c) * kTile + j % kTile] = static_cast<float>(element(k, j, c));
    }
  });
  std::vector<double> densities(static_cast<size_t>(n));
  pool.run(n, [&](int64_t i, int) {
    const int64_t token = sampled_token(i, n, q.tokens);
    std::vector<double> weights(static_cast<size_t>(tiles * kTile), 0.0);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      double* to = weights.data() + tile * kTile;
      for (int64_t c = 0; c < dim; ++c) {
        const double x = element(q, token, c) / std::sqrt(static_cast<double>(dim));
        const float* row = keys.data() + (tile * dim + c) * kTile;
        for (int64_t j = 0; j < kTile; ++j) to[j] += x * static_cast<double>(row[j]);
      }
    }
    weights.resize(static_cast<size_t>(k.tokens));
    const double high = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& x : weights) total += x = std::exp(x - high);
    require(std::isfinite(total), Status::non_finite, "density: q or k holds NaN or Inf");
    densities[i] = static_cast<double>(fewest(weights, share * total)) / static_cast<double>(k.tokens);
  });
  double sum = 0;
  for (const double x : densities) sum += x;
  return sum / static_cast<double>(n);
}

Quality mean_quality(const Quality* heads, int64_t count) {
  Quality mean;
  double squares = 0;
  const auto n = static_cast<double>(count);
  for (int64_t h = 0; h < count; ++h) {
    mean.queries += heads[h].queries;
    mean.mass_recall += heads[h].mass_recall / n;
    mean.oracle_recall += heads[h].oracle_recall / n;
    mean.retention += heads[h].retention / n;
    mean.top_mass += heads[h].top_mass / n;
    mean.error += heads[h].error / n;
    mean.cosine += heads[h].cosine / n;
    squares += heads[h].mass_interval * heads[h].mass_interval;
  }
  mean.mass_interval = std::sqrt(squares) / n;
  return mean;
}

}  // namespace scope
