// Whole calls: plan, state, schedule, text, padding, batches, statistics, and what is refused; on the tested backend.
#include <unistd.h>

#include "call_support.h"

namespace scope::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Call, OutputIsAttentionOverTheSelection) {
  const Context context = tested_context();
  for (const DType dtype : limits().dtypes) {
    const Inputs in(2, 2, 330, 297, 40, 3, dtype);
    for (const char* kernel : limits().kernels) {
      std::vector<Settings> all;
      for (const char* rule : {"fixed", "top_p", "hybrid", "online", "target"}) {
        for (const char* proxy : {"codes", "exact"}) {
          for (const char* group : {"kmeans", "raster"}) {
            all.push_back(method("scope", {{"rule", rule}, {"proxy", proxy}, {"partition", "even:3"}, {"group", group}}));
          }
        }
      }
      for (const char* target : {"none", "0.4"}) {
        for (const Settings& each : baselines(target)) all.push_back(each);
      }
      for (Settings& settings : all) {
        SCOPED_TRACE(fmt::format("{} {} {} {}", dtype_name(dtype), kernel, settings.method->name, row(settings.rule).name));
        set_setting(settings, "kernel", kernel);
        const Plan plan(context, settings, in.shape());
        const Result result = run(plan, in);
        EXPECT_EQ(result.stats.reason, Reason::sparse);
        EXPECT_LT(result.stats.density, 1);
        if (settings.rule == Rule::target) {
          EXPECT_NEAR(result.stats.density, 0.2, limits().density);
        }
        if (settings.rule == Rule::clusters && settings.target_density > 0) {
          EXPECT_NEAR(result.stats.density, 0.4, 0.01);
        }
        ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, result, {}));
      }
    }
  }
}

TEST(Call, TheExactProxyTakesCentroidsOfTheInputsType) {
  const Context context = tested_context();
  for (const DType dtype : limits().dtypes) {
    const Inputs in(1, 2, 330, 297, 40, 5, dtype);
    for (const char* proxy : {"codes", "exact"}) {
      const Plan plan(context, method("scope", {{"proxy", proxy}, {"partition", "even:3"}}), in.shape());
      OwnState own(plan);
      Extra extra;
      extra.state = &own.state;
      const Result result = run(plan, in, extra);
      const auto of_type = [&](const std::vector<float>& x) {
        return std::all_of(x.begin(), x.end(), [&](float each) {
          return reference::rounded(static_cast<double>(each), dtype) == static_cast<double>(each);
        });
      };
      EXPECT_EQ(of_type(result.centroids), dtype == DType::f32 || std::string(proxy) == "exact") << dtype_name(dtype);
      std::vector<float> saved(result.centroids.size());
      plan.backend->read(plan.exec, own.first(plan, StateLayout::centroids), saved.data(), std::ssize(saved) * 4);
      EXPECT_EQ(of_type(saved), dtype == DType::f32) << dtype_name(dtype);
    }
  }
}

void expect_equal_attention(const Result& sparse, const Result& dense) {
  for (size_t i = 0; i < dense.out.size(); ++i) ASSERT_NEAR(sparse.out[i], dense.out[i], limits().equal_out) << i;
  for (size_t i = 0; i < dense.lse.size(); ++i) {
    if (sparse.lse[i] != dense.lse[i]) {  // -inf of padding
      ASSERT_NEAR(sparse.lse[i], dense.lse[i], limits().equal_lse) << i;
    }
  }
}

TEST(Call, RhoOneEqualsDense) {
  const Context context = tested_context();
  const Inputs in(1, 2, 257, 257, 64, 5);
  for (const char* kernel : limits().kernels) {
    const Result sparse =
        run(Plan(context, method("scope", {{"rho", "1"}, {"partition", "even:3"}, {"kernel", kernel}}), in.shape()), in);
    const Result dense = run(Plan(context, method("dense", {{"kernel", kernel}}), in.shape()), in);
    EXPECT_EQ(dense.stats.reason, Reason::method_dense);
    EXPECT_EQ(sparse.stats.density, 1.0);
    expect_equal_attention(sparse, dense);
  }
}

// Padding may hold anything.
void spoil_invalid(Inputs& in, const Extra& extra) {
  const auto dim = static_cast<size_t>(in.dim);
  for (int64_t row = 0; row < in.batch * in.heads * in.q_tokens; ++row) {
    if (extra.valid_query(in, row / (in.heads * in.q_tokens), row % in.q_tokens)) continue;
    std::fill_n(in.q.begin() + row * in.dim, dim, kNan);
  }
  for (int64_t row = 0; row < in.batch * in.heads * in.k_tokens; ++row) {
    if (extra.valid_key(in, row / (in.heads * in.k_tokens), row % in.k_tokens)) continue;
    std::fill_n(in.k.begin() + row * in.dim, dim, kNan);
    std::fill_n(in.v.begin() + row * in.dim, dim, kNan);
  }
}

// Methods with every way to leave keys out, and dense.
std::vector<Settings> every_kind() {
  std::vector<Settings> all = baselines();
  all.push_back(method("dense"));
  for (const char* tail : {"none", "first_order", "mean", "means"}) {
    for (const char* name : {"scope", "scope-exact"}) {
      all.push_back(method(name, {{"partition", "even:2"}, {"rule", "fixed"}, {"density", "0.2"}, {"tail", tail}}));
    }
  }
  std::erase_if(all, [](const Settings& settings) { return !tested_has(settings); });
  return all;
}

// Text anywhere in the sequence, padding at the end, per-sample lengths: [text 3][video][text 5][padding].
TEST(Call, TextAndPadding) {
  const Context context = tested_context();
  const int64_t tokens = 350;
  Inputs in(2, 2, tokens, tokens, 40, 9);
  Extra extra;
  extra.q_lengths = extra.k_lengths = {350, 321};
  extra.keep.resize(2 * static_cast<size_t>(mask_words(tokens)));
  for (int64_t b = 0; b < 2; ++b) {
    for (const int64_t j : {0, 1, 2, 80, 81, 82, 83, 84}) set_mask_bit(extra.keep.data() + b * mask_words(tokens), j);
    set_mask_bit(extra.keep.data() + b * mask_words(tokens), 349);  // text that is padding in sample 1
  }
  extra.dense_queries = extra.keep;
  spoil_invalid(in, extra);
  for (const Settings& settings : every_kind()) {
    SCOPED_TRACE(settings.method->name);
    const Plan plan(context, settings, in.shape(true));
    const Result result = run(plan, in, extra);
    const int64_t groups = plan.selection_groups, words = mask_words(tokens);
    EXPECT_EQ(groups, settings.dense ? 0 : plan.groups + 1);
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t valid = extra.k_lengths[static_cast<size_t>(b)];
      const int64_t text = b == 0 ? 9 : 8;
      for (int64_t h = 0; h < 2; ++h) {
        const int64_t head = 2 * b + h;
        expect_rows(in, result, b, h, 81, exact_row(in, b, h, 81, [&](int64_t j) { return j < valid; }));
        if (settings.dense) continue;
        EXPECT_EQ(result.heads[static_cast<size_t>(head)].queries, valid - text);
        EXPECT_EQ(result.heads[static_cast<size_t>(head)].keys, valid - text);
        EXPECT_EQ(result.sizes[static_cast<size_t>(head * groups + groups - 1)], text);
        EXPECT_EQ(result.counts[static_cast<size_t>(head * groups + groups - 1)], valid - text);
        for (const int64_t j : {0, 82}) {  // always-kept keys are 0 in every mask row
          for (int64_t c = 0; c < groups; ++c) EXPECT_FALSE(mask_bit(result.mask.data() + (head * groups + c) * words, j));
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_invalid(in, result, extra));
    if (!settings.dense && settings.tail == Tail::none) {
      ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, result, extra));
    }
  }
}

// [text | padding | video], another hole in the video, and which of them queries and keys have. Where holes end at words, a
// word of a mask is a prefix of ones, or none, while the tokens before it have a hole.
struct Holes {
  static constexpr int64_t kTokens = 300, kText = 20;
  Inputs in{2, 2, kTokens, kTokens, 40, 19};
  Extra extra;

  Holes(bool queries, bool keys, bool lengths, bool words_end_them) {
    const auto words = static_cast<size_t>(mask_words(kTokens));
    std::vector<uint32_t> valid(2 * words), text(2 * words);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < kTokens; ++i) {
        const bool hole = words_end_them ? (i >= kText - 2 && i < 64) || (b == 1 && i >= 192 && i < 256)
                                         : (i >= kText - 2 && i < 77 - 9 * b) || (i >= 200 && i < 232 + 40 * b);
        if (!hole) set_mask_bit(valid.data() + b * mask_words(kTokens), i);
        if (i < kText) set_mask_bit(text.data() + b * mask_words(kTokens), i);  // the last two are in the hole
      }
    }
    if (queries) extra.valid_queries = valid;
    if (keys) extra.valid_keys = valid;
    if (lengths) extra.q_lengths = extra.k_lengths = {289, 300};
    extra.keep = extra.dense_queries = text;
    spoil_invalid(in, extra);
  }
};

