/* SCOPE: sparse attention for video diffusion transformers. The C ABI, and the only exported symbols.
 *
 *   scope_context_create      what calls run on: a backend with its threads and instruction set, or its device
 *   scope_method_create/_set  what to compute: a method and its settings, by name and text
 *   scope_plan_create         shape + method -> how much workspace and state a call needs
 *   scope_state_create        what one layer and CFG branch hands from call to call
 *   scope_run                 one attention call
 *
 * Every function returns a scope_status unless it says otherwise; 0 is success. On an error scope_last_error() says what was
 * wrong with which argument, on the calling thread, and no output has been written unless the function says otherwise.
 * Nothing throws, prints or exits. Handles: separate plans (each with its own context) run concurrently; calls that overlap
 * on one plan, context or state return SCOPE_ERROR_BUSY. After fork() the child cannot use contexts, plans and states of its
 * parent: calls on them return SCOPE_ERROR_UNSUPPORTED. It may destroy them, and make its own.
 *
 * Every struct but scope_tensor grows at its end and begins with struct_size: zero-initialise it and set struct_size to its
 * sizeof, outputs too. A library of the same MINOR version takes smaller structs of older headers (what they lack is 0) and
 * larger ones of newer headers (what it does not know must be 0, or it is SCOPE_ERROR_UNSUPPORTED; in outputs it is set to
 * 0).
 */
#ifndef SCOPE_SCOPE_H
#define SCOPE_SCOPE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SCOPE_VERSION_MAJOR 0
#define SCOPE_VERSION_MINOR 2
#define SCOPE_VERSION_PATCH 0

#if defined(_WIN32) && defined(scope_EXPORTS) /* which CMake defines for the library's own sources */
#define SCOPE_API __declspec(dllexport)
#elif defined(_WIN32)
#define SCOPE_API __declspec(dllimport)
#elif defined(__GNUC__)
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
  SCOPE_ERROR_NON_FINITE = 9, /* NaN, Inf or magnitudes over 1e18 in q or k; a GPU sees less, see docs/reference/abi.md */
  SCOPE_ERROR_IO = 10,
  SCOPE_ERROR_FORMAT = 11,
  SCOPE_ERROR_BUSY = 12,
  SCOPE_ERROR_DEVICE = 13,
  SCOPE_ERROR_DEVICE_LOST = 14,
  SCOPE_ERROR_INTERNAL = 15
} scope_status;

typedef enum scope_dtype { SCOPE_F32 = 0, SCOPE_F16 = 1, SCOPE_BF16 = 2 } scope_dtype;

/* Why a call runs as it does. */
typedef enum scope_reason {
  SCOPE_RAN_SPARSE = 0,
  SCOPE_RAN_DENSE_METHOD = 1,    /* the method is dense */
  SCOPE_RAN_DENSE_LAYER = 2,     /* layer < dense_layers */
  SCOPE_RAN_DENSE_STEP = 3,      /* within dense_steps, or of density 1 in density_steps */
  SCOPE_RAN_DENSE_LAST_STEP = 4, /* within dense_last_steps */
  SCOPE_RAN_DENSE_NOTHING = 5    /* no query or no key takes part in selection */
} scope_reason;

typedef struct scope_context scope_context;
typedef struct scope_method scope_method;
typedef struct scope_plan scope_plan;
typedef struct scope_state scope_state;

/* ---- versions and errors ------------------------------------------------------------------------------------------ */

SCOPE_API const char* scope_version(void); /* "0.2.0" */
/* The commit it was built from, in 40 digits, with a "+" where files differed from it; "unknown" without git. */
SCOPE_API const char* scope_commit(void);
SCOPE_API const char* scope_status_name(scope_status status);
/* This thread's last failure, "" before the first. The text lasts until the next call that fails on this thread. */
SCOPE_API const char* scope_last_error(void);

