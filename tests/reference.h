// The specification in code: every stage in float64, plain loops, independent of the backends it judges; of a chunk, the
// first head.
#pragma once

#include <cstdint>
#include <vector>

#include "core/random.h"
#include "core/tensor.h"
#include "stages/attend.h"
#include "stages/score.h"
#include "stages/select.h"

namespace scope::reference {

struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> data;

  Matrix() = default;
  Matrix(int64_t row_count, int64_t column_count)
      : rows(row_count), columns(column_count), data(static_cast<size_t>(row_count * column_count)) {}
  Matrix(const float* in, int64_t row_count, int64_t column_count);
  double* row(int64_t i) { return data.data() + i * columns; }
  const double* row(int64_t i) const { return data.data() + i * columns; }
};

double element(const RowsView& x, int64_t token, int64_t channel);
// The chosen rows and channels; nullptr: all, in order.
Matrix gather(const RowsView& x, const int32_t* rows, int64_t count, const int32_t* channels, int64_t depth);
// `value` as `dtype` would hold it.
double rounded(double value, DType dtype);

// ---- K-means ----
// Start: row random.index(c, points) for cluster c.
Matrix start_rows(const Matrix& points, int64_t clusters, const RandomStream& random);
// |x - c|^2
double distance(const double* x, const double* c, int64_t depth);
// The nearest centroid, ties to the lowest index.
int32_t nearest(const double* x, const Matrix& centroids);
// The most that |x - c|^2 of a chosen centroid may be where assignments see centroids rounded to `roundoff` once their mean
// is subtracted: then c is at most that far from the nearest, plus what both have moved. `best` and `chosen` are indices.
class RoundedCentroids {
 public:
  RoundedCentroids(const Matrix& centroids, double roundoff);
  double most(double best_distance, int32_t best, int32_t chosen) const;

 private:
  std::vector<double> moved_;  // [centroids]
};
// Means of the members; an empty cluster keeps its centroid.
void update(const Matrix& points, const std::vector<int32_t>& labels, Matrix& centroids);
struct Clusters {
  Matrix centroids;
  std::vector<int32_t> labels;
};
Clusters kmeans(const Matrix& points, Matrix centroids, int iterations);
// Positions in [0, count) that a sampled iteration sees: a random one from each of n equal stretches.
std::vector<int32_t> sample_positions(int64_t count, int64_t n, int64_t iteration, RandomStream random);

// ---- co-clustering ----
// Row x . others' over sqrt(the sum of its squares + 1e-8).
Matrix profiles(const Matrix& x, const Matrix& others);
double dot(const double* a, const double* b, int64_t depth);
// Labels by the highest product of profiles, ties to the lowest index.
std::vector<int32_t> most_alike(const Matrix& points, const Matrix& centroids, const Matrix& others);
struct Coclusters {
  Clusters queries, keys;
};
// Rounds from the given centroids, keys before queries.
Coclusters cocluster(const Matrix& q, const Matrix& k, Matrix q_centroids, Matrix k_centroids, int rounds);

// ---- score ----
// P[c, m, r] = scale * (centroid c on the channels of m) . (code r of m)
std::vector<double> tables(const ScoreArgs& args);
// s[c, j], one row.
std::vector<double> score_row(const Proxy& proxy, int64_t group);

// ---- select ----
// The smallest t whose t largest probabilities sum to >= rho; rho >= 1 keeps all.
int64_t top_p_count(const std::vector<double>& scores, double rho);
int64_t head_budget(const std::vector<int64_t>& sizes, const std::vector<int64_t>& base);
struct Counts {
  int64_t head_budget = 0;
  std::vector<int64_t> counts;  // r_c
};
// Everything that follows from t_c. `alpha` and `density` are shares; n counts the keys.
Counts counts(Rule rule, const std::vector<int64_t>& sizes, const std::vector<int64_t>& top_p, double alpha, double density,
              int64_t n);
