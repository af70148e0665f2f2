// Every host allocation and every thread start fails once, in turn, in whole sequences of the C ABI and in the readers and
// writers of files: the status says so, nothing leaks, and the same call made again gives the right bits.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <random>
#include <scope/scope.hpp>
#include <thread>

#include "io/npy.h"
#include "io/png.h"
#include "io/safetensors.h"
#include "io/temporary.h"
#include "methods/profile.h"
#include "temporary_folder.h"

namespace {

// Which of the events that happen while `on` fails: the `left`-th from now, and with `rest` every later one.
struct Faults {
  std::atomic<int64_t> left{0};
  std::atomic<bool> on{false}, rest{false}, fired{false};

  void arm(int64_t nth, bool and_the_rest) {
    left = nth;
    rest = and_the_rest;
    fired = false;
  }
  bool next_fails() {
    if (!on) return false;
    const int64_t now = --left;
    if (now > 0 || (now < 0 && !rest)) return false;
    fired = true;
    return true;
  }
};
constinit Faults allocations, thread_starts;
[[maybe_unused]] constinit std::atomic<int64_t> live_blocks{0};

}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SCOPE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SCOPE_SANITIZED 1
#endif
#endif

#pragma GCC visibility push(default)  // shared libraries are to find these
#ifdef SCOPE_SANITIZED
// A sanitizer has malloc for itself, and finds the leaks: only the operators fail.
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  return allocations.next_fails() ? nullptr : std::malloc(bytes);
}
void* operator new(size_t bytes) {
  if (void* made = operator new(bytes, std::nothrow)) return made;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t /*bytes*/) noexcept { std::free(block); }
extern "C" int __interceptor_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)
    __attribute__((weak));
#else
// The C library's own functions, for all who allocate in this process: libstdc++, libpng, zlib and the C library itself.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* block);
}

namespace {

template <class Allocate>
void* counted(Allocate allocate) {
  void* made = allocations.next_fails() ? nullptr : allocate();
  if (made == nullptr) {
    errno = ENOMEM;
  } else {
    ++live_blocks;
  }
  return made;
}

}  // namespace

extern "C" {
void* malloc(size_t bytes) noexcept {
  return counted([&] { return __libc_malloc(bytes); });
}
void* calloc(size_t count, size_t bytes) noexcept {
  return counted([&] { return __libc_calloc(count, bytes); });
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  return counted([&] { return __libc_memalign(alignment, bytes); });
}
void* memalign(size_t alignment, size_t bytes) noexcept { return aligned_alloc(alignment, bytes); }
int posix_memalign(void** block, size_t alignment, size_t bytes) noexcept {
  void* made = aligned_alloc(alignment, bytes);
  if (made == nullptr) return ENOMEM;
  *block = made;
  return 0;
}
void* realloc(void* block, size_t bytes) noexcept {
  if (block == nullptr) return malloc(bytes);
  return allocations.next_fails() ? nullptr : __libc_realloc(block, bytes);
}
void free(void* block) noexcept {
  if (block != nullptr) --live_blocks;
  __libc_free(block);
}
}
#endif

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = [] {
#if defined(SCOPE_SANITIZED)
    if (__interceptor_pthread_create != nullptr) return Create{__interceptor_pthread_create};
#endif
    return reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  }();
  return thread_starts.next_fails() ? EAGAIN : create(thread, attributes, start, argument);
}
#pragma GCC visibility pop

namespace {

namespace fs = std::filesystem;

// Status of C++ code, as the C ABI tells it.
template <class Body>
scope_status status_of(Body body) {
  try {
    body();
    return SCOPE_OK;
  } catch (const scope::Error& error) {
    return static_cast<scope_status>(error.status());
  } catch (const std::bad_alloc&) {
    return SCOPE_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception&) {
    return SCOPE_ERROR_INTERNAL;
  }
}

// A sequence of calls in which one event fails, and what came out of it.
class Sequence {
 public:
  explicit Sequence(Faults& faults) : faults_(faults) {}

