// The C ABI: checks pointers, translates structs and exceptions, and nothing else.
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "capi/structs.h"
#include "capi/translate.h"
#include "core/built_from.h"
#include "methods/effects.h"
#include "stages/backends.h"

using scope::Error;
using scope::fail;
using scope::require;
using scope::Status;
using namespace scope::capi;

namespace {

// A context is shared by its plans and states, so destroying the handle first is safe.
struct SharedContext {
  scope::Context context;
  pid_t process = getpid();
  std::atomic_flag busy;
};

std::shared_ptr<SharedContext> share(const scope::ContextOptions& options) {
  // In a forked child the threads to be joined do not exist: the memory stays with the process.
  return {new SharedContext{.context = scope::Context(options), .busy = {}}, [](SharedContext* shared) {
            if (shared->process == getpid()) delete shared;
          }};
}

}  // namespace

struct scope_context {
  std::shared_ptr<SharedContext> shared;
};

struct scope_method {
  scope::Settings settings;
  std::map<std::string, std::string> given = {};  // what the caller set, by name: refused if nothing reads it
};

struct scope_plan {
  std::shared_ptr<SharedContext> shared;
  scope::Plan plan;
};

struct scope_state {
  std::shared_ptr<SharedContext> shared;
  scope::State state;
  mutable std::atomic_flag busy;
};

