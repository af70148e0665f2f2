// What happens around the stages, judged by its contract: token lists, whole selections, reports and copies.
#include <limits>

#include "cases.h"
#include "reference.h"
#include "stages/bookkeeping.h"

namespace scope::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Bits of some tokens, at random.
std::vector<uint32_t> random_bits(Random& random, int64_t tokens, double share) {
  std::vector<uint32_t> bits(static_cast<size_t>(mask_words(tokens)));
  for (int64_t t = 0; t < tokens; ++t) {
    if (random.chance(share)) set_mask_bit(bits.data(), t);
  }
  return bits;
}

// A sample with padding at the end and in between, always-kept keys and densely attending queries, and the lists that
// describe must make of it. Masks say of padding, too, that it is kept or dense.
struct Sample {
  Tokens tokens;
  int64_t q_length, k_length;
  std::vector<uint32_t> valid_q, valid_k, keep, dense_queries;  // as the host says; empty: no mask
  std::vector<int32_t> q_rows, k_rows;
  std::vector<uint32_t> valid, kept, queries;

  Sample(Random& random, int64_t q_tokens, int64_t k_tokens) {
    const auto mask = [&](int64_t n, std::vector<double> shares) {
      const double share = random.pick(shares);
      return share < 0 ? std::vector<uint32_t>() : random_bits(random, n, share);
    };
    keep = mask(k_tokens, {-1, -1, 0.1, 1});
    dense_queries = mask(q_tokens, {-1, -1, 0.1, 1});
    valid_q = mask(q_tokens, {-1, -1, -1, 0.9, 0.9, 0.5, 0.5, 0});
    valid_k = mask(k_tokens, {-1, -1, -1, 0.9, 0.9, 0.5, 0.5, 0});
    q_length = random.chance(0.5) ? q_tokens : random.between(0, q_tokens);
    k_length = random.chance(0.5) ? k_tokens : random.between(0, k_tokens);
    const auto has = [](const std::vector<uint32_t>& bits, int64_t t, bool otherwise) {
      return bits.empty() ? otherwise : mask_bit(bits.data(), t);
    };
    valid.resize(static_cast<size_t>(mask_words(k_tokens)));
    kept = valid;
    queries.resize(static_cast<size_t>(mask_words(q_tokens)));
    for (int64_t j = 0; j < k_length; ++j) {
      if (!has(valid_k, j, true)) continue;
      const bool keeps_it = has(keep, j, false);
      set_mask_bit(keeps_it ? kept.data() : valid.data(), j);
      if (!keeps_it) k_rows.push_back(static_cast<int32_t>(j));
      ++tokens.valid_k;
    }
    std::vector<int32_t> dense, padding;
    for (int64_t i = 0; i < q_tokens; ++i) {
      const bool is_valid = i < q_length && has(valid_q, i, true);
      if (is_valid) set_mask_bit(queries.data(), i);
      tokens.valid_q += is_valid ? 1 : 0;
      (!is_valid ? padding : has(dense_queries, i, false) ? dense : q_rows).push_back(static_cast<int32_t>(i));
    }
    tokens.q_tokens = q_tokens, tokens.k_tokens = k_tokens;
    tokens.queries = static_cast<int64_t>(q_rows.size()), tokens.dense = static_cast<int64_t>(dense.size());
    tokens.keys = static_cast<int64_t>(k_rows.size()), tokens.kept = tokens.valid_k - tokens.keys;
    q_rows.insert(q_rows.end(), dense.begin(), dense.end());
    q_rows.insert(q_rows.end(), padding.begin(), padding.end());
  }
  TokenMasks masks() const {
    const auto pointer = [](const std::vector<uint32_t>& bits) { return bits.empty() ? nullptr : bits.data(); };
    return {.q_length = q_length,
            .k_length = k_length,
            .valid_q = pointer(valid_q),
            .valid_k = pointer(valid_k),
            .keep = pointer(keep),
            .dense_queries = pointer(dense_queries)};
  }
  // All valid keys, whether they take part or are always kept.
  std::vector<uint32_t> valid_keys() const {
    std::vector<uint32_t> bits = valid;
    for (size_t w = 0; w < bits.size(); ++w) bits[w] |= kept[w];
    return bits;
  }
};

