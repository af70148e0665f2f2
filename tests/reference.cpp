// The specification in code; read it beside the algorithm page.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/numeric.h"

namespace scope::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One query's keys: real ones from mask OR keep, then the extra ones with their bias.
struct Keys {
  std::vector<const double*> k, v;
  std::vector<double> bias;
};

Keys keys_of_group(const AttendArgs& args, int64_t group, const Matrix& k, const Matrix& v, const Matrix& extra_k,
                   const Matrix& extra_v) {
  Keys keys;
  const auto add = [&](const Matrix& from_k, const Matrix& from_v, int64_t j, double bias) {
    keys.k.push_back(from_k.row(j));
    keys.v.push_back(from_v.row(j));
    keys.bias.push_back(bias);
  };
  const uint32_t* mask = args.mask ? args.mask[0] + group * mask_words(args.k.tokens) : nullptr;
  for (int64_t j = 0; j < args.k.tokens; ++j) {
    if (mask == nullptr || mask_bit(mask, j) || (args.keep != nullptr && mask_bit(args.keep, j))) add(k, v, j, 0.0);
  }
  for (int64_t e = 0; e < args.extra.count; ++e) {
    if (mask_bit(args.extra.mask[0] + group * mask_words(args.extra.count), e)) {
      add(extra_k, extra_v, e, static_cast<double>(args.extra.bias[0][e]));
    }
  }
  return keys;
}

// Calls body(token, keys) for every query that belongs to a group.
template <class Body>
void each_query(const AttendArgs& args, DType extra_dtype, const Body& body) {
  const int64_t dim = args.q.dim;
  const Matrix k = gather(args.k[0], nullptr, args.k.tokens, nullptr, dim),
               v = gather(args.v[0], nullptr, args.k.tokens, nullptr, dim);
  Matrix extra_k(args.extra.k[0], args.extra.count, dim), extra_v(args.extra.v[0], args.extra.count, dim);
  for (double& x : extra_k.data) x = rounded(x, extra_dtype);
  for (double& x : extra_v.data) x = rounded(x, extra_dtype);
  for (int64_t c = 0; c < args.groups; ++c) {
    const int64_t begin = args.offsets ? args.offsets[0][c] : 0;
    const int64_t end = args.offsets ? args.offsets[0][c + 1] : args.q.tokens;
    if (begin == end) continue;
    const Keys keys = keys_of_group(args, c, k, v, extra_k, extra_v);
    for (int64_t i = begin; i < end; ++i) body(args.order ? args.order[0][i] : i, keys);
  }
}

}  // namespace

double dot(const double* a, const double* b, int64_t depth) { return std::inner_product(a, a + depth, b, 0.0); }

Matrix::Matrix(const float* in, int64_t row_count, int64_t column_count) : Matrix(row_count, column_count) {
  if (!data.empty()) std::copy_n(in, data.size(), data.begin());
}

double element(const RowsView& x, int64_t token, int64_t channel) {
  const std::byte* row = x.row(token);
  if (x.dtype == DType::f32) return static_cast<double>(reinterpret_cast<const float*>(row)[channel]);
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[channel];
  return static_cast<double>(x.dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits));
}

Matrix gather(const RowsView& x, const int32_t* rows, int64_t count, const int32_t* channels, int64_t depth) {
  Matrix out(count, depth);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < depth; ++c) {
      out.row(i)[c] = element(x, rows == nullptr ? i : rows[i], channels == nullptr ? c : channels[c]);
    }
  }
  return out;
}

double rounded(double value, DType dtype) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::bf16) return static_cast<double>(bf16_to_f32(f32_to_bf16(single)));
  if (dtype == DType::f16) return static_cast<double>(f16_to_f32(f32_to_f16(single)));
  return static_cast<double>(single);
}

Matrix start_rows(const Matrix& points, int64_t clusters, const RandomStream& random) {
  Matrix centroids(clusters, points.columns);
  for (int64_t c = 0; c < clusters; ++c) {
    std::copy_n(points.row(random.index(static_cast<uint64_t>(c), points.rows)), points.columns, centroids.row(c));
  }
  return centroids;
}

