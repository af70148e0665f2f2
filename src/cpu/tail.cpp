// tail on the CPU: sums over the keys that each group drops, in one more pass over the proxy rows; or which codes it drops.
#include "stages/tail.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/proxy_rows.h"

namespace scope::cpu {

namespace {

struct Layout {
  ProxyRows rows;
  float* block;    // [threads, kKeyBlock, padded dim]
  float* sum;      // [threads, kScoreRows, padded dim]
  int32_t* a_key;  // [codes] the token of one key of each code; -1: it has none
  double* centre;  // [dim] the mean of the keys that take part
  uint32_t* kept;  // [threads, words of the keys that take part]

  Layout(Arena arena, const Exec& exec, int64_t count, int64_t dim, int64_t codes, int64_t* bytes = nullptr)
      : rows(arena, exec, count, dim) {
    const int64_t threads = exec.pool->threads(), padded_dim = round_up(dim, kLanes);
    block = arena.take<float>(threads * kKeyBlock * padded_dim);
    sum = arena.take<float>(threads * kScoreRows * padded_dim);
    a_key = arena.take<int32_t>(codes);
    centre = arena.take<double>(dim);
    kept = arena.take<uint32_t>(threads * mask_words(count));
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// out [first + i] = sum over keys of weights[i, j] x[j] / sum[i], for rows [first, first + n) of one block.
void weighted_mean(const Exec& exec, const Layout& at, const Proxy& proxy, const RowsView& x, int64_t first, int64_t n,
                   const float* weights, const double* sum, float* out, int thread) {
  const int64_t dim = x.dim, padded = round_up(dim, kLanes);
  float* block = at.block + thread * kKeyBlock * padded;
  float* total = at.sum + thread * kScoreRows * padded;
  std::fill_n(total, n * padded, 0.0f);
  float ones[kScoreRows];
  std::fill_n(ones, kScoreRows, 1.0f);
  for (int64_t j = 0; j < proxy.count; j += kKeyBlock) {
    const int64_t width = std::min(kKeyBlock, proxy.count - j);
    exec.kernels->load_rows(x, proxy.rows + j, width, block, padded);
    exec.kernels->accumulate(weights + j, at.rows.stride, n, block, padded, width, padded, ones, total, padded);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (sum[i] == 0) continue;
    for (int64_t k = 0; k < dim; ++k) {
      out[(first + i) * dim + k] = static_cast<float>(static_cast<double>(total[i * padded + k]) / sum[i]);
    }
  }
}

// One head's virtual keys, one per group.
class FirstOrder {
 public:
  FirstOrder(const Exec& exec, const TailArgs& args, int64_t head, const Layout& at)
      : exec_(exec),
        args_(args),
        proxy_(args.proxy),
        head_(head),
        n_(args.proxy.count),
        sizes_(args.sizes[head]),
        kept_(args.kept[head]),
        k_(args.k[head]),
        value_(args.value[head]),
        bias_(args.bias[head]),
        at_(at) {}

  void run() {
    const int64_t groups = proxy_.groups, words = mask_words(groups);
    std::fill_n(k_, groups * proxy_.k.dim, 0.0f);
    std::fill_n(value_, groups * proxy_.k.dim, 0.0f);
    std::fill_n(bias_, groups, -std::numeric_limits<float>::infinity());
    at_.rows.each_block(exec_, proxy_, head_,
                        [&](int64_t first, int64_t n, float* rows, int thread) { sum_up(first, n, rows, thread); });
    // A group sees its own, unless it has no queries or dropped nothing.
    uint32_t* mask = args_.mask[head_];
    std::fill_n(mask, args_.rows * words, 0u);
    for (int64_t c = 0; c < groups; ++c) {
      if (sizes_[c] > 0 && std::isfinite(bias_[c])) set_mask_bit(mask + c * words, c);
    }
  }

 private:
  // mu_c, nu_c and L_c - q_c.mu_c over the keys that group c drops.
  void sum_up(int64_t first, int64_t n, float* rows, int thread) {
    const int64_t dim = proxy_.k.dim, words = mask_words(proxy_.k.tokens);
    const float* centroids = proxy_.centroids[head_];
    double log_mass[kScoreRows] = {}, sum[kScoreRows] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t* kept = kept_ + (first + i) * words;
      float* row = rows + i * at_.rows.stride;
      float high = -std::numeric_limits<float>::infinity();
      const auto dropped = [&](int64_t j) { return sizes_[first + i] > 0 && !mask_bit(kept, proxy_.rows[j]); };
      for (int64_t j = 0; j < n_; ++j) {
        if (dropped(j)) high = std::max(high, row[j]);
      }
      for (int64_t j = 0; j < n_; ++j) {
        row[j] = dropped(j) ? std::exp(row[j] - high) : 0.0f;
        sum[i] += static_cast<double>(row[j]);
      }
      log_mass[i] = static_cast<double>(high) + std::log(sum[i]);
    }
    weighted_mean(exec_, at_, proxy_, proxy_.k[head_], first, n, rows, sum, k_, thread);
    weighted_mean(exec_, at_, proxy_, args_.v[head_], first, n, rows, sum, value_, thread);
    for (int64_t i = 0; i < n; ++i) {
      if (sum[i] == 0) continue;
      double centre = 0;
      for (int64_t k = 0; k < dim; ++k) {
        centre += static_cast<double>(centroids[(first + i) * dim + k]) * static_cast<double>(k_[(first + i) * dim + k]);
      }
      bias_[first + i] = static_cast<float>(log_mass[i] - static_cast<double>(proxy_.scale) * centre);
    }
  }

  const Exec& exec_;
  const TailArgs& args_;
  const Proxy& proxy_;
  int64_t head_, n_;
  const int32_t* sizes_;
  const uint32_t* kept_;
  float *k_, *value_, *bias_;
  const Layout& at_;
};

// One head's mean dropped values, and how much of each its group mixes in.
class Mean {
 public:
  Mean(const Exec& exec, const TailArgs& args, int64_t head, const Layout& at)
      : exec_(exec), args_(args), proxy_(args.proxy), head_(head), at_(at) {}

