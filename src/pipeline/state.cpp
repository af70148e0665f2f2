// Where the parts of a warm-start state lie, and what a valid one is.
#include "pipeline/state.h"

#include <cstring>
#include <vector>

#include "core/numeric.h"

namespace scope {

namespace {

constexpr uint64_t kMagic = 0x3154415445504353;  // "SCPETAT1"

// FNV-1a over the channel sets: two partitions of one size must not share a state. Labels are those of so many tokens.
uint64_t hash(const Plan& plan) {
  uint64_t value = 14695981039346656037u;
  const auto mix = [&](uint32_t x) { value = (value ^ x) * 1099511628211u; };
  if (plan.reuses()) {
    mix(static_cast<uint32_t>(plan.shape.q_tokens));
    mix(static_cast<uint32_t>(plan.shape.k_tokens));
  }
  for (const auto& set : plan.partition) {
    mix(~0u);
    for (const int32_t channel : set) mix(static_cast<uint32_t>(channel));
  }
  return value;
}

}  // namespace

StateLayout::StateLayout(const Plan& plan) {
  const Shape& shape = plan.shape;
  header = {kMagic,      1,           static_cast<uint32_t>(plan.settings.state_dtype),
            shape.batch, shape.heads, plan.groups,
            plan.codes,  shape.dim,   hash(plan)};
  const int64_t bytes_each = dtype_bytes(plan.settings.state_dtype);
  const int64_t heads = checked_mul(shape.batch, shape.heads, "state heads");
  const auto part = [&](int64_t at, int64_t size) {
    return round_up(checked_add(at, size, "state bytes"), Arena::kAlignment);
  };
  slots = sizeof(StateHeader);
  centroids = part(slots, checked_mul(shape.batch, sizeof(StateSlot), "state slots"));
  codebooks = part(centroids, checked_mul(heads, plan.groups * shape.dim * bytes_each, "state centroids"));
  labels = part(codebooks, checked_mul(heads, plan.codes * shape.dim * bytes_each, "state codebooks"));
  const int64_t q = plan.reuses() ? shape.q_tokens : 0, k = plan.reuses() ? shape.k_tokens : 0;
  codes = part(labels, checked_mul(heads, q * 4, "state labels"));
  bytes = part(codes, checked_mul(heads, k * 4 * static_cast<int64_t>(plan.partition.size()), "state codes"));
}

void init_state(const Plan& plan, void* state) {
  const StateLayout layout(plan);
  std::vector<std::byte> start(static_cast<size_t>(layout.centroids));
  std::memcpy(start.data(), &layout.header, sizeof layout.header);
  if (plan.backend->write == nullptr) {
    std::memcpy(state, start.data(), start.size());
    return;
  }
  const DeviceScope scope(plan);
  plan.backend->write(plan.exec, start.data(), state, layout.centroids);
}

void check_state(const Plan& plan, const void* state) {
  StateHeader found{};
  std::memcpy(&found, state, sizeof found);
  const StateHeader expected = StateLayout(plan).header;
  require(found.magic == kMagic && found.version == expected.version, Status::invalid_argument,
          "state: not an initialised state (call scope_state_init first)");
  require(std::memcmp(&found, &expected, sizeof found) == 0, Status::shape,
          "state: it belongs to another plan (batch {} heads {} groups {} codes {} dim {}), this one has batch {} heads {} "
          "groups "
          "{} codes {} dim {}, or another partition, state_dtype or reuse of clusters",
          found.batch, found.heads, found.groups, found.codes, found.dim, expected.batch, expected.heads, expected.groups,
          expected.codes, expected.dim);
}

StateView::StateView(const Plan& plan, void* state, int64_t sample) {
  const StateLayout layout(plan);
  auto* base = static_cast<std::byte*>(state);
  const int64_t each = dtype_bytes(plan.settings.state_dtype), first = sample * plan.shape.heads;
  slot = reinterpret_cast<StateSlot*>(base + layout.slots) + sample;
  centroids = base + layout.centroids + first * plan.groups * plan.shape.dim * each;
  codebooks = base + layout.codebooks + first * plan.codes * plan.shape.dim * each;
  const auto subspaces = static_cast<int64_t>(plan.partition.size());
  labels = plan.reuses() ? reinterpret_cast<int32_t*>(base + layout.labels) + first * plan.shape.q_tokens : nullptr;
  codes =
      plan.reuses() ? reinterpret_cast<int32_t*>(base + layout.codes) + first * subspaces * plan.shape.k_tokens : nullptr;
}

}  // namespace scope
