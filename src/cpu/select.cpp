// select on the CPU, key by key: histograms instead of sorts, in passes over the proxy rows. The rules that keep whole codes
// are in select_codes.cpp.
#include "stages/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/mean.h"
#include "cpu/proxy_rows.h"
#include "cpu/select_codes.h"

namespace scope {

int64_t head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups) {
  __extension__ __int128 total = 0;  // three groups of 2^31 queries and keys already pass 64 bits
  int64_t queries = 0;
  for (int64_t c = 0; c < groups; ++c) {
    total += int64_t{sizes[c]} * base_counts[c];
    queries += sizes[c];
  }
  return queries == 0 ? 0 : static_cast<int64_t>((total + queries - 1) / queries);
}

namespace cpu {

namespace {

// Writes 32 bits of positions [first, first + 32) of `count` at the tokens they stand for.
void place_word(uint32_t* mask, const int32_t* rows, int64_t count, int64_t first, uint32_t word) {
  const int64_t last = std::min(first + 31, count - 1);
  if (rows[first] % 32 == 0 && rows[last] - rows[first] == last - first) {
    mask[rows[first] / 32] |= word;
    return;
  }
  for (; word != 0; word &= word - 1) set_mask_bit(mask, rows[first + std::countr_zero(word)]);
}

constexpr int64_t kBins = 1024;
constexpr int64_t kBinChunk = 512;  // keys whose bins and masses are computed at a time

// The histogram of one proxy row: bins of equal width, the highest scores in bin 0.
struct Histogram {
  float high = 0, per_bin = 0;
  int32_t count[kBins];  // keys in bins 0 .. b
  double mass[kBins];    // sum of exp(s - high) over them

  int32_t keys_in(int64_t b) const { return b == 0 ? count[0] : count[b] - count[b - 1]; }
  double total() const { return mass[kBins - 1]; }
  // The first bin by whose end the mass reaches `goal`.
  int64_t crossing(double goal) const {
    return std::min<int64_t>(std::lower_bound(mass, mass + kBins, goal) - mass, kBins - 1);
  }
};

// What weigh hands to keep, of one head.
struct Weights {
  double* alpha;          // [1] as used
  Histogram* histograms;  // [groups]
  int32_t* base;          // [groups] b_c

  Weights(Arena arena, int64_t groups, int64_t* bytes = nullptr) {
    alpha = arena.take<double>(1);
    histograms = arena.take<Histogram>(groups);
    base = arena.take<int32_t>(groups);
    if (bytes != nullptr) *bytes = arena.used();
  }
  static int64_t bytes(int64_t groups) {
    int64_t bytes = 0;
    Weights(Arena(), groups, &bytes);
    return bytes;
  }
};

struct Layout {
  ProxyRows rows;
  MeanBuffers means;
  int32_t* candidates;        // [threads, keys] positions in one bin
  int32_t* sample = nullptr;  // [keys] tokens of the sample
  float* scores = nullptr;    // [threads, keys] a row's scores of the sample

  Layout(Arena arena, const Exec& exec, int64_t groups, int64_t count, int64_t dim, bool sampled, int64_t* bytes = nullptr)
      : rows(arena, exec, groups, count, dim), means(arena, exec, count, dim) {
    candidates = arena.take<int32_t>(exec.pool->threads() * count);
    if (sampled) {
      sample = arena.take<int32_t>(count);
      scores = arena.take<float>(exec.pool->threads() * count);
    }
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// How the rules that keep single keys differ.
struct Form {
  bool by_mass = false;  // counts come from t_c; without: from `density`
  bool budget = false;   // every group keeps k_head keys at least
  double goal = 0;       // density to solve rho for; 0: rho is given, or not used
};

Form form_of(const WeighArgs& args) {
  switch (args.rule) {
    case Rule::fixed:
      return {};
    case Rule::top_p:
    case Rule::hybrid:
      return {.by_mass = true, .goal = args.target};
    case Rule::online:
      return {.by_mass = true, .budget = true};
    case Rule::target:
      return {.by_mass = true, .budget = true, .goal = args.density};
    case Rule::clusters:
    case Rule::blocks_topk:
    case Rule::blocks_cdf:
    case Rule::error_aware:
    case Rule::deviation:
      break;
  }
  fail(Status::internal, "rule: {} keeps whole codes", row(args.rule).name);
}

// The rho at which density_at(rho) is `goal`.
template <class DensityAt>
double solve_rho(double goal, const DensityAt& density_at) {
  if (goal >= 1.0) return 1.0;
  double low = 0, high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = 0.5 * (low + high);
    (density_at(middle) < goal ? low : high) = middle;
  }
  return std::clamp(0.5 * (low + high), 1e-9, 1.0 - 1e-12);
}

// One head.
class KeySelector {
 public:
  KeySelector(const Exec& exec, const WeighArgs& args, int64_t head)
      : exec_(exec),
        args_(args),
        head_(head),
        groups_(args.proxy.groups),
        n_(sampled_keys(args)),
        form_(form_of(args)),
        sizes_(args.sizes[head]),
        top_p_(args.top_p[head]),
        weights_(weights_of(args, head, Weights::bytes(args.proxy.groups)), args.proxy.groups),
        at_(Arena(args.scratch.data, args.scratch.bytes), exec, args.proxy.groups, args.proxy.count, args.proxy.k.dim,
            sampled()) {}

