// cocluster: queries and keys -> what group and encode write, each side clustered by its products with the other's
// centroids.
#pragma once

#include "stages/encode.h"
#include "stages/group.h"

namespace scope {

// docs/reference/algorithm.md, "Co-clustering", with queries.iterations rounds. Of the arguments of group and encode,
// `warm`, `sample`, `block`, `similarity`, keys.iterations and keys.scratch are not read; queries.scratch is for both.
struct CoclusterArgs {
  GroupArgs queries;
  EncodeArgs keys;  // one subspace: all channels in order
};

namespace cpu {
void cocluster(const Exec& exec, const CoclusterArgs& args);
int64_t cocluster_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
