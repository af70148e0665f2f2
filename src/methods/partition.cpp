// How the named partitions are made, and what a valid one is.
#include "methods/partition.h"

#include <charconv>
#include <numeric>

#include "core/error.h"
#include "core/random.h"

namespace scope {

namespace {

// M of "prefix:M", or 0.
int64_t parts(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return 0;
  name.remove_prefix(prefix.size());
  int64_t value = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), value);
  return error == std::errc() && end == name.data() + name.size() && value >= 1 && value <= 256 ? value : 0;
}

// Cuts `channels` into consecutive runs of the given sizes.
Partition cut(const std::vector<int32_t>& channels, const std::vector<int64_t>& sizes) {
  Partition partition;
  auto at = channels.begin();
  for (const int64_t size : sizes) {
    partition.emplace_back(at, at + size);
    at += size;
  }
  return partition;
}

std::vector<int64_t> even_sizes(int64_t dim, int64_t m) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < m; ++i) sizes.push_back((i + 1) * dim / m - i * dim / m);
  return sizes;
}

}  // namespace

void check_partition_name(std::string_view name) {
  require(name == "rope" || parts(name, "even:") > 0 || parts(name, "random:") > 0, Status::invalid_argument,
          "partition: got \"{}\", expected rope, even:M or random:M with M in 1..256", name);
}

Partition make_partition(std::string_view name, int64_t dim, const std::vector<int64_t>& rope, uint64_t seed) {
  check_partition_name(name);
  if (!rope.empty()) {
    int64_t sum = 0;
    for (const int64_t size : rope) {
      require(size >= 1 && size <= dim, Status::shape, "rope: got a range of {} channels, expected 1..{}", size, dim);
      sum += size;
    }
    require(sum == dim, Status::shape, "rope: the ranges hold {} channels, expected the head dimension {}", sum, dim);
  }
  std::vector<int32_t> channels(static_cast<size_t>(dim));
  std::iota(channels.begin(), channels.end(), 0);
  if (name == "rope") {
    require(!rope.empty(), Status::invalid_argument,
            "partition: rope needs the channel counts of the temporal, height and width ranges (for example 44,42,42)");
    return cut(channels, rope);
  }
  const bool random = parts(name, "random:") > 0;
  const int64_t m = random ? parts(name, "random:") : parts(name, "even:");
  require(m <= dim, Status::invalid_argument, "partition: {} has more subsets than the {} channels", name, dim);
  if (random) {
    const RandomStream stream{.seed = seed, .tensor = 1, .purpose = 2};
    for (int64_t i = dim - 1; i > 0; --i) std::swap(channels[i], channels[stream.index(static_cast<uint64_t>(i), i + 1)]);
  }
  // random:3 is compared with rope, so it gets the same sizes.
  return cut(channels, random && rope.size() == static_cast<size_t>(m) ? rope : even_sizes(dim, m));
}

void check_partition(const Partition& partition, int64_t dim) {
  require(!partition.empty(), Status::shape, "subspaces: got none, expected at least one channel set");
  std::vector<int> owner(static_cast<size_t>(dim), -1);
  for (size_t m = 0; m < partition.size(); ++m) {
    require(!partition[m].empty(), Status::shape, "subspaces[{}]: got no channels, expected at least one", m);
    for (const int32_t channel : partition[m]) {
      require(channel >= 0 && channel < dim, Status::shape, "subspaces[{}]: got channel {}, expected 0..{}", m, channel,
              dim - 1);
      int& slot = owner[static_cast<size_t>(channel)];
      require(slot < 0, Status::shape, "subspaces[{}]: channel {} is already in subspaces[{}]", m, channel, slot);
      slot = static_cast<int>(m);
    }
  }
  for (int64_t c = 0; c < dim; ++c) {
    require(owner[static_cast<size_t>(c)] >= 0, Status::shape, "subspaces: channel {} is in none of the {} sets", c,
            partition.size());
  }
}

}  // namespace scope
