// Means over the keys that groups drop: weights by masks, and products with the rows that they weigh.
#include "cpu/mean.h"

#include <algorithm>
#include <cmath>

#include "core/numeric.h"
#include "cpu/proxy_rows.h"

namespace scope::cpu {

MeanBuffers::MeanBuffers(Arena& arena, const Exec& exec, int64_t count, int64_t dim) {
  const int64_t threads = exec.pool->threads(), padded = round_up(dim, kLanes);
  block = arena.take<float>(threads * kKeyBlock * padded);
  buffer = arena.take<float>(threads * 2 * padded);
  sum = arena.take<float>(threads * ProxyRows::kMost * padded);
  centre = arena.take<double>(dim);
  kept = arena.take<uint32_t>(threads * mask_words(count));
}

void weighted_mean(const Exec& exec, const AttendKernels& kernels, const MeanBuffers& at, const Proxy& proxy,
                   const RowsView& x, const ProxyBlock& weights, float* out, int thread) {
  const int64_t dim = x.dim, padded = round_up(dim, kLanes), stride = weights.stride;
  float* block = at.block + thread * kKeyBlock * padded;
  float* total = at.sum + thread * ProxyRows::kMost * padded;
  std::fill_n(total, weights.n * padded, 0.0f);
  double sum[ProxyRows::kMost] = {};
  float ones[kStrip];
  std::fill_n(ones, kStrip, 1.0f);
  for (int64_t j = 0; j < proxy.count; j += kKeyBlock) {
    const int64_t width = std::min(kKeyBlock, proxy.count - j);
    kernels.pack_v(*exec.kernels, x, proxy.rows + j, width, block, at.buffer + thread * 2 * padded, padded);
    for (int64_t i = 0; i < weights.n; i += kStrip) {
      const int64_t height = std::min(kStrip, weights.n - i);
      float* strip = weights.rows + i * stride + j;
      kernels.pack_p(strip, stride, height, width, sum + i);
      kernels.accumulate(strip, stride, height, block, padded, width, padded, ones, total + i * padded, padded);
    }
  }
  for (int64_t i = 0; i < weights.n; ++i) {
    if (sum[i] == 0) continue;
    float* row = out + (weights.first + i) * dim;
    for (int64_t c = 0; c < dim; ++c) row[c] = static_cast<float>(static_cast<double>(total[i * padded + c]) / sum[i]);
  }
}

Mean::Mean(const Exec& exec, const TailArgs& args, int64_t head, const MeanBuffers& at)
    : exec_(exec), args_(args), proxy_(args.proxy), head_(head), at_(at) {
  std::fill_n(at_.centre, proxy_.k.dim, 0.0);
  if (args_.centred && args_.keep != nullptr) set_centre();
}

void Mean::clear() const {
  const int64_t rows = args_.tail == Tail::means ? proxy_.groups : args_.rows;  // means have no row for other queries
  std::fill_n(args_.value[head_], rows * proxy_.k.dim, 0.0f);
  std::fill_n(args_.share[head_], args_.rows, 0.0f);
}

// Calls body(row in f32) for the keys of at most kKeyBlock tokens.
template <class Body>
void Mean::each_key(const int32_t* tokens, int64_t count, int thread, const Body& body) const {
  const int64_t padded = round_up(proxy_.k.dim, kLanes);
  float* block = at_.block + thread * kKeyBlock * padded;
  exec_.kernels->load_rows(proxy_.k[head_], tokens, count, block, padded);
  for (int64_t i = 0; i < count; ++i) body(block + i * padded);
}

void Mean::set_centre() const {
  for (int64_t j = 0; j < proxy_.count; j += kKeyBlock) {
    each_key(proxy_.rows + j, std::min(kKeyBlock, proxy_.count - j), 0, [&](const float* key) {
      for (int64_t c = 0; c < proxy_.k.dim; ++c) at_.centre[c] += static_cast<double>(key[c]);
    });
  }
  for (int64_t c = 0; c < proxy_.k.dim; ++c) at_.centre[c] /= static_cast<double>(proxy_.count);
}

// The mass of the text under a group's centroid, relative to `high`, on the scale of the proxy's logits.
double Mean::text_mass(int64_t group, double high, int thread) const {
  if (args_.keep == nullptr) return 0;
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
  for (int64_t t = 0; t < proxy_.k.tokens; ++t) {
    if (mask_bit(args_.keep, t)) tokens[n++] = static_cast<int32_t>(t);
    if (n < kKeyBlock) continue;
    each_key(tokens, n, thread, add);
    n = 0;
  }
  if (n > 0) each_key(tokens, n, thread, add);
  return mass;
}

// A group's mask over the keys that take part, in their order.
const uint32_t* Mean::kept_of(int64_t group, int thread) const {
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

float Mean::share_of(int64_t group, double dropped, double log_mass, int thread) const {
  if (dropped == 0) return 0;
  return static_cast<float>(std::min(args_.weight * dropped / (1 + text_mass(group, log_mass, thread)), 1 - 0x1p-10));
}

void Mean::sum_up(const ProxyBlock& weights, int thread) const {
  const int32_t* sizes = args_.sizes[head_];
  for (int64_t i = 0; i < weights.n; ++i) {
    const int64_t group = weights.first + i;
    float* row = weights.rows + i * weights.stride;
    if (sizes[group] == 0) {
      std::fill_n(row, proxy_.count, 0.0f);
      continue;
    }
    float low = 0, high = 0;
    exec_.kernels->min_max(row, proxy_.count, &low, &high);
    const Masses masses = exec_.kernels->weigh_dropped(row, proxy_.count, high, kept_of(group, thread));
    const double mass = masses.all + text_mass(group, static_cast<double>(high), thread);
    args_.share[head_][group] = static_cast<float>(std::min(args_.weight * masses.dropped / mass, 1 - 0x1p-10));
  }
  weighted_mean(exec_, attend_kernels(exec_, args_.v.dtype), at_, proxy_, args_.v[head_], weights, args_.value[head_],
                thread);
}

}  // namespace scope::cpu