template <class T>
void expect_values(const Guarded<T>& got, const std::vector<T>& want, const char* what) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(want.size()));
  for (int64_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[static_cast<size_t>(i)]) << what << "[" << i << "]";
}

void expect_described(const Exec& exec, const Sample& sample, uint8_t poison) {
  const Tokens& t = sample.tokens;
  Guarded<int32_t> q_rows(t.q_tokens, poison), k_rows(t.keys, poison);
  Guarded<uint32_t> valid(mask_words(t.k_tokens), poison), kept(mask_words(t.k_tokens), poison);
  Guarded<uint32_t> queries(mask_words(t.q_tokens), poison);
  Guarded<int64_t> offsets(2, poison);
  run_describe(exec, {.tokens = t,
                      .masks = sample.masks(),
                      .q_rows = q_rows.data(),
                      .k_rows = k_rows.data(),
                      .valid = valid.data(),
                      .kept = kept.data(),
                      .queries = queries.data(),
                      .offsets = offsets.data()});
  expect_values(q_rows, sample.q_rows, "q_rows");
  expect_values(k_rows, sample.k_rows, "k_rows");
  expect_values(valid, sample.valid, "valid");
  expect_values(kept, sample.kept, "kept");
  expect_values(queries, sample.queries, "queries");
  expect_values(offsets, {0, t.valid_q}, "offsets");
}

TEST(Bookkeeping, Describe) {
  each_case("describe", 1000, [](Case& at) {
    const Sample sample(at.random, at.tokens, at.random.pick(limits().sizes));
    expect_described(at.exec, sample, at.poison);
  });
}

