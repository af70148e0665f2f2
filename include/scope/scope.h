/* SCOPE: sparse attention for video diffusion transformers. The C ABI, and the only exported symbols.
 *
 *   scope_context_create      threads and instruction set; scope_context_create_cuda: a GPU
 *   scope_method_create/_set  what to compute: a method and its settings, by name and text
 *   scope_plan_create         shape + method -> how much workspace and state a call needs
 *   scope_run                 one attention call
 *
 * Every function returns a scope_status; 0 is success. On an error scope_last_error() says what was wrong with which
 * argument, on the calling thread, and no output has been written unless the function says otherwise. Nothing throws,
 * prints or exits. Handles: separate plans (each with its own context) run concurrently; calls that overlap on one plan or
 * on one context return SCOPE_ERROR_BUSY.
 */
#ifndef SCOPE_SCOPE_H
#define SCOPE_SCOPE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SCOPE_VERSION_MAJOR 0
#define SCOPE_VERSION_MINOR 1
#define SCOPE_VERSION_PATCH 0

#if defined(__GNUC__)
#define SCOPE_API __attribute__((visibility("default")))
#else
#define SCOPE_API
#endif

typedef enum scope_status {
  SCOPE_OK = 0,
  SCOPE_ERROR_INVALID_ARGUMENT = 1,
  SCOPE_ERROR_SHAPE = 2,
  SCOPE_ERROR_DTYPE = 3,
  SCOPE_ERROR_ALIGNMENT = 4,
  SCOPE_ERROR_UNSUPPORTED = 5, /* this backend cannot do it; scope_plan_create says so before any call */
  SCOPE_ERROR_SIZE_LIMIT = 6,
  SCOPE_ERROR_WORKSPACE = 7, /* too small; the message and scope_plan_info hold the bytes required */
  SCOPE_ERROR_OUT_OF_MEMORY = 8,
  SCOPE_ERROR_NON_FINITE = 9, /* NaN, Inf or magnitudes over 1e18 in q or k; a GPU sees less, see docs/abi.md */
  SCOPE_ERROR_IO = 10,
  SCOPE_ERROR_FORMAT = 11,
  SCOPE_ERROR_BUSY = 12,
  SCOPE_ERROR_DEVICE = 13,
  SCOPE_ERROR_DEVICE_LOST = 14,
  SCOPE_ERROR_INTERNAL = 15
} scope_status;

typedef enum scope_dtype { SCOPE_F32 = 0, SCOPE_F16 = 1, SCOPE_BF16 = 2 } scope_dtype;

/* Why a call ran as it did. */
typedef enum scope_reason {
  SCOPE_RAN_SPARSE = 0,
  SCOPE_RAN_DENSE_METHOD = 1,    /* the method is dense */
  SCOPE_RAN_DENSE_LAYER = 2,     /* layer < dense_layers */
  SCOPE_RAN_DENSE_STEP = 3,      /* within dense_steps */
  SCOPE_RAN_DENSE_LAST_STEP = 4, /* within dense_last_steps */
  SCOPE_RAN_DENSE_NOTHING = 5    /* no query or no key takes part in selection */
} scope_reason;

typedef struct scope_context scope_context;
typedef struct scope_method scope_method;
typedef struct scope_plan scope_plan;

/* ---- versions and errors ------------------------------------------------------------------------------------------ */

SCOPE_API const char* scope_version(void); /* "0.1.0" */
SCOPE_API const char* scope_status_name(scope_status status);
SCOPE_API const char* scope_last_error(void); /* this thread's last failure; "" before the first */

/* Before a plan is made: 1 if `backend` ("cpu" or "cuda") is there and takes this dtype and head dimension, 0 if not. */
SCOPE_API int32_t scope_supports(const char* backend, int32_t dtype, int64_t dim);

/* ---- context ------------------------------------------------------------------------------------------------------- */

/* threads: 0 = one per core. instruction_set: NULL or "auto", "avx512", "avx2", "portable". */
SCOPE_API scope_status scope_context_create(int32_t threads, const char* instruction_set, scope_context** context);
SCOPE_API void scope_context_destroy(scope_context* context); /* NULL is fine; plans keep what they need alive */
/* A GPU by its index: sm_80 or later, f16 and bf16, head dimensions that are multiples of 8 up to 128.
 * SCOPE_ERROR_UNSUPPORTED in a build without CUDA and on a machine without a GPU. See "calls on a GPU" below. */
SCOPE_API scope_status scope_context_create_cuda(int32_t device, scope_context** context);
/* What calls of this context run on: "avx512", "avx2" or "portable"; "sm_90" and the like on a GPU. */
SCOPE_API const char* scope_context_instruction_set(const scope_context* context);

/* ---- method -------------------------------------------------------------------------------------------------------- */

