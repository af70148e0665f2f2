// Where the parts of a warm-start state lie, what a valid one is, and what the host knows of it.
#include "pipeline/state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"

namespace scope {

namespace {

constexpr uint64_t kMagic = 0x3154415445504353;  // "SCPETAT1"
constexpr uint32_t kVersion = 2;
constexpr float kSlack = 1.01f;  // a mean of equal rows may round up, to bf16 by 1/256
constexpr float kAny = std::numeric_limits<float>::infinity();

// Of a centroid. Where calls do not look at rows, their means may be anything, and a state of theirs loads again.
float most_magnitude(const Plan& plan) {
  if (!plan.settings.check_finite) return kAny;
  return kSlack * (plan.shape.dtype == DType::f16 ? f16_to_f32(0x7bff) : kMostMagnitude);
}

// What a state of this plan holds: a row for each array, in the order of its memory and of StateLayout::Row.
std::array<StateArray, StateLayout::count> table(const Plan& plan) {
  const bool reuses = plan.reuses();
  const int64_t dim = plan.shape.dim, q = reuses ? plan.shape.q_tokens : 0, k = reuses ? plan.shape.k_tokens : 0;
  return std::to_array<StateArray>({
      {"centroids", plan.groups, dim, &StateSlot::groups, &Workspace::centroids},
      {"codebooks", plan.codes, dim, &StateSlot::codes, &Workspace::codebooks},  // subspace after subspace
      {"labels", 1, q, &StateSlot::groups, nullptr, reuses},                     // by token, like the next
      {"codes", plan.subspaces(), k, &StateSlot::codes, nullptr, reuses},
  });
}

// FNV-1a over what the header does not say: the sizes of some arrays, and the channel sets, since two partitions of one size
// must not share a state.
uint64_t hash(const Plan& plan, const StateLayout& layout) {
  uint64_t value = 14695981039346656037u;
  const auto mix = [&](uint32_t x) { value = (value ^ x) * 1099511628211u; };
  for (const StateArray& array : layout.arrays) {
    if (array.hashed) mix(static_cast<uint32_t>(array.columns));
  }
  for (const auto& set : plan.partition) {
    mix(~0u);
    for (const int32_t channel : set) mix(static_cast<uint32_t>(channel));
  }
  return value;
}

void check_header(const StateHeader& found, const StateHeader& expected) {
  require(found.magic == kMagic, Status::invalid_argument, "state: not an initialised state");
  require(found.version == kVersion, Status::invalid_argument, "state: it is of version {}, this library's is {}",
          found.version, kVersion);
  require(std::memcmp(&found, &expected, sizeof found) == 0, Status::shape,
          "state: it belongs to another plan (batch {} heads {} groups {} codes {} dim {}), this one has batch {} heads {} "
          "groups {} codes {} dim {}, or another partition, state_dtype or reuse of clusters",
          found.batch, found.heads, found.groups, found.codes, found.dim, expected.batch, expected.heads, expected.groups,
          expected.codes, expected.dim);
}

// Element i of f32 or bf16 at any address.
float read_value(const std::byte* from, DType type, int64_t i) {
  float value = 0;
  uint16_t bits = 0;
  if (type == DType::f32) {
    std::memcpy(&value, from + 4 * i, sizeof value);
    return value;
  }
  std::memcpy(&bits, from + 2 * i, sizeof bits);
  return bf16_to_f32(bits);
}

// Makes the device of a state current while it lives.
class Current {
 public:
  Current(const Backend& backend, const Exec& exec) : backend_(backend), previous_(backend.enter(exec)) {}
  ~Current() { backend_.leave(previous_); }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Backend& backend_;
  int previous_;
};

}  // namespace

StateLayout::StateLayout(const Plan& plan) : arrays(table(plan)) {
  const Shape& shape = plan.shape;
  header = {kMagic,      kVersion,    static_cast<uint32_t>(plan.settings.state_dtype),
            shape.batch, shape.heads, plan.groups,
            plan.codes,  shape.dim,   hash(plan, *this)};
  const int64_t heads = checked_mul(shape.batch, shape.heads, "state heads");
  const auto add = [&](int64_t size) { bytes = round_up(checked_add(bytes, size, "state bytes"), Arena::kAlignment); };
  slots = bytes = sizeof(StateHeader);
  add(checked_mul(shape.batch, sizeof(StateSlot), "state slots"));
  for (StateArray& array : arrays) {
    array.at = bytes;
    array.head_bytes = array.size() * (array.means() ? dtype_bytes(plan.settings.state_dtype) : 4);
    add(checked_mul(heads, array.head_bytes, array.name));
  }
}

StateSlot* StateLayout::slot(void* memory, int64_t sample) const {
  return reinterpret_cast<StateSlot*>(static_cast<std::byte*>(memory) + slots) + sample;
}

void* StateLayout::head(const StateArray& array, void* memory, int64_t sample, int64_t head) const {
  return static_cast<std::byte*>(memory) + array.at + (sample * header.heads + head) * array.head_bytes;
}

State::State(const Plan& plan, void* memory)
    : backend_(plan.backend),
      exec_(plan.exec),
      layout_(plan),
      most_(most_magnitude(plan)),
      memory_(memory),
      slots_(static_cast<size_t>(plan.shape.batch)),
      pending_(slots_.size()) {
  require(plan.state_bytes > 0, Status::invalid_argument, "state: method dense keeps none");
  require(memory != nullptr, Status::invalid_argument, "state: got null, expected {} bytes", layout_.bytes);
  require(reinterpret_cast<uintptr_t>(memory) % 16 == 0, Status::alignment, "state: address {} is not a multiple of 16",
          memory);
  std::vector<std::byte> start(static_cast<size_t>(layout_.arrays.front().at));  // the header, and slots of 0
  std::memcpy(start.data(), &layout_.header, sizeof layout_.header);
  const Current current(*backend_, exec_);
  backend_->write(exec_, start.data(), memory_, std::ssize(start));
}

bool State::filled() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const StateSlot& slot) { return slot.groups > 0; });
}

