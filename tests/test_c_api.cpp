// The C ABI through its C++ face: a token-major host with its own allocator, errors, handles and threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory_resource>
#include <random>
#include <scope/scope.hpp>
#include <thread>

namespace {

// A host that keeps [batch, tokens, heads, dim] tensors in an arena of its own.
struct Host {
  static constexpr int64_t kBatch = 2, kTokens = 260, kHeads = 3, kDim = 64;
  std::pmr::monotonic_buffer_resource arena;
  float *q, *k, *v, *out;

  explicit Host(uint32_t seed) {
    const int64_t n = kBatch * kTokens * kHeads * kDim;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float** x : {&q, &k, &v, &out}) {
      *x = static_cast<float*>(arena.allocate(static_cast<size_t>(n) * 4, 4));
      for (int64_t i = 0; i < n; ++i) (*x)[i] = normal(random);
    }
  }
  scope_shape shape() const {
    scope_shape shape = scope_attn::make_shape();
    shape.batch = kBatch;
    shape.heads = kHeads;
    shape.q_tokens = shape.k_tokens = kTokens;
    shape.dim = kDim;
    shape.rope[0] = 24;
    shape.rope[1] = shape.rope[2] = 20;
    return shape;
  }
  scope_run_args args() {
    scope_run_args args = scope_attn::make_args();
    args.q = scope_attn::token_major(q, kHeads, kTokens, kDim);
    args.k = scope_attn::token_major(k, kHeads, kTokens, kDim);
    args.v = scope_attn::token_major(v, kHeads, kTokens, kDim);
    args.out = scope_attn::token_major(out, kHeads, kTokens, kDim);
    return args;
  }
  std::vector<float> result() const { return {out, out + kBatch * kTokens * kHeads * kDim}; }
};

TEST(CApi, TokenMajorHostWithItsOwnAllocator) {
  Host host(1);
  const scope_attn::Context context(2);
  scope_attn::Plan plan(context, scope_attn::Method("scope").set("rule", "target").set("density", "0.3"), host.shape());
  auto state = plan.make_state();
  scope_call_stats stats{};
  std::vector<scope_head_stats> heads(6);
  scope_run_args args = host.args();
  args.state = state.data();
  args.stats = &stats;
  args.head_stats = heads.data();
  plan.run(args);
  EXPECT_EQ(stats.reason, SCOPE_RAN_SPARSE);
  EXPECT_EQ(stats.warm, 0);
  EXPECT_NEAR(stats.density, 0.3, 0.01);
  EXPECT_GT(heads[5].k_head, 0);
  plan.run(args);
  EXPECT_EQ(stats.warm, 1);
  // rho = 1 is dense attention.
  scope_attn::Plan(context, scope_attn::Method("scope").set("rho", "1"), host.shape()).run(host.args());
  const auto whole = host.result();
  scope_attn::Plan(context, scope_attn::Method("dense"), host.shape()).run(host.args());
  const auto dense = host.result();
  for (size_t i = 0; i < dense.size(); ++i) ASSERT_NEAR(whole[i], dense[i], 1e-5);
}

TEST(CApi, SelectionGoesOutAndComesBack) {
  Host host(2);
  const scope_attn::Context context(2);
  scope_attn::Plan plan(context, scope_attn::Method(), host.shape());
  const scope_plan_info info = plan.info();
  const auto heads = static_cast<size_t>(Host::kBatch * Host::kHeads), groups = static_cast<size_t>(info.selection_groups);
  std::vector<int32_t> labels(heads * Host::kTokens), counts(heads * groups);
  std::vector<uint32_t> mask(heads * groups * static_cast<size_t>(info.mask_words));
  scope_run_args args = host.args();
  args.selection.labels = labels.data();
  args.selection.counts = counts.data();
  args.selection.mask = mask.data();
  plan.run(args);
  const auto whole = host.result();
  std::fill_n(host.out, whole.size(), 0.0f);
  plan.run_selection(args);
  EXPECT_EQ(host.result(), whole);
  // Select only: no v, no out.
  std::vector<uint32_t> again(mask.size());
  args.out.data = args.v.data = nullptr;
  args.selection.mask = again.data();
  plan.run(args);
  EXPECT_EQ(again, mask);
  EXPECT_EQ(host.result(), whole);
}