  void weigh() {
    *weights_.alpha = lowered_alpha(args_, head_, form_.goal);
    std::fill_n(top_p_, groups_, 0);
    if (!form_.by_mass) return;
    std::fill_n(weights_.base, groups_, 0);
    const Proxy seen = seen_by_rule();
    at_.rows.fill(exec_, seen, head_);
    each_row(seen, [&](int64_t c, const float* row, int thread) {
      fill_histogram(row, weights_.histograms[c], true);
      if (form_.goal == 0) top_p_[c] = top_p_count(c, row, args_.rho, thread);
    });
  }

  void keep(const KeepArgs& out) {
    double rho = args_.rho;
    if (form_.goal > 0) {
      const Proxy seen = seen_by_rule();
      at_.rows.fill(exec_, seen, head_);
      rho = out.rho != nullptr ? *out.rho : solve_rho(form_.goal, [&](double at) { return density_of(kept_at(at), n_); });
      each_row(seen, [&](int64_t c, const float* row, int thread) { top_p_[c] = top_p_count(c, row, rho, thread); });
    }
    if (form_.goal == 0 || sampled()) at_.rows.fill(exec_, args_.proxy, head_);
    int32_t* counts = out.counts[head_];
    *out.head_budget[head_] = of_all_keys(args_, set_counts(counts));
    *out.rho_used[head_] = rho;
    *out.alpha_used[head_] = *weights_.alpha;
    for (int64_t c = 0; c < groups_; ++c) {
      if (sizes_[c] == 0) counts[c] = top_p_[c] = 0;
    }
    dropped_ = out.dropped[head_];
    log_mass_ = out.log_mass[head_];
    for (int64_t c = 0; dropped_ != nullptr && c < groups_; ++c) {
      dropped_[c] = 0;
      log_mass_[c] = -std::numeric_limits<float>::infinity();
    }
    uint32_t* mask = out.mask[head_];
    const int64_t words = mask_words(args_.proxy.k.tokens);
    std::fill_n(mask, groups_ * words, 0u);
    const auto emit_row = [&](int64_t c, const float* row, int thread) {
      if (sampled()) {
        counts[c] = emit_by_sample(c, row, counts[c], mask + c * words, thread);
      } else {
        emit(c, row, counts[c], mask + c * words, thread);
      }
    };
    if (out.mean == nullptr) return each_row(args_.proxy, emit_row);
    const Mean mean(exec_, *out.mean, head_, at_.means);
    mean.clear();
    at_.rows.each_block(exec_, args_.proxy, head_, [&](int64_t first, int64_t n, float* rows, int thread) {
      rows_of(first, n, rows, thread, emit_row);
      mean.sum_up({rows, at_.rows.stride, first, n}, thread);
    });
  }

