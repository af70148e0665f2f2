// Whole calls: plan, state, schedule, text, padding, batches, statistics, and what is refused.
#include <limits>

#include "call_support.h"

namespace scope::test {
namespace {

TEST(Call, OutputIsAttentionOverTheSelection) {
  const Context context(2);
  for (const char* rule : {"fixed", "top_p", "hybrid", "online", "target"}) {
    for (const char* proxy : {"codes", "exact"}) {
      const Inputs in(2, 2, 130, 97, 40, 3);
      const Plan plan(context, method("scope", {{"rule", rule}, {"proxy", proxy}, {"partition", "even:3"}}), in.shape());
      const Result result = run(plan, in);
      EXPECT_EQ(result.stats.reason, Reason::sparse);
      expect_consistent(in, plan, result, {});
    }
  }
}

TEST(Call, RhoOneEqualsDense) {
  const Context context(2);
  const Inputs in(1, 2, 257, 257, 64, 5);
  const Result sparse = run(Plan(context, method("scope", {{"rho", "1"}, {"partition", "even:3"}}), in.shape()), in);
  const Result dense = run(Plan(context, method("dense"), in.shape()), in);
  EXPECT_EQ(dense.stats.reason, Reason::method_dense);
  EXPECT_EQ(sparse.stats.density, 1.0);
  for (size_t i = 0; i < dense.out.size(); ++i) ASSERT_NEAR(sparse.out[i], dense.out[i], 1e-5);
  for (size_t i = 0; i < dense.lse.size(); ++i) ASSERT_NEAR(sparse.lse[i], dense.lse[i], 1e-5);
}

// Text anywhere in the sequence, padding at the end, per-sample lengths: [text 3][video][text 5][padding].
TEST(Call, TextAndPadding) {
  const Context context(2);
  const int64_t tokens = 150;
  Inputs in(2, 2, tokens, tokens, 40, 9);
  Extra extra;
  extra.q_lengths = extra.k_lengths = {150, 121};
  extra.keep.resize(2 * static_cast<size_t>(mask_words(tokens)));
  for (int64_t b = 0; b < 2; ++b) {
    for (const int64_t j : {0, 1, 2, 80, 81, 82, 83, 84}) set_mask_bit(extra.keep.data() + b * mask_words(tokens), j);
    set_mask_bit(extra.keep.data() + b * mask_words(tokens), 149);  // text that is padding in sample 1
  }
  extra.dense_queries = extra.keep;
  // Padding may hold anything.
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 121; i < 150; ++i) {
      const size_t at = static_cast<size_t>(((2 + h) * tokens + i) * 40);
      for (size_t c = 0; c < 40; ++c) in.q[at + c] = in.k[at + c] = in.v[at + c] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  Shape shape = in.shape();
  shape.dense_queries = true;
  for (const char* tail : {"none", "first_order"}) {
    const Plan plan(
        context, method("scope", {{"partition", "even:2"}, {"rule", "fixed"}, {"density", "0.2"}, {"tail", tail}}), shape);
    const Result result = run(plan, in, extra);
    const int64_t groups = plan.selection_groups, words = mask_words(tokens);
    EXPECT_EQ(groups, plan.groups + 1);
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t valid = extra.k_lengths[static_cast<size_t>(b)];
      const int64_t text = b == 0 ? 9 : 8;
      EXPECT_EQ(result.heads[static_cast<size_t>(2 * b)].queries, valid - text);
      EXPECT_EQ(result.heads[static_cast<size_t>(2 * b)].keys, valid - text);
      for (int64_t h = 0; h < 2; ++h) {
        const int64_t head = 2 * b + h;
        EXPECT_EQ(result.sizes[static_cast<size_t>(head * groups + groups - 1)], text);
        EXPECT_EQ(result.counts[static_cast<size_t>(head * groups + groups - 1)], valid - text);
        for (const int64_t j : {0, 82}) {  // always-kept keys are 0 in every mask row
          for (int64_t c = 0; c < groups; ++c) EXPECT_FALSE(mask_bit(result.mask.data() + (head * groups + c) * words, j));
        }
        expect_rows(in, result, b, h, 81, exact_row(in, b, h, 81, [&](int64_t j) { return j < valid; }));
        for (int64_t i = valid; i < tokens; ++i) {
          expect_rows(in, result, b, h, i, std::vector<double>(40, 0.0));
          EXPECT_EQ(result.lse[static_cast<size_t>(head * tokens + i)], -std::numeric_limits<float>::infinity());
        }
      }
    }
    if (std::string(tail) == "none") expect_consistent(in, plan, result, extra);
  }
}

TEST(Call, ASampleAloneEqualsItselfInABatch) {
  const Context context(2);
  const Inputs both(2, 2, 140, 140, 64, 21);
  for (const char* name : {"scope", "scope-exact"}) {
    const Settings settings = method(name, {{"partition", "even:4"}, {"tail", "first_order"}});
    const Result batch = run(Plan(context, settings, both.shape()), both);
    for (int64_t b = 0; b < 2; ++b) {
      Inputs one = both;
      one.batch = 1;
      const int64_t n = 2 * 140 * 64;
      for (auto* x : {&one.q, &one.k, &one.v}) *x = std::vector<float>(x->begin() + b * n, x->begin() + (b + 1) * n);
      const Result alone = run(Plan(context, settings, one.shape()), one);
      EXPECT_EQ(std::memcmp(alone.out.data(), batch.out.data() + b * n, static_cast<size_t>(n) * 4), 0);
    }
  }
}

TEST(Call, BitwiseTheSameForAnyThreadCountAndRepeat) {
  const Inputs in(1, 2, 300, 300, 64, 33);
  const Settings settings = method("scope", {{"partition", "even:3"}, {"rule", "target"}, {"tail", "first_order"}});
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 7}) {
    const Context context(threads);
    const Plan plan(context, settings, in.shape());
    for (int i = 0; i < 25; ++i) {
      const Result result = run(plan, in);
      if (first.empty()) first = result.out;
      ASSERT_EQ(std::memcmp(first.data(), result.out.data(), first.size() * 4), 0) << threads << " threads, run " << i;
    }
  }
}