double distance(const double* x, const double* c, int64_t depth) {
  double sum = 0;
  for (int64_t i = 0; i < depth; ++i) sum += (x[i] - c[i]) * (x[i] - c[i]);
  return sum;
}

int32_t nearest(const double* x, const Matrix& centroids) {
  int32_t best = 0;
  double best_distance = kInfinity;
  for (int64_t c = 0; c < centroids.rows; ++c) {
    const double d = distance(x, centroids.row(c), centroids.columns);
    if (d < best_distance) best_distance = d, best = static_cast<int32_t>(c);
  }
  return best;
}

RoundedCentroids::RoundedCentroids(const Matrix& centroids, double roundoff) {
  std::vector<double> mean(static_cast<size_t>(centroids.columns));
  for (int64_t c = 0; c < centroids.rows; ++c) {
    for (int64_t k = 0; k < centroids.columns; ++k) {
      mean[static_cast<size_t>(k)] += centroids.row(c)[k] / static_cast<double>(centroids.rows);
    }
  }
  for (int64_t c = 0; c < centroids.rows; ++c) {
    moved_.push_back(roundoff * std::sqrt(distance(centroids.row(c), mean.data(), centroids.columns)));
  }
}

double RoundedCentroids::most(double best_distance, int32_t best, int32_t chosen) const {
  const double reach = std::sqrt(best_distance) + moved_[static_cast<size_t>(best)] + moved_[static_cast<size_t>(chosen)];
  return reach * reach;
}

void update(const Matrix& points, const std::vector<int32_t>& labels, Matrix& centroids) {
  Matrix sum(centroids.rows, centroids.columns);
  std::vector<double> members(static_cast<size_t>(centroids.rows));
  for (size_t i = 0; i < labels.size(); ++i) {
    const double* x = points.row(static_cast<int64_t>(i));
    for (int64_t k = 0; k < points.columns; ++k) sum.row(labels[i])[k] += x[k];
    ++members[static_cast<size_t>(labels[i])];
  }
  for (int64_t c = 0; c < centroids.rows; ++c) {
    const double n = members[static_cast<size_t>(c)];
    if (n == 0) continue;
    for (int64_t k = 0; k < points.columns; ++k) centroids.row(c)[k] = sum.row(c)[k] / n;
  }
}

Clusters kmeans(const Matrix& points, Matrix centroids, int iterations) {
  std::vector<int32_t> labels(static_cast<size_t>(points.rows));
  for (int i = 0; i < iterations; ++i) {
    for (size_t p = 0; p < labels.size(); ++p) labels[p] = nearest(points.row(static_cast<int64_t>(p)), centroids);
    update(points, labels, centroids);
  }
  return {std::move(centroids), std::move(labels)};
}

std::vector<int32_t> sample_positions(int64_t count, int64_t n, int64_t iteration, RandomStream random) {
  random.purpose = 1;
  const uint64_t key = random.bits(static_cast<uint64_t>(iteration));
  std::vector<int32_t> positions;
  for (int64_t i = 0; i < n; ++i) {
    const auto share = static_cast<int64_t>(splitmix(key, static_cast<uint64_t>(i)) >> 32);  // of 2^32
    positions.push_back(static_cast<int32_t>((i * count + (share * count >> 32)) / n));
  }
  return positions;
}

Matrix profiles(const Matrix& x, const Matrix& others) {
  Matrix out(x.rows, others.rows);
  for (int64_t i = 0; i < x.rows; ++i) {
    double square = 1e-8;
    for (int64_t o = 0; o < others.rows; ++o) {
      out.row(i)[o] = dot(x.row(i), others.row(o), x.columns);
      square += out.row(i)[o] * out.row(i)[o];
    }
    for (int64_t o = 0; o < others.rows; ++o) out.row(i)[o] /= std::sqrt(square);
  }
  return out;
}

