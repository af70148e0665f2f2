// Owned inputs and guarded outputs for tests of whole calls.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "core/numeric.h"
#include "methods/methods.h"
#include "pipeline/call.h"

namespace scope::test {

inline Settings method(const char* name, std::initializer_list<std::pair<const char*, const char*>> set = {}) {
  Settings settings = find_method(name).settings();
  settings.first_iterations = 4;  // enough to be a K-means, quick enough for thousands of calls
  for (const auto& [key, value] : set) set_setting(settings, key, value);
  return settings;
}

// q, k, v with clusters, so that selections are not uniform.
struct Inputs {
  int64_t batch, heads, q_tokens, k_tokens, dim;
  std::vector<float> q, k, v;

  Inputs(int64_t b, int64_t h, int64_t nq, int64_t nk, int64_t d, uint32_t seed)
      : batch(b), heads(h), q_tokens(nq), k_tokens(nk), dim(d) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> centres(static_cast<size_t>(8 * d));
    for (float& x : centres) x = 1.5f * normal(random);
    const auto fill = [&](std::vector<float>& x, int64_t tokens) {
      for (int64_t i = 0; i < b * h * tokens; ++i) {
        const size_t centre = random() % 8 * static_cast<size_t>(d);
        for (int64_t c = 0; c < d; ++c) x.push_back(centres[centre + static_cast<size_t>(c)] + 0.4f * normal(random));
      }
    };
    fill(q, nq);
    fill(k, nk);
    fill(v, nk);
  }

  Shape shape() const {
    return {.batch = batch,
            .heads = heads,
            .q_tokens = q_tokens,
            .k_tokens = k_tokens,
            .dim = dim,
            .dtype = DType::f32,
            .rope = {},
            .subspaces = {}};
  }
};

// Bytes with canaries on both sides; poisoned with NaN patterns.
class Guarded {
 public:
  explicit Guarded(int64_t bytes) : bytes_(static_cast<size_t>(bytes)), memory_(bytes_ + 128, std::byte{0xff}) {}
  void* data() { return memory_.data() + 64; }
  bool intact() const {
    for (size_t i = 0; i < 64; ++i) {
      if (memory_[i] != std::byte{0xff} || memory_[64 + bytes_ + i] != std::byte{0xff}) return false;
    }
    return true;
  }
  template <class T>
  std::vector<T> values() const {
    std::vector<T> out(bytes_ / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), memory_.data() + 64, bytes_);
    return out;
  }

 private:
  size_t bytes_;
  std::vector<std::byte> memory_;
};

struct Result {
  std::vector<float> out, lse;
  std::vector<int32_t> labels, sizes, counts;
  std::vector<uint32_t> mask, keep;
  CallStats stats;
  std::vector<HeadStats> heads;
};

struct Extra {
  std::vector<int64_t> q_lengths, k_lengths;
  std::vector<uint32_t> keep, dense_queries;
  Place place;
  void* state = nullptr;
  Start start = Start::automatic;
};

// One call with poisoned, guarded workspace and outputs.
inline Result run(const Plan& plan, const Inputs& in, const Extra& extra = {}) {
  const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
  const int64_t heads = in.batch * in.heads, groups = plan.selection_groups, words = mask_words(in.k_tokens);
  Guarded out(heads * in.q_tokens * in.dim * 4), lse(heads * in.q_tokens * 4), workspace(plan.workspace_bytes);
  Guarded labels(heads * in.q_tokens * 4), sizes(heads * groups * 4), counts(heads * groups * 4);
  Guarded mask(heads * groups * words * 4), keep(in.batch * words * 4);
  Result result;
  result.heads.resize(static_cast<size_t>(heads));
  CallArgs args;
  const auto view = [&](const std::vector<float>& x, int64_t tokens) {
    return TensorView{x.data(),        DType::f32, in.batch, in.heads, tokens, in.dim, in.heads * tokens * in.dim,
                      tokens * in.dim, in.dim};
  };
  args.q = view(in.q, in.q_tokens);
  args.k = view(in.k, in.k_tokens);
  args.v = view(in.v, in.k_tokens);
  args.out = {out.data(),           DType::f32, in.batch, in.heads, in.q_tokens, in.dim, in.heads * in.q_tokens * in.dim,
              in.q_tokens * in.dim, in.dim};
  args.lse = static_cast<float*>(lse.data());
  args.q_lengths = pointer(extra.q_lengths);
  args.k_lengths = pointer(extra.k_lengths);
  args.keep = pointer(extra.keep);
  args.dense_queries = pointer(extra.dense_queries);
  args.place = extra.place;
  args.state = extra.state;
  args.start = extra.start;
  args.workspace = workspace.data();
  args.workspace_bytes = plan.workspace_bytes;
  args.selection.labels = static_cast<int32_t*>(labels.data());
  args.selection.sizes = static_cast<int32_t*>(sizes.data());
  args.selection.counts = static_cast<int32_t*>(counts.data());
  args.selection.mask = static_cast<uint32_t*>(mask.data());
  args.selection.keep = static_cast<uint32_t*>(keep.data());
  args.stats = &result.stats;
  args.head_stats = result.heads.data();
  call(plan, args);
  for (const Guarded* guarded : {&out, &lse, &workspace, &labels, &sizes, &counts, &mask, &keep})
    EXPECT_TRUE(guarded->intact());
  result.out = out.values<float>();
  result.lse = lse.values<float>();
  result.labels = labels.values<int32_t>();
  result.sizes = sizes.values<int32_t>();
  result.counts = counts.values<int32_t>();
  result.mask = mask.values<uint32_t>();
  result.keep = keep.values<uint32_t>();
  return result;
}

