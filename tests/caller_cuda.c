/* A plain C11 host on a GPU: device memory, a stream of its own, a first call and a warm one, and one wait at the end. */
#include <cuda_runtime_api.h>
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
#define CHECK_CUDA(call)                                     \
  do {                                                       \
    cudaError_t error_ = (call);                             \
    if (error_ != cudaSuccess) {                             \
      printf("%s: %s\n", #call, cudaGetErrorString(error_)); \
      return 1;                                              \
    }                                                        \
  } while (0)

enum { kHeads = 2, kTokens = 512, kDim = 64, kCount = kHeads * kTokens * kDim, kBytes = 2 * kCount, kCalls = 2 };

static uint16_t to_bf16(float x) { /* exact for the few bits that are used here */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

int main(void) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("[GPU tests skipped]\n");
    return 0;
  }
  scope_context* context = NULL;
  scope_method* method = NULL;
  scope_plan* plan = NULL;
  scope_state* state = NULL;
  scope_context_options options = {.struct_size = sizeof options, .backend = "cuda", .threads = 1, .device = 0};
  CHECK(scope_context_create(&options, &context));
  CHECK(scope_method_create("scope", &method));
  CHECK(scope_method_set(method, "target_density", "0.25"));
  scope_shape shape = {.struct_size = sizeof shape,
                       .batch = 1,
                       .heads = kHeads,
                       .q_tokens = kTokens,
                       .k_tokens = kTokens,
                       .dim = kDim,
                       .dtype = SCOPE_BF16,
                       .rope = {24, 20, 20}};
  CHECK(scope_plan_create(context, method, &shape, &plan));
  scope_plan_info info = {.struct_size = sizeof info};
  CHECK(scope_plan_get_info(plan, &info));
  if (info.host_memory != 0) return 2;

  CHECK_CUDA(cudaSetDevice(options.device));
  cudaStream_t stream = NULL;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  void *q = NULL, *k = NULL, *v = NULL, *out = NULL, *workspace = NULL, *memory = NULL;
  char* reports = NULL; /* one for each call, so that both are read after one wait */
  CHECK_CUDA(cudaMalloc(&q, kBytes));
  CHECK_CUDA(cudaMalloc(&k, kBytes));
  CHECK_CUDA(cudaMalloc(&v, kBytes));
  CHECK_CUDA(cudaMalloc(&out, kBytes));
  CHECK_CUDA(cudaMalloc(&workspace, (size_t)info.workspace_bytes));
  CHECK_CUDA(cudaMalloc(&memory, (size_t)info.state_bytes));
  CHECK_CUDA(cudaMalloc((void**)&reports, kCalls * (size_t)info.report_bytes));
  CHECK(scope_state_create(plan, memory, &state));

  uint16_t* host = malloc(kBytes);
  for (size_t i = 0; i < kCount; ++i) host[i] = to_bf16((float)((int)((i * 37 + 11) % 101) - 50) / 64.0f);
  CHECK_CUDA(cudaMemcpyAsync(q, host, kBytes, cudaMemcpyHostToDevice, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream)); /* before `host` changes */
  for (size_t i = 0; i < kCount; ++i) host[i] = to_bf16((float)((int)((i * 53 + 29) % 103) - 51) / 64.0f);
  CHECK_CUDA(cudaMemcpyAsync(k, host, kBytes, cudaMemcpyHostToDevice, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  for (size_t i = 0; i < kCount; ++i) host[i] = to_bf16(2.5f);
  CHECK_CUDA(cudaMemcpyAsync(v, host, kBytes, cudaMemcpyHostToDevice, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));

  scope_tensor layout = {NULL, kCount, kTokens * kDim, kDim};
  scope_call_stats stats[kCalls];
  for (int call = 0; call < kCalls; ++call) {
    memset(&stats[call], 0, sizeof stats[call]);
    stats[call].struct_size = sizeof stats[call];
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
                           .report = reports + call * info.report_bytes,
                           .stats = &stats[call],
                           .stream = stream};
    args.q.data = q;
    args.k.data = k;
    args.v.data = v;
    args.out.data = out;
    CHECK(scope_run(plan, &args)); /* enqueues, and does not wait */
  }

  char* found = malloc(kCalls * (size_t)info.report_bytes);
  CHECK_CUDA(cudaMemcpyAsync(found, reports, kCalls * (size_t)info.report_bytes, cudaMemcpyDeviceToHost, stream));
  CHECK_CUDA(cudaMemcpyAsync(host, out, kBytes, cudaMemcpyDeviceToHost, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  for (int call = 0; call < kCalls; ++call) {
    CHECK(scope_report_read(plan, found + call * info.report_bytes, &stats[call], NULL));
    printf("call %d: reason %d, warm %d, %s, density %.3f\n", call, (int)stats[call].reason, (int)stats[call].warm,
           stats[call].arithmetic, stats[call].density);
    if (stats[call].reason != SCOPE_RAN_SPARSE || stats[call].warm != call) return 3;
    if (!(stats[call].density > 0.2 && stats[call].density < 0.3)) return 4;
  }
  for (size_t i = 0; i < kCount; ++i) {
    const float value = from_bf16(host[i]);
    if (!(value > 2.45f && value < 2.55f)) return 5; /* constant v gives constant output */
  }

  scope_context_destroy(context); /* before its plan: allowed */
  scope_plan_destroy(plan);
  scope_state_destroy(state);
  scope_method_destroy(method);
  cudaFree(q), cudaFree(k), cudaFree(v), cudaFree(out), cudaFree(workspace), cudaFree(memory), cudaFree(reports);
  cudaStreamDestroy(stream);
  free(host), free(found);
  return 0;
}