TEST(Call, HolesAmongTheTokens) {
  const Context context = tested_context();
  for (const auto& [queries, keys, lengths, words_end_them] :
       {std::array{true, true, false, false}, std::array{true, true, true, false}, std::array{true, false, false, false},
        std::array{false, true, true, false}, std::array{true, true, false, true}, std::array{false, true, true, true}}) {
    const Holes holes(queries, keys, lengths, words_end_them);
    const Inputs& in = holes.in;
    for (const Settings& settings : every_kind()) {
      SCOPED_TRACE(fmt::format("{}: queries {}, keys {}, lengths {}, words {}", settings.method->name, queries, keys,
                               lengths, words_end_them));
      const Plan plan(context, settings, in.shape(true));
      const Result result = run(plan, in, holes.extra);
      ASSERT_NO_FATAL_FAILURE(expect_invalid(in, result, holes.extra));
      for (const float x : result.out) ASSERT_TRUE(std::isfinite(x));
      for (int64_t b = 0; b < 2; ++b) {
        int64_t video_q = 0, video_k = 0;
        for (int64_t i = 0; i < Holes::kTokens; ++i) {
          video_q += i >= Holes::kText && holes.extra.valid_query(in, b, i);
          video_k += i >= Holes::kText && holes.extra.valid_key(in, b, i);
          // A dense method, and a text query under any, see every valid key.
          if (!holes.extra.valid_query(in, b, i) || (!settings.dense && i >= Holes::kText)) continue;
          const auto sees = [&](int64_t j) { return holes.extra.valid_key(in, b, j); };
          ASSERT_NO_FATAL_FAILURE(expect_rows(in, result, b, 1, i, exact_row(in, b, 1, i, sees)));
        }
        if (settings.dense) continue;
        EXPECT_EQ(result.heads[static_cast<size_t>(2 * b)].queries, video_q);
        EXPECT_EQ(result.heads[static_cast<size_t>(2 * b)].keys, video_k);
      }
      if (!settings.dense && settings.tail == Tail::none) {
        ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, result, holes.extra));
      }
    }
    const Result sparse =
        run(Plan(context, method("scope", {{"rho", "1"}, {"partition", "even:3"}}), in.shape(true)), in, holes.extra);
    const Result dense = run(Plan(context, method("dense"), in.shape(true)), in, holes.extra);
    EXPECT_EQ(sparse.stats.density, 1.0);
    expect_equal_attention(sparse, dense);
  }
}

TEST(Call, AHoleAtTheEndIsALength) {
  const Context context = tested_context();
  const int64_t tokens = 300, words = mask_words(tokens);
  Extra lengths;
  lengths.q_lengths = {300, 211};
  lengths.k_lengths = {257, 190};
  lengths.keep.assign(static_cast<size_t>(2 * words), 0x10);
  Extra bits = lengths;
  bits.q_lengths = bits.k_lengths = {};
  bits.valid_queries.resize(static_cast<size_t>(2 * words));
  bits.valid_keys.resize(static_cast<size_t>(2 * words));
  Inputs in(2, 2, tokens, tokens, 40, 23);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < tokens; ++i) {
      if (lengths.valid_query(in, b, i)) set_mask_bit(bits.valid_queries.data() + b * words, i);
      if (lengths.valid_key(in, b, i)) set_mask_bit(bits.valid_keys.data() + b * words, i);
    }
  }
  spoil_invalid(in, lengths);
  for (const Settings& settings : every_kind()) {
    const Plan plan(context, settings, in.shape());
    EXPECT_TRUE(same_bits(run(plan, in, lengths), run(plan, in, bits))) << settings.method->name;
  }
}

TEST(Call, ScaleOfTheLogits) {
  const Context context = tested_context();
  const Inputs in(1, 2, 200, 230, 40, 29);
  const float usual = 1 / std::sqrt(40.0f);
  for (const char* name : {"scope", "scope-exact", "dense"}) {
    SCOPED_TRACE(name);
    const Plan plan(context, method(name, {{"rho", "1"}, {"partition", "even:2"}}), in.shape());
    EXPECT_TRUE(same_bits(run(plan, in, {.scale = usual}), run(plan, in)));
    for (const float scale : {0.5f * usual, 3 * usual}) {
      const Result result = run(plan, in, {.scale = scale});
      for (int64_t i = 0; i < in.q_tokens; ++i) {
        ASSERT_NO_FATAL_FAILURE(expect_rows(in, result, 0, 1, i,
                                            exact_row(
                                                in, 0, 1, i, [](int64_t) { return true; }, static_cast<double>(scale))));
      }
    }
  }
  // It sharpens what keys are chosen by, too.
  for (const char* name : {"scope", "scope-exact", "svg2", "sparge-cdf"}) {
    SCOPED_TRACE(name);
    const Settings settings = method(name, {{"rho", "0.8"},
                                            {"alpha", "0"},
                                            {"partition", "even:1"},
                                            {"codes", "60"},
                                            {"q_block", "16"},
                                            {"k_block", "8"},
                                            {"similarity", "-1"}});
    const Plan plan(context, settings, in.shape());
    double last = 1;
    for (const float scale : {0.2f * usual, usual, 2 * usual}) {
      const Extra extra{.scale = scale};
      const Result result = run(plan, in, extra);
      ASSERT_NO_FATAL_FAILURE(expect_consistent(in, plan, result, extra));
      EXPECT_LT(result.stats.density, last);
      last = result.stats.density;
    }
  }
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  for (const float wrong : {-1.0f, kNan, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(status_of([&] { run(plan, in, {.scale = wrong}); }), Status::invalid_argument);
  }
}

TEST(Call, ASampleAloneEqualsItselfInABatch) {
  const Context context = tested_context();
  const Inputs both(2, 2, 340, 340, 64, 21);
  std::vector<Settings> all = baselines("0.3");
  for (const char* name : {"scope", "scope-exact"}) {
    for (const char* tail : {"first_order", "mean", "means"}) {
      all.push_back(method(name, {{"partition", "even:4"}, {"tail", tail}}));
    }
  }
  for (const Settings& settings : all) {
    if (!tested_has(settings)) continue;
    const Result batch = run(Plan(context, settings, both.shape()), both);
    for (int64_t b = 0; b < 2; ++b) {
      const Inputs one = both.sample(b);
      const Result alone = run(Plan(context, settings, one.shape()), one);
      EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), batch.out.begin() + b * std::ssize(alone.out)));
      EXPECT_TRUE(std::equal(alone.mask.begin(), alone.mask.end(), batch.mask.begin() + b * std::ssize(alone.mask)));
    }
  }
}

TEST(Call, BitwiseTheSameForAnyThreadCountAndRepeat) {
  const Inputs in(1, 2, 300, 300, 64, 33);
  const Settings settings = method("scope", {{"partition", "even:3"}, {"rule", "target"}, {"tail", "first_order"}});
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 7}) {
    const Context context = tested_context(threads);
    const Plan plan(context, settings, in.shape());
    for (int i = 0; i < 25; ++i) {
      const Result result = run(plan, in);
      if (first.empty()) first = result.out;
      ASSERT_EQ(std::memcmp(first.data(), result.out.data(), first.size() * 4), 0) << threads << " threads, run " << i;
    }
  }
}

TEST(Call, BothLayoutsAndUnalignedStridesAgree) {
  const Context context = tested_context();
  const int64_t row_bytes = backend().can.row_bytes;
  for (const DType dtype : limits().dtypes) {
    const Inputs in(2, 3, 270, 290, 40, 41, dtype);
    const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
    const Result expected = run(plan, in);
    for (const bool token_major : {true, false}) {
      for (const int64_t padding : {int64_t{0}, row_bytes == 0 ? 3 : row_bytes / dtype_bytes(dtype)}) {
        EXPECT_TRUE(same_bits(run(plan, in, {}, {token_major, padding}), expected)) << token_major << " " << padding;
      }
    }
  }
}