TEST(Call, BothLayoutsAndUnalignedStridesAgree) {
  const Context context(2);
  const Inputs in(2, 3, 70, 90, 40, 41);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Result expected = run(plan, in);
  // [batch, tokens, heads, dim + 3] memory, NaN between rows.
  const int64_t wide = in.dim + 3;
  const auto spread = [&](const std::vector<float>& x, int64_t tokens) {
    std::vector<float> out(static_cast<size_t>(in.batch * tokens * in.heads * wide),
                           std::numeric_limits<float>::quiet_NaN());
    for (int64_t b = 0; b < in.batch; ++b)
      for (int64_t h = 0; h < in.heads; ++h)
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t c = 0; c < in.dim; ++c)
            out[static_cast<size_t>(((b * tokens + t) * in.heads + h) * wide + c)] =
                x[static_cast<size_t>(((b * in.heads + h) * tokens + t) * in.dim + c)];
    return out;
  };
  const auto q = spread(in.q, in.q_tokens), k = spread(in.k, in.k_tokens), v = spread(in.v, in.k_tokens);
  std::vector<float> out(q.size(), 7.0f);
  std::vector<std::byte> workspace(static_cast<size_t>(plan.workspace_bytes));
  CallArgs args;
  const auto view = [&](const std::vector<float>& x, int64_t tokens) {
    return TensorView{x.data(), DType::f32,     in.batch, in.heads, tokens, in.dim, tokens * in.heads * wide,
                      wide,     in.heads * wide};
  };
  args.q = view(q, in.q_tokens);
  args.k = view(k, in.k_tokens);
  args.v = view(v, in.k_tokens);
  args.out = {out.data(), DType::f32,     in.batch, in.heads, in.q_tokens, in.dim, in.q_tokens * in.heads * wide,
              wide,       in.heads * wide};
  args.workspace = workspace.data();
  args.workspace_bytes = plan.workspace_bytes;
  call(plan, args);
  const auto expected_spread = spread(expected.out, in.q_tokens);
  for (size_t i = 0; i < out.size(); ++i) {
    if (std::isnan(expected_spread[i])) {
      ASSERT_EQ(out[i], 7.0f) << "wrote between rows";
    } else {
      ASSERT_EQ(out[i], expected_spread[i]);
    }
  }
}

