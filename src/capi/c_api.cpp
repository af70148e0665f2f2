// The C ABI: checks pointers, translates structs and exceptions, and nothing else.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "cuda/device.h"
#include "methods/methods.h"
#include "methods/models.h"
#include "pipeline/call.h"
#include "scope/scope.h"

using scope::Error;
using scope::fail;
using scope::require;
using scope::Status;

static_assert(static_cast<int>(Status::invalid_argument) == SCOPE_ERROR_INVALID_ARGUMENT);
static_assert(static_cast<int>(Status::non_finite) == SCOPE_ERROR_NON_FINITE);
static_assert(static_cast<int>(Status::internal) == SCOPE_ERROR_INTERNAL);
static_assert(static_cast<int>(scope::DType::bf16) == SCOPE_BF16 && static_cast<int>(scope::DType::f16) == SCOPE_F16);
static_assert(static_cast<int>(scope::Reason::nothing_to_select) == SCOPE_RAN_DENSE_NOTHING);

namespace {

// A context is shared by its plans, so destroying the handle first is safe.
struct SharedContext {
  explicit SharedContext(scope::Context made) : context(std::move(made)) {}
  scope::Context context;
  std::atomic_flag busy;
};

}  // namespace

struct scope_context {
  std::shared_ptr<SharedContext> shared;
};

struct scope_method {
  scope::Settings settings;
};

struct scope_plan {
  std::shared_ptr<SharedContext> shared;
  scope::Plan plan;
};

