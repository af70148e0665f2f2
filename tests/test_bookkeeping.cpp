// What happens around the stages, judged by its contract: token lists, whole selections, reports and copies.
#include <limits>

#include "cases.h"
#include "stages/bookkeeping.h"

namespace scope::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A sample with padding, always-kept keys and densely attending queries, and the lists that describe must make of it.
struct Sample {
  Tokens tokens;
  std::vector<uint32_t> keep, dense_queries;  // bits past the valid tokens are set too
  std::vector<int32_t> q_rows, k_rows;
  std::vector<uint32_t> valid, kept;

  Sample(Random& random, int64_t q_tokens, int64_t k_tokens) {
    const double keeps = random.pick<double>({0, 0.1, 1}), denses = random.pick<double>({0, 0.1, 1});
    tokens.q_tokens = q_tokens, tokens.k_tokens = k_tokens;
    tokens.valid_q = random.chance(0.5) ? q_tokens : random.between(0, q_tokens);
    tokens.valid_k = random.chance(0.5) ? k_tokens : random.between(0, k_tokens);
    keep.resize(static_cast<size_t>(mask_words(k_tokens)));
    valid = kept = keep;
    dense_queries.resize(static_cast<size_t>(mask_words(q_tokens)));
    for (int64_t j = 0; j < k_tokens; ++j) {
      const bool keeps_it = random.chance(keeps);
      if (keeps_it) set_mask_bit(keep.data(), j);
      if (j >= tokens.valid_k) continue;
      set_mask_bit(keeps_it ? kept.data() : valid.data(), j);
      if (!keeps_it) k_rows.push_back(static_cast<int32_t>(j));
    }
    std::vector<int32_t> dense, padding;
    for (int64_t i = 0; i < q_tokens; ++i) {
      const bool is_dense = random.chance(denses);
      if (is_dense) set_mask_bit(dense_queries.data(), i);
      (i >= tokens.valid_q ? padding : is_dense ? dense : q_rows).push_back(static_cast<int32_t>(i));
    }
    tokens.queries = static_cast<int64_t>(q_rows.size()), tokens.dense = static_cast<int64_t>(dense.size());
    tokens.keys = static_cast<int64_t>(k_rows.size()), tokens.kept = tokens.valid_k - tokens.keys;
    q_rows.insert(q_rows.end(), dense.begin(), dense.end());
    q_rows.insert(q_rows.end(), padding.begin(), padding.end());
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
  Guarded<int64_t> offsets(2, poison);
  run_describe(exec, {.tokens = t,
                      .keep = t.kept == 0 ? nullptr : sample.keep.data(),
                      .dense_queries = t.dense == 0 ? nullptr : sample.dense_queries.data(),
                      .q_rows = q_rows.data(),
                      .k_rows = k_rows.data(),
                      .valid = valid.data(),
                      .kept = kept.data(),
                      .offsets = offsets.data()});
  expect_values(q_rows, sample.q_rows, "q_rows");
  expect_values(k_rows, sample.k_rows, "k_rows");
  expect_values(valid, sample.valid, "valid");
  expect_values(kept, sample.kept, "kept");
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
    for (const int64_t n : {75'600, 131'072, 300'001}) expect_described(exec, Sample(random, n, n + 33), 0xff);
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
    const int64_t tail_groups = random.chance(0.5) ? groups + random.below(40) : 0, tail_words = mask_words(tail_groups);
    Guarded<int32_t> labels(heads * t.q_tokens, at.poison), order(heads * t.q_tokens, at.poison);
    Guarded<int32_t> sizes(heads * row_groups, at.poison), counts(heads * row_groups, at.poison);
    Guarded<int64_t> offsets(heads * (row_groups + 1), at.poison), empty(heads * subspaces, at.poison);
    Guarded<uint32_t> mask(heads * row_groups * words, at.poison), tail_mask(heads * row_groups * tail_words, at.poison);
    Guarded<float> tail_bias(heads * tail_groups, at.poison);
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
      for (int64_t c = 0; c < tail_groups; ++c) tail_bias[h * tail_groups + c] = random.chance(0.5) ? -kInf : 1.0f;
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
                         .tail_groups = tail_groups,
                         .tail_bias = tail_groups == 0 ? nullptr : tail_bias.data(),
                         .tail_mask = tail_groups == 0 ? nullptr : tail_mask.data(),
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
        for (int64_t e = 0; e < 32 * tail_words; ++e) {
          const bool sees = e == c && c < groups && sizes[row + c] > 0 && tail_bias[h * tail_groups + c] > -kInf;
          ASSERT_EQ(mask_bit(tail_mask.data() + (row + c) * tail_words, e), sees) << "group " << c << " virtual key " << e;
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
    run_import(at.exec, {.tokens = t,
                         .heads = heads,
                         .groups = groups,
                         .row_groups = row_groups,
                         .labels = labels.data(),
                         .selected = selected.data(),
                         .keep = with_keep ? sample.keep.data() : nullptr,
                         .order = order.data(),
                         .offsets = offsets.data(),
                         .mask = mask.data(),
                         .kept = kept.data()});
    for (int64_t j = 0; j < 32 * words; ++j) {
      const bool valid = j < t.valid_k;
      ASSERT_EQ(mask_bit(kept.data(), j), valid && with_keep && mask_bit(sample.keep.data(), j)) << "key " << j;
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
          const bool idle = i >= t.valid_q || label < 0 || label >= groups;
          if (c == groups ? idle : !idle && label == c) want.push_back(static_cast<int32_t>(i));
        }
      }
      ASSERT_EQ(want, std::vector<int32_t>(order.data() + h * t.q_tokens, order.data() + (h + 1) * t.q_tokens));
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

}  // namespace
}  // namespace scope::test
