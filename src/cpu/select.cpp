// select on the CPU, key by key: histograms instead of sorts, in passes that recompute the proxy rows and never hold their
// matrix. The rules that keep whole codes are in select_codes.cpp.
#include "stages/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "core/numeric.h"
#include "cpu/kernels.h"
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
constexpr int64_t kRowBytes = 32 << 20;  // proxy rows that all threads together hold at a time
constexpr int64_t kBinChunk = 512;       // keys whose bins and masses are computed at a time

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

struct Layout {
  int64_t row_stride, height;  // height: rows that a thread holds, at most kScoreRows
  Histogram* histograms;       // [groups]
  int32_t* base;               // [groups] b_c
  float* rows;                 // [threads, height, row_stride]
  float* buffer;               // [threads, score_rows_buffer]
  int32_t* candidates;         // [threads, tokens] positions in one bin
  float* tail_block;           // [threads, kKeyBlock, padded dim]
  float* tail_sum;             // [threads, kScoreRows, padded dim]

  Layout(Arena arena, const Exec& exec, int64_t count, int64_t dim, int64_t groups, int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    const int64_t padded_dim = round_up(dim, kLanes);
    row_stride = round_up(count, kLanes);
    height = std::clamp<int64_t>(kRowBytes / (threads * std::max<int64_t>(row_stride, 1) * 4), 1, kScoreRows);
    histograms = arena.take<Histogram>(groups);
    base = arena.take<int32_t>(groups);
    rows = arena.take<float>(threads * height * row_stride);
    buffer = arena.take<float>(threads * score_rows_buffer(exec, dim));
    candidates = arena.take<int32_t>(threads * count);
    tail_block = arena.take<float>(threads * kKeyBlock * padded_dim);
    tail_sum = arena.take<float>(threads * kScoreRows * padded_dim);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

class Selector {
 public:
  Selector(const Exec& exec, const SelectArgs& args)
      : exec_(exec),
        args_(args),
        n_(args.proxy.count),
        goal_(args.rule == Rule::target ? args.density : args.target),
        at_(Arena(args.scratch.data, args.scratch.bytes), exec, args.proxy.count, args.proxy.k.dim, args.proxy.groups) {}

  void run() {
    const int64_t groups = args_.proxy.groups;
    std::fill_n(args_.top_p, groups, 0);
    *args_.head_budget = 0;
    *args_.rho_used = args_.rho;
    *args_.alpha_used = args_.alpha;
    if (args_.rule == Rule::fixed) {
      std::fill_n(args_.counts, groups, static_cast<int32_t>(std::max<int64_t>(1, ceil_share(args_.density, n_))));
    } else {
      const bool known = goal_ == 0;
      if (!known) *args_.alpha_used = std::min(args_.alpha, goal_ / 2);
      std::fill_n(at_.base, groups, 0);
      each_row([&](int64_t c, const float* row, int thread) {
        fill_histogram(row, at_.histograms[c], true);
        if (known) args_.top_p[c] = top_p_count(c, row, args_.rho, thread);
      });
      if (!known) {
        *args_.rho_used = solve_rho();
        each_row(
            [&](int64_t c, const float* row, int thread) { args_.top_p[c] = top_p_count(c, row, *args_.rho_used, thread); });
      }
      set_counts();
    }
    for (int64_t c = 0; c < groups; ++c) {
      if (args_.sizes[c] == 0) args_.counts[c] = args_.top_p[c] = 0;
    }
    const int64_t words = mask_words(args_.proxy.k.tokens);
    std::fill_n(args_.mask, groups * words, 0u);
    if (args_.tail != nullptr) clear_tail();
    // Blocks of rows, so that the tail's sums can share the keys they load.
    blocks([&](int64_t first, int64_t n, float* rows, int thread) {
      for (int64_t i = 0; i < n; ++i) {
        if (args_.sizes[first + i] > 0) emit(first + i, rows + i * at_.row_stride, thread);
      }
      if (args_.tail != nullptr) tail(first, n, rows, thread);
    });
  }

 private:
  template <class Body>
  void blocks(const Body& body) {
    // Small blocks when there are few groups, so that every thread has work.
    const int64_t groups = args_.proxy.groups;
    const int64_t height = std::clamp<int64_t>(groups / (4 * exec_.pool->threads()), 1, at_.height);
    exec_.pool->run(ceil_div(groups, height), [&](int64_t chunk, int thread) {
      const int64_t first = chunk * height, n = std::min(height, groups - first);
      float* rows = at_.rows + thread * at_.height * at_.row_stride;
      score_rows(exec_, args_.proxy, first, n, rows, at_.row_stride,
                 at_.buffer + thread * score_rows_buffer(exec_, args_.proxy.k.dim));
      body(first, n, rows, thread);
    });
  }

  template <class Body>
  void each_row(const Body& body) {
    blocks([&](int64_t first, int64_t n, float* rows, int thread) {
      for (int64_t i = 0; i < n; ++i) {
        if (args_.sizes[first + i] > 0) body(first + i, rows + i * at_.row_stride, thread);
      }
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
    const Histogram& h = at_.histograms[c];
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

  // b_c, k_head and r_c from t_c, in integers.
  void set_counts() {
    const int64_t groups = args_.proxy.groups;
    if (args_.rule == Rule::top_p) {
      std::copy_n(args_.top_p, groups, args_.counts);
      return;
    }
    const auto floor = static_cast<int32_t>(std::min(n_, ceil_share(*args_.alpha_used, n_)));
    for (int64_t c = 0; c < groups; ++c) at_.base[c] = std::max(args_.top_p[c], floor);
    const auto budget = args_.rule == Rule::hybrid ? 0 : static_cast<int32_t>(head_budget(args_.sizes, at_.base, groups));
    *args_.head_budget = budget;
    for (int64_t c = 0; c < groups; ++c) args_.counts[c] = std::max(at_.base[c], budget);
  }

  // Share of keys that the rule would keep at rho, from the histograms alone (linear inside a bin).
  double density_at(double rho) {
    const int64_t groups = args_.proxy.groups;
    const double alpha = args_.rule == Rule::top_p ? 0.0 : *args_.alpha_used;
    const auto floor = static_cast<int32_t>(std::max<int64_t>(1, ceil_share(alpha, n_)));
    for (int64_t c = 0; c < groups; ++c) {
      if (args_.sizes[c] == 0) continue;
      const Histogram& h = at_.histograms[c];
      const double goal = rho * h.total();
      const int64_t b = h.crossing(goal);
      const double before = b == 0 ? 0.0 : h.mass[b - 1], inside = h.mass[b] - before;
      const double part = inside > 0 ? std::clamp((goal - before) / inside, 0.0, 1.0) : 1.0;
      const double count = (b == 0 ? 0 : h.count[b - 1]) + part * h.keys_in(b);
      at_.base[c] = std::max(static_cast<int32_t>(std::ceil(count)), floor);
    }
    const auto budget = args_.rule == Rule::target ? static_cast<int32_t>(head_budget(args_.sizes, at_.base, groups)) : 0;
    double kept = 0, queries = 0;
    for (int64_t c = 0; c < groups; ++c) {
      if (args_.sizes[c] == 0) continue;
      kept += static_cast<double>(args_.sizes[c]) * std::max(at_.base[c], budget);
      queries += args_.sizes[c];
    }
    return kept / queries / static_cast<double>(n_);
  }

  double solve_rho() {
    if (goal_ >= 1.0) return 1.0;
    double low = 0, high = 1;
    for (int i = 0; i < 40; ++i) {
      const double middle = 0.5 * (low + high);
      (density_at(middle) < goal_ ? low : high) = middle;
    }
    return std::clamp(0.5 * (low + high), 1e-9, 1.0 - 1e-12);
  }

  // The counts[c] keys with the highest scores, equal scores in ascending index.
  void emit(int64_t c, float* row, int thread) {
    const int64_t keep = args_.counts[c];
    uint32_t* mask = args_.mask + c * mask_words(args_.proxy.k.tokens);
    Histogram& h = at_.histograms[c];
    if (args_.rule == Rule::fixed) fill_histogram(row, h, false);
    const int64_t b = std::lower_bound(h.count, h.count + kBins, keep) - h.count;
    const int64_t before = b == 0 ? 0 : h.count[b - 1];

    auto keys = collect(row, h, b, thread);
    const auto last = keys.begin() + (keep - before - 1);
    std::nth_element(keys.begin(), last, keys.end(),
                     [&](int32_t x, int32_t y) { return row[x] != row[y] ? row[x] > row[y] : x < y; });
    const float threshold = row[*last];
    // `candidates` is still in use, so the bits go straight to their token positions.
    uint32_t words[kBinChunk / 32];
    for (int64_t j = 0; j < n_; j += kBinChunk) {
      const int64_t n = std::min(kBinChunk, n_ - j);
      exec_.kernels->above(row + j, n, threshold, words);
      for (int64_t w = 0; w < ceil_div(n, 32); ++w) place_word(mask, args_.proxy.rows, n_, j + 32 * w, words[w]);
    }
    for (auto key = keys.begin(); key <= last; ++key) {
      if (row[*key] == threshold) set_mask_bit(mask, args_.proxy.rows[*key]);
    }
  }

  void clear_tail() {
    const int64_t dim = args_.proxy.k.dim, groups = args_.proxy.groups;
    std::fill_n(args_.tail->k, groups * dim, 0.0f);
    std::fill_n(args_.tail->value, groups * dim, 0.0f);
    std::fill_n(args_.tail->bias, groups, -std::numeric_limits<float>::infinity());
  }

  // mu_c, nu_c and L_c - q_c.mu_c over the keys that group c drops.
  void tail(int64_t first, int64_t n, float* rows, int thread) {
    const int64_t dim = args_.proxy.k.dim, stride = at_.row_stride;
    const int64_t words = mask_words(args_.proxy.k.tokens);
    double log_mass[kScoreRows] = {}, sum[kScoreRows] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t* mask = args_.mask + (first + i) * words;
      float* row = rows + i * stride;
      float high = -std::numeric_limits<float>::infinity();
      const auto dropped = [&](int64_t j) { return args_.sizes[first + i] > 0 && !mask_bit(mask, args_.proxy.rows[j]); };
      for (int64_t j = 0; j < n_; ++j) {
        if (dropped(j)) high = std::max(high, row[j]);
      }
      sum[i] = 0;
      for (int64_t j = 0; j < n_; ++j) {
        row[j] = dropped(j) ? std::exp(row[j] - high) : 0.0f;
        sum[i] += static_cast<double>(row[j]);
      }
      log_mass[i] = static_cast<double>(high) + std::log(sum[i]);
    }
    weighted_sum(args_.proxy.k, first, n, rows, sum, args_.tail->k, thread);
    weighted_sum(args_.tail->v, first, n, rows, sum, args_.tail->value, thread);
    for (int64_t i = 0; i < n; ++i) {
      if (sum[i] == 0) continue;
      double centre = 0;
      for (int64_t k = 0; k < dim; ++k) {
        centre += static_cast<double>(args_.proxy.centroids[(first + i) * dim + k]) *
                  static_cast<double>(args_.tail->k[(first + i) * dim + k]);
      }
      args_.tail->bias[first + i] = static_cast<float>(log_mass[i] - static_cast<double>(args_.proxy.scale) * centre);
    }
  }

  // out [first + i] = sum over keys of rows[i, j] x[j] / sum[i].
  void weighted_sum(const RowsView& x, int64_t first, int64_t n, const float* rows, const double* sum, float* out,
                    int thread) {
    const int64_t dim = x.dim, padded = round_up(dim, kLanes);
    float* block = at_.tail_block + thread * kKeyBlock * padded;
    float* total = at_.tail_sum + thread * kScoreRows * padded;
    std::fill_n(total, n * padded, 0.0f);
    float ones[kScoreRows];
    std::fill_n(ones, kScoreRows, 1.0f);
    for (int64_t j = 0; j < n_; j += kKeyBlock) {
      const int64_t width = std::min(kKeyBlock, n_ - j);
      exec_.kernels->load_rows(x, args_.proxy.rows + j, width, block, padded);
      exec_.kernels->accumulate(rows + j, at_.row_stride, n, block, padded, width, padded, ones, total, padded);
    }
    for (int64_t i = 0; i < n; ++i) {
      if (sum[i] == 0) continue;
      for (int64_t k = 0; k < dim; ++k) {
        out[(first + i) * dim + k] = static_cast<float>(static_cast<double>(total[i * padded + k]) / sum[i]);
      }
    }
  }

  const Exec& exec_;
  const SelectArgs& args_;
  int64_t n_;
  double goal_;  // density to solve rho for; 0: rho is given
  Layout at_;
};

}  // namespace

int64_t select_scratch(const Exec& exec, int64_t tokens, int64_t dim, int64_t groups, int64_t codes) {
  if (codes > 0) return select_codes_scratch(exec, tokens, groups, codes);
  int64_t bytes = 0;
  Layout(Arena(), exec, tokens, dim, groups, &bytes);
  return bytes;
}

void select(const Exec& exec, const SelectArgs& args) {
  if (keeps_codes(args.rule)) {
    select_codes(exec, args);
  } else {
    Selector(exec, args).run();
  }
}

}  // namespace cpu
}  // namespace scope
