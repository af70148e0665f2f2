/* A plain C11 host: the whole life of a plan, with the header included twice. */
#include <scope/scope.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                                  \
  do {                                                                               \
    scope_status status_ = (call);                                                   \
    if (status_ != SCOPE_OK) {                                                       \
      printf("%s: %s: %s\n", #call, scope_status_name(status_), scope_last_error()); \
      return 1;                                                                      \
    }                                                                                \
  } while (0)

enum { kHeads = 2, kTokens = 300, kDim = 64 };

int main(void) {
  scope_context* context = NULL;
  scope_method* method = NULL;
  scope_plan* plan = NULL;
  scope_state* state = NULL;
  scope_context_options options = {.struct_size = sizeof options, .threads = 2};
  CHECK(scope_context_create(&options, &context));
  CHECK(scope_method_create("scope", &method));
  CHECK(scope_method_set(method, "rule", "target"));
  CHECK(scope_method_set(method, "density", "0.25"));
  if (scope_method_set(method, "rho", "7") != SCOPE_ERROR_INVALID_ARGUMENT || strstr(scope_last_error(), "rho") == NULL)
    return 2;

  scope_shape shape = {.struct_size = sizeof shape,
                       .batch = 1,
                       .heads = kHeads,
                       .q_tokens = kTokens,
                       .k_tokens = kTokens,
                       .dim = kDim,
                       .dtype = SCOPE_F32,
                       .rope = {24, 20, 20}};
  CHECK(scope_plan_create(context, method, &shape, &plan));
  scope_plan_info info = {.struct_size = sizeof info};
  CHECK(scope_plan_get_info(plan, &info));

  size_t count = (size_t)kHeads * kTokens * kDim;
  float* q = malloc(count * sizeof *q);
  float* k = malloc(count * sizeof *k);
  float* v = malloc(count * sizeof *v);
  float* out = malloc(count * sizeof *out);
  void* workspace = malloc((size_t)info.workspace_bytes);
  void* memory = malloc((size_t)info.state_bytes);
  for (size_t i = 0; i < count; ++i) {
    q[i] = (float)((i * 37 + 11) % 101) / 50.0f - 1.0f;
    k[i] = (float)((i * 53 + 29) % 103) / 50.0f - 1.0f;
    v[i] = 2.5f;
  }
  CHECK(scope_state_create(plan, memory, &state));

  scope_tensor layout = {NULL, kHeads * kTokens * kDim, kTokens * kDim, kDim};
  scope_call_stats stats = {.struct_size = sizeof stats};
  scope_run_args args = {.struct_size = sizeof args,
                         .q = layout,
                         .k = layout,
                         .v = layout,
                         .out = layout,
                         .layer = -1,
                         .step = -1,
                         .state = state,
                         .workspace = workspace,
                         .workspace_bytes = info.workspace_bytes,
                         .stats = &stats};
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.out.data = out;
  for (int call = 0; call < 2; ++call) {
    CHECK(scope_run(plan, &args));
    printf("call %d: reason %d, warm %d, %s, density %.3f\n", call, (int)stats.reason, (int)stats.warm, stats.arithmetic,
           stats.density);
    if (stats.warm != call || stats.density < 0.2 || stats.density > 0.3) return 3;
    for (size_t i = 0; i < count; ++i) {
      if (out[i] < 2.4999f || out[i] > 2.5001f) return 4; /* constant v gives constant output */
    }
  }
  args.out.data = v + kDim; /* shares elements with v */
  if (scope_run(plan, &args) != SCOPE_ERROR_INVALID_ARGUMENT || strstr(scope_last_error(), "out") == NULL) return 7;
  args.out.data = out;
  args.workspace_bytes -= 1;
  if (scope_run(plan, &args) != SCOPE_ERROR_WORKSPACE) return 5;

  int32_t sizes[3] = {2147483647, 2147483647, 2147483647}, base[3] = {2147483647, 2147483647, 2147483647};
  int64_t k_head = 0;
  CHECK(scope_head_budget(sizes, base, 3, &k_head));
  if (k_head != 2147483647) return 6;

  scope_context_destroy(context); /* before its plan: allowed */
  scope_plan_destroy(plan);
  scope_state_destroy(state);
  scope_method_destroy(method);
  free(q), free(k), free(v), free(out), free(workspace), free(memory);
  return 0;
}
