// 100,000 calls of the C ABI, with contexts, plans and states that come and go: neither memory nor descriptors grow.
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <scope/scope.hpp>

namespace {

struct Used {
  int64_t resident, allocated, descriptors;
};

Used used() {
  int64_t pages = 0, resident = 0, descriptors = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++descriptors;
  return {resident * sysconf(_SC_PAGESIZE), static_cast<int64_t>(mallinfo2().uordblks), descriptors};
}

constexpr int64_t kTokens = 24, kDim = 8;

// `count` calls on a context: 100 on each plan, of one method after the other, 10 on each filling of its state.
void calls(int64_t count) {
  static const char* const methods[] = {"scope", "scope-mean", "svg2", "sparge", "sol", "dense"};
  std::vector<float> values(4 * kTokens * kDim);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 37 % 101) / 50.0f - 1.0f;
  const auto tensor = [&](int64_t which) {
    return scope_attn::head_major(values.data() + which * kTokens * kDim, 1, kTokens, kDim);
  };
  for (int64_t done = 0; done < count;) {
    const scope_attn::Context context(1);
    for (const char* name : methods) {
      scope_shape shape = scope_attn::make_shape();
      shape.q_tokens = shape.k_tokens = kTokens;
      shape.dim = kDim;
      shape.rope[0] = 4, shape.rope[1] = shape.rope[2] = 2;
      scope_attn::Plan plan(context, scope_attn::Method(name), shape);
      const scope_plan_info info = plan.info();
      std::vector<char> workspace(static_cast<size_t>(info.workspace_bytes)), memory(static_cast<size_t>(info.state_bytes));
      std::unique_ptr<scope_attn::State> state;
      if (info.state_bytes > 0) state = std::make_unique<scope_attn::State>(plan, memory.data());
      scope_call_stats stats = scope_attn::make_stats();
      std::vector<scope_head_stats> heads = scope_attn::make_head_stats(1, 1);
      scope_run_args args = scope_attn::make_args();
      args.q = tensor(0), args.k = tensor(1), args.v = tensor(2), args.out = tensor(3);
      args.workspace = workspace.data();
      args.workspace_bytes = info.workspace_bytes;
      args.state = state ? state->handle() : nullptr;
      args.stats = &stats;
      args.head_stats = heads.data();
      for (int i = 0; i < 100; ++i, ++done) {
        if (state && i % 10 == 0) state->reset();
        plan.run(args);
      }
      args.reserved = 1;  // and a refused one
      EXPECT_EQ(scope_run(plan.handle(), &args), SCOPE_ERROR_INVALID_ARGUMENT);
    }
  }
}

TEST(Growth, OfAHundredThousandCallsIsNone) {
  const char* cases = std::getenv("SCOPE_CASES");
  const auto count = static_cast<int64_t>(100'000 * (cases == nullptr ? 1.0 : std::atof(cases)));
  calls(3'000);
  const Used before = used();
  calls(count);
  const Used after = used();
  std::printf("resident %ld -> %ld bytes, allocated %ld -> %ld, descriptors %ld -> %ld\n", before.resident, after.resident,
              before.allocated, after.allocated, before.descriptors, after.descriptors);
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_EQ(after.allocated, before.allocated);
  EXPECT_LT(after.resident, before.resident + (1 << 20));  // what malloc does not count
}

}  // namespace