TEST(State, WarmCallsContinueFromIt) {
  const Context context(2);
  const Inputs in(2, 2, 200, 200, 64, 51);
  for (const char* dtype : {"f32", "bf16"}) {
    const Settings settings = method("scope", {{"partition", "even:3"}, {"state_dtype", dtype}});
    const Plan plan(context, settings, in.shape());
    std::vector<std::max_align_t> state(static_cast<size_t>(plan.state_bytes) / sizeof(std::max_align_t) + 1);
    init_state(plan, state.data());
    Extra extra;
    extra.state = state.data();
    const Result cold = run(plan, in, extra);
    EXPECT_FALSE(cold.stats.warm);
    EXPECT_EQ(cold.stats.iterations, 4);
    const auto saved = state;
    const Result warm = run(plan, in, extra);
    EXPECT_TRUE(warm.stats.warm);
    EXPECT_EQ(warm.stats.iterations, 2);
    state = saved;  // saving a state is copying it
    const Result again = run(plan, in, extra);
    EXPECT_EQ(warm.out, again.out);
    if (std::string(dtype) == "f32") {  // 4 + 2 iterations are 6
      Settings six = settings;
      six.first_iterations = 6;
      six.first_sample = 1;
      Settings four = settings;
      four.first_sample = 1;
      const Plan plan_four(context, four, in.shape());
      init_state(plan_four, state.data());
      run(plan_four, in, extra);
      EXPECT_EQ(run(plan_four, in, extra).out, run(Plan(context, six, in.shape()), in).out);
    }
  }
}

// FIRST forgets the state, WARM insists on it, and a sample that was never filled is refused before anything is written.
TEST(State, StartSaysWhetherToForget) {
  const Context context(1);
  const Inputs in(2, 2, 200, 200, 64, 57);
  const Plan plan(context, method("scope", {{"partition", "even:3"}}), in.shape());
  std::vector<std::max_align_t> state(static_cast<size_t>(plan.state_bytes) / sizeof(std::max_align_t) + 1);
  init_state(plan, state.data());
  Extra extra;
  extra.state = state.data();
  extra.start = Start::warm;
  EXPECT_EQ(status_of([&] { run(plan, in, extra); }), Status::invalid_argument);
  extra.start = Start::first;
  extra.q_lengths = extra.k_lengths = {200, 0};  // sample 1 has nothing to cluster, so its slot stays empty
  const Result first = run(plan, in, extra);
  EXPECT_EQ(run(plan, in, extra).out, first.out);
  extra.start = Start::warm;
  EXPECT_TRUE(run(plan, in, extra).stats.warm);
  extra.q_lengths = extra.k_lengths = {};
  const auto before = state;
  EXPECT_EQ(status_of([&] { run(plan, in, extra); }), Status::invalid_argument);
  EXPECT_EQ(std::memcmp(before.data(), state.data(), static_cast<size_t>(plan.state_bytes)), 0);
}

// A short sample's state holds its own groups and codes, and nothing of the workspace.
TEST(State, HoldsNothingButCentroids) {
  const Context context(1);
  const Inputs in(1, 2, 400, 400, 64, 58);
  const Plan plan(context, method("scope", {{"partition", "even:3"}, {"groups", "300"}, {"codes", "300"}}), in.shape());
  std::vector<float> state(static_cast<size_t>(plan.state_bytes) / 4, 7.0f);  // malloc aligns to 16
  init_state(plan, state.data());
  Extra extra;
  extra.state = state.data();
  extra.q_lengths = extra.k_lengths = {120};
  run(plan, in, extra);
  const StateView view(plan, state.data(), 0);
  for (int64_t i = 120 * 64; i < 300 * 64; ++i) {
    ASSERT_EQ(static_cast<const float*>(view.centroids)[i], 7.0f) << i;
    ASSERT_EQ(static_cast<const float*>(view.codebooks)[i], 7.0f) << i;
  }
}

TEST(State, RefusesForeignAndUninitialisedMemory) {
  const Context context(1);
  const Inputs in(1, 1, 64, 64, 40, 1);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Plan other(context, method("scope", {{"partition", "even:4"}}), in.shape());
  std::vector<std::max_align_t> state(static_cast<size_t>(plan.state_bytes) / sizeof(std::max_align_t) + 1);
  Extra extra;
  extra.state = state.data();
  EXPECT_EQ(status_of([&] { run(plan, in, extra); }), Status::invalid_argument);
  init_state(other, state.data());
  EXPECT_EQ(status_of([&] { run(plan, in, extra); }), Status::shape);
  EXPECT_EQ(status_of([&] { run(Plan(context, method("dense"), in.shape()), in, extra); }), Status::invalid_argument);
}

