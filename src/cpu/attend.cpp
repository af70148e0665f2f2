// attend on the CPU: blocks of selected keys are gathered and packed once for all queries of a tile, then strips of
// queries go through product, online softmax and accumulation.
#include "stages/attend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cpu/quantise.h"

namespace scope::cpu {

namespace {

constexpr int64_t kTileRows = 252;  // queries that share one packed block of keys; a multiple of kStrip
constexpr int64_t kBundledRows = kTileRows / kBundle * kBundle;

struct Tile {
  int64_t group, begin, end;  // queries order[begin .. end)
};

struct Layout {
  int64_t stride;  // padded channels
  Tile* tiles;     // [max_tiles]
  std::byte* q;    // [threads, kTileRows, stride] packed
  std::byte* k;    // [threads, kKeyBlock, stride] packed panels
  std::byte* v;    // [threads, kKeyBlock, stride] packed
  float* buffer;   // [threads, kKeyBlock, stride]
  float* s;        // [threads, kStrip, kKeyBlock]
  float* o;        // [threads, kTileRows, stride]
  float* m;        // [threads, 3, kTileRows]: running maximum, running sum, rescaling factor
  std::optional<Quantiser> quantiser;

  Layout(Arena arena, const Exec& exec, const Sizes& sizes, int64_t* bytes = nullptr) {
    const int64_t threads = exec.pool->threads();
    const auto element = static_cast<int64_t>(sizeof(float));  // the largest any arithmetic uses
    stride = sizes.products == Products::qk8 ? rotated_channels(sizes.dim) : round_up(sizes.dim, 2 * kLanes);
    tiles = arena.take<Tile>(sizes.groups + sizes.q_tokens / kBundledRows + 1);
    q = arena.take<std::byte>(threads * kTileRows * stride * element);
    k = arena.take<std::byte>(threads * kKeyBlock * stride * element);
    v = arena.take<std::byte>(threads * kKeyBlock * stride * element);
    buffer = arena.take<float>(threads * kKeyBlock * stride);
    s = arena.take<float>(threads * kStrip * kKeyBlock);
    o = arena.take<float>(threads * kTileRows * stride);
    m = arena.take<float>(threads * 3 * kTileRows);
    if (sizes.products == Products::qk8) quantiser.emplace(arena, sizes.k_tokens, sizes.extra, sizes.dim);
    if (bytes != nullptr) *bytes = arena.used();
  }
};

// Walks the set bits of one or two bitmasks in ascending order; without a mask, all of them.
class BitWalk {
 public:
  BitWalk(const uint32_t* mask, const uint32_t* also, int64_t bits)
      : mask_(mask), also_(also), bits_(bits), words_(mask_words(bits)) {}

  // The next positions, at most `most`; 0 at the end.
  int64_t next(int32_t* out, int64_t most) {
    int64_t n = 0;
    while (true) {
      for (; word_ != 0 && n < most; word_ &= word_ - 1) {
        out[n++] = static_cast<int32_t>(32 * (at_ - 1) + std::countr_zero(word_));
      }
      if (n == most || at_ == words_) return n;
      word_ = mask_ == nullptr ? ~0u >> (32 - std::min<int64_t>(32, bits_ - 32 * at_))
                               : mask_[at_] | (also_ == nullptr ? 0u : also_[at_]);
      ++at_;
    }
  }

 private:
  const uint32_t* mask_;
  const uint32_t* also_;
  int64_t bits_, words_, at_ = 0;
  uint32_t word_ = 0;
};

class Attention {
 public:
  Attention(const Exec& exec, const AttendArgs& args, int64_t head)
      : exec_(exec),
        args_(args),
        head_(head),
        q_(args.q[head]),
        k_(args.k[head]),
        v_(args.v[head]),
        order_(args.order[head]),
        offsets_(args.offsets[head]),
        mask_(args.mask[head]),
        extra_k_{args.extra.k[head], DType::f32, args.extra.count, args.q.dim, args.q.dim},
        extra_v_{args.extra.v[head], DType::f32, args.extra.count, args.q.dim, args.q.dim},
        extra_bias_(args.extra.bias[head]),
        extra_mask_(args.extra.mask[head]),
        mix_share_(args.mix.share[head]),
        mix_row_(args.mix.row[head]),
        mix_part_(args.mix.part[head]),
        out_(args.out[head]),
        lse_(args.lse[head]),
        kernels_(attend_kernels(exec, args.q.dtype)),
        at_(Arena(args.scratch.data, args.scratch.bytes), exec,
            {.q_tokens = args.q.tokens,
             .k_tokens = args.k.tokens,
             .dim = args.q.dim,
             .groups = args.groups,
             .extra = args.extra.count,
             .products = args.products}),
        depth_(args.q.dim),
        channels_(round_up(args.q.dim, kLanes)),
        unit_(args.scale * 1.44269504088896f) {}