TEST(CApi, ErrorsNameTheArgumentAndLeaveHandlesUsable) {
  Host host(3);
  const scope_attn::Context context(1);
  scope_attn::Plan plan(context, scope_attn::Method(), host.shape());
  EXPECT_EQ(scope_run(nullptr, nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(scope_run(plan.handle(), nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  scope_run_args args = host.args();
  args.struct_size = 8;
  EXPECT_EQ(scope_run(plan.handle(), &args), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(scope_last_error(), "struct_size"), nullptr);
  args = host.args();
  EXPECT_EQ(scope_run(plan.handle(), &args), SCOPE_ERROR_WORKSPACE);
  EXPECT_NE(std::strstr(scope_last_error(), std::to_string(plan.info().workspace_bytes).c_str()), nullptr);
  host.q[5] = NAN;
  EXPECT_THROW(plan.run(host.args()), scope_attn::Error);
  host.q[5] = 0;
  plan.run(host.args());
  alignas(16) char state[64] = {};
  args.state = state + 8;
  EXPECT_EQ(scope_run(plan.handle(), &args), SCOPE_ERROR_ALIGNMENT);

  scope_shape shape = host.shape();
  scope_plan* none = nullptr;
  scope_attn::Method method;
  shape.dtype = 9;
  EXPECT_EQ(scope_plan_create(context.handle(), method.handle(), &shape, &none), SCOPE_ERROR_DTYPE);
  shape = host.shape();
  shape.rope[0] = 23;
  EXPECT_EQ(scope_plan_create(context.handle(), method.handle(), &shape, &none), SCOPE_ERROR_SHAPE);
  const int64_t sizes[] = {32, 33};
  const int32_t channels[64] = {};
  shape.subspaces = 2;
  shape.subspace_sizes = sizes;
  shape.subspace_channels = channels;
  EXPECT_EQ(scope_plan_create(context.handle(), method.handle(), &shape, &none), SCOPE_ERROR_SHAPE);
  EXPECT_EQ(none, nullptr);
  scope_method* unknown = nullptr;
  EXPECT_EQ(scope_method_create("sage", &unknown), SCOPE_ERROR_INVALID_ARGUMENT);
  scope_context* bad = nullptr;
  EXPECT_EQ(scope_context_create(-3, nullptr, &bad), SCOPE_ERROR_INVALID_ARGUMENT);
  scope_context_destroy(nullptr);
  scope_method_destroy(nullptr);
  scope_plan_destroy(nullptr);
}

TEST(CApi, SaysWhatABackendTakes) {
  EXPECT_EQ(scope_supports("cpu", SCOPE_BF16, 256), 1);
  EXPECT_EQ(scope_supports("cpu", SCOPE_F32, 257), 0);
  EXPECT_EQ(scope_supports("cuda", SCOPE_BF16, 128), 0);
  EXPECT_EQ(scope_supports(nullptr, SCOPE_F32, 64), 0);
}

TEST(CApi, SettingsTableCanBeWalked) {
  scope_setting_info info{};
  int32_t n = 0;
  scope_attn::Method method;
  while (scope_setting_at(n, &info) == SCOPE_OK) {
    EXPECT_FALSE(method.get(info.name).empty());
    ++n;
  }
  EXPECT_GT(n, 15);
  EXPECT_EQ(scope_setting_at(-1, &info), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(method.model("hunyuanvideo-13b").get("warm_prefix"), "yes");
}

// Separate contexts run concurrently and give the bits that a serial run gives.
TEST(CApi, SixteenThreadsEqualSerial) {
  const auto attend = [](uint32_t seed) {
    Host host(seed);
    const scope_attn::Context context(1);
    scope_attn::Plan plan(context, scope_attn::Method().set("first_iterations", "3"), host.shape());
    plan.run(host.args());
    return host.result();
  };
  std::vector<std::vector<float>> serial(4), parallel(16);
  for (uint32_t i = 0; i < 4; ++i) serial[i] = attend(i);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 16; ++i) threads.emplace_back([&, i] { parallel[i] = attend(i % 4); });
  for (auto& thread : threads) thread.join();
  for (uint32_t i = 0; i < 16; ++i) EXPECT_EQ(parallel[i], serial[i % 4]);
}

// Overlapping calls on one plan: each either succeeds or says busy, and none corrupts another.
TEST(CApi, OverlapIsBusy) {
  Host host(5);
  const scope_attn::Context context(1);
  scope_attn::Plan plan(context, scope_attn::Method().set("first_iterations", "3"), host.shape());
  const auto bytes = static_cast<size_t>(plan.info().workspace_bytes);
  std::atomic<int> ran{0}, busy{0}, other{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      std::vector<char> workspace(bytes);
      std::vector<float> out(host.result().size());
      scope_run_args args = host.args();
      args.out.data = out.data();
      args.workspace = workspace.data();
      args.workspace_bytes = static_cast<int64_t>(bytes);
      for (int n = 0; n < 5; ++n) {
        const scope_status status = scope_run(plan.handle(), &args);
        ++(status == SCOPE_OK ? ran : status == SCOPE_ERROR_BUSY ? busy : other);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GE(ran, 1);
  EXPECT_EQ(other, 0);
  EXPECT_EQ(ran + busy, 20);
}

// What a GPU would add is refused by name where there is none, and reading statistics is the same call on the CPU.
TEST(CApi, GpuContextsAndLateStatistics) {
  scope_context* context = nullptr;
  EXPECT_EQ(scope_context_create_cuda(0, nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(scope_supports("cuda", SCOPE_F32, 64), 0);
  EXPECT_EQ(scope_supports("cuda", SCOPE_BF16, 136), 0);
  EXPECT_EQ(scope_supports("cuda", SCOPE_BF16, 60), 0);
  if (scope_supports("cuda", SCOPE_BF16, 64) == 0) {
    EXPECT_EQ(scope_context_create_cuda(0, &context), SCOPE_ERROR_UNSUPPORTED);
    EXPECT_EQ(context, nullptr);
    EXPECT_NE(std::string(scope_last_error()).find("backend"), std::string::npos);
  }
  const scope_attn::Context cpu(1);
  scope_shape shape = scope_attn::make_shape();
  shape.heads = 2;
  shape.q_tokens = shape.k_tokens = 60;
  shape.dim = 16;
  scope_attn::Plan plan(cpu, scope_attn::Method("scope").set("partition", "even:2"), shape);
  const std::vector<float> x(2 * 60 * 16, 0.5f);
  std::vector<float> out(x.size());
  std::vector<char> workspace(static_cast<size_t>(plan.info().workspace_bytes));
  scope_run_args args = scope_attn::make_args();
  args.q = args.k = args.v = scope_attn::head_major(x.data(), 2, 60, 16);
  args.out = scope_attn::head_major(out.data(), 2, 60, 16);
  args.workspace = workspace.data();
  args.workspace_bytes = static_cast<int64_t>(workspace.size());
  scope_head_stats now[2]{}, later[2]{};
  args.head_stats = now;
  plan.run(args);
  args.head_stats = later;
  plan.read_stats(args);
  EXPECT_EQ(std::memcmp(now, later, sizeof now), 0);
  args.start = 7;
  EXPECT_EQ(scope_run(plan.handle(), &args), SCOPE_ERROR_INVALID_ARGUMENT);
}

}  // namespace
