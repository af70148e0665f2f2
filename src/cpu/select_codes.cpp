// select on the CPU for the rules that keep whole codes: each group ranks the codes, and a target is solved on the ranks.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/select.h"

namespace scope::cpu {

namespace {

constexpr int64_t kChunk = 512;  // keys whose bits are made at a time

struct Ranked {
  double weight;  // infinite for a code that all keep
  int32_t code;
};

struct Layout {
  int32_t* sizes;      // [codes] keys of each code
  int32_t* order;      // [groups, codes] codes as the group keeps them: those that all keep, then by weight, then by error
  int32_t* kept_keys;  // [groups, codes] keys up to and with each
  int32_t* keys;       // [groups, codes] the same where all are by weight
  double* mass;        // [groups, codes] share of the weight up to and with each by weight; 0 for those that all keep
  Ranked* ranked;      // [threads, codes]
  float* kept;         // [threads, codes] 1 or 0

  Layout(Arena arena, const Exec& exec, int64_t groups, int64_t codes, int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    sizes = arena.take<int32_t>(codes);
    order = arena.take<int32_t>(groups * codes);
    kept_keys = arena.take<int32_t>(groups * codes);
    keys = arena.take<int32_t>(groups * codes);
    mass = arena.take<double>(groups * codes);
    ranked = arena.take<Ranked>(threads * codes);
    kept = arena.take<float>(threads * codes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

class CodeSelector {
 public:
  CodeSelector(const Exec& exec, const SelectArgs& args)
      : exec_(exec),
        args_(args),
        codes_(args.proxy.codes),
        blocks_(args.rule == Rule::blocks_topk || args.rule == Rule::blocks_cdf),
        at_(Arena(args.scratch.data, args.scratch.bytes), exec, args.proxy.groups, args.proxy.codes) {}

  void run() {
    const Proxy& proxy = args_.proxy;
    std::fill_n(at_.sizes, codes_, 0);
    for (int64_t j = 0; j < proxy.count; ++j) ++at_.sizes[proxy.labels[j]];
    for (int64_t r = 0; r < codes_; ++r) always_ += always(r) ? 1 : 0;
    *args_.head_budget = 0;
    const double most = args_.target / (args_.rule == Rule::error_aware ? 4 : 2);
    *args_.alpha_used = args_.target > 0 ? std::min(args_.alpha, most) : args_.alpha;
    each_group([&](int64_t c, int thread) { rank(c, at_.ranked + thread * codes_); });
    const double given = args_.rule == Rule::blocks_topk ? share(floor_share(args_.density, codes_)) : args_.rho;
    const double bound = args_.target > 0 ? solve() : given;
    *args_.rho_used = args_.target > 0 ? bound : args_.rho;
    std::fill_n(args_.counts, proxy.groups, 0);
    std::fill_n(args_.top_p, proxy.groups, 0);
    std::fill_n(args_.mask, proxy.groups * mask_words(proxy.k.tokens), 0u);
    each_group([&](int64_t c, int thread) { emit(c, codes_kept(c, bound), at_.kept + thread * codes_); });
  }

 private:
  template <class Body>
  void each_group(const Body& body) {
    exec_.pool->run(args_.proxy.groups, [&](int64_t c, int thread) {
      if (args_.sizes[c] > 0) body(c, thread);
    });
  }

  static bool heavier(const Ranked& a, const Ranked& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.code < b.code;
  }

  // NaN is not similar.
  bool always(int64_t code) const { return blocks_ && !(static_cast<double>(args_.k_similarity[code]) > args_.similar); }
  bool keeps_all(int64_t c) const { return blocks_ && !(static_cast<double>(args_.q_similarity[c]) > args_.similar); }
  double share(int64_t codes) const { return static_cast<double>(codes) / static_cast<double>(codes_); }

  void rank(int64_t c, Ranked* ranked) {
    const float* scores = args_.proxy.tables + c * codes_;
    const auto counts = [&](int64_t r) { return blocks_ ? !always(r) : at_.sizes[r] > 0; };
    float high = -std::numeric_limits<float>::infinity();
    for (int64_t r = 0; r < codes_; ++r) {
      if (counts(r)) high = std::max(high, scores[r]);
    }
    double total = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      ranked[r] = {always(r) ? std::numeric_limits<double>::infinity() : 0.0, static_cast<int32_t>(r)};
      if (!counts(r)) continue;
      const double factor = blocks_ ? 1.0 : at_.sizes[r];
      ranked[r].weight = factor * std::exp(static_cast<double>(scores[r]) - static_cast<double>(high));
      total += ranked[r].weight;
    }
    require(std::isfinite(total), Status::non_finite, "proxy scores are not finite");
    std::sort(ranked, ranked + codes_, heavier);
    double mass = 0;
    int32_t keys = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      if (r >= always_) mass += ranked[r].weight;
      keys += at_.sizes[ranked[r].code];
      at_.order[c * codes_ + r] = ranked[r].code;
      at_.mass[c * codes_ + r] = total > 0 ? mass / total : 0.0;
      at_.keys[c * codes_ + r] = keys;
    }
    if (args_.rule == Rule::error_aware) rank_by_error(c, ranked);
    keys = 0;
    for (int64_t r = 0; r < codes_; ++r) {
      keys += at_.sizes[at_.order[c * codes_ + r]];
      at_.kept_keys[c * codes_ + r] = keys;
    }
  }

  int64_t guaranteed() const { return std::max<int64_t>(1, floor_share(*args_.alpha_used, codes_)); }

  // The guaranteed codes stay where they are.
  void rank_by_error(int64_t c, Ranked* ranked) {
    const int64_t first = std::min(guaranteed(), codes_);
    int32_t* order = at_.order + c * codes_;
    for (int64_t r = first; r < codes_; ++r) {
      ranked[r] = {static_cast<double>(args_.errors[c * codes_ + order[r]]), order[r]};
    }
    std::sort(ranked + first, ranked + codes_, heavier);
    for (int64_t r = first; r < codes_; ++r) order[r] = ranked[r].code;
  }

  // How many codes of its order a group keeps when the rule compares with `bound`.
  int64_t codes_kept(int64_t c, double bound) const {
    const int64_t rest = codes_ - always_;
    if (keeps_all(c) || bound >= 1.0) return codes_;
    const double* mass = at_.mass + c * codes_ + always_;
    const int64_t within = std::upper_bound(mass, mass + rest, bound) - mass;
    int64_t kept = 0;
    if (args_.rule == Rule::clusters) {
      kept = std::max(within + 1, floor_share(*args_.alpha_used, codes_));
    } else if (args_.rule == Rule::error_aware) {
      const int64_t by_weight = std::max(within + 1, floor_share(2 * *args_.alpha_used, codes_));
      const int32_t budget = at_.keys[c * codes_ + std::min(by_weight, codes_) - 1];
      const int32_t* keys = at_.kept_keys + c * codes_;
      kept = std::max(guaranteed(), std::lower_bound(keys, keys + codes_, budget) - keys + 1);
    } else {
      // A share of whole codes may come back from floating point a hair below its integer.
      kept = args_.rule == Rule::blocks_cdf ? within : static_cast<int64_t>(bound * static_cast<double>(codes_) + 1e-6);
    }
    return always_ + std::clamp<int64_t>(kept, std::min<int64_t>(1, rest), rest);
  }

  double density_at(double bound) const {
    double kept = 0, queries = 0;
    for (int64_t c = 0; c < args_.proxy.groups; ++c) {
      if (args_.sizes[c] == 0) continue;
      kept += static_cast<double>(args_.sizes[c]) * at_.kept_keys[c * codes_ + codes_kept(c, bound) - 1];
      queries += args_.sizes[c];
    }
    return queries == 0 ? 0.0 : kept / queries / static_cast<double>(args_.proxy.count);
  }

  // The bound whose density is nearest to the target; 0 if even that keeps more.
  double solve() const {
    double low = 0, high = 1;
    if (density_at(low) >= args_.target) return low;
    for (int i = 0; i < 60; ++i) {
      const double middle = 0.5 * (low + high);
      (density_at(middle) < args_.target ? low : high) = middle;
    }
    const double bound = args_.target - density_at(low) < density_at(high) - args_.target ? low : high;
    if (args_.rule != Rule::blocks_topk) return bound;
    return share(std::max<int64_t>(1, static_cast<int64_t>(bound * static_cast<double>(codes_) + 1e-6)));
  }

  // The keys of the first `kept` codes.
  void emit(int64_t c, int64_t kept, float* table) {
    const Proxy& proxy = args_.proxy;
    args_.counts[c] = at_.kept_keys[c * codes_ + kept - 1];
    std::fill_n(table, codes_, 0.0f);
    for (int64_t r = 0; r < kept; ++r) table[at_.order[c * codes_ + r]] = 1.0f;
    for (int64_t r = kept; r < codes_ && args_.dropped != nullptr; ++r) {
      const int32_t code = at_.order[c * codes_ + r];
      if (at_.sizes[code] > 0) set_mask_bit(args_.dropped + c * mask_words(codes_), code);
    }
    uint32_t* mask = args_.mask + c * mask_words(proxy.k.tokens);
    float bits[kChunk];
    uint32_t words[kChunk / 32];
    for (int64_t j = 0; j < proxy.count; j += kChunk) {
      const int64_t n = std::min(kChunk, proxy.count - j);
      exec_.kernels->lookup(table, codes_, 1, proxy.labels + j, n, bits);
      exec_.kernels->above(bits, n, 0.5f, words);
      for (int64_t w = 0; w < ceil_div(n, 32); ++w) place_word(mask, proxy.rows, proxy.count, j + 32 * w, words[w]);
    }
  }

  const Exec& exec_;
  const SelectArgs& args_;
  int64_t codes_, always_ = 0;
  bool blocks_;
  Layout at_;
};

}  // namespace

int64_t select_codes_scratch(const Exec& exec, int64_t groups, int64_t codes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, groups, codes, &bytes);
  return bytes;
}

void select_codes(const Exec& exec, const SelectArgs& args) { CodeSelector(exec, args).run(); }

}  // namespace scope::cpu