  void run() {
    if (at_.quantiser && at_.quantiser->run(exec_, args_, head_)) multiply_bytes(*at_.quantiser);
    const int64_t tiles = make_tiles();
    exec_.pool->run(tiles, [&](int64_t i, int thread) { tile(at_.tiles[i], thread); });
    for (int64_t i = begin_of(args_.groups); i < q_.tokens; ++i) {
      const int64_t token = order_ == nullptr ? i : order_[i];
      std::fill_n(out_.row(token), q_.dim * dtype_bytes(out_.dtype), std::byte{0});
      if (lse_ != nullptr) lse_[token] = -std::numeric_limits<float>::infinity();
    }
  }

 private:
  // Products of queries and keys; the rest stays as it is.
  void multiply_bytes(const Quantiser& quantiser) {
    factors_ = &quantiser.factors();
    depth_ = rotated_channels(q_.dim);
    k_ = quantiser.keys(args_);
    extra_k_ = quantiser.extra(args_);
    kernels_.pack_k = exec_.attend_kernels->pack_k;
    kernels_.dot = exec_.byte_kernels->dot;
  }

  int64_t begin_of(int64_t group) const { return offsets_ == nullptr ? group * q_.tokens : offsets_[group]; }

  // Large groups are cut into equal tiles, of whole bundles where these have means. The longest work goes first, so that
  // threads finish together.
  int64_t make_tiles() {
    int64_t n = 0;
    for (int64_t c = 0; c < args_.groups; ++c) {
      const int64_t begin = begin_of(c), size = begin_of(c + 1) - begin;
      const bool bundles = args_.mix.follow > 0;
      const int64_t parts = ceil_div(size, bundles ? kBundledRows : kTileRows);
      if (parts == 0) continue;
      const int64_t height = round_up(ceil_div(size, parts), bundles ? kBundle : kStrip);
      for (int64_t at = 0; at < size; at += height) at_.tiles[n++] = {c, begin + at, begin + std::min(at + height, size)};
    }
    std::sort(at_.tiles, at_.tiles + n, [](const Tile& a, const Tile& b) {
      const int64_t rows_a = a.end - a.begin, rows_b = b.end - b.begin;
      return rows_a != rows_b ? rows_a > rows_b : a.begin < b.begin;
    });
    return n;
  }