  // A call that says SCOPE_ERROR_OUT_OF_MEMORY where the fault reaches it, changes nothing then, and succeeds when made
  // again. `untouched` runs between the two.
  template <class Call, class Untouched>
  void step(const char* name, Call call, Untouched untouched) {
    faults_.on = true;
    const scope_status status = call();
    faults_.on = false;
    if (status == SCOPE_OK) return;
    faults_.arm(0, false);  // once it was told, memory is there again
    faults_.fired = true;
    EXPECT_EQ(status, SCOPE_ERROR_OUT_OF_MEMORY) << name << ": " << scope_last_error();
    untouched();
    EXPECT_EQ(call(), SCOPE_OK) << name << ", made again: " << scope_last_error();
  }
  template <class Call>
  void step(const char* name, Call call) {
    step(name, call, [] {});
  }
  // What has no status to tell with, and must not fail.
  template <class Call>
  void quiet(Call call) {
    faults_.on = true;
    call();
    faults_.on = false;
  }
  template <class T>
  void record(const T* values, size_t count) {
    const auto* bytes = reinterpret_cast<const char*>(values);
    results_.append(bytes, bytes + count * sizeof(T));
  }
  const std::string& results() const { return results_; }

 private:
  Faults& faults_;
  std::string results_;
};

// Fails event 1, 2, 3, ... of a sequence, each alone and with all that follow it until a call has told of it, and compares
// what comes out. The first round begins where nothing was ever called: tables that are made at their first use are not
// there.
template <class Run>
void fail_each(Faults& faults, const char* name, int64_t least, Run run) {
  const int64_t stride = std::getenv("SCOPE_CASES") == nullptr ? 1 : 7;  // fewer in slow builds
  int64_t events = 0;
  std::string expected;
  const auto fires = [&](int64_t nth, bool rest) {
    SCOPED_TRACE(fmt::format("{}: event {}{}", name, nth, rest ? " and the rest" : ""));
    faults.arm(nth, rest);
    Sequence sequence(faults);
    std::thread([&] { run(sequence); }).join();  // a thread that has met no error yet
    EXPECT_TRUE(expected.empty() || sequence.results() == expected);
    return faults.fired.load();
  };
  for (int64_t nth = 1; fires(nth, false); nth += stride) ++events;
  {
    faults.arm(0, false);
    Sequence sequence(faults);
    run(sequence);
    expected = sequence.results();
  }
  for (const bool rest : {false, true}) {
    int64_t nth = 1;
    const int64_t before = live_blocks;
    for (; fires(nth, rest) && !testing::Test::HasFailure(); nth += stride, ++events) {
      EXPECT_EQ(live_blocks, before) << name << " leaks when event " << nth << " fails";
    }
    EXPECT_GT(nth, least);
  }
  std::printf("%s: %ld events failed\n", name, static_cast<long>(events));
}

struct Case {
  const char* method;
  std::map<std::string, std::string> settings;
};

// Everything that a host does with the library, on small tensors.
void whole_sequence(Sequence& sequence, const Case& of, int threads) {
  constexpr int64_t kHeads = 2, kTokens = 70, kDim = 16, kElements = kHeads * kTokens * kDim;
  static const std::vector<float> values = [] {
    std::vector<float> drawn(static_cast<size_t>(3 * kElements));
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& value : drawn) value = normal(random);
    return drawn;
  }();

  scope_context_options options{};
  options.struct_size = sizeof options;
  options.threads = threads;
  scope_context* context = nullptr;
  sequence.step(
      "context", [&] { return scope_context_create(&options, &context); }, [&] { EXPECT_EQ(context, nullptr); });
  scope_method* method = nullptr;
  sequence.step(
      "method", [&] { return scope_method_create(of.method, &method); }, [&] { EXPECT_EQ(method, nullptr); });
  const auto get = [&](const char* name) {
    char text[512] = "";
    EXPECT_EQ(scope_method_get(method, name, text, sizeof text, nullptr), SCOPE_OK);
    return std::string(text);
  };
  if (scope_setting_info info{}; true) {
    info.struct_size = sizeof info;
    sequence.step("a setting's row", [&] { return scope_setting_at(0, &info); });
  }
  sequence.quiet([] { scope_supports("cpu", SCOPE_F32, 64); });
  for (const auto& setting : of.settings) {
    const std::string &name = setting.first, &value = setting.second;
    const std::string before = get(name.c_str());
    sequence.step(
        "a setting", [&] { return scope_method_set(method, name.c_str(), value.c_str()); },
        [&] { EXPECT_EQ(get(name.c_str()), before) << name; });
    char text[512];
    sequence.step("a setting's text", [&] { return scope_method_get(method, name.c_str(), text, sizeof text, nullptr); });
    sequence.record(text, std::strlen(text));
  }
  if (scope_method* known = nullptr; true) {
    sequence.step("a second method", [&] { return scope_method_create(of.method, &known); });
    sequence.step("a model", [&] { return scope_method_apply_model(known, "wan2.1-t2v-14b"); });
    sequence.quiet([&] { scope_method_destroy(known); });
  }
  scope_model_query query{};
  query.struct_size = sizeof query;
  query.layers = query.heads = 40;
  scope_model_answer answer{};
  answer.struct_size = sizeof answer;
  answer.index = -2;
  sequence.step(
      "which model fits", [&] { return scope_model_fit(&query, &answer); }, [&] { EXPECT_EQ(answer.index, -2); });
  sequence.record(answer.why, std::strlen(answer.why));

