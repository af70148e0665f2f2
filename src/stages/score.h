// score: centroids and codes -> what proxy logits are computed from, by whoever needs them; their matrix is no part of a
// contract.
#pragma once

#include "core/tensor.h"
#include "stages/encode.h"
#include "stages/exec.h"

namespace scope {

enum class ProxyKind { codes, exact };

// Everything from which the proxy logit of any (group, key) can be computed:
//   codes: s[c, j] = sum over m of tables[c, m, labels[m, j]]
//   exact: s[c, j] = scale * centroids[c] . k[rows[j]], where the centroids' elements are numbers of k's type
struct Proxy {
  ProxyKind kind = ProxyKind::codes;
  int64_t groups = 0;
  int64_t count = 0;                    // keys
  float scale = 0;                      // of a logit: q . k times this
  PerHead<const float> centroids = {};  // [groups, dim]
  HeadsView k = {};                     // [tokens, dim]
  const int32_t* rows = nullptr;  // [count] tokens of the keys, ascending; on a device null stands for the first `count`
  int64_t subspaces = 0;          // codes only, like the rest
  int64_t codes = 0;
  PerHead<const float> tables = {};    // [groups, subspaces, codes], scale included
  PerHead<const int32_t> labels = {};  // [subspaces, count]
};

struct ScoreArgs {
  int64_t heads = 1;
  PerHead<const float> centroids = {};  // [groups, dim]
  int64_t groups = 0;
  int64_t dim = 0;
  const Partition* partition = nullptr;
  PerHead<const float> codebooks = {};  // subspace after subspace: [codes, dim_m]
  int64_t codes = 0;
  float scale = 0;
  PerHead<float> tables = {};  // [groups, subspaces, codes] out
};

// Rows that are multiplied with a packed block of keys at a time.
inline constexpr int64_t kScoreRows = 24;

namespace cpu {
void score(const Exec& exec, const ScoreArgs& args);
struct Span {
  int64_t begin, end;
};
// The exact proxy's logits of some groups and keys into out [groups, stride], whose column 0 is key 0; buffer as below.
void multiply_rows(const Exec& exec, const Proxy& proxy, int64_t head, Span groups, Span keys, float* out, int64_t stride,
                   float* buffer);
// Rows [first, first + n) of one head's proxy matrix into out [n, stride], on the calling thread. `buffer` holds
// score_rows_buffer() floats.
void score_rows(const Exec& exec, const Proxy& proxy, int64_t head, int64_t first, int64_t n, float* out, int64_t stride,
                float* buffer);
int64_t score_rows_buffer(const Exec& exec, int64_t dim);
}  // namespace cpu

}  // namespace scope
