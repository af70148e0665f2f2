// Packing and unpacking of warm-start states.
#include "pipeline/state.h"

#include <cstring>

#include "core/numeric.h"

namespace scope {

namespace {

constexpr uint64_t kMagic = 0x3154415445504353;  // "SCPETAT1"

// FNV-1a over the channel sets: two partitions of one size must not share a state.
uint64_t hash(const Partition& partition) {
  uint64_t value = 14695981039346656037u;
  const auto mix = [&](uint32_t x) { value = (value ^ x) * 1099511628211u; };
  for (const auto& set : partition) {
    mix(~0u);
    for (const int32_t channel : set) mix(static_cast<uint32_t>(channel));
  }
  return value;
}

void read_floats(const std::byte* from, DType type, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    if (type == DType::f32) {
      std::memcpy(out + i, from + 4 * i, 4);
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, from + 2 * i, 2);
      out[i] = bf16_to_f32(bits);
    }
  }
}

void write_floats(const float* in, DType type, int64_t n, std::byte* to) {
  for (int64_t i = 0; i < n; ++i) {
    if (type == DType::f32) {
      std::memcpy(to + 4 * i, in + i, 4);
    } else {
      const uint16_t bits = f32_to_bf16(in[i]);
      std::memcpy(to + 2 * i, &bits, 2);
    }
  }
}

}  // namespace

StateLayout::StateLayout(const Plan& plan) {
  const Shape& shape = plan.shape;
  header = {kMagic,      1,           static_cast<uint32_t>(plan.settings.state_dtype),
            shape.batch, shape.heads, plan.groups,
            plan.codes,  shape.dim,   hash(plan.partition)};
  const int64_t bytes_each = dtype_bytes(plan.settings.state_dtype);
  const int64_t heads = checked_mul(shape.batch, shape.heads, "state heads");
  const auto part = [&](int64_t at, int64_t size) {
    return round_up(checked_add(at, size, "state bytes"), Arena::kAlignment);
  };
  slots = sizeof(StateHeader);
  centroids = part(slots, checked_mul(shape.batch, sizeof(StateSlot), "state slots"));
  codebooks = part(centroids, checked_mul(heads, plan.groups * shape.dim * bytes_each, "state centroids"));
  bytes = part(codebooks, checked_mul(heads, plan.codes * shape.dim * bytes_each, "state codebooks"));
}

void init_state(const Plan& plan, void* state) {
  const StateLayout layout(plan);
  std::memset(static_cast<std::byte*>(state) + layout.slots, 0, static_cast<size_t>(layout.centroids - layout.slots));
  std::memcpy(state, &layout.header, sizeof layout.header);
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
          "{} codes {} dim {}, or another partition or state_dtype",
          found.batch, found.heads, found.groups, found.codes, found.dim, expected.batch, expected.heads, expected.groups,
          expected.codes, expected.dim);
}

StateSlot StateView::slot() const {
  StateSlot slot{};
  std::memcpy(&slot, static_cast<const std::byte*>(state_) + layout_.slots + sample_ * static_cast<int64_t>(sizeof slot),
              sizeof slot);
  return slot;
}

void StateView::set_slot(StateSlot slot) {
  std::memcpy(static_cast<std::byte*>(state_) + layout_.slots + sample_ * static_cast<int64_t>(sizeof slot), &slot,
              sizeof slot);
}

void StateView::load(int64_t head, const StateSlot& slot, float* centroids, float* codebooks) const {
  const DType type = plan_.settings.state_dtype;
  const int64_t index = sample_ * plan_.shape.heads + head, dim = plan_.shape.dim, each = dtype_bytes(type);
  const auto* base = static_cast<const std::byte*>(state_);
  read_floats(base + layout_.centroids + index * plan_.groups * dim * each, type, slot.groups * dim, centroids);
  read_floats(base + layout_.codebooks + index * plan_.codes * dim * each, type, slot.codes * dim, codebooks);
}

void StateView::store(int64_t head, const StateSlot& slot, const float* centroids, const float* codebooks) {
  const DType type = plan_.settings.state_dtype;
  const int64_t index = sample_ * plan_.shape.heads + head, dim = plan_.shape.dim, each = dtype_bytes(type);
  auto* base = static_cast<std::byte*>(state_);
  write_floats(centroids, type, slot.groups * dim, base + layout_.centroids + index * plan_.groups * dim * each);
  write_floats(codebooks, type, slot.codes * dim, base + layout_.codebooks + index * plan_.codes * dim * each);
}

}  // namespace scope