/* Before a context is made: 1 if `backend` ("cpu" or "cuda") is there and takes this dtype and head dimension, 0 if not. */
SCOPE_API int32_t scope_supports(const char* backend, int32_t dtype, int64_t dim);

/* ---- context ------------------------------------------------------------------------------------------------------- */

/* A program's own threads: calls task(data, i) once for every i in [0, tasks), on any threads and in any order, and returns
 * when all have returned. pool: what the program gave with it. It must not throw; `tasks` is at most the context's threads.
 * Tasks never wait for one another, so fewer threads than tasks will do. */
typedef void (*scope_run_tasks)(void* pool, int32_t tasks, void (*task)(void* data, int32_t index), void* data);

typedef struct scope_context_options {
  size_t struct_size;
  const char* backend;         /* "cpu" or "cuda"; NULL: "cpu" */
  int32_t threads;             /* of the host; 0: one per core */
  int32_t device;              /* which one, from 0; a backend without devices ignores it */
  const char* instruction_set; /* of the CPU: "avx512", "avx2" or "portable"; NULL or "auto": the best */
  scope_run_tasks run_tasks;   /* runs the context's work; NULL: threads that the context starts and ends */
  void* run_tasks_pool;        /* its first argument */
} scope_context_options;

/* options: NULL is all defaults. SCOPE_ERROR_UNSUPPORTED for a backend that this build or machine does not have. */
SCOPE_API scope_status scope_context_create(const scope_context_options* options, scope_context** context);
SCOPE_API void scope_context_destroy(scope_context* context); /* NULL is fine; plans and states keep what they need alive */
/* What calls of this context run on: "avx512", "avx2" or "portable"; "sm_90" and the like on a GPU. */
SCOPE_API const char* scope_context_instruction_set(const scope_context* context);

/* ---- method -------------------------------------------------------------------------------------------------------- */

/* name: "scope", "scope-paper", "scope-exact", "svg2", "dense" and so on, as `scope methods` lists them; an unknown one is
 * refused with the list. */
SCOPE_API scope_status scope_method_create(const char* name, scope_method** method);
SCOPE_API void scope_method_destroy(scope_method* method);
/* One setting by name, for example ("rho", "0.9"); `scope methods` and docs/reference/settings.md list them.
 * scope_plan_create refuses one that would do nothing because of another setting. */
SCOPE_API scope_status scope_method_set(scope_method* method, const char* name, const char* value);
/* The same for a value that a program chose and not its user: it is never refused for doing nothing. */
SCOPE_API scope_status scope_method_set_default(scope_method* method, const char* name, const char* value);
/* The value as text with its terminator into buffer; *needed gets the length of both. A buffer of NULL and 0 only asks for
 * the length; one that is too small is refused and left alone. */
SCOPE_API scope_status scope_method_get(const scope_method* method, const char* name, char* buffer, size_t capacity,
                                        size_t* needed);
/* rho, schedule and dense layers of a known video model, for example "wan2.1-t2v-14b". */
SCOPE_API scope_status scope_method_apply_model(scope_method* method, const char* model);

/* The tables behind the names. index from 0; SCOPE_ERROR_INVALID_ARGUMENT past the end. The texts live as long as the
 * library. */
typedef struct scope_setting_info { /* defaults: scope_method_get of a new method */
  size_t struct_size;
  const char* name;
  const char* stage;  /* whose choice it is */
  const char* values; /* what it takes, for people */
  const char* help;
} scope_setting_info;
SCOPE_API scope_status scope_setting_at(int32_t index, scope_setting_info* info);

typedef struct scope_method_info { /* its settings: scope_method_create, then scope_method_get */
  size_t struct_size;
  const char* name;
  const char* help;
  int32_t shares_branches; /* 1: the CFG branches of a layer share one state */
  int32_t reserved;        /* 0 */
  int32_t morton;          /* 1: its blocks are meant for tokens in Morton order, which the caller sees to */
  int32_t reserved_2;      /* 0 */
} scope_method_info;
SCOPE_API scope_status scope_method_at(int32_t index, scope_method_info* info);

