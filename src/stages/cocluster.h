// cocluster: queries and keys -> what group and encode write, each side clustered by its products with the other's
// centroids.
#pragma once

#include "stages/encode.h"
#include "stages/group.h"

namespace scope {

// Starts from random rows, those of K-means with the same seed. Then `queries.iterations` rounds, each first for the keys
// and then for the queries: the profile of a token or of a centroid is its products with all centroids of the other side,
// over sqrt(their squared sum + 1e-8); a token goes to the centroid whose profile has the highest product with its own, ties
// to the lowest index; a centroid becomes the mean of its tokens, and an empty one stays. Of the arguments of group and
// encode, `warm`, `sample`, `block`, `similarity`, keys.iterations and keys.scratch are not read; queries.scratch is for
// both.
struct CoclusterArgs {
  GroupArgs queries;
  EncodeArgs keys;  // one subspace: all channels in order
};

namespace cpu {
void cocluster(const Exec& exec, const CoclusterArgs& args);
int64_t cocluster_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
