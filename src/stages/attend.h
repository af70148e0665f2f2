// attend: q, k, v and a selection -> out and log-sum-exp, with the original tokens.
#pragma once

#include "core/tensor.h"
#include "stages/exec.h"
#include "stages/tail.h"

namespace scope {

// What attend multiplies. bf16: the inputs as they are; qk8: queries and keys in 8 bits; qkv8: probabilities and values too.
enum class Products : int { bf16, qk8, qkv8 };

// 8-bit products: where a head has at least so many attending queries, or keys, channels are balanced by those whose token
// is a multiple of kBalanceEvery.
inline constexpr int64_t kBalanceSample = 4096, kBalanceEvery = 8;
// Channels of rounded queries and keys: zeros are appended, so that a Hadamard matrix can rotate them.
inline constexpr int64_t rotated_channels(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// softmax(scale q k^T + bias) v over the keys of mask OR keep. A query with no key gets zeros and LSE -inf.
// Dense attention is one group with a full row, and a null mask stands for it. A non-finite value reaches only the rows that
// read it.
struct AttendArgs {
  int64_t heads = 1;
  HeadsView q = {};          // [q_tokens, dim]
  HeadsView k = {}, v = {};  // [k_tokens, dim]
  float scale = 0;           // of a logit
  int64_t groups = 0;
  PerHead<const int32_t> order =
      {};  // [q_tokens] queries by group; those past offsets[groups] attend to nothing; null: 0, 1, …
  PerHead<const int64_t> offsets = {};  // [groups + 1]; null: one group of all q_tokens
  PerHead<const uint32_t> mask = {};    // [groups, mask_words(k_tokens)]; null: every key, and `keep` is not read
  const uint32_t* keep = nullptr;       // [mask_words(k_tokens)] keys that every query of every head sees; optional
  // [mask_words(k_tokens)] keys that are no padding, beside those of `keep`; null: all. 8-bit products are as coarse as the
  // widest of these and `keep`'s, so padding must not count.
  const uint32_t* valid = nullptr;
  Products products = Products::bf16;
  ExtraKeys extra = {};
  Mix mix = {};
  MutableHeadsView out = {};  // [q_tokens, dim]
  PerHead<float> lse = {};    // [q_tokens] natural log; optional
  Scratch scratch = {};
};

namespace cpu {
void attend(const Exec& exec, const AttendArgs& args);
int64_t attend_scratch(const Exec& exec, const Sizes& sizes);
}  // namespace cpu

}  // namespace scope