std::vector<int32_t> most_alike(const Matrix& points, const Matrix& centroids, const Matrix& others) {
  const Matrix x = profiles(points, others), c = profiles(centroids, others);
  std::vector<int32_t> labels;
  for (int64_t i = 0; i < x.rows; ++i) {
    int32_t best = 0;
    for (int32_t j = 1; j < c.rows; ++j) {
      if (dot(x.row(i), c.row(j), others.rows) > dot(x.row(i), c.row(best), others.rows)) best = j;
    }
    labels.push_back(best);
  }
  return labels;
}

Coclusters cocluster(const Matrix& q, const Matrix& k, Matrix q_centroids, Matrix k_centroids, int rounds) {
  std::vector<int32_t> q_labels, k_labels;
  for (int round = 0; round < rounds; ++round) {
    k_labels = most_alike(k, k_centroids, q_centroids);
    update(k, k_labels, k_centroids);
    q_labels = most_alike(q, q_centroids, k_centroids);
    update(q, q_labels, q_centroids);
  }
  return {{std::move(q_centroids), std::move(q_labels)}, {std::move(k_centroids), std::move(k_labels)}};
}

std::vector<double> tables(const ScoreArgs& args) {
  std::vector<double> out;
  for (int64_t c = 0; c < args.groups; ++c) {
    const float *code = args.codebooks[0], *centroid = args.centroids[0] + c * args.dim;
    for (const auto& channels : *args.partition) {
      for (int64_t r = 0; r < args.codes; ++r) {
        double sum = 0;
        for (const int32_t channel : channels) sum += static_cast<double>(centroid[channel]) * *code++;
        out.push_back(sum * args.scale);
      }
    }
  }
  return out;
}

std::vector<double> score_row(const Proxy& proxy, int64_t group) {
  std::vector<double> scores(static_cast<size_t>(proxy.count));
  for (int64_t j = 0; j < proxy.count; ++j) {
    double sum = 0;
    if (proxy.kind == ProxyKind::codes) {
      for (int64_t m = 0; m < proxy.subspaces; ++m) {
        sum += proxy.tables[0][(group * proxy.subspaces + m) * proxy.codes + proxy.labels[0][m * proxy.count + j]];
      }
    } else {
      for (int64_t i = 0; i < proxy.k.dim; ++i) {
        sum += proxy.centroids[0][group * proxy.k.dim + i] * element(proxy.k[0], proxy.rows[j], i);
      }
      sum *= proxy.scale;
    }
    scores[static_cast<size_t>(j)] = sum;
  }
  return scores;
}

int64_t top_p_count(const std::vector<double>& scores, double rho) {
  const auto n = static_cast<int64_t>(scores.size());
  if (rho >= 1) return n;
  std::vector<double> mass = scores;
  std::sort(mass.begin(), mass.end(), std::greater<>());
  const double high = mass.front();
  for (double& x : mass) x = std::exp(x - high);
  const double goal = rho * std::accumulate(mass.begin(), mass.end(), 0.0);
  double sum = 0;
  for (int64_t t = 1; t <= n; ++t) {
    sum += mass[static_cast<size_t>(t - 1)];
    if (sum >= goal) return t;
  }
  return n;
}

int64_t head_budget(const std::vector<int64_t>& sizes, const std::vector<int64_t>& base) {
  const int64_t total = std::inner_product(sizes.begin(), sizes.end(), base.begin(), int64_t{0});
  const int64_t queries = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  return queries == 0 ? 0 : (total + queries - 1) / queries;
}