  void run() {
    const int64_t dim = proxy_.k.dim;
    std::fill_n(args_.value[head_], args_.rows * dim, 0.0f);
    std::fill_n(args_.share[head_], args_.rows, 0.0f);
    std::fill_n(at_.centre, dim, 0.0);
    if (args_.centred && args_.keep != nullptr) set_centre();
    at_.rows.each_block(exec_, proxy_, head_,
                        [&](int64_t first, int64_t n, float* rows, int thread) { sum_up(first, n, rows, thread); });
  }

 private:
  // Calls body(row in f32) for the keys of at most kKeyBlock tokens.
  template <class Body>
  void each_key(const int32_t* tokens, int64_t count, int thread, const Body& body) const {
    const int64_t padded = round_up(proxy_.k.dim, kLanes);
    float* block = at_.block + thread * kKeyBlock * padded;
    exec_.kernels->load_rows(proxy_.k[head_], tokens, count, block, padded);
    for (int64_t i = 0; i < count; ++i) body(block + i * padded);
  }

  void set_centre() {
    for (int64_t j = 0; j < proxy_.count; j += kKeyBlock) {
      each_key(proxy_.rows + j, std::min(kKeyBlock, proxy_.count - j), 0, [&](const float* key) {
        for (int64_t c = 0; c < proxy_.k.dim; ++c) at_.centre[c] += static_cast<double>(key[c]);
      });
    }
    for (int64_t c = 0; c < proxy_.k.dim; ++c) at_.centre[c] /= static_cast<double>(proxy_.count);
  }

  // The mass of the text under a group's centroid, relative to `high`, on the scale of the proxy's logits.
  double text_mass(int64_t group, double high, int thread) const {
    const float* centroid = proxy_.centroids[head_] + group * proxy_.k.dim;
    double mass = 0;
    const auto add = [&](const float* key) {
      double dot = 0;
      for (int64_t c = 0; c < proxy_.k.dim; ++c) {
        dot += static_cast<double>(centroid[c]) * (static_cast<double>(key[c]) - at_.centre[c]);
      }
      mass += std::exp(static_cast<double>(proxy_.scale) * dot - high);
    };
    int32_t tokens[kKeyBlock];
    int64_t n = 0;
    for (int64_t t = 0; args_.keep != nullptr && t < proxy_.k.tokens; ++t) {
      if (mask_bit(args_.keep, t)) tokens[n++] = static_cast<int32_t>(t);
      if (n < kKeyBlock) continue;
      each_key(tokens, n, thread, add);
      n = 0;
    }
    if (n > 0) each_key(tokens, n, thread, add);
    return mass;
  }