  // What the rule would keep at rho, from the histograms alone (linear inside a bin).
  Kept kept_at(double rho) {
    const auto floor = static_cast<int32_t>(std::max<int64_t>(1, ceil_share(floor_share_of_keys(), n_)));
    for (int64_t c = 0; c < groups_; ++c) {
      if (sizes_[c] == 0) continue;
      const Histogram& h = weights_.histograms[c];
      const double goal = rho * h.total();
      const int64_t b = h.crossing(goal);
      const double before = b == 0 ? 0.0 : h.mass[b - 1], inside = h.mass[b] - before;
      const double part = inside > 0 ? std::clamp((goal - before) / inside, 0.0, 1.0) : 1.0;
      const double count = (b == 0 ? 0 : h.count[b - 1]) + part * h.keys_in(b);
      weights_.base[c] = std::max(static_cast<int32_t>(std::ceil(count)), floor);
    }
    const int32_t budget = budget_of_base();
    Kept kept;
    for (int64_t c = 0; c < groups_; ++c) {
      if (sizes_[c] == 0) continue;
      kept.pairs += static_cast<double>(sizes_[c]) * std::max(weights_.base[c], budget);
      kept.queries += sizes_[c];
    }
    return kept;
  }

 private:
  bool sampled() const { return args_.stride > 1; }
  // Sampled key i among all.
  int64_t place(int64_t i) const { return args_.phase + i * args_.stride; }
  Proxy seen_by_rule() const {
    Proxy proxy = args_.proxy;
    if (!sampled()) return proxy;
    for (int64_t i = 0; i < n_; ++i) at_.sample[i] = args_.proxy.rows[place(i)];
    proxy.count = n_;
    proxy.rows = at_.sample;
    return proxy;
  }

  // Of the groups with queries.
  template <class Body>
  void rows_of(int64_t first, int64_t n, const float* rows, int thread, const Body& body) {
    for (int64_t i = 0; i < n; ++i) {
      if (sizes_[first + i] > 0) body(first + i, rows + i * at_.rows.stride, thread);
    }
  }
  template <class Body>
  void each_row(const Proxy& proxy, const Body& body) {
    at_.rows.each_block(exec_, proxy, head_, [&](int64_t first, int64_t n, const float* rows, int thread) {
      rows_of(first, n, rows, thread, body);
    });
  }

  void fill_histogram(const float* row, Histogram& h, bool with_mass) {
    float low = 0;
    exec_.kernels->min_max(row, n_, &low, &h.high);
    const float range = h.high - low;
    require(std::isfinite(range), Status::non_finite, "proxy scores overflow: they span {} to {}", low, h.high);
    // The last bin is narrower than the others rather than out of reach; a constant row is one bin.
    h.per_bin = range > 0 ? static_cast<float>(kBins) / range : 0.0f;
    if (!std::isfinite(h.per_bin)) h.per_bin = 0.0f;
    std::fill_n(h.count, kBins, 0);
    std::fill_n(h.mass, kBins, 0.0);
    int32_t bins[kBinChunk];
    float masses[kBinChunk];
    for (int64_t j = 0; j < n_; j += kBinChunk) {
      const int64_t n = std::min(kBinChunk, n_ - j);
      exec_.kernels->bin(row + j, n, h.high, h.per_bin, kBins - 1, bins, with_mass ? masses : nullptr);
      for (int64_t i = 0; i < n; ++i) ++h.count[bins[i]];
      if (!with_mass) continue;
      for (int64_t i = 0; i < n; ++i) h.mass[bins[i]] += static_cast<double>(masses[i]);
    }
    std::partial_sum(h.count, h.count + kBins, h.count);
    std::partial_sum(h.mass, h.mass + kBins, h.mass);
  }

  // Positions of the keys in bin `b`, ascending.
  std::span<int32_t> collect(const float* row, const Histogram& h, int64_t b, int thread) {
    int32_t* out = at_.candidates + thread * n_;
    const int64_t expected = h.keys_in(b);
    int64_t found = 0;
    int32_t bins[kBinChunk];
    for (int64_t j = 0; j < n_ && found < expected; j += kBinChunk) {
      const int64_t n = std::min(kBinChunk, n_ - j);
      exec_.kernels->bin(row + j, n, h.high, h.per_bin, kBins - 1, bins, nullptr);
      for (int64_t i = 0; i < n; ++i) {
        out[found] = static_cast<int32_t>(j + i);
        found += bins[i] == b ? 1 : 0;
        // `out` has room for n_ entries: the slot after the last match is overwritten or never read.
        if (found == expected) break;
      }
    }
    return {out, static_cast<size_t>(found)};
  }

