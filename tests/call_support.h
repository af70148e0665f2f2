// Inputs, guarded memory of the tested backend and float64 attention for tests of whole calls.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cases.h"
#include "methods/methods.h"
#include "pipeline/call.h"
#include "reference.h"

namespace scope::test {

inline Settings method(const char* name, std::initializer_list<std::pair<const char*, const char*>> set = {}) {
  Settings settings = find_method(name).settings();
  settings.first_iterations = 4;  // enough to be a K-means, quick enough for thousands of calls
  for (const auto& [key, value] : set) set_setting(settings, key, value);
  return settings;
}

// Methods that keep whole codes, at sizes that suit short sequences.
inline std::vector<Settings> baselines(const char* target = "none") {
  return {method("svg2", {{"codes", "100"}, {"target_density", target}}),
          method("sparge", {{"q_block", "16"}, {"k_block", "8"}, {"target_density", target}}),
          method("sparge-cdf", {{"q_block", "16"}, {"k_block", "8"}, {"similarity", "0.15"}, {"target_density", target}})};
}

// On the backend that this process tests.
inline Context tested_context(int threads = 2) {
  return Context(ContextOptions{.backend = backend().name, .threads = threads});
}
inline bool tested_has(const Settings& settings) {
  const Capabilities& can = backend().can;
  return can.groupings.has(settings.group) && can.encodings.has(settings.encode) && can.proxies.has(settings.proxy) &&
         can.rules.has(settings.rule) && can.tails.has(settings.tail) && (settings.profile == nullptr || can.profiles);
}

// q, k, v with clusters, so that selections are not uniform; rounded to `dtype`, so that float64 sees what a call sees.
struct Inputs {
  int64_t batch, heads, q_tokens, k_tokens, dim;
  DType dtype;
  std::vector<float> q, k, v;

  Inputs(int64_t b, int64_t h, int64_t nq, int64_t nk, int64_t d, uint32_t seed, DType type = limits().finest)
      : batch(b), heads(h), q_tokens(nq), k_tokens(nk), dim(d), dtype(type) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> centres(static_cast<size_t>(8 * d));
    for (float& x : centres) x = 1.5f * normal(random);
    const auto fill = [&](std::vector<float>& x, int64_t tokens) {
      for (int64_t i = 0; i < b * h * tokens; ++i) {
        const size_t centre = random() % 8 * static_cast<size_t>(d);
        for (int64_t c = 0; c < d; ++c) {
          const float value = centres[centre + static_cast<size_t>(c)] + 0.4f * normal(random);
          x.push_back(static_cast<float>(reference::rounded(static_cast<double>(value), dtype)));
        }
      }
    };
    fill(q, nq);
    fill(k, nk);
    fill(v, nk);
  }

  Shape shape(bool dense_queries = false) const {
    return {.batch = batch,
            .heads = heads,
            .q_tokens = q_tokens,
            .k_tokens = k_tokens,
            .dim = dim,
            .dtype = dtype,
            .rope = {},
            .subspaces = {},
            .dense_queries = dense_queries};
  }
  // Sample b alone.
  Inputs sample(int64_t b) const {
    Inputs one = *this;
    one.batch = 1;
    for (auto* x : {&one.q, &one.k, &one.v}) {
      const auto n = std::ssize(*x) / batch;
      *x = std::vector<float>(x->begin() + b * n, x->begin() + (b + 1) * n);
    }
    return one;
  }
};

struct Result {
  std::vector<float> out, lse, centroids, codebooks;
  std::vector<int32_t> labels, sizes, counts, codes;
  std::vector<uint32_t> mask, keep;
  CallStats stats;
  std::vector<HeadStats> heads;
};

inline bool same_bits(const Result& a, const Result& b) {
  const auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) == 0);
  };
  return same(a.out, b.out) && same(a.lse, b.lse) && same(a.labels, b.labels) && same(a.sizes, b.sizes) &&
         same(a.counts, b.counts) && same(a.mask, b.mask) && same(a.keep, b.keep);
}

struct Extra {
  std::vector<int64_t> q_lengths = {}, k_lengths = {};
  std::vector<uint32_t> valid_queries = {}, valid_keys = {};
  std::vector<uint32_t> keep = {}, dense_queries = {};
  float scale = 0;
  Place place = {};
  State* state = nullptr;

  bool valid_query(const Inputs& in, int64_t b, int64_t i) const {
    return valid(q_lengths, valid_queries, in.q_tokens, b, i);
  }
  bool valid_key(const Inputs& in, int64_t b, int64_t j) const { return valid(k_lengths, valid_keys, in.k_tokens, b, j); }

