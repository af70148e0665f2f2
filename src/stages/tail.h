// tail: what stands for the keys that a group drops, as attend takes it.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/score.h"

namespace scope {

// docs/reference/algorithm.md, "Tails". first_order: one virtual key per group; centroids: one per whole cluster that a
// group drops; mean: a mean value per group; means: one for each part of a group.
enum class Tail { none, first_order, centroids, mean, means };

// Virtual keys beside the real ones; group c sees those in its row of `mask`.
struct ExtraKeys {
  int64_t count = 0;                  // of each head; at most Sizes::extra
  PerHead<const float> k = {};        // [count, dim]
  PerHead<const float> v = {};        // [count, dim]
  PerHead<const float> bias = {};     // [count] added to the scaled logit
  PerHead<const uint32_t> mask = {};  // [groups, mask_words(count)]
};

// Queries that follow one another in a group's order, from its first on: a bundle. The last may have fewer.
inline constexpr int64_t kBundle = 16;

// A row that every query mixes in, that of its group or of its part of it:
//   out = (1 - share) out + share (row + follow (out - the mean of out over its bundle))
// and the log-sum-exp grows by -log(1 - share). A query whose sum of weights is 0 or not finite is in no mean, and
// follows none.
struct Mix {
  PerHead<const float> share = {};   // [groups] in [0, 1); null: nothing is mixed in
  PerHead<const float> row = {};     // [groups or rows, dim]
  PerHead<const int32_t> part = {};  // [q_tokens] the row of each query in a group; null: its group's
  float follow = 0;                  // in [0, 1]
};

// Of tail means: part u of group c is row c * each + u of these, and of TailArgs::value.
struct Parts {
  int64_t each = 0;                     // of a group
  PerHead<const float> centroids = {};  // [groups * each, dim] whose elements are numbers of k's type
  PerHead<const int32_t> sizes = {};    // [groups * each] queries
  int64_t stride = 1, phase = 0;        // the keys at positions phase mod stride, + stride, ... are weighed
  PerHead<const float> log_mass = {};   // [groups] as keep left it, and TailArgs::share too; null: both are made here
};

// After keep. Which arrays a tail fills, and which it finds filled, is said beside each.
struct TailArgs {
  int64_t heads = 1;
  Tail tail = Tail::none;
  Proxy proxy = {};                   // with centroids and k
  HeadsView v = {};                   // [tokens, dim]
  PerHead<const int32_t> sizes = {};  // [groups] queries per group
  PerHead<const uint32_t> kept = {};  // [groups, mask_words(tokens)]
  double weight = 0;                  // mean, means: of the dropped share, [0, 1]
  const uint32_t* keep = nullptr;     // [mask_words(tokens)] mean: keys that every query sees beside them; optional
  bool centred = false;               // mean: codes stand for k minus the mean of the keys that take part
  int64_t rows = 0;                   // of `mask`: groups, or one more for densely attending queries, which see none
  // The virtual keys: [groups, dim], [groups, dim], [groups] under first_order; under centroids value and bias are those of
  // compensate, and k is the codebook: in.
  PerHead<float> k = {}, value = {}, bias = {};
  PerHead<uint32_t> mask = {};  // [rows, mask_words(groups or codes)] out
  PerHead<float> share = {};    // [rows] out under mean and means, which mix in `value`: [groups, dim], or of parts
  Parts parts = {};             // means only
  Scratch scratch = {};
};

namespace cpu {
void tail(const Exec& exec, const TailArgs& args);
int64_t tail_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