  // t_c: the smallest t whose t largest probabilities sum to >= rho.
  int32_t top_p_count(int64_t c, const float* row, double rho, int thread) {
    if (rho >= 1.0) return static_cast<int32_t>(n_);
    const Histogram& h = weights_.histograms[c];
    const double goal = rho * h.total();
    const int64_t b = h.crossing(goal);
    double sum = b == 0 ? 0.0 : h.mass[b - 1];
    int64_t count = b == 0 ? 0 : h.count[b - 1];
    auto keys = collect(row, h, b, thread);
    std::sort(keys.begin(), keys.end(), [&](int32_t x, int32_t y) { return row[x] > row[y]; });
    for (const int32_t key : keys) {
      sum += std::exp(static_cast<double>(row[key]) - static_cast<double>(h.high));
      ++count;
      if (sum >= goal) break;
    }
    return static_cast<int32_t>(count);
  }

  // b_c and r_c from t_c, in integers; returns k_head.
  int64_t set_counts(int32_t* counts) {
    if (!form_.by_mass) {
      std::fill_n(counts, groups_, static_cast<int32_t>(std::max<int64_t>(1, ceil_share(args_.density, n_))));
      return 0;
    }
    const auto floor = static_cast<int32_t>(std::min(n_, ceil_share(floor_share_of_keys(), n_)));
    for (int64_t c = 0; c < groups_; ++c) weights_.base[c] = std::max(top_p_[c], floor);
    const int32_t budget = budget_of_base();
    for (int64_t c = 0; c < groups_; ++c) counts[c] = std::max(weights_.base[c], budget);
    return budget;
  }

  double floor_share_of_keys() const { return row(args_.rule).floor > 0 ? *weights_.alpha : 0.0; }
  int32_t budget_of_base() const {
    return form_.budget ? static_cast<int32_t>(head_budget(sizes_, weights_.base, groups_)) : 0;
  }

  // The `keep` keys with the highest scores, equal scores in ascending index.
  void emit(int64_t c, const float* row, int64_t keep, uint32_t* mask, int thread) {
    Histogram& h = weights_.histograms[c];
    if (!form_.by_mass) fill_histogram(row, h, dropped_ != nullptr);
    const int64_t b = std::lower_bound(h.count, h.count + kBins, keep) - h.count;
    const int64_t before = b == 0 ? 0 : h.count[b - 1];

    auto keys = collect(row, h, b, thread);
    const auto last = keys.begin() + (keep - before - 1);
    std::nth_element(keys.begin(), last, keys.end(),
                     [&](int32_t x, int32_t y) { return row[x] != row[y] ? row[x] > row[y] : x < y; });
    set_dropped(c, h, row, {keys.begin(), last + 1}, keep);
    const float threshold = row[*last];
    emit_above(row, n_, threshold, mask);
    for (auto key = keys.begin(); key <= last; ++key) {
      if (row[*key] == threshold) set_mask_bit(mask, args_.proxy.rows[*key]);
    }
  }

  // As WeighArgs says, where the rule keeps `keep` of the sample; returns how many of all.
  int32_t emit_by_sample(int64_t c, const float* row, int64_t keep, uint32_t* mask, int thread) {
    const int64_t all = args_.proxy.count, share = of_all_keys(args_, keep);
    float* scores = at_.scores + thread * all;
    for (int64_t i = 0; i < n_; ++i) scores[i] = row[place(i)];
    Histogram& h = weights_.histograms[c];
    if (!form_.by_mass) fill_histogram(scores, h, dropped_ != nullptr);
    const int64_t b = std::lower_bound(h.count, h.count + kBins, keep) - h.count;
    auto keys = collect(scores, h, b, thread);
    const auto last = keys.begin() + (keep - (b == 0 ? 0 : h.count[b - 1]) - 1);
    std::nth_element(keys.begin(), last, keys.end(), [&](int32_t x, int32_t y) { return scores[x] > scores[y]; });
    set_dropped(c, h, scores, {keys.begin(), last + 1}, keep);
    const float threshold = keep == n_ ? -std::numeric_limits<float>::infinity() : scores[*last];
    int64_t kept = emit_above(row, all, threshold, mask);
    const float below = std::nextafter(threshold, -std::numeric_limits<float>::infinity());
    for_above(row, kept < share ? all : 0, below, [&](int64_t j, uint32_t bits) {  // of those, what equals the threshold
      for (; bits != 0 && kept < share; bits &= bits - 1) {
        const int64_t key = j + std::countr_zero(bits);
        if (row[key] != threshold) continue;
        set_mask_bit(mask, args_.proxy.rows[key]);
        ++kept;
      }
    });
    return static_cast<int32_t>(kept);
  }

