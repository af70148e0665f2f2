// Every row of every choice on the tested backend: it runs where the backend has it, and is refused by name where not.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "backends.h"
#include "core/numeric.h"
#include "methods/methods.h"
#include "pipeline/call.h"
#include "stages/backends.h"
#include "stages/choices.h"

namespace scope {
namespace {

constexpr int64_t kHeads = 2, kTokens = 48, kDim = 16;

template <class Row, class Holds>
auto first_where(std::span<const Row> rows, const Holds& holds) {
  return std::find_if(rows.begin(), rows.end(), holds)->choice;
}

// The other choices as the given ones need them, and everything small.
Settings valid(Settings settings) {
  settings.partition = "even:1";
  if (row(settings.tail).per_code && !row(settings.rule).whole_codes) {
    settings.rule = first_where(rule_rows(), [](const RuleRow& r) { return r.whole_codes && !r.similarity && !r.errors; });
  }
  if (const RuleRow& rule = row(settings.rule); rule.similarity || rule.diagonal) {
    settings.group = first_where(grouping_rows(), [](const GroupingRow& r) { return r.blocks; });
    settings.encode =
        first_where(encoding_rows(), [&](const EncodingRow& r) { return r.blocks && r.means == rule.diagonal; });
  }
  if (row(settings.group).with_keys || row(settings.encode).with_queries) {
    settings.group = first_where(grouping_rows(), [](const GroupingRow& r) { return r.with_keys; });
    settings.encode = first_where(encoding_rows(), [](const EncodingRow& r) { return r.with_queries; });
  }
  settings.groups = 4;
  settings.codes = 6;
  settings.q_block = settings.k_block = 8;
  settings.first_iterations = 2;
  return settings;
}

// "rule: BACKEND has no NAME", for each choice that the backend lacks.
std::vector<std::string> lacks(const Backend& backend, const Exec& exec, const Settings& settings) {
  std::vector<std::string> missing;
  const auto check = [&](const char* setting, bool has, const char* name) {
    if (!has) missing.push_back(fmt::format("{}: {} has no {}", setting, backend.name, name));
  };
  const Capabilities& can = backend.can;
  check("group", can.groupings.has(settings.group), row(settings.group).name);
  check("encode", can.encodings.has(settings.encode), row(settings.encode).name);
  check("proxy", can.proxies.has(settings.proxy), row(settings.proxy).name);
  check("rule", can.rules.has(settings.rule), row(settings.rule).name);
  check("target_scope", can.target_scopes.has(settings.target_scope), row(settings.target_scope).name);
  check("tail", can.tails.has(settings.tail), row(settings.tail).name);
  const bool bytes = settings.products == Products::bf16 || !can.host || exec.byte_kernels != nullptr;
  check("products", can.products.has(settings.products) && bytes, row(settings.products).name);
  return missing;
}

Shape tiny(const Backend& backend, Products products) {
  return {.heads = kHeads,
          .q_tokens = kTokens,
          .k_tokens = kTokens,
          .dim = kDim,
          .dtype = backend.can.dtypes.has(DType::f32) && products == Products::bf16 ? DType::f32 : DType::bf16,
          .rope = {},
          .subspaces = {}};
}

// A first call, with a state where the method keeps one; the output must be written, and finite.
void expect_runs(const Plan& plan) {
  using Memory = std::shared_ptr<void>;
  const Backend& backend = *plan.backend;
  const DeviceScope scope(plan);
  const bool f32 = plan.shape.dtype == DType::f32;
  const int64_t count = kHeads * kTokens * kDim, bytes = count * dtype_bytes(plan.shape.dtype);
  const auto allocate = [&](int64_t size) { return Memory(backend.allocate(plan.exec, size), backend.release); };
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto input = [&] {
    std::vector<float> x(static_cast<size_t>(count));
    std::vector<uint16_t> half;
    for (float& each : x) half.push_back(f32_to_bf16(each = normal(random)));
    Memory memory = allocate(bytes);
    backend.write(plan.exec, f32 ? static_cast<const void*>(x.data()) : half.data(), memory.get(), bytes);
    return memory;
  };
  const auto view = [&](auto* data) {
    using View = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(data)>>, TensorView, MutableTensorView>;
    return View{data, plan.shape.dtype, 1, kHeads, kTokens, kDim, count, kTokens * kDim, kDim};
  };
  const Memory q = input(), k = input(), v = input(), out = allocate(bytes), workspace = allocate(plan.workspace_bytes);
  const std::vector<std::byte> poison(static_cast<size_t>(bytes), std::byte{0xff});  // NaN in every type
  backend.write(plan.exec, poison.data(), out.get(), bytes);
  Memory state_memory;
  std::unique_ptr<State> state;
  if (plan.state_bytes > 0) {
    state_memory = allocate(plan.state_bytes);
    state = std::make_unique<State>(plan, state_memory.get());
  }
  CallStats stats;
  std::vector<HeadStats> heads(kHeads);
  CallArgs args;
  args.q = view(static_cast<const void*>(q.get()));
  args.k = view(static_cast<const void*>(k.get()));
  args.v = view(static_cast<const void*>(v.get()));
  args.out = view(out.get());
  args.state = state.get();
  args.workspace = workspace.get();
  args.workspace_bytes = plan.workspace_bytes;
  args.stats = &stats;
  if (backend.can.host) args.head_stats = heads.data();
  call(plan, args);
  if (!backend.can.host) {
    args.head_stats = heads.data();
    read_stats(plan, args);
  }
  EXPECT_TRUE(stats.density > 0 && stats.density <= 1) << stats.density;
  for (const HeadStats& head : heads) EXPECT_EQ(head.groups > 0, !plan.settings.dense);
  if (state != nullptr) {
    EXPECT_TRUE(state->filled());
  }
  std::vector<std::byte> result(static_cast<size_t>(bytes));
  backend.read(plan.exec, out.get(), result.data(), bytes);
  for (int64_t i = 0; i < count; ++i) {
    float x = 0;
    uint16_t half = 0;
    std::memcpy(f32 ? static_cast<void*>(&x) : &half, result.data() + i * dtype_bytes(plan.shape.dtype),
                static_cast<size_t>(dtype_bytes(plan.shape.dtype)));
    ASSERT_TRUE(std::isfinite(f32 ? x : bf16_to_f32(half))) << "element " << i;
  }
}

// Runs, or is refused by the name of what is missing.
void expect_runs_or_refused(const Context& context, const Settings& settings) {
  const Backend& backend = context.backend();
  const std::vector<std::string> missing =
      settings.dense ? std::vector<std::string>{} : lacks(backend, context.exec(), settings);
  std::unique_ptr<Plan> plan;
  try {
    plan = std::make_unique<Plan>(context, settings, tiny(backend, settings.products));
  } catch (const Error& error) {
    const std::string said = error.what();
    ASSERT_FALSE(missing.empty()) << said;
    EXPECT_EQ(error.status(), Status::unsupported) << said;
    EXPECT_TRUE(std::any_of(missing.begin(), missing.end(), [&](const std::string& each) {
      return said.find(each) != std::string::npos;
    })) << said;
    return;
  }
  ASSERT_TRUE(missing.empty()) << "a plan was made, and " << missing.front();
  expect_runs(*plan);
}

// Every row as settings that use it validly.
template <class Row, class Choice>
void add_rows(std::span<const Row> rows, Choice Settings::*choice, std::vector<Settings>& all) {
  for (const Row& each : rows) {
    Settings settings;
    settings.*choice = each.choice;
    all.push_back(valid(settings));
    EXPECT_EQ(all.back().*choice, each.choice) << each.name;
  }
}

std::vector<Settings> every_row() {
  std::vector<Settings> all;
  add_rows(grouping_rows(), &Settings::group, all);
  add_rows(encoding_rows(), &Settings::encode, all);
  add_rows(proxy_rows(), &Settings::proxy, all);
  add_rows(rule_rows(), &Settings::rule, all);
  add_rows(tail_rows(), &Settings::tail, all);
  add_rows(products_rows(), &Settings::products, all);
  for (const TargetScopeRow& scope : target_scope_rows()) {  // under every rule that a target is met by
    for (const RuleRow& rule : rule_rows()) {
      Settings settings;
      settings.rule = rule.choice;
      settings.target_density = 0.5;
      settings.target_scope = scope.choice;
      all.push_back(valid(settings));
    }
  }
  for (const Method& method : methods_table()) all.push_back(valid(method.settings()));
  return all;
}

TEST(Rows, RunOrAreRefusedByName) {
  const Backend& backend = test::backend();
  if (!backend.present()) GTEST_SKIP() << "[GPU tests skipped]";
  const Context context(ContextOptions{.backend = backend.name, .threads = 2});
  for (const Settings& settings : every_row()) {
    SCOPED_TRACE(fmt::format("{}: {}, group {}, encode {}, proxy {}, rule {}, target scope {}, tail {}, products {}",
                             backend.name, settings.method->name, row(settings.group).name, row(settings.encode).name,
                             row(settings.proxy).name, row(settings.rule).name, row(settings.target_scope).name,
                             row(settings.tail).name, row(settings.products).name));
    expect_runs_or_refused(context, settings);
  }
}

// What a backend says it can do is what its table has, with or without a device.
TEST(Rows, BackendsHaveTheStagesOfTheirRows) {
  for (const Backend* backend : backends()) {
    SCOPED_TRACE(backend->name);
    const Capabilities& can = backend->can;
    EXPECT_EQ(&find_backend(backend->name), backend);
    for (const GroupingRow& each : grouping_rows()) {
      if (each.with_keys && can.groupings.has(each.choice)) {
        EXPECT_NE(backend->cocluster, nullptr);
      }
    }
    for (const EncodingRow& each : encoding_rows()) {
      if (each.with_queries) {
        EXPECT_EQ(can.encodings.has(each.choice), backend->cocluster != nullptr) << each.name;
      }
    }
    for (const RuleRow& each : rule_rows()) {
      if (each.errors && can.rules.has(each.choice)) {
        EXPECT_NE(backend->compensate, nullptr) << each.name;
      }
    }
    for (const TailRow& each : tail_rows()) {
      if (each.per_code && can.tails.has(each.choice)) {
        EXPECT_NE(backend->compensate, nullptr) << each.name;
      }
      if (each.splits) {
        EXPECT_EQ(can.tails.has(each.choice), backend->split != nullptr) << each.name;
      }
    }
    EXPECT_EQ(can.target_scopes.has(TargetScope::sample), backend->solve != nullptr);
    // The defaults run everywhere.
    EXPECT_TRUE(lacks(*backend, {}, Settings{}).empty());
    EXPECT_EQ(kDim % can.dim_multiple, 0);
  }
  EXPECT_THROW(find_backend("abacus"), Error);
}

}  // namespace
}  // namespace scope
