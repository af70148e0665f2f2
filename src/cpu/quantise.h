// What 8-bit products in attend read: a head's keys in bytes, and the factors that make bytes of its queries.
#pragma once

#include "cpu/kernels.h"
#include "stages/attend.h"

namespace scope::cpu {

// A head's scratch.
class Quantiser {
 public:
  Quantiser(Arena& arena, int64_t k_tokens, int64_t extra, int64_t dim);
  // False: the head holds what is not finite, has factors that are not, or has something in a channel where the sample that
  // balances it has nothing, and needs 16 bits.
  bool run(const Exec& exec, const AttendArgs& args, int64_t head) const;

  const ByteFactors& factors() const { return *factors_; }
  // Rows of args.k or args.extra.k, four bytes to a word, as if these were floats: for those who move words.
  RowsView keys(const AttendArgs& args) const { return words(bytes_, args.k.tokens); }
  RowsView extra(const AttendArgs& args) const { return words(bytes_ + args.k.tokens * pitch_, args.extra.count); }

 private:
  struct Part;

  RowsView words(const uint8_t* first, int64_t rows) const;
  // By a sample of the queries, where it is not null, and by keys or a sample of these.
  bool choose_factors(const Part* sample, const Part& all_q, const Part& k, bool sampled_k) const;

  int64_t dim_, pitch_;
  uint8_t* bytes_;   // [k_tokens + extra, pitch]
  uint16_t* extra_;  // [extra, dim] bf16
  Part* parts_;      // [3 kParts + 1]: of the queries, of their sample, of the keys or their sample, and of the virtual ones
  float* reach_;     // [kParts + 1] of rotated keys, and of the virtual ones
  ByteFactors* factors_;
};

}  // namespace scope::cpu