Counts counts(Rule rule, const std::vector<int64_t>& sizes, const std::vector<int64_t>& top_p, double alpha, double density,
              int64_t n) {
  const auto ceil_of_keys = [&](double share) -> int64_t { return (std::llround(share * 1e6) * n + 999'999) / 1'000'000; };
  Counts result;
  std::vector<int64_t> base = top_p;  // b_c
  if (rule == Rule::fixed) {
    std::fill(base.begin(), base.end(), std::max<int64_t>(1, ceil_of_keys(density)));
  } else if (rule != Rule::top_p) {
    for (int64_t& b : base) b = std::max(b, ceil_of_keys(alpha));
    if (rule != Rule::hybrid) result.head_budget = head_budget(sizes, base);
  }
  for (size_t c = 0; c < sizes.size(); ++c) {
    result.counts.push_back(sizes[c] == 0 ? 0 : std::max(base[c], result.head_budget));
  }
  return result;
}

double sample_density(Rule rule, const std::vector<SampleHead>& heads, double rho) {
  double pairs = 0, all = 0;
  for (const SampleHead& head : heads) {
    const auto n = static_cast<int64_t>(head.scores[0].size());
    std::vector<int64_t> top_p;
    for (const auto& scores : head.scores) top_p.push_back(top_p_count(scores, rho));
    const auto kept = counts(rule, head.sizes, top_p, head.alpha, 0, n).counts;
    for (size_t c = 0; c < kept.size(); ++c) {
      pairs += static_cast<double>(head.sizes[c]) * static_cast<double>(kept[c]);
      all += static_cast<double>(head.sizes[c]) * static_cast<double>(n);
    }
  }
  return pairs / all;
}

double sample_rho(Rule rule, const std::vector<SampleHead>& heads, double target) {
  double low = 0, high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (sample_density(rule, heads, middle) < target ? low : high) = middle;
  }
  return high;
}

std::vector<double> lowered_alphas(std::vector<double> alphas, double most) {
  const double mean = std::accumulate(alphas.begin(), alphas.end(), 0.0) / static_cast<double>(alphas.size());
  for (double& alpha : alphas) alpha *= mean > most ? most / mean : 1.0;
  return alphas;
}

std::vector<int64_t> top_keys(const std::vector<double>& scores, int64_t r) {
  std::vector<int64_t> keys(scores.size());
  std::iota(keys.begin(), keys.end(), 0);
  std::stable_sort(keys.begin(), keys.end(),
                   [&](int64_t a, int64_t b) { return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)]; });
  keys.resize(static_cast<size_t>(r));
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<int64_t> svg2_clusters(const std::vector<double>& scores, const std::vector<int64_t>& sizes, double p,
                                   double min_ratio) {
  const auto n = static_cast<int64_t>(scores.size());
  double high = -kInfinity;
  for (size_t j = 0; j < scores.size(); ++j) high = sizes[j] > 0 ? std::max(high, scores[j]) : high;
  std::vector<double> weights;
  for (size_t j = 0; j < scores.size(); ++j) {
    weights.push_back(sizes[j] == 0 ? 0.0 : static_cast<double>(sizes[j]) * std::exp(scores[j] - high));
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> order(scores.size()), kept;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return weights[static_cast<size_t>(a)] > weights[static_cast<size_t>(b)]; });
  double before = 0;
  for (int64_t r = 1; r <= n; ++r) {
    const int64_t j = order[static_cast<size_t>(r - 1)];
    if (r == 1 || p >= 1 || before <= p || r <= std::llround(min_ratio * 1e6) * n / 1'000'000) kept.push_back(j);
    before += weights[static_cast<size_t>(j)] / total;
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

ClusterErrors cluster_errors(const Proxy& proxy, const RowsView& v, int64_t group) {
  const Matrix values = gather(v, proxy.rows, proxy.count, nullptr, v.dim);
  Matrix means(proxy.codes, v.dim);
  update(values, std::vector<int32_t>(proxy.labels[0], proxy.labels[0] + proxy.count), means);
  Proxy exact = proxy;
  exact.kind = ProxyKind::exact;
  const std::vector<double> scores = score_row(exact, group);
  const float* table = proxy.tables[0] + group * proxy.codes;
  ClusterErrors out{.high = *std::max_element(scores.begin(), scores.end()),
                    .error = std::vector<double>(static_cast<size_t>(proxy.codes)),
                    .terms = std::vector<double>(static_cast<size_t>(proxy.codes))};
  for (int64_t j = 0; j < proxy.codes; ++j) out.high = std::max(out.high, static_cast<double>(table[j]));
  for (int64_t t = 0; t < proxy.count; ++t) {
    const int32_t j = proxy.labels[0][t];
    const double key = std::exp(scores[static_cast<size_t>(t)] - out.high);
    const double centroid = std::exp(static_cast<double>(table[j]) - out.high);
    for (int64_t c = 0; c < v.dim; ++c) {
      const double a = key * values.row(t)[c], b = centroid * means.row(j)[c];
      out.error[static_cast<size_t>(j)] += (a - b) * (a - b);
      out.terms[static_cast<size_t>(j)] += a * a + b * b;
    }
  }
  return out;
}

std::vector<int64_t> ear_clusters(const std::vector<double>& scores, const std::vector<int64_t>& sizes,
                                  const std::vector<double>& errors, double p, double min_ratio) {
  const auto share = [&](double ratio) {
    return std::max<int64_t>(1, std::llround(ratio * 1e6) * static_cast<int64_t>(sizes.size()) / 1'000'000);
  };
  // SVG2's order is what it keeps when it must keep r clusters and no more.
  const auto first = [&](int64_t r) {
    return svg2_clusters(scores, sizes, -1, static_cast<double>(r) / static_cast<double>(sizes.size()) + 1e-6);
  };
  std::vector<int64_t> budget_clusters = svg2_clusters(scores, sizes, p, 2 * min_ratio);
  int64_t budget = 0, cost = 0;
  for (const int64_t j : budget_clusters) budget += sizes[static_cast<size_t>(j)];
  std::vector<int64_t> kept = first(std::min<int64_t>(share(min_ratio), static_cast<int64_t>(sizes.size()))), rest;
  for (const int64_t j : kept) cost += sizes[static_cast<size_t>(j)];
  for (size_t j = 0; j < sizes.size(); ++j) {
    if (sizes[j] > 0 && !std::binary_search(kept.begin(), kept.end(), j)) rest.push_back(static_cast<int64_t>(j));
  }
  std::stable_sort(rest.begin(), rest.end(),
                   [&](int64_t a, int64_t b) { return errors[static_cast<size_t>(a)] > errors[static_cast<size_t>(b)]; });
  for (const int64_t j : rest) {
    if (cost >= budget) break;
    kept.push_back(j);
    cost += sizes[static_cast<size_t>(j)];
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

std::vector<int64_t> sparge_blocks(std::vector<double> scores, const std::vector<bool>& similar, bool query_similar,
                                   SpargeForm form) {
  const auto n = static_cast<int64_t>(scores.size());
  double high = -kInfinity, total = 0;
  for (size_t j = 0; j < scores.size(); ++j) {
    if (!similar[j]) scores[j] = -kInfinity;
    high = std::max(high, scores[j]);
  }
  for (const double s : scores) total += s == -kInfinity ? 0.0 : std::exp(s - high);
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)]; });
  int64_t first = 0;
  if (form.topk > 0) {
    first = std::llround(form.topk * 1e6) * n / 1'000'000;
  } else {
    double sum = 0;
    for (const int64_t j : order) {
      const double s = scores[static_cast<size_t>(j)];
      sum += s == -kInfinity ? 0.0 : std::exp(s - high) / total;
      first += form.cdf >= 1 || sum <= form.cdf ? 1 : 0;
    }
  }
  std::vector<bool> keep(scores.size(), !query_similar);
  for (int64_t r = 0; r < std::max<int64_t>(first, 1); ++r) keep[static_cast<size_t>(order[static_cast<size_t>(r)])] = true;
  std::vector<int64_t> kept;
  for (int64_t j = 0; j < n; ++j) {
    if (keep[static_cast<size_t>(j)] || !similar[static_cast<size_t>(j)]) kept.push_back(j);
  }
  return kept;
}