  // A group's mask over the keys that take part, in their order.
  const uint32_t* kept_of(int64_t group, int thread) const {
    const int64_t n = proxy_.count;
    const uint32_t* mask = args_.kept[head_] + group * mask_words(proxy_.k.tokens);
    if (n == 0 || proxy_.rows[n - 1] == n - 1) return mask;  // every token up to the last
    uint32_t* kept = at_.kept + thread * mask_words(n);
    std::fill_n(kept, mask_words(n), 0u);
    for (int64_t j = 0; j < n; ++j) {
      if (mask_bit(mask, proxy_.rows[j])) set_mask_bit(kept, j);
    }
    return kept;
  }

  void sum_up(int64_t first, int64_t n, float* rows, int thread) {
    const int32_t* sizes = args_.sizes[head_];
    double dropped[kScoreRows] = {};
    for (int64_t i = 0; i < n; ++i) {
      const int64_t group = first + i;
      float* row = rows + i * at_.rows.stride;
      if (sizes[group] == 0) {
        std::fill_n(row, proxy_.count, 0.0f);
        continue;
      }
      float low = 0, high = 0;
      exec_.kernels->min_max(row, proxy_.count, &low, &high);
      const Masses masses = exec_.kernels->weigh_dropped(row, proxy_.count, high, kept_of(group, thread));
      const double mass = masses.all + text_mass(group, static_cast<double>(high), thread);
      dropped[i] = masses.dropped;
      args_.share[head_][group] = static_cast<float>(std::min(args_.weight * dropped[i] / mass, 1 - 0x1p-10));
    }
    weighted_mean(exec_, at_, proxy_, args_.v[head_], first, n, rows, dropped, args_.value[head_], thread);
  }

  const Exec& exec_;
  const TailArgs& args_;
  const Proxy& proxy_;
  int64_t head_;
  const Layout& at_;
};

// A group sees the codes whose keys it drops. Codes are kept whole, so one key tells of all.
void mask_dropped_codes(const Exec& exec, const TailArgs& args, int64_t head, const Layout& at) {
  const Proxy& proxy = args.proxy;
  const int32_t* labels = proxy.labels[head];
  const int32_t* sizes = args.sizes[head];
  const int64_t words = mask_words(proxy.codes);
  std::fill_n(at.a_key, proxy.codes, -1);
  for (int64_t j = 0; j < proxy.count; ++j) at.a_key[labels[j]] = proxy.rows[j];
  uint32_t* mask = args.mask[head];
  std::fill_n(mask, args.rows * words, 0u);
  exec.pool->run(proxy.groups, [&](int64_t c, int) {
    const uint32_t* kept = args.kept[head] + c * mask_words(proxy.k.tokens);
    for (int64_t r = 0; r < proxy.codes && sizes[c] > 0; ++r) {
      if (at.a_key[r] >= 0 && !mask_bit(kept, at.a_key[r])) set_mask_bit(mask + c * words, r);
    }
  });
}

}  // namespace

int64_t tail_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.k_tokens, sizes.dim, sizes.codes, &bytes);
  return bytes;
}

void tail(const Exec& exec, const TailArgs& args) {
  if (args.tail == Tail::none) return;
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.proxy.count, args.proxy.k.dim, args.proxy.codes);
  for (int64_t h = 0; h < args.heads; ++h) {
    switch (args.tail) {
      case Tail::none:
        break;
      case Tail::first_order:
        FirstOrder(exec, args, h, at).run();
        break;
      case Tail::centroids:
        mask_dropped_codes(exec, args, h, at);
        break;
      case Tail::mean:
        Mean(exec, args, h, at).run();
        break;
    }
  }
}

}  // namespace scope::cpu
