// Means over the keys that groups drop, one for each part of a group: sampled logits, their weights, and values by these.
#include "cpu/means.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"

namespace scope::cpu {

namespace {

class PartMeans {
 public:
  PartMeans(const Exec& exec, const TailArgs& args, int64_t head, const PartMeansBuffers& at)
      : exec_(exec),
        args_(args),
        parts_(args.parts),
        head_(head),
        rows_(args.proxy.groups * args.parts.each),
        sizes_(args.parts.sizes[head]),
        share_(args.share[head]),
        value_(args.value[head]),
        at_(at) {
    // What the logits of parts are made of: always the keys themselves.
    proxy_ = {.kind = ProxyKind::exact,
              .groups = rows_,
              .count = 0,
              .scale = args.proxy.scale,
              .centroids = parts_.centroids,
              .k = args.proxy.k,
              .rows = at.sampled};
    for (int64_t j = parts_.phase % parts_.stride; j < args.proxy.count; j += parts_.stride) {
      at.sampled[proxy_.count++] = args.proxy.rows[j];
    }
  }

  void run() const {
    std::fill_n(value_, rows_ * args_.v.dim, 0.0f);
    at_.rows.fill(exec_, proxy_, head_);
    at_.rows.each_block(exec_, proxy_, head_, [&](int64_t first, int64_t n, float* rows, int thread) {
      sum_up({rows, at_.rows.stride, first, n}, thread);
    });
  }

 private:
  // The rows become weights, and these means.
  void sum_up(const ProxyBlock& weights, int thread) const {
    uint32_t* kept = at_.means.kept + thread * mask_words(proxy_.count);
    int64_t kept_of = -1, sampled = 0;  // the group whose mask this is, and how many of the sample it drops
    int64_t whole[ProxyRows::kMost], wholes = 0;
    for (int64_t i = 0; i < weights.n; ++i) {
      const int64_t part = weights.first + i, group = part / parts_.each;
      float* row = weights.rows + i * weights.stride;
      if (sizes_[part] == 0 || share_[group] == 0) {
        std::fill_n(row, proxy_.count, 0.0f);
        continue;
      }
      if (group != kept_of) {
        sampled = proxy_.count - gather(group, kept);
        kept_of = group;
      }
      if (sampled == 0) {
        std::fill_n(row, proxy_.count, 0.0f);
        whole[wholes++] = part;
        continue;
      }
      float low = 0, high = 0;
      exec_.kernels->min_max(row, proxy_.count, &low, &high);
      exec_.kernels->weigh_dropped(row, proxy_.count, high, kept);
    }
    weighted_mean(exec_, attend_kernels(exec_, args_.v.dtype), at_.means, proxy_, args_.v[head_], weights, value_, thread);
    for (int64_t i = 0; i < wholes; ++i) sum_up_all(whole[i], thread);
  }

  // The sampled keys that a group keeps, as bits; returns how many.
  int64_t gather(int64_t group, uint32_t* kept) const {
    const uint32_t* mask = args_.kept[head_] + group * mask_words(proxy_.k.tokens);
    std::fill_n(kept, mask_words(proxy_.count), 0u);
    int64_t n = 0;
    for (int64_t j = 0; j < proxy_.count; ++j) {
      if (!mask_bit(mask, proxy_.rows[j])) continue;
      set_mask_bit(kept, j);
      ++n;
    }
    return n;
  }

  // From all the keys that a group drops, where the sample has none of them.
  void sum_up_all(int64_t part, int thread) const {
    const int64_t dim = proxy_.k.dim, group = part / parts_.each;
    const float* centroid = parts_.centroids[head_] + part * dim;
    const uint32_t* mask = args_.kept[head_] + group * mask_words(proxy_.k.tokens);
    float* row = at_.row + thread * round_up(dim, kLanes);
    double* sum = at_.sum + thread * dim;
    const auto each_dropped = [&](const auto& body) {
      for (int64_t j = 0; j < args_.proxy.count; ++j) {
        const int32_t token = args_.proxy.rows[j];
        if (mask_bit(mask, token)) continue;
        exec_.kernels->load_rows(proxy_.k[head_], &token, 1, row, round_up(dim, kLanes));
        double logit = 0;
        for (int64_t c = 0; c < dim; ++c) logit += static_cast<double>(centroid[c]) * static_cast<double>(row[c]);
        body(token, logit * static_cast<double>(proxy_.scale));
      }
    };
    double high = -std::numeric_limits<double>::infinity(), mass = 0;
    each_dropped([&](int32_t, double logit) { high = std::max(high, logit); });
    std::fill_n(sum, dim, 0.0);
    each_dropped([&](int32_t token, double logit) {
      const double weight = std::exp(logit - high);
      mass += weight;
      exec_.kernels->load_rows(args_.v[head_], &token, 1, row, round_up(dim, kLanes));
      for (int64_t c = 0; c < dim; ++c) sum[c] += weight * static_cast<double>(row[c]);
    });
    for (int64_t c = 0; c < dim; ++c) value_[part * dim + c] = static_cast<float>(sum[c] / mass);
  }

  const Exec& exec_;
  const TailArgs& args_;
  const Parts& parts_;
  int64_t head_, rows_;
  const int32_t* sizes_;
  const float* share_;
  float* value_;
  const PartMeansBuffers& at_;
  Proxy proxy_;
};

}  // namespace

PartMeansBuffers::PartMeansBuffers(Arena& arena, const Exec& exec, int64_t rows_, int64_t keys, int64_t dim)
    : rows(arena, exec, rows_, keys, dim), means(arena, exec, keys, dim) {
  const int64_t threads = exec.pool->threads();
  sampled = arena.take<int32_t>(keys);
  row = arena.take<float>(threads * round_up(dim, kLanes));
  sum = arena.take<double>(threads * dim);
}

void part_means(const Exec& exec, const TailArgs& args, int64_t head, const PartMeansBuffers& at) {
  PartMeans(exec, args, head, at).run();
}

}  // namespace scope::cpu