TEST(State, WarmCallsContinueFromIt) {
  const Context context = tested_context();
  const Inputs in(2, 2, 200, 200, 64, 51);
  for (const char* dtype : {"f32", "bf16"}) {
    const Settings settings = method("scope", {{"partition", "even:3"}, {"state_dtype", dtype}});
    const Plan plan(context, settings, in.shape());
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    const Result cold = run(plan, in, extra);
    EXPECT_FALSE(cold.stats.warm);
    EXPECT_EQ(cold.stats.iterations, 4);
    const auto saved = own.save();
    const Result warm = run(plan, in, extra);
    EXPECT_TRUE(warm.stats.warm);
    EXPECT_EQ(warm.stats.iterations, 2);
    own.state.load(nullptr, saved);
    const Result again = run(plan, in, extra);
    EXPECT_TRUE(same_bits(warm, again));
    OwnState copy(plan);
    const auto empty = copy.save();
    copy.state.load(nullptr, saved);
    EXPECT_TRUE(copy.state.filled());
    extra.state = &copy.state;
    EXPECT_TRUE(same_bits(warm, run(plan, in, extra)));
    copy.state.load(nullptr, empty);
    EXPECT_FALSE(copy.state.filled());
    EXPECT_TRUE(same_bits(cold, run(plan, in, extra)));
    if (std::string(dtype) == "f32") {  // 4 + 2 iterations are 6
      Settings six = settings;
      six.first_iterations = 6;
      six.first_sample = 1;
      Settings four = settings;
      four.first_sample = 1;
      const Plan plan_four(context, four, in.shape());
      OwnState other(plan_four);
      extra.state = &other.state;
      run(plan_four, in, extra);
      EXPECT_EQ(run(plan_four, in, extra).out, run(Plan(context, six, in.shape()), in).out);
    }
  }
}

// All but the last iteration of a warm call see a sample, which layer and step draw: queries and keys alike.
TEST(State, WarmSampleIsWhatItIsDefinedAs) {
  const Context context = tested_context();
  const Inputs in(1, 1, 900, 800, 64, 59);
  const auto stored = [&](const std::vector<float>& x, int64_t tokens) {
    Rows rows(in.dtype, tokens, in.dim);
    for (int64_t i = 0; i < tokens * in.dim; ++i) {
      rows.set(i / in.dim, i % in.dim, static_cast<double>(x[static_cast<size_t>(i)]));
    }
    return rows;
  };
  const Rows q = stored(in.q, 900), k = stored(in.k, 800);
  const auto rows = all_rows(900);
  struct Share {
    const char* share;
    int64_t queries, keys;  // seen: no fewer than 8 for each of 20 groups and 24 codes
  };
  for (const auto& [share, queries, keys] : {Share{"1", 900, 800}, Share{"0.25", 225, 200}, Share{"0.01", 160, 192}}) {
    const Plan plan(context,
                    method("scope", {{"partition", "even:3"},
                                     {"groups", "20"},
                                     {"codes", "24"},
                                     {"dense_layers", "0"},
                                     {"dense_steps", "0"},
                                     {"iterations", "3"},
                                     {"warm_sample", share}}),
                    in.shape());
    Exec exec = plan.exec;
    exec.stream = machines().front().exec.stream;  // a device's stages are recorded, which its own stream does not take
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    const Result first = run(plan, in, extra);
    const auto saved = own.save();
    std::vector<Result> warm;
    for (const Place place : {Place{}, Place{2, 3, 9}, Place{2, 4, 9}, Place{2, 3, 9}}) {
      SCOPED_TRACE(fmt::format("share {}, layer {}, step {}", share, place.layer, place.step));
      own.state.load(nullptr, saved);
      extra.place = place;
      warm.push_back(run(plan, in, extra));
      const Result& result = warm.back();
      ASSERT_TRUE(result.stats.warm);
      const uint64_t draw = place.step < 0 ? 0 : static_cast<uint64_t>((place.layer + place.step) * 3);

      std::vector<float> centroids = first.centroids, codebooks = first.codebooks;
      std::vector<int32_t> labels(900), sizes(20), order(900), codes(3 * 800);
      std::vector<int64_t> offsets(21), empty(3);
      GroupArgs group{.q = q.view(),
                      .rows = rows.data(),
                      .count = 900,
                      .groups = 20,
                      .iterations = 3,
                      .sample = queries,
                      .full_iterations = 1,
                      .draw = draw,
                      .warm = true,
                      .centroids = centroids.data(),
                      .labels = labels.data(),
                      .sizes = sizes.data(),
                      .order = order.data(),
                      .offsets = offsets.data()};
      GuardedScratch group_scratch(backend().group_scratch(exec, sizes_of(group)));
      group.scratch = scratch_of(group_scratch);
      run_group(exec, {&group, 1});
      EXPECT_EQ(result.centroids, centroids);
      EXPECT_EQ(result.labels, labels);

      EncodeArgs encode{.k = k.view(),
                        .rows = rows.data(),
                        .count = 800,
                        .partition = &plan.partition,
                        .codes = 24,
                        .iterations = 3,
                        .sample = keys,
                        .full_iterations = 1,
                        .draw = draw,
                        .warm = true,
                        .codebooks = codebooks.data(),
                        .labels = codes.data(),
                        .empty = empty.data()};
      GuardedScratch encode_scratch(backend().encode_scratch(exec, sizes_of(encode)));
      encode.scratch = scratch_of(encode_scratch);
      run_encode(exec, {&encode, 1});
      EXPECT_EQ(result.codebooks, codebooks);
      EXPECT_EQ(result.codes, codes);
    }
    const bool all = std::string(share) == "1";
    EXPECT_EQ(warm[1].centroids == warm[2].centroids, all) << "another step sees other tokens";
    EXPECT_EQ(warm[1].codebooks == warm[2].codebooks, all) << "another step sees other tokens";
    EXPECT_TRUE(same_bits(warm[1], warm[3])) << "and the same ones in every run";
  }
}

// A fresh state starts cold, one that forgot does too, and a sample that was never filled is filled by the next call.
TEST(State, RemembersWhetherItIsFilled) {
  const Context context = tested_context(1);
  const Inputs in(2, 2, 200, 200, 64, 57);
  const Plan plan(context, method("scope", {{"partition", "even:3"}}), in.shape());
  OwnState own(plan);
  Extra extra;
  extra.state = &own.state;
  EXPECT_FALSE(own.state.filled());
  extra.q_lengths = extra.k_lengths = {200, 0};  // sample 1 has nothing to cluster, so its slot stays empty
  const Result first = run(plan, in, extra);
  EXPECT_FALSE(first.stats.warm);
  EXPECT_FALSE(own.state.filled());
  EXPECT_TRUE(run(plan, in, extra).stats.warm);  // of the samples that have anything to cluster, all
  own.state.set_filled(false);
  const Result again = run(plan, in, extra);
  EXPECT_FALSE(again.stats.warm);
  EXPECT_EQ(again.out, first.out);
  extra.q_lengths = extra.k_lengths = {};
  EXPECT_FALSE(run(plan, in, extra).stats.warm);
  EXPECT_TRUE(own.state.filled());
  EXPECT_TRUE(run(plan, in, extra).stats.warm);
}

// A sample whose keys make fewer codes than its state has starts anew, and the call is not warm though the other sample is.
TEST(State, OfOtherCodesIsCold) {
  const Context context = tested_context(1);
  const Inputs in(2, 2, 200, 200, 64, 58);
  const Plan plan(context, method("scope", {{"partition", "even:3"}, {"codes", "100"}}), in.shape());
  OwnState own(plan);
  Extra extra;
  extra.k_lengths = {60, 200};
  const Result cold = run(plan, in, extra);
  extra.k_lengths = {};
  extra.state = &own.state;
  run(plan, in, extra);
  extra.k_lengths = {60, 200};
  const Result mixed = run(plan, in, extra);
  EXPECT_FALSE(mixed.stats.warm);
  const auto half = static_cast<int64_t>(cold.out.size() / 2);
  EXPECT_TRUE(std::equal(cold.out.begin(), cold.out.begin() + half, mixed.out.begin()));
  EXPECT_TRUE(run(plan, in, extra).stats.warm);
}

// A short sample's state holds its own groups and codes, and nothing of the workspace.
TEST(State, HoldsNothingButCentroids) {
  const Context context = tested_context(1);
  const Inputs in(1, 2, 400, 400, 64, 58);
  const Plan plan(context, method("scope", {{"partition", "even:3"}, {"groups", "300"}, {"codes", "300"}}), in.shape());
  OwnState own(plan);
  const std::vector<float> sevens(static_cast<size_t>(plan.state_bytes - StateLayout(plan)[StateLayout::centroids].at) / 4,
                                  7.0f);
  plan.backend->write(plan.exec, sevens.data(), own.first(plan, StateLayout::centroids), std::ssize(sevens) * 4);
  Extra extra;
  extra.state = &own.state;
  extra.q_lengths = extra.k_lengths = {120};
  run(plan, in, extra);
  std::vector<float> centroids(300 * 64), codebooks(300 * 64);
  plan.backend->read(plan.exec, own.first(plan, StateLayout::centroids), centroids.data(), std::ssize(centroids) * 4);
  plan.backend->read(plan.exec, own.first(plan, StateLayout::codebooks), codebooks.data(), std::ssize(codebooks) * 4);
  for (size_t i = 120 * 64; i < 300 * 64; ++i) {
    ASSERT_EQ(centroids[i], 7.0f) << i;
    ASSERT_EQ(codebooks[i], 7.0f) << i;
  }
}