TEST(Call, ScheduleRunsDenseAndCanWarmUp) {
  const Context context(2);
  const Inputs in(1, 2, 100, 100, 40, 61);
  const Settings settings = method("scope", {{"partition", "even:2"}, {"warm_prefix", "yes"}});
  const Plan plan(context, settings, in.shape());
  std::vector<std::max_align_t> state(static_cast<size_t>(plan.state_bytes) / sizeof(std::max_align_t) + 1);
  init_state(plan, state.data());
  Extra extra;
  extra.state = state.data();
  extra.place = {1, 0, 10};
  const Result dense = run(plan, in, extra);
  EXPECT_EQ(dense.stats.reason, Reason::dense_step);
  EXPECT_EQ(dense.out, run(Plan(context, method("dense"), in.shape()), in).out);
  EXPECT_EQ(dense.labels[0], -1);
  extra.place = {1, 2, 10};
  EXPECT_TRUE(run(plan, in, extra).stats.warm);  // the prefix clustered
  extra.place = {0, 2, 10};
  const Result layer = run(plan, in, extra);
  EXPECT_EQ(layer.stats.reason, Reason::dense_layer);
  EXPECT_EQ(layer.stats.iterations, 0);  // a layer that is always dense clusters nothing
}

TEST(Call, EmptyAndTinySequences) {
  const Context context(2);
  for (const int64_t nq : {0, 1, 2, 7}) {
    for (const int64_t nk : {0, 1, 2, 7}) {
      const Inputs in(1, 2, nq, nk, 8, 71);
      for (const char* name : {"scope", "scope-exact", "dense"}) {
        const Plan plan(context, method(name, {{"partition", "even:2"}}), in.shape());
        const Result result = run(plan, in);
        for (const float x : result.out) {
          ASSERT_TRUE(std::isfinite(x));
          ASSERT_TRUE(nk > 0 || x == 0.0f);
        }
      }
    }
  }
}

TEST(Call, RefusesBadArgumentsAndWritesNothing) {
  const Context context(1);
  const Inputs in(1, 2, 50, 60, 40, 81);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  std::vector<float> out(in.q.size(), 3.0f), q = in.q, k = in.k;
  std::vector<std::byte> workspace(static_cast<size_t>(plan.workspace_bytes));
  const auto attempt = [&](const std::function<void(CallArgs&)>& change) {
    CallArgs args;
    args.q = {q.data(), DType::f32, 1, 2, 50, 40, 4000, 2000, 40};
    args.k = {k.data(), DType::f32, 1, 2, 60, 40, 4800, 2400, 40};
    args.v = {in.v.data(), DType::f32, 1, 2, 60, 40, 4800, 2400, 40};
    args.out = {out.data(), DType::f32, 1, 2, 50, 40, 4000, 2000, 40};
    args.workspace = workspace.data();
    args.workspace_bytes = plan.workspace_bytes;
    change(args);
    const Status status = status_of([&] { call(plan, args); });
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return x == 3.0f; })) << "outputs were touched";
    return status;
  };
  const int64_t long_length[] = {61};
  const uint32_t bits[] = {1, 0};
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.data = nullptr; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.dtype = DType::bf16; }), Status::dtype);
  EXPECT_EQ(attempt([](CallArgs& a) { a.k.tokens = 59; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.v.dim = 41; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.token_stride = -40; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.head_stride = int64_t{1} << 62; }), Status::size_limit);
  EXPECT_EQ(attempt([](CallArgs& a) { a.out.token_stride = 39; }), Status::shape);
  EXPECT_EQ(attempt([](CallArgs& a) { a.out.head_stride = 0; }), Status::shape);
  EXPECT_EQ(attempt([&](CallArgs& a) { a.out.data = k.data(); }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.q.data = static_cast<const char*>(a.q.data) + 1; }), Status::alignment);
  EXPECT_EQ(attempt([&](CallArgs& a) { a.k_lengths = long_length; }), Status::shape);
  EXPECT_EQ(attempt([&](CallArgs& a) { a.dense_queries = bits; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { --a.workspace_bytes; }), Status::workspace);
  EXPECT_EQ(attempt([](CallArgs& a) { a.workspace = nullptr; }), Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.place = {1, 5, 5}; }), Status::invalid_argument);
  q[1234] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(attempt([](CallArgs&) {}), Status::non_finite);
  q = in.q;
  q[1234] = 2e18f;  // finite, but its products may not be
  EXPECT_EQ(attempt([](CallArgs&) {}), Status::non_finite);
  q = in.q;
  EXPECT_EQ(attempt([&](CallArgs& a) { a.out = {q.data(), DType::f32, 1, 2, 50, 40, 4000, 40, 80}; }),
            Status::invalid_argument);
  EXPECT_EQ(attempt([](CallArgs& a) { a.place = {1, 5, int64_t{1} << 62}; }), Status::invalid_argument);
  k[777] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(attempt([](CallArgs&) {}), Status::non_finite);
}