std::vector<int64_t> sol_blocks(const std::vector<double>& scores, int64_t group, double rho) {
  const auto n = static_cast<double>(scores.size());
  const double mean = std::accumulate(scores.begin(), scores.end(), 0.0) / n;
  double square = 0;
  for (const double x : scores) square += (x - mean) * (x - mean) / n;
  std::vector<int64_t> kept;
  for (int64_t r = 0; r < std::ssize(scores); ++r) {
    const double above = (scores[static_cast<size_t>(r)] - mean) / std::sqrt(square);  // NaN where all are alike
    if (rho >= 1 || std::abs(r - group) <= 1 || 0.5 * std::erfc(above / std::sqrt(2.0)) <= rho) kept.push_back(r);
  }
  if (kept.empty()) kept.push_back(std::max_element(scores.begin(), scores.end()) - scores.begin());
  return kept;
}

double self_similarity(const Matrix& rows) {
  double sum = 0;
  for (int64_t a = 0; a < rows.rows; ++a) {
    for (int64_t b = 0; b < rows.rows; ++b) {
      const double lengths =
          std::sqrt(dot(rows.row(a), rows.row(a), rows.columns)) * std::sqrt(dot(rows.row(b), rows.row(b), rows.columns));
      sum += dot(rows.row(a), rows.row(b), rows.columns) / lengths;
    }
  }
  return sum / static_cast<double>(rows.rows * rows.rows);
}

