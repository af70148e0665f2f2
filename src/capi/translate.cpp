// Names of the C ABI <-> names of the pipeline.
#include "capi/translate.h"

#include <algorithm>

namespace scope::capi {

static_assert(static_cast<int>(Status::invalid_argument) == SCOPE_ERROR_INVALID_ARGUMENT);
static_assert(static_cast<int>(Status::non_finite) == SCOPE_ERROR_NON_FINITE);
static_assert(static_cast<int>(Status::internal) == SCOPE_ERROR_INTERNAL);
static_assert(static_cast<int>(DType::bf16) == SCOPE_BF16 && static_cast<int>(DType::f16) == SCOPE_F16);
static_assert(static_cast<int>(Reason::nothing_to_select) == SCOPE_RAN_DENSE_NOTHING);

namespace {

void need(const void* pointer, const char* name) {
  require(pointer != nullptr, Status::invalid_argument, "{}: got null, expected a pointer", name);
}

DType to_dtype(int32_t dtype) {
  require(dtype >= SCOPE_F32 && dtype <= SCOPE_BF16, Status::dtype,
          "dtype: got {}, expected SCOPE_F32, SCOPE_F16 or SCOPE_BF16", dtype);
  return static_cast<DType>(dtype);
}

template <class View>
View to_view(const scope_tensor& from, const Shape& shape, int64_t tokens) {
  View view{from.data, shape.dtype, shape.batch, shape.heads, tokens, shape.dim, 0, 0, 0};
  if (from.data == nullptr) return view;  // no tokens, or not needed: nowhere to step to
  view.batch_stride = from.batch_stride;
  view.head_stride = from.head_stride;
  view.token_stride = from.token_stride;
  return view;
}

}  // namespace

ContextOptions to_options(const scope_context_options& from) {
  ContextOptions options;
  if (from.backend != nullptr) options.backend = from.backend;
  if (from.instruction_set != nullptr) options.instruction_set = from.instruction_set;
  options.threads = from.threads;
  options.device = from.device;
  options.foreign = {from.run_tasks, from.run_tasks_pool};
  return options;
}

Shape to_shape(const scope_shape& from) {
  Shape shape{.batch = from.batch,
              .heads = from.heads,
              .q_tokens = from.q_tokens,
              .k_tokens = from.k_tokens,
              .dim = from.dim,
              .dtype = to_dtype(from.dtype),
              .rope = {},
              .subspaces = {},
              .dense_queries = from.dense_queries != 0};
  if (from.rope[0] != 0 || from.rope[1] != 0 || from.rope[2] != 0) shape.rope.assign(from.rope, from.rope + 3);
  require(from.subspaces >= 0 && from.subspaces <= 256, Status::shape, "subspaces: got {}, expected 0..256", from.subspaces);
  if (from.subspaces == 0) return shape;
  need(from.subspace_sizes, "subspace_sizes");
  need(from.subspace_channels, "subspace_channels");
  const int32_t* channels = from.subspace_channels;
  int64_t left = from.dim;
  for (int64_t m = 0; m < from.subspaces; ++m) {
    const int64_t size = from.subspace_sizes[m];
    require(size >= 1 && size <= left, Status::shape, "subspace_sizes[{}]: got {}, expected 1..{} (the sets cover dim once)",
            m, size, left);
    shape.subspaces.emplace_back(channels, channels + size);
    channels += size;
    left -= size;
  }
  return shape;
}

CallArgs to_args(const Plan& plan, const scope_run_args& from) {
  require(from.reserved == 0, Status::invalid_argument, "args.reserved: got {}, expected 0", from.reserved);
  const Shape& shape = plan.shape;
  CallArgs args;
  args.q = to_view<TensorView>(from.q, shape, shape.q_tokens);
  args.k = to_view<TensorView>(from.k, shape, shape.k_tokens);
  args.v = to_view<TensorView>(from.v, shape, shape.k_tokens);
  args.out = to_view<MutableTensorView>(from.out, shape, shape.q_tokens);
  args.lse = from.lse;
  args.scale = from.scale;
  args.q_lengths = from.q_lengths;
  args.k_lengths = from.k_lengths;
  args.valid_queries = from.valid_queries;
  args.valid_keys = from.valid_keys;
  args.keep = from.keep;
  args.dense_queries = from.dense_queries;
  args.place = {from.layer, from.step, from.steps};
  args.stream = from.stream;
  args.workspace = from.workspace;
  args.workspace_bytes = from.workspace_bytes;
  args.report = from.report;
  return args;
}

SelectionOut to_selection(const scope_selection& from) {
  return {from.labels, from.sizes, from.counts, from.mask, from.keep, from.centroids, from.codebooks, from.codes};
}

CallStats to_stats(const scope_call_stats& from) {
  CallStats stats;
  stats.reason = static_cast<Reason>(from.reason);
  stats.warm = from.warm != 0;
  stats.iterations = from.iterations;
  stats.arithmetic = from.arithmetic;
  stats.density = from.density;
  stats.total_density = from.total_density;
  stats.check = from.check_seconds;
  stats.group = from.group_seconds;
  stats.encode = from.encode_seconds;
  stats.score = from.score_seconds;
  stats.select = from.select_seconds;
  stats.attend = from.attend_seconds;
  stats.total = from.total_seconds;
  return stats;
}

scope_plan_info from_plan(const Plan& plan) {
  return {.struct_size = 0,
          .workspace_bytes = plan.workspace_bytes,
          .state_bytes = plan.state_bytes,
          .report_bytes = plan.report_bytes,
          .groups = plan.groups,
          .codes = plan.codes,
          .subspaces = plan.subspaces(),
          .selection_groups = plan.selection_groups,
          .mask_words = mask_words(plan.shape.k_tokens),
          .kernel = plan.kernel(),
          .host_memory = plan.context.host() ? 1 : 0,
          .reserved = 0};
}

scope_call_stats from_stats(const CallStats& from) {
  return {.struct_size = 0,
          .reason = static_cast<int32_t>(from.reason),
          .warm = from.warm ? 1 : 0,
          .iterations = from.iterations,
          .reserved = 0,
          .arithmetic = from.arithmetic,
          .density = from.density,
          .total_density = from.total_density,
          .check_seconds = from.check,
          .group_seconds = from.group,
          .encode_seconds = from.encode,
          .score_seconds = from.score,
          .select_seconds = from.select,
          .attend_seconds = from.attend,
          .total_seconds = from.total};
}

scope_head_stats from_stats(const HeadStats& from) {
  return {.struct_size = 0,
          .density = from.density,
          .total_density = from.total_density,
          .rho = from.rho,
          .alpha = from.alpha,
          .k_head = from.head_budget,
          .queries = from.queries,
          .keys = from.keys,
          .groups = from.groups,
          .codes = from.codes,
          .empty_groups = from.empty_groups,
          .empty_codes = from.empty_codes,
          .min_count = from.min_count,
          .max_count = from.max_count};
}

scope_setting_info from_setting(const Setting& from) {
  return {
      .struct_size = 0, .name = from.name, .stage = from.stage, .values = from.values.c_str(), .help = from.help.c_str()};
}

scope_method_info from_method(const Method& from) {
  return {.struct_size = 0,
          .name = from.name,
          .help = from.help,
          .shares_branches = from.shares_branches ? 1 : 0,
          .reserved = 0,
          .morton = from.morton ? 1 : 0,
          .reserved_2 = 0};
}

ModelQuery to_query(const scope_model_query& from) {
  require(from.reserved == 0, Status::invalid_argument, "query.reserved: got {}, expected 0", from.reserved);
  ModelQuery query{.family = from.family == nullptr ? "" : from.family,
                   .layers = from.layers,
                   .heads = from.heads,
                   .dim = from.dim,
                   .from_image = from.from_image != 0,
                   .experts = from.experts == 0 ? 1 : from.experts,
                   .nearest = from.nearest != 0};
  std::copy_n(from.rope, 3, query.rope);
  return query;
}

scope_model_info from_model(const Model& from) {
  scope_model_info info{};
  info.name = from.name;
  info.help = from.help;
  info.layers = from.layers;
  info.heads = from.heads;
  info.dim = from.dim;
  std::copy_n(from.rope, 3, info.rope);
  std::copy_n(from.grid, 3, info.grid);
  info.steps = from.steps;
  info.rho = from.rho;
  info.dense_steps = from.dense_steps;
  info.warm_prefix = from.warm_prefix ? 1 : 0;
  return info;
}

}  // namespace scope::capi