 private:
  static bool valid(const std::vector<int64_t>& lengths, const std::vector<uint32_t>& bits, int64_t tokens, int64_t b,
                    int64_t i) {
    return (lengths.empty() || i < lengths[static_cast<size_t>(b)]) &&
           (bits.empty() || mask_bit(bits.data() + b * mask_words(tokens), i));
  }
};

// A state and the memory that it lies in.
struct OwnState {
  explicit OwnState(const Plan& plan) : memory(*plan.backend, plan.exec, plan.state_bytes), state(plan, memory.data()) {}
  std::vector<std::byte> save() const {
    std::vector<std::byte> bytes(static_cast<size_t>(state.bytes()));
    state.save(nullptr, bytes.data());
    return bytes;
  }
  // Of one of its arrays.
  void* first(const Plan& plan, StateLayout::Row row) const {
    const StateLayout layout(plan);
    return layout.head(layout[row], state.memory(), 0, 0);
  }
  Lent<std::byte> memory;
  State state;
};

// How q, k, v and out lie: the padding after each row is NaN in inputs, and out's must stay as it is.
struct Layout {
  bool token_major = false;  // [batch, tokens, heads, dim]
  int64_t padding = 0;       // elements
};

// Everything that a call touches, poisoned and guarded in memory of its backend. The plan and the state outlive it.
class PreparedCall {
 public:
  PreparedCall(const Plan& plan, const Inputs& in, const Extra& extra = {}, const Layout& layout = {})
      : plan_(plan),
        layout_(layout),
        extra_(extra),
        q_(lent<std::byte>(tensor_bytes(in.q_tokens))),
        k_(lent<std::byte>(tensor_bytes(in.k_tokens))),
        v_(lent<std::byte>(tensor_bytes(in.k_tokens))),
        out_(lent<std::byte>(tensor_bytes(in.q_tokens))),
        lse_(lent<float>(heads() * in.q_tokens)),
        centroids_(lent<float>(heads() * plan.groups * in.dim)),
        codebooks_(lent<float>(heads() * plan.codes * in.dim)),
        labels_(lent<int32_t>(heads() * in.q_tokens)),
        sizes_(lent<int32_t>(heads() * plan.selection_groups)),
        counts_(lent<int32_t>(heads() * plan.selection_groups)),
        codes_(lent<int32_t>(plan.subspaces() * heads() * in.k_tokens)),
        mask_(lent<uint32_t>(heads() * plan.selection_groups * mask_words(in.k_tokens))),
        keep_(lent<uint32_t>(in.batch * mask_words(in.k_tokens))),
        workspace_(lent<std::byte>(plan.workspace_bytes)),
        heads_(static_cast<size_t>(heads())) {
    upload(in);
    const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
    args.q = view<TensorView>(q_, in.q_tokens);
    args.k = view<TensorView>(k_, in.k_tokens);
    args.v = view<TensorView>(v_, in.k_tokens);
    args.out = view<MutableTensorView>(out_, in.q_tokens);
    args.lse = lse_.data();
    args.scale = extra_.scale;
    args.q_lengths = pointer(extra_.q_lengths);
    args.k_lengths = pointer(extra_.k_lengths);
    args.valid_queries = pointer(extra_.valid_queries);
    args.valid_keys = pointer(extra_.valid_keys);
    args.keep = pointer(extra_.keep);
    args.dense_queries = pointer(extra_.dense_queries);
    args.place = extra_.place;
    args.state = extra_.state;
    args.workspace = workspace_.data();
    args.workspace_bytes = plan.workspace_bytes;
    args.selection = {.labels = labels_.data(),
                      .sizes = sizes_.data(),
                      .counts = counts_.data(),
                      .mask = mask_.data(),
                      .keep = keep_.data(),
                      .centroids = centroids_.data(),
                      .codebooks = codebooks_.data(),
                      .codes = codes_.data()};
    args.stats = &stats;
    if (plan.backend->can.host) args.head_stats = heads_.data();
  }
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  void upload(const Inputs& in) {
    const auto send = [&](Lent<std::byte>& to, const std::vector<float>& x, int64_t tokens) {
      std::vector<std::byte> image(static_cast<size_t>(to.size()), std::byte{0xff});
      each_row(tokens, [&](int64_t row, int64_t at) {
        for (int64_t c = 0; c < in.dim; ++c) {
          put(image.data() + at, in.dtype, c, static_cast<double>(x[static_cast<size_t>(row * in.dim + c)]));
        }
      });
      to.write(image);
    };
    send(q_, in.q, in.q_tokens);
    send(k_, in.k, in.k_tokens);
    send(v_, in.v, in.k_tokens);
  }