  void tile(const Tile& tile, int thread) {
    const int64_t rows = tile.end - tile.begin, stride = at_.stride;
    int32_t in_order[kTileRows];
    if (order_ == nullptr) std::iota(in_order, in_order + rows, static_cast<int32_t>(tile.begin));
    const int32_t* queries = order_ == nullptr ? in_order : order_ + tile.begin;
    std::byte* q = at_.q + thread * kTileRows * stride * static_cast<int64_t>(sizeof(float));
    float* o = at_.o + thread * kTileRows * stride;
    float* m = at_.m + thread * 3 * kTileRows;
    float* l = m + kTileRows;
    if (factors_ != nullptr) {
      exec_.byte_kernels->pack_q(q_, queries, rows, *factors_, q, stride);
    } else {
      kernels_.pack_q(*exec_.kernels, q_, queries, rows, q, stride);
    }
    std::fill_n(o, rows * stride, 0.0f);
    std::fill_n(m, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(l, rows, 0.0f);

    int32_t keys[kKeyBlock];
    const uint32_t* mask = mask_ == nullptr ? nullptr : mask_ + tile.group * mask_words(k_.tokens);
    BitWalk walk(mask, args_.keep, k_.tokens);
    while (const int64_t n = walk.next(keys, kKeyBlock)) block(k_, v_, keys, n, nullptr, rows, thread);
    if (extra_k_.tokens > 0) {
      BitWalk extra(extra_mask_ + tile.group * mask_words(extra_k_.tokens), nullptr, extra_k_.tokens);
      while (const int64_t n = extra.next(keys, kKeyBlock)) block(extra_k_, extra_v_, keys, n, extra_bias_, rows, thread);
    }

    const float share = mix_share_ == nullptr ? 0.0f : mix_share_[tile.group];
    if (share > 0 && mix_part_ == nullptr) mix(tile.group, share, rows, o, l);
    for (int64_t i = 0; share > 0 && mix_part_ != nullptr && i < rows; i += kBundle) {
      mix_parts(share, queries + i, std::min(kBundle, rows - i), o + i * stride, l + i);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const float inverse = share > 0 ? 1.0f : inverse_of(l[i]);
      exec_.kernels->store_row(o + i * stride, inverse, q_.dim, out_.dtype, out_.row(queries[i]));
      if (lse_ != nullptr) {
        lse_[queries[i]] = m[i] * 0.693147180559945f + std::log(l[i]) - std::log1p(-share) + shift(q + i * row_bytes());
      }
    }
  }

  static float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  int64_t row_bytes() const { return at_.stride * kernels_.element; }  // of a packed query

  // What the logits of a packed query lack.
  float shift(const std::byte* row) const {
    if (factors_ == nullptr) return 0;
    QueryFactors by;
    std::memcpy(&by, row + at_.stride, sizeof by);
    return args_.scale * by.shift;
  }

  // o = (1 - share) o / l + share times the group's row.
  void mix(int64_t group, float share, int64_t rows, float* o, const float* l) const {
    float row[256] = {}, factor[kStrip], shares[kStrip];
    std::copy_n(mix_row_ + group * q_.dim, q_.dim, row);
    std::fill_n(shares, kStrip, share);
    for (int64_t i = 0; i < rows; i += kStrip) {
      const int64_t n = std::min(kStrip, rows - i);
      for (int64_t r = 0; r < n; ++r) factor[r] = l[i + r] == 0.0f ? 0.0f : (1 - share) / l[i + r];
      exec_.kernels->accumulate(shares, 1, n, row, channels_, 1, channels_, factor, o + i * at_.stride, at_.stride);
    }
  }

  // One bundle, each query with its part's row: as Mix says.
  void mix_parts(float share, const int32_t* queries, int64_t n, float* o, const float* l) const {
    const auto follows = [&](int64_t i) { return args_.mix.follow > 0 && l[i] > 0 && std::isfinite(l[i]); };
    const float one = 1;
    alignas(64) float rows[2][kMostChannels] = {};  // the part's, and the mean of those that follow
    float *const row = rows[0], *const mean = rows[1];
    int64_t of = 0;
    for (int64_t i = 0; i < n; ++i) of += follows(i) ? 1 : 0;
    for (int64_t i = 0; i < n; ++i) {
      if (!follows(i)) continue;
      const float weight = 1 / (l[i] * static_cast<float>(of));
      exec_.kernels->accumulate(&weight, 1, 1, o + i * at_.stride, at_.stride, 1, channels_, &one, mean, kMostChannels);
    }
    for (int64_t i = 0; i < n; ++i) {
      const float followed = follows(i) ? share * args_.mix.follow : 0, scale = (1 - share + followed) * inverse_of(l[i]);
      const float weights[2] = {share, -followed};
      std::copy_n(mix_row_ + mix_part_[queries[i]] * q_.dim, q_.dim, row);
      exec_.kernels->accumulate(weights, 2, 1, row, kMostChannels, 2, channels_, &scale, o + i * at_.stride, at_.stride);
    }
  }

  // One block of keys against every query of the tile.
  void block(const RowsView& k, const RowsView& v, const int32_t* keys, int64_t n, const float* bias, int64_t rows,
             int thread) {
    const int64_t stride = at_.stride;
    const auto width = static_cast<int64_t>(sizeof(float));
    std::byte* q = at_.q + thread * kTileRows * stride * width;
    std::byte* packed_k = at_.k + thread * kKeyBlock * stride * width;
    std::byte* packed_v = at_.v + thread * kKeyBlock * stride * width;
    float* buffer = at_.buffer + thread * kKeyBlock * stride;
    float* s = at_.s + thread * kStrip * kKeyBlock;
    float* o = at_.o + thread * kTileRows * stride;
    float* m = at_.m + thread * 3 * kTileRows;
    float* l = m + kTileRows;
    float* factor = l + kTileRows;
    kernels_.pack_k(*exec_.kernels, k, keys, n, packed_k, buffer, stride);
    kernels_.pack_v(*exec_.kernels, v, keys, n, packed_v, buffer, stride);
    for (int64_t i = 0; i < rows; i += kStrip) {
      const int64_t height = std::min(kStrip, rows - i);
      kernels_.dot(q + i * row_bytes(), stride, height, packed_k, n, depth_, s, kKeyBlock);
      if (bias != nullptr) {
        for (int64_t r = 0; r < height; ++r) {
          for (int64_t j = 0; j < n; ++j) s[r * kKeyBlock + j] += bias[keys[j]] / args_.scale;
        }
      }
      kernels_.softmax(s, kKeyBlock, height, n, unit_, m + i, l + i, factor);
      kernels_.accumulate(s, kKeyBlock, height, packed_v, stride, n, channels_, factor, o + i * stride, stride);
    }
  }

  const Exec& exec_;
  const AttendArgs& args_;
  const int64_t head_;
  const RowsView q_;  // of the head, like the rest
  RowsView k_;
  const RowsView v_;
  const int32_t* order_;
  const int64_t* offsets_;
  const uint32_t* mask_;
  RowsView extra_k_;
  const RowsView extra_v_;
  const float* extra_bias_;
  const uint32_t* extra_mask_;
  const float *mix_share_, *mix_row_;
  const int32_t* mix_part_;
  const MutableRowsView out_;
  float* lse_;
  AttendKernels kernels_;
  const ByteFactors* factors_ = nullptr;  // of 8-bit products; null: there are none
  Layout at_;
  int64_t depth_;     // of products of queries and keys
  int64_t channels_;  // of values
  float unit_;        // logits in units of log 2
};

}  // namespace

int64_t attend_scratch(const Exec& exec, const Sizes& sizes) {
  int64_t bytes = 0;
  Sizes all = sizes;
  ++all.groups;  // with the densely attending queries
  Layout(Arena(), exec, all, &bytes);
  return bytes;
}

void attend(const Exec& exec, const AttendArgs& args) {
  for (int64_t h = 0; h < args.heads && args.q.tokens > 0; ++h) Attention(exec, args, h).run();
}

}  // namespace scope::cpu
