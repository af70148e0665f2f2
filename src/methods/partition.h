// Partitions of the head dimension into channel subsets: rope, even:M, random:M, or any index sets.
#pragma once

#include <string_view>
#include <vector>

#include "stages/encode.h"

namespace scope {

// Throws unless `name` is rope, even:M or random:M with M in 1..256.
void check_partition_name(std::string_view name);

// `rope`: channel counts along T, H and W (may be empty when the name does not need them).
Partition make_partition(std::string_view name, int64_t dim, const std::vector<int64_t>& rope, uint64_t seed);

// Throws unless the sets cover 0 .. dim - 1 exactly once and none is empty.
void check_partition(const Partition& partition, int64_t dim);

}  // namespace scope