  Result run() {
    call(plan_, args);
    return fetch();
  }
  // What a call has left here; waits for it.
  Result fetch() {
    Result result;
    if (!plan_.backend->can.host) {
      CallArgs reading = args;
      reading.head_stats = heads_.data();
      read_stats(plan_, reading);
    }
    result.stats = stats;
    result.heads = heads_;
    result.out = fetch_out(out_);
    result.lse = lse_.values();
    result.centroids = centroids_.values();
    result.codebooks = codebooks_.values();
    result.labels = labels_.values();
    result.sizes = sizes_.values();
    result.counts = counts_.values();
    result.codes = codes_.values();
    result.mask = mask_.values();
    result.keep = keep_.values();
    return result;
  }
  // Where a call wrote over q.
  std::vector<float> fetch_q() const { return fetch_out(q_); }
  // Of the tensors.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all;
    for (const auto* part : {&q_, &k_, &v_, &out_}) {
      const auto values = part->values();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  std::vector<std::byte> workspace() const { return workspace_.values(); }

  CallArgs args;
  CallStats stats;

 private:
  template <class T>
  Lent<T> lent(int64_t count) const {
    return Lent<T>(*plan_.backend, plan_.exec, count);
  }
  const Shape& shape() const { return plan_.shape; }
  int64_t heads() const { return shape().batch * shape().heads; }
  int64_t wide() const { return shape().dim + layout_.padding; }
  int64_t tensor_bytes(int64_t tokens) const { return heads() * tokens * wide() * dtype_bytes(shape().dtype); }
  template <class View>
  View view(const Lent<std::byte>& memory, int64_t tokens) const {
    const int64_t head = layout_.token_major ? wide() : tokens * wide();
    const int64_t token = layout_.token_major ? shape().heads * wide() : wide();
    return {memory.data(), shape().dtype, shape().batch, shape().heads, tokens, shape().dim, shape().heads * tokens * wide(),
            head,          token};
  }
  // each(row of [batch, heads, tokens], its first byte)
  template <class Each>
  void each_row(int64_t tokens, const Each& each) const {
    for (int64_t row = 0; row < heads() * tokens; ++row) {
      const int64_t b = row / (shape().heads * tokens), h = row / tokens % shape().heads, t = row % tokens;
      const int64_t at = layout_.token_major ? (b * tokens + t) * shape().heads + h : row;
      each(row, at * wide() * dtype_bytes(shape().dtype));
    }
  }
  std::vector<float> fetch_out(const Lent<std::byte>& from) const {
    const std::vector<std::byte> image = from.values();
    std::vector<float> out(static_cast<size_t>(heads() * shape().q_tokens * shape().dim));
    each_row(shape().q_tokens, [&](int64_t row, int64_t at) {
      const RowsView view{image.data() + at, shape().dtype, 1, shape().dim, wide()};
      for (int64_t c = 0; c < shape().dim; ++c) {
        out[static_cast<size_t>(row * shape().dim + c)] = static_cast<float>(reference::element(view, 0, c));
      }
      for (int64_t i = shape().dim * dtype_bytes(shape().dtype); i < wide() * dtype_bytes(shape().dtype); ++i) {
        EXPECT_EQ(image[static_cast<size_t>(at + i)], std::byte{0xff}) << "wrote between rows";
      }
    });
    return out;
  }

  const Plan& plan_;
  Layout layout_;
  Extra extra_;
  Lent<std::byte> q_, k_, v_, out_;
  Lent<float> lse_, centroids_, codebooks_;
  Lent<int32_t> labels_, sizes_, counts_, codes_;
  Lent<uint32_t> mask_, keep_;
  Lent<std::byte> workspace_;
  std::vector<HeadStats> heads_;
};

// Two samples with padding, text keys that all see, and text queries that see all.
struct Ragged {
  Inputs in;
  Extra extra;
  explicit Ragged(int64_t dim, uint32_t seed = 5) : in(2, 2, 150, 170, dim, seed) {
    extra.q_lengths = {150, 131};
    extra.k_lengths = {170, 141};
    extra.keep.assign(2 * 6, 0);
    extra.dense_queries.assign(2 * 5, 0);
    for (int64_t b = 0; b < 2; ++b) {
      for (const int64_t j : {3, 100, 139}) set_mask_bit(extra.keep.data() + b * 6, j);
      for (const int64_t i : {0, 77}) set_mask_bit(extra.dense_queries.data() + b * 5, i);
    }
  }
  Shape shape() const { return in.shape(true); }
};

// The tokens of one sample that take part.
inline std::vector<int32_t> part(int64_t valid, const uint32_t* others) {
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < valid; ++i) {
    if (!mask_bit(others, i)) rows.push_back(static_cast<int32_t>(i));
  }
  return rows;
}

inline Result run(const Plan& plan, const Inputs& in, const Extra& extra = {}, const Layout& layout = {}) {
  return PreparedCall(plan, in, extra, layout).run();
}

