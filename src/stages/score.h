// score: centroids and codes -> proxy logits, a few rows at a time; the whole matrix is never held.
#pragma once

#include "core/tensor.h"
#include "stages/encode.h"
#include "stages/exec.h"

namespace scope {

enum class ProxyKind { codes, exact };

// Everything from which the proxy logit of any (group, key) can be computed:
//   codes: s[c, j] = sum over m of tables[c, m, labels[m, j]]
//   exact: s[c, j] = scale * centroids[c] . k[rows[j]]
struct Proxy {
  ProxyKind kind = ProxyKind::codes;
  int64_t groups = 0;
  int64_t count = 0;                 // keys
  float scale = 0;                   // 1 / sqrt(dim)
  const float* centroids = nullptr;  // [groups, dim]
  RowsView k;                        // [tokens, dim]
  const int32_t* rows = nullptr;     // [count] tokens of the keys, ascending
  int64_t subspaces = 0;             // codes only, like the rest
  int64_t codes = 0;
  const float* tables = nullptr;    // [groups, subspaces, codes], scale included
  const int32_t* labels = nullptr;  // [subspaces, count]
};

struct ScoreArgs {
  const float* centroids = nullptr;  // [groups, dim]
  int64_t groups = 0;
  int64_t dim = 0;
  const Partition* partition = nullptr;
  const float* codebooks = nullptr;  // subspace after subspace: [codes, dim_m]
  int64_t codes = 0;
  float scale = 0;
  float* tables = nullptr;  // [groups, subspaces, codes] out
};

// How many rows score_rows is asked for at a time: enough that packing a block of keys for the exact proxy is paid
// back, few enough that a thread's rows stay small beside the inputs.
inline constexpr int64_t kScoreRows = 24;

namespace cpu {
void score(const Exec& exec, const ScoreArgs& args);
// Rows [first, first + n) of the proxy matrix into out [n, stride], on the calling thread. `buffer` holds
// score_rows_buffer() floats. n <= kScoreRows.
void score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride, float* buffer);
int64_t score_rows_buffer(const Exec& exec, int64_t dim);
}  // namespace cpu

}  // namespace scope