// Attention of one query in float64 over the keys that `sees` admits.
template <class Sees>
std::vector<double> exact_row(const Inputs& in, int64_t b, int64_t h, int64_t i, const Sees& sees) {
  const float* q = in.q.data() + ((b * in.heads + h) * in.q_tokens + i) * in.dim;
  const float* k = in.k.data() + (b * in.heads + h) * in.k_tokens * in.dim;
  const float* v = in.v.data() + (b * in.heads + h) * in.k_tokens * in.dim;
  std::vector<double> out(static_cast<size_t>(in.dim), 0.0), logits;
  double high = -INFINITY, total = 0;
  for (int64_t j = 0; j < in.k_tokens; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < in.dim; ++c) sum += static_cast<double>(q[c]) * static_cast<double>(k[j * in.dim + c]);
    logits.push_back(sees(j) ? sum / std::sqrt(static_cast<double>(in.dim)) : -INFINITY);
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
                        const std::vector<double>& exact, double tolerance = 2e-5) {
  for (int64_t c = 0; c < in.dim; ++c) {
    const float got = result.out[static_cast<size_t>(((b * in.heads + h) * in.q_tokens + i) * in.dim + c)];
    ASSERT_NEAR(got, exact[static_cast<size_t>(c)], tolerance)
        << "sample " << b << " head " << h << " query " << i << " channel " << c;
  }
}

// Every output row must be the exact attention over what its selection row says.
inline void expect_consistent(const Inputs& in, const Plan& plan, const Result& result, const Extra& extra,
                              double tolerance = 2e-5) {
  const int64_t words = mask_words(in.k_tokens), groups = plan.selection_groups;
  for (int64_t b = 0; b < in.batch; ++b) {
    const int64_t valid_q = extra.q_lengths.empty() ? in.q_tokens : extra.q_lengths[static_cast<size_t>(b)];
    for (int64_t h = 0; h < in.heads; ++h) {
      const int64_t head = b * in.heads + h;
      const uint32_t* mask = result.mask.data() + head * groups * words;
      std::vector<int32_t> sizes(static_cast<size_t>(groups), 0);
      for (int64_t i = 0; i < in.q_tokens; ++i) {
        const int32_t label = result.labels[static_cast<size_t>(head * in.q_tokens + i)];
        ASSERT_EQ(label >= 0, i < valid_q);
        const auto sees = [&](int64_t j) {
          return label >= 0 && (mask_bit(mask + label * words, j) || mask_bit(result.keep.data() + b * words, j));
        };
        expect_rows(in, result, b, h, i, exact_row(in, b, h, i, sees), tolerance);
        if (label >= 0) ++sizes[static_cast<size_t>(label)];
      }
      for (int64_t c = 0; c < groups; ++c) {
        const size_t at = static_cast<size_t>(head * groups + c);
        ASSERT_EQ(result.sizes[at], sizes[static_cast<size_t>(c)]);
        int64_t bits = 0;
        for (int64_t j = 0; j < in.k_tokens; ++j) bits += mask_bit(mask + c * words, j) ? 1 : 0;
        ASSERT_EQ(result.counts[at], bits);
      }
    }
  }
}

}  // namespace scope::test
