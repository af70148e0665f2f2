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
  // Rows row(i) of src for i from begin to end, where that is not negative.
  template <class Row>
  void measure(const ByteKernels& kernels, const RowsView& src, int64_t begin, int64_t end, const Row& row) {
    start();
    while (begin < end) {
      int32_t rows[kRows];
      int64_t n = 0;
      for (; begin < end && n < kRows; ++begin) {
        rows[n] = row(begin);
        n += rows[n] >= 0 ? 1 : 0;
      }
      finite &= kernels.widen(src, rows, n, low, high);
    }
  }
};

Quantiser::Quantiser(Arena& arena, int64_t k_tokens, int64_t extra, int64_t dim) : dim_(dim), pitch_(round_up(dim, kLanes)) {
  bytes_ = arena.take<uint8_t>((k_tokens + extra) * pitch_);
  extra_ = arena.take<uint16_t>(extra * dim);
  parts_ = arena.take<Part>(3 * kParts + 1);
  factors_ = arena.take<ByteFactors>(1);
}

RowsView Quantiser::words(const uint8_t* first, int64_t rows) const {
  return {first, DType::f32, rows, ceil_div(dim_, int64_t{4}), pitch_ / 4};
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
  const bool sampled = queries >= kBalanceSample;
  Part *all_q = parts_, *sample = parts_ + kParts, *all_k = parts_ + 2 * kParts;
  exec.pool->run(3 * kParts + 1, [&](int64_t i, int) {
    const int64_t part = i % kParts;
    const auto begin = [&](int64_t rows) { return rows * part / kParts; };
    const auto end = [&](int64_t rows) { return rows * (part + 1) / kParts; };
    if (i < kParts) {
      parts_[i].measure(kernels, q, begin(queries), end(queries), token);
    } else if (i < 2 * kParts) {
      if (!sampled) return;
      parts_[i].measure(kernels, q, begin(queries), end(queries),
                        [&](int64_t x) { return token(x) % kBalanceEvery == 0 ? token(x) : -1; });
    } else if (i < 3 * kParts) {
      parts_[i].measure(kernels, k, begin(k.tokens), end(k.tokens), [&](int64_t x) { return counts(x) ? in_order(x) : -1; });
    } else {
      parts_[i].measure(kernels, extra, 0, extra.tokens, in_order);
    }
  });
  for (int64_t i = 1; i < kParts; ++i) all_q->add(all_q[i]);
  for (int64_t i = 1; sampled && i < kParts; ++i) sample->add(sample[i]);
  for (int64_t i = 1; i <= kParts; ++i) all_k->add(all_k[i]);
  if (!all_q->finite || !all_k->finite) return false;
  if (!choose_factors(sampled ? *sample : *all_q, *all_k, sampled ? all_q : nullptr)) return false;

  const int64_t pieces = ceil_div(k.tokens, kRows);
  exec.pool->run(pieces + ceil_div(extra.tokens, kRows), [&](int64_t i, int) {
    const RowsView& rows = i < pieces ? k : extra;
    const int64_t first = (i < pieces ? i : i - pieces) * kRows, place = first + (i < pieces ? 0 : k.tokens);
    kernels.round_keys(rows, first, std::min(kRows, rows.tokens - first), *factors_, bytes_ + place * pitch_, pitch_);
  });
  return true;
}

// Keys are taken off the middle of their range, which leaves the least to be rounded, and queries and keys share their
// channels' ranges, so that one that stands out costs both the same.
bool Quantiser::choose_factors(const Part& q, const Part& k, const Part* unseen) const {
  *factors_ = {};
  float reach[kMostChannels], high_q[kMostChannels], most = 0;
  const auto counts = [&](int64_t c) { return high_q[c] > kTinyRange && reach[c] > kTinyRange; };  // others: shifts alone
  for (int64_t c = 0; c < dim_; ++c) {
    const float centre = 0.5f * k.low[c] + 0.5f * k.high[c];  // nothing overflows while halves are finite
    reach[c] = std::max(k.high[c] - centre, centre - k.low[c]);
    high_q[c] = std::max(q.high[c], -q.low[c]);
    if (k.low[c] <= k.high[c]) factors_->centre[c] = centre;
    if (counts(c)) most = std::max(most, std::sqrt(reach[c]) * std::sqrt(high_q[c]));
  }
  factors_->unit_k = most > 0 ? most / kMostByte : 1;
  bool finite = true;
  for (int64_t c = 0; c < dim_; ++c) {
    if (!counts(c)) {
      finite &= unseen == nullptr || reach[c] <= kTinyRange || (unseen->low[c] == 0 && unseen->high[c] == 0);
      continue;
    }
    factors_->times_q[c] = std::sqrt(reach[c] / high_q[c]);
    factors_->times_k[c] = std::sqrt(high_q[c] / reach[c]) / factors_->unit_k;
    finite &= std::isfinite(factors_->times_q[c]) && std::isfinite(factors_->times_k[c]);
  }
  return finite;
}

}  // namespace scope::cpu