typedef struct scope_model_info { /* what it changes of a method: scope_method_apply_model, then scope_method_get */
  size_t struct_size;
  const char* name;
  const char* help;
  int64_t layers, heads, dim;
  int64_t rope[3]; /* channels along T, H, W, one range after the other; all 0: its heads have no such ranges */
  int64_t grid[3]; /* tokens along T, H, W at the usual size */
  int64_t steps;   /* of its usual schedule */
  double rho;
  double dense_steps;  /* share of the steps */
  int32_t warm_prefix; /* 1: its dense steps cluster */
  int32_t reserved;    /* 0 */
} scope_model_info;
SCOPE_API scope_status scope_model_at(int32_t index, scope_model_info* info);

/* A transformer, of which the caller says what it knows. */
typedef struct scope_model_query {
  size_t struct_size;
  const char* family;         /* how names of rows begin: "wan", "hunyuanvideo", "ltx-2"; NULL: any */
  int64_t layers, heads, dim; /* 0: not said */
  int64_t rope[3];            /* channels along T, H, W; all 0: not said */
  int32_t from_image;         /* 1: it makes videos from an image */
  int32_t experts;            /* transformers that share the steps, 2 in Wan2.2 A14B; 0 is 1 */
  int32_t nearest;            /* 1: where no row has the shape, take the one that is most alike */
  int32_t reserved;           /* 0 */
} scope_model_query;

typedef struct scope_model_answer {
  size_t struct_size;
  int32_t index;   /* for scope_model_at; -1: none */
  int32_t exact;   /* 1: the row has all that is said of layers, heads, dim and rope */
  const char* why; /* one sentence for people; it lasts until the next scope_model_fit on this thread */
} scope_model_answer;

/* Which known model's settings fit a transformer. Rows of its shape come first, then those of as many experts, then those
 * from an image or from text as asked, then the table's order. */
SCOPE_API scope_status scope_model_fit(const scope_model_query* query, scope_model_answer* answer);

/* ---- plan ---------------------------------------------------------------------------------------------------------- */

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
  size_t struct_size;
  int64_t workspace_bytes;
  int64_t state_bytes;  /* 0: the method keeps none */
  int64_t report_bytes; /* see scope_run_args.report */
  int64_t groups;       /* query groups; 0 for dense */
  int64_t codes;        /* codebook entries per subspace; 0 without encode */
  int64_t subspaces;
  int64_t selection_groups; /* rows of a selection: groups, plus 1 with dense_queries */
  int64_t mask_words;       /* 32-bit words of one mask row: ceil(k_tokens / 32) */
  const char* kernel;       /* of attend: "avx512", "avx2" or "portable"; "wgmma" or "portable" on a GPU */
  int32_t host_memory;      /* 1: tensors, workspaces and states are host memory; 0: the device's */
  int32_t reserved;         /* 0 */
} scope_plan_info;

SCOPE_API scope_status scope_plan_create(scope_context* context, const scope_method* method, const scope_shape* shape,
                                         scope_plan** plan);
SCOPE_API void scope_plan_destroy(scope_plan* plan);
SCOPE_API scope_status scope_plan_get_info(const scope_plan* plan, scope_plan_info* info);

/* What a call at this place would do, before it is made: *reason is a scope_reason; *clusters is 1 where a dense call with a
 * state clusters all the same (setting warm_prefix), so that a host with a dense kernel of its own can use it elsewhere.
 * Either may be NULL. layer, step and steps as in scope_run_args. */
SCOPE_API scope_status scope_plan_reason(const scope_plan* plan, int64_t layer, int64_t step, int64_t steps, int32_t* reason,
                                         int32_t* clusters);

/* ---- state --------------------------------------------------------------------------------------------------------- */