  // inside: the keys of the last bin that are kept.
  void set_dropped(int64_t c, const Histogram& h, const float* row, std::span<const int32_t> inside, int64_t keep) {
    if (dropped_ == nullptr) return;
    const int64_t before = keep - static_cast<int64_t>(inside.size());
    double kept = before == 0 ? 0 : h.mass[std::lower_bound(h.count, h.count + kBins, before) - h.count];
    for (const int32_t key : inside) kept += std::exp(static_cast<double>(row[key]) - static_cast<double>(h.high));
    dropped_[c] = keep == n_ ? 0.0f : static_cast<float>(std::max(0.0, 1 - kept / h.total()));
    const double weight = static_cast<double>(args_.proxy.count) / static_cast<double>(n_);  // of a sampled key
    log_mass_[c] = static_cast<float>(static_cast<double>(h.high) + std::log(h.total() * weight));
  }

  // Bits of the keys whose scores are above the threshold; returns how many.
  int64_t emit_above(const float* row, int64_t count, float threshold, uint32_t* mask) const {
    int64_t kept = 0;
    for_above(row, count, threshold, [&](int64_t j, uint32_t bits) {
      place_word(mask, args_.proxy.rows, count, j, bits);
      kept += std::popcount(bits);
    });
    return kept;
  }
  // body(j, which of keys [j, j + 32) are above the threshold).
  template <class Body>
  void for_above(const float* row, int64_t count, float threshold, const Body& body) const {
    uint32_t words[kBinChunk / 32];
    for (int64_t j = 0; j < count; j += kBinChunk) {
      const int64_t n = std::min(kBinChunk, count - j);
      exec_.kernels->above(row + j, n, threshold, words);
      for (int64_t w = 0; w < ceil_div(n, 32); ++w) body(j + 32 * w, words[w]);
    }
  }

  const Exec& exec_;
  const WeighArgs& args_;
  int64_t head_, groups_, n_;
  Form form_;
  const int32_t* sizes_;
  int32_t* top_p_;
  Weights weights_;
  Layout at_;
  float *dropped_ = nullptr, *log_mass_ = nullptr;
};

}  // namespace

int64_t weights_bytes(const Exec&, const Sizes& sizes) {
  const int64_t one =
      sizes.whole_codes ? code_weights_bytes(sizes.k_tokens, sizes.groups, sizes.codes) : Weights::bytes(sizes.groups);
  return sizes.heads * round_up(one, Arena::kAlignment);
}

int64_t weigh_scratch(const Exec& exec, const Sizes& sizes) {
  if (sizes.whole_codes) return weigh_codes_scratch(exec, sizes.groups, sizes.codes);
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.groups, sizes.k_tokens, sizes.dim, sizes.sampled, &bytes);
  return bytes;
}

void weigh(const Exec& exec, const WeighArgs& args) {
  for (int64_t h = 0; h < args.heads; ++h) {
    if (row(args.rule).whole_codes) {
      weigh_codes(exec, args, h);
    } else {
      KeySelector(exec, args, h).weigh();
    }
  }
}

int64_t solve_scratch(const Exec&, const Sizes& sizes) { return SampleKept::bytes(sizes.heads); }

void solve(const Exec& exec, const SolveArgs& args) {
  const WeighArgs& weighed = args.weighed;
  if (row(weighed.rule).whole_codes) {
    *args.rho = solve_codes(exec, args);
    return;
  }
  const SampleKept kept(args);
  *args.rho = solve_rho(form_of(weighed).goal, [&](double rho) {
    return kept.density(exec, [&](int64_t head) { return KeySelector(exec, weighed, head).kept_at(rho); });
  });
}

void keep(const Exec& exec, const KeepArgs& args) {
  for (int64_t h = 0; h < args.weighed.heads; ++h) {
    if (row(args.weighed.rule).whole_codes) {
      keep_codes(exec, args, h);
    } else {
      KeySelector(exec, args.weighed, h).keep(args);
    }
  }
}

}  // namespace cpu
}  // namespace scope
