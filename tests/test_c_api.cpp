// The C ABI through its C++ face, on every backend that is present: a token-major host with memory of its own, structs of
// any size, errors, handles, states, threads and processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <regex>
#include <scope/scope.hpp>
#include <thread>

#include "capi/structs.h"
#include "core/numeric.h"
#include "pipeline/plan.h"
#include "stages/backends.h"
#include "support.h"

namespace {

using scope::Backend;

// Memory of a backend; the host's begins where only its elements are aligned, unless it is to be.
class Memory {
 public:
  Memory(const Backend* backend, int64_t bytes, bool aligned = false)
      : backend_(backend),
        bytes_(bytes),
        base_(backend->allocate(exec(), bytes + 64)),
        data_(static_cast<std::byte*>(base_) + (backend->can.host && !aligned ? 4 : 0)) {}
  ~Memory() { backend_->release(base_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  void upload(const void* from) { backend_->write(exec(), from, data_, bytes_); }
  template <class T>
  std::vector<T> values() const {
    std::vector<T> out(static_cast<size_t>(bytes_) / sizeof(T));
    backend_->read(exec(), data_, out.data(), bytes_);
    return out;
  }

 private:
  // A machine beside the library's own, as a host has it.
  const scope::Exec& exec() const {
    static std::map<const Backend*, scope::Context> machines;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    return machines
        .try_emplace(backend_,
                     scope::ContextOptions{.backend = backend_->name, .threads = 1, .instruction_set = "auto", .device = 0})
        .first->second.exec();
  }
  const Backend* backend_;
  int64_t bytes_;
  void* base_;
  std::byte* data_;
};

// A host that keeps [batch, tokens, heads, dim] tensors, in f32 where the backend takes it and in bf16 where not.
struct Host {
  static constexpr int64_t kBatch = 2, kTokens = 260, kHeads = 3, kDim = 64, kElements = kBatch * kTokens * kHeads * kDim;
  const Backend* backend;
  bool f32;
  Memory q, k, v, out;

  Host(const Backend* on, uint32_t seed)
      : backend(on),
        f32(on->can.dtypes.has(scope::DType::f32)),
        q(on, kElements * each()),
        k(on, kElements * each()),
        v(on, kElements * each()),
        out(on, kElements * each()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (Memory* x : {&q, &k, &v}) {
      std::vector<float> values(static_cast<size_t>(kElements));
      for (float& value : values) value = normal(random);
      fill(*x, values);
    }
  }
  int64_t each() const { return f32 ? 4 : 2; }
  double tolerance() const { return f32 ? 1e-5 : 3e-2; }
  void fill(Memory& x, const std::vector<float>& values) const {
    if (f32) return x.upload(values.data());
    std::vector<uint16_t> bits;
    for (const float value : values) bits.push_back(scope::f32_to_bf16(value));
    x.upload(bits.data());
  }
  std::vector<float> values(const Memory& x) const {
    if (f32) return x.values<float>();
    std::vector<float> values;
    for (const uint16_t bits : x.values<uint16_t>()) values.push_back(scope::bf16_to_f32(bits));
    return values;
  }
  std::vector<float> result() const { return values(out); }
  void clear() { fill(out, std::vector<float>(static_cast<size_t>(kElements), 77.0f)); }

  scope_shape shape() const {
    scope_shape shape = scope_attn::make_shape();
    shape.batch = kBatch;
    shape.heads = kHeads;
    shape.q_tokens = shape.k_tokens = kTokens;
    shape.dim = kDim;
    shape.dtype = f32 ? SCOPE_F32 : SCOPE_BF16;
    shape.rope[0] = 24;
    shape.rope[1] = shape.rope[2] = 20;
    return shape;
  }
  scope_tensor tensor(const Memory& x) const { return scope_attn::token_major(x.data(), kHeads, kTokens, kDim); }
  scope_run_args args(const Memory& workspace) const {
    scope_run_args args = scope_attn::make_args();
    args.q = tensor(q);
    args.k = tensor(k);
    args.v = tensor(v);
    args.out = tensor(out);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.bytes();
    return args;
  }
};

scope_context_options options_for(const Backend* backend, int threads = 2) {
  scope_context_options options{};
  options.struct_size = sizeof options;
  options.backend = backend->name;
  options.threads = threads;
  return options;
}

// A plan for a host's tensors with a workspace.
struct Session {
  Session(const Host& host, const scope_attn::Context& context, const scope_attn::Method& method)
      : plan(context, method, host.shape()),
        workspace(host.backend, plan.info().workspace_bytes),
        args(host.args(workspace)),
        stats(scope_attn::make_stats()),
        heads(scope_attn::make_head_stats(Host::kBatch, Host::kHeads)) {}
  // A call and its statistics.
  void run() {
    args.stats = &stats;
    plan.run(args);
    scope_run_args reading = args;
    reading.head_stats = heads.data();
    plan.read_stats(reading);
  }
  scope_status status(const scope_run_args& with) const { return scope_run(plan.handle(), &with); }

  scope_attn::Plan plan;
  Memory workspace;
  scope_run_args args;
  scope_call_stats stats;
  std::vector<scope_head_stats> heads;
};

scope_attn::Method quick(const char* name = "scope") {
  return std::move(scope_attn::Method(name).set("first_iterations", "3"));
}

bool error_names(const char* text) { return std::strstr(scope_last_error(), text) != nullptr; }

class CApi : public testing::TestWithParam<const Backend*> {
 protected:
  scope_attn::Context context(int threads = 2) const { return scope_attn::Context(options_for(GetParam(), threads)); }
};

std::vector<const Backend*> present() {
  std::vector<const Backend*> found;
  for (const Backend* backend : scope::backends()) {
    if (backend->present()) found.push_back(backend);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Backends, CApi, testing::ValuesIn(present()),
                         [](const auto& backend) { return std::string(backend.param->name); });

TEST_P(CApi, TokenMajorHostWithItsOwnAllocator) {
  Host host(GetParam(), 1);
  const scope_attn::Context on = context();
  Session session(host, on, scope_attn::Method().set("rule", "target").set("density", "0.3"));
  Memory memory(GetParam(), session.plan.info().state_bytes, true);
  const scope_attn::State state(session.plan, memory.data());
  session.args.state = state.handle();
  session.run();
  EXPECT_EQ(session.stats.reason, SCOPE_RAN_SPARSE);
  EXPECT_EQ(session.stats.warm, 0);
  EXPECT_NEAR(session.stats.density, 0.3, host.f32 ? 0.01 : 0.03);
  EXPECT_GT(session.heads[5].k_head, 0);
  session.run();
  EXPECT_EQ(session.stats.warm, 1);
  // rho = 1 is dense attention.
  Session(host, on, quick().set("rho", "1")).run();
  const auto whole = host.result();
  host.clear();
  Session(host, on, scope_attn::Method("dense")).run();
  const auto dense = host.result();
  for (size_t i = 0; i < dense.size(); ++i) ASSERT_NEAR(whole[i], dense[i], host.tolerance());
}

TEST_P(CApi, SelectionGoesOutAndComesBack) {
  Host host(GetParam(), 2);
  Session session(host, context(), quick());
  const scope_plan_info& info = session.plan.info();
  const int64_t heads = Host::kBatch * Host::kHeads;
  const Memory labels(GetParam(), heads * Host::kTokens * 4), counts(GetParam(), heads * info.selection_groups * 4),
      mask(GetParam(), heads * info.selection_groups * info.mask_words * 4), again(GetParam(), mask.bytes());
  scope_selection selection = scope_attn::make_selection();
  selection.labels = static_cast<int32_t*>(labels.data());
  selection.counts = static_cast<int32_t*>(counts.data());
  selection.mask = static_cast<uint32_t*>(mask.data());
  session.args.selection = &selection;
  session.run();
  const auto whole = host.result();
  host.clear();
  session.plan.run_selection(session.args);
  EXPECT_EQ(host.result(), whole);
  // The selection says what is kept, whatever the arguments do.
  const std::vector<uint32_t> text(static_cast<size_t>(Host::kBatch * info.mask_words), 5u);
  session.args.keep = text.data();
  host.clear();
  session.plan.run_selection(session.args);
  EXPECT_EQ(host.result(), whole);
  session.args.keep = nullptr;
  // Select only: no v, no out.
  session.args.out.data = session.args.v.data = nullptr;
  selection.mask = static_cast<uint32_t*>(again.data());
  session.run();
  EXPECT_EQ(again.values<uint32_t>(), mask.values<uint32_t>());
  EXPECT_EQ(host.result(), whole);
  session.args.selection = nullptr;
  EXPECT_EQ(scope_run_selection(session.plan.handle(), &session.args), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(error_names("selection"));
}

// The program's own threads do the work, in any order, and the bits are those of threads of the context's own.
TEST(CApiThreads, ComeFromTheProgram) {
  Host host(&scope::find_backend("cpu"), 11);
  scope_context_options options = options_for(host.backend, 3);
  const scope_attn::Context own(options);
  struct Pool {
    int calls = 0;
    int32_t most = 0;
    static void run(void* self, int32_t tasks, void (*task)(void*, int32_t), void* data) {
      auto* pool = static_cast<Pool*>(self);
      ++pool->calls;
      pool->most = std::max(pool->most, tasks);
      std::vector<std::thread> threads;
      for (int32_t i = tasks - 1; i > 0; --i) threads.emplace_back(task, data, i);
      task(data, 0);
      for (std::thread& thread : threads) thread.join();
    }
  } pool;
  options.run_tasks = Pool::run;
  options.run_tasks_pool = &pool;
  const scope_attn::Context foreign(options);
  for (const char* method : {"scope", "scope-mean", "dense"}) {
    Session(host, own, scope_attn::Method(method)).run();
    const auto expected = host.result();
    host.clear();
    pool = {};
    Session(host, foreign, scope_attn::Method(method)).run();
    EXPECT_EQ(host.result(), expected) << method;
    EXPECT_GT(pool.calls, 0) << method;
    EXPECT_EQ(pool.most, 3) << method;
  }
  // A pool that forgets its tasks is found out, and the output is as it was.
  options.run_tasks = [](void*, int32_t, void (*)(void*, int32_t), void*) {};
  host.clear();
  const auto before = host.result();
  const scope_attn::Context idle(options);
  Session session(host, idle, scope_attn::Method("dense"));
  EXPECT_EQ(session.status(session.args), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(error_names("run_tasks")) << scope_last_error();
  EXPECT_EQ(host.result(), before);
}

TEST_P(CApi, SettingsThatDoNothingAreRefused) {
  Host host(GetParam(), 3);
  const scope_attn::Context on = context(1);
  const scope_shape shape = host.shape();
  scope_attn::Method method = quick();
  method.set("density", "0.3");
  scope_plan* plan = nullptr;
  EXPECT_EQ(scope_plan_create(on.handle(), method.handle(), &shape, &plan), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(error_names("density: got 0.3, which would do nothing: rule is online; target_density")) << scope_last_error();
  method.set_default("density", "0.4");  // the host's own, in the place of its user's
  EXPECT_EQ(method.get("density"), "0.4");
  EXPECT_EQ(scope_plan_create(on.handle(), method.handle(), &shape, &plan), SCOPE_OK) << scope_last_error();
  scope_plan_destroy(plan);
  method.set("density", "0.3").set("rule", "fixed");
  EXPECT_EQ(scope_plan_create(on.handle(), method.handle(), &shape, &plan), SCOPE_OK) << scope_last_error();
  scope_plan_destroy(plan);
  EXPECT_EQ(scope_method_set_default(method.handle(), "densitys", "1"), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(scope_method_set_default(nullptr, "density", "1"), SCOPE_ERROR_INVALID_ARGUMENT);
}

TEST_P(CApi, ErrorsNameTheArgumentAndLeaveHandlesUsable) {
  Host host(GetParam(), 3);
  const scope_attn::Context on = context(1);
  Session session(host, on, quick());
  EXPECT_EQ(scope_run(nullptr, nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(scope_run(session.plan.handle(), nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  scope_run_args args = session.args;
  args.workspace_bytes -= 1;
  EXPECT_EQ(session.status(args), SCOPE_ERROR_WORKSPACE);
  EXPECT_TRUE(error_names(std::to_string(session.plan.info().workspace_bytes).c_str()));
  for (const auto& [name, tensor] :
       {std::pair("q", &scope_run_args::q), {"k", &scope_run_args::k}, {"v", &scope_run_args::v}}) {
    args = session.args;
    (args.*tensor).data = nullptr;
    EXPECT_EQ(session.status(args), SCOPE_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(scope_last_error()).substr(0, 2), std::string(name) + ":");
  }
  args = session.args;
  args.reserved = 1;
  EXPECT_EQ(session.status(args), SCOPE_ERROR_INVALID_ARGUMENT);
  for (const float scale : {-1.0f, NAN, INFINITY}) {
    args = session.args;
    args.scale = scale;
    EXPECT_EQ(session.status(args), SCOPE_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(error_names("scale"));
  }
  auto values = host.values(host.q);
  values[5] = NAN;
  host.fill(host.q, values);
  EXPECT_THROW(session.run(), scope_attn::Error);  // before or after the fact, as the backend can
  host.fill(host.q, std::vector<float>(values.size(), 0.5f));
  session.run();

  scope_shape shape = host.shape();
  scope_plan* none = nullptr;
  const scope_attn::Method method;
  shape.dtype = 9;
  EXPECT_EQ(scope_plan_create(on.handle(), method.handle(), &shape, &none), SCOPE_ERROR_DTYPE);
  shape = host.shape();
  shape.rope[0] = 23;
  EXPECT_EQ(scope_plan_create(on.handle(), method.handle(), &shape, &none), SCOPE_ERROR_SHAPE);
  const int64_t sizes[] = {32, 33};
  const int32_t channels[64] = {};
  shape.subspaces = 2;
  shape.subspace_sizes = sizes;
  shape.subspace_channels = channels;
  EXPECT_EQ(scope_plan_create(on.handle(), method.handle(), &shape, &none), SCOPE_ERROR_SHAPE);
  EXPECT_EQ(none, nullptr);
  scope_method* unknown = nullptr;
  EXPECT_EQ(scope_method_create("sage", &unknown), SCOPE_ERROR_INVALID_ARGUMENT);
  scope_context_options options = options_for(GetParam(), -3);
  scope_context* bad = nullptr;
  EXPECT_EQ(scope_context_create(&options, &bad), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(scope_context_create(&options, nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  options = options_for(GetParam());
  options.backend = "abacus";
  EXPECT_NE(scope_context_create(&options, &bad), SCOPE_OK);
  EXPECT_TRUE(error_names("abacus"));
  EXPECT_EQ(bad, nullptr);
  scope_context_destroy(nullptr);
  scope_method_destroy(nullptr);
  scope_plan_destroy(nullptr);
  scope_state_destroy(nullptr);
}

// out may be q; any other element it shares with what the call reads or writes would change under it.
TEST_P(CApi, OutSharesNoMemory) {
  Host host(GetParam(), 4);
  const scope_attn::Context on = context();
  Session session(host, on, quick());
  session.run();
  const auto expected = host.result();
  const auto refused = [&](const Memory& memory, int64_t bytes) {
    scope_run_args args = session.args;
    args.out = host.tensor(memory);
    args.out.data = static_cast<std::byte*>(memory.data()) + bytes;
    return session.status(args) == SCOPE_ERROR_INVALID_ARGUMENT && error_names("out");
  };
  const int64_t row = Host::kHeads * Host::kDim * host.each();
  for (const Memory* other : {&host.k, &host.v}) {
    EXPECT_TRUE(refused(*other, 0));
    EXPECT_TRUE(refused(*other, row));
    EXPECT_TRUE(refused(*other, -row));
  }
  EXPECT_TRUE(refused(host.q, row));
  EXPECT_TRUE(refused(session.workspace, 0));
  Memory report(GetParam(), session.plan.info().report_bytes, true),
      state_memory(GetParam(), session.plan.info().state_bytes, true);
  const scope_attn::State state(session.plan, state_memory.data());
  session.args.report = report.data();
  session.args.state = state.handle();
  EXPECT_TRUE(refused(state_memory, 16));
  EXPECT_TRUE(refused(report, 16));
  session.args.out = session.args.q;
  session.args.state = nullptr;
  session.run();
  EXPECT_EQ(host.values(host.q), expected);
}

TEST(CApiTables, SaysWhatABackendTakes) {
  EXPECT_EQ(scope_supports("cpu", SCOPE_BF16, 256), 1);
  EXPECT_EQ(scope_supports("cpu", SCOPE_F32, 257), 0);
  EXPECT_EQ(scope_supports(nullptr, SCOPE_F32, 64), 0);
  EXPECT_EQ(scope_supports("abacus", SCOPE_F32, 64), 0);
  EXPECT_EQ(scope_supports("cuda", SCOPE_F32, 64), 0);
  EXPECT_EQ(scope_supports("cuda", SCOPE_BF16, 136), 0);
  EXPECT_EQ(scope_supports("cuda", SCOPE_BF16, 60), 0);
  if (scope_supports("cuda", SCOPE_BF16, 64) == 1) return;
  scope_context_options options{};
  options.struct_size = sizeof options;
  options.backend = "cuda";
  scope_context* context = nullptr;
  EXPECT_EQ(scope_context_create(&options, &context), SCOPE_ERROR_UNSUPPORTED);
  EXPECT_EQ(context, nullptr);
  EXPECT_TRUE(error_names("backend"));
}

template <class Info>
std::vector<Info> walk(scope_status (*at)(int32_t, Info*)) {
  std::vector<Info> rows;
  Info info{};
  info.struct_size = sizeof info;
  while (at(static_cast<int32_t>(rows.size()), &info) == SCOPE_OK) rows.push_back(info);
  EXPECT_EQ(at(-1, &info), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(at(static_cast<int32_t>(rows.size()), &info), SCOPE_ERROR_INVALID_ARGUMENT);
  return rows;
}

TEST(CApiTables, CanBeWalked) {
  const auto settings = walk(scope_setting_at);
  EXPECT_GT(settings.size(), 15u);
  const auto methods = walk(scope_method_at);
  EXPECT_STREQ(methods.at(0).name, "scope");
  for (const scope_method_info& method : methods) {
    const scope_attn::Method made(method.name);
    EXPECT_GT(std::strlen(method.help), 10u);
    EXPECT_EQ(method.morton, std::string(method.name) == "sol" ? 1 : 0) << method.name;
    for (const scope_setting_info& setting : settings) EXPECT_FALSE(made.get(setting.name).empty());
  }
  const auto models = walk(scope_model_at);
  EXPECT_GT(models.size(), 5u);
  for (const scope_model_info& model : models) {
    const int64_t rotated = model.rope[0] + model.rope[1] + model.rope[2];
    EXPECT_TRUE(rotated == model.dim || rotated == 0) << model.name;
    const scope_attn::Method method = std::move(scope_attn::Method().model(model.name));
    EXPECT_EQ(scope::test::number(method.get("rho")), model.rho);
    EXPECT_EQ(scope::test::number(method.get("dense_steps")), model.dense_steps);
    EXPECT_EQ(method.get("warm_prefix"), model.warm_prefix == 1 ? "yes" : "no");
  }
}

TEST(CApiTables, SayWhichModelFits) {
  scope_model_query query{};
  query.struct_size = sizeof query;
  scope_model_answer answer{};
  answer.struct_size = sizeof answer;
  const auto name = [&] {
    scope_model_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(scope_model_at(answer.index, &info), SCOPE_OK);
    return std::string(info.name);
  };
  query.family = "wan";
  query.layers = query.heads = 40;
  query.dim = 128;
  ASSERT_EQ(scope_model_fit(&query, &answer), SCOPE_OK);
  EXPECT_EQ(name(), "wan2.1-t2v-14b");
  EXPECT_EQ(answer.exact, 1);
  EXPECT_EQ(std::string(answer.why).find("wan2.1-t2v-14b: 40 layers x 40 heads of 128 channels"), 0u) << answer.why;
  query.experts = 2;
  query.from_image = 1;
  ASSERT_EQ(scope_model_fit(&query, &answer), SCOPE_OK);
  EXPECT_EQ(name(), "wan2.2-i2v-a14b");
  query.layers = 3;
  ASSERT_EQ(scope_model_fit(&query, &answer), SCOPE_OK);
  EXPECT_EQ(answer.index, -1);
  query.nearest = 1;
  ASSERT_EQ(scope_model_fit(&query, &answer), SCOPE_OK);
  EXPECT_EQ(name(), "wan2.2-i2v-a14b");
  EXPECT_EQ(answer.exact, 0);
  // A family of any length is told of as far as there is room.
  const std::string family(100'000, 'x');
  query.family = family.c_str();
  ASSERT_EQ(scope_model_fit(&query, &answer), SCOPE_OK);
  EXPECT_EQ(answer.index, -1);
  EXPECT_EQ(std::strlen(answer.why), 1023u);
  query.family = nullptr;

  const auto refused = [&](const char* words) {
    answer.index = 77;
    EXPECT_EQ(scope_model_fit(&query, &answer), SCOPE_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(scope_last_error()).find(words), std::string::npos) << scope_last_error();
    EXPECT_EQ(answer.index, 77);
  };
  query.experts = 3;
  refused("experts: got 3");
  query.experts = 1;
  query.heads = -1;
  refused("heads: got -1");
  query.heads = 0;
  query.reserved = 1;
  refused("query.reserved");
}

TEST(CApiTables, VersionIsTheHeaders) {
  EXPECT_EQ(scope_version(), fmt::format("{}.{}.{}", SCOPE_VERSION_MAJOR, SCOPE_VERSION_MINOR, SCOPE_VERSION_PATCH));
}

TEST(CApiTables, CommitIsWhatGitSaysOrUnknown) {
  EXPECT_TRUE(std::regex_match(scope_commit(), std::regex("[0-9a-f]{40}\\+?|unknown"))) << scope_commit();
}

// ---- structs that grow ----

// A struct as a caller of another header has it: 8 bytes more, of which one may not be 0.
template <class T>
struct Longer {
  T value;
  unsigned char more[8];
};

template <class T>
Longer<T> longer(T value, unsigned char byte, size_t at = 7) {
  value.struct_size = sizeof(T) + 8;
  Longer<T> result{value, {}};
  result.more[at] = byte;
  return result;
}

template <class T, class Use>
void expect_input(const char* name, T valid, const Use& use) {
  EXPECT_EQ(use(&valid), SCOPE_OK) << name << ": " << scope_last_error();
  constexpr size_t first = scope::capi::kFirstSize<T>;  // an older header's
  T older = valid;
  older.struct_size = first;
  EXPECT_EQ(use(&older), SCOPE_OK) << name << ": " << scope_last_error();
  for (const size_t wrong : {first - 8, size_t{0}, size_t{8}, size_t{1} << 40}) {
    T other = valid;
    other.struct_size = wrong;
    EXPECT_EQ(use(&other), SCOPE_ERROR_INVALID_ARGUMENT) << name << " of " << wrong;
    EXPECT_TRUE(error_names((std::string(name) + ".struct_size").c_str())) << scope_last_error();
  }
  const Longer<T> zeros = longer(valid, 0);
  EXPECT_EQ(use(&zeros.value), SCOPE_OK) << name << ": " << scope_last_error();
  for (size_t at = 0; at < 8; ++at) {
    const Longer<T> unknown = longer(valid, 1, at);
    EXPECT_EQ(use(&unknown.value), SCOPE_ERROR_UNSUPPORTED) << name << ", byte " << at;
    EXPECT_TRUE(error_names(fmt::format("{}.struct_size", name).c_str())) << scope_last_error();
    EXPECT_TRUE(error_names(fmt::format("(byte {})", sizeof(T) + at).c_str())) << scope_last_error();
  }
}

template <class T, class Use>
void expect_output(const char* name, const Use& use) {
  T plain{};
  plain.struct_size = sizeof(T);
  EXPECT_EQ(use(&plain), SCOPE_OK) << name << ": " << scope_last_error();
  for (const size_t wrong : {scope::capi::kFirstSize<T> - 8, size_t{0}, size_t{8}, size_t{1} << 40}) {
    T other{};
    other.struct_size = wrong;
    EXPECT_EQ(use(&other), SCOPE_ERROR_INVALID_ARGUMENT) << name << " of " << wrong;
    EXPECT_TRUE(error_names((std::string(name) + ".struct_size").c_str())) << scope_last_error();
    T untouched{};
    untouched.struct_size = wrong;
    EXPECT_EQ(std::memcmp(&other, &untouched, sizeof(T)), 0) << name;
  }
  const size_t first = scope::capi::kFirstSize<T>;  // of the MINOR's first header
  T shorter{};
  shorter.struct_size = first;
  EXPECT_EQ(use(&shorter), SCOPE_OK) << name << ": " << scope_last_error();
  T as_far = plain;
  as_far.struct_size = first;
  std::memset(reinterpret_cast<char*>(&as_far) + first, 0, sizeof(T) - first);
  EXPECT_EQ(std::memcmp(&shorter, &as_far, sizeof(T)), 0) << name << ": no more than the caller has room for";
  for (size_t at = 0; at < 8; ++at) {
    Longer<T> more = longer(T{}, 9, at);
    EXPECT_EQ(use(&more.value), SCOPE_OK) << name << ": " << scope_last_error();
    EXPECT_EQ(more.value.struct_size, sizeof(T) + 8);
    EXPECT_EQ(more.more[at], 0) << name << ", byte " << at << ": what the library does not know is 0";
    more.value.struct_size = sizeof(T);
    EXPECT_EQ(std::memcmp(&more.value, &plain, sizeof(T)), 0) << name;
  }
}

TEST_P(CApi, EveryStructMayBeLongerAndNotShorter) {
  Host host(GetParam(), 5);
  const scope_attn::Context on = context(1);
  const scope_attn::Method method = std::move(quick().set("check_finite", "no"));
  Session session(host, on, method);
  scope_plan* plan = session.plan.handle();

  expect_input("options", options_for(GetParam()), [](const scope_context_options* options) {
    scope_context* made = nullptr;
    const scope_status status = scope_context_create(options, &made);
    scope_context_destroy(made);
    return status;
  });
  expect_input("shape", host.shape(), [&](const scope_shape* shape) {
    scope_plan* made = nullptr;
    const scope_status status = scope_plan_create(on.handle(), method.handle(), shape, &made);
    scope_plan_destroy(made);
    return status;
  });
  expect_input("args", session.args, [&](const scope_run_args* args) { return scope_run(plan, args); });
  expect_input("args", session.args, [&](const scope_run_args* args) { return scope_read_stats(plan, args); });
  const int64_t heads = Host::kBatch * Host::kHeads, groups = session.plan.info().selection_groups;
  const Memory labels(GetParam(), heads * Host::kTokens * 4),
      mask(GetParam(), heads * groups * session.plan.info().mask_words * 4);
  scope_selection selection = scope_attn::make_selection();
  selection.labels = static_cast<int32_t*>(labels.data());
  selection.mask = static_cast<uint32_t*>(mask.data());
  for (const auto call : {scope_run, scope_run_selection}) {
    expect_input("selection", selection, [&](const scope_selection* given) {
      scope_run_args args = session.args;
      args.selection = given;
      return call(plan, &args);
    });
  }
  scope_run_args with_selection = session.args;
  with_selection.selection = &selection;
  expect_input("args", with_selection, [&](const scope_run_args* args) { return scope_run_selection(plan, args); });

  expect_output<scope_plan_info>("info", [&](scope_plan_info* info) { return scope_plan_get_info(plan, info); });
  expect_output<scope_setting_info>("info", [](scope_setting_info* info) { return scope_setting_at(0, info); });
  expect_output<scope_method_info>("info", [](scope_method_info* info) { return scope_method_at(0, info); });
  expect_output<scope_model_info>("info", [](scope_model_info* info) { return scope_model_at(0, info); });
  scope_model_query query{};
  query.struct_size = sizeof query;
  expect_output<scope_model_answer>("answer", [&](scope_model_answer* answer) { return scope_model_fit(&query, answer); });
  expect_input("query", query, [](const scope_model_query* given) {
    scope_model_answer answer{};
    answer.struct_size = sizeof answer;
    return scope_model_fit(given, &answer);
  });
  std::vector<std::byte> report(static_cast<size_t>(session.plan.info().report_bytes));
  expect_output<scope_call_stats>(
      "stats", [&](scope_call_stats* stats) { return scope_report_read(plan, report.data(), stats, nullptr); });
  const auto run_with = [&](scope_call_stats* stats) {
    scope_run_args args = session.args;
    args.stats = stats;
    const scope_status status = scope_run(plan, &args);
    if (status == SCOPE_OK) {  // times differ from call to call
      for (double* each :
           {&stats->density, &stats->total_density, &stats->check_seconds, &stats->group_seconds, &stats->encode_seconds,
            &stats->score_seconds, &stats->select_seconds, &stats->attend_seconds, &stats->total_seconds}) {
        *each = 0;
      }
    }
    return status;
  };
  expect_output<scope_call_stats>("stats", run_with);

  // Arrays: each element is as long as the first says.
  auto known = session.heads;
  std::vector<Longer<scope_head_stats>> long_heads(known.size(), longer(scope_head_stats{}, 9));
  for (size_t i = 1; i < long_heads.size(); ++i) long_heads[i].value.struct_size = 0;
  scope_run_args args = session.args;
  args.head_stats = known.data();
  session.plan.run(session.args);
  session.plan.read_stats(args);
  args.head_stats = &long_heads[0].value;
  session.plan.read_stats(args);
  EXPECT_GT(known[5].k_head, 0);
  for (size_t i = 0; i < known.size(); ++i) {
    EXPECT_EQ(long_heads[i].value.struct_size, sizeof(scope_head_stats) + 8);
    EXPECT_EQ(long_heads[i].more[7], 0);
    long_heads[i].value.struct_size = sizeof(scope_head_stats);
    EXPECT_EQ(std::memcmp(&long_heads[i].value, &known[i], sizeof known[i]), 0);
  }
  for (const size_t wrong : {sizeof(scope_head_stats) - 8, size_t{0}}) {
    known[0].struct_size = wrong;
    args.head_stats = known.data();
    EXPECT_EQ(scope_read_stats(plan, &args), SCOPE_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(error_names("head_stats.struct_size"));
    EXPECT_EQ(scope_report_read(plan, report.data(), nullptr, known.data()), SCOPE_ERROR_INVALID_ARGUMENT);
  }
}

}  // namespace

// A struct that has grown since the first header of its MINOR version.
struct Grown {
  size_t struct_size;
  int64_t old_field, new_field;
};
template <>
inline constexpr size_t scope::capi::kFirstSize<Grown> = 16;

namespace {

TEST(CApiStructs, OlderCallersLackWhatIsNew) {
  const Grown given{16, 5, 7};
  const Grown read = scope::capi::read_struct(&given, "grown");
  EXPECT_EQ(read.old_field, 5);
  EXPECT_EQ(read.new_field, 0);
  Grown to{16, 1, 2};
  scope::capi::write_struct({0, 8, 9}, &to);
  EXPECT_EQ(to.struct_size, 16u);
  EXPECT_EQ(to.old_field, 8);
  EXPECT_EQ(to.new_field, 2);
  int64_t array[4] = {16, 0, 0, 0};
  scope::capi::write_element({0, 8, 9}, reinterpret_cast<Grown*>(array), 1);
  EXPECT_EQ(array[2], 16);
  EXPECT_EQ(array[3], 8);
  const Grown shorter{8, 5, 7};
  EXPECT_THROW(scope::capi::read_struct(&shorter, "grown"), scope::Error);
}

// ---- threads, processes ----

// Separate contexts run concurrently and give the bits that a serial run gives.
TEST_P(CApi, SixteenThreadsEqualSerial) {
  const auto attend = [this](uint32_t seed) {
    Host host(GetParam(), seed);
    Session(host, context(1), quick()).run();
    return host.result();
  };
  std::vector<std::vector<float>> serial(4), parallel(16);
  for (uint32_t i = 0; i < 4; ++i) serial[i] = attend(i);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 16; ++i) threads.emplace_back([&, i] { parallel[i] = attend(i % 4); });
  for (auto& thread : threads) thread.join();
  for (uint32_t i = 0; i < 16; ++i) EXPECT_EQ(parallel[i], serial[i % 4]);
}

// 16 threads of 1,000 calls each, with plans and states of their own: the bits of the same calls one after the other.
TEST_P(CApi, SixteenThreadsOfAThousandCallsEqualSerial) {
  static constexpr int64_t kTokens = 40, kDim = 16, kElements = kTokens * kDim;
  static constexpr int kThreads = 16, kPeriod = 10;
  const int many = std::getenv("SCOPE_CASES") == nullptr ? 1000 : 50;  // fewer in slow builds
  const char* const methods[] = {"scope", "scope-mean", "svg2", "dense"};
  const auto many_calls = [&](int seed, int calls, const std::vector<std::vector<char>>* expected) {
    const int64_t bytes = kElements * (GetParam()->can.dtypes.has(scope::DType::f32) ? 4 : 2);
    const scope_attn::Context alone = context(1);
    scope_shape shape = scope_attn::make_shape();
    shape.q_tokens = shape.k_tokens = kTokens;
    shape.dim = kDim;
    shape.dtype = bytes == kElements * 4 ? SCOPE_F32 : SCOPE_BF16;
    shape.rope[0] = 8, shape.rope[1] = shape.rope[2] = 4;
    const char* name = methods[seed % 4];
    scope_attn::Plan plan(alone, std::strcmp(name, "dense") == 0 ? scope_attn::Method(name) : quick(name), shape);
    Memory q(GetParam(), bytes), k(GetParam(), bytes), v(GetParam(), bytes), out(GetParam(), bytes);
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<float> normal;
    for (Memory* x : {&q, &k, &v}) {
      std::vector<float> floats(kElements);
      std::vector<uint16_t> halves;
      for (float& value : floats) halves.push_back(scope::f32_to_bf16(value = normal(random)));
      x->upload(bytes == kElements * 4 ? static_cast<const void*>(floats.data()) : halves.data());
    }
    const Memory workspace(GetParam(), plan.info().workspace_bytes, true), memory(GetParam(), plan.info().state_bytes, true);
    std::unique_ptr<scope_attn::State> state;
    if (plan.info().state_bytes > 0) state = std::make_unique<scope_attn::State>(plan, memory.data());
    scope_run_args args = scope_attn::make_args();
    const auto tensor = [](const Memory& x) { return scope_attn::token_major(x.data(), 1, kTokens, kDim); };
    args.q = tensor(q), args.k = tensor(k), args.v = tensor(v), args.out = tensor(out);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.bytes();
    std::vector<std::vector<char>> results;
    for (int i = 0; i < calls; ++i) {
      if (state && i % kPeriod == 0) state->reset();
      args.state = state ? state->handle() : nullptr;
      plan.run(args);
      if (expected == nullptr) {
        results.push_back(out.values<char>());
      } else if (out.values<char>() != (*expected)[static_cast<size_t>(i % kPeriod)]) {
        ADD_FAILURE() << name << ", call " << i;
        break;
      }
    }
    return results;
  };
  std::vector<std::vector<std::vector<char>>> serial;
  for (int seed = 0; seed < kThreads; ++seed) serial.push_back(many_calls(seed, kPeriod, nullptr));
  std::vector<std::thread> threads;
  for (int seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back([&, seed] { many_calls(seed, many, &serial[static_cast<size_t>(seed)]); });
  }
  for (auto& thread : threads) thread.join();
}

// Whether tests that wait for two calls to meet may go on.
class Patience {
 public:
  bool left() const { return std::chrono::steady_clock::now() < end_; }

 private:
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(20);
};

// Calls from four threads on one plan, until some have met: each either says busy or gives the bits of a call alone.
TEST_P(CApi, OverlapIsBusy) {
  for (const int threads : {1, 2}) {  // with one, calls that meet do not disturb each other's threads and this test goes on
    Host host(GetParam(), 6);
    Session session(host, context(threads), quick());
    session.run();
    const auto expected = host.result();
    const Patience patience;
    std::atomic<int> ran{0}, busy{0}, other{0}, wrong{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&] {
        const Memory workspace(GetParam(), session.workspace.bytes()), out(GetParam(), host.out.bytes());
        scope_run_args args = host.args(workspace);
        args.out = host.tensor(out);
        for (int n = 0; n < 5 || (busy == 0 && patience.left()); ++n) {
          const scope_status status = session.status(args);
          ++(status == SCOPE_OK ? ran : status == SCOPE_ERROR_BUSY ? busy : other);
          if (status == SCOPE_OK && host.values(out) != expected) ++wrong;
        }
      });
    }
    for (auto& caller : callers) caller.join();
    EXPECT_GE(ran, 1);
    EXPECT_GE(busy, 1);
    EXPECT_EQ(other, 0);
    EXPECT_EQ(wrong, 0);
    if (HasFailure()) return;
  }
}

// A state is asked about while a call uses it.
TEST_P(CApi, OverlapOnAStateIsBusy) {
  Host host(GetParam(), 7);
  Session session(host, context(1), quick());
  Memory memory(GetParam(), session.plan.info().state_bytes, true);
  scope_attn::State state(session.plan, memory.data());
  session.args.state = state.handle();
  session.run();
  const auto saved = state.save();
  session.run();
  const auto expected = host.result();
  std::atomic<bool> running{false}, done{false};
  std::atomic<int> busy{0};
  std::thread asking([&] {
    while (!done) {
      int32_t filled = 0;
      if (running && scope_state_filled(state.handle(), &filled) == SCOPE_ERROR_BUSY && running) ++busy;
    }
  });
  const Patience patience;
  int ran = 0;
  while (ran < 3 || (busy == 0 && patience.left())) {
    const scope_status loaded = scope_state_load(state.handle(), nullptr, saved.data(), saved.size());
    if (loaded == SCOPE_ERROR_BUSY) continue;
    EXPECT_EQ(loaded, SCOPE_OK);
    running = true;
    const scope_status status = session.status(session.args);
    running = false;
    if (status == SCOPE_ERROR_BUSY) continue;
    EXPECT_EQ(status, SCOPE_OK) << scope_last_error();
    EXPECT_EQ(host.result(), expected);
    ++ran;
  }
  done = true;
  asking.join();
  EXPECT_GE(busy, 1);
}

// Plans are made with one context and one method, and read, while a call runs on that context.
TEST_P(CApi, PlansAreMadeAndReadWhileACallRuns) {
  Host host(GetParam(), 9);
  const scope_attn::Context shared = context();
  const scope_attn::Method method = quick();
  Session session(host, shared, method);
  session.run();
  const auto expected = host.result();
  const int64_t bytes = session.plan.info().workspace_bytes;
  std::atomic<bool> done{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> makers;
  for (int i = 0; i < 3; ++i) {
    makers.emplace_back([&] {
      do {
        const scope_shape shape = host.shape();
        scope_plan* plan = nullptr;
        scope_plan_info made{}, used{};
        made.struct_size = used.struct_size = sizeof made;
        int32_t reason = -1;
        const bool good = scope_plan_create(shared.handle(), method.handle(), &shape, &plan) == SCOPE_OK &&
                          scope_plan_get_info(plan, &made) == SCOPE_OK && made.workspace_bytes == bytes &&
                          scope_plan_get_info(session.plan.handle(), &used) == SCOPE_OK && used.workspace_bytes == bytes &&
                          scope_plan_reason(session.plan.handle(), -1, -1, -1, &reason, nullptr) == SCOPE_OK &&
                          reason == SCOPE_RAN_SPARSE;
        if (!good) ++wrong;
        scope_plan_destroy(plan);
      } while (!done);
    });
  }
  for (int n = 0; n < 20; ++n) {
    session.run();
    EXPECT_EQ(host.result(), expected);
  }
  done = true;
  for (auto& maker : makers) maker.join();
  EXPECT_EQ(wrong, 0);
}

// A child has none of its parent's threads: it is told so, can let go of what it inherited, and can begin anew.
TEST_P(CApi, ForkedChildIsRefused) {
  Host host(GetParam(), 8);
  auto on = std::make_unique<scope_attn::Context>(context(2));
  auto session = std::make_unique<Session>(host, *on, quick());
  const Memory memory(GetParam(), session->plan.info().state_bytes, true);
  auto state = std::make_unique<scope_attn::State>(session->plan, memory.data());
  session->run();
  const auto expected = host.result();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // ends a child that waits for its parent's threads
    const auto refused = [](scope_status status) { return status == SCOPE_ERROR_UNSUPPORTED && error_names("fork"); };
    int32_t filled = 0;
    scope_plan* plan = nullptr;
    scope_plan_info info{};
    info.struct_size = sizeof info;
    const scope_shape shape = host.shape();
    const scope_attn::Method method;
    bool good = refused(session->status(session->args)) &&
                refused(scope_read_stats(session->plan.handle(), &session->args)) &&
                refused(scope_run_selection(session->plan.handle(), &session->args)) &&
                refused(scope_plan_get_info(session->plan.handle(), &info)) &&
                refused(scope_plan_reason(session->plan.handle(), 0, 0, 1, nullptr, nullptr)) &&
                refused(scope_plan_create(on->handle(), method.handle(), &shape, &plan)) &&
                refused(scope_state_filled(state->handle(), &filled)) && refused(scope_state_reset(state->handle())) &&
                refused(scope_state_save(state->handle(), nullptr, nullptr, 0, nullptr));
    scope_run_args args = session->args;
    if (GetParam()->can.host) {  // a device's runtime cannot be used here at all
      const scope_attn::Context own(options_for(GetParam(), 1));
      scope_attn::Plan again(own, quick(), host.shape());
      host.clear();
      again.run(args);
      good = good && host.result() == expected;
    }
    scope_state_destroy(state.release()->handle());
    on.reset();
    scope_plan_destroy(session.release()->plan.handle());
    _exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  session->run();
  EXPECT_EQ(host.result(), expected);
}

TEST(CApiErrors, EveryStatusHasItsName) {
  const std::pair<scope_status, const char*> names[] = {{SCOPE_OK, "ok"},
                                                        {SCOPE_ERROR_INVALID_ARGUMENT, "invalid argument"},
                                                        {SCOPE_ERROR_SHAPE, "shape"},
                                                        {SCOPE_ERROR_DTYPE, "dtype"},
                                                        {SCOPE_ERROR_ALIGNMENT, "alignment"},
                                                        {SCOPE_ERROR_UNSUPPORTED, "unsupported"},
                                                        {SCOPE_ERROR_SIZE_LIMIT, "size limit"},
                                                        {SCOPE_ERROR_WORKSPACE, "workspace"},
                                                        {SCOPE_ERROR_OUT_OF_MEMORY, "out of memory"},
                                                        {SCOPE_ERROR_NON_FINITE, "non-finite"},
                                                        {SCOPE_ERROR_IO, "I/O"},
                                                        {SCOPE_ERROR_FORMAT, "format"},
                                                        {SCOPE_ERROR_BUSY, "busy"},
                                                        {SCOPE_ERROR_DEVICE, "device"},
                                                        {SCOPE_ERROR_DEVICE_LOST, "device lost"},
                                                        {SCOPE_ERROR_INTERNAL, "internal"}};
  for (const auto& [status, name] : names) EXPECT_STREQ(scope_status_name(status), name);
}

TEST(CApiErrors, LastOneStaysUntilTheNextAndIsTheThreadsOwn) {
  scope_method* method = nullptr;
  EXPECT_NE(scope_method_create("first", &method), SCOPE_OK);
  const char* text = scope_last_error();
  const scope_attn::Method fine;
  EXPECT_NE(std::strstr(text, "first"), nullptr);
  std::thread([] { EXPECT_STREQ(scope_last_error(), ""); }).join();
}

// ---- states, schedules, reports ----

TEST_P(CApi, StatesRememberSaveAndLoad) {
  Host host(GetParam(), 9);
  std::unique_ptr<Memory> memory, second_memory;
  std::unique_ptr<scope_attn::State> state, second;
  std::vector<char> saved;
  std::vector<float> warm;
  {
    Session session(host, context(), quick());
    const int64_t bytes = session.plan.info().state_bytes;
    memory = std::make_unique<Memory>(GetParam(), bytes, true);
    second_memory = std::make_unique<Memory>(GetParam(), bytes, true);
    state = std::make_unique<scope_attn::State>(session.plan, memory->data());
    second = std::make_unique<scope_attn::State>(session.plan, second_memory->data());
    EXPECT_FALSE(state->filled());
    session.args.state = state->handle();
    session.run();
    EXPECT_TRUE(state->filled());
    saved = state->save();
    session.run();
    EXPECT_EQ(session.stats.warm, 1);
    warm = host.result();
    host.clear();
    second->load(saved);
    EXPECT_TRUE(second->filled());
    session.args.state = second->handle();
    session.run();
    EXPECT_EQ(session.stats.warm, 1);
    EXPECT_EQ(host.result(), warm);
    state->reset();
    EXPECT_FALSE(state->filled());
    second->load(state->save());
    EXPECT_FALSE(second->filled());
    second->load(saved);
    session.args.state = state->handle();
    session.run();
    EXPECT_EQ(session.stats.warm, 0);

    // Refused, and nothing changes.
    scope_state* none = nullptr;
    void* odd = static_cast<std::byte*>(memory->data()) + 8;
    EXPECT_EQ(scope_state_create(session.plan.handle(), odd, &none), SCOPE_ERROR_ALIGNMENT);
    EXPECT_EQ(scope_state_create(session.plan.handle(), nullptr, &none), SCOPE_ERROR_INVALID_ARGUMENT);
    Session dense(host, context(), scope_attn::Method("dense"));
    EXPECT_EQ(scope_state_create(dense.plan.handle(), memory->data(), &none), SCOPE_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(none, nullptr);
    size_t needed = 0;
    std::vector<char> small(saved.size() - 1, 'x');
    EXPECT_EQ(scope_state_save(state->handle(), nullptr, small.data(), small.size(), &needed), SCOPE_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(needed, saved.size());
    EXPECT_EQ(small[0], 'x');
    EXPECT_NE(scope_state_load(second->handle(), nullptr, saved.data(), saved.size() - 1), SCOPE_OK);
    std::vector<char> other = saved;
    other[0] = static_cast<char>(other[0] ^ 1);
    EXPECT_NE(scope_state_load(second->handle(), nullptr, other.data(), other.size()), SCOPE_OK);
    EXPECT_TRUE(second->filled());
    Session fewer(host, context(), quick().set("groups", "3"));
    fewer.args.state = second->handle();
    EXPECT_NE(fewer.status(fewer.args), SCOPE_OK);
    EXPECT_TRUE(error_names("state"));
  }
  // Plan and context are gone, the states are not.
  const Session session(host, context(), quick());
  scope_run_args args = session.args;
  second->load(saved);
  args.state = second->handle();
  host.clear();
  EXPECT_EQ(session.status(args), SCOPE_OK);
  EXPECT_EQ(host.result(), warm);
}

TEST_P(CApi, SaysBeforehandWhatACallDoes) {
  Host host(GetParam(), 10);
  const auto expect = [&](const char* warm_prefix, int64_t layer, int64_t step, int64_t steps, scope_reason reason,
                          bool clusters) {
    Session session(host, context(1),
                    quick().set("dense_steps", "0.2").set("dense_last_steps", "0.1").set("warm_prefix", warm_prefix));
    const scope_attn::Reason said = session.plan.reason(layer, step, steps);
    EXPECT_EQ(said.reason, reason);
    EXPECT_EQ(said.clusters, clusters);
    const Memory memory(GetParam(), session.plan.info().state_bytes, true);
    const scope_attn::State state(session.plan, memory.data());
    session.args.state = state.handle();
    session.args.layer = layer, session.args.step = step, session.args.steps = steps;
    session.run();
    EXPECT_EQ(session.stats.reason, reason);
    EXPECT_EQ(state.filled(), clusters || reason == SCOPE_RAN_SPARSE);
  };
  expect("no", -1, -1, 0, SCOPE_RAN_SPARSE, false);
  expect("no", 0, 5, 10, SCOPE_RAN_DENSE_LAYER, false);
  expect("no", 1, 1, 10, SCOPE_RAN_DENSE_STEP, false);
  expect("yes", 1, 1, 10, SCOPE_RAN_DENSE_STEP, true);
  expect("yes", 0, 1, 10, SCOPE_RAN_DENSE_LAYER, false);
  expect("yes", 1, 9, 10, SCOPE_RAN_DENSE_LAST_STEP, false);
  expect("yes", 1, 5, 10, SCOPE_RAN_SPARSE, false);
  const Session session(host, context(1), quick());
  EXPECT_EQ(scope_plan_reason(session.plan.handle(), 1, 10, 10, nullptr, nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(error_names("step"));
}

TEST_P(CApi, MeetsTheDensityOfItsStep) {
  Host host(GetParam(), 10);
  Session session(host, context(1), quick().set("dense_steps", "0").set("density_steps", "0.2:1,0.5:0.6,1:0.3"));
  session.args.layer = 1, session.args.steps = 10;
  for (const auto& [step, density] : {std::pair(1, 1.0), {4, 0.6}, {5, 0.3}, {9, 0.3}}) {
    session.args.step = step;
    session.run();
    EXPECT_EQ(session.stats.reason, density == 1 ? SCOPE_RAN_DENSE_STEP : SCOPE_RAN_SPARSE);
    EXPECT_EQ(session.plan.reason(1, step, 10).reason, session.stats.reason);
    EXPECT_NEAR(session.stats.density, density, 0.05) << step;
  }
}

// The reports of several calls are read at the end, and say what each call's own statistics say.
TEST_P(CApi, ReportsWaitForTheEnd) {
  Host host(GetParam(), 11);
  const scope_attn::Context on = context();
  constexpr int kCalls = 3;
  std::vector<std::unique_ptr<Memory>> reports;
  std::vector<scope_call_stats> stats(kCalls, scope_attn::make_stats()), own;
  std::vector<std::vector<scope_head_stats>> heads;
  Session session(host, on, quick().set("rule", "hybrid"));
  for (int i = 0; i < kCalls; ++i) {
    const int64_t lengths[] = {Host::kTokens - 20 * i, Host::kTokens - 30};
    session.args.q_lengths = session.args.k_lengths = lengths;
    session.args.report = nullptr;
    session.run();
    own.push_back(session.stats);
    heads.push_back(session.heads);
    reports.push_back(std::make_unique<Memory>(GetParam(), session.plan.info().report_bytes, true));
    scope_run_args args = session.args;
    args.report = reports.back()->data();
    args.stats = &stats[static_cast<size_t>(i)];
    session.plan.run(args);
  }
  auto found = scope_attn::make_head_stats(Host::kBatch, Host::kHeads);
  for (size_t i = 0; i < kCalls; ++i) {
    session.plan.read_report(reports[i]->values<std::byte>().data(), &stats[i], found.data());
    EXPECT_EQ(stats[i].density, own[i].density);
    EXPECT_EQ(stats[i].total_density, own[i].total_density);
    EXPECT_EQ(stats[i].reason, own[i].reason);
    EXPECT_EQ(stats[i].iterations, 3);
    EXPECT_EQ(own[i].iterations, 3);
    EXPECT_STREQ(stats[i].arithmetic, own[i].arithmetic);
    EXPECT_EQ(std::memcmp(found.data(), heads[i].data(), found.size() * sizeof found[0]), 0);
  }
  EXPECT_NE(std::memcmp(heads[0].data(), heads[2].data(), found.size() * sizeof found[0]), 0);
  for (const scope_head_stats& head : found) EXPECT_LT(head.min_count, head.max_count);
  EXPECT_EQ(scope_report_read(session.plan.handle(), nullptr, nullptr, nullptr), SCOPE_ERROR_INVALID_ARGUMENT);
}

// The exact proxy scores nothing beforehand: in f32 there is no time between the marks of score and select.
TEST(CApiStats, SecondsAreThoseOfTheirStages) {
  Host host(&scope::find_backend("cpu"), 12);
  Session session(host, scope_attn::Context(options_for(host.backend)), quick("scope-exact"));
  session.run();
  const scope_call_stats& s = session.stats;
  EXPECT_LT(s.score_seconds, s.select_seconds);
  EXPECT_GT(s.group_seconds, s.encode_seconds);
  EXPECT_GT(s.attend_seconds, s.encode_seconds);
  EXPECT_GE(s.total_seconds, s.group_seconds + s.select_seconds + s.attend_seconds);
}

// The arguments that say the same thing twice give the same bits.
TEST_P(CApi, ScaleAndValidBitsReachTheCall) {
  Host host(GetParam(), 12);
  const scope_attn::Context on = context();
  for (const char* name : {"scope", "dense"}) {
    Session session(host, on, name == std::string("dense") ? scope_attn::Method(name) : quick(name));
    const auto result = [&] {
      host.clear();
      session.run();
      return host.result();
    };
    const auto whole = result();
    session.args.scale = 1.0f / std::sqrt(static_cast<float>(Host::kDim));
    EXPECT_EQ(result(), whole);
    session.args.scale = 0.5f;
    EXPECT_NE(result(), whole);
    session.args.scale = 0;
    const int64_t lengths[] = {200, Host::kTokens};
    std::vector<uint32_t> valid(2 * static_cast<size_t>((Host::kTokens + 31) / 32));
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t j = 0; j < lengths[b]; ++j) {
        valid[static_cast<size_t>(b * ((Host::kTokens + 31) / 32) + j / 32)] |= 1u << (j % 32);
      }
    }
    session.args.q_lengths = session.args.k_lengths = lengths;
    const auto cut = result();
    EXPECT_NE(cut, whole);
    session.args.q_lengths = session.args.k_lengths = nullptr;
    session.args.valid_queries = session.args.valid_keys = valid.data();
    EXPECT_EQ(result(), cut);
    valid[2] &= ~0xffu;  // a hole in the middle
    const auto holed = result();
    EXPECT_NE(holed, cut);
    for (int64_t i = 64; i < 72; ++i) {
      for (int64_t c = 0; c < Host::kHeads * Host::kDim; ++c) {
        ASSERT_EQ(holed[static_cast<size_t>(i * Host::kHeads * Host::kDim + c)], 0.0f);
      }
    }
  }
}

}  // namespace