/* One per (layer, CFG branch), or per layer where the method shares branches: a handle over state_bytes of the caller's
 * memory (the device's on a GPU) at a multiple of 16, which it initialises, waiting for the copy on a GPU. The memory must
 * outlive it; plan and context need not. Calls with plans of the same shape and method may use it. */
SCOPE_API scope_status scope_state_create(const scope_plan* plan, void* memory, scope_state** state);
SCOPE_API void scope_state_destroy(scope_state* state); /* NULL is fine */
/* The next call clusters anew, as the first did: for the next video. */
SCOPE_API scope_status scope_state_reset(scope_state* state);
/* 1: calls have filled it, and the next one starts from it. */
SCOPE_API scope_status scope_state_filled(const scope_state* state, int32_t* filled);
/* A call that is captured in a graph fills nothing yet: once the graph has run, the host says so with 1. 0 is
 * scope_state_reset. */
SCOPE_API scope_status scope_state_set_filled(scope_state* state, int32_t filled);
/* Everything it holds as bytes of host memory, which a state of the same shape and method loads; both wait for `stream` (as
 * in scope_run_args). *needed gets the bytes; a buffer of NULL and 0 only asks for them, one that is too small is refused. A
 * load that is refused leaves the state as it was. */
SCOPE_API scope_status scope_state_save(const scope_state* state, void* stream, void* buffer, size_t capacity,
                                        size_t* needed);
SCOPE_API scope_status scope_state_load(scope_state* state, void* stream, const void* buffer, size_t bytes);

/* ---- calls --------------------------------------------------------------------------------------------------------- */

/* A tensor [batch, heads, tokens, dim] of the plan's shape and dtype; this struct never grows. Strides are in elements; the
 * last one is 1, so [batch, tokens, heads, dim] memory is {data, tokens*heads*dim, dim, heads*dim}. */
typedef struct scope_tensor {
  void* data;
  int64_t batch_stride, head_stride, token_stride;
} scope_tensor;

/* The selection format. Every pointer is optional; G = selection_groups, W = mask_words. Key j is bit j % 32 of word j / 32.
 * attend reads mask OR keep. Densely attending queries are the last group, its row all valid keys. */
typedef struct scope_selection {
  size_t struct_size;
  int32_t* labels;  /* [batch, heads, q_tokens] group of each query; -1: attends to nothing */
  int32_t* sizes;   /* [batch, heads, G] queries per group */
  int32_t* counts;  /* [batch, heads, G] keys per group = set bits of its mask row */
  uint32_t* mask;   /* [batch, heads, G, W] */
  uint32_t* keep;   /* [batch, W] keys that every query sees; their mask bits are 0 */
  float* centroids; /* [batch, heads, groups, dim] */
  float* codebooks; /* subspace after subspace: [batch, heads, codes, dim_m] */
  int32_t* codes;   /* [subspaces, batch, heads, k_tokens]; -1: not encoded */
} scope_selection;

/* In an array, every element is as long as the struct_size of the first. */
typedef struct scope_head_stats {
  size_t struct_size;
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
  size_t struct_size;
  int32_t reason;         /* a scope_reason: what ran, and why */
  int32_t warm;           /* 1: every sample started from its state, or reused it */
  int32_t iterations;     /* K-means iterations run */
  int32_t reserved;       /* 0 */
  const char* arithmetic; /* of attend's products: "f32", "bf16", "f16", or with 8 bits "s8+bf16", "s8+f16", "s8+e4m3" */
  double density, total_density; /* means over heads */
  double check_seconds, group_seconds, encode_seconds, score_seconds, select_seconds, attend_seconds, total_seconds;
} scope_call_stats;