TEST(State, RefusesOtherPlansAndBrokenBytes) {
  const Context context = tested_context(1);
  const Inputs in(1, 1, 64, 64, 40, 1);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Plan other(context, method("scope", {{"partition", "even:4"}}), in.shape());
  const Plan dense(context, method("dense"), in.shape());
  OwnState own(plan), foreign(other);
  Extra extra;
  extra.state = &foreign.state;
  EXPECT_EQ(status_of([&] { run(plan, in, extra); }), Status::shape);
  EXPECT_EQ(status_of([&] { run(dense, in, extra); }), Status::invalid_argument);
  EXPECT_EQ(status_of([&] { State(plan, nullptr); }), Status::invalid_argument);
  EXPECT_EQ(status_of([&] { State(plan, static_cast<std::byte*>(own.state.memory()) + 8); }), Status::alignment);
  EXPECT_EQ(status_of([&] { State(dense, own.state.memory()); }), Status::invalid_argument);
  extra.state = &own.state;
  run(plan, in, extra);
  const std::vector<std::byte> saved = own.save();
  const Result warm = run(plan, in, extra);
  own.state.load(nullptr, saved);
  const auto refused = [&](std::vector<std::byte> bytes, int64_t at = 0, std::vector<std::byte> with = {}) {
    std::copy(with.begin(), with.end(), bytes.begin() + at);
    const Status status = status_of([&] { own.state.load(nullptr, bytes); });
    EXPECT_TRUE(own.state.filled());
    EXPECT_EQ(own.save(), saved);  // as it was
    return status;
  };
  const std::vector<std::byte> ones(4, std::byte{0x7f});
  EXPECT_EQ(refused(foreign.save()), Status::shape);
  EXPECT_EQ(refused({}), Status::format);
  EXPECT_EQ(refused({saved.begin(), saved.begin() + 63}), Status::format);
  EXPECT_EQ(refused({saved.begin(), saved.end() - 1}), Status::format);
  EXPECT_EQ(refused(saved, 0, ones), Status::invalid_argument);                              // no state
  EXPECT_EQ(refused(saved, 8, ones), Status::invalid_argument);                              // of another version
  EXPECT_EQ(refused(saved, StateLayout(plan).slots, ones), Status::format);                  // more groups than there are
  EXPECT_EQ(refused(saved, StateLayout(plan).slots, {4, std::byte{0xff}}), Status::format);  // -1
  EXPECT_EQ(run(plan, in, extra).out, warm.out);
}

// The memory is the caller's to break: a warm call refuses a slot with other groups, other codes or other tokens.
TEST(State, RefusesASlotThatTheHostDoesNotKnow) {
  const Context context = tested_context(1);
  const Inputs in(2, 1, 64, 64, 40, 1);
  for (const char* interval : {"1", "3"}) {  // without labels, and with them and a hash of the tokens
    SCOPED_TRACE(interval);
    const Plan plan(context, method("scope", {{"partition", "even:2"}, {"reuse_interval", interval}}), in.shape());
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    run(plan, in, extra);
    const std::vector<std::byte> saved = own.save();
    for (int64_t sample = 0; sample < 2; ++sample) {
      const StateSlot known = own.state.slot(sample);
      StateSlot groups = known, codes = known, tokens = known;
      --groups.groups;
      --codes.codes;
      tokens.tokens ^= 1;
      for (const StateSlot& broken : {groups, codes, tokens}) {
        SCOPED_TRACE(
            fmt::format("sample {}: {} groups, {} codes, tokens {:x}", sample, broken.groups, broken.codes, broken.tokens));
        plan.backend->write(plan.exec, &broken, StateLayout(plan).slot(own.state.memory(), sample), sizeof broken);
        EXPECT_EQ(status_of([&] { run(plan, in, extra); }), Status::invalid_argument);
        own.state.load(nullptr, saved);
      }
    }
    EXPECT_TRUE(run(plan, in, extra).stats.warm);
  }
}

// What no mean of rows can be: centroids and codebooks, in both types that a state has.
TEST(State, RefusesAbsurdCentroids) {
  const Context context = tested_context(1);
  const Inputs in(2, 2, 64, 64, 40, 1);
  for (const char* type : {"f32", "bf16"}) {
    const Plan plan(context, method("scope", {{"partition", "even:2"}, {"state_dtype", type}}), in.shape());
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    run(plan, in, extra);
    const std::vector<std::byte> saved = own.save();
    const StateLayout layout(plan);
    const int64_t each = dtype_bytes(plan.settings.state_dtype), rows = 4 * plan.groups, codes = 4 * plan.codes;
    const auto load = [&](int64_t at, float value) {
      std::vector<std::byte> bytes = saved;
      const auto* from = reinterpret_cast<const std::byte*>(&value) + 4 - each;  // bf16 is the upper half
      std::copy(from, from + each, bytes.begin() + at);
      return status_of([&] { own.state.load(nullptr, bytes); });
    };
    const int64_t centroids = layout[StateLayout::centroids].at, codebooks = layout[StateLayout::codebooks].at;
    for (const int64_t at :
         {centroids, centroids + (rows * 40 - 1) * each, codebooks, codebooks + (codes * 40 - 1) * each}) {
      for (const float value : {kNan, std::numeric_limits<float>::infinity(), -2e18f}) {
        EXPECT_EQ(load(at, value), Status::format) << type << " " << at << " " << value;
        EXPECT_EQ(own.save(), saved);
      }
      EXPECT_EQ(load(at, -1e18f), Status::ok);
      own.state.load(nullptr, saved);
    }
  }
  // Calls that do not look at rows may leave anything, which their plan's states take back.
  const Plan unchecked(context, method("scope", {{"partition", "even:2"}, {"check_finite", "no"}}), in.shape());
  OwnState any(unchecked);
  Extra extra;
  extra.state = &any.state;
  run(unchecked, in, extra);
  std::vector<std::byte> odd = any.save();
  std::fill_n(odd.begin() + StateLayout(unchecked)[StateLayout::centroids].at, 4, std::byte{0xff});
  any.state.load(nullptr, odd);
  EXPECT_EQ(any.save(), odd);
  // Nothing has filled it, so nothing is read.
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  OwnState own(plan);
  std::vector<std::byte> empty = own.save();
  std::fill(empty.begin() + StateLayout(plan)[StateLayout::centroids].at, empty.end(), std::byte{0xff});
  own.state.load(nullptr, empty);
  EXPECT_FALSE(own.state.filled());
}

// Every array of the table, at its first and its last value of each head.
TEST(State, RefusesWhatItsArraysCannotHoldByName) {
  const Context context = tested_context(1);
  const Inputs in(2, 2, 64, 72, 40, 1);
  for (const char* type : {"f32", "bf16"}) {
    const Plan plan(context, method("scope", {{"partition", "even:2"}, {"state_dtype", type}, {"reuse_interval", "3"}}),
                    in.shape());
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    extra.q_lengths = {64, 9};
    extra.k_lengths = {72, 7};
    run(plan, in, extra);
    const std::vector<std::byte> saved = own.save();
    std::vector<std::byte> memory(saved.size());
    plan.backend->read(plan.exec, own.state.memory(), memory.data(), std::ssize(memory));
    EXPECT_EQ(saved, memory);
    ASSERT_LT(own.state.slot(1).groups, plan.groups);
    ASSERT_LT(own.state.slot(1).codes, plan.codes);
    // The refusal of `value` in the place of what is there; empty: it is loaded.
    const auto refusal = [&](int64_t at, auto value, int64_t bytes) {
      std::vector<std::byte> broken = saved;
      std::memcpy(broken.data() + at, reinterpret_cast<const std::byte*>(&value) + sizeof value - bytes,
                  static_cast<size_t>(bytes));  // bf16 is the upper half
      std::string message;
      try {
        own.state.load(nullptr, broken);
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), Status::format);
        message = error.what();
      }
      EXPECT_EQ(own.save(), message.empty() ? broken : saved);
      own.state.load(nullptr, saved);
      return message;
    };
    const StateLayout layout(plan);
    for (const StateArray& array : layout.arrays) {
      ASSERT_GT(array.size(), 0) << array.name << ": give the plan of this test what it needs";
      const int64_t each = array.means() ? dtype_bytes(plan.settings.state_dtype) : 4;
      ASSERT_EQ(array.head_bytes, array.size() * each);
      for (int64_t i = 0; i < 4; ++i) {
        SCOPED_TRACE(fmt::format("{} {}, head {} of 4", type, array.name, i));
        const StateSlot slot = own.state.slot(i / 2);
        const int64_t first = array.at + i * array.head_bytes, last = first + (array.filled(slot) - 1) * each;
        const auto names_it = [&](const std::string& message) {
          return message.find(array.name) != std::string::npos &&
                 message.find(fmt::format("sample {}, head {}", i / 2, i % 2)) != std::string::npos;
        };
        for (const int64_t at : {first, last}) {
          if (array.means()) {
            for (const float value : {kNan, INFINITY, -2e18f}) EXPECT_TRUE(names_it(refusal(at, value, each))) << value;
            EXPECT_EQ(refusal(at, -1e18f, each), "");
          } else {
            const int32_t count = slot.*array.clusters;
            for (const int32_t value : {-2, count, INT32_MIN}) EXPECT_TRUE(names_it(refusal(at, value, each))) << value;
            EXPECT_EQ(refusal(at, -1, each), "");
            EXPECT_EQ(refusal(at, count - 1, each), "");
          }
        }
        // What the sample has not filled is not looked at.
        if (array.filled(slot) < array.size()) {
          EXPECT_EQ(refusal(last + each, kNan, each), "");
        }
      }
    }
  }
}

