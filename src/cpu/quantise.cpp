// Rounds keys to bytes, by factors that each head's own extremes give.
#include "cpu/quantise.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/bookkeeping.h"

namespace scope::cpu {

namespace {

constexpr int64_t kParts = 16;  // of a head's queries, of those that balance channels, and of its keys
constexpr int64_t kRows = 512;  // that are gathered or rounded at a time

// Calls use(rows, count) for row(i) of i from begin to end, where that is not negative.
template <class Row, class Use>
void each_run(int64_t begin, int64_t end, const Row& row, const Use& use) {
  while (begin < end) {
    int32_t rows[kRows];
    int64_t n = 0;
    for (; begin < end && n < kRows; ++begin) {
      rows[n] = row(begin);
      n += rows[n] >= 0 ? 1 : 0;
    }
    use(rows, n);
  }
}

}  // namespace

// What is known of some rows.
struct Quantiser::Part {
  float low[kMostChannels], high[kMostChannels];
  bool finite;

  void start() {
    std::fill(std::begin(low), std::end(low), std::numeric_limits<float>::infinity());
    std::fill(std::begin(high), std::end(high), -std::numeric_limits<float>::infinity());
    finite = true;
  }
  void add(const Part& other) {
    for (int64_t c = 0; c < kMostChannels; ++c) {
      low[c] = std::min(low[c], other.low[c]);
      high[c] = std::max(high[c], other.high[c]);
    }
    finite &= other.finite;
  }
  template <class Row>
  void measure(const ByteKernels& kernels, const RowsView& src, int64_t begin, int64_t end, const Row& row) {
    start();
    each_run(begin, end, row, [&](const int32_t* rows, int64_t n) { finite &= kernels.widen(src, rows, n, low, high); });
  }
};

Quantiser::Quantiser(Arena& arena, int64_t k_tokens, int64_t extra, int64_t dim) : dim_(dim), pitch_(rotated_channels(dim)) {
  bytes_ = arena.take<uint8_t>((k_tokens + extra) * pitch_);
  extra_ = arena.take<uint16_t>(extra * dim);
  parts_ = arena.take<Part>(3 * kParts + 1);
  reach_ = arena.take<float>(kParts + 1);
  factors_ = arena.take<ByteFactors>(1);
}

RowsView Quantiser::words(const uint8_t* first, int64_t rows) const {
  return {first, DType::f32, rows, pitch_ / 4, pitch_ / 4};
}

bool Quantiser::run(const Exec& exec, const AttendArgs& args, int64_t head) const {
  const ByteKernels& kernels = *exec.byte_kernels;
  const RowsView q = args.q[head], k = args.k[head], extra{extra_, DType::bf16, args.extra.count, dim_, dim_};
  const int32_t* order = args.order[head];
  const int64_t* offsets = args.offsets[head];
  const int64_t queries = offsets == nullptr ? q.tokens : offsets[args.groups];
  convert(exec, args.extra.k[head], DType::f32, extra_, DType::bf16, extra.tokens * dim_);

  const bool anyhow = order == nullptr || queries == q.tokens;  // all of them: the order of memory is as good, and faster
  const auto in_order = [](int64_t i) { return static_cast<int32_t>(i); };
  const auto token = [&](int64_t x) { return anyhow ? in_order(x) : order[x]; };
  const auto counts = [&](int64_t key) {
    return args.valid == nullptr || mask_bit(args.valid, key) || (args.keep != nullptr && mask_bit(args.keep, key));
  };
  const auto real = [&](int64_t key) { return counts(key) ? in_order(key) : -1; };
  const bool sampled_q = queries >= kBalanceSample, sampled_k = k.tokens >= kBalanceSample;
  Part *all_q = parts_, *sample = parts_ + kParts, *some_k = parts_ + 2 * kParts;
  exec.pool->run(3 * kParts + 1, [&](int64_t i, int) {
    const int64_t part = i % kParts;
    const auto begin = [&](int64_t rows) { return rows * part / kParts; };
    const auto end = [&](int64_t rows) { return rows * (part + 1) / kParts; };
    if (i < kParts) {
      parts_[i].measure(kernels, q, begin(queries), end(queries), token);
    } else if (i < 2 * kParts) {
      if (!sampled_q) return;
      parts_[i].measure(kernels, q, begin(queries), end(queries),
                        [&](int64_t x) { return token(x) % kBalanceEvery == 0 ? token(x) : -1; });
    } else if (i < 3 * kParts) {
      parts_[i].measure(kernels, k, begin(k.tokens), end(k.tokens),
                        [&](int64_t x) { return sampled_k && x % kBalanceEvery != 0 ? -1 : real(x); });
    } else {
      parts_[i].measure(kernels, extra, 0, extra.tokens, in_order);
    }
  });
  for (int64_t i = 1; i < kParts; ++i) all_q->add(all_q[i]);
  for (int64_t i = 1; sampled_q && i < kParts; ++i) sample->add(sample[i]);
  for (int64_t i = 1; i <= kParts; ++i) some_k->add(some_k[i]);
  if (!all_q->finite || !some_k->finite || !choose_factors(sampled_q ? sample : nullptr, *all_q, *some_k, sampled_k))
    return false;

  exec.pool->run(kParts + 1, [&](int64_t i, int) {
    const bool virtual_ones = i == kParts;
    float& reach = reach_[i] = 0;
    const auto use = [&](const RowsView& src, const int32_t* rows, int64_t n) {
      reach = std::max(reach, kernels.reach(src, rows, n, *factors_));
    };
    if (virtual_ones) {
      each_run(0, extra.tokens, in_order, [&](const int32_t* rows, int64_t n) { use(extra, rows, n); });
    } else {
      each_run(k.tokens * i / kParts, k.tokens * (i + 1) / kParts, real,
               [&](const int32_t* rows, int64_t n) { use(k, rows, n); });
    }
  });
  const float most = *std::max_element(reach_, reach_ + kParts + 1);
  if (!std::isfinite(most)) return false;
  factors_->over_k = most > kTinyRange ? kMostByte / most : 0;
  // Rotating both multiplies products by the number of channels.
  factors_->unit_k = (most > kTinyRange ? most / kMostByte : 1) / static_cast<float>(pitch_);

  const int64_t pieces = ceil_div(k.tokens, kRows);
  exec.pool->run(pieces + ceil_div(extra.tokens, kRows), [&](int64_t i, int) {
    const RowsView& rows = i < pieces ? k : extra;
    const int64_t first = (i < pieces ? i : i - pieces) * kRows, place = first + (i < pieces ? 0 : k.tokens);
    kernels.round_keys(rows, first, std::min(kRows, rows.tokens - first), *factors_, bytes_ + place * pitch_);
  });
  return true;
}

// Keys are taken off the middle of their range, which leaves the least to be rounded, and queries and keys share their
// channels' ranges, so that one that stands out costs both the same.
bool Quantiser::choose_factors(const Part* sample, const Part& all_q, const Part& k, bool sampled_k) const {
  const Part& q = sample == nullptr ? all_q : *sample;
  *factors_ = {};
  float most = 0;  // of a rotated query, at least
  bool finite = true;
  for (int64_t c = 0; c < dim_; ++c) {
    const bool any = k.low[c] <= k.high[c];
    const float centre = any ? 0.5f * k.low[c] + 0.5f * k.high[c] : 0;  // nothing overflows while halves are finite
    const float reach = any ? std::max(k.high[c] - centre, centre - k.low[c]) : 0;
    const float high_q = std::max(q.high[c], -q.low[c]), highest = std::max(all_q.high[c], -all_q.low[c]);
    float& times_q = factors_->times_q[c];
    float& times_k = factors_->times_k[c];
    factors_->centre[c] = centre;
    if (high_q > kTinyRange && reach > kTinyRange) {
      times_q = std::sqrt(reach / high_q), times_k = std::sqrt(high_q / reach);
      finite &= std::isfinite(times_q) && std::isfinite(times_k);
    } else if (reach > kTinyRange) {
      finite &= sample == nullptr || highest == 0;
    } else if (sampled_k) {
      times_k = std::numeric_limits<float>::infinity();  // of a key that differs, which `reach` finds
    }
    most += highest * times_q;
  }
  return finite && std::isfinite(most);
}

}  // namespace scope::cpu
