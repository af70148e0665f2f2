// Token lists, the rest of a selection and copies on the CPU.
#include "cpu/bookkeeping.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/numeric.h"

namespace scope::cpu {

void describe(const Exec&, const DescribeArgs& args) {
  const Tokens& t = args.tokens;
  const TokenMasks& masks = args.masks;
  const auto in = [](const uint32_t* mask, int64_t i) { return mask != nullptr && mask_bit(mask, i); };
  std::fill_n(args.valid, mask_words(t.k_tokens), 0u);
  std::fill_n(args.kept, mask_words(t.k_tokens), 0u);
  std::fill_n(args.queries, mask_words(t.q_tokens), 0u);
  int64_t keys = 0;
  for (int64_t j = 0; j < masks.k_length; ++j) {
    if (masks.valid_k != nullptr && !mask_bit(masks.valid_k, j)) continue;
    const bool kept = in(masks.keep, j);
    set_mask_bit(kept ? args.kept : args.valid, j);
    if (!kept) args.k_rows[keys++] = static_cast<int32_t>(j);
  }
  int64_t queries = 0, dense = t.queries, idle = t.valid_q;
  for (int64_t i = 0; i < t.q_tokens; ++i) {
    const bool valid = i < masks.q_length && (masks.valid_q == nullptr || mask_bit(masks.valid_q, i));
    if (valid) set_mask_bit(args.queries, i);
    args.q_rows[!valid ? idle++ : in(masks.dense_queries, i) ? dense++ : queries++] = static_cast<int32_t>(i);
  }
  args.offsets[0] = 0;
  args.offsets[1] = t.valid_q;
}

namespace {

void finish_head(const FinishArgs& args, int64_t h) {
  const Tokens& t = args.tokens;
  const int64_t words = mask_words(t.k_tokens), groups = args.groups, all = args.all_groups;
  int32_t* labels = args.labels + h * t.q_tokens;
  int32_t* sizes = args.sizes + h * args.row_groups;
  int32_t* counts = args.counts + h * args.row_groups;
  int32_t* order = args.order + h * t.q_tokens;
  int64_t* offsets = args.offsets + h * (args.row_groups + 1);
  uint32_t* mask = args.mask + h * args.row_groups * words;
  std::fill(sizes + groups, sizes + all, 0);
  std::fill(counts + groups, counts + all, 0);
  std::fill(mask + groups * words, mask + all * words, 0u);
  for (int64_t c = groups; c < all; ++c) offsets[c + 1] = offsets[groups];
  std::copy(args.q_rows + t.queries, args.q_rows + t.q_tokens, order + t.queries);
  if (t.dense > 0) {
    const int64_t last = all - 1;
    for (int64_t i = t.queries; i < t.valid_q; ++i) labels[order[i]] = static_cast<int32_t>(last);
    offsets[last + 1] = t.valid_q;
    sizes[last] = static_cast<int32_t>(t.dense);
    counts[last] = static_cast<int32_t>(t.keys);
    std::copy_n(args.valid, words, mask + last * words);
  }

  HeadStats& head = args.report[h];
  double pairs = 0, total = 0;
  head.min_count = t.keys;
  head.max_count = head.empty_groups = head.empty_codes = 0;
  for (int64_t c = 0; c < all; ++c) {
    const double size = sizes[c];
    total += size * static_cast<double>(counts[c] + t.kept);
    if (c >= groups) continue;
    if (sizes[c] == 0) {
      ++head.empty_groups;
      continue;
    }
    pairs += size * counts[c];
    head.min_count = std::min<int64_t>(head.min_count, counts[c]);
    head.max_count = std::max<int64_t>(head.max_count, counts[c]);
  }
  if (args.codes > 0) {
    const int64_t* empty = args.empty + h * args.subspaces;
    head.empty_codes = std::accumulate(empty, empty + args.subspaces, int64_t{0});
  }
  head.density = pairs / (static_cast<double>(t.queries) * static_cast<double>(t.keys));
  head.total_density = total / (static_cast<double>(t.valid_q) * static_cast<double>(t.valid_k));
  head.queries = t.queries;
  head.keys = t.keys;
  head.groups = groups;
  head.codes = args.codes;
}

}  // namespace

void finish(const Exec&, const FinishArgs& args) {
  for (int64_t h = 0; h < args.heads; ++h) {
    if (args.groups > 0) {
      finish_head(args, h);
    } else {
      args.report[h] = {.density = 1, .total_density = 1, .queries = args.tokens.queries, .keys = args.tokens.keys};
    }
  }
}

void import_selection(const Exec&, const ImportArgs& args) {
  const Tokens& t = args.tokens;
  const int64_t words = mask_words(t.k_tokens);
  const auto take = [&](const uint32_t* from, uint32_t* to) {
    for (int64_t w = 0; w < words; ++w) to[w] = from[w] & args.valid_keys[w];
  };
  std::fill_n(args.kept, words, 0u);
  if (args.keep != nullptr) take(args.keep, args.kept);
  for (int64_t h = 0; h < args.heads; ++h) {
    const int32_t* labels = args.labels + h * t.q_tokens;
    int32_t* order = args.order + h * t.q_tokens;
    int64_t* offsets = args.offsets + h * (args.row_groups + 1);
    const auto idle = [&](int64_t i) {
      return !mask_bit(args.valid_queries, i) || labels[i] < 0 || labels[i] >= args.groups;
    };
    std::fill_n(offsets, args.groups + 1, 0);
    for (int64_t i = 0; i < t.q_tokens; ++i) {
      if (!idle(i)) ++offsets[labels[i] + 1];
    }
    std::partial_sum(offsets, offsets + args.groups + 1, offsets);
    int64_t at_idle = offsets[args.groups];
    for (int64_t i = 0; i < t.q_tokens; ++i) order[idle(i) ? at_idle++ : offsets[labels[i]]++] = static_cast<int32_t>(i);
    std::copy_backward(offsets, offsets + args.groups, offsets + args.groups + 1);
    offsets[0] = 0;
    for (int64_t c = 0; c < args.groups; ++c) {
      take(args.selected + (h * args.groups + c) * words, args.mask + (h * args.row_groups + c) * words);
    }
  }
}

namespace {

// A state's label of a token that takes part. One from memory that the caller broke stays inside the arrays.
int32_t inside(int32_t label, int64_t clusters) { return std::clamp(label, 0, static_cast<int32_t>(clusters) - 1); }

void reuse_labels(const ReuseArgs& args, int64_t head) {
  const Tokens& t = args.tokens;
  int32_t* labels = args.labels[head];
  int32_t* order = args.order[head];
  int64_t* offsets = args.offsets[head];
  std::copy_n(args.state_labels[head], t.q_tokens, labels);
  std::fill_n(offsets, args.groups + 1, 0);
  const auto group_of = [&](int64_t i) { return inside(labels[args.q_rows[i]], args.groups); };
  for (int64_t i = 0; i < t.queries; ++i) ++offsets[group_of(i) + 1];
  std::copy_n(offsets + 1, args.groups, args.sizes[head]);
  std::partial_sum(offsets, offsets + args.groups + 1, offsets);
  for (int64_t i = 0; i < t.queries; ++i) order[offsets[group_of(i)]++] = args.q_rows[i];
  std::copy_backward(offsets, offsets + args.groups, offsets + args.groups + 1);
  offsets[0] = 0;
}

void reuse_codes(const ReuseArgs& args, int64_t head) {
  const Tokens& t = args.tokens;
  auto* sizes = Arena(args.scratch.data, args.scratch.bytes).take<int32_t>(args.codes);
  for (int64_t m = 0; m < args.subspaces; ++m) {
    const int32_t* by_token = args.state_codes[head] + m * t.k_tokens;
    int32_t* codes = args.code_labels[head] + m * t.keys;
    std::fill_n(sizes, args.codes, 0);
    for (int64_t j = 0; j < t.keys; ++j) {
      codes[j] = inside(by_token[args.k_rows[j]], args.codes);
      ++sizes[codes[j]];
    }
    args.empty[head][m] = std::count(sizes, sizes + args.codes, 0);
  }
}

}  // namespace

void reuse(const Exec&, const ReuseArgs& args) {
  for (int64_t h = 0; h < args.heads; ++h) {
    reuse_labels(args, h);
    reuse_codes(args, h);
  }
}

// A state begins at a multiple of 16, and a slot in it is read and written byte by byte.
void set_slot(const Exec&, StateSlot* slot, StateSlot value) { std::memcpy(slot, &value, sizeof value); }

void check_slot(const Exec&, const void* state, const void* header, const StateSlot* slot, StateSlot expected,
                uint32_t* status) {
  StateSlot found{};
  std::memcpy(&found, slot, sizeof found);
  if (std::memcmp(state, header, 64) != 0 || found != expected) *status |= kStateNotFilled;
}

void fill(const Exec&, void* to, int64_t step, uint32_t value, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) std::fill_n(static_cast<uint32_t*>(to) + i * step, count, value);
}

