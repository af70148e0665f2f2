// encode: keys -> one small codebook per channel subset, and one code per key and subset.
#pragma once

#include <vector>

#include "core/random.h"
#include "core/tensor.h"
#include "stages/exec.h"

namespace scope {

// Ordered channel index sets that together cover the head dimension exactly once.
using Partition = std::vector<std::vector<int32_t>>;

// docs/reference/algorithm.md, "Blocks"; cocluster: together with the queries, by stages/cocluster.h instead of this stage;
// means: blocks whose codes are the means of their keys as they are.
enum class Encoding { kmeans, blocks, cocluster, means };

struct EncodeArgs {
  int64_t heads = 1;
  HeadsView k = {};                      // [tokens, dim]
  const int32_t* rows = nullptr;         // [count] keys to encode, ascending
  int64_t count = 0;                     // >= 1
  const Partition* partition = nullptr;  // subspaces
  int64_t codes = 0;                     // per subspace, 1 .. count; blocks: ceil(count / block)
  Encoding encoding = Encoding::kmeans;
  int64_t block = 0;   // blocks and means only
  int iterations = 0;  // K-means only, like the next five; these three as KMeansArgs says
  int64_t sample = 0;
  int full_iterations = 2;
  uint64_t draw = 0;
  bool warm = false;
  uint64_t seed = 0;
  PerHead<float> codebooks = {};   // subspace after subspace: [codes, dim_m]; in when warm, out
  PerHead<int32_t> labels = {};    // [subspaces, count] out: the codes
  PerHead<int64_t> empty = {};     // [subspaces] out: codes without a key
  PerHead<float> similarity = {};  // [codes] out, optional, blocks only: as GroupArgs says
  uint32_t* status = nullptr;      // as GroupArgs says
  Scratch scratch = {};
};

namespace cpu {
void encode(const Exec& exec, const EncodeArgs& args);
int64_t encode_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
