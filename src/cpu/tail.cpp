// tail on the CPU: sums over the keys that each group drops, in one more pass over the proxy rows; or which codes it drops.
#include "stages/tail.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/mean.h"
#include "cpu/means.h"
#include "cpu/proxy_rows.h"

namespace scope::cpu {

namespace {

struct Layout {
  ProxyRows rows;
  MeanBuffers means;
  int32_t* a_key;  // [codes] the token of one key of each code; -1: it has none

  Layout(Arena arena, const Exec& exec, int64_t groups, int64_t count, int64_t dim, int64_t codes, int64_t* bytes = nullptr)
      : rows(arena, exec, groups, count, dim), means(arena, exec, count, dim) {
    a_key = arena.take<int32_t>(codes);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

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
    at_.rows.fill(exec_, proxy_, head_);
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
    double log_mass[ProxyRows::kMost] = {}, sum[ProxyRows::kMost] = {};
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
    const AttendKernels& f32 = *exec_.attend_kernels;
    const ProxyBlock weights{rows, at_.rows.stride, first, n};
    weighted_mean(exec_, f32, at_.means, proxy_, proxy_.k[head_], weights, k_, thread);
    weighted_mean(exec_, f32, at_.means, proxy_, args_.v[head_], weights, value_, thread);
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
  Layout(Arena(), exec, sizes.groups, sizes.k_tokens, sizes.dim, sizes.codes, &bytes);
  if (sizes.parts == 0) return bytes;
  Arena arena;
  PartMeansBuffers(arena, exec, sizes.groups * sizes.parts, sizes.k_tokens, sizes.dim);
  return std::max(bytes, arena.used());
}

void tail(const Exec& exec, const TailArgs& args) {
  if (args.tail == Tail::none) return;
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.proxy.groups, args.proxy.count, args.proxy.k.dim,
                  args.proxy.codes);
  const auto group_means = [&](int64_t h) {
    const Mean mean(exec, args, h, at.means);
    mean.clear();
    at.rows.fill(exec, args.proxy, h);
    at.rows.each_block(exec, args.proxy, h, [&](int64_t first, int64_t n, float* rows, int thread) {
      mean.sum_up({rows, at.rows.stride, first, n}, thread);
    });
  };
  // From what keep found.
  const auto group_shares = [&](int64_t h) {
    const Mean mean(exec, args, h, at.means);
    float* share = args.share[h];
    const float* log_mass = args.parts.log_mass[h];
    exec.pool->run(args.rows, [&](int64_t c, int thread) {
      share[c] = c < args.proxy.groups
                     ? mean.share_of(c, static_cast<double>(share[c]), static_cast<double>(log_mass[c]), thread)
                     : 0;
    });
  };
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
        group_means(h);
        break;
      case Tail::means: {
        args.parts.log_mass ? group_shares(h) : group_means(h);
        Arena arena(args.scratch.data, args.scratch.bytes);
        part_means(exec, args, h,
                   PartMeansBuffers(arena, exec, args.proxy.groups * args.parts.each, args.proxy.count, args.proxy.k.dim));
        break;
      }
    }
  }
}

}  // namespace scope::cpu