// The bytes of version 2: saved states outlive a build.
TEST(State, LiesInMemoryAsVersion2Does) {
  const Context context = tested_context(1);
  const Inputs in(2, 3, 65, 47, 40, 1);
  struct Case {
    const char* name;
    int64_t subspaces;  // 0: proxy exact
    bool bf16, reuses;
  };
  for (const auto& [name, subspaces, bf16, reuses] :
       {Case{"scope", 3, false, false}, Case{"scope", 3, true, false}, Case{"scope", 3, false, true},
        Case{"scope", 3, true, true}, Case{"scope", 0, false, false}, Case{"scope", 0, false, true},
        Case{"svg2", 1, false, false}, Case{"svg2", 1, true, true}}) {
    SCOPED_TRACE(fmt::format("{}, {} subspaces, bf16 {}, reuse {}", name, subspaces, bf16, reuses));
    Settings settings = method(name, {{"groups", "7"}});
    if (bf16) set_setting(settings, "state_dtype", "bf16");
    if (reuses) set_setting(settings, "reuse_interval", "3");
    if (subspaces == 3) set_setting(settings, "partition", "even:3");
    if (subspaces == 0) set_setting(settings, "proxy", "exact");
    const Plan plan(context, settings, in.shape());
    const auto after = [](int64_t at, int64_t bytes) { return (at + bytes + 63) / 64 * 64; };
    const int64_t centroids = 64 + 64;  // two slots of 16 bytes
    const int64_t codebooks = after(centroids, 2 * 3 * 7 * 40 * (bf16 ? 2 : 4));
    const int64_t labels = after(codebooks, 2 * 3 * plan.codes * 40 * (bf16 ? 2 : 4));
    const int64_t codes = after(labels, reuses ? 2 * 3 * 65 * 4 : 0);
    const int64_t bytes = after(codes, reuses ? 2 * 3 * subspaces * 47 * 4 : 0);
    EXPECT_EQ(plan.state_bytes, bytes);
    OwnState own(plan);
    Extra extra;
    extra.state = &own.state;
    const Result result = run(plan, in, extra);
    const std::vector<std::byte> saved = own.save();
    ASSERT_EQ(std::ssize(saved), bytes);

    uint64_t hash = 14695981039346656037u;
    const auto mix = [&](uint32_t x) { hash = (hash ^ x) * 1099511628211u; };
    if (reuses) mix(65), mix(47);
    for (int32_t m = 0; m < subspaces; ++m) {
      mix(~0u);
      for (const int32_t channel : plan.partition[static_cast<size_t>(m)]) mix(static_cast<uint32_t>(channel));
    }
    const uint64_t version = bf16 ? 2 | uint64_t{2} << 32 : 2;  // and dtype
    const uint64_t header[] = {0x3154415445504353, version, 2, 3, 7, static_cast<uint64_t>(plan.codes), 40, hash};
    EXPECT_EQ(std::memcmp(saved.data(), header, 64), 0);
    for (int64_t b = 0; b < 2; ++b) {
      int32_t counts[2];
      std::memcpy(counts, saved.data() + 64 + 16 * b, 8);
      EXPECT_EQ(counts[0], 7);
      EXPECT_EQ(counts[1], plan.codes);
    }
    // The selection has the same arrays as one row each, codebooks and codes of every subspace apart.
    const auto words = [&](int64_t at, const auto* values, int64_t count) {
      return std::memcmp(saved.data() + at, values, static_cast<size_t>(count) * 4) == 0;
    };
    if (!bf16 && (subspaces > 0 || in.dtype == DType::f32)) {
      EXPECT_TRUE(words(centroids, result.centroids.data(), 2 * 3 * 7 * 40));
    }
    if (!bf16 && subspaces == 1) {
      EXPECT_TRUE(words(codebooks, result.codebooks.data(), 2 * 3 * plan.codes * 40));
    }
    if (reuses) {
      EXPECT_TRUE(words(labels, result.labels.data(), 2 * 3 * 65));
    }
    for (int64_t i = 0; reuses && i < 2 * 3 * subspaces; ++i) {
      const int64_t head = i / subspaces, m = i % subspaces;
      EXPECT_TRUE(words(codes + i * 47 * 4, result.codes.data() + (m * 2 * 3 + head) * 47, 47)) << i;
    }
  }
}

TEST(Call, ScheduleRunsDenseAndCanWarmUp) {
  const Context context = tested_context();
  const Inputs in(1, 2, 100, 100, 40, 61);
  const Settings settings = method("scope", {{"partition", "even:2"}, {"warm_prefix", "yes"}});
  const Plan plan(context, settings, in.shape());
  OwnState own(plan);
  Extra extra;
  extra.state = &own.state;
  extra.place = {1, 0, 10};
  const Result dense = run(plan, in, extra);
  EXPECT_EQ(dense.stats.reason, Reason::dense_step);
  EXPECT_EQ(dense.out, run(Plan(context, method("dense"), in.shape()), in).out);
  EXPECT_EQ(dense.labels[0], -1);
  EXPECT_EQ(dense.stats.iterations, 4);
  EXPECT_EQ(dense.stats.density, 1.0);
  extra.place = {1, 2, 10};
  const Result sparse = run(plan, in, extra);
  EXPECT_EQ(sparse.stats.reason, Reason::sparse);
  EXPECT_TRUE(sparse.stats.warm);  // the prefix clustered
  EXPECT_LT(sparse.stats.density, 1.0);
  extra.place = {0, 2, 10};
  const Result layer = run(plan, in, extra);
  EXPECT_EQ(layer.stats.reason, Reason::dense_layer);
  EXPECT_EQ(layer.stats.iterations, 0);  // a layer that is always dense clusters nothing
}

// Beside a host's own dense attention: no v and no out, whatever the tail needs later.
TEST(Call, ADenseStepMayOnlyCluster) {
  const Context context = tested_context();
  const Inputs in(1, 2, 100, 100, 40, 61);
  for (const auto& [name, tail] :
       {std::pair("scope", "none"), std::pair("scope", "first_order"), std::pair("scope-mean", "mean"),
        std::pair("scope-mean", "means"), std::pair("svg2-ear", "centroids")}) {
    SCOPED_TRACE(std::string(name) + " " + tail);
    const Settings settings = method(name, {{"partition", name == std::string("scope") ? "even:2" : "even:1"},
                                            {"groups", "8"},
                                            {"codes", "12"},
                                            {"tail", tail},
                                            {"warm_prefix", "yes"}});
    if (!tested_has(settings)) continue;
    const Plan plan(context, settings, in.shape());
    const auto after_prefix = [&](bool attends) {
      OwnState own(plan);
      Extra extra;
      extra.state = &own.state;
      extra.place = {1, 0, 10};
      PreparedCall prefix(plan, in, extra);
      if (!attends) {
        prefix.args.v = {};
        prefix.args.out = {};
        prefix.args.lse = nullptr;
      }
      const Result dense = prefix.run();
      EXPECT_EQ(dense.stats.reason, Reason::dense_step);
      EXPECT_EQ(dense.stats.iterations, 4);
      extra.place = {1, 2, 10};
      const Result sparse = run(plan, in, extra);
      EXPECT_TRUE(sparse.stats.warm);
      return sparse;
    };
    EXPECT_TRUE(same_bits(after_prefix(false), after_prefix(true)));
    if (!plan.needs_v()) continue;
    PreparedCall sparse(plan, in);
    sparse.args.v = {};
    sparse.args.out = {};
    sparse.args.lse = nullptr;
    EXPECT_EQ(status_of([&] { sparse.run(); }), Status::invalid_argument);
  }
}

