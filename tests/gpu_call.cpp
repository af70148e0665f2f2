// Whole calls on a GPU: the CPU suite's promises, and those of a device: streams, graphs, chunks, what is found out late.
#include <cuda_runtime_api.h>

#include "call_support.h"
#include "cuda/device.h"
#include "measure/recall.h"

namespace scope::test {
namespace {

#define CHECK_CUDA(expression) ASSERT_EQ(expression, cudaSuccess) << #expression

// Device memory between canaries, filled with NaN patterns.
class DeviceGuarded {
 public:
  explicit DeviceGuarded(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    EXPECT_EQ(cudaMalloc(&memory_, bytes_ + 2 * kGuard), cudaSuccess);
    EXPECT_EQ(cudaMemset(memory_, 0xff, bytes_ + 2 * kGuard), cudaSuccess);
  }
  ~DeviceGuarded() { cudaFree(memory_); }
  DeviceGuarded(const DeviceGuarded&) = delete;
  DeviceGuarded& operator=(const DeviceGuarded&) = delete;

  void* data() const { return static_cast<std::byte*>(memory_) + kGuard; }
  size_t size() const { return bytes_; }
  void upload(const void* from) { EXPECT_EQ(cudaMemcpy(data(), from, bytes_, cudaMemcpyHostToDevice), cudaSuccess); }
  template <class T>
  std::vector<T> values() const {
    std::vector<T> out(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(out.data(), data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }
  bool intact() const {
    std::vector<unsigned char> guard(kGuard);
    for (const size_t at : {size_t{0}, kGuard + bytes_}) {
      EXPECT_EQ(cudaMemcpy(guard.data(), static_cast<std::byte*>(memory_) + at, kGuard, cudaMemcpyDeviceToHost),
                cudaSuccess);
      for (const unsigned char byte : guard) {
        if (byte != 0xff) return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes_;
  void* memory_ = nullptr;
};

// Rounds the inputs to 16 bits, so that every reference sees what the GPU sees.
std::vector<uint16_t> to_16(std::vector<float>& values, DType dtype) {
  std::vector<uint16_t> bits;
  bits.reserve(values.size());
  for (float& x : values) {
    bits.push_back(dtype == DType::bf16 ? f32_to_bf16(x) : f32_to_f16(x));
    x = dtype == DType::bf16 ? bf16_to_f32(bits.back()) : f16_to_f32(bits.back());
  }
  return bits;
}

// One plan with guarded device memory for everything a call touches.
class GpuCall {
 public:
  GpuCall(const Context& context, const Settings& settings, Inputs& in, DType dtype, bool dense_queries = false,
          bool token_major = false)
      : plan(context, settings, shape_of(in, dtype, dense_queries)),
        in_(in),
        token_major_(token_major),
        q_(elements(in.q_tokens) * 2),
        k_(elements(in.k_tokens) * 2),
        v_(elements(in.k_tokens) * 2),
        out_(elements(in.q_tokens) * 2),
        lse_(heads() * in.q_tokens * 4),
        workspace_(plan.workspace_bytes),
        state_(std::max<int64_t>(plan.state_bytes, 4)),
        labels_(heads() * in.q_tokens * 4),
        sizes_(heads() * plan.selection_groups * 4),
        counts_(heads() * plan.selection_groups * 4),
        mask_(heads() * plan.selection_groups * mask_words(in.k_tokens) * 4),
        keep_(in.batch * mask_words(in.k_tokens) * 4) {
    upload(in);
    args.q = view<TensorView>(q_, in.q_tokens);
    args.k = view<TensorView>(k_, in.k_tokens);
    args.v = view<TensorView>(v_, in.k_tokens);
    args.out = view<MutableTensorView>(out_, in.q_tokens);
    args.lse = static_cast<float*>(lse_.data());
    args.workspace = workspace_.data();
    args.workspace_bytes = plan.workspace_bytes;
    args.stats = &stats;
    if (plan.selection_groups > 0) {
      args.selection.labels = static_cast<int32_t*>(labels_.data());
      args.selection.sizes = static_cast<int32_t*>(sizes_.data());
      args.selection.counts = static_cast<int32_t*>(counts_.data());
      args.selection.mask = static_cast<uint32_t*>(mask_.data());
      args.selection.keep = static_cast<uint32_t*>(keep_.data());
    }
  }

  static Shape shape_of(const Inputs& in, DType dtype, bool dense_queries) {
    Shape shape = in.shape();
    shape.dtype = dtype;
    shape.dense_queries = dense_queries;
    return shape;
  }
  void upload(Inputs& in) {
    const auto send = [&](DeviceGuarded& to, std::vector<float>& x, int64_t tokens) {
      const auto bits = to_16(x, plan.shape.dtype);
      if (!token_major_) return to.upload(bits.data());
      std::vector<uint16_t> moved(bits.size());
      for (int64_t b = 0; b < in.batch; ++b)
        for (int64_t h = 0; h < in.heads; ++h)
          for (int64_t t = 0; t < tokens; ++t)
            std::copy_n(bits.begin() + ((b * in.heads + h) * tokens + t) * in.dim, in.dim,
                        moved.begin() + ((b * tokens + t) * in.heads + h) * in.dim);
      to.upload(moved.data());
    };
    send(q_, in.q, in.q_tokens);
    send(k_, in.k, in.k_tokens);
    send(v_, in.v, in.k_tokens);
  }
  void use(const Extra& extra) {
    const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
    args.q_lengths = pointer(extra.q_lengths);
    args.k_lengths = pointer(extra.k_lengths);
    args.keep = pointer(extra.keep);
    args.dense_queries = pointer(extra.dense_queries);
    args.place = extra.place;
  }
  void use_state() {
    init_state(plan, state_.data());
    args.state = state_.data();
    args.start = Start::first;
  }

  Result run() {
    call(plan, args);
    return fetch();
  }
  Result fetch() {
    Result result;
    result.heads.resize(static_cast<size_t>(heads()));
    CallArgs reading = args;
    reading.head_stats = result.heads.data();
    read_stats(plan, reading);
    result.stats = stats;
    const auto bits = out_.values<uint16_t>();
    result.out.resize(bits.size());
    for (int64_t b = 0; b < in_.batch; ++b) {
      for (int64_t h = 0; h < in_.heads; ++h) {
        for (int64_t t = 0; t < in_.q_tokens; ++t) {
          for (int64_t c = 0; c < in_.dim; ++c) {
            const int64_t to = ((b * in_.heads + h) * in_.q_tokens + t) * in_.dim + c;
            const int64_t from = token_major_ ? ((b * in_.q_tokens + t) * in_.heads + h) * in_.dim + c : to;
            const uint16_t x = bits[static_cast<size_t>(from)];
            result.out[static_cast<size_t>(to)] = plan.shape.dtype == DType::bf16 ? bf16_to_f32(x) : f16_to_f32(x);
          }
        }
      }
    }
    result.lse = lse_.values<float>();
    result.labels = labels_.values<int32_t>();
    result.sizes = sizes_.values<int32_t>();
    result.counts = counts_.values<int32_t>();
    result.mask = mask_.values<uint32_t>();
    result.keep = keep_.values<uint32_t>();
    for (const DeviceGuarded* memory :
         {&q_, &k_, &v_, &out_, &lse_, &workspace_, &state_, &labels_, &sizes_, &counts_, &mask_, &keep_}) {
      EXPECT_TRUE(memory->intact());
    }
    return result;
  }

  std::vector<uint16_t> out_bits() const { return out_.values<uint16_t>(); }

  CallStats stats;
  Plan plan;
  CallArgs args;
  DeviceGuarded& state() { return state_; }

 private:
  int64_t heads() const { return in_.batch * in_.heads; }
  int64_t elements(int64_t tokens) const { return heads() * tokens * in_.dim; }
  template <class View>
  View view(const DeviceGuarded& memory, int64_t tokens) const {
    const int64_t head = token_major_ ? in_.dim : tokens * in_.dim, token = token_major_ ? in_.heads * in_.dim : in_.dim;
    return {memory.data(), plan.shape.dtype, in_.batch, in_.heads, tokens, in_.dim, in_.heads * tokens * in_.dim, head,
            token};
  }

  Inputs& in_;
  bool token_major_;
  DeviceGuarded q_, k_, v_, out_, lse_, workspace_, state_, labels_, sizes_, counts_, mask_, keep_;
};

// 16-bit outputs of size about 3: half a unit in the last place, and twice that for P.
double tolerance(DType dtype) { return dtype == DType::bf16 ? 3e-2 : 4e-3; }

class GpuCalls : public testing::Test {
 protected:
  void SetUp() override {
    static const bool none = cuda::devices().empty();  // asked once: after a fault the answer could change
    if (none) GTEST_SKIP() << "[GPU tests skipped]";
    context_ = std::make_unique<Context>(Context::on_gpu(0, 1));
  }
  const Context& context() const { return *context_; }

 private:
  std::unique_ptr<Context> context_;
};

bool same_bits(const Result& a, const Result& b) {
  return a.out.size() == b.out.size() && std::memcmp(a.out.data(), b.out.data(), a.out.size() * 4) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0 && a.labels == b.labels && a.mask == b.mask &&
         a.counts == b.counts;
}

TEST_F(GpuCalls, OutputIsAttentionOverTheSelection) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const char* kernel : {"auto", "portable"}) {
      for (const char* rule : {"fixed", "top_p", "hybrid", "online", "target"}) {
        for (const char* proxy : {"codes", "exact"}) {
          for (const char* group : {"kmeans", "raster"}) {
            Inputs in(2, 2, 330, 297, 40, 3);
            GpuCall gpu(
                context(),
                method("scope",
                       {{"rule", rule}, {"proxy", proxy}, {"partition", "even:3"}, {"kernel", kernel}, {"group", group}}),
                in, dtype);
            const Result result = gpu.run();
            EXPECT_EQ(result.stats.reason, Reason::sparse);
            expect_consistent(in, gpu.plan, result, {}, tolerance(dtype));
            if (HasFatalFailure()) return;
            if (std::string(rule) == "target") {
              EXPECT_NEAR(result.stats.density, 0.2, 0.03);
            }
          }
        }
      }
    }
  }
}

// The methods that keep whole codes, at sizes that suit short sequences.
std::vector<Settings> baselines(const char* target = "none") {
  return {method("svg2", {{"codes", "100"}, {"target_density", target}}),
          method("sparge", {{"q_block", "16"}, {"k_block", "8"}, {"target_density", target}}),
          method("sparge-cdf", {{"q_block", "16"}, {"k_block", "8"}, {"similarity", "0.15"}, {"target_density", target}})};
}

TEST_F(GpuCalls, BaselinesAreAttentionOverWhatTheyKeep) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const char* kernel : {"auto", "portable"}) {
      for (const char* target : {"none", "0.4"}) {
        for (Settings settings : baselines(target)) {
          set_setting(settings, "kernel", kernel);
          Inputs in(2, 2, 330, 297, 40, 3);
          GpuCall gpu(context(), settings, in, dtype);
          const Result result = gpu.run();
          EXPECT_EQ(result.stats.reason, Reason::sparse);
          EXPECT_LT(result.stats.density, 1);
          if (settings.rule == Rule::clusters && settings.target_density > 0) {
            EXPECT_NEAR(result.stats.density, 0.4, 0.01);
          }
          expect_consistent(in, gpu.plan, result, {}, tolerance(dtype));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Blocks leave nothing to chance: the CPU keeps the same keys, up to the rounding of a mean beside a bound.
TEST_F(GpuCalls, BlocksKeepWhatTheCpuKeeps) {
  const Context cpu(0);
  for (const char* target : {"none", "0.3"}) {
    for (const Settings& settings : baselines(target)) {
      if (settings.rule == Rule::clusters) continue;
      Inputs in(1, 4, 2000, 1900, 64, 7);
      const Result on_gpu = GpuCall(context(), settings, in, DType::bf16).run();
      const Plan plan(cpu, settings, in.shape());
      const Result on_cpu = run(plan, in);
      EXPECT_EQ(on_gpu.labels, on_cpu.labels);
      EXPECT_NEAR(on_gpu.stats.density, on_cpu.stats.density, 1e-3);
      const auto words = static_cast<size_t>(mask_words(1900));
      size_t same = 0;
      for (size_t row = 0; row < on_cpu.counts.size(); ++row) {
        same += std::equal(on_cpu.mask.begin() + static_cast<int64_t>(row * words),
                           on_cpu.mask.begin() + static_cast<int64_t>((row + 1) * words),
                           on_gpu.mask.begin() + static_cast<int64_t>(row * words));
      }
      EXPECT_GE(static_cast<double>(same), 0.99 * static_cast<double>(on_cpu.counts.size()));
    }
  }
}

TEST_F(GpuCalls, RhoOneEqualsDense) {
  for (const char* kernel : {"auto", "portable"}) {
    Inputs in(1, 2, 257, 257, 64, 5);
    const Result sparse =
        GpuCall(context(), method("scope", {{"rho", "1"}, {"partition", "even:3"}, {"kernel", kernel}}), in, DType::bf16)
            .run();
    const Result dense = GpuCall(context(), method("dense", {{"kernel", kernel}}), in, DType::bf16).run();
    EXPECT_EQ(dense.stats.reason, Reason::method_dense);
    EXPECT_EQ(sparse.stats.density, 1.0);
    for (size_t i = 0; i < dense.out.size(); ++i) ASSERT_NEAR(sparse.out[i], dense.out[i], tolerance(DType::bf16));
    for (size_t i = 0; i < dense.lse.size(); ++i) ASSERT_NEAR(sparse.lse[i], dense.lse[i], 1e-4);
  }
}

// Text anywhere in the sequence, padding at the end, per-sample lengths: [text 3][video][text 5][padding].
TEST_F(GpuCalls, TextAndPadding) {
  const int64_t tokens = 350;
  std::vector<Settings> all = baselines();
  for (const char* tail : {"none", "first_order"}) {
    for (const char* name : {"scope", "dense"}) {
      all.push_back(method(name, {{"partition", "even:2"}, {"rule", "fixed"}, {"density", "0.2"}, {"tail", tail}}));
    }
  }
  for (const Settings& settings : all) {
    Inputs in(2, 2, tokens, tokens, 40, 9);
    Extra extra;
    extra.q_lengths = extra.k_lengths = {350, 321};
    extra.keep.resize(2 * static_cast<size_t>(mask_words(tokens)));
    for (int64_t b = 0; b < 2; ++b) {
      for (const int64_t j : {0, 1, 2, 80, 81, 82, 83, 84}) set_mask_bit(extra.keep.data() + b * mask_words(tokens), j);
      set_mask_bit(extra.keep.data() + b * mask_words(tokens), 349);  // text that is padding in sample 1
    }
    extra.dense_queries = extra.keep;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 321; i < tokens; ++i) {
        const size_t at = static_cast<size_t>(((2 + h) * tokens + i) * 40);
        for (size_t c = 0; c < 40; ++c) in.q[at + c] = in.k[at + c] = in.v[at + c] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    GpuCall gpu(context(), settings, in, DType::bf16, true);
    gpu.use(extra);
    const Result result = gpu.run();
    const bool dense = settings.dense;
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t valid = extra.k_lengths[static_cast<size_t>(b)], text = b == 0 ? 9 : 8;
      for (int64_t h = 0; h < 2; ++h) {
        const int64_t head = 2 * b + h;
        if (!dense) {
          const int64_t groups = gpu.plan.selection_groups;
          EXPECT_EQ(result.heads[static_cast<size_t>(head)].queries, valid - text);
          EXPECT_EQ(result.sizes[static_cast<size_t>(head * groups + groups - 1)], text);
          EXPECT_EQ(result.counts[static_cast<size_t>(head * groups + groups - 1)], valid - text);
        }
        expect_rows(in, result, b, h, 81, exact_row(in, b, h, 81, [&](int64_t j) { return j < valid; }),
                    tolerance(DType::bf16));
        for (int64_t i = valid; i < tokens; ++i) {
          expect_rows(in, result, b, h, i, std::vector<double>(40, 0.0));
          EXPECT_EQ(result.lse[static_cast<size_t>(head * tokens + i)], -std::numeric_limits<float>::infinity());
        }
      }
    }
    if (!dense && settings.tail == Tail::none) expect_consistent(in, gpu.plan, result, extra, tolerance(DType::bf16));
  }
}

TEST_F(GpuCalls, ASampleAloneEqualsItselfInABatch) {
  Inputs both(2, 2, 340, 340, 64, 21);
  std::vector<Settings> all = baselines("0.3");
  for (const char* name : {"scope", "scope-exact"}) {
    all.push_back(method(name, {{"partition", "even:4"}, {"tail", "first_order"}}));
  }
  for (const Settings& settings : all) {
    const Result batch = GpuCall(context(), settings, both, DType::bf16).run();
    for (int64_t b = 0; b < 2; ++b) {
      Inputs one = both;
      one.batch = 1;
      const int64_t n = 2 * 340 * 64;
      for (auto* x : {&one.q, &one.k, &one.v}) *x = std::vector<float>(x->begin() + b * n, x->begin() + (b + 1) * n);
      const Result alone = GpuCall(context(), settings, one, DType::bf16).run();
      EXPECT_EQ(std::memcmp(alone.out.data(), batch.out.data() + b * n, static_cast<size_t>(n) * 4), 0);
    }
  }
}

TEST_F(GpuCalls, BitwiseOverRunsStreamsAndChunks) {
  Inputs in(1, 7, 1100, 1100, 64, 33);
  std::vector<Settings> all = baselines("0.3");
  for (const char* proxy : {"codes", "exact"}) {
    all.push_back(method("scope", {{"partition", "even:3"}, {"rule", "target"}, {"tail", "first_order"}, {"proxy", proxy}}));
  }
  for (const Settings& each : all) {
    const auto settings = [&](const char* limit) {
      Settings limited = each;
      set_setting(limited, "workspace_limit", limit);
      return limited;
    };
    GpuCall gpu(context(), settings("400"), in, DType::bf16);
    EXPECT_EQ(gpu.plan.chunk, 7);
    const Result first = gpu.run();
    cudaStream_t other = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int i = 0; i < 125; ++i) {
      gpu.args.stream = i % 2 == 0 ? nullptr : other;
      ASSERT_TRUE(same_bits(first, gpu.run())) << "run " << i;
    }
    CHECK_CUDA(cudaStreamDestroy(other));
    GpuCall chunked(context(), settings("1"), in, DType::bf16);
    EXPECT_LT(chunked.plan.chunk, 7);
    EXPECT_LE(chunked.plan.workspace_bytes, 1 << 20);
    EXPECT_TRUE(same_bits(first, chunked.run())) << "chunks of " << chunked.plan.chunk;
  }
}

TEST_F(GpuCalls, BothLayoutsAgree) {
  Inputs in(2, 3, 270, 290, 40, 41);
  const Settings settings = method("scope", {{"partition", "even:2"}});
  EXPECT_TRUE(same_bits(GpuCall(context(), settings, in, DType::f16).run(),
                        GpuCall(context(), settings, in, DType::f16, false, true).run()));
}

TEST_F(GpuCalls, WarmCallsContinueFromTheirState) {
  Inputs in(2, 2, 600, 600, 64, 51);
  for (const Settings& settings : {method("scope", {{"partition", "even:3"}}),
                                   method("scope", {{"partition", "even:3"}, {"state_dtype", "bf16"}}), baselines()[0]}) {
    GpuCall gpu(context(), settings, in, DType::bf16);
    gpu.use_state();
    const Result cold = gpu.run();
    EXPECT_FALSE(cold.stats.warm);
    EXPECT_EQ(cold.stats.iterations, 4);
    const auto saved = gpu.state().values<std::byte>();
    gpu.args.start = Start::warm;
    const Result warm = gpu.run();
    EXPECT_TRUE(warm.stats.warm);
    EXPECT_EQ(warm.stats.iterations, 2);
    gpu.state().upload(saved.data());  // saving a state is copying it
    EXPECT_TRUE(same_bits(warm, gpu.run()));
  }
}

// A graph of a warm call replays with new data, and gives the bits of the same call made directly.
TEST_F(GpuCalls, CapturedWarmCallsReplayWithNewData) {
  std::vector<Settings> all = baselines("0.3");
  for (const char* name : {"scope", "scope-exact"})
    all.push_back(method(name, {{"partition", "even:3"}, {"rule", "target"}}));
  for (const Settings& settings : all) {
    Inputs in(1, 3, 900, 900, 64, 61), next(1, 3, 900, 900, 64, 62);
    GpuCall gpu(context(), settings, in, DType::bf16), direct(context(), settings, in, DType::bf16);
    cudaStream_t stream = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (GpuCall* call : {&gpu, &direct}) {
      call->use_state();
      call->args.stream = stream;
      call->run();
      call->args.start = Start::warm;
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    call(gpu.plan, gpu.args);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        gpu.upload(next);
        direct.upload(next);
      }
      CHECK_CUDA(cudaGraphLaunch(replay, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      const Result replayed = gpu.fetch();
      EXPECT_TRUE(std::isnan(replayed.stats.total)) << "a replay has no times";
      EXPECT_TRUE(same_bits(replayed, direct.run())) << get_setting(settings, "rule") << ", step " << step;
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    CHECK_CUDA(cudaStreamDestroy(stream));
  }
}

TEST_F(GpuCalls, SelectedAttentionTakesThePublicFormat) {
  Inputs in(1, 3, 500, 500, 64, 71);
  GpuCall gpu(context(), method("scope", {{"partition", "even:3"}}), in, DType::bf16);
  const Result expected = gpu.run();
  // Bits past the keys and labels past the groups are dropped, not followed.
  auto mask = expected.mask;
  auto labels = expected.labels;
  const int64_t words = mask_words(500);
  for (size_t row = 0; row < mask.size() / static_cast<size_t>(words); ++row)
    mask[(row + 1) * static_cast<size_t>(words) - 1] |= ~0u << (500 % 32);
  labels[7] = 1 << 20;
  DeviceGuarded mask_in(static_cast<int64_t>(mask.size() * 4)), labels_in(static_cast<int64_t>(labels.size() * 4));
  mask_in.upload(mask.data());
  labels_in.upload(labels.data());
  GpuCall again(context(), method("scope", {{"partition", "even:3"}}), in, DType::bf16);
  attend_selected(again.plan, again.args,
                  {static_cast<const int32_t*>(labels_in.data()), static_cast<const uint32_t*>(mask_in.data()), nullptr});
  const Result result = again.fetch();
  for (size_t i = 0; i < result.out.size(); ++i) ASSERT_EQ(result.out[i], i / 64 == 7 ? 0.0f : expected.out[i]) << i;
}

TEST_F(GpuCalls, ScheduleRunsDenseAndCanWarmUp) {
  Inputs in(1, 2, 300, 300, 64, 81);
  GpuCall gpu(context(), method("scope", {{"partition", "even:3"}, {"dense_steps", "0.5"}, {"warm_prefix", "yes"}}), in,
              DType::bf16);
  gpu.use_state();
  gpu.args.place = {1, 0, 4};
  const Result dense = gpu.run();
  EXPECT_EQ(dense.stats.reason, Reason::dense_step);
  EXPECT_EQ(dense.stats.iterations, 4);
  EXPECT_EQ(dense.stats.density, 1.0);
  gpu.args.place = {1, 3, 4};
  gpu.args.start = Start::warm;
  const Result sparse = gpu.run();
  EXPECT_EQ(sparse.stats.reason, Reason::sparse);
  EXPECT_TRUE(sparse.stats.warm);
  EXPECT_LT(sparse.stats.density, 1.0);
}

TEST_F(GpuCalls, EmptyAndTinySequences) {
  for (const int64_t q_tokens : {0, 1, 2, 33}) {
    for (const int64_t k_tokens : {0, 1, 2, 33}) {
      std::vector<Settings> all = baselines();
      for (const char* name : {"scope", "scope-exact", "dense"}) all.push_back(method(name, {{"partition", "even:2"}}));
      for (const Settings& settings : all) {
        Inputs in(1, 2, q_tokens, k_tokens, 8, 91);
        GpuCall gpu(context(), settings, in, DType::f16);
        const Result result = gpu.run();
        for (int64_t i = 0; i < q_tokens; ++i) {
          const int64_t words = mask_words(k_tokens), groups = gpu.plan.selection_groups;
          const auto sees = [&](int64_t j) {
            if (groups == 0 || result.stats.reason != Reason::sparse) return true;
            return mask_bit(result.mask.data() + result.labels[static_cast<size_t>(i)] * words, j);
          };
          expect_rows(in, result, 0, 0, i, exact_row(in, 0, 0, i, sees), tolerance(DType::f16));
        }
      }
    }
  }
}

// The CPU and the GPU differ by rounding, and K-means amplifies that: whole calls are compared by the mass that their
// selections hold, averaged over heads.
TEST_F(GpuCalls, RecallIsTheCpus) {
  const Context cpu(0);
  const int64_t heads = 8, tokens = 2500;
  for (Settings settings : {method("scope", {{"partition", "even:3"}, {"target_density", "0.1"}}),
                            method("scope-exact", {{"target_density", "0.1"}}), method("svg2", {{"target_density", "0.1"}}),
                            method("sparge", {{"target_density", "0.1"}, {"similarity", "-1"}})}) {
    Inputs in(1, heads, tokens, tokens, 64, 101);
    settings.first_iterations = 20;
    GpuCall gpu(context(), settings, in, DType::bf16);
    const Result on_gpu = gpu.run();
    const Plan plan(cpu, settings, in.shape());
    const Result on_cpu = run(plan, in);
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
    EXPECT_NEAR(recall(on_gpu), recall(on_cpu), 0.002) << get_setting(settings, "rule");
  }
}

TEST_F(GpuCalls, FindsOutLateWhatTheCpuRefuses) {
  Inputs in(1, 2, 300, 300, 64, 111);
  GpuCall gpu(context(), method("scope", {{"partition", "even:3"}}), in, DType::bf16);
  gpu.use_state();
  gpu.args.start = Start::warm;  // and no first call has filled the state
  call(gpu.plan, gpu.args);
  EXPECT_EQ(status_of([&] { gpu.fetch(); }), Status::invalid_argument);
  gpu.args.start = Start::first;
  gpu.run();
  in.q[5] = std::numeric_limits<float>::quiet_NaN();
  gpu.upload(in);
  call(gpu.plan, gpu.args);
  EXPECT_EQ(status_of([&] { gpu.fetch(); }), Status::non_finite);
  GpuCall blocks(context(), baselines()[1], in, DType::bf16);
  call(blocks.plan, blocks.args);
  EXPECT_EQ(status_of([&] { blocks.fetch(); }), Status::non_finite);
  in.q[5] = 0;
  gpu.upload(in);
  gpu.run();  // the handle is usable after it
}

TEST_F(GpuCalls, RefusesBadArgumentsAndWritesNothing) {
  Inputs in(1, 2, 100, 100, 64, 121);
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
  wide.dtype = DType::bf16;
  wide.q_tokens = wide.k_tokens = 200000;
  EXPECT_EQ(status_of([&] {
              Plan(context(), method("scope", {{"partition", "even:3"}, {"workspace_limit", "1"}}), wide);
            }),
            Status::invalid_argument);
  EXPECT_EQ(status_of([&] {
              Plan(context(), method("svg2", {{"codes", "4097"}, {"groups", "16"}}), wide);
            }),
            Status::size_limit);
  EXPECT_EQ(status_of([] { Context::on_gpu(1000); }), Status::invalid_argument);

  GpuCall gpu(context(), settings, in, DType::bf16);
  const auto refused = [&](const std::function<void(CallArgs&)>& change) {
    CallArgs args = gpu.args;
    change(args);
    return status_of([&] { call(gpu.plan, args); });
  };
  HeadStats heads[2];
  EXPECT_EQ(refused([](CallArgs& a) { a.workspace_bytes -= 1; }), Status::workspace);
  EXPECT_EQ(refused([](CallArgs& a) { a.q.data = static_cast<const std::byte*>(a.q.data) + 2; }), Status::alignment);
  EXPECT_EQ(refused([](CallArgs& a) { a.k.token_stride += 1; }), Status::alignment);
  EXPECT_EQ(refused([&](CallArgs& a) { a.head_stats = heads; }), Status::invalid_argument);
  EXPECT_EQ(refused([&](CallArgs& a) { a.state = gpu.state().data(); }), Status::invalid_argument);
  EXPECT_EQ(refused([](CallArgs& a) { a.q.dtype = DType::f16; }), Status::dtype);
  for (const uint16_t bits : gpu.out_bits()) ASSERT_EQ(bits, 0xffff);
}

// A fault on the device is sticky: it must poison calls, not crash them. In a process of its own, which it takes down.
TEST_F(GpuCalls, AFaultPoisonsTheHandleAndDestroyingItIsSafe) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const auto first = [] {
          const Context own = Context::on_gpu(0, 1);
          Inputs in(1, 2, 300, 300, 64, 131);
          GpuCall gpu(own, method("scope", {{"partition", "even:3"}}), in, DType::bf16);
          gpu.args.q.data = reinterpret_cast<const void*>(uintptr_t{16});  // nobody's memory
          CallArgs reading = gpu.args;
          const Status found = status_of([&] {
            call(gpu.plan, gpu.args);
            read_stats(gpu.plan, reading);
          });
          const Status later = status_of([&] { call(gpu.plan, gpu.args); });
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
  Inputs in(1, heads, period, k_tokens, dim, 141);  // of its queries, the first head's are repeated
  const std::vector<uint16_t> q_bits = to_16(in.q, DType::bf16), k_bits = to_16(in.k, DType::bf16),
                              v_bits = to_16(in.v, DType::bf16);
  for (int64_t h = 1; h < heads; ++h) std::copy_n(in.q.begin(), period * dim, in.q.begin() + h * period * dim);
  const Context host(1);
  const Result expected = run(Plan(host, method("dense"), in.shape()), in);

  Shape shape = in.shape();
  shape.q_tokens = tokens;
  shape.dtype = DType::bf16;
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
      Inputs in(1, 1, tokens, tokens, dim, 151);
      GpuCall compact(context(),
                      method(name, {{"kernel", kernel},
                                    {"groups", "2"},
                                    {"partition", "even:3"},
                                    {"codes", "4"},
                                    {"rule", "fixed"},
                                    {"density", "0.5"}}),
                      in, DType::bf16);
      compact.run();
      const std::vector<uint16_t> want_bits = compact.out_bits();

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
      call(compact.plan, args);
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