// One head of a sample: queries and scores of each group, and its least share as used.
struct SampleHead {
  std::vector<int64_t> sizes;
  std::vector<std::vector<double>> scores;
  double alpha = 0;
};
// The mean density of the heads, weighted by queries, under a rule that keeps single keys at one rho.
double sample_density(Rule rule, const std::vector<SampleHead>& heads, double rho);
// The rho at which it reaches the target.
double sample_rho(Rule rule, const std::vector<SampleHead>& heads, double target);
// Least shares of a sample's heads, scaled so that their mean is at most `most`.
std::vector<double> lowered_alphas(std::vector<double> alphas, double most);
// Positions of the r highest scores, equal scores in ascending position; returned ascending.
std::vector<int64_t> top_keys(const std::vector<double>& scores, int64_t r);
// SVG2: the clusters that a group keeps, ascending. Weights n_j e^s, empty clusters 0; rank r stays iff r = 1, the weight
// before it is <= p of all, or r <= floor(min_ratio clusters); p >= 1 keeps all.
std::vector<int64_t> svg2_clusters(const std::vector<double>& scores, const std::vector<int64_t>& sizes, double p,
                                   double min_ratio);
// SVG-EAR, one group: E_j = sum over the keys t of cluster j of |e^(s_t - high) v_t - e^(s_j - high) v_j|^2 with v_j their
// mean value and `high` the highest logit, and the same sum of |e^(s_t - high) v_t|^2 + |e^(s_j - high) v_j|^2.
struct ClusterErrors {
  double high = 0;
  std::vector<double> error, terms;
};
ClusterErrors cluster_errors(const Proxy& proxy, const RowsView& v, int64_t group);
// SVG-EAR: the clusters that a group keeps, ascending; `errors` are log E_j - log n_j.
std::vector<int64_t> ear_clusters(const std::vector<double>& scores, const std::vector<int64_t>& sizes,
                                  const std::vector<double>& errors, double p, double min_ratio);
// SpargeAttn: the key blocks that a query block keeps, ascending. Dissimilar ones score -inf. `similar`: one per key block.
struct SpargeForm {
  double topk = 0;  // > 0: the topk form
  double cdf = 0;   // else the cdf form
};
std::vector<int64_t> sparge_blocks(std::vector<double> scores, const std::vector<bool>& similar, bool query_similar,
                                   SpargeForm form);
// Sol-Attn: the key blocks that query block `group` keeps, ascending: its own, the two beside it, and those above the mean
// by so many deviations that a share of at most rho of a normal row is higher; at least one, and all where rho >= 1.
std::vector<int64_t> sol_blocks(const std::vector<double>& scores, int64_t group, double rho);
// The mean of the Gram matrix of the rows, each scaled to length 1.
double self_similarity(const Matrix& rows);
// What stands for the keys that a group drops: p are the shares of their mass.
struct VirtualKey {
  std::vector<double> k, value;            // [dim] the sum of p x
  std::vector<double> k_size, value_size;  // [dim] sqrt(sum of p^2 x^2)
  double log_mass = 0;                     // log(sum of e^s); -inf: nothing is dropped
  double bias = 0;                         // log_mass less the logit of k
};
// `kept` holds positions, ascending.
VirtualKey virtual_key(const Proxy& proxy, const RowsView& v, int64_t group, const std::vector<double>& scores,
                       const std::vector<int64_t>& kept);

// ---- attend ----
struct Attention {
  Matrix out;                // [q_tokens, dim]
  std::vector<double> lse;   // [q_tokens]
  double largest_logit = 0;  // in magnitude: any f32 program errs by this many ulp in its exponents
};
// What Mix says, of results [tokens, dim] that nothing was mixed into.
void mix(const AttendArgs& args, std::vector<double>& out, std::vector<double>& lse);
Attention attend(const AttendArgs& args);
// What a plain program in `dtype` gets: f32 sums, with logits, probabilities and output rounded to dtype. Its error is
// the yardstick for ours.
Attention naive_attend(const AttendArgs& args, DType dtype);

}  // namespace scope::reference
