// Counts the tokens of a sample by what its masks say of them.
#include "pipeline/tokens.h"

#include <bit>

namespace scope {

namespace {

// Word w of a mask of [0, n): all ones past a null one.
uint32_t word_of(const uint32_t* mask, int64_t w, int64_t n) {
  const int64_t left = n - 32 * w;
  const uint32_t inside = left >= 32 ? ~0u : left <= 0 ? 0u : ~(~0u << left);
  return (mask == nullptr ? ~0u : mask[w]) & inside;
}

struct Side {
  int64_t valid = 0, special = 0;           // special: always-kept keys, densely attending queries
  bool prefix_valid = true, prefix = true;  // of what is valid, and of what is valid and not special
  uint64_t hash = 14695981039346656037u;    // FNV-1a over the words of both
};

Side count(int64_t tokens, int64_t length, const uint32_t* valid, const uint32_t* special) {
  Side side;
  int64_t plain = 0;
  for (int64_t w = 0; w < mask_words(tokens); ++w) {
    const uint32_t here = word_of(valid, w, length), marked = special == nullptr ? 0u : here & special[w];
    const auto continues = [&](uint32_t bits, int64_t before) {
      return bits == 0 || (before == 32 * w && (bits & (bits + 1)) == 0);
    };
    side.prefix_valid = side.prefix_valid && continues(here, side.valid);
    side.prefix = side.prefix && continues(here & ~marked, plain);
    side.valid += std::popcount(here);
    side.special += std::popcount(marked);
    plain += std::popcount(here & ~marked);
    for (const uint32_t word : {here, marked}) side.hash = (side.hash ^ word) * 1099511628211u;
  }
  return side;
}

const uint32_t* of_sample(const uint32_t* masks, int64_t index, int64_t tokens) {
  return masks == nullptr ? nullptr : masks + index * mask_words(tokens);
}

}  // namespace

Sample describe_sample(const Shape& shape, const CallArgs& args, int64_t index) {
  const int64_t nq = shape.q_tokens, nk = shape.k_tokens;
  Sample s{.index = index,
           .masks = {.q_length = args.q_lengths == nullptr ? nq : args.q_lengths[index],
                     .k_length = args.k_lengths == nullptr ? nk : args.k_lengths[index],
                     .valid_q = of_sample(args.valid_queries, index, nq),
                     .valid_k = of_sample(args.valid_keys, index, nk),
                     .keep = of_sample(args.keep, index, nk),
                     .dense_queries = of_sample(args.dense_queries, index, nq)},
           .tokens = {}};
  const Side q = count(nq, s.masks.q_length, s.masks.valid_q, s.masks.dense_queries);
  const Side k = count(nk, s.masks.k_length, s.masks.valid_k, s.masks.keep);
  s.tokens = {.q_tokens = nq,
              .k_tokens = nk,
              .valid_q = q.valid,
              .valid_k = k.valid,
              .queries = q.valid - q.special,
              .keys = k.valid - k.special,
              .dense = q.special,
              .kept = k.special};
  s.prefix_q = q.prefix;
  s.prefix_k = k.prefix;
  s.prefix_valid = k.prefix_valid;
  s.hash = q.hash ^ (k.hash * 31);
  return s;
}

}  // namespace scope
