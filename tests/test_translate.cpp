// Every field that crosses the C ABI arrives under its own name: numbers that no two fields share.
#include <gtest/gtest.h>

#include "call_support.h"
#include "capi/translate.h"

namespace scope::test {
namespace {

const auto at = [](uintptr_t address) { return reinterpret_cast<std::byte*>(address); };
template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(at(address));
}

TEST(Translate, StatisticsOfAHead) {
  const scope_head_stats to = capi::from_stats(HeadStats{.density = 1,
                                                         .total_density = 2,
                                                         .rho = 3,
                                                         .alpha = 4,
                                                         .head_budget = 5,
                                                         .queries = 6,
                                                         .keys = 7,
                                                         .groups = 8,
                                                         .codes = 9,
                                                         .empty_groups = 10,
                                                         .empty_codes = 11,
                                                         .min_count = 12,
                                                         .max_count = 13});
  EXPECT_EQ(to.density, 1);
  EXPECT_EQ(to.total_density, 2);
  EXPECT_EQ(to.rho, 3);
  EXPECT_EQ(to.alpha, 4);
  EXPECT_EQ(to.k_head, 5);
  EXPECT_EQ(to.queries, 6);
  EXPECT_EQ(to.keys, 7);
  EXPECT_EQ(to.groups, 8);
  EXPECT_EQ(to.codes, 9);
  EXPECT_EQ(to.empty_groups, 10);
  EXPECT_EQ(to.empty_codes, 11);
  EXPECT_EQ(to.min_count, 12);
  EXPECT_EQ(to.max_count, 13);
}

TEST(Translate, StatisticsOfACallThereAndBack) {
  scope_call_stats from{};
  from.reason = SCOPE_RAN_DENSE_STEP, from.warm = 1, from.iterations = 2, from.arithmetic = "f32";
  from.density = 3, from.total_density = 4, from.check_seconds = 5, from.group_seconds = 6, from.encode_seconds = 7;
  from.score_seconds = 8, from.select_seconds = 9, from.attend_seconds = 10, from.total_seconds = 11;
  const CallStats stats = capi::to_stats(from);
  EXPECT_EQ(stats.reason, Reason::dense_step);
  EXPECT_EQ(stats.density, 3);
  EXPECT_EQ(stats.total_density, 4);
  EXPECT_EQ(stats.check, 5);
  EXPECT_EQ(stats.group, 6);
  EXPECT_EQ(stats.encode, 7);
  EXPECT_EQ(stats.score, 8);
  EXPECT_EQ(stats.select, 9);
  EXPECT_EQ(stats.attend, 10);
  EXPECT_EQ(stats.total, 11);
  const scope_call_stats to = capi::from_stats(stats);
  EXPECT_EQ(std::memcmp(&to, &from, sizeof to), 0);
}

TEST(Translate, APlan) {
  const Context context(1);
  Inputs in(2, 3, 90, 130, 40, 5, DType::f16);
  const Plan plan(context, method("scope", {{"partition", "even:2"}, {"groups", "7"}, {"codes", "5"}}), in.shape());
  const scope_plan_info to = capi::from_plan(plan);
  EXPECT_EQ(to.workspace_bytes, plan.workspace_bytes);
  EXPECT_EQ(to.state_bytes, plan.state_bytes);
  EXPECT_EQ(to.report_bytes, plan.report_bytes);
  EXPECT_EQ(to.groups, 7);
  EXPECT_EQ(to.codes, plan.codes);
  EXPECT_EQ(to.subspaces, 2);
  EXPECT_EQ(to.selection_groups, 7);
  EXPECT_EQ(to.mask_words, 5);
  EXPECT_EQ(to.host_memory, 1);
  EXPECT_TRUE(plan.codes != 7 && plan.state_bytes != plan.report_bytes && plan.state_bytes != plan.workspace_bytes);

  scope_run_args from{};
  from.q = {at(16), 1, 2, 3}, from.k = {at(32), 4, 5, 6}, from.v = {at(48), 7, 8, 9}, from.out = {at(64), 10, 11, 12};
  from.lse = pointer<float>(80), from.scale = 13, from.q_lengths = pointer<int64_t>(96);
  from.k_lengths = pointer<int64_t>(112), from.valid_queries = pointer<uint32_t>(128);
  from.valid_keys = pointer<uint32_t>(144), from.keep = pointer<uint32_t>(160), from.dense_queries = pointer<uint32_t>(176);
  from.layer = 14, from.step = 15, from.steps = 16;
  from.workspace = at(192), from.workspace_bytes = 17, from.report = at(208), from.stream = at(224);
  const CallArgs args = capi::to_args(plan, from);
  const auto expect = [](const auto& view, uintptr_t address, int64_t tokens, int64_t stride) {
    EXPECT_EQ(static_cast<const void*>(view.data), at(address));
    EXPECT_EQ(std::tie(view.dtype, view.batch, view.heads, view.tokens, view.dim),
              std::make_tuple(DType::f16, int64_t{2}, int64_t{3}, tokens, int64_t{40}));
    EXPECT_EQ(std::tie(view.batch_stride, view.head_stride, view.token_stride),
              std::make_tuple(stride, stride + 1, stride + 2));
  };
  expect(args.q, 16, 90, 1);
  expect(args.k, 32, 130, 4);
  expect(args.v, 48, 130, 7);
  expect(args.out, 64, 90, 10);
  EXPECT_EQ(args.lse, from.lse);
  EXPECT_EQ(args.scale, 13);
  EXPECT_EQ(args.q_lengths, from.q_lengths);
  EXPECT_EQ(args.k_lengths, from.k_lengths);
  EXPECT_EQ(args.valid_queries, from.valid_queries);
  EXPECT_EQ(args.valid_keys, from.valid_keys);
  EXPECT_EQ(args.keep, from.keep);
  EXPECT_EQ(args.dense_queries, from.dense_queries);
  EXPECT_EQ(args.place.layer, 14);
  EXPECT_EQ(args.place.step, 15);
  EXPECT_EQ(args.place.steps, 16);
  EXPECT_EQ(args.workspace, from.workspace);
  EXPECT_EQ(args.workspace_bytes, 17);
  EXPECT_EQ(args.report, from.report);
  EXPECT_EQ(args.stream, from.stream);
}

TEST(Translate, ASelection) {
  scope_selection from{};
  from.labels = pointer<int32_t>(16), from.sizes = pointer<int32_t>(32), from.counts = pointer<int32_t>(48);
  from.mask = pointer<uint32_t>(64), from.keep = pointer<uint32_t>(80), from.centroids = pointer<float>(96);
  from.codebooks = pointer<float>(112), from.codes = pointer<int32_t>(128);
  const SelectionOut to = capi::to_selection(from);
  EXPECT_EQ(to.labels, from.labels);
  EXPECT_EQ(to.sizes, from.sizes);
  EXPECT_EQ(to.counts, from.counts);
  EXPECT_EQ(to.mask, from.mask);
  EXPECT_EQ(to.keep, from.keep);
  EXPECT_EQ(to.centroids, from.centroids);
  EXPECT_EQ(to.codebooks, from.codebooks);
  EXPECT_EQ(to.codes, from.codes);
}

TEST(Translate, AShape) {
  const int64_t sizes[] = {2, 3};
  const int32_t channels[] = {4, 0, 3, 2, 1};
  scope_shape from{};
  from.batch = 1, from.heads = 2, from.q_tokens = 3, from.k_tokens = 4, from.dim = 5, from.dtype = SCOPE_BF16;
  from.rope[0] = 1, from.rope[1] = 3, from.rope[2] = 1, from.dense_queries = 1;
  from.subspaces = 2, from.subspace_sizes = sizes, from.subspace_channels = channels;
  const Shape to = capi::to_shape(from);
  EXPECT_EQ(std::tie(to.batch, to.heads, to.q_tokens, to.k_tokens, to.dim, to.dtype),
            std::make_tuple(int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{5}, DType::bf16));
  EXPECT_EQ(to.rope, (std::vector<int64_t>{1, 3, 1}));
  EXPECT_EQ(to.subspaces, (Partition{{4, 0}, {3, 2, 1}}));
  EXPECT_TRUE(to.dense_queries);
}

TEST(Translate, AKnownModelAndTheQuestionForIt) {
  for (const Model& model : models_table()) {
    const scope_model_info to = capi::from_model(model);
    EXPECT_STREQ(to.name, model.name);
    EXPECT_STREQ(to.help, model.help);
    EXPECT_EQ(std::tie(to.layers, to.heads, to.dim, to.steps), std::tie(model.layers, model.heads, model.dim, model.steps));
    EXPECT_TRUE(std::equal(to.rope, to.rope + 3, model.rope) && std::equal(to.grid, to.grid + 3, model.grid));
    EXPECT_EQ(std::tie(to.rho, to.dense_steps), std::tie(model.rho, model.dense_steps));
    EXPECT_EQ(to.warm_prefix != 0, model.warm_prefix);
  }
  scope_model_query from{};
  from.family = "wan", from.layers = 1, from.heads = 2, from.dim = 3, from.rope[0] = 4, from.rope[1] = 5, from.rope[2] = 6;
  for (const int32_t flag : {0, 1}) {
    from.from_image = flag, from.nearest = 1 - flag, from.experts = 2 * flag;
    const ModelQuery to = capi::to_query(from);
    EXPECT_EQ(std::tie(to.family, to.layers, to.heads, to.dim),
              std::make_tuple(std::string_view("wan"), int64_t{1}, int64_t{2}, int64_t{3}));
    EXPECT_EQ(std::tie(to.rope[0], to.rope[1], to.rope[2]), std::make_tuple(int64_t{4}, int64_t{5}, int64_t{6}));
    EXPECT_EQ(std::tie(to.from_image, to.nearest, to.experts), std::make_tuple(flag == 1, flag == 0, int64_t{1} + flag));
  }
}

}  // namespace
}  // namespace scope::test