/* Zero-initialise, set struct_size, and layer = step = -1 when there is no schedule. */
typedef struct scope_run_args {
  size_t struct_size;
  scope_tensor q, k, v;
  scope_tensor out;              /* may be q itself; shares no element with q otherwise, nor with anything else of the call.
                                    out.data == NULL: select only (v may be NULL too), or cluster only in a
                                    dense step (setting warm_prefix) */
  float* lse;                    /* [batch, heads, q_tokens] natural log-sum-exp; optional */
  float scale;                   /* of q k; 0: 1 / sqrt(dim) */
  int32_t reserved;              /* 0 */
  const int64_t* q_lengths;      /* [batch] queries from there on are padding (zeros out); NULL: none */
  const int64_t* k_lengths;      /* [batch] keys from there on are padding, attended by nobody; NULL: none */
  const uint32_t* valid_queries; /* [batch, ceil(q_tokens / 32)] 0: padding before the length too; NULL: none */
  const uint32_t* valid_keys;    /* [batch, W] 0: padding before the length too; NULL: none */
  const uint32_t* keep;          /* [batch, W] keys that every query sees (text); optional */
  const uint32_t* dense_queries; /* [batch, ceil(q_tokens / 32)] queries that see every valid key; optional */
  int64_t layer;                 /* this call's layer; -1: no layer schedule */
  int64_t step, steps;           /* this call's denoising step of `steps`; -1: no step schedule */
  scope_state* state;            /* NULL: every call is a first call */
  void* workspace;
  int64_t workspace_bytes;
  void* report; /* report_bytes at a multiple of 16 for what the call finds, where the workspace is; NULL:
                   in the workspace, until the next call with it */
  const scope_selection* selection; /* where to write the selection; optional */
  scope_call_stats* stats;          /* optional output */
  scope_head_stats* head_stats;     /* [batch, heads]; optional output */
  void* stream;                     /* GPU: the cudaStream_t of everything the call does; NULL: the legacy default stream */
} scope_run_args;

/* Calls on a GPU: q, k, v, out, lse, the state's memory, the workspace, the report and the selection are device memory with
 * 16-byte-aligned rows; lengths and bitmasks are host memory, read before the call returns. A call only enqueues work on
 * `stream`: it does not allocate, copy from the host or wait, and can be captured in a CUDA graph (a first call and one that
 * starts from its state are different graphs). head_stats must be NULL; densities and times in *stats are NaN until
 * scope_read_stats or scope_report_read. */

/* One attention call: group, encode, score, select, attend; or dense where method or schedule say so. */
SCOPE_API scope_status scope_run(scope_plan* plan, const scope_run_args* args);

/* attend alone, on a selection from anywhere: args->selection's labels and mask (and keep, optional) are read. Labels out of
 * range and bits of padding are refused on the CPU; on a GPU such queries attend to nothing and such bits are dropped. The
 * state, schedule, keep, dense_queries, report and statistics of args are ignored. */
SCOPE_API scope_status scope_run_selection(scope_plan* plan, const scope_run_args* args);

/* What the last call with this plan, workspace (or report) and stream found: waits for the stream, completes *stats (which
 * that call filled; its times too, unless it was captured or replayed) and fills head_stats. Reports what a GPU call could
 * only discover: SCOPE_ERROR_NON_FINITE, or SCOPE_ERROR_INVALID_ARGUMENT for a warm call on an unfilled state. */
SCOPE_API scope_status scope_read_stats(scope_plan* plan, const scope_run_args* args);

/* The same, but for times, from a report that was copied to host memory: the reports of many calls need one wait. *stats as
 * its call filled it; it and head_stats [batch, heads] may be NULL. */
SCOPE_API scope_status scope_report_read(const scope_plan* plan, const void* report, scope_call_stats* stats,
                                         scope_head_stats* head_stats);

/* k_head = ceil(sum sizes[c] base_counts[c] / sum sizes[c]): the online per-head budget, from any proxy's base counts. */
SCOPE_API scope_status scope_head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups, int64_t* k_head);

#ifdef __cplusplus
}
#endif

#endif