  scope_shape shape = scope_attn::make_shape();
  shape.heads = kHeads;
  shape.q_tokens = shape.k_tokens = kTokens;
  shape.dim = kDim;
  shape.dtype = SCOPE_F32;
  shape.rope[0] = 8, shape.rope[1] = shape.rope[2] = 4;
  scope_plan* plan = nullptr;
  sequence.step(
      "plan", [&] { return scope_plan_create(context, method, &shape, &plan); }, [&] { EXPECT_EQ(plan, nullptr); });
  scope_plan_info info{};
  info.struct_size = sizeof info;
  sequence.step("a plan's row", [&] { return scope_plan_get_info(plan, &info); });
  int32_t reason = 0, filled = 0;
  sequence.step("reason", [&] { return scope_plan_reason(plan, 3, 20, 50, &reason, nullptr); });

  std::vector<float> out(static_cast<size_t>(kElements)), lse(static_cast<size_t>(kHeads * kTokens));
  std::vector<char> workspace(static_cast<size_t>(info.workspace_bytes)), memory(static_cast<size_t>(info.state_bytes) + 16),
      report(static_cast<size_t>(info.report_bytes) + 16);
  scope_run_args args = scope_attn::make_args();
  const auto tensor = [&](const float* data) { return scope_attn::head_major(data, kHeads, kTokens, kDim); };
  args.q = tensor(values.data());
  args.k = tensor(values.data() + kElements);
  args.v = tensor(values.data() + 2 * kElements);
  args.out = tensor(out.data());
  args.lse = lse.data();
  args.workspace = workspace.data();
  args.workspace_bytes = info.workspace_bytes;
  args.report = report.data();
  scope_call_stats stats = scope_attn::make_stats();
  std::vector<scope_head_stats> heads = scope_attn::make_head_stats(1, kHeads);
  args.stats = &stats;
  args.head_stats = heads.data();
  const auto record = [&] {
    sequence.record(out.data(), out.size());
    sequence.record(lse.data(), lse.size());
    sequence.record(&stats.density, 1);
    sequence.record(&heads[1].density, 1);
  };
  const auto run = [&](const char* name) {
    sequence.step(name, [&] { return scope_run(plan, &args); });
    record();
  };

  scope_state* state = nullptr;
  if (info.state_bytes > 0) {
    sequence.step(
        "state", [&] { return scope_state_create(plan, memory.data(), &state); }, [&] { EXPECT_EQ(state, nullptr); });
    args.state = state;
  }
  std::vector<int32_t> labels(static_cast<size_t>(kHeads * kTokens));
  std::vector<uint32_t> mask(static_cast<size_t>(kHeads * info.selection_groups * info.mask_words));
  scope_selection selection{};
  selection.struct_size = sizeof selection;
  selection.labels = labels.data();
  selection.mask = mask.data();
  if (info.groups > 0) args.selection = &selection;
  run("first call");
  sequence.step("statistics", [&] { return scope_read_stats(plan, &args); });
  sequence.step("report", [&] { return scope_report_read(plan, report.data(), &stats, heads.data()); });
  record();
  if (state != nullptr) {
    std::vector<char> saved(static_cast<size_t>(info.state_bytes));
    size_t needed = 0;
    sequence.step("saving", [&] { return scope_state_save(state, nullptr, saved.data(), saved.size(), &needed); });
    sequence.record(saved.data(), needed);
    run("warm call");
    sequence.step("loading", [&] { return scope_state_load(state, nullptr, saved.data(), needed); });
    run("call after loading");
    sequence.step("asking a state", [&] { return scope_state_filled(state, &filled); });
    sequence.step("resetting", [&] { return scope_state_reset(state); });
    run("cold call");
  }
  if (info.groups > 0) {
    sequence.record(mask.data(), mask.size());
    sequence.step("attending to a selection", [&] { return scope_run_selection(plan, &args); });
    sequence.record(out.data(), out.size());
  }
  sequence.quiet([&] {
    scope_context_destroy(context);
    scope_method_destroy(method);
    scope_plan_destroy(plan);
    scope_state_destroy(state);
  });
}

