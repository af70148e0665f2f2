/* A caller of 0.2.0, compiled against the header as it was then: every function once, every struct both ways. Do not change
 * it; a MINOR version has its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scope_0_2.h"

#define CHECK(call)                                                                  \
  do {                                                                               \
    scope_status status_ = (call);                                                   \
    if (status_ != SCOPE_OK) {                                                       \
      printf("%s: %s: %s\n", #call, scope_status_name(status_), scope_last_error()); \
      return 1;                                                                      \
    }                                                                                \
  } while (0)
#define EXPECT(condition)                                \
  do {                                                   \
    if (!(condition)) {                                  \
      printf("line %d: not %s\n", __LINE__, #condition); \
      return 1;                                          \
    }                                                    \
  } while (0)

enum { kHeads = 2, kTokens = 300, kDim = 64 };

int main(void) {
  char version[16];
  snprintf(version, sizeof version, "%d.%d.", SCOPE_VERSION_MAJOR, SCOPE_VERSION_MINOR);
  EXPECT(strncmp(scope_version(), version, strlen(version)) == 0);
  EXPECT(scope_supports("cpu", SCOPE_F32, kDim) == 1);

  scope_setting_info setting = {.struct_size = sizeof setting};
  scope_method_info row = {.struct_size = sizeof row};
  scope_model_info model = {.struct_size = sizeof model};
  CHECK(scope_setting_at(0, &setting));
  CHECK(scope_method_at(0, &row));
  CHECK(scope_model_at(0, &model));
  EXPECT(setting.struct_size == sizeof setting && setting.name && setting.stage && setting.values && setting.help);
  EXPECT(row.name && row.help && row.shares_branches >= 0 && row.shares_branches <= 1 && row.reserved == 0);
  EXPECT(model.name && model.help && model.layers > 0 && model.heads > 0 && model.steps > 0 && model.grid[2] > 0);
  EXPECT(model.rope[0] + model.rope[1] + model.rope[2] == model.dim && model.rho > 0 && model.dense_steps >= 0);

  scope_context* context = NULL;
  scope_method* method = NULL;
  scope_plan* plan = NULL;
  scope_state* state = NULL;
  scope_context_options options = {
      .struct_size = sizeof options, .backend = "cpu", .threads = 2, .device = 0, .instruction_set = "auto"};
  CHECK(scope_context_create(&options, &context));
  EXPECT(strlen(scope_context_instruction_set(context)) > 0);
  CHECK(scope_method_create(row.name, &method));
  CHECK(scope_method_apply_model(method, model.name));
  CHECK(scope_method_set(method, "rule", "target"));
  CHECK(scope_method_set(method, "density", "0.25"));
  CHECK(scope_method_set(method, "warm_prefix", "yes"));
  char text[16];
  size_t needed = 0;
  CHECK(scope_method_get(method, "rule", text, sizeof text, &needed));
  EXPECT(strcmp(text, "target") == 0 && needed == 7);

  const int64_t sizes[2] = {kDim / 2, kDim / 2};
  int32_t channels[kDim];
  for (int i = 0; i < kDim; ++i) channels[i] = i;
  scope_shape shape = {.struct_size = sizeof shape,
                       .batch = 1,
                       .heads = kHeads,
                       .q_tokens = kTokens,
                       .k_tokens = kTokens,
                       .dim = kDim,
                       .dtype = SCOPE_F32,
                       .dense_queries = 1,
                       .rope = {24, 20, 20},
                       .subspaces = 2,
                       .subspace_sizes = sizes,
                       .subspace_channels = channels};
  CHECK(scope_plan_create(context, method, &shape, &plan));
  scope_plan_info info = {.struct_size = sizeof info};
  CHECK(scope_plan_get_info(plan, &info));
  EXPECT(info.workspace_bytes > 0 && info.state_bytes > 0 && info.report_bytes > 0 && info.groups > 0 && info.codes > 0);
  EXPECT(info.subspaces == 2 && info.selection_groups == info.groups + 1 && info.mask_words == (kTokens + 31) / 32);
  EXPECT(info.kernel != NULL && info.host_memory == 1 && info.reserved == 0);
  int32_t reason = -1, clusters = -1;
  CHECK(scope_plan_reason(plan, 3, 0, 50, &reason, &clusters));
  EXPECT(reason == SCOPE_RAN_DENSE_STEP && clusters == 1);

  size_t count = (size_t)kHeads * kTokens * kDim, words = (size_t)info.mask_words, groups = (size_t)info.selection_groups;
  float* q = malloc(count * sizeof *q);
  float* k = malloc(count * sizeof *k);
  float* v = malloc(count * sizeof *v);
  float* out = malloc(count * sizeof *out);
  float* lse = malloc((size_t)kHeads * kTokens * sizeof *lse);
  void* workspace = malloc((size_t)info.workspace_bytes);
  void* memory = malloc((size_t)info.state_bytes);
  void* report = malloc((size_t)info.report_bytes);
  int32_t* labels = malloc((size_t)kHeads * kTokens * sizeof *labels);
  int32_t* group_sizes = malloc(kHeads * groups * sizeof *group_sizes);
  int32_t* counts = malloc(kHeads * groups * sizeof *counts);
  uint32_t* mask = malloc(kHeads * groups * words * sizeof *mask);
  uint32_t* kept = malloc(words * sizeof *kept);
  float* centroids = malloc((size_t)(kHeads * info.groups * kDim) * sizeof *centroids);
  float* codebooks = malloc((size_t)(kHeads * info.codes * kDim) * sizeof *codebooks);
  int32_t* codes = malloc((size_t)2 * kHeads * kTokens * sizeof *codes);
  uint32_t* text_bits = calloc(words, sizeof *text_bits);
  uint32_t* valid = malloc(words * sizeof *valid);
  for (size_t i = 0; i < count; ++i) {
    q[i] = (float)((i * 37 + 11) % 101) / 50.0f - 1.0f;
    k[i] = (float)((i * 53 + 29) % 103) / 50.0f - 1.0f;
    v[i] = 2.5f;
  }
  text_bits[0] = 15;
  for (size_t i = 0; i < words; ++i) valid[i] = ~0u;
  valid[1] = 0; /* tokens 32 to 63 are padding */
  const int64_t lengths[1] = {kTokens - 5};

  CHECK(scope_state_create(plan, memory, &state));
  int32_t filled = -1;
  CHECK(scope_state_filled(state, &filled));
  EXPECT(filled == 0);

  scope_tensor layout = {NULL, kHeads * kTokens * kDim, kTokens * kDim, kDim};
  scope_call_stats stats = {.struct_size = sizeof stats};
  scope_head_stats heads[kHeads] = {{.struct_size = sizeof heads[0]}};
  scope_selection selection = {.struct_size = sizeof selection,
                               .labels = labels,
                               .sizes = group_sizes,
                               .counts = counts,
                               .mask = mask,
                               .keep = kept,
                               .centroids = centroids,
                               .codebooks = codebooks,
                               .codes = codes};
  scope_run_args args = {.struct_size = sizeof args,
                         .q = layout,
                         .k = layout,
                         .v = layout,
                         .out = layout,
                         .lse = lse,
                         .scale = 0.125f,
                         .q_lengths = lengths,
                         .k_lengths = lengths,
                         .valid_queries = valid,
                         .valid_keys = valid,
                         .keep = text_bits,
                         .dense_queries = text_bits,
                         .layer = 3,
                         .step = 20,
                         .steps = 50,
                         .state = state,
                         .workspace = workspace,
                         .workspace_bytes = info.workspace_bytes,
                         .report = report,
                         .selection = &selection,
                         .stats = &stats,
                         .head_stats = heads,
                         .stream = NULL};
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.out.data = out;
  for (int call = 0; call < 2; ++call) {
    CHECK(scope_run(plan, &args));
    EXPECT(stats.reason == SCOPE_RAN_SPARSE && stats.warm == call && stats.iterations > 0 && stats.arithmetic != NULL);
    EXPECT(stats.density > 0.2 && stats.density < 0.3 && stats.total_density > stats.density && stats.total_seconds > 0);
    for (int h = 0; h < kHeads; ++h) {
      EXPECT(heads[h].struct_size == sizeof heads[h] && heads[h].rho > 0 && heads[h].density > 0.2);
      EXPECT(heads[h].queries == kTokens - 5 - 32 - 4 && heads[h].keys == heads[h].queries && heads[h].groups > 0);
      EXPECT(heads[h].codes > 0 && heads[h].min_count <= heads[h].max_count && heads[h].max_count > 0);
    }
  }
  for (size_t i = 0; i < count; ++i) { /* constant v gives constant output, padding gives zeros */
    size_t token = i / kDim % kTokens;
    float expected = token >= kTokens - 5 || (token >= 32 && token < 64) ? 0.0f : 2.5f;
    EXPECT(out[i] > expected - 1e-4f && out[i] < expected + 1e-4f);
  }
  EXPECT(labels[40] == -1 && labels[0] == info.groups && kept[0] == 15 && codes[40] == -1 && group_sizes[0] >= 0);
  EXPECT(counts[groups - 1] == kTokens - 5 - 32 - 4 && lse[100] == lse[100] && centroids[0] == centroids[0]);
  EXPECT(mask[(groups - 1) * words] == ~15u && codebooks[0] == codebooks[0]);

  scope_call_stats later = stats;
  scope_head_stats found[kHeads] = {{.struct_size = sizeof found[0]}};
  later.density = 0;
  CHECK(scope_report_read(plan, report, &later, found));
  EXPECT(later.density == stats.density && memcmp(found, heads, sizeof heads) == 0);
  CHECK(scope_read_stats(plan, &args));
  CHECK(scope_run_selection(plan, &args));

  CHECK(scope_state_filled(state, &filled));
  EXPECT(filled == 1);
  CHECK(scope_state_save(state, NULL, NULL, 0, &needed));
  void* saved = malloc(needed);
  CHECK(scope_state_save(state, NULL, saved, needed, &needed));
  CHECK(scope_state_reset(state));
  CHECK(scope_run(plan, &args));
  EXPECT(stats.warm == 0);
  CHECK(scope_state_load(state, NULL, saved, needed));
  CHECK(scope_state_set_filled(state, 1));
  CHECK(scope_run(plan, &args));
  EXPECT(stats.warm == 1);

  args.workspace_bytes -= 1;
  EXPECT(scope_run(plan, &args) == SCOPE_ERROR_WORKSPACE && strstr(scope_last_error(), "workspace") != NULL);
  int32_t three[3] = {2147483647, 2147483647, 2147483647};
  int64_t k_head = 0;
  CHECK(scope_head_budget(three, three, 3, &k_head));
  EXPECT(k_head == 2147483647);

  scope_context_destroy(context);
  scope_plan_destroy(plan);
  scope_state_destroy(state);
  scope_method_destroy(method);
  free(q), free(k), free(v), free(out), free(lse), free(workspace), free(memory), free(report), free(saved);
  free(labels), free(group_sizes), free(counts), free(mask), free(kept), free(centroids), free(codebooks), free(codes);
  free(text_bits), free(valid);
  printf("a caller of %s runs with %s\n", version, scope_version());
  return 0;
}