// The paper's alpha stays wherever a target lies above it; elsewhere a target has room for heads that differ.
TEST(Call, AlphaUnderATarget) {
  const Context context = tested_context();
  const Inputs in(1, 2, 400, 400, 40, 63);
  const auto alpha = [&](const char* target, const char* first, const char* scope) {
    const Settings settings = method("scope", {{"partition", "even:2"},
                                               {"groups", "10"},
                                               {"codes", "20"},
                                               {"target_density", target},
                                               {"alpha_first", first},
                                               {"target_scope", scope}});
    return run(Plan(context, settings, in.shape()), in).heads[0].alpha;
  };
  for (const char* scope : {"head", "sample"}) {
    SCOPED_TRACE(scope);
    EXPECT_NEAR(alpha("0.15", "no", scope), 0.075, 1e-12);
    EXPECT_NEAR(alpha("0.15", "yes", scope), 0.1, 1e-12);
    EXPECT_NEAR(alpha("0.1", "yes", scope), 0.05, 1e-12);
    EXPECT_NEAR(alpha("0.3", "no", scope), 0.1, 1e-12);
  }
}

TEST(Call, EmptyAndTinySequences) {
  const Context context = tested_context();
  for (const int64_t nq : {0, 1, 2, 7, 33}) {
    for (const int64_t nk : {0, 1, 2, 7, 33}) {
      const Inputs in(1, 2, nq, nk, 8, 71);
      std::vector<Settings> all = baselines();
      for (const char* name : {"scope", "scope-exact", "dense"}) all.push_back(method(name, {{"partition", "even:2"}}));
      for (const Settings& settings : all) {
        const Plan plan(context, settings, in.shape());
        const Result result = run(plan, in);
        for (const float x : result.out) {
          ASSERT_TRUE(std::isfinite(x));
          ASSERT_TRUE(nk > 0 || x == 0.0f);
        }
        for (int64_t i = 0; i < nq; ++i) {
          const auto sees = [&](int64_t j) {
            if (result.stats.reason != Reason::sparse) return true;
            return mask_bit(result.mask.data() + result.labels[static_cast<size_t>(i)] * mask_words(nk), j);
          };
          ASSERT_NO_FATAL_FAILURE(expect_rows(in, result, 0, 0, i, exact_row(in, 0, 0, i, sees)));
        }
      }
    }
  }
}

// What a call found lies in its report, whatever the workspace is used for afterwards.
TEST(Call, ReportsAreReadLater) {
  const Context context = tested_context();
  for (const Settings& settings : {method("scope", {{"partition", "even:2"}}), method("sparge"), method("dense")}) {
    SCOPED_TRACE(settings.method->name);
    const Inputs first(2, 2, 150, 170, 40, 73), second(2, 2, 150, 170, 40, 74);
    const Plan plan(context, settings, first.shape());
    Lent<std::byte> reports(*plan.backend, plan.exec, 2 * round_up(plan.report_bytes, 16));
    PreparedCall prepared(plan, first);
    std::vector<Result> expected;
    for (const Inputs* in : {&first, &second}) {
      expected.push_back(run(plan, *in));
      prepared.upload(*in);
      prepared.args.report = reports.data() + (in == &first ? 0 : round_up(plan.report_bytes, 16));
      EXPECT_TRUE(same_bits(prepared.run(), expected.back()));
    }
    const std::vector<std::byte> bytes = reports.values();
    for (size_t i = 0; i < 2; ++i) {
      // A copy on the host may lie anywhere.
      std::vector<std::byte> copy(static_cast<size_t>(plan.report_bytes) + 1);
      std::copy_n(bytes.begin() + static_cast<int64_t>(i) * round_up(plan.report_bytes, 16), plan.report_bytes,
                  copy.begin() + 1);
      CallStats stats;
      std::vector<HeadStats> heads(4);
      read_report(plan, copy.data() + 1, &stats, heads.data());
      EXPECT_EQ(stats.density, expected[i].stats.density);
      EXPECT_EQ(stats.total_density, expected[i].stats.total_density);
      EXPECT_EQ(std::memcmp(heads.data(), expected[i].heads.data(), heads.size() * sizeof heads[0]), 0);
    }
    if (!settings.dense && row(settings.group).iterates) {
      EXPECT_NE(expected[0].stats.density, expected[1].stats.density);
    }
    prepared.args.report = reports.data() + 8;
    EXPECT_EQ(status_of([&] { prepared.run(); }), Status::alignment);
  }
}

TEST(Call, RefusesBadArgumentsAndWritesNothing) {
  const Context context = tested_context(1);
  const Inputs in(1, 2, 50, 60, 40, 81);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const auto attempt = [&](const std::function<void(CallArgs&)>& change, const Inputs* other = nullptr) {
    PreparedCall prepared(plan, other == nullptr ? in : *other);
    const auto before = prepared.bytes();
    change(prepared.args);
    const Status status = status_of([&] { call(plan, prepared.args); });
    EXPECT_TRUE(prepared.bytes() == before) << "something was written";
    return status;
  };
  const int64_t long_length[] = {61};
  const uint32_t bits[] = {1, 0};
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.data = nullptr; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.dtype = a.q.dtype == DType::bf16 ? DType::f16 : DType::bf16; }), Status::dtype);
  EXPECT_EQ(attempt([](CallArgs& a) { a.k.tokens = 59; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.v.dim = 41; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.token_stride = -40; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.head_stride = int64_t{1} << 62; }), Status::size_limit);
  EXPECT_EQ(attempt([](CallArgs& a) { a.out.token_stride = 39; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.out.head_stride = 0; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.data = static_cast<const char*>(a.q.data) + 1; }), Status::alignment);
  EXPECT_EQ(attempt([&](CallArgs& a) { a.k_lengths = long_length; }), Status::shape);
  EXPECT_EQ(attempt([&](CallArgs& a) { a.dense_queries = bits; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { --a.workspace_bytes; }), Status::workspace);
  EXPECT_EQ(attempt([](CallArgs& a) { a.workspace = nullptr; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.place = {1, 5, 5}; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.place = {1, 5, int64_t{1} << 62}; }), Status::invalid_argument);
  if (!backend().can.host) return;           // a device finds out when it has read them
  for (const float wrong : {kNan, 2e18f}) {  // the second is finite, but its products may not be
    Inputs spoiled = in;
    spoiled.q[1234] = wrong;
    EXPECT_EQ(attempt([](CallArgs&) {}, &spoiled), Status::non_finite);
  }
  Inputs spoiled = in;
  spoiled.k[777] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(attempt([](CallArgs&) {}, &spoiled), Status::non_finite);
}