class Faulty : public scope::test::TemporaryFolder {
 protected:
  Faulty() : TemporaryFolder(scope::test::memory_place()) {}
  void SetUp() override {
    TemporaryFolder::SetUp();
    std::ofstream(path("profile.csv")) << "step,layer,head,density\n0,0,0,0.25\n0,0,1,0.75\n";
  }
  std::vector<Case> cases() const {
    return {{"scope",
             {{"partition", "random:3"}, {"target_density", "0.3"}, {"first_iterations", "3"}, {"state_dtype", "bf16"}}},
            {"scope", {{"density_steps", "0.5:1,1:0.3"}, {"first_iterations", "3"}, {"reuse_interval", "2"}}},
            {"scope-mean", {{"rho", "0.8"}, {"first_iterations", "3"}}},
            {"svg2-ear", {{"groups", "4"}}},
            {"svoo", {{"profile", path("profile.csv")}}},
            {"sparge", {{"density", "0.4"}}},
            {"sol", {}},
            {"dense", {}}};
  }
};

TEST_F(Faulty, EveryAllocationOfTheCAbi) {
  for (const Case& each : cases()) {
    const int threads = std::strcmp(each.method, "dense") == 0 ? 3 : 1;  // starting them is the same for every method
    fail_each(allocations, each.method, 20, [&](Sequence& sequence) { whole_sequence(sequence, each, threads); });
    if (HasFailure()) return;
  }
}

TEST_F(Faulty, EveryThreadStart) {
  fail_each(thread_starts, "threads", 5, [&](Sequence& sequence) { whole_sequence(sequence, {"dense", {}}, 7); });
}

// Readers and writers: what was there stays, and no temporary is left.
TEST_F(Faulty, EveryAllocationOfReadersAndWriters) {
  namespace io = scope::io;
  const io::Array array{io::ElementType::f32, {2, 3}, std::vector<std::byte>(24)};
  const io::SafeTensors tensors{{{"a", array}, {"b", {io::ElementType::u8, {5}, std::vector<std::byte>(5)}}},
                                {{"made by", "a test"}}};
  io::Image image = io::make_image(40, 30, 128);
  image.rgb[77] = 3;
  const auto names = [&] {
    std::string found;
    std::vector<std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) all.push_back(fs::relative(entry.path(), folder_));
    std::sort(all.begin(), all.end());
    for (const std::string& each : all) found += each + " ";
    return found;
  };
  const auto text = [&](const std::string& name) {
    std::ifstream file(path(name));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  fs::create_directory(path("run"));
  const auto writes = [&](Sequence& sequence, const std::string& name, const auto& write) {
    const std::string before = "before", file = path(name);
    std::ofstream(file) << before;
    const std::string there = names();
    sequence.step(
        name.c_str(), [&] { return status_of([&] { write(file); }); },
        [&] {
          EXPECT_EQ(text(name), before) << name;
          EXPECT_EQ(names(), there) << name;
        });
    EXPECT_EQ(names(), there) << name;
    const std::string now = text(name);
    sequence.record(now.data(), now.size());
  };
  const auto reads = [&](Sequence& sequence, const char* name, const auto& read) {
    sequence.step(name, [&] { return status_of([&] { EXPECT_TRUE(read()) << name; }); });
  };
  fail_each(allocations, "files", 100, [&](Sequence& sequence) {
    writes(sequence, "a.npy", [&](const std::string& file) { io::write_npy(file, array); });
    reads(sequence, "read_npy", [&] { return io::read_npy(path("a.npy")) == array; });
    writes(sequence, "a.safetensors", [&](const std::string& file) { io::write_safetensors(file, tensors); });
    reads(sequence, "read_safetensors", [&] { return io::read_safetensors(path("a.safetensors")) == tensors; });
    reads(sequence, "shapes", [&] { return io::read_safetensors_shapes(path("a.safetensors")).size() == 2; });
    writes(sequence, "a.png", [&](const std::string& file) { io::write_png(file, image); });
    reads(sequence, "read_png", [&] { return io::read_png(path("a.png")) == image; });
    reads(sequence, "read_profile", [&] { return scope::read_profile(path("profile.csv")).densities.size() == 2; });
    reads(sequence, "a folder", [&] {
      io::Temporary run(path("run"), io::Temporary::Kind::folder);
      io::write_npy(run.name() + "/a.npy", array);
      run.place();
      return true;
    });
    // The folder that was replaced may stay under its temporary name: listing it takes memory. The new one is there.
    std::vector<fs::path> stayed;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() == ".tmp") stayed.push_back(entry.path());
    }
    for (const fs::path& each : stayed) fs::remove_all(each);
    EXPECT_EQ(names(), "a.npy a.png a.safetensors profile.csv run run/a.npy ");
  });
}

}  // namespace
