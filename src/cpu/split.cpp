// split on the CPU: each group by one thread, its members read once a round.
#include "stages/split.h"

#include <algorithm>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

namespace {

constexpr int64_t kRows = 64;  // members that are loaded at a time

struct Layout {
  int64_t padded;
  float* rows;        // [threads, kRows, padded]
  float* by_channel;  // [threads, padded, parts] the centroids transposed, so that parts are lanes
  double* sums;       // [threads, parts, padded]

  Layout(Arena arena, const Exec& exec, int64_t dim, int64_t parts, int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    padded = round_up(dim, kLanes);
    rows = arena.take<float>(threads * kRows * padded);
    by_channel = arena.take<float>(threads * padded * parts);
    sums = arena.take<double>(threads * parts * padded);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

class Split {
 public:
  Split(const Exec& exec, const SplitArgs& args, int64_t head, const Layout& at)
      : exec_(exec),
        args_(args),
        q_(args.q[head]),
        dim_(args.q.dim),
        parts_(args.parts),
        order_(args.order[head]),
        offsets_(args.offsets[head]),
        centroids_(args.centroids[head]),
        sizes_(args.sizes[head]),
        labels_(args.labels[head]),
        at_(at) {}

  void run() const {
    std::fill_n(labels_, q_.tokens, -1);
    exec_.pool->run(args_.groups, [&](int64_t c, int thread) {
      if (!args_.warm) start(c);
      for (int round = 0; round < args_.rounds; ++round) improve(c, thread);
    });
  }

 private:
  int64_t size_of(int64_t c) const { return offsets_[c + 1] - offsets_[c]; }
  float* centroid(int64_t c, int64_t part) const { return centroids_ + (c * parts_ + part) * dim_; }

  void start(int64_t c) const {
    const int64_t n = size_of(c);
    if (n == 0) std::fill_n(centroid(c, 0), parts_ * dim_, 0.0f);
    float row[kMostChannels];
    for (int64_t u = 0; u < parts_ && n > 0; ++u) {
      const int32_t* member = order_ + offsets_[c] + (2 * u + 1) * n / (2 * parts_);
      exec_.kernels->load_rows(q_, member, 1, row, kMostChannels);
      std::copy_n(row, dim_, centroid(c, u));
    }
  }

  // One assignment and update.
  void improve(int64_t c, int thread) const {
    float* rows = at_.rows + thread * kRows * at_.padded;
    double* sums = at_.sums + thread * parts_ * at_.padded;
    float* by_channel = at_.by_channel + thread * at_.padded * parts_;
    float half[kMostParts];
    for (int64_t u = 0; u < parts_; ++u) {
      double length = 0;
      for (int64_t i = 0; i < dim_; ++i) {
        const float x = centroid(c, u)[i];
        by_channel[i * parts_ + u] = x;
        length += static_cast<double>(x) * static_cast<double>(x);
      }
      half[u] = static_cast<float>(length / 2);
    }
    std::fill_n(sums, parts_ * at_.padded, 0.0);
    int32_t* sizes = sizes_ + c * parts_;
    std::fill_n(sizes, parts_, 0);
    for (int64_t first = offsets_[c]; first < offsets_[c + 1]; first += kRows) {
      const int64_t n = std::min(kRows, offsets_[c + 1] - first);
      exec_.kernels->load_rows(q_, order_ + first, n, rows, at_.padded);
      for (int64_t i = 0; i < n; ++i) {
        const float* row = rows + i * at_.padded;
        const int64_t part = nearest(row, by_channel, half);
        labels_[order_[first + i]] = static_cast<int32_t>(c * parts_ + part);
        ++sizes[part];
        for (int64_t k = 0; k < dim_; ++k) sums[part * at_.padded + k] += static_cast<double>(row[k]);
      }
    }
    for (int64_t u = 0; u < parts_; ++u) {
      if (sizes[u] == 0) continue;
      for (int64_t k = 0; k < dim_; ++k) centroid(c, u)[k] = static_cast<float>(sums[u * at_.padded + k] / sizes[u]);
    }
  }

  int64_t nearest(const float* row, const float* by_channel, const float* half) const {
    float score[kMostParts];
    for (int64_t u = 0; u < parts_; ++u) score[u] = -half[u];
    for (int64_t i = 0; i < dim_; ++i) {
      for (int64_t u = 0; u < parts_; ++u) score[u] += row[i] * by_channel[i * parts_ + u];
    }
    return std::max_element(score, score + parts_) - score;
  }

  const Exec& exec_;
  const SplitArgs& args_;
  const RowsView q_;
  int64_t dim_, parts_;
  const int32_t* order_;
  const int64_t* offsets_;
  float* centroids_;
  int32_t *sizes_, *labels_;
  const Layout& at_;
};

}  // namespace

int64_t split_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Layout(Arena(), exec, sizes.dim, sizes.parts, &bytes);
  return bytes;
}

void split(const Exec& exec, const SplitArgs& args) {
  const Layout at(Arena(args.scratch.data, args.scratch.bytes), exec, args.q.dim, args.parts);
  for (int64_t h = 0; h < args.heads; ++h) Split(exec, args, h, at).run();
}

}  // namespace scope::cpu