// Masks that pass the 32 KB of a kernel's parameters.
TEST(Bookkeeping, DescribeManyTokens) {
  each_machine([](const Exec& exec) {
    Random random(1);
    for (const int64_t n : {75'600, 131'072, 300'001}) {
      for (int i = 0; i < 4; ++i) expect_described(exec, Sample(random, n, n + 33), 0xff);
    }
  });
}

TEST(Bookkeeping, Finish) {
  each_case("finish", 1000, [](Case& at) {
    Random& random = at.random;
    Sample sample(random, at.tokens, random.pick(limits().sizes));
    const Tokens& t = sample.tokens;
    if (t.queries == 0 || t.keys == 0) return;  // such a sample runs dense
    const int64_t heads = random.between(1, 3), groups = random.between(1, std::min<int64_t>(40, t.queries));
    const int64_t all = groups + random.below(3) + (t.dense > 0 ? 1 : 0), row_groups = all + random.below(3);
    const int64_t words = mask_words(t.k_tokens), subspaces = random.between(1, 4), codes = random.chance(0.5) ? 7 : 0;
    Guarded<int32_t> labels(heads * t.q_tokens, at.poison), order(heads * t.q_tokens, at.poison);
    Guarded<int32_t> sizes(heads * row_groups, at.poison), counts(heads * row_groups, at.poison);
    Guarded<int64_t> offsets(heads * (row_groups + 1), at.poison), empty(heads * subspaces, at.poison);
    Guarded<uint32_t> mask(heads * row_groups * words, at.poison);
    Guarded<HeadStats> report(heads, at.poison);
    for (int64_t h = 0; h < heads; ++h) {
      report[h] = {.rho = 0.5, .alpha = 0.25, .head_budget = 17 + h};
      int64_t place = 0;
      std::fill_n(labels.data() + h * t.q_tokens, t.q_tokens, -1);
      offsets[h * (row_groups + 1)] = 0;
      for (int64_t c = 0; c < groups; ++c) {
        const int64_t size = c + 1 == groups ? t.queries - place : random.between(0, t.queries - place);
        for (int64_t i = 0; i < size; ++i, ++place) {
          order[h * t.q_tokens + place] = sample.q_rows[static_cast<size_t>(place)];
          labels[h * t.q_tokens + sample.q_rows[static_cast<size_t>(place)]] = static_cast<int32_t>(c);
        }
        offsets[h * (row_groups + 1) + c + 1] = place;
        sizes[h * row_groups + c] = static_cast<int32_t>(size);
        counts[h * row_groups + c] = size == 0 ? 0 : static_cast<int32_t>(random.between(1, t.keys));
        for (int64_t w = 0; w < words; ++w)
          mask[(h * row_groups + c) * words + w] = static_cast<uint32_t>(random.below(1 << 20));
      }
      for (int64_t m = 0; m < subspaces; ++m) empty[h * subspaces + m] = random.below(7);
    }
    const auto labels_before = labels.bytes(), mask_before = mask.bytes(), order_before = order.bytes();
    run_finish(at.exec, {.tokens = t,
                         .heads = heads,
                         .groups = groups,
                         .all_groups = all,
                         .row_groups = row_groups,
                         .subspaces = subspaces,
                         .codes = codes,
                         .q_rows = sample.q_rows.data(),
                         .valid = sample.valid.data(),
                         .labels = labels.data(),
                         .sizes = sizes.data(),
                         .counts = counts.data(),
                         .order = order.data(),
                         .offsets = offsets.data(),
                         .mask = mask.data(),
                         .empty = empty.data(),
                         .report = report.data()});
    for (int64_t h = 0; h < heads; ++h) {
      SCOPED_TRACE(fmt::format("head {} of {}, {} groups of {} of {}", h, heads, groups, all, row_groups));
      const int64_t row = h * row_groups;
      int64_t pairs = 0, total = 0, empty_groups = 0, empty_codes = 0, least = t.keys, most = 0;
      for (int64_t c = 0; c < all; ++c) {
        const bool dense = t.dense > 0 && c == all - 1;
        if (c >= groups) {
          ASSERT_EQ(sizes[row + c], dense ? t.dense : 0);
          ASSERT_EQ(counts[row + c], dense ? t.keys : 0);
          ASSERT_EQ(offsets[row + h + c + 1], t.queries + (dense ? t.dense : 0));
          for (int64_t w = 0; w < words; ++w) {
            ASSERT_EQ(mask[(row + c) * words + w], dense ? sample.valid[static_cast<size_t>(w)] : 0);
          }
        }
        total += sizes[row + c] * (counts[row + c] + t.kept);
        if (c < groups && sizes[row + c] == 0) ++empty_groups;
        if (c >= groups || sizes[row + c] == 0) continue;
        pairs += sizes[row + c] * counts[row + c];
        least = std::min<int64_t>(least, counts[row + c]), most = std::max<int64_t>(most, counts[row + c]);
      }
      for (int64_t i = 0; i < t.q_tokens; ++i) {
        const int32_t token = sample.q_rows[static_cast<size_t>(i)];
        ASSERT_EQ(order[h * t.q_tokens + i], token);
        const bool dense = i >= t.queries && i < t.valid_q;
        int32_t before = 0;
        std::memcpy(&before, labels_before.data() + 4 * (h * t.q_tokens + token), 4);
        ASSERT_EQ(labels[h * t.q_tokens + token], dense ? all - 1 : before) << "token " << token;
      }
      for (int64_t m = 0; m < subspaces && codes > 0; ++m) empty_codes += empty[h * subspaces + m];
      const HeadStats& got = report[h];
      ASSERT_EQ(got.head_budget, 17 + h);
      ASSERT_TRUE(got.rho == 0.5 && got.alpha == 0.25);
      ASSERT_DOUBLE_EQ(got.density, static_cast<double>(pairs) / static_cast<double>(t.queries * t.keys));
      ASSERT_DOUBLE_EQ(got.total_density, static_cast<double>(total) / static_cast<double>(t.valid_q * t.valid_k));
      ASSERT_EQ(got.queries, t.queries);
      ASSERT_EQ(got.keys, t.keys);
      ASSERT_EQ(got.groups, groups);
      ASSERT_EQ(got.codes, codes);
      ASSERT_EQ(got.empty_groups, empty_groups);
      ASSERT_EQ(got.empty_codes, empty_codes);
      ASSERT_EQ(got.min_count, least);
      ASSERT_EQ(got.max_count, most);
      for (int64_t c = 0; c < groups; ++c) {
        const auto at_row = static_cast<size_t>(4 * (row + c) * words);
        ASSERT_EQ(std::memcmp(mask.data() + (row + c) * words, mask_before.data() + at_row, static_cast<size_t>(4 * words)),
                  0);
      }
    }
  });
}

TEST(Bookkeeping, FinishOfADenseCallOnlyReports) {
  each_machine([](const Exec& exec) {
    Guarded<HeadStats> report(5);
    run_finish(exec, {.tokens = {.queries = 7, .keys = 9}, .heads = 5, .report = report.data()});
    for (int64_t h = 0; h < 5; ++h) {
      EXPECT_TRUE(report[h].density == 1 && report[h].total_density == 1 && report[h].rho == 0);
      EXPECT_TRUE(report[h].queries == 7 && report[h].keys == 9 && report[h].groups == 0 && report[h].max_count == 0);
    }
  });
}

TEST(Bookkeeping, ImportSelection) {
  each_case("import", 1000, [](Case& at) {
    Random& random = at.random;
    const int64_t heads = random.between(1, 3), groups = random.between(1, 40), row_groups = groups + random.below(3);
    const Sample sample(random, at.tokens, random.pick(limits().sizes));
    const Tokens& t = sample.tokens;
    const int64_t words = mask_words(t.k_tokens);
    std::vector<int32_t> labels;
    for (int64_t i = 0; i < heads * t.q_tokens; ++i) {
      labels.push_back(static_cast<int32_t>(random.chance(0.1) ? random.pick<int64_t>({-1, groups, INT32_MIN, INT32_MAX})
                                                               : random.below(groups)));
    }
    std::vector<uint32_t> selected;
    for (int64_t i = 0; i < heads * groups * words; ++i)
      selected.push_back(static_cast<uint32_t>(random.below(int64_t{1} << 32)));
    Guarded<int32_t> order(heads * t.q_tokens, at.poison);
    Guarded<int64_t> offsets(heads * (row_groups + 1), at.poison);
    Guarded<uint32_t> mask(heads * row_groups * words, at.poison), kept(words, at.poison);
    const bool with_keep = random.chance(0.5);
    const auto keep = random_bits(random, t.k_tokens, 0.2), valid_keys = sample.valid_keys();
    run_import(at.exec, {.tokens = t,
                         .valid_keys = valid_keys.data(),
                         .valid_queries = sample.queries.data(),
                         .heads = heads,
                         .groups = groups,
                         .row_groups = row_groups,
                         .labels = labels.data(),
                         .selected = selected.data(),
                         .keep = with_keep ? keep.data() : nullptr,
                         .order = order.data(),
                         .offsets = offsets.data(),
                         .mask = mask.data(),
                         .kept = kept.data()});
    for (int64_t j = 0; j < 32 * words; ++j) {
      const bool valid = mask_bit(valid_keys.data(), j);
      ASSERT_EQ(mask_bit(kept.data(), j), valid && with_keep && mask_bit(keep.data(), j)) << "key " << j;
      for (int64_t i = 0; i < heads * groups; ++i) {
        ASSERT_EQ(mask_bit(mask.data() + (i / groups * row_groups + i % groups) * words, j),
                  valid && mask_bit(selected.data() + i * words, j));
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<int32_t> want;
      for (int64_t c = 0; c <= groups; ++c) {  // and then those that belong to none
        ASSERT_EQ(offsets[h * (row_groups + 1) + c], static_cast<int64_t>(want.size()));
        for (int64_t i = 0; i < t.q_tokens; ++i) {
          const int64_t label = labels[static_cast<size_t>(h * t.q_tokens + i)];
          const bool idle = !mask_bit(sample.queries.data(), i) || label < 0 || label >= groups;
          if (c == groups ? idle : !idle && label == c) want.push_back(static_cast<int32_t>(i));
        }
      }
      ASSERT_EQ(want, std::vector<int32_t>(order.data() + h * t.q_tokens, order.data() + (h + 1) * t.q_tokens));
    }
  });
}

// Outputs and scratch between canaries, poisoned before the call.
struct Reused {
  Guarded<int32_t> labels, sizes, order, codes;
  Guarded<int64_t> offsets, empty;
  GuardedScratch scratch;
  ReuseArgs args;

  Reused(const Exec&, const ReuseArgs& problem, uint8_t poison = 0xff)
      : labels(problem.tokens.q_tokens, poison),
        sizes(problem.groups, poison),
        order(problem.tokens.queries, poison),
        codes(problem.subspaces * problem.tokens.keys, poison),
        offsets(problem.groups + 1, poison),
        empty(problem.subspaces, poison),
        scratch(4 * problem.codes, poison),
        args(problem) {
    args.labels = labels.data();
    args.sizes = sizes.data();
    args.order = order.data();
    args.offsets = offsets.data();
    args.code_labels = codes.data();
    args.empty = empty.data();
    args.scratch = scratch_of(scratch);
  }
  std::vector<uint8_t> all() const { return joined_bytes(labels, sizes, order, codes, offsets, empty); }
};

// What group and encode make of one head's tokens, and a state's memory of it.
struct Clustered {
  Rows q, k;
  Partition partition;
  Guarded<float> centroids, codebooks;
  Guarded<int32_t> labels, sizes, order, codes;
  Guarded<int64_t> offsets, empty;
  std::vector<int32_t> state_codes;
  ReuseArgs args;

  Clustered(Random& random, const Exec& exec, DType dtype, const Sample& sample, int64_t groups, int64_t code_count,
            int64_t subspaces)
      : q(random, dtype, sample.tokens.q_tokens, 16, 1),
        k(random, dtype, sample.tokens.k_tokens, 16, 1),
        partition(static_cast<size_t>(subspaces)),
        centroids(groups * 16),
        codebooks(code_count * 16),
        labels(sample.tokens.q_tokens),
        sizes(groups),
        order(sample.tokens.queries),
        codes(subspaces * sample.tokens.keys),
        offsets(groups + 1),
        empty(subspaces) {
    const Tokens& t = sample.tokens;
    if (random.chance(0.3)) {  // few distinct tokens: empty groups and codes
      for (int64_t i = 2; i < t.q_tokens; ++i) q.copy_row(i, i % 2);
      for (int64_t j = 2; j < t.k_tokens; ++j) k.copy_row(j, j % 2);
    }
    GroupArgs group;
    group.q = q.view();
    group.rows = sample.q_rows.data();
    group.count = group.sample = t.queries;
    group.groups = groups;
    group.iterations = 2;
    group.centroids = centroids.data();
    group.labels = labels.data();
    group.sizes = sizes.data();
    group.order = order.data();
    group.offsets = offsets.data();
    GuardedScratch group_scratch(backend().group_scratch(exec, sizes_of(group)));
    group.scratch = scratch_of(group_scratch);
    run_group(exec, {&group, 1});
    args.tokens = t;
    args.groups = groups;
    args.codes = code_count;
    args.subspaces = subspaces;
    args.q_rows = sample.q_rows.data();
    args.k_rows = sample.k_rows.data();
    args.state_labels = labels.data();
    if (subspaces == 0) return;
    for (int32_t c = 0; c < 16; ++c) partition[static_cast<size_t>(c % subspaces)].push_back(c);
    EncodeArgs encode;
    encode.k = k.view();
    encode.rows = sample.k_rows.data();
    encode.count = encode.sample = t.keys;
    encode.partition = &partition;
    encode.codes = code_count;
    encode.iterations = 2;
    encode.codebooks = codebooks.data();
    encode.labels = codes.data();
    encode.empty = empty.data();
    GuardedScratch encode_scratch(backend().encode_scratch(exec, sizes_of(encode)));
    encode.scratch = scratch_of(encode_scratch);
    run_encode(exec, {&encode, 1});
    state_codes.assign(static_cast<size_t>(subspaces * t.k_tokens), -1);
    for (int64_t i = 0; i < subspaces * t.keys; ++i) {
      const int64_t m = i / t.keys, token = sample.k_rows[static_cast<size_t>(i % t.keys)];
      state_codes[static_cast<size_t>(m * t.k_tokens + token)] = codes[i];
    }
    args.state_codes = state_codes.data();
  }
  std::vector<uint8_t> all() const { return joined_bytes(labels, sizes, order, codes, offsets, empty); }
};

// A state's labels and codes give back what group and encode wrote, bit for bit, for a chunk of heads as for one.
TEST(Bookkeeping, ReuseGivesWhatGroupAndEncodeGave) {
  each_case("reuse", 400, [](Case& at) {
    Random& random = at.random;
    const Sample sample(random, at.tokens, random.pick(limits().sizes));
    const Tokens& t = sample.tokens;
    if (t.queries == 0 || t.keys == 0) return;  // such a sample runs dense
    const int64_t groups = std::min(t.queries, random.pick<int64_t>({1, 3, 40}));
    const bool encoded = random.chance(0.8);  // the exact proxy has no codes
    const int64_t codes = encoded ? std::min(t.keys, random.pick<int64_t>({1, 5, 70})) : 0;
    const int64_t subspaces = encoded ? random.between(1, 4) : 0;
    std::vector<std::unique_ptr<Clustered>> heads;
    std::vector<std::unique_ptr<Reused>> ours;
    std::vector<ReuseArgs> args;
    for (int64_t h = random.between(1, 3); h > 0; --h) {
      heads.push_back(std::make_unique<Clustered>(random, at.exec, at.dtype, sample, groups, codes, subspaces));
      ours.push_back(std::make_unique<Reused>(at.exec, heads.back()->args, at.poison));
      args.push_back(ours.back()->args);
    }
    run_reuse(at.exec, args);
    for (size_t h = 0; h < heads.size(); ++h) {
      SCOPED_TRACE(fmt::format("head {} of {}", h, heads.size()));
      expect_values(ours[h]->labels, heads[h]->labels.values(), "labels");
      expect_values(ours[h]->sizes, heads[h]->sizes.values(), "sizes");
      expect_values(ours[h]->order, heads[h]->order.values(), "order");
      expect_values(ours[h]->offsets, heads[h]->offsets.values(), "offsets");
      expect_values(ours[h]->codes, heads[h]->codes.values(), "codes");
      expect_values(ours[h]->empty, heads[h]->empty.values(), "empty");
    }
  });
}

TEST(Bookkeeping, ReuseOfManyTokens) {
  each_machine([](const Exec& exec) {
    Random random(3);
    Sample sample(random, 20'000, 17'001);
    while (sample.tokens.queries < 1000 || sample.tokens.keys < 1000) sample = Sample(random, 20'000, 17'001);
    const Clustered head(random, exec, DType::bf16, sample, 300, 333, 3);
    Reused ours(exec, head.args);
    run_reuse(exec, {&ours.args, 1});
    EXPECT_TRUE(ours.all() == head.all());
  });
}

TEST(Bookkeeping, SlotsAreSetAndChecked) {
  each_machine([](const Exec& exec) {
    constexpr int64_t kSlot = 64 + 16;  // the second one
    std::vector<std::byte> header(64), state(64 + 3 * 16);
    for (size_t i = 0; i < 64; ++i) header[i] = state[i] = static_cast<std::byte>(3 * i + 1);
    const StateSlot value{.groups = 12, .codes = 345, .tokens = 0x123456789abcdef0};
    Guarded<StateSlot> slot(1);
    run_set_slot(exec, slot.data(), value);
    EXPECT_TRUE(slot[0] == value);
    std::memcpy(state.data() + kSlot, slot.data(), sizeof value);
    const auto status_of = [&](const std::vector<std::byte>& start, const StateSlot& expected) {
      Guarded<uint32_t> status(1);
      status[0] = 4;  // what is there already stays
      run_check_slot(exec, state.data(), static_cast<int64_t>(state.size()), start.data(), kSlot, expected, status.data());
      return status[0];
    };
    EXPECT_EQ(status_of(header, value), 4u);
    for (const StateSlot& other :
         {StateSlot{13, 345, value.tokens}, StateSlot{12, 0, value.tokens}, StateSlot{12, 345, value.tokens + 1},
          StateSlot{12, 345, value.tokens ^ (uint64_t{1} << 63)}}) {
      EXPECT_EQ(status_of(header, other), 4u | kStateNotFilled);
    }
    for (const size_t byte : {0u, 17u, 63u}) {
      auto other = header;
      other[byte] ^= std::byte{1};
      EXPECT_EQ(status_of(other, value), 4u | kStateNotFilled) << "byte " << byte;
    }
  });
}

TEST(Bookkeeping, FillCopyScatter) {
  each_case("copies", 400, [](Case& at) {
    Random& random = at.random;
    const int64_t rows = random.between(1, 5), count = at.tokens, step = count + random.below(4);
    const auto value = static_cast<uint32_t>(random.below(1000));
    Guarded<uint32_t> filled(rows * step, 0xa5), copied(rows * step, 0xa5);
    run_fill(at.exec, filled.data(), step, value, count, rows);
    std::vector<uint32_t> source(static_cast<size_t>(rows * step));
    std::iota(source.begin(), source.end(), 0u);
    const int64_t from_step = random.chance(0.3) ? 0 : step;
    run_copy(at.exec, source.data(), from_step, copied.data(), step, count, rows);
    const auto places = subset(random, step, count);
    const bool listed = random.chance(0.7);
    Guarded<int32_t> scattered(rows * step, 0xa5);
    run_scatter(at.exec, reinterpret_cast<const int32_t*>(source.data()), step, listed ? places.data() : nullptr, count,
                scattered.data(), step, rows);
    for (int64_t i = 0; i < rows * step; ++i) {
      const int64_t row = i / step, column = i % step;
      ASSERT_EQ(filled[i], column < count ? value : 0xa5a5a5a5u);
      ASSERT_EQ(copied[i], column < count ? source[static_cast<size_t>(row * from_step + column)] : 0xa5a5a5a5u);
      const auto place = std::lower_bound(places.begin(), places.end(), column);
      const bool hit = listed ? place != places.end() && *place == column : column < count;
      const auto j = listed ? place - places.begin() : column;
      ASSERT_EQ(static_cast<uint32_t>(scattered[i]), hit ? source[static_cast<size_t>(row * step + j)] : 0xa5a5a5a5u);
    }
  });
}

TEST(Bookkeeping, Convert) {
  each_machine([](const Exec& exec) {
    for (const int64_t n : {1, 2, 7, 8, 1000, 100'003}) {
      Random random(static_cast<uint64_t>(n));
      std::vector<float> in;
      for (int64_t i = 0; i < n; ++i) in.push_back(static_cast<float>(random.normal() * std::exp(20 * random.normal())));
      in[0] = std::numeric_limits<float>::quiet_NaN();
      if (n > 1) in[1] = kInf;
      Guarded<uint16_t> half(n);
      Guarded<float> same(n), back(n);
      run_convert(exec, in.data(), DType::f32, same.data(), DType::f32, n);
      run_convert(exec, in.data(), DType::f32, half.data(), DType::bf16, n);
      run_convert(exec, half.data(), DType::bf16, back.data(), DType::f32, n);
      EXPECT_EQ(std::memcmp(same.data(), in.data(), static_cast<size_t>(4 * n)), 0);
      EXPECT_TRUE(std::isnan(back[0]));
      for (int64_t i = 1; i < n; ++i) {
        ASSERT_EQ(half[i], f32_to_bf16(in[static_cast<size_t>(i)])) << i;
        ASSERT_EQ(back[i], bf16_to_f32(half[i])) << i;
      }
    }
  });
}

TEST(Bookkeeping, RoundTo) {
  each_machine([](const Exec& exec) {
    for (const int64_t n : {1, 3, 100'003}) {
      Random random(static_cast<uint64_t>(n));
      std::vector<float> in;
      for (int64_t i = 0; i < n; ++i) in.push_back(static_cast<float>(random.normal() * std::exp(5 * random.normal())));
      for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        Guarded<float> out(n);
        run_round_to(exec, type, in.data(), out.data(), n);
        for (int64_t i = 0; i < n; ++i) {
          const auto want = static_cast<float>(reference::rounded(static_cast<double>(in[static_cast<size_t>(i)]), type));
          ASSERT_EQ(out[i], want) << dtype_name(type) << " " << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace scope::test