namespace {

// Of a fixed size, cut where it is longer: telling of a lack of memory must not need any, and neither must a thread's end.
thread_local char last_error[4096];

thread_local char last_fit[1024];

template <size_t size>
void keep_text(const char* text, char (&to)[size]) {
  const size_t length = std::min(std::strlen(text), size - 1);
  std::memcpy(to, text, length);
  to[length] = '\0';
}

scope_status failed(Status status, const char* text) {
  keep_text(text, last_error);
  return static_cast<scope_status>(status);
}

// The one place where exceptions become status codes.
template <class Body>
scope_status guarded(Body body) noexcept {
  try {
    body();
    return SCOPE_OK;
  } catch (const Error& error) {
    return failed(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(Status::out_of_memory, "out of memory");
  } catch (const std::exception& error) {
    return failed(Status::internal, error.what());
  } catch (...) {
    return failed(Status::internal, "unknown error");
  }
}

void need(const void* pointer, const char* name) {
  require(pointer != nullptr, Status::invalid_argument, "{}: got null, expected a pointer", name);
}

// A context, plan or state that this process made.
template <class Handle>
void need_handle(const Handle* handle, const char* name) {
  need(handle, name);
  require(handle->shared->process == getpid(), Status::unsupported,
          "{}: it was made before fork(), and its threads are the parent's; make one in this process", name);
}

template <class Row, class Info>
void read_row(std::span<const Row> table, int32_t index, Info* to, Info (*from)(const Row&)) {
  struct_size(to, "info");
  require(index >= 0 && index < static_cast<int32_t>(table.size()), Status::invalid_argument,
          "index: got {}, expected 0..{}", index, table.size() - 1);
  write_struct(from(table[static_cast<size_t>(index)]), to);
}

// One call at a time on a context, whose threads are not shared, and on a state.
class Busy {
 public:
  Busy(std::atomic_flag& flag, const char* message) : flag_(flag) {
    if (flag_.test_and_set()) fail(Status::busy, "{}", message);
  }
  explicit Busy(const scope_plan& plan) : Busy(plan.shared->busy, "plan: another call is running on it or on its context") {}
  explicit Busy(const scope_state& state) : Busy(state.busy, "state: another call is using it") {}
  ~Busy() { flag_.clear(); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  std::atomic_flag& flag_;
};

// A caller's statistics: their sizes are checked before a call, and they are written after it.
class Statistics {
 public:
  Statistics(const scope::Plan& plan, scope_call_stats* stats, scope_head_stats* heads) : stats_(stats), heads_(heads) {
    if (stats != nullptr) struct_size(stats, "stats");
    if (heads == nullptr) return;
    struct_size(heads, "head_stats");
    of_heads_.resize(static_cast<size_t>(plan.shape.batch * plan.shape.heads));
  }
  // As the call that is asked about filled them.
  void read() {
    if (stats_ == nullptr) return;
    scope_call_stats before{};
    std::memcpy(&before, stats_, std::min(stats_->struct_size, sizeof before));
    of_call_ = to_stats(before);
  }
  scope::CallStats* stats() { return stats_ == nullptr ? nullptr : &of_call_; }
  scope::HeadStats* heads() { return heads_ == nullptr ? nullptr : of_heads_.data(); }
  void write() const {
    if (stats_ != nullptr) write_struct(from_stats(of_call_), stats_);
    for (size_t i = 0; i < of_heads_.size(); ++i) write_element(from_stats(of_heads_[i]), heads_, i);
  }

 private:
  scope_call_stats* stats_;
  scope_head_stats* heads_;
  scope::CallStats of_call_;
  std::vector<scope::HeadStats> of_heads_;
};

// Runs `body` with everything of a call but its selection, while no other call uses the plan or the state.
template <class Body>
void with_call(scope_plan* plan, const scope_run_args& from, Statistics& statistics, Body body) {
  const Busy busy(*plan);
  scope::CallArgs call = to_args(plan->plan, from);
  call.stats = statistics.stats();
  call.head_stats = statistics.heads();
  if (from.state == nullptr) {
    body(call);
  } else {
    need_handle(from.state, "state");
    const Busy state_busy(*from.state);
    call.state = &from.state->state;
    body(call);
  }
  statistics.write();
}

}  // namespace

extern "C" {

#define SCOPE_TEXT_(x) #x
#define SCOPE_TEXT(x) SCOPE_TEXT_(x)
const char* scope_version(void) {
  return SCOPE_TEXT(SCOPE_VERSION_MAJOR) "." SCOPE_TEXT(SCOPE_VERSION_MINOR) "." SCOPE_TEXT(SCOPE_VERSION_PATCH);
}

const char* scope_commit(void) { return scope::built_from(); }

const char* scope_status_name(scope_status status) {
  static const char* const kNames[] = {"ok",          "invalid argument", "shape",     "dtype",         "alignment",
                                       "unsupported", "size limit",       "workspace", "out of memory", "non-finite",
                                       "I/O",         "format",           "busy",      "device",        "device lost",
                                       "internal"};
  return status >= SCOPE_OK && status <= SCOPE_ERROR_INTERNAL ? kNames[status] : "unknown status";
}

const char* scope_last_error(void) { return last_error; }

int32_t scope_supports(const char* backend, int32_t dtype, int64_t dim) {
  if (backend == nullptr || dtype < SCOPE_F32 || dtype > SCOPE_BF16 || dim < 1) return 0;
  try {
    for (const scope::Backend* each : scope::backends()) {
      const scope::Capabilities& can = each->can;
      if (std::strcmp(backend, each->name) != 0) continue;
      const bool takes =
          can.dtypes.has(static_cast<scope::DType>(dtype)) && dim <= can.most_dim && dim % can.dim_multiple == 0;
      return takes && each->present() ? 1 : 0;
    }
  } catch (...) {  // no memory to look: nothing is supported
  }
  return 0;
}

scope_status scope_context_create(const scope_context_options* options, scope_context** context) {
  return guarded([&] {
    need(context, "context");
    *context =
        new scope_context{share(options == nullptr ? scope::ContextOptions{} : to_options(read_struct(options, "options")))};
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
    scope_method next = *method;  // what cannot be set whole is not set at all
    scope::set_setting(next.settings, name, value);
    next.given[name] = scope::get_setting(next.settings, name);
    *method = std::move(next);
  });
}

scope_status scope_method_set_default(scope_method* method, const char* name, const char* value) {
  return guarded([&] {
    need(method, "method");
    need(name, "name");
    need(value, "value");
    scope_method next = *method;
    scope::set_setting(next.settings, name, value);
    next.given.erase(name);
    *method = std::move(next);
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
    scope::Settings next = method->settings;
    scope::apply_model(scope::find_model(model), next);
    method->settings = std::move(next);
  });
}

scope_status scope_setting_at(int32_t index, scope_setting_info* info) {
  return guarded([&] { read_row(scope::settings_table(), index, info, from_setting); });
}

scope_status scope_method_at(int32_t index, scope_method_info* info) {
  return guarded([&] { read_row(scope::methods_table(), index, info, from_method); });
}

scope_status scope_model_at(int32_t index, scope_model_info* info) {
  return guarded([&] { read_row(scope::models_table(), index, info, from_model); });
}

scope_status scope_model_fit(const scope_model_query* query, scope_model_answer* answer) {
  return guarded([&] {
    struct_size(answer, "answer");
    const scope::ModelFit fit = scope::fit_model(to_query(read_struct(query, "query")));
    keep_text(fit.why.c_str(), last_fit);
    scope_model_answer out{};
    out.index = fit.model == nullptr ? -1 : static_cast<int32_t>(fit.model - scope::models_table().data());
    out.exact = fit.exact ? 1 : 0;
    out.why = last_fit;
    write_struct(out, answer);
  });
}

scope_status scope_plan_create(scope_context* context, const scope_method* method, const scope_shape* shape,
                               scope_plan** plan) {
  return guarded([&] {
    need_handle(context, "context");
    need(method, "method");
    need(plan, "plan");
    const scope::Shape sizes = to_shape(read_struct(shape, "shape"));
    scope::refuse_idle(method->settings, method->given);
    *plan = new scope_plan{context->shared, scope::Plan(context->shared->context, method->settings, sizes)};
  });
}

void scope_plan_destroy(scope_plan* plan) { delete plan; }

scope_status scope_plan_get_info(const scope_plan* plan, scope_plan_info* info) {
  return guarded([&] {
    need_handle(plan, "plan");
    struct_size(info, "info");
    write_struct(from_plan(plan->plan), info);
  });
}

scope_status scope_plan_reason(const scope_plan* plan, int64_t layer, int64_t step, int64_t steps, int32_t* reason,
                               int32_t* clusters) {
  return guarded([&] {
    need_handle(plan, "plan");
    const scope::Settings& settings = plan->plan.settings;
    const scope::Reason found = scope::schedule(settings, {layer, step, steps});
    if (reason != nullptr) *reason = static_cast<int32_t>(found);
    if (clusters != nullptr) *clusters = scope::clusters_in_prefix(settings, found) ? 1 : 0;
  });
}

scope_status scope_state_create(const scope_plan* plan, void* memory, scope_state** state) {
  return guarded([&] {
    need_handle(plan, "plan");
    need(memory, "memory");
    need(state, "state");
    require(reinterpret_cast<uintptr_t>(memory) % 16 == 0, Status::alignment, "memory: address {} is not a multiple of 16",
            memory);
    require(plan->plan.state_bytes > 0, Status::invalid_argument, "plan: its method keeps no state");
    *state = new scope_state{plan->shared, scope::State(plan->plan, memory), {}};
  });
}

void scope_state_destroy(scope_state* state) { delete state; }

scope_status scope_state_reset(scope_state* state) { return scope_state_set_filled(state, 0); }

scope_status scope_state_filled(const scope_state* state, int32_t* filled) {
  return guarded([&] {
    need_handle(state, "state");
    need(filled, "filled");
    const Busy busy(*state);
    *filled = state->state.filled() ? 1 : 0;
  });
}

scope_status scope_state_set_filled(scope_state* state, int32_t filled) {
  return guarded([&] {
    need_handle(state, "state");
    const Busy busy(*state);
    state->state.set_filled(filled != 0);
  });
}

scope_status scope_state_save(const scope_state* state, void* stream, void* buffer, size_t capacity, size_t* needed) {
  return guarded([&] {
    need_handle(state, "state");
    const Busy busy(*state);
    const auto bytes = static_cast<size_t>(state->state.bytes());
    if (needed != nullptr) *needed = bytes;
    if (buffer == nullptr && capacity == 0) return;
    need(buffer, "buffer");
    require(capacity >= bytes, Status::invalid_argument, "capacity: got {}, the state needs {}", capacity, bytes);
    state->state.save(stream, static_cast<std::byte*>(buffer));
  });
}

scope_status scope_state_load(scope_state* state, void* stream, const void* buffer, size_t bytes) {
  return guarded([&] {
    need_handle(state, "state");
    need(buffer, "buffer");
    const Busy busy(*state);
    state->state.load(stream, {static_cast<const std::byte*>(buffer), bytes});
  });
}

scope_status scope_run(scope_plan* plan, const scope_run_args* args) {
  return guarded([&] {
    need_handle(plan, "plan");
    const scope_run_args from = read_struct(args, "args");
    Statistics statistics(plan->plan, from.stats, from.head_stats);
    with_call(plan, from, statistics, [&](scope::CallArgs& call) {
      if (from.selection != nullptr) call.selection = to_selection(read_struct(from.selection, "selection"));
      scope::call(plan->plan, call);
    });
  });
}

scope_status scope_read_stats(scope_plan* plan, const scope_run_args* args) {
  return guarded([&] {
    need_handle(plan, "plan");
    const scope_run_args from = read_struct(args, "args");
    Statistics statistics(plan->plan, from.stats, from.head_stats);
    statistics.read();
    with_call(plan, from, statistics, [&](scope::CallArgs& call) { scope::read_stats(plan->plan, call); });
  });
}

scope_status scope_report_read(const scope_plan* plan, const void* report, scope_call_stats* stats,
                               scope_head_stats* head_stats) {
  return guarded([&] {
    need_handle(plan, "plan");
    need(report, "report");
    Statistics statistics(plan->plan, stats, head_stats);
    statistics.read();
    scope::read_report(plan->plan, report, statistics.stats(), statistics.heads());
    statistics.write();
  });
}

scope_status scope_run_selection(scope_plan* plan, const scope_run_args* args) {
  return guarded([&] {
    need_handle(plan, "plan");
    scope_run_args from = read_struct(args, "args");
    const scope_selection selection = read_struct(from.selection, "selection");
    from.state = nullptr;
    from.keep = from.dense_queries = nullptr;
    from.report = nullptr;
    Statistics none(plan->plan, nullptr, nullptr);
    with_call(plan, from, none, [&](scope::CallArgs& call) {
      scope::attend_selected(plan->plan, call, {selection.labels, selection.mask, selection.keep});
    });
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