// Whether a call selects or not, it refuses the same q and k; what is padding is not looked at.
TEST(CallOnCpu, DenseCallsRefuseWhatSparseOnesDo) {
  const Context context(2);
  const Inputs in(1, 2, 60, 60, 40, 9);
  const Plan dense(context, method("dense"), in.shape()),
      sparse(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Plan unchecked(context, method("dense", {{"check_finite", "no"}}), in.shape());
  Extra dense_layer, padded;
  dense_layer.place = {0, -1, 0};
  padded.q_lengths = {59};
  for (const float wrong : {kNan, -std::numeric_limits<float>::infinity(), 2e18f}) {
    Inputs spoiled = in;
    spoiled.q[59 * 40 + 3] = wrong;  // of the last token
    EXPECT_EQ(status_of([&] { run(dense, spoiled, {}); }), Status::non_finite);
    EXPECT_EQ(status_of([&] { run(sparse, spoiled, dense_layer); }), Status::non_finite);
    EXPECT_EQ(status_of([&] { run(unchecked, spoiled, {}); }), Status::ok);
    EXPECT_EQ(status_of([&] { run(dense, spoiled, padded); }), Status::ok);
    PreparedCall prepared(sparse, spoiled, {});
    const std::vector<int32_t> labels(2 * 60, 0);
    const std::vector<uint32_t> mask(static_cast<size_t>(2 * sparse.selection_groups * 2), 1u);
    EXPECT_EQ(status_of([&] {
                attend_selected(sparse, prepared.args, {labels.data(), mask.data(), nullptr});
              }),
              Status::non_finite);
  }
}

// Tensors of more than 2^31 elements, of which each head's last tokens are valid: q, k and v are pages of zeros before them,
// and one piece of memory stands behind all of out but its last piece. Keys are all kept, so sparse calls equal dense ones.
TEST(CallOnCpu, MoreThanTwoToThe31Elements) {
  constexpr int64_t kHeads = 17, kTokens = int64_t{1} << 19, kDim = 256, kValid = 40, kPiece = int64_t{1} << 26;
  constexpr int64_t kBytes = kHeads * kTokens * kDim * 2;
  const Inputs in(1, kHeads, kValid, kValid, kDim, 61, DType::f16);
  const SparseMemory q(kBytes), k(kBytes), v(kBytes), out(kBytes);
  const int piece = memfd_create("out", 0);
  if (!q.ok() || !k.ok() || !v.ok() || !out.ok() || piece < 0) GTEST_SKIP() << "no address space";
  ASSERT_EQ(ftruncate(piece, kPiece), 0);
  for (int64_t at = 0; at + kPiece < kBytes; at += kPiece) {
    void* const place = static_cast<std::byte*>(out.data()) + at;
    ASSERT_EQ(mmap(place, kPiece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, piece, 0), place);
  }
  close(piece);
  const auto view = [&](const SparseMemory& memory) {
    return TensorView{memory.data(), DType::f16, 1, kHeads, kTokens, kDim, kBytes / 2, kTokens * kDim, kDim};
  };
  for (const auto& [memory, values] : {std::pair{&q, &in.q}, {&k, &in.k}, {&v, &in.v}}) {
    for (int64_t i = 0; i < std::ssize(*values); ++i) {
      const int64_t head = i / (kValid * kDim), at = ((head + 1) * kTokens - kValid) * kDim + i % (kValid * kDim);
      put(static_cast<std::byte*>(memory->data()), DType::f16, at, static_cast<double>((*values)[static_cast<size_t>(i)]));
    }
  }
  const Context context(2);
  const Plan small(context, method("dense"), in.shape());
  const Result expected = run(small, in, {});
  Shape shape = in.shape();
  shape.q_tokens = shape.k_tokens = kTokens;
  std::vector<uint32_t> valid(static_cast<size_t>(mask_words(kTokens)));
  for (int64_t i = kTokens - kValid; i < kTokens; ++i) set_mask_bit(valid.data(), i);
  for (const Settings& settings :
       {method("dense"),
        method("scope", {{"partition", "even:2"}, {"groups", "8"}, {"codes", "8"}, {"rule", "fixed"}, {"density", "1"}})}) {
    const Plan plan(context, settings, shape);
    std::vector<std::byte> workspace(static_cast<size_t>(plan.workspace_bytes));
    CallArgs args;
    args.q = view(q), args.k = view(k), args.v = view(v);
    args.out = {out.data(), DType::f16, 1, kHeads, kTokens, kDim, kBytes / 2, kTokens * kDim, kDim};
    args.valid_queries = args.valid_keys = valid.data();
    args.workspace = workspace.data();
    args.workspace_bytes = plan.workspace_bytes;
    std::byte* const last = static_cast<std::byte*>(out.data()) + kBytes - kPiece;
    std::memset(last, 0x7f, kPiece);
    call(plan, args);
    const int64_t padding = kPiece / 2 - kValid * kDim;
    const float* const rows = expected.out.data() + (kHeads - 1) * kValid * kDim;
    for (int64_t i = 0; i < kPiece / 2; ++i) {
      const float want = i < padding ? 0 : rows[i - padding];
      ASSERT_NEAR(f16_to_f32(reinterpret_cast<const uint16_t*>(last)[i]), want, limits().equal_out)
          << settings.method->name << ' ' << i;
    }
  }
}

// out may be q itself and nothing else that a call reads or writes.
TEST(Call, OutOverlapsNothingButQ) {
  const Context context = tested_context();
  for (const char* name : {"scope", "dense"}) {
    SCOPED_TRACE(name);
    const Inputs in(2, 2, 96, 96, 40, 83);
    const Plan plan(context, method(name, {{"partition", "even:2"}}), in.shape());
    std::unique_ptr<OwnState> own;
    if (plan.state_bytes > 0) own = std::make_unique<OwnState>(plan);
    const Extra extra{.state = own == nullptr ? nullptr : &own->state};
    const auto refused = [&](const std::function<void(CallArgs&)>& change) {
      PreparedCall prepared(plan, in, extra);
      const auto before = prepared.bytes(), workspace = prepared.workspace();
      change(prepared.args);
      const Status status = status_of([&] { call(plan, prepared.args); });
      EXPECT_TRUE(prepared.bytes() == before && prepared.workspace() == workspace) << "something was written";
      return status == Status::invalid_argument;
    };
    const int64_t row_bytes = in.dim * dtype_bytes(in.dtype);
    const auto at = [](const void* data, int64_t bytes) {
      return const_cast<std::byte*>(static_cast<const std::byte*>(data) + bytes);
    };
    EXPECT_TRUE(refused([&](CallArgs& a) {  // q, token by token
      a.out.data = at(a.q.data, 0);
      a.out.head_stride = in.dim;
      a.out.token_stride = 2 * in.dim;
    }));
    for (const int64_t shift : {int64_t{0}, row_bytes, -row_bytes, 95 * row_bytes, (4 * 96 - 1) * row_bytes}) {
      SCOPED_TRACE(shift);
      EXPECT_TRUE(refused([&](CallArgs& a) { a.out.data = at(a.k.data, shift); }));
      EXPECT_TRUE(refused([&](CallArgs& a) { a.out.data = at(a.v.data, shift); }));
      if (shift != 0) {
        EXPECT_TRUE(refused([&](CallArgs& a) { a.out.data = at(a.q.data, shift); }));
      }
    }
    EXPECT_TRUE(refused([&](CallArgs& a) { a.out.data = at(a.workspace, 64); }));
    EXPECT_TRUE(refused([&](CallArgs& a) { a.workspace = at(a.out.data, row_bytes * 8); }));
    EXPECT_TRUE(refused([&](CallArgs& a) { a.lse = reinterpret_cast<float*>(at(a.out.data, row_bytes)); }));
    EXPECT_TRUE(refused([&](CallArgs& a) { a.report = at(a.out.data, 64); }));
    if (own != nullptr) {
      EXPECT_TRUE(refused([&](CallArgs& a) { a.out.data = at(own->state.memory(), 64); }));
      own->state.set_filled(false);
    }
    const Result expected = run(plan, in);
    PreparedCall in_place(plan, in);
    in_place.args.out.data = at(in_place.args.q.data, 0);
    in_place.run();
    EXPECT_EQ(in_place.fetch_q(), expected.out);
  }
}

// q, k, v and out as columns of one buffer, [batch, tokens, 4, heads, dim] and [batch, heads, tokens, 4, dim].
TEST(Call, FusedBuffersShareNoElement) {
  const Context context = tested_context();
  const int64_t tokens = 130, heads = 2, dim = 40;
  const Inputs in(2, heads, tokens, tokens, dim, 87);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Result expected = run(plan, in);
  const int64_t bytes = dtype_bytes(in.dtype);
  for (const bool token_major : {true, false}) {
    const int64_t token = token_major ? 4 * heads * dim : 4 * dim, head = token_major ? dim : tokens * 4 * dim;
    const int64_t batch = tokens * 4 * heads * dim, column = token_major ? heads * dim : dim;
    std::vector<std::byte> image(static_cast<size_t>(2 * batch * bytes), std::byte{0xff});
    const auto each = [&](int64_t which, const auto& body) {
      for (int64_t i = 0; i < 2 * heads * tokens * dim; ++i) {
        const int64_t b = i / (heads * tokens * dim), h = i / (tokens * dim) % heads, t = i / dim % tokens;
        body(static_cast<size_t>(i), (b * batch + h * head + t * token + which * column + i % dim) * bytes);
      }
    };
    const std::vector<float>* const inputs[] = {&in.q, &in.k, &in.v};
    for (int64_t which = 0; which < 3; ++which) {
      each(which,
           [&](size_t i, int64_t at) { put(image.data() + at, in.dtype, 0, static_cast<double>((*inputs[which])[i])); });
    }
    Lent<std::byte> fused(*plan.backend, plan.exec, std::ssize(image));
    fused.write(image);
    PreparedCall prepared(plan, in);
    const auto place = [&](auto& view, int64_t which) {
      view.data = fused.data() + which * column * bytes;
      view.batch_stride = batch;
      view.head_stride = head;
      view.token_stride = token;
    };
    place(prepared.args.q, 0);
    place(prepared.args.k, 1);
    place(prepared.args.v, 2);
    place(prepared.args.out, 3);
    prepared.run();
    const std::vector<std::byte> after = fused.values();
    each(3, [&](size_t i, int64_t at) {
      const RowsView one{after.data() + at, in.dtype, 1, 1, 1};
      ASSERT_EQ(static_cast<float>(reference::element(one, 0, 0)), expected.out[i]) << i;
      std::copy_n(after.begin() + at, bytes, image.begin() + at);
    });
    EXPECT_TRUE(image == after) << "q, k or v was written";
    // The same with out one column early is on v.
    place(prepared.args.out, 2);
    EXPECT_EQ(status_of([&] { call(plan, prepared.args); }), Status::invalid_argument);
    EXPECT_TRUE(fused.values() == after);
  }
}

TEST(Plan, RefusesBadShapes) {
  const Context context = tested_context(1);
  const auto attempt = [&](const std::function<void(Shape&)>& change) {
    Shape shape = Inputs(1, 2, 10, 10, 8, 1).shape();
    change(shape);
    return status_of([&] { Plan(context, method("scope", {{"partition", "even:2"}}), shape); });
  };
  EXPECT_EQ(attempt([](Shape&) {}), Status::ok);
  EXPECT_EQ(attempt([](Shape& s) { s.batch = 0; }), Status::shape);
  EXPECT_EQ(attempt([](Shape& s) { s.heads = -1; }), Status::shape);
  EXPECT_EQ(attempt([](Shape& s) { s.q_tokens = -1; }), Status::shape);
  EXPECT_EQ(attempt([](Shape& s) { s.k_tokens = int64_t{1} << 31; }), Status::size_limit);
  EXPECT_EQ(attempt([](Shape& s) { s.dim = 0; }), Status::shape);
  EXPECT_EQ(attempt([](Shape& s) { s.dim = 257; }), Status::unsupported);
  EXPECT_EQ(attempt([](Shape& s) { s.batch = s.heads = int64_t{1} << 31; }), Status::size_limit);
  EXPECT_EQ(attempt([](Shape& s) { s.subspaces = {{0, 1, 2}, {2, 3, 4, 5, 6, 7}}; }), Status::shape);
  EXPECT_EQ(attempt([](Shape& s) { s.subspaces = {{0, 1, 2}, {3, 4, 5, 6}}; }), Status::shape);
  EXPECT_EQ(status_of([] { Context(-1); }), Status::invalid_argument);
  EXPECT_EQ(status_of([] { Context(1, "avx9"); }), Status::unsupported);
}

// Beyond inputs and output, one head at Wan's 720p size stays under 85 MB.
TEST(PlanOnCpu, WorkspaceAtWanSizeIsSmall) {
  const Shape shape{.batch = 1,
                    .heads = 1,
                    .q_tokens = 75600,
                    .k_tokens = 75600,
                    .dim = 128,
                    .dtype = DType::bf16,
                    .rope = {44, 42, 42},
                    .subspaces = {}};
  for (const int threads : {2, 16, 64}) {
    const Context context(threads);
    for (const char* name : {"scope", "scope-paper", "scope-exact"}) {
      const Plan plan(context, method(name), shape);
      EXPECT_LT(plan.workspace_bytes + plan.state_bytes, 85'000'000) << name << ", " << threads << " threads";
    }
  }
}

// A sample with nothing to select from attends densely, says so, and its selection means what its output shows.
TEST(Call, SamplesWithNothingToSelect) {
  const Context context = tested_context();
  const Inputs in(3, 2, 60, 60, 40, 95);
  Extra extra;
  extra.q_lengths = {60, 60, 0};
  extra.k_lengths = {60, 20, 0};
  extra.keep.resize(3 * 2);
  extra.keep[2] = (1u << 20) - 1;  // all valid keys of sample 1 are text
  const Plan plan(context, method("scope", {{"partition", "even:2"}, {"rule", "fixed"}, {"density", "0.2"}}), in.shape());
  const Result result = run(plan, in, extra);
  EXPECT_EQ(result.stats.reason, Reason::sparse);
  EXPECT_NEAR(result.stats.density, 0.2, 1e-9);                      // sparse samples alone
  EXPECT_NEAR(result.stats.total_density, (0.2 + 1 + 1) / 3, 1e-9);  // all of them
  expect_consistent(in, plan, result, extra);
  extra.k_lengths = {0, 0, 0};
  const Result none = run(plan, in, extra);
  EXPECT_EQ(none.stats.reason, Reason::nothing_to_select);
  EXPECT_EQ(none.stats.density, 1.0);
  EXPECT_EQ(none.stats.total_density, 1.0);
}

// A call that fails midway must not leave centroids behind that later calls would trust.
TEST(StateOnCpu, AFailedCallStartsColdNextTime) {
  const Context context = tested_context(1);
  const Inputs in(1, 1, 64, 64, 40, 97);
  const Plan plan(context, method("scope-exact", {{"check_finite", "no"}}), in.shape());
  OwnState own(plan);
  Extra extra;
  extra.state = &own.state;
  const Result cold = run(plan, in, extra);
  Inputs huge = in;
  for (float& x : huge.q) x *= 1e20f;
  for (float& x : huge.k) x *= 1e20f;
  EXPECT_EQ(status_of([&] { run(plan, huge, extra); }), Status::non_finite);
  const Result after = run(plan, in, extra);
  EXPECT_FALSE(after.stats.warm);
  EXPECT_EQ(after.out, cold.out);
}

TEST(Call, SelectedAttentionTakesThePublicFormat) {
  const Context context = tested_context();
  const int64_t k_tokens = 490;
  const Inputs in(1, 2, 480, k_tokens, 40, 91);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Result whole = run(plan, in);
  Lent<int32_t> labels(*plan.backend, plan.exec, std::ssize(whole.labels));
  Lent<uint32_t> mask(*plan.backend, plan.exec, std::ssize(whole.mask));
  labels.write(whole.labels);
  mask.write(whole.mask);
  PreparedCall prepared(plan, in);
  const auto attend = [&] {
    attend_selected(plan, prepared.args, {labels.data(), mask.data(), nullptr});
    return prepared.fetch().out;
  };
  EXPECT_EQ(attend(), whole.out);
  // What is in a device's memory cannot be refused: it is dropped, not followed.
  const bool host = backend().can.host;
  std::vector<int32_t> wrong = whole.labels;
  wrong[5] = static_cast<int32_t>(plan.selection_groups);
  wrong[7] = 1 << 20;
  labels.write(wrong);
  const int64_t words = mask_words(k_tokens);
  std::vector<uint32_t> past = whole.mask;
  for (size_t r = 0; r < past.size() / static_cast<size_t>(words); ++r) {
    past[(r + 1) * static_cast<size_t>(words) - 1] |= ~0u << (k_tokens % 32);
  }
  if (host) {
    EXPECT_EQ(status_of(attend), Status::invalid_argument);
    labels.write(whole.labels);
    mask.write(past);
    EXPECT_EQ(status_of(attend), Status::invalid_argument);
    mask.write(whole.mask);
    const int64_t short_length[] = {32};
    prepared.args.k_lengths = short_length;  // the selection holds keys that are now padding
    EXPECT_EQ(status_of(attend), Status::invalid_argument);
    prepared.args.k_lengths = nullptr;
    std::vector<uint32_t> valid(static_cast<size_t>(words), ~0u);
    valid[0] = 0;  // or in a hole
    prepared.args.valid_keys = valid.data();
    EXPECT_EQ(status_of(attend), Status::invalid_argument);
  } else {
    mask.write(past);
    const std::vector<float> out = attend();
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i / 40 == 5 || i / 40 == 7 ? 0.0f : whole.out[i]) << i;
  }
}

TEST(Call, SelectedAttentionOfABatchKeepsEachSamplesText) {
  const Context context = tested_context();
  const Inputs in(2, 2, 150, 100, 40, 92);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  Extra extra;
  extra.keep.assign(2 * 4, 0);
  set_mask_bit(extra.keep.data(), 3);
  for (const int64_t j : {50, 99}) set_mask_bit(extra.keep.data() + 4, j);
  const Result whole = run(plan, in, extra);
  EXPECT_EQ(whole.keep, extra.keep);
  Lent<int32_t> labels(*plan.backend, plan.exec, std::ssize(whole.labels));
  Lent<uint32_t> mask(*plan.backend, plan.exec, std::ssize(whole.mask)), keep(*plan.backend, plan.exec, 8);
  labels.write(whole.labels);
  mask.write(whole.mask);
  keep.write(whole.keep);
  PreparedCall prepared(plan, in);
  attend_selected(plan, prepared.args, {labels.data(), mask.data(), keep.data()});
  EXPECT_EQ(prepared.fetch().out, whole.out);
}

}  // namespace
}  // namespace scope::test