/* name: "scope", "scope-paper", "scope-exact", "svg2", "dense" and so on, as `scope methods` lists them; an unknown one is
 * refused with the list. */
SCOPE_API scope_status scope_method_create(const char* name, scope_method** method);
SCOPE_API void scope_method_destroy(scope_method* method);
/* One setting by name, for example ("rho", "0.9"); `scope methods` and docs/settings.md list them. */
SCOPE_API scope_status scope_method_set(scope_method* method, const char* name, const char* value);
/* The value as text with its terminator into buffer; *needed gets the length of both. A buffer of NULL and 0 only asks for
 * the length; one that is too small is refused and left alone. */
SCOPE_API scope_status scope_method_get(const scope_method* method, const char* name, char* buffer, size_t capacity,
                                        size_t* needed);
/* rho, schedule and dense layers of a known video model, for example "wan2.1-t2v-14b". */
SCOPE_API scope_status scope_method_apply_model(scope_method* method, const char* model);
/* The table of settings: index from 0, SCOPE_ERROR_INVALID_ARGUMENT past the end. Defaults: scope_method_get of a new
 * method. */
typedef struct scope_setting_info {
  const char* name;
  const char* stage;
  const char* values;
  const char* help;
} scope_setting_info;
SCOPE_API scope_status scope_setting_at(int32_t index, scope_setting_info* info);

/* ---- plan ---------------------------------------------------------------------------------------------------------- */

/* Zero-initialise, set struct_size = sizeof(scope_shape), then fill in. */
typedef struct scope_shape {
  size_t struct_size;
  int64_t batch, heads;
  int64_t q_tokens, k_tokens;
  int64_t dim;           /* up to 256 */
  int32_t dtype;         /* a scope_dtype, of q, k, v and out */
  int32_t dense_queries; /* 1: calls may name queries that attend densely (text) */
  int64_t rope[3];       /* channels along T, H, W, for partition=rope; all 0: not given */
  /* Any partition into channel sets instead: `subspaces` sets of sizes subspace_sizes[m], their channels one set after the
   * other in subspace_channels. 0: use the setting `partition`. */
  int64_t subspaces;
  const int64_t* subspace_sizes;    /* [subspaces] */
  const int32_t* subspace_channels; /* [dim] */
} scope_shape;

typedef struct scope_plan_info {
  size_t struct_size; /* set it before the call */
  int64_t workspace_bytes;
  int64_t state_bytes; /* 0: the method keeps none */
  int64_t groups;      /* query groups; 0 for dense */
  int64_t codes;       /* codebook entries per subspace; 0 without encode */
  int64_t subspaces;
  int64_t selection_groups; /* rows of a selection: groups, plus 1 with dense_queries */
  int64_t mask_words;       /* 32-bit words of one mask row: ceil(k_tokens / 32) */
  const char* kernel;       /* of attend: "avx512", "avx2" or "portable"; "wgmma" or "portable" on a GPU */
} scope_plan_info;

SCOPE_API scope_status scope_plan_create(scope_context* context, const scope_method* method, const scope_shape* shape,
                                         scope_plan** plan);
SCOPE_API void scope_plan_destroy(scope_plan* plan);
SCOPE_API scope_status scope_plan_get_info(const scope_plan* plan, scope_plan_info* info);

/* State: state_bytes of caller memory (device memory on a GPU) per (layer, CFG branch), at an address that is a multiple of
 * 16. Initialise it once (on a GPU this waits for the copy); saving it is copying it. docs/abi.md gives its layout. */
SCOPE_API scope_status scope_state_init(const scope_plan* plan, void* state);

/* ---- calls --------------------------------------------------------------------------------------------------------- */

/* A tensor [batch, heads, tokens, dim] of the plan's shape and dtype. Strides are in elements; the last one is 1, so
 * [batch, tokens, heads, dim] memory is {data, tokens*heads*dim, dim, heads*dim}. */
typedef struct scope_tensor {
  void* data;
  int64_t batch_stride, head_stride, token_stride;
} scope_tensor;

/* The selection format. Every pointer is optional; G = selection_groups, W = mask_words. Key j is bit j % 32 of word j / 32.
 * attend reads mask OR keep. Densely attending queries are the last group, its row all valid keys. */
typedef struct scope_selection {
  int32_t* labels;  /* [batch, heads, q_tokens] group of each query; -1: attends to nothing */
  int32_t* sizes;   /* [batch, heads, G] queries per group */
  int32_t* counts;  /* [batch, heads, G] keys per group = set bits of its mask row */
  uint32_t* mask;   /* [batch, heads, G, W] */
  uint32_t* keep;   /* [batch, W] keys that every query sees; their mask bits are 0 */
  float* centroids; /* [batch, heads, groups, dim] */
  float* codebooks; /* subspace after subspace: [batch, heads, codes, dim_m] */
  int32_t* codes;   /* [subspaces, batch, heads, k_tokens]; -1: not encoded */
} scope_selection;