void copy(const Exec&, const void* from, int64_t from_step, void* to, int64_t to_step, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < rows && count > 0; ++i) {
    std::memcpy(static_cast<uint32_t*>(to) + i * to_step, static_cast<const uint32_t*>(from) + i * from_step,
                static_cast<size_t>(count) * 4);
  }
}

void round_to(const Exec&, DType type, const float* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = from[i];
    to[i] = type == DType::f32 ? x : type == DType::bf16 ? bf16_to_f32(f32_to_bf16(x)) : f16_to_f32(f32_to_f16(x));
  }
}

void convert(const Exec&, const void* from, DType from_type, void* to, DType to_type, int64_t count) {
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  for (int64_t i = 0; i < count; ++i) {  // states have no alignment beyond 16 bytes
    float value = 0;
    if (from_type == DType::f32) {
      std::memcpy(&value, source + 4 * i, 4);
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, source + 2 * i, 2);
      value = bf16_to_f32(bits);
    }
    if (to_type == DType::f32) {
      std::memcpy(target + 4 * i, &value, 4);
    } else {
      const uint16_t bits = f32_to_bf16(value);
      std::memcpy(target + 2 * i, &bits, 2);
    }
  }
}

void scatter(const Exec&, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
             int64_t to_step, int64_t heads) {
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t j = 0; j < count; ++j) to[h * to_step + (rows == nullptr ? j : rows[j])] = from[h * from_step + j];
  }
}

}  // namespace scope::cpu