namespace {

thread_local std::string last_error;

// The one place where exceptions become status codes.
template <class Body>
scope_status guarded(Body body) noexcept {
  Status status = Status::internal;
  const char* text = "unknown error";
  try {
    try {
      body();
      return SCOPE_OK;
    } catch (const Error& error) {
      status = error.status();
      last_error = error.what();
      return static_cast<scope_status>(status);
    } catch (const std::bad_alloc&) {
      status = Status::out_of_memory;
      text = "out of memory";
    } catch (const std::exception& error) {
      last_error = error.what();
      return SCOPE_ERROR_INTERNAL;
    }
    last_error = text;
  } catch (...) {  // even the message could not be kept
  }
  return static_cast<scope_status>(status);
}

void need(const void* pointer, const char* name) {
  require(pointer != nullptr, Status::invalid_argument, "{}: got null, expected a pointer", name);
}

// A struct begins with its own size, so that a caller built against an older header is recognised.
template <class T>
void need_struct(const T* value, const char* name) {
  need(value, name);
  require(value->struct_size == sizeof(T), Status::invalid_argument, "{}.struct_size: got {}, expected {} (sizeof it)", name,
          value->struct_size, sizeof(T));
}

// One call at a time on a context: its threads are not shared.
class Busy {
 public:
  explicit Busy(std::atomic_flag& flag) : flag_(flag) {
    if (flag_.test_and_set()) fail(Status::busy, "plan: another call is running on it or on its context");
  }
  ~Busy() { flag_.clear(); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  std::atomic_flag& flag_;
};

scope::DType to_dtype(int32_t dtype) {
  require(dtype >= SCOPE_F32 && dtype <= SCOPE_BF16, Status::dtype,
          "dtype: got {}, expected SCOPE_F32, SCOPE_F16 or SCOPE_BF16", dtype);
  return static_cast<scope::DType>(dtype);
}

scope::Shape to_shape(const scope_shape& from) {
  scope::Shape shape{.batch = from.batch,
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

template <class View>
View to_view(const scope_tensor& from, const scope::Shape& shape, int64_t tokens) {
  return {from.data, shape.dtype,       shape.batch,      shape.heads,      tokens,
          shape.dim, from.batch_stride, from.head_stride, from.token_stride};
}

scope::CallArgs to_args(const scope::Plan& plan, const scope_run_args& from) {
  const scope::Shape& shape = plan.shape;
  scope::CallArgs args;
  args.q = to_view<scope::TensorView>(from.q, shape, shape.q_tokens);
  args.k = to_view<scope::TensorView>(from.k, shape, shape.k_tokens);
  args.v = to_view<scope::TensorView>(from.v, shape, shape.k_tokens);
  args.out = to_view<scope::MutableTensorView>(from.out, shape, shape.q_tokens);
  args.lse = from.lse;
  args.q_lengths = from.q_lengths;
  args.k_lengths = from.k_lengths;
  args.keep = from.keep;
  args.dense_queries = from.dense_queries;
  args.place = {from.layer, from.step, from.steps};
  args.state = from.state;
  require(from.reserved == 0, Status::invalid_argument, "reserved: got {}, expected 0", from.reserved);
  require(from.start >= SCOPE_START_AUTO && from.start <= SCOPE_START_WARM, Status::invalid_argument,
          "start: got {}, expected SCOPE_START_AUTO, _FIRST or _WARM", from.start);
  args.start = static_cast<scope::Start>(from.start);
  args.stream = from.stream;
  args.workspace = from.workspace;
  args.workspace_bytes = from.workspace_bytes;
  return args;
}

void require_aligned(const void* state) {
  require(reinterpret_cast<uintptr_t>(state) % 16 == 0, Status::alignment, "state: address {} is not a multiple of 16",
          state);
}

scope_call_stats to_stats(const scope::CallStats& s) {
  return {.reason = static_cast<scope_reason>(s.reason),
          .warm = s.warm ? 1 : 0,
          .iterations = s.iterations,
          .bf16_dots = std::strcmp(s.arithmetic, "bf16") == 0 ? 1 : 0,
          .density = s.density,
          .total_density = s.total_density,
          .check_seconds = s.check,
          .group_seconds = s.group,
          .encode_seconds = s.encode,
          .score_seconds = s.score,
          .select_seconds = s.select,
          .attend_seconds = s.attend,
          .total_seconds = s.total};
}

scope::CallStats from_stats(const scope_call_stats& s) {
  scope::CallStats stats;
  stats.reason = static_cast<scope::Reason>(s.reason);
  stats.warm = s.warm != 0;
  stats.iterations = s.iterations;
  stats.arithmetic = s.bf16_dots != 0 ? "bf16" : "";
  stats.density = s.density;
  stats.total_density = s.total_density;
  stats.check = s.check_seconds;
  stats.group = s.group_seconds;
  stats.encode = s.encode_seconds;
  stats.score = s.score_seconds;
  stats.select = s.select_seconds;
  stats.attend = s.attend_seconds;
  stats.total = s.total_seconds;
  return stats;
}

std::vector<scope::HeadStats> make_heads(const scope_plan& plan, const scope_run_args& args) {
  const scope::Shape& shape = plan.plan.shape;
  return std::vector<scope::HeadStats>(args.head_stats == nullptr ? 0 : static_cast<size_t>(shape.batch * shape.heads));
}

scope_head_stats to_stats(const scope::HeadStats& h) {
  return {.density = h.density,
          .total_density = h.total_density,
          .rho = h.rho,
          .alpha = h.alpha,
          .k_head = h.head_budget,
          .queries = h.queries,
          .keys = h.keys,
          .groups = h.groups,
          .codes = h.codes,
          .empty_groups = h.empty_groups,
          .empty_codes = h.empty_codes,
          .min_count = h.min_count,
          .max_count = h.max_count};
}

}  // namespace

extern "C" {

const char* scope_version(void) { return "0.1.0"; }

const char* scope_status_name(scope_status status) {
  static const char* const kNames[] = {"ok",          "invalid argument", "shape",     "dtype",         "alignment",
                                       "unsupported", "size limit",       "workspace", "out of memory", "non-finite",
                                       "I/O",         "format",           "busy",      "device",        "device lost",
                                       "internal"};
  return status >= SCOPE_OK && status <= SCOPE_ERROR_INTERNAL ? kNames[status] : "unknown status";
}

const char* scope_last_error(void) { return last_error.c_str(); }

int32_t scope_supports(const char* backend, int32_t dtype, int64_t dim) {
  if (backend == nullptr || dtype < SCOPE_F32 || dtype > SCOPE_BF16 || dim < 1) return 0;
  if (std::strcmp(backend, "cpu") == 0) return dim <= 256 ? 1 : 0;
  if (std::strcmp(backend, "cuda") != 0 || dtype == SCOPE_F32 || dim > 128 || dim % 8 != 0) return 0;
  try {
    for (const auto& device : scope::cuda::devices()) {
      if (device.major >= 8) return 1;
    }
  } catch (...) {  // no memory for the list: nothing is supported
  }
  return 0;
}

scope_status scope_context_create(int32_t threads, const char* instruction_set, scope_context** context) {
  return guarded([&] {
    need(context, "context");
    auto shared =
        std::make_shared<SharedContext>(scope::Context(threads, instruction_set == nullptr ? "auto" : instruction_set));
    *context = new scope_context{std::move(shared)};
  });
}

scope_status scope_context_create_cuda(int32_t device, scope_context** context) {
  return guarded([&] {
    need(context, "context");
    *context = new scope_context{std::make_shared<SharedContext>(scope::Context::on_gpu(device, 1))};
  });
}

void scope_context_destroy(scope_context* context) { delete context; }

const char* scope_context_instruction_set(const scope_context* context) {
  return context == nullptr ? "" : context->shared->context.instruction_set().c_str();
}

scope_status scope_method_create(const char* name, scope_method** method) {
  return guarded([&] {
    need(name, "name");
    need(method, "method");
    *method = new scope_method{scope::find_method(name).settings()};
  });
}

void scope_method_destroy(scope_method* method) { delete method; }

scope_status scope_method_set(scope_method* method, const char* name, const char* value) {
  return guarded([&] {
    need(method, "method");
    need(name, "name");
    need(value, "value");
    scope::set_setting(method->settings, name, value);
  });
}

scope_status scope_method_get(const scope_method* method, const char* name, char* buffer, size_t capacity, size_t* needed) {
  return guarded([&] {
    need(method, "method");
    need(name, "name");
    const std::string text = scope::get_setting(method->settings, name);
    if (needed != nullptr) *needed = text.size() + 1;
    if (buffer == nullptr && capacity == 0) return;
    need(buffer, "buffer");
    require(capacity > text.size(), Status::invalid_argument, "capacity: got {}, \"{}\" needs {}", capacity, name,
            text.size() + 1);
    std::memcpy(buffer, text.c_str(), text.size() + 1);
  });
}

scope_status scope_method_apply_model(scope_method* method, const char* model) {
  return guarded([&] {
    need(method, "method");
    need(model, "model");
    scope::apply_model(scope::find_model(model), method->settings);
  });
}

scope_status scope_setting_at(int32_t index, scope_setting_info* info) {
  return guarded([&] {
    need(info, "info");
    const auto table = scope::settings_table();
    require(index >= 0 && index < static_cast<int32_t>(table.size()), Status::invalid_argument,
            "index: got {}, expected 0..{}", index, table.size() - 1);
    const scope::Setting& setting = table[static_cast<size_t>(index)];
    *info = {setting.name, setting.stage, setting.values, setting.help};
  });
}

scope_status scope_plan_create(scope_context* context, const scope_method* method, const scope_shape* shape,
                               scope_plan** plan) {
  return guarded([&] {
    need(context, "context");
    need(method, "method");
    need_struct(shape, "shape");
    need(plan, "plan");
    *plan = new scope_plan{context->shared, scope::Plan(context->shared->context, method->settings, to_shape(*shape))};
  });
}

void scope_plan_destroy(scope_plan* plan) { delete plan; }

scope_status scope_plan_get_info(const scope_plan* plan, scope_plan_info* info) {
  return guarded([&] {
    need(plan, "plan");
    need_struct(info, "info");
    const scope::Plan& p = plan->plan;
    *info = {sizeof(scope_plan_info),
             p.workspace_bytes,
             p.state_bytes,
             p.groups,
             p.codes,
             static_cast<int64_t>(p.partition.size()),
             p.selection_groups,
             scope::mask_words(p.shape.k_tokens),
             p.kernel()};
  });
}

scope_status scope_state_init(const scope_plan* plan, void* state) {
  return guarded([&] {
    need(plan, "plan");
    need(state, "state");
    require_aligned(state);
    require(plan->plan.state_bytes > 0, Status::invalid_argument, "plan: method dense keeps no state");
    scope::init_state(plan->plan, state);
  });
}

scope_status scope_run(scope_plan* plan, const scope_run_args* args) {
  return guarded([&] {
    need(plan, "plan");
    need_struct(args, "args");
    const Busy busy(plan->shared->busy);
    require_aligned(args->state);
    scope::CallArgs call = to_args(plan->plan, *args);
    const scope_selection& s = args->selection;
    call.selection = {s.labels, s.sizes, s.counts, s.mask, s.keep, s.centroids, s.codebooks, s.codes};
    scope::CallStats stats;
    std::vector<scope::HeadStats> heads = make_heads(*plan, *args);
    call.stats = args->stats == nullptr ? nullptr : &stats;
    call.head_stats = heads.empty() ? nullptr : heads.data();
    scope::call(plan->plan, call);
    if (args->stats != nullptr) *args->stats = to_stats(stats);
    for (size_t i = 0; i < heads.size(); ++i) args->head_stats[i] = to_stats(heads[i]);
  });
}

scope_status scope_read_stats(scope_plan* plan, const scope_run_args* args) {
  return guarded([&] {
    need(plan, "plan");
    need_struct(args, "args");
    const Busy busy(plan->shared->busy);
    scope::CallArgs call = to_args(plan->plan, *args);
    scope::CallStats stats;
    std::vector<scope::HeadStats> heads = make_heads(*plan, *args);
    if (args->stats != nullptr) {
      stats = from_stats(*args->stats);
      call.stats = &stats;
    }
    call.head_stats = heads.empty() ? nullptr : heads.data();
    scope::read_stats(plan->plan, call);
    if (args->stats != nullptr) *args->stats = to_stats(stats);
    for (size_t i = 0; i < heads.size(); ++i) args->head_stats[i] = to_stats(heads[i]);
  });
}

scope_status scope_run_selection(scope_plan* plan, const scope_run_args* args) {
  return guarded([&] {
    need(plan, "plan");
    need_struct(args, "args");
    const Busy busy(plan->shared->busy);
    const scope_selection& s = args->selection;
    scope::CallArgs call = to_args(plan->plan, *args);
    call.state = nullptr;
    call.keep = call.dense_queries = nullptr;
    scope::attend_selected(plan->plan, call, {s.labels, s.mask, s.keep});
  });
}

scope_status scope_head_budget(const int32_t* sizes, const int32_t* base_counts, int64_t groups, int64_t* k_head) {
  return guarded([&] {
    need(k_head, "k_head");
    require(groups >= 0, Status::invalid_argument, "groups: got {}, expected >= 0", groups);
    if (groups > 0) {
      need(sizes, "sizes");
      need(base_counts, "base_counts");
    }
    for (int64_t c = 0; c < groups; ++c) {
      require(sizes[c] >= 0 && base_counts[c] >= 0, Status::invalid_argument,
              "sizes[{0}], base_counts[{0}]: got {1} and {2}, expected >= 0", c, sizes[c], base_counts[c]);
    }
    *k_head = scope::head_budget(sizes, base_counts, groups);
  });
}

}  // extern "C"
