// split on the CPU: a few groups by one thread, whose parts fill a panel of centroids; their members are read once a round.
#include "stages/split.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace scope::cpu {

namespace {

constexpr int64_t kRows = 64;  // members that are loaded at a time

// As many groups as fill a panel with their parts.
int64_t groups_at_once(const Exec& exec, int64_t parts) { return std::max<int64_t>(1, exec.kernels->panel / parts); }

// What one thread needs.
struct Work {
  int64_t padded, width;
  float* rows;     // [kRows, padded]
  float* panels;   // the centroids of some groups, packed
  float* scores;   // [kRows, width]
  int32_t* parts;  // [kRows]
  float* tile;     // [parts, padded] sums over kRows members
  double* sums;    // [parts, padded]

  Work(Arena arena, const Exec& exec, int64_t dim, int64_t count, int64_t* bytes = nullptr) {
    padded = round_up(dim, kLanes);
    width = round_up(count, kLanes);
    rows = arena.take<float>(kRows * padded);
    panels = arena.take<float>(round_up(groups_at_once(exec, count) * count, exec.kernels->panel) * dim + kLanes);
    scores = arena.take<float>(kRows * width);
    parts = arena.take<int32_t>(kRows);
    tile = arena.take<float>(count * padded);
    sums = arena.take<double>(count * padded);
    if (bytes != nullptr) *bytes = round_up(arena.used(), Arena::kAlignment);
  }
  static int64_t bytes(const Exec& exec, int64_t dim, int64_t count) {
    int64_t bytes = 0;
    Work(Arena(), exec, dim, count, &bytes);
    return bytes;
  }
};

class Split {
 public:
  Split(const Exec& exec, const SplitArgs& args, int64_t head, int64_t work_bytes)
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
        work_bytes_(work_bytes) {}

  void run() const {
    std::fill_n(labels_, q_.tokens, -1);
    const int64_t many = groups_at_once(exec_, parts_);
    exec_.pool->run(ceil_div(args_.groups, many), [&](int64_t chunk, int thread) {
      const int64_t first = chunk * many, end = std::min(first + many, args_.groups);
      auto* const memory = static_cast<std::byte*>(args_.scratch.data) + thread * work_bytes_;
      const Work work(Arena(memory, work_bytes_), exec_, dim_, parts_);
      for (int64_t c = first; c < end && !args_.warm; ++c) start(c);
      for (int round = 0; round < args_.rounds; ++round) {
        exec_.kernels->pack(centroid(first, 0), dim_, (end - first) * parts_, dim_, work.panels);
        // Rows that are read past the last panel's end count for nothing.
        for (int64_t c = first; c < end; ++c) improve(c, work.panels + (c - first) * parts_, work);
      }
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
  void improve(int64_t c, const float* panel, const Work& at) const {
    float half[round_up(kMostParts, kLanes)];  // of a centroid's squared length
    std::fill_n(half, at.width, std::numeric_limits<float>::infinity());
    exec_.kernels->dot(centroid(c, 0), dim_, parts_, panel, parts_, dim_, at.scores, at.width);
    for (int64_t u = 0; u < parts_; ++u) half[u] = at.scores[u * at.width + u] / 2;
    std::fill_n(at.sums, parts_ * at.padded, 0.0);
    int32_t* sizes = sizes_ + c * parts_;
    std::fill_n(sizes, parts_, 0);
    for (int64_t first = offsets_[c]; first < offsets_[c + 1]; first += kRows) {
      const int64_t n = std::min(kRows, offsets_[c + 1] - first);
      exec_.kernels->load_rows(q_, order_ + first, n, at.rows, at.padded);
      exec_.kernels->dot(at.rows, at.padded, n, panel, parts_, dim_, at.scores, at.width);
      exec_.kernels->argmax(at.scores, at.width, n, parts_, half, at.parts);
      std::fill_n(at.tile, parts_ * at.padded, 0.0f);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t part = at.parts[i];
        labels_[order_[first + i]] = static_cast<int32_t>(c * parts_ + part);
        if (!std::isfinite(at.scores[i * at.width + part])) continue;
        ++sizes[part];
        exec_.kernels->add(at.rows + i * at.padded, dim_, at.tile + part * at.padded);
      }
      for (int64_t i = 0; i < parts_ * at.padded; ++i) at.sums[i] += static_cast<double>(at.tile[i]);
    }
    for (int64_t u = 0; u < parts_; ++u) {
      if (sizes[u] == 0) continue;
      const double each = 1.0 / sizes[u], *sum = at.sums + u * at.padded;
      float* mean = centroid(c, u);
      for (int64_t k = 0; k < dim_; ++k) mean[k] = static_cast<float>(sum[k] * each);
    }
  }

  const Exec& exec_;
  const SplitArgs& args_;
  const RowsView q_;
  int64_t dim_, parts_;
  const int32_t* order_;
  const int64_t* offsets_;
  float* centroids_;
  int32_t *sizes_, *labels_;
  int64_t work_bytes_;  // of each thread
};

}  // namespace

int64_t split_scratch(const Exec& exec, const Sizes& sizes) {
  return exec.pool->threads() * Work::bytes(exec, sizes.dim, sizes.parts);
}

void split(const Exec& exec, const SplitArgs& args) {
  const int64_t bytes = Work::bytes(exec, args.q.dim, args.parts);
  require(exec.pool->threads() * bytes <= args.scratch.bytes, Status::internal, "split: scratch is smaller than its plan");
  for (int64_t h = 0; h < args.heads; ++h) Split(exec, args, h, bytes).run();
}

}  // namespace scope::cpu