typedef struct scope_head_stats {
  double density;        /* kept pairs / (queries x keys) among tokens that take part in selection; 1: ran dense */
  double total_density;  /* with always-kept keys and dense queries, over all valid pairs */
  double rho, alpha;     /* as used (rule=target solves rho and may lower alpha) */
  int64_t k_head;        /* the head's online budget */
  int64_t queries, keys; /* that take part in selection */
  int64_t groups, codes; /* effective */
  int64_t empty_groups, empty_codes;
  int64_t min_count, max_count;
} scope_head_stats;

typedef struct scope_call_stats {
  scope_reason reason;           /* what ran, and why */
  int32_t warm;                  /* 1: every sample started from its state, or reused it */
  int32_t iterations;            /* K-means iterations run */
  int32_t bf16_dots;             /* 1: attend used bf16 dot products */
  double density, total_density; /* means over heads */
  double check_seconds, group_seconds, encode_seconds, score_seconds, select_seconds, attend_seconds, total_seconds;
} scope_call_stats;

/* Where K-means starts. On the CPU AUTO reads the state. A GPU call cannot wait for that: with a state, say FIRST or WARM.
 */
typedef enum scope_start { SCOPE_START_AUTO = 0, SCOPE_START_FIRST = 1, SCOPE_START_WARM = 2 } scope_start;

/* Zero-initialise, set struct_size = sizeof(scope_run_args) and layer = step = -1 when there is no schedule. */
typedef struct scope_run_args {
  size_t struct_size;
  scope_tensor q, k, v;
  scope_tensor out;              /* may be q itself, not k or v; out.data == NULL: select only (v may be NULL too) */
  float* lse;                    /* [batch, heads, q_tokens] natural log-sum-exp; optional */
  const int64_t* q_lengths;      /* [batch] valid queries, the rest is padding (zeros out); NULL: all */
  const int64_t* k_lengths;      /* [batch] valid keys, the rest is attended by nobody; NULL: all */
  const uint32_t* keep;          /* [batch, W] keys that every query sees (text); optional */
  const uint32_t* dense_queries; /* [batch, ceil(q_tokens / 32)] queries that see every valid key; optional */
  int64_t layer;                 /* this call's layer; -1: no layer schedule */
  int64_t step, steps;           /* this call's denoising step of `steps`; -1: no step schedule */
  void* state;                   /* initialised state; NULL: every call is a first call */
  void* workspace;
  int64_t workspace_bytes;
  scope_selection selection;    /* optional outputs */
  scope_call_stats* stats;      /* optional output */
  scope_head_stats* head_stats; /* [batch, heads]; optional output */
  void* stream;                 /* GPU: the cudaStream_t of everything the call does; NULL: the legacy default stream */
  int32_t start;                /* a scope_start */
  int32_t reserved;             /* 0 */
} scope_run_args;

/* Calls on a GPU: q, k, v, out, lse, the state, the workspace and the selection are device memory with 16-byte-aligned rows;
 * lengths, keep and dense_queries are host memory, read before the call returns. A call only enqueues work on `stream`:
 * it does not allocate, copy from the host or wait, and can be captured in a CUDA graph (FIRST and WARM are
 * different graphs). head_stats must be NULL; densities and times in *stats are NaN until scope_read_stats. */

/* One attention call: group, encode, score, select, attend; or dense where method or schedule say so. */
SCOPE_API scope_status scope_run(scope_plan* plan, const scope_run_args* args);

/* attend alone, on a selection from anywhere: args->selection's labels and mask (and keep, optional) are read. Labels out of
 * range and bits of keys past k_lengths are refused on the CPU; on a GPU such queries attend to nothing and such bits are
 * dropped. The state, schedule, keep, dense_queries and statistics of args are ignored. */
SCOPE_API scope_status scope_run_selection(scope_plan* plan, const scope_run_args* args);

/* What the last call with this plan, workspace and stream found: waits for the stream, completes *stats (which that call
 * filled; its times too, unless it was captured or replayed) and fills head_stats. Reports what a GPU call could only
 * discover: SCOPE_ERROR_NON_FINITE, or SCOPE_ERROR_INVALID_ARGUMENT for a warm call on an unfilled state. */
SCOPE_API scope_status scope_read_stats(scope_plan* plan, const scope_run_args* args);

/* k_head = ceil(sum sizes[c] base_counts[c] / sum sizes[c]): the online per-head budget, from any proxy's base counts. */
SCOPE_API scope_status scope_head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups, int64_t* k_head);

#ifdef __cplusplus
}
#endif

#endif