VirtualKey virtual_key(const Proxy& proxy, const RowsView& v, int64_t group, const std::vector<double>& scores,
                       const std::vector<int64_t>& kept) {
  const auto dim = static_cast<size_t>(proxy.k.dim);
  const std::vector<double> zeros(dim);
  VirtualKey result{zeros, zeros, zeros, zeros, -kInfinity, -kInfinity};
  std::vector<int64_t> dropped;
  double high = -kInfinity;
  for (int64_t j = 0; j < proxy.count; ++j) {
    if (std::binary_search(kept.begin(), kept.end(), j)) continue;
    dropped.push_back(j);
    high = std::max(high, scores[static_cast<size_t>(j)]);
  }
  if (dropped.empty()) return result;
  double total = 0;
  for (const int64_t j : dropped) total += std::exp(scores[static_cast<size_t>(j)] - high);
  const auto add = [&](const RowsView& x, std::vector<double>& mean, std::vector<double>& size) {
    for (const int64_t j : dropped) {
      const double p = std::exp(scores[static_cast<size_t>(j)] - high) / total;
      for (size_t i = 0; i < dim; ++i) {
        const double term = p * element(x, proxy.rows[j], static_cast<int64_t>(i));
        mean[i] += term;
        size[i] += term * term;
      }
    }
    for (double& square : size) square = std::sqrt(square);
  };
  add(proxy.k[0], result.k, result.k_size);
  add(v, result.value, result.value_size);
  double centre = 0;
  for (size_t i = 0; i < dim; ++i)
    centre += static_cast<double>(proxy.centroids[0][static_cast<size_t>(group) * dim + i]) * result.k[i];
  result.log_mass = high + std::log(total);
  result.bias = result.log_mass - static_cast<double>(proxy.scale) * centre;
  return result;
}

void mix(const AttendArgs& args, std::vector<double>& out, std::vector<double>& lse) {
  const int64_t dim = args.q.dim;
  for (int64_t group = 0; args.mix.share && group < args.groups; ++group) {
    const auto share = static_cast<double>(args.mix.share[0][group]), follow = static_cast<double>(args.mix.follow);
    const int64_t begin = args.offsets ? args.offsets[0][group] : 0,
                  end = args.offsets ? args.offsets[0][group + 1] : args.q.tokens;
    for (int64_t first = begin; first < end && share > 0; first += kBundle) {
      std::vector<int64_t> tokens;
      for (int64_t i = first; i < std::min(first + kBundle, end); ++i) tokens.push_back(args.order ? args.order[0][i] : i);
      std::vector<double> mean(static_cast<size_t>(dim));
      int64_t of = 0;
      for (const int64_t t : tokens) of += std::isfinite(lse[static_cast<size_t>(t)]) ? 1 : 0;
      for (const int64_t t : tokens) {
        for (int64_t i = 0; i < dim && std::isfinite(lse[static_cast<size_t>(t)]); ++i) {
          mean[static_cast<size_t>(i)] += out[static_cast<size_t>(t * dim + i)] / static_cast<double>(of);
        }
      }
      for (const int64_t t : tokens) {
        const bool follows = std::isfinite(lse[static_cast<size_t>(t)]);
        const float* row = args.mix.row[0] + (args.mix.part ? args.mix.part[0][t] : group) * dim;
        for (int64_t i = 0; i < dim; ++i) {
          double& x = out[static_cast<size_t>(t * dim + i)];
          const double added = follows ? follow * (x - mean[static_cast<size_t>(i)]) : 0;
          x = (1 - share) * x + share * (static_cast<double>(row[i]) + added);
        }
        lse[static_cast<size_t>(t)] -= std::log1p(-share);
      }
    }
  }
}

