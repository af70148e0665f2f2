// Recall, density and output error of a selection, in float64 on sampled queries.
#pragma once

#include <cstdint>
#include <vector>

#include "core/parallel.h"
#include "core/tensor.h"

namespace scope {

// The selection of one head in the public format; labels null means every key.
struct HeadSelection {
  const int32_t* labels = nullptr;  // [q_tokens]
  const uint32_t* mask = nullptr;   // [groups, mask_words(k_tokens)]
  const uint32_t* keep = nullptr;   // [mask_words(k_tokens)]; optional
};

struct Quality {
  int64_t queries = 0;
  double mass_recall = 0;    // mean exact softmax mass on the selected keys
  double mass_interval = 0;  // half width of its 95 % confidence interval over the sampled queries
  double oracle_recall = 0;  // share of the exact top 10 % keys that were selected
  double retention = 0;      // share of keys selected
  double top_mass = 0;       // mean exact mass of the top 10 % keys: how structured the attention is
  double error = 0;          // |o - o*| / |o*| over the sampled queries
  double cosine = 0;         // mean cosine of o and o*
};

// Exact attention of one query: what every method is measured against, so that many can share it.
struct ExactQuery {
  int64_t token = 0;
  std::vector<double> mass;  // [k_tokens] its softmax
  double least_top = 0;      // of the top 10 %
  std::vector<double> out;   // [dim]
};

double element(const RowsView& x, int64_t token, int64_t channel);
ExactQuery exact_query(const RowsView& q, const RowsView& k, const RowsView& v, int64_t token);
// Which queries are looked at: a random one of each of `samples` equal stretches (1 .. tokens), so that every part of the
// video is, and not always the same column: a step of whole rows would hit it. The same for every method and run.
int64_t sampled_token(int64_t i, int64_t samples, int64_t tokens);

// samples: as below.
std::vector<ExactQuery> exact_queries(ThreadPool& pool, const RowsView& q, const RowsView& k, const RowsView& v,
                                      int64_t samples);
Quality measure_head(ThreadPool& pool, const std::vector<ExactQuery>& exact, const RowsView& out,
                     const HeadSelection& selection);

// `out` may be null (no error, no cosine). samples: queries to look at, spread evenly; >= q.tokens means all.
Quality measure_head(ThreadPool& pool, const RowsView& q, const RowsView& k, const RowsView& v, const RowsView& out,
                     const HeadSelection& selection, int64_t samples);

// How dense exact attention is: the fewest keys that hold `share` of a query's mass, over all keys, as a mean over sampled
// queries. NaN and Inf are refused.
double exact_density(ThreadPool& pool, const RowsView& q, const RowsView& k, double share, int64_t samples);

// The mean over heads; intervals add in quadrature.
Quality mean_quality(const Quality* heads, int64_t count);

}  // namespace scope
