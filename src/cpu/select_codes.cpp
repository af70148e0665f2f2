// select on the CPU for the rules that keep whole codes: each group ranks the codes, and a target is solved on the ranks.
#include "cpu/select_codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "core/numeric.h"
#include "cpu/kmeans.h"

namespace scope::cpu {

namespace {

// What weigh hands to keep, of one head.
struct Weights {
  double* alpha;       // [1] as used
  int32_t* sizes;      // [codes] keys of each code
  int32_t* tokens;     // [count] the keys' tokens, by code
  int64_t* offsets;    // [codes + 1] where each code starts there
  int32_t* order;      // [groups, codes] codes as the group keeps them: those that all keep, then by weight, then by error
  int32_t* kept_keys;  // [groups, codes] keys up to and with each
  int32_t* keys;       // [groups, codes] the same where all are by weight
  double* mass;        // [groups, codes] share of the weight up to and with each by weight; 0 for those that all keep

  Weights(Arena arena, int64_t count, int64_t groups, int64_t codes, int64_t* bytes = nullptr) {
    alpha = arena.take<double>(1);
    sizes = arena.take<int32_t>(codes);
    tokens = arena.take<int32_t>(count);
    offsets = arena.take<int64_t>(codes + 1);
    order = arena.take<int32_t>(groups * codes);
    kept_keys = arena.take<int32_t>(groups * codes);
    keys = arena.take<int32_t>(groups * codes);
    mass = arena.take<double>(groups * codes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

struct Layout {
  int32_t* tried;   // [3, groups] codes kept at the bounds of the solver's bracket and between them
  double* weights;  // [threads, codes] what a group sorts by; infinite for a code that all keep
  uint64_t* room;   // [threads, 2, codes] for sorting

  Layout(Arena arena, const Exec& exec, int64_t groups, int64_t codes, int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    tried = arena.take<int32_t>(3 * groups);
    weights = arena.take<double>(threads * codes);
    room = arena.take<uint64_t>(threads * 2 * codes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// Codes by descending weight, then ascending. A radix sort by the weights' upper halves, which order all but those within
// 1e-6 of one another, and insertion for these: every group sorts all codes.
void sort_by_weight(const double* weights, int64_t n, uint64_t* room, int32_t* order) {
  uint64_t* from = room;
  uint64_t* to = room + n;
  int32_t places[4][256] = {};
  for (int64_t r = 0; r < n; ++r) {
    const auto bits = static_cast<uint32_t>(std::bit_cast<uint64_t>(weights[r]) >> 32);
    const uint32_t key = bits >> 31 != 0 ? bits : ~bits & 0x7fffffffu;  // ascending as weights descend
    for (int d = 0; d < 4; ++d) ++places[d][key >> (8 * d) & 255];
    from[r] = uint64_t{key} << 32 | static_cast<uint64_t>(r);
  }
  for (int d = 0; d < 4; ++d) {
    int32_t before = 0;
    for (int32_t& place : places[d]) before += std::exchange(place, before);
    for (int64_t i = 0; i < n; ++i) to[places[d][from[i] >> (32 + 8 * d) & 255]++] = from[i];
    std::swap(from, to);
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto code = static_cast<int32_t>(from[i]);
    int64_t at = i;
    for (; at > 0; --at) {
      const int32_t other = order[at - 1];
      if (weights[other] > weights[code] || (weights[other] == weights[code] && other < code)) break;
      order[at] = other;
    }
    order[at] = code;
  }
}

// One head.
class CodeSelector {
 public:
  CodeSelector(const Exec& exec, const WeighArgs& args, int64_t head)
      : exec_(exec),
        args_(args),
        head_(head),
        groups_(args.proxy.groups),
        codes_(args.proxy.codes),
        blocks_(row(args.rule).similarity),
        sizes_(args.sizes[head]),
        q_similarity_(args.q_similarity[head]),
        k_similarity_(args.k_similarity[head]),
        ranks_(weights_of(args, head, code_weights_bytes(args.proxy.count, args.proxy.groups, args.proxy.codes)),
               args.proxy.count, args.proxy.groups, args.proxy.codes),
        at_(Arena(args.scratch.data, args.scratch.bytes), exec, args.proxy.groups, args.proxy.codes) {
    for (int64_t r = 0; r < codes_; ++r) always_ += always(r) ? 1 : 0;
  }

  void weigh() {
    *ranks_.alpha = lowered_alpha(args_, head_, args_.target);
    const Proxy& proxy = args_.proxy;
    sort_by_label(proxy.labels[head_], proxy.count, codes_, ranks_.sizes, ranks_.tokens, ranks_.offsets);
    for (int64_t i = 0; i < proxy.count; ++i) ranks_.tokens[i] = proxy.rows[ranks_.tokens[i]];
    each_group([&](int64_t c, int thread) { rank(c, at_.weights + thread * codes_, at_.room + thread * 2 * codes_); });
    std::fill_n(args_.top_p[head_], groups_, 0);
  }

  void keep(const KeepArgs& out) {
    const int64_t words = mask_words(args_.proxy.k.tokens);
    const double bound = args_.target == 0 ? given() : out.rho != nullptr ? *out.rho : solve();
    *out.head_budget[head_] = 0;
    *out.rho_used[head_] = args_.target > 0 ? bound : args_.rho;
    *out.alpha_used[head_] = *ranks_.alpha;
    int32_t* counts = out.counts[head_];
    uint32_t* mask = out.mask[head_];
    std::fill_n(counts, groups_, 0);
    std::fill_n(mask, groups_ * words, 0u);
    each_group([&](int64_t c, int) { counts[c] = emit(c, codes_kept(c, bound), mask + c * words); });
  }

  // When the rule compares with `bound`.
  Kept kept_at(double bound) const {
    Kept kept;
    for (int64_t c = 0; c < groups_; ++c) {
      if (sizes_[c] == 0) continue;
      kept.pairs += static_cast<double>(sizes_[c]) * ranks_.kept_keys[c * codes_ + codes_kept(c, bound) - 1];
      kept.queries += sizes_[c];
    }
    return kept;
  }

  // A share of codes is one of whole codes, at least 1.
  double settled(double bound) const { return by_count() ? share(std::max<int64_t>(1, whole_codes(bound))) : bound; }

 private:
  template <class Body>
  void each_group(const Body& body) {
    exec_.pool->run(groups_, [&](int64_t c, int thread) {
      if (sizes_[c] > 0) body(c, thread);
    });
  }

  // NaN is not similar.
  bool always(int64_t code) const { return blocks_ && !(static_cast<double>(k_similarity_[code]) > args_.similar); }
  bool keeps_all(int64_t c) const { return blocks_ && !(static_cast<double>(q_similarity_[c]) > args_.similar); }
  double share(int64_t codes) const { return static_cast<double>(codes) / static_cast<double>(codes_); }

  // What the rule compares with when nothing is solved for.
  double given() const { return by_count() ? share(floor_share(args_.density, codes_)) : args_.rho; }
  // The rule compares with a share of the codes; without: of their weight.
  bool by_count() const {
    switch (args_.rule) {
      case Rule::blocks_topk:
        return true;
      case Rule::clusters:
      case Rule::blocks_cdf:
      case Rule::error_aware:
      case Rule::deviation:
        return false;
      case Rule::fixed:
      case Rule::top_p:
      case Rule::hybrid:
      case Rule::online:
      case Rule::target:
        break;
    }
    fail(Status::internal, "rule: {} keeps single keys", row(args_.rule).name);
  }

  void rank(int64_t c, double* weights, uint64_t* room) {
    if (row(args_.rule).diagonal) return rank_by_deviation(c, weights, room);
    const float* scores = args_.proxy.tables[head_] + c * codes_;
    const auto counts = [&](int64_t r) { return blocks_ ? !always(r) : ranks_.sizes[r] > 0; };
    float high = -std::numeric_limits<float>::infinity();
    for (int64_t r = 0; r < codes_; ++r) {
      if (counts(r)) high = std::max(high, scores[r]);
    }
    double total = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      weights[r] = always(r) ? std::numeric_limits<double>::infinity() : 0.0;
      if (!counts(r)) continue;
      const double factor = blocks_ ? 1.0 : ranks_.sizes[r];
      weights[r] = factor * std::exp(static_cast<double>(scores[r]) - static_cast<double>(high));
      total += weights[r];
    }
    require(std::isfinite(total), Status::non_finite, "proxy scores are not finite");
    int32_t* order = ranks_.order + c * codes_;
    sort_by_weight(weights, codes_, room, order);
    double mass = 0;
    int32_t keys = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      if (r >= always_) mass += weights[order[r]];
      keys += ranks_.sizes[order[r]];
      ranks_.mass[c * codes_ + r] = total > 0 ? mass / total : 0.0;
      ranks_.keys[c * codes_ + r] = keys;
    }
    if (row(args_.rule).errors) rank_by_error(c, weights, room);
    keys = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      keys += ranks_.sizes[order[r]];
      ranks_.kept_keys[c * codes_ + r] = keys;
    }
  }

  // By score, the group's own block and its neighbours first. In the place of a mass, each has the share of a normal row
  // that lies above it.
  void rank_by_deviation(int64_t c, double* weights, uint64_t* room) {
    const float* scores = args_.proxy.tables[head_] + c * codes_;
    const auto beside = [&](int64_t r) { return std::abs(r - c) <= 1; };
    double mean = 0, square = 0;
    for (int64_t r = 0; r < codes_; ++r) mean += static_cast<double>(scores[r]);
    mean /= static_cast<double>(codes_);  // of equal scores exactly theirs
    for (int64_t r = 0; r < codes_; ++r) {
      const double apart = static_cast<double>(scores[r]) - mean;
      square += apart * apart;
      weights[r] = beside(r) ? std::numeric_limits<double>::infinity() : static_cast<double>(scores[r]);
    }
    require(std::isfinite(square), Status::non_finite, "proxy scores are not finite");
    const double deviation = std::sqrt(square / static_cast<double>(codes_));
    int32_t* order = ranks_.order + c * codes_;
    sort_by_weight(weights, codes_, room, order);
    int32_t keys = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      const double above = static_cast<double>(scores[order[r]]) - mean;
      ranks_.mass[c * codes_ + r] = beside(order[r]) ? 0.0
                                    : deviation > 0  ? 0.5 * std::erfc(above / deviation / std::numbers::sqrt2)
                                                     : 1.0;
      keys += ranks_.sizes[order[r]];
      ranks_.kept_keys[c * codes_ + r] = ranks_.keys[c * codes_ + r] = keys;
    }
  }

  int64_t guaranteed() const { return std::max<int64_t>(1, floor_share(*ranks_.alpha, codes_)); }

  // The guaranteed codes stay first, in any order: all of them are kept.
  void rank_by_error(int64_t c, double* weights, uint64_t* room) {
    int32_t* order = ranks_.order + c * codes_;
    std::copy_n(args_.errors[head_] + c * codes_, codes_, weights);
    for (int64_t r = 0; r < std::min(guaranteed(), codes_); ++r) weights[order[r]] = std::numeric_limits<double>::infinity();
    sort_by_weight(weights, codes_, room, order);
  }

  // A share of whole codes may come back from floating point a hair below its integer.
  int64_t whole_codes(double share_of_codes) const {
    return static_cast<int64_t>(share_of_codes * static_cast<double>(codes_) + 1e-6);
  }

  // How many codes of its order a group keeps when the rule compares with `bound`.
  int64_t codes_kept(int64_t c, double bound) const {
    const int64_t rest = codes_ - always_;
    if (keeps_all(c) || bound >= 1.0) return codes_;
    const double* mass = ranks_.mass + c * codes_ + always_;
    const int64_t within = std::upper_bound(mass, mass + rest, bound) - mass;
    int64_t kept = 0;
    switch (args_.rule) {
      case Rule::clusters:
        kept = std::max(within + 1, floor_share(*ranks_.alpha, codes_));
        break;
      case Rule::error_aware: {
        const int64_t by_weight = std::max(within + 1, floor_share(2 * *ranks_.alpha, codes_));
        const int32_t budget = ranks_.keys[c * codes_ + std::min(by_weight, codes_) - 1];
        const int32_t* keys = ranks_.kept_keys + c * codes_;
        kept = std::max(guaranteed(), std::lower_bound(keys, keys + codes_, budget) - keys + 1);
        break;
      }
      case Rule::blocks_cdf:
      case Rule::deviation:
        kept = within;
        break;
      case Rule::blocks_topk:
        kept = whole_codes(bound);
        break;
      case Rule::fixed:
      case Rule::top_p:
      case Rule::hybrid:
      case Rule::online:
      case Rule::target:
        fail(Status::internal, "rule: {} keeps single keys", row(args_.rule).name);
    }
    return always_ + std::clamp<int64_t>(kept, std::min<int64_t>(1, rest), rest);
  }

  // Of `kept` codes per group.
  double density_with(const int32_t* kept) const {
    double keys = 0, queries = 0;
    for (int64_t c = 0; c < groups_; ++c) {
      if (sizes_[c] == 0) continue;
      keys += static_cast<double>(sizes_[c]) * ranks_.kept_keys[c * codes_ + kept[c] - 1];
      queries += sizes_[c];
    }
    return queries == 0 ? 0.0 : keys / queries / static_cast<double>(args_.proxy.count);
  }

  // The bound whose density is nearest to the target; 0 if even that keeps more. A group that keeps the same at both ends of
  // the bracket keeps it between them.
  double solve() const {
    int32_t* at_low = at_.tried;
    int32_t* at_high = at_low + groups_;
    int32_t* at_middle = at_high + groups_;
    const auto try_bound = [&](double bound, int32_t* kept) {
      for (int64_t c = 0; c < groups_; ++c) kept[c] = sizes_[c] == 0 ? 0 : static_cast<int32_t>(codes_kept(c, bound));
      return density_with(kept);
    };
    double low = 0, high = 1;
    if (try_bound(low, at_low) >= args_.target) return low;
    try_bound(high, at_high);
    for (int i = 0; i < 60; ++i) {
      const double middle = 0.5 * (low + high);
      for (int64_t c = 0; c < groups_; ++c) {
        at_middle[c] = at_low[c] == at_high[c] ? at_low[c] : static_cast<int32_t>(codes_kept(c, middle));
      }
      const bool less = density_with(at_middle) < args_.target;
      (less ? low : high) = middle;
      std::swap(less ? at_low : at_high, at_middle);
    }
    const double bound = args_.target - density_with(at_low) < density_with(at_high) - args_.target ? low : high;
    return settled(bound);
  }

  // The keys of the first `kept` codes; returns how many.
  int32_t emit(int64_t c, int64_t kept, uint32_t* mask) const {
    for (int64_t r = 0; r < kept; ++r) {
      const int32_t code = ranks_.order[c * codes_ + r];
      for (int64_t i = ranks_.offsets[code]; i < ranks_.offsets[code + 1]; ++i) set_mask_bit(mask, ranks_.tokens[i]);
    }
    return ranks_.kept_keys[c * codes_ + kept - 1];
  }

  const Exec& exec_;
  const WeighArgs& args_;
  int64_t head_, groups_, codes_, always_ = 0;
  bool blocks_;
  const int32_t* sizes_;
  const float *q_similarity_, *k_similarity_;
  Weights ranks_;
  Layout at_;
};

}  // namespace

int64_t code_weights_bytes(int64_t count, int64_t groups, int64_t codes) {
  int64_t bytes = 0;
  Weights(Arena(), count, groups, codes, &bytes);
  return bytes;
}

int64_t weigh_codes_scratch(const Exec& exec, int64_t groups, int64_t codes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, groups, codes, &bytes);
  return bytes;
}

// The bound whose density over all heads is nearest to the target; 0 if even that keeps more.
double solve_codes(const Exec& exec, const SolveArgs& args) {
  const double target = args.weighed.target;
  const SampleKept kept(args);
  const auto density_at = [&](double bound) {
    return kept.density(exec, [&](int64_t head) { return CodeSelector(exec, args.weighed, head).kept_at(bound); });
  };
  double low = 0, high = 1, at_low = density_at(low), at_high = 1;
  if (at_low >= target) return low;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high), density = density_at(middle);
    (density < target ? low : high) = middle;
    (density < target ? at_low : at_high) = density;
  }
  return CodeSelector(exec, args.weighed, 0).settled(target - at_low < at_high - target ? low : high);
}

void weigh_codes(const Exec& exec, const WeighArgs& args, int64_t head) { CodeSelector(exec, args, head).weigh(); }
void keep_codes(const Exec& exec, const KeepArgs& args, int64_t head) { CodeSelector(exec, args.weighed, head).keep(args); }

}  // namespace scope::cpu