Attention attend(const AttendArgs& args) {
  const int64_t dim = args.q.dim;
  Attention result{Matrix(args.q.tokens, dim), std::vector<double>(static_cast<size_t>(args.q.tokens), -kInfinity), 0};
  each_query(args, DType::f32, [&](int64_t token, const Keys& keys) {
    const Matrix q = gather(args.q[0], std::vector{static_cast<int32_t>(token)}.data(), 1, nullptr, dim);
    const size_t n = keys.k.size();
    std::vector<double> logits(n);
    for (size_t j = 0; j < n; ++j) {
      logits[j] = args.scale * dot(q.row(0), keys.k[j], dim) + keys.bias[j];
      if (std::isfinite(logits[j])) result.largest_logit = std::max(result.largest_logit, std::abs(logits[j]));
    }
    const double high = n == 0 ? -kInfinity : *std::max_element(logits.begin(), logits.end());
    double* out = result.out.row(token);
    double& lse = result.lse[static_cast<size_t>(token)];
    if (high == -kInfinity) return;  // no key, or none that counts: zeros and -inf
    double sum = 0;
    for (size_t j = 0; j < n; ++j) {
      const double p = std::exp(logits[j] - high);
      sum += p;
      for (int64_t i = 0; i < dim; ++i) out[i] += p * keys.v[j][i];
    }
    for (int64_t i = 0; i < dim; ++i) out[i] /= sum;
    lse = high + std::log(sum);
  });
  mix(args, result.out.data, result.lse);
  return result;
}

Attention naive_attend(const AttendArgs& args, DType dtype) {
  const int64_t dim = args.q.dim;
  Attention result{Matrix(args.q.tokens, dim), std::vector<double>(static_cast<size_t>(args.q.tokens), -kInfinity), 0};
  const auto round = [&](float x) { return static_cast<float>(rounded(static_cast<double>(x), dtype)); };
  each_query(args, dtype, [&](int64_t token, const Keys& keys) {
    const Matrix q = gather(args.q[0], std::vector{static_cast<int32_t>(token)}.data(), 1, nullptr, dim);
    const size_t n = keys.k.size();
    std::vector<float> p(n);
    for (size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < dim; ++i) sum += static_cast<float>(q.row(0)[i]) * static_cast<float>(keys.k[j][i]);
      p[j] = round(sum * args.scale + static_cast<float>(keys.bias[j]));
    }
    const float high = n == 0 ? -std::numeric_limits<float>::infinity() : *std::max_element(p.begin(), p.end());
    double* to = result.out.row(token);
    double& lse = result.lse[static_cast<size_t>(token)];
    if (std::isinf(high)) return;
    float sum = 0;
    for (float& x : p) sum += x = std::exp(x - high);
    std::vector<float> out(static_cast<size_t>(dim));
    for (size_t j = 0; j < n; ++j) {
      const float share = round(p[j] / sum);
      for (int64_t i = 0; i < dim; ++i) out[static_cast<size_t>(i)] += share * static_cast<float>(keys.v[j][i]);
    }
    std::copy(out.begin(), out.end(), to);
    lse = static_cast<double>(high + std::log(sum));
  });
  mix(args, result.out.data, result.lse);
  for (double& x : result.out.data) x = rounded(x, dtype);
  return result;
}

}  // namespace scope::reference