void State::set_filled(bool filled) {
  const StateSlot whole{static_cast<int32_t>(layout_.header.groups), static_cast<int32_t>(layout_.header.codes), 0};
  for (size_t b = 0; b < slots_.size(); ++b) {
    slots_[b] = !filled ? StateSlot{} : pending_[b].groups > 0 ? pending_[b] : whole;
  }
}

void State::check(const Plan& plan) const {
  check_header(layout_.header, StateLayout(plan).header);
  if (!backend_->can.host) return;
  StateHeader found{};
  std::memcpy(&found, memory_, sizeof found);  // the caller's memory, and so the caller's to break
  check_header(found, layout_.header);
  for (size_t b = 0; b < slots_.size(); ++b) {
    StateSlot slot{};
    std::memcpy(&slot, layout_.slot(memory_, static_cast<int64_t>(b)), sizeof slot);
    require(slots_[b].groups == 0 || slot == slots_[b], Status::invalid_argument,
            "state: sample {} was said to be filled, and no call of its shape has filled its memory", b);
  }
}

void State::save(void* stream, std::byte* to) const {
  Exec exec = exec_;
  exec.stream = stream;
  const Current current(*backend_, exec);
  backend_->read(exec, memory_, to, layout_.bytes);
  std::memcpy(to + layout_.slots, slots_.data(), slots_.size() * sizeof(StateSlot));
}

void State::check_values(const StateArray& array, int64_t sample, int64_t head, const StateSlot& slot,
                         const std::byte* values) const {
  if (array.means() && most_ == kAny) return;
  for (int64_t i = 0; i < array.filled(slot); ++i) {
    if (array.means()) {
      const float value = read_value(values, static_cast<DType>(layout_.header.dtype), i);
      require(std::abs(value) <= most_, Status::format,
              "state: the {} of sample {}, head {} hold {:g}, expected numbers of a magnitude up to {:g}", array.name,
              sample, head, value, most_);
    } else {
      int32_t label = 0;
      std::memcpy(&label, values + 4 * i, sizeof label);
      require(label >= -1 && label < slot.*array.clusters, Status::format,
              "state: {}[{}] of sample {}, head {} is {}, expected -1..{}", array.name, i, sample, head, label,
              slot.*array.clusters - 1);
    }
  }
}

void State::load(void* stream, std::span<const std::byte> from) {
  require(static_cast<int64_t>(from.size()) >= static_cast<int64_t>(sizeof(StateHeader)), Status::format,
          "state: got {} bytes, which is no saved state", from.size());
  StateHeader found{};
  std::memcpy(&found, from.data(), sizeof found);
  check_header(found, layout_.header);
  require(static_cast<int64_t>(from.size()) == layout_.bytes, Status::format, "state: got {} bytes, expected {}",
          from.size(), layout_.bytes);
  std::vector<StateSlot> slots(slots_.size());
  std::memcpy(slots.data(), from.data() + layout_.slots, slots.size() * sizeof(StateSlot));
  const auto inside = [](int32_t x, int64_t most) { return x >= 0 && x <= most; };
  for (size_t b = 0; b < slots.size(); ++b) {
    require(inside(slots[b].groups, layout_.header.groups) && inside(slots[b].codes, layout_.header.codes), Status::format,
            "state: sample {} says {} groups and {} codes, expected at most {} and {}", b, slots[b].groups, slots[b].codes,
            layout_.header.groups, layout_.header.codes);
  }
  const int64_t heads = layout_.header.heads;
  for (const StateArray& array : layout_.arrays) {
    for (int64_t i = 0; i < layout_.header.batch * heads; ++i) {
      const StateSlot& slot = slots[static_cast<size_t>(i / heads)];
      if (slot.groups > 0) check_values(array, i / heads, i % heads, slot, from.data() + array.at + i * array.head_bytes);
    }
  }
  Exec exec = exec_;
  exec.stream = stream;
  const Current current(*backend_, exec);
  backend_->write(exec, from.data(), memory_, layout_.bytes);
  slots_ = std::move(slots);
}

}  // namespace scope
