// encode: keys -> one small codebook per channel subset, and one code per key and subset.
#pragma once

#include <vector>

#include "core/random.h"
#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

// Ordered channel index sets that together cover the head dimension exactly once.
using Partition = std::vector<std::vector<int32_t>>;

// blocks: the code of a key is its position / `block` in every subspace, and a code stands for the block's mean of k minus
// the mean of k over all `rows`. cocluster: together with the queries, by stages/cocluster.h instead of this stage.
enum class Encoding { kmeans, blocks, cocluster };

struct EncodeArgs {
  RowsView k;                            // [tokens, dim]
  const int32_t* rows = nullptr;         // [count] keys to encode, ascending
  int64_t count = 0;                     // >= 1
  const Partition* partition = nullptr;  // subspaces
  int64_t codes = 0;                     // per subspace, 1 .. count; blocks: ceil(count / block)
  Encoding encoding = Encoding::kmeans;
  int64_t block = 0;   // blocks only
  int iterations = 0;  // K-means only, like the next three
  int64_t sample = 0;
  bool warm = false;
  uint64_t seed = 0;
  float* codebooks = nullptr;   // subspace after subspace: [codes, dim_m]; in when warm, out
  int32_t* labels = nullptr;    // [subspaces, count] out: the codes
  int64_t* empty = nullptr;     // [subspaces] out: codes without a key
  float* similarity = nullptr;  // [codes] out, optional, blocks only: as GroupArgs says, of k minus its mean
  uint32_t* status = nullptr;   // [1] device only: bit 0 is set when a row that takes part is not finite
  Scratch scratch;
};

namespace cpu {
void encode(const Exec& exec, const EncodeArgs& args);
int64_t encode_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t codes);
}  // namespace cpu

}  // namespace scope