TEST(Plan, RefusesBadShapes) {
  const Context context(1);
  const auto attempt = [&](const std::function<void(Shape&)>& change) {
    Shape shape{
        .batch = 1, .heads = 2, .q_tokens = 10, .k_tokens = 10, .dim = 8, .dtype = DType::f32, .rope = {}, .subspaces = {}};
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
TEST(Plan, WorkspaceAtWanSizeIsSmall) {
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
  const Context context(2);
  const Inputs in(3, 2, 60, 60, 40, 95);
  Extra extra;
  extra.q_lengths = {60, 60, 0};
  extra.k_lengths = {60, 20, 0};
  extra.keep.resize(3 * 2);
  extra.keep[2] = (1u << 20) - 1;  // all valid keys of sample 1 are text
  const Plan plan(context, method("scope", {{"partition", "even:2"}, {"rule", "fixed"}, {"density", "0.2"}}), in.shape());
  const Result result = run(plan, in, extra);
  EXPECT_EQ(result.stats.reason, Reason::sparse);
  EXPECT_NEAR(result.stats.density, 0.2, 1e-9);  // sparse samples alone
  expect_consistent(in, plan, result, extra);
  extra.k_lengths = {0, 0, 0};
  const Result none = run(plan, in, extra);
  EXPECT_EQ(none.stats.reason, Reason::nothing_to_select);
  EXPECT_EQ(none.stats.density, 1.0);
}

// A call that fails midway must not leave centroids behind that later calls would trust.
TEST(State, AFailedCallStartsColdNextTime) {
  const Context context(1);
  const Inputs in(1, 1, 64, 64, 40, 97);
  const Plan plan(context, method("scope-exact", {{"check_finite", "no"}}), in.shape());
  std::vector<std::max_align_t> state(static_cast<size_t>(plan.state_bytes) / sizeof(std::max_align_t) + 1);
  init_state(plan, state.data());
  Extra extra;
  extra.state = state.data();
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
  const Context context(2);
  const Inputs in(1, 2, 80, 90, 40, 91);
  const Plan plan(context, method("scope", {{"partition", "even:2"}}), in.shape());
  const Result whole = run(plan, in);
  std::vector<float> out(in.q.size(), 3.0f);
  std::vector<std::byte> workspace(static_cast<size_t>(plan.workspace_bytes));
  CallArgs args;
  args.q = {in.q.data(), DType::f32, 1, 2, 80, 40, 6400, 3200, 40};
  args.k = {in.k.data(), DType::f32, 1, 2, 90, 40, 7200, 3600, 40};
  args.v = {in.v.data(), DType::f32, 1, 2, 90, 40, 7200, 3600, 40};
  args.out = {out.data(), DType::f32, 1, 2, 80, 40, 6400, 3200, 40};
  args.workspace = workspace.data();
  args.workspace_bytes = plan.workspace_bytes;
  attend_selected(plan, args, {whole.labels.data(), whole.mask.data(), nullptr});
  EXPECT_EQ(out, whole.out);
  std::vector<int32_t> labels = whole.labels;
  labels[5] = static_cast<int32_t>(plan.selection_groups);
  EXPECT_EQ(status_of([&] {
              attend_selected(plan, args, {labels.data(), whole.mask.data(), nullptr});
            }),
            Status::invalid_argument);
  const int64_t short_length[] = {32};
  args.k_lengths = short_length;  // the selection holds keys that are now padding
  EXPECT_EQ(status_of([&] {
              attend_selected(plan, args, {whole.labels.data(), whole.mask.data(), nullptr});
            }),
            Status::invalid_argument);
  args.k_lengths = nullptr;
  std::vector<uint32_t> mask = whole.mask;
  mask[2] |= 1u << 31;  // key 95 of 90
  EXPECT_EQ(status_of([&] {
              attend_selected(plan, args, {whole.labels.data(), mask.data(), nullptr});
            }),
            Status::invalid_argument);
}

}  // namespace
}  // namespace scope::test
