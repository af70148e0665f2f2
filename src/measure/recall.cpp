// Exact attention of sampled queries, and what a selection kept of it.
#include "measure/recall.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/numeric.h"

namespace scope {

namespace {

double element(const RowsView& x, int64_t token, int64_t c) {
  const std::byte* row = x.row(token);
  if (x.dtype == DType::f32) return reinterpret_cast<const float*>(row)[c];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[c];
  return x.dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

struct Query {
  double mass = 0, oracle = 0, retention = 0, top = 0, difference = 0, norm = 0, cosine = 0;
};

Query measure_query(const RowsView& q, const RowsView& k, const RowsView& v, const RowsView& out,
                    const HeadSelection& selection, int64_t i) {
  const int64_t n = k.tokens, dim = q.dim;
  std::vector<double> p(static_cast<size_t>(n)), query(static_cast<size_t>(dim)), exact(static_cast<size_t>(dim), 0.0);
  for (int64_t c = 0; c < dim; ++c) query[c] = element(q, i, c) / std::sqrt(static_cast<double>(dim));
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

  const int64_t best = std::max<int64_t>(1, ceil_share(0.1, n));
  std::vector<double> sorted = p;
  std::nth_element(sorted.begin(), sorted.begin() + (best - 1), sorted.end(), std::greater<>());
  const double least = sorted[best - 1];

  const int64_t words = mask_words(n);
  const auto selected = [&](int64_t j) {
    if (selection.labels == nullptr) return true;
    if (selection.keep != nullptr && mask_bit(selection.keep, j)) return true;
    return selection.labels[i] >= 0 && mask_bit(selection.mask + selection.labels[i] * words, j);
  };
  Query result;
  int64_t kept = 0, hits = 0, tops = 0;
  for (int64_t j = 0; j < n; ++j) {
    const bool is_top = p[j] >= least;
    tops += is_top ? 1 : 0;
    if (is_top) result.top += p[j];
    if (selected(j)) {
      ++kept;
      result.mass += p[j];
      hits += is_top ? 1 : 0;
    }
    for (int64_t c = 0; c < dim; ++c) exact[c] += p[j] * element(v, j, c);
  }
  result.oracle = static_cast<double>(hits) / static_cast<double>(tops);
  result.retention = static_cast<double>(kept) / static_cast<double>(n);
  if (out.data == nullptr) return result;
  double dot = 0, size = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const double o = element(out, i, c);
    result.difference += (o - exact[c]) * (o - exact[c]);
    result.norm += exact[c] * exact[c];
    dot += o * exact[c];
    size += o * o;
  }
  result.cosine = dot / std::sqrt(std::max(size * result.norm, 1e-300));
  return result;
}

}  // namespace

Quality measure_head(ThreadPool& pool, const RowsView& q, const RowsView& k, const RowsView& v, const RowsView& out,
                     const HeadSelection& selection, int64_t samples) {
  Quality quality;
  const int64_t n = std::min(samples, q.tokens);
  if (n <= 0 || k.tokens == 0) return quality;
  std::vector<Query> queries(static_cast<size_t>(n));
  // The middle of n equal stretches: every part of the video is looked at.
  pool.run(n,
           [&](int64_t i, int) { queries[i] = measure_query(q, k, v, out, selection, (2 * i + 1) * q.tokens / (2 * n)); });
  const auto count = static_cast<double>(n);
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
  quality.queries = n;
  const double variance = std::max(0.0, squares - quality.mass_recall * quality.mass_recall);
  quality.mass_interval = 1.96 * std::sqrt(variance / count);
  quality.error = std::sqrt(difference / std::max(norm, 1e-300));
  return quality;
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
