// Whole calls as only a GPU shows them: streams, graphs, chunks, what is found out late, its limits, and the CPU beside it.
#include <cuda_runtime_api.h>

#include "call_support.h"
#include "measure/recall.h"

namespace scope::test {
namespace {

#define CHECK_CUDA(expression) ASSERT_EQ(expression, cudaSuccess) << #expression

class GpuCalls : public testing::Test {
 protected:
  void SetUp() override {
    static const bool none = !gpu().present();  // asked once: after a fault the answer could change
    if (none) GTEST_SKIP() << "[GPU tests skipped]";
    context_ = std::make_unique<Context>(ContextOptions{.backend = "cuda", .threads = 1});
  }
  static const Backend& gpu() { return find_backend("cuda"); }
  const Context& context() const { return *context_; }

 private:
  std::unique_ptr<Context> context_;
};

// The same numbers as the CPU's f32.
Inputs on_cpu(Inputs in) {
  in.dtype = DType::f32;
  return in;
}

std::vector<uint16_t> bf16_bits(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float x : values) bits.push_back(f32_to_bf16(x));
  return bits;
}

// What a stream records of a call.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& body) : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    body();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&made_, graph_, 0), cudaSuccess);
  }
  ~Graph() {
    cudaGraphExecDestroy(made_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() {
    EXPECT_EQ(cudaGraphLaunch(made_, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t made_ = nullptr;
};

// Blocks leave nothing to chance: the CPU keeps the same keys, up to the rounding of a mean beside a bound.
TEST_F(GpuCalls, BlocksKeepWhatTheCpuKeeps) {
  const Context cpu(0);
  for (const char* target : {"none", "0.3"}) {
    for (const Settings& settings : baselines(target)) {
      if (settings.rule == Rule::clusters) continue;
      const Inputs in(1, 4, 2000, 1900, 64, 7, DType::bf16), same = on_cpu(in);
      const Result found = run(Plan(context(), settings, in.shape()), in);
      const Result expected = run(Plan(cpu, settings, same.shape()), same);
      EXPECT_EQ(found.labels, expected.labels);
      EXPECT_NEAR(found.stats.density, expected.stats.density, 1e-3);
      const int64_t words = mask_words(1900);
      int64_t equal = 0;
      for (int64_t r = 0; r < std::ssize(expected.counts); ++r) {
        equal += std::equal(expected.mask.begin() + r * words, expected.mask.begin() + (r + 1) * words,
                            found.mask.begin() + r * words);
      }
      EXPECT_GE(static_cast<double>(equal), 0.99 * static_cast<double>(expected.counts.size()));
    }
  }
}

// One chunk of heads, where it fits what auto takes of this device.
TEST_F(GpuCalls, ALargeDeviceLendsMoreWorkspace) {
  const Shape shape{.batch = 1,
                    .heads = 40,
                    .q_tokens = 75600,
                    .k_tokens = 75600,
                    .dim = 128,
                    .dtype = DType::bf16,
                    .rope = {},
                    .subspaces = {}};
  const Plan plan(context(), method("scope-mean", {{"target_density", "0.1"}}), shape);
  const int64_t lent = std::max(int64_t{400} << 20, plan.exec.memory_bytes / 100);
  EXPECT_GT(plan.exec.memory_bytes, int64_t{1} << 30);
  EXPECT_LE(plan.workspace_bytes, lent);
  const Plan next(context(), method("scope-mean", {{"target_density", "0.1"}, {"workspace_limit", "4000"}}), shape);
  EXPECT_EQ(next.chunk, 40);
  EXPECT_EQ(plan.chunk == 40, next.workspace_bytes <= lent);
}

TEST_F(GpuCalls, BitwiseOverRunsStreamsAndChunks) {
  const Inputs in(1, 7, 1100, 1100, 64, 33, DType::bf16);
  std::vector<Settings> all = baselines("0.3");
  for (const char* proxy : {"codes", "exact"}) {
    for (const char* tail : {"first_order", "mean", "means"}) {
      all.push_back(method("scope", {{"partition", "even:3"}, {"rule", "target"}, {"tail", tail}, {"proxy", proxy}}));
    }
  }
  for (Settings& each : all) {
    each.target_scope = TargetScope::head;  // over a sample 1 MiB will not do
    const auto settings = [&](const char* limit) {
      Settings limited = each;
      set_setting(limited, "workspace_limit", limit);
      return limited;
    };
    const Plan plan(context(), settings("400"), in.shape());
    EXPECT_EQ(plan.chunk, 7);
    PreparedCall gpu(plan, in);
    const Result first = gpu.run();
    cudaStream_t other = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int i = 0; i < 125; ++i) {
      gpu.args.stream = i % 2 == 0 ? nullptr : other;
      ASSERT_TRUE(same_bits(first, gpu.run())) << "run " << i;
    }
    CHECK_CUDA(cudaStreamDestroy(other));
    const Plan chunked(context(), settings("1"), in.shape());
    EXPECT_LT(chunked.chunk, 7);
    EXPECT_LE(chunked.workspace_bytes, 1 << 20);
    EXPECT_TRUE(same_bits(first, run(chunked, in))) << "chunks of " << chunked.chunk;
  }
}

// A graph of a warm call replays with new data, and gives the bits of the same call made directly.
TEST_F(GpuCalls, CapturedWarmCallsReplayWithNewData) {
  std::vector<Settings> all = baselines("0.3");
  for (const char* name : {"scope", "scope-exact"}) {
    all.push_back(method(name, {{"partition", "even:3"}, {"rule", "target"}, {"tail", "mean"}}));
  }
  for (Settings& settings : all) settings.target_scope = TargetScope::head;
  for (Settings settings : std::vector(all)) {
    settings.target_scope = TargetScope::sample;
    all.push_back(settings);
  }
  for (const Settings& settings : all) {
    const Inputs in(1, 3, 900, 900, 64, 61, DType::bf16), next(1, 3, 900, 900, 64, 62, DType::bf16);
    const Plan plan(context(), settings, in.shape());
    OwnState state(plan), direct_state(plan);
    PreparedCall gpu(plan, in, {.state = &state.state}), direct(plan, in, {.state = &direct_state.state});
    cudaStream_t stream = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (PreparedCall* each : {&gpu, &direct}) {
      each->args.stream = stream;
      each->run();
    }
    Graph graph(stream, [&] { call(plan, gpu.args); });
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        gpu.upload(next);
        direct.upload(next);
      }
      graph.replay();
      const Result replayed = gpu.fetch();
      EXPECT_TRUE(std::isnan(replayed.stats.total)) << "a replay has no times";
      EXPECT_TRUE(same_bits(replayed, direct.run())) << get_setting(settings, "rule") << ", step " << step;
    }
    CHECK_CUDA(cudaStreamDestroy(stream));
  }
}

// A captured first call fills the state when its graph runs, which the host has to say.
TEST_F(GpuCalls, CapturedFirstCallsFillTheStateWhenTheyRun) {
  const Inputs in(2, 2, 500, 500, 64, 65, DType::bf16);
  Extra extra;
  extra.q_lengths = extra.k_lengths = {500, 40};  // the second sample has fewer groups than the plan
  const Plan plan(context(), method("scope", {{"partition", "even:3"}, {"groups", "60"}}), in.shape());
  OwnState state(plan), direct_state(plan);
  extra.state = &direct_state.state;
  PreparedCall direct(plan, in, extra);
  const Result first = direct.run(), warm = direct.run();
  extra.state = &state.state;
  PreparedCall gpu(plan, in, extra);
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  gpu.args.stream = stream;
  Graph graph(stream, [&] { call(plan, gpu.args); });
  EXPECT_FALSE(state.state.filled());
  graph.replay();
  EXPECT_TRUE(same_bits(gpu.fetch(), first));
  EXPECT_FALSE(state.state.filled());
  state.state.set_filled(true);
  const Result second = gpu.run();
  EXPECT_TRUE(second.stats.warm);
  EXPECT_TRUE(same_bits(second, warm));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST_F(GpuCalls, StageTimesAddUpToTheTotal) {
  const Inputs in(1, 4, 2000, 2000, 64, 67, DType::bf16);
  const Plan plan(context(), method("scope", {{"partition", "even:3"}}), in.shape());
  PreparedCall gpu(plan, in);
  call(plan, gpu.args);
  EXPECT_TRUE(std::isnan(gpu.stats.total)) << "the call waited";
  EXPECT_TRUE(std::isnan(gpu.stats.density));
  const CallStats found = gpu.fetch().stats;
  for (const double seconds : {found.group, found.encode, found.score, found.select, found.attend}) EXPECT_GT(seconds, 0);
  EXPECT_LE(found.check + found.group + found.encode + found.score + found.select + found.attend, found.total * 1.001);
}

// The CPU and the GPU differ by rounding, and K-means amplifies that: whole calls are compared by the mass that their
// selections hold, averaged over heads.
TEST_F(GpuCalls, RecallIsTheCpus) {
  const Context cpu(0);
  const int64_t heads = 8, tokens = 2500;
  for (Settings settings : {method("scope", {{"partition", "even:3"}, {"target_density", "0.1"}}),
                            method("scope-exact", {{"target_density", "0.1"}}), method("svg2", {{"target_density", "0.1"}}),
                            method("sparge", {{"target_density", "0.1"}, {"similarity", "-1"}})}) {
    const Inputs in(1, heads, tokens, tokens, 64, 101, DType::bf16), same = on_cpu(in);
    settings.first_iterations = 20;
    const Plan plan(cpu, settings, same.shape());
    const Result found = run(Plan(context(), settings, in.shape()), in), expected = run(plan, same);
    const auto recall = [&](const Result& result) {
      double sum = 0;
      for (int64_t h = 0; h < heads; ++h) {
        const auto rows = [&](const std::vector<float>& x) {
          return RowsView{x.data() + h * tokens * 64, DType::f32, tokens, 64, 64};
        };
        const HeadSelection selection{result.labels.data() + h * tokens,
                                      result.mask.data() + h * plan.selection_groups * mask_words(tokens), nullptr};
        sum +=
            measure_head(*cpu.exec().pool, rows(in.q), rows(in.k), rows(in.v), rows(result.out), selection, 500).mass_recall;
      }
      return sum / static_cast<double>(heads);
    };
    EXPECT_NEAR(recall(found), recall(expected), 0.002) << get_setting(settings, "rule");
  }
}

TEST_F(GpuCalls, FindsOutLateWhatTheCpuRefuses) {
  Inputs in(1, 2, 300, 300, 64, 111, DType::bf16);
  const Plan plan(context(), method("scope", {{"partition", "even:3"}}), in.shape());
  OwnState own(plan);
  PreparedCall gpu(plan, in, {.state = &own.state});
  own.state.set_filled(true);  // and no call has filled it
  call(plan, gpu.args);
  EXPECT_EQ(status_of([&] { gpu.fetch(); }), Status::invalid_argument);
  call(plan, gpu.args);  // nor has that one
  EXPECT_EQ(status_of([&] { gpu.fetch(); }), Status::invalid_argument);
  own.state.set_filled(false);
  EXPECT_FALSE(gpu.run().stats.warm);
  own.state.set_filled(false);
  in.q[5] = std::numeric_limits<float>::quiet_NaN();
  gpu.upload(in);
  call(plan, gpu.args);
  EXPECT_EQ(status_of([&] { gpu.fetch(); }), Status::non_finite);
  const Plan block_plan(context(), baselines()[1], in.shape());
  PreparedCall blocks(block_plan, in);
  call(block_plan, blocks.args);
  EXPECT_EQ(status_of([&] { blocks.fetch(); }), Status::non_finite);
  in.q[5] = 0;
  gpu.upload(in);
  own.state.set_filled(false);
  gpu.run();  // the handle is usable after it
}

TEST_F(GpuCalls, RefusesWhatADeviceDoesNotTake) {
  const Inputs in(1, 2, 100, 100, 64, 121, DType::bf16);
  const Settings settings = method("scope", {{"partition", "even:3"}});
  const auto plan_status = [&](const Settings& s, int64_t dim, DType dtype) {
    Shape shape = in.shape();
    shape.dim = dim;
    shape.dtype = dtype;
    return status_of([&] { Plan(context(), s, shape); });
  };
  EXPECT_EQ(plan_status(settings, 64, DType::f32), Status::unsupported);
  EXPECT_EQ(plan_status(settings, 136, DType::bf16), Status::unsupported);
  EXPECT_EQ(plan_status(settings, 60, DType::bf16), Status::unsupported);
  Settings target = settings;
  target.target_density = 0.2;
  EXPECT_EQ(plan_status(target, 64, DType::bf16), Status::ok);  // rule online
  target.rule = Rule::hybrid;
  EXPECT_EQ(plan_status(target, 64, DType::bf16), Status::ok);
  Shape wide = in.shape();
  wide.q_tokens = wide.k_tokens = 200000;
  EXPECT_EQ(status_of([&] {
              Plan(context(), method("scope", {{"partition", "even:3"}, {"workspace_limit", "1"}}), wide);
            }),
            Status::invalid_argument);
  EXPECT_EQ(status_of([&] {
              Plan(context(), method("svg2", {{"codes", "4097"}, {"groups", "16"}}), wide);
            }),
            Status::size_limit);
  EXPECT_EQ(status_of([] { Context(ContextOptions{.backend = "cuda", .device = 1000}); }), Status::invalid_argument);

  const Plan plan(context(), settings, in.shape());
  PreparedCall gpu(plan, in);
  const auto before = gpu.bytes();
  const auto refused = [&](const std::function<void(CallArgs&)>& change) {
    CallArgs args = gpu.args;
    change(args);
    return status_of([&] { call(plan, args); });
  };
  HeadStats heads[2];
  EXPECT_EQ(refused([](CallArgs& a) { a.q.data = static_cast<const std::byte*>(a.q.data) + 2; }), Status::alignment);
  EXPECT_EQ(refused([](CallArgs& a) { a.k.token_stride += 1; }), Status::alignment);
  EXPECT_EQ(refused([](CallArgs& a) { a.lse = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(a.lse) + 2); }),
            Status::alignment);
  EXPECT_EQ(refused([&](CallArgs& a) { a.head_stats = heads; }), Status::invalid_argument);
  EXPECT_TRUE(gpu.bytes() == before);
}

// A fault on the device is sticky: it must poison calls, not crash them. In a process of its own, which it takes down.
TEST_F(GpuCalls, AFaultPoisonsTheHandleAndDestroyingItIsSafe) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const auto first = [] {
          const Context own(ContextOptions{.backend = "cuda", .threads = 1});
          const Inputs in(1, 2, 300, 300, 64, 131, DType::bf16);
          const Plan plan(own, method("scope", {{"partition", "even:3"}}), in.shape());
          PreparedCall gpu(plan, in);
          gpu.args.q.data = reinterpret_cast<const void*>(uintptr_t{16});  // nobody's memory
          const Status found = status_of([&] {
            call(plan, gpu.args);
            read_stats(plan, gpu.args);
          });
          const Status later = status_of([&] { call(plan, gpu.args); });
          fmt::print(stderr, "found {}, later {}\n", static_cast<int>(found), static_cast<int>(later));
          return found == Status::device_lost && later == Status::device_lost;
        }();
        std::exit(first ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// Device memory of any size that is not initialised.
struct BigBuffer {
  explicit BigBuffer(int64_t elements) { EXPECT_EQ(cudaMalloc(&data, static_cast<size_t>(elements) * 2), cudaSuccess); }
  ~BigBuffer() { cudaFree(data); }
  BigBuffer(const BigBuffer&) = delete;
  BigBuffer& operator=(const BigBuffer&) = delete;
  uint16_t* at(int64_t element) const { return static_cast<uint16_t*>(data) + element; }
  void* data = nullptr;
};

// Tensors of more than 2^31 elements, and a grid of more than 65,535 tiles. Queries repeat with a period that no power of
// two is a multiple of, so a row that is read or written elsewhere shows. Every key is kept: the expected output needs no
// selection, and what clustering read shows in the labels.
TEST_F(GpuCalls, MoreThanTwoToThe31Elements) {
  size_t free_bytes = 0, all_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
  const int64_t heads = 4, tokens = 4400000, dim = 128, elements = heads * tokens * dim;  // 2.25e9
  if (free_bytes < static_cast<size_t>(3 * elements * 2) + (4ull << 30)) GTEST_SKIP() << "needs 18 GB of device memory";
  const int64_t period = 4099, k_tokens = 256;
  Inputs in(1, heads, period, k_tokens, dim, 141, DType::bf16);  // of its queries, the first head's are repeated
  const std::vector<uint16_t> q_bits = bf16_bits(in.q), k_bits = bf16_bits(in.k), v_bits = bf16_bits(in.v);
  for (int64_t h = 1; h < heads; ++h) std::copy_n(in.q.begin(), period * dim, in.q.begin() + h * period * dim);
  const Context host(1);
  const Inputs same = on_cpu(in);
  const Result expected = run(Plan(host, method("dense"), same.shape()), same);

  Shape shape = in.shape();
  shape.q_tokens = tokens;
  const Plan sparse(context(),
                    method("scope", {{"partition", "even:3"},
                                     {"first_iterations", "1"},
                                     {"workspace_limit", "2000"},
                                     {"rule", "fixed"},
                                     {"density", "1"}}),
                    shape);
  const Plan dense(context(), method("dense"), shape);
  const BigBuffer q(elements), out(elements), k(heads * k_tokens * dim), v(heads * k_tokens * dim),
      labels(2 * heads * tokens), workspace(std::max(sparse.workspace_bytes, dense.workspace_bytes));
  CHECK_CUDA(cudaMemcpy(q.data, q_bits.data(), static_cast<size_t>(period * dim) * 2, cudaMemcpyHostToDevice));
  for (int64_t done = period * dim; done < elements; done *= 2) {
    CHECK_CUDA(
        cudaMemcpy(q.at(done), q.data, static_cast<size_t>(std::min(done, elements - done)) * 2, cudaMemcpyDeviceToDevice));
  }
  CHECK_CUDA(cudaMemcpy(k.data, k_bits.data(), k_bits.size() * 2, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(v.data, v_bits.data(), v_bits.size() * 2, cudaMemcpyHostToDevice));
  CallArgs args;
  args.q = {q.data, DType::bf16, 1, heads, tokens, dim, elements, tokens * dim, dim};
  args.k = {k.data, DType::bf16, 1, heads, k_tokens, dim, heads * k_tokens * dim, k_tokens * dim, dim};
  args.v = {v.data, DType::bf16, 1, heads, k_tokens, dim, heads * k_tokens * dim, k_tokens * dim, dim};
  args.out = {out.data, DType::bf16, 1, heads, tokens, dim, elements, tokens * dim, dim};
  args.workspace = workspace.data;
  for (const Plan* plan : {&sparse, &dense}) {
    CHECK_CUDA(cudaMemset(out.data, 0xff, static_cast<size_t>(elements) * 2));
    args.workspace_bytes = plan->workspace_bytes;
    args.selection.labels = plan == &sparse ? static_cast<int32_t*>(labels.data) : nullptr;
    call(*plan, args);
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<uint16_t> rows(static_cast<size_t>(tokens * dim));
    std::vector<int32_t> group(static_cast<size_t>(tokens));
    for (int64_t h = 0; h < heads; ++h) {
      CHECK_CUDA(cudaMemcpy(rows.data(), out.at(h * tokens * dim), rows.size() * 2, cudaMemcpyDeviceToHost));
      for (int64_t i = 0; i < tokens * dim; i += 61) {
        const int64_t row = (h * tokens + i / dim) % period;
        const float want = expected.out[static_cast<size_t>((h * period + row) * dim + i % dim)];
        ASSERT_NEAR(bf16_to_f32(rows[static_cast<size_t>(i)]), want, 0.02) << "head " << h << " element " << i;
      }
      if (plan != &sparse) continue;
      CHECK_CUDA(cudaMemcpy(group.data(), static_cast<int32_t*>(labels.data) + h * tokens, group.size() * 4,
                            cudaMemcpyDeviceToHost));
      int32_t highest = 0;
      for (int64_t t = period; t < tokens; ++t) {
        ASSERT_EQ(group[static_cast<size_t>(t)], group[static_cast<size_t>(t - period)]) << "head " << h << " token " << t;
        highest = std::max(highest, group[static_cast<size_t>(t)]);
      }
      EXPECT_GT(highest, 0);
    }
  }
}

// One token every 2^31 elements and a bit, q, k, v and out side by side: the same bits as in compact memory.
TEST_F(GpuCalls, TokenStridesPastTwoToThe31) {
  size_t free_bytes = 0, all_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
  const int64_t tokens = 9, dim = 128, stride = (int64_t{1} << 31) + 1024;
  if (free_bytes < static_cast<size_t>(tokens * stride * 2) + (1ull << 30)) GTEST_SKIP() << "needs 40 GB of device memory";
  const BigBuffer far(tokens * stride);
  for (const char* kernel : {"wgmma", "portable"}) {
    for (const char* name : {"dense", "scope", "scope-exact"}) {
      const Inputs in(1, 1, tokens, tokens, dim, 151, DType::bf16);
      const Plan plan(context(),
                      method(name, {{"kernel", kernel},
                                    {"groups", "2"},
                                    {"partition", "even:3"},
                                    {"codes", "4"},
                                    {"rule", "fixed"},
                                    {"density", "0.5"}}),
                      in.shape());
      PreparedCall compact(plan, in);
      const std::vector<uint16_t> want_bits = bf16_bits(compact.run().out);

      CallArgs args = compact.args;
      const auto place = [&](auto& view, int64_t column, const std::vector<float>* from) {
        view.data = far.at(column);
        view.token_stride = stride;
        for (int64_t t = 0; t < tokens; ++t) {
          std::vector<uint16_t> row(static_cast<size_t>(dim), 0xffff);
          for (int64_t d = 0; from != nullptr && d < dim; ++d) {
            row[static_cast<size_t>(d)] = f32_to_bf16((*from)[static_cast<size_t>(t * dim + d)]);
          }
          ASSERT_EQ(cudaMemcpy(far.at(t * stride + column), row.data(), row.size() * 2, cudaMemcpyHostToDevice),
                    cudaSuccess);
        }
      };
      place(args.q, 0, &in.q);
      place(args.k, dim, &in.k);
      place(args.v, 2 * dim, &in.v);
      place(args.out, 3 * dim, nullptr);
      call(plan, args);
      CHECK_CUDA(cudaDeviceSynchronize());
      std::vector<uint16_t> row(static_cast<size_t>(dim));
      for (int64_t t = 0; t < tokens; ++t) {
        CHECK_CUDA(cudaMemcpy(row.data(), far.at(t * stride + 3 * dim), row.size() * 2, cudaMemcpyDeviceToHost));
        ASSERT_TRUE(std::equal(row.begin(), row.end(), want_bits.begin() + t * dim))
            << name << ", " << kernel << ", token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace scope::test
