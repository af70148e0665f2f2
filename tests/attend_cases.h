// Problems for attend, and runs of them between canaries.
#pragma once

#include <limits>

#include "cases.h"
#include "reference.h"
#include "stages/attend.h"
#include "stages/split.h"

namespace scope::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Queries, keys and a selection, with everything that AttendArgs points to.
struct Problem {
  Rows q, k, v;
  std::vector<int32_t> order;
  std::vector<int64_t> offsets{0};
  std::vector<uint32_t> mask, keep, extra_mask;
  std::vector<float> extra_k, extra_v, bias, mix_share, mix_row;
  std::vector<int32_t> mix_part;
  float follow = 0;
  float scale;

  Problem(Random& random, DType dtype, int64_t nq, int64_t nk, int64_t dim, double deviation = 1)
      : q(random, dtype, nq, dim, deviation),
        k(random, dtype, nk, dim, 1),
        v(random, dtype, nk, dim, 1),
        order(shuffled(random, nq)),
        scale(1 / std::sqrt(static_cast<float>(dim))) {}

  int64_t groups() const { return static_cast<int64_t>(offsets.size()) - 1; }
  void add_group(int64_t size) {
    offsets.push_back(offsets.back() + size);
    mask.resize(mask.size() + static_cast<size_t>(mask_words(k.view().tokens)));
  }
  void select(int64_t group, int64_t key) { set_mask_bit(mask.data() + group * mask_words(k.view().tokens), key); }
  void select_some(int64_t group, Random& random, double share) {
    for (int64_t j = 0; j < k.view().tokens; ++j) {
      if (random.chance(share)) select(group, j);
    }
  }
  void add_dense_group(int64_t size) {
    add_group(size);
    for (int64_t j = 0; j < k.view().tokens; ++j) select(groups() - 1, j);
  }
  void add_extra(Random& random, int64_t count) {
    for (int64_t i = 0; i < count * k.view().dim; ++i) {
      extra_k.push_back(static_cast<float>(random.normal()));
      extra_v.push_back(static_cast<float>(random.normal()));
    }
    for (int64_t i = 0; i < count; ++i) bias.push_back(random.chance(0.1) ? -kInf : static_cast<float>(random.normal() + 1));
    extra_mask.resize(static_cast<size_t>(groups() * mask_words(count)));
    for (int64_t i = 0; i < groups() * count; ++i) {
      if (random.chance(0.5)) set_mask_bit(extra_mask.data() + i / count * mask_words(count), i % count);
    }
  }
  void add_mix(Random& random) {
    for (int64_t c = 0; c < groups(); ++c) {
      mix_share.push_back(random.chance(0.3) ? 0.0f : static_cast<float>(0.99 * random.uniform()));
      for (int64_t i = 0; i < k.view().dim; ++i) mix_row.push_back(static_cast<float>(random.normal()));
    }
  }
  // Rows of parts, and how much of the difference from a bundle's mean goes with them.
  void add_parts(Random& random) {
    add_mix(random);
    mix_row.clear();
    for (int64_t i = 0; i < kMostParts * k.view().dim; ++i) mix_row.push_back(static_cast<float>(random.normal()));
    for (int64_t t = 0; t < q.view().tokens; ++t) mix_part.push_back(static_cast<int32_t>(random.below(kMostParts)));
    follow = random.pick<float>({0, 0.3f, 1});
  }
  AttendArgs args() const {
    AttendArgs args;
    args.q = q.view(), args.k = k.view(), args.v = v.view();
    args.scale = scale;
    args.groups = groups();
    args.order = order.data(), args.offsets = offsets.data();
    args.mask = mask.data(), args.keep = keep.empty() ? nullptr : keep.data();
    args.extra = {static_cast<int64_t>(bias.size()), extra_k.data(), extra_v.data(), bias.data(), extra_mask.data()};
    if (!mix_share.empty()) args.mix = {.share = mix_share.data(), .row = mix_row.data(), .part = {}, .follow = follow};
    if (!mix_part.empty()) args.mix.part = mix_part.data();
    return args;
  }
};

// Output, log-sum-exp and scratch between canaries, poisoned before the call.
struct Output {
  DType dtype;
  int64_t dim, stride;
  Guarded<std::byte> out;
  Guarded<float> lse;
  GuardedScratch scratch;
  AttendArgs args;

  Output(const Exec& exec, const AttendArgs& problem, uint8_t poison = 0xff, int64_t padding = 0)
      : dtype(problem.q.dtype),
        dim(problem.q.dim),
        stride(dim + padding),
        out(problem.q.tokens * stride * dtype_bytes(dtype), poison, padding * dtype_bytes(dtype)),
        lse(problem.q.tokens, poison),
        scratch(backend().attend_scratch(exec, sizes_of(problem)), poison),
        args(problem) {
    args.out = MutableRowsView{out.data(), dtype, args.q.tokens, dim, stride};
    args.lse = lse.data();
    args.scratch = scratch_of(scratch);
  }
  double at(int64_t token, int64_t channel) const {
    return reference::element({out.data(), dtype, lse.size(), dim, stride}, token, channel);
  }
  std::vector<uint8_t> all() const { return joined_bytes(out, lse); }
};

struct Result : Output {
  Result(const Exec& exec, const AttendArgs& problem, uint8_t poison = 0xff, int64_t padding = 0)
      : Output(exec, problem, poison, padding) {
    run_attend(exec, {&args, 1});
    for (int64_t t = 0; t < args.q.tokens; ++t) {
      const std::byte *end = args.out[0].row(t) + dim * dtype_bytes(dtype),
                      *next = args.out[0].row(t) + stride * dtype_bytes(dtype);
      EXPECT_EQ(std::count(end, next, std::byte{poison}), next - end) << "padding after row " << t << " was written";
    }
  }
};

}  // namespace scope::test