// Attention of one query in float64 over the keys that `sees` admits; scale 0: 1 / sqrt(dim).
template <class Sees>
std::vector<double> exact_row(const Inputs& in, int64_t b, int64_t h, int64_t i, const Sees& sees, double scale = 0) {
  if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(in.dim));
  const float* q = in.q.data() + ((b * in.heads + h) * in.q_tokens + i) * in.dim;
  const float* k = in.k.data() + (b * in.heads + h) * in.k_tokens * in.dim;
  const float* v = in.v.data() + (b * in.heads + h) * in.k_tokens * in.dim;
  std::vector<double> out(static_cast<size_t>(in.dim), 0.0), logits;
  double high = -INFINITY, total = 0;
  for (int64_t j = 0; j < in.k_tokens; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < in.dim; ++c) sum += static_cast<double>(q[c]) * static_cast<double>(k[j * in.dim + c]);
    logits.push_back(sees(j) ? sum * scale : -INFINITY);
    high = std::max(high, logits.back());
  }
  if (high == -INFINITY) return out;
  for (int64_t j = 0; j < in.k_tokens; ++j) {
    if (!sees(j)) continue;  // an unseen value may be NaN
    const double p = std::exp(logits[static_cast<size_t>(j)] - high);
    total += p;
    for (int64_t c = 0; c < in.dim; ++c) out[static_cast<size_t>(c)] += p * static_cast<double>(v[j * in.dim + c]);
  }
  for (double& x : out) x /= total;
  return out;
}

inline Status status_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status();
  }
  return Status::ok;
}

inline void expect_rows(const Inputs& in, const Result& result, int64_t b, int64_t h, int64_t i,
                        const std::vector<double>& exact) {
  for (int64_t c = 0; c < in.dim; ++c) {
    const float got = result.out[static_cast<size_t>(((b * in.heads + h) * in.q_tokens + i) * in.dim + c)];
    ASSERT_NEAR(got, exact[static_cast<size_t>(c)], Limits::out(in.dtype))
        << "sample " << b << " head " << h << " query " << i << " channel " << c;
  }
}

// An invalid query attends to nothing and belongs to no group.
inline void expect_invalid(const Inputs& in, const Result& result, const Extra& extra) {
  for (int64_t row = 0; row < in.batch * in.heads * in.q_tokens; ++row) {
    if (extra.valid_query(in, row / (in.heads * in.q_tokens), row % in.q_tokens)) continue;
    const auto at = static_cast<size_t>(row);
    for (int64_t c = 0; c < in.dim; ++c) ASSERT_EQ(result.out[at * static_cast<size_t>(in.dim) + static_cast<size_t>(c)], 0);
    ASSERT_EQ(result.lse[at], -std::numeric_limits<float>::infinity());
    ASSERT_EQ(result.labels[at], -1);
  }
}

// Every output row must be the exact attention over what its selection row says.
inline void expect_consistent(const Inputs& in, const Plan& plan, const Result& result, const Extra& extra) {
  const int64_t words = mask_words(in.k_tokens), groups = plan.selection_groups;
  ASSERT_NO_FATAL_FAILURE(expect_invalid(in, result, extra));
  for (int64_t b = 0; b < in.batch; ++b) {
    for (int64_t h = 0; h < in.heads; ++h) {
      const int64_t head = b * in.heads + h;
      const uint32_t* mask = result.mask.data() + head * groups * words;
      std::vector<int32_t> sizes(static_cast<size_t>(groups), 0);
      for (int64_t i = 0; i < in.q_tokens; ++i) {
        const int32_t label = result.labels[static_cast<size_t>(head * in.q_tokens + i)];
        ASSERT_EQ(label >= 0, extra.valid_query(in, b, i));
        if (label < 0) continue;
        const auto sees = [&](int64_t j) {
          return mask_bit(mask + label * words, j) || mask_bit(result.keep.data() + b * words, j);
        };
        ASSERT_NO_FATAL_FAILURE(
            expect_rows(in, result, b, h, i, exact_row(in, b, h, i, sees, static_cast<double>(extra.scale))));
        ++sizes[static_cast<size_t>(label)];
      }
      for (int64_t c = 0; c < groups; ++c) {
        const size_t at = static_cast<size_t>(head * groups + c);
        ASSERT_EQ(result.sizes[at], sizes[static_cast<size_t>(c)]);
        int64_t bits = 0;
        for (int64_t j = 0; j < in.k_tokens; ++j) {
          bits += mask_bit(mask + c * words, j) ? 1 : 0;
          ASSERT_TRUE(extra.valid_key(in, b, j) || !mask_bit(mask + c * words, j)) << "key " << j;
        }
        ASSERT_EQ(result.counts[at], bits);
      }
    }
  }
}

}  // namespace scope::test
