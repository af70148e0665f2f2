// The half of select on the CPU that keeps whole codes, for the other, which keeps keys; and what both do alike.
#pragma once

#include <algorithm>

#include "core/numeric.h"
#include "stages/choices.h"

namespace scope::cpu {

void weigh_codes(const Exec& exec, const WeighArgs& args, int64_t head);
void keep_codes(const Exec& exec, const KeepArgs& args, int64_t head);
double solve_codes(const Exec& exec, const SolveArgs& args);
int64_t code_weights_bytes(int64_t count, int64_t groups, int64_t codes);  // of one head
int64_t weigh_codes_scratch(const Exec& exec, int64_t groups, int64_t codes);

// Pairs of queries and kept keys, and queries: integers that a double holds.
struct Kept {
  double pairs = 0, queries = 0;
};
inline double density_of(const Kept& kept, int64_t keys) { return kept.pairs / kept.queries / static_cast<double>(keys); }

// What the heads of a sample keep together: each by itself on any thread, then summed in their order.
class SampleKept {
 public:
  explicit SampleKept(const SolveArgs& args)
      : heads_(args.weighed.heads),
        keys_(sampled_keys(args.weighed)),
        each_(Arena(args.scratch.data, args.scratch.bytes).take<Kept>(heads_)) {}
  static int64_t bytes(int64_t heads) { return heads * static_cast<int64_t>(sizeof(Kept)); }

  // kept_by(head): one head's.
  template <class KeptBy>
  double density(const Exec& exec, const KeptBy& kept_by) const {
    exec.pool->run(heads_, [&](int64_t head, int) { each_[head] = kept_by(head); });
    Kept all;
    for (int64_t h = 0; h < heads_; ++h) {
      all.pairs += each_[h].pairs;
      all.queries += each_[h].queries;
    }
    return density_of(all, keys_);
  }

 private:
  int64_t heads_, keys_;
  Kept* each_;
};

// Where one head's weights lie, `bytes` of them.
inline Arena weights_of(const WeighArgs& args, int64_t head, int64_t bytes) {
  const int64_t begin = head * round_up(bytes, Arena::kAlignment);
  return {static_cast<std::byte*>(args.weights.data) + begin, args.weights.bytes - begin};
}

}  // namespace scope::cpu
