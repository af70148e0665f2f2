// The C++ face of scope.h: handles that clean up after themselves and errors as exceptions; header-only.
#pragma once

#include <scope/scope.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace scope_attn {

class Error : public std::runtime_error {
 public:
  Error(scope_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  scope_status status() const { return status_; }

 private:
  scope_status status_;
};

inline void check(scope_status status) {
  if (status != SCOPE_OK) throw Error(status, scope_last_error());
}

class Context {
 public:
  // On the CPU.
  explicit Context(int threads = 0, const char* instruction_set = nullptr) {
    scope_context_options options{};
    options.struct_size = sizeof options;
    options.threads = threads;
    options.instruction_set = instruction_set;
    create(options);
  }
  explicit Context(const scope_context_options& options) { create(options); }
  static Context on_gpu(int device = 0) {
    scope_context_options options{};
    options.struct_size = sizeof options;
    options.backend = "cuda";
    options.threads = 1;
    options.device = device;
    return Context(options);
  }
  scope_context* handle() const { return handle_.get(); }
  std::string instruction_set() const { return scope_context_instruction_set(handle()); }

 private:
  struct Destroy {
    void operator()(scope_context* context) const { scope_context_destroy(context); }
  };
  void create(const scope_context_options& options) {
    scope_context* made = nullptr;
    check(scope_context_create(&options, &made));
    handle_.reset(made);
  }
  std::unique_ptr<scope_context, Destroy> handle_;
};

class Method {
 public:
  explicit Method(const char* name = "scope") {
    scope_method* made = nullptr;
    check(scope_method_create(name, &made));
    handle_.reset(made);
  }
  // Each can be chained, and a chain on a new method kept: auto method = Method("scope-mean").set("target_density", "0.2");
  Method& set(const std::string& name, const std::string& value) & {
    check(scope_method_set(handle(), name.c_str(), value.c_str()));
    return *this;
  }
  Method& set_default(const std::string& name, const std::string& value) & {
    check(scope_method_set_default(handle(), name.c_str(), value.c_str()));
    return *this;
  }
  Method& model(const std::string& name) & {
    check(scope_method_apply_model(handle(), name.c_str()));
    return *this;
  }
  Method&& set(const std::string& name, const std::string& value) && { return std::move(set(name, value)); }
  Method&& set_default(const std::string& name, const std::string& value) && { return std::move(set_default(name, value)); }
  Method&& model(const std::string& name) && { return std::move(model(name)); }
  std::string get(const std::string& name) const {
    size_t needed = 0;
    check(scope_method_get(handle(), name.c_str(), nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(scope_method_get(handle(), name.c_str(), text.data(), needed, nullptr));
    text.pop_back();
    return text;
  }
  scope_method* handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(scope_method* method) const { scope_method_destroy(method); }
  };
  std::unique_ptr<scope_method, Destroy> handle_;
};

// scope_shape with its size set: fill in the rest.
inline scope_shape make_shape() {
  scope_shape shape{};
  shape.struct_size = sizeof shape;
  shape.batch = shape.heads = 1;
  return shape;
}

// scope_run_args with its size set and no schedule.
inline scope_run_args make_args() {
  scope_run_args args{};
  args.struct_size = sizeof args;
  args.layer = args.step = -1;
  return args;
}

// Structs that calls fill or read, with their sizes set.
inline scope_selection make_selection() {
  scope_selection selection{};
  selection.struct_size = sizeof selection;
  return selection;
}
inline scope_call_stats make_stats() {
  scope_call_stats stats{};
  stats.struct_size = sizeof stats;
  return stats;
}
inline std::vector<scope_head_stats> make_head_stats(int64_t batch, int64_t heads) {
  std::vector<scope_head_stats> stats(static_cast<size_t>(batch * heads));
  for (scope_head_stats& head : stats) head.struct_size = sizeof head;
  return stats;
}

// [batch, heads, tokens, dim] and [batch, tokens, heads, dim] memory without gaps.
inline scope_tensor head_major(const void* data, int64_t heads, int64_t tokens, int64_t dim) {
  return {const_cast<void*>(data), heads * tokens * dim, tokens * dim, dim};
}
inline scope_tensor token_major(const void* data, int64_t heads, int64_t tokens, int64_t dim) {
  return {const_cast<void*>(data), tokens * heads * dim, dim, heads * dim};
}

// Why a call runs as it does, and whether a dense one clusters all the same.
struct Reason {
  scope_reason reason;
  bool clusters;
};

class Plan {
 public:
  Plan(const Context& context, const Method& method, const scope_shape& shape) {
    scope_plan* made = nullptr;
    check(scope_plan_create(context.handle(), method.handle(), &shape, &made));
    handle_.reset(made);
    info_.struct_size = sizeof info_;
    check(scope_plan_get_info(handle(), &info_));
  }
  const scope_plan_info& info() const { return info_; }
  Reason reason(int64_t layer, int64_t step, int64_t steps) const {
    int32_t reason = 0, clusters = 0;
    check(scope_plan_reason(handle(), layer, step, steps, &reason, &clusters));
    return {static_cast<scope_reason>(reason), clusters != 0};
  }
  // Uses a host workspace of its own when the arguments bring none; a GPU call must bring device memory, and is refused
  // without.
  void run(scope_run_args args) {
    bring_workspace(args);
    check(scope_run(handle(), &args));
  }
  void run_selection(scope_run_args args) {
    bring_workspace(args);
    check(scope_run_selection(handle(), &args));
  }
  // After calls on a GPU: waits for args.stream and completes the statistics.
  void read_stats(const scope_run_args& args) { check(scope_read_stats(handle(), &args)); }
  void read_report(const void* report, scope_call_stats* stats, scope_head_stats* heads = nullptr) const {
    check(scope_report_read(handle(), report, stats, heads));
  }
  scope_plan* handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(scope_plan* plan) const { scope_plan_destroy(plan); }
  };
  void bring_workspace(scope_run_args& args) {
    if (args.workspace != nullptr || info_.host_memory == 0) return;
    workspace_.resize(static_cast<size_t>(info_.workspace_bytes));
    args.workspace = workspace_.data();
    args.workspace_bytes = info_.workspace_bytes;
  }
  std::unique_ptr<scope_plan, Destroy> handle_;
  scope_plan_info info_{};
  std::vector<char> workspace_;
};

// What one layer and CFG branch hands from call to call; a null handle for a method that keeps nothing.
class State {
 public:
  // In host memory of its own.
  explicit State(const Plan& plan) {
    if (plan.info().host_memory == 0) {
      throw Error(SCOPE_ERROR_UNSUPPORTED, "state: a GPU plan's state is device memory; bring state_bytes of it");
    }
    const auto bytes = static_cast<size_t>(plan.info().state_bytes);
    memory_.resize((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    create(plan, memory_.data());
  }
  // In memory of the caller, which outlives it.
  State(const Plan& plan, void* memory) { create(plan, memory); }

  scope_state* handle() const { return handle_.get(); }
  bool filled() const {
    int32_t filled = 0;
    if (handle_ != nullptr) check(scope_state_filled(handle(), &filled));
    return filled != 0;
  }
  void set_filled(bool filled) { check(scope_state_set_filled(handle(), filled ? 1 : 0)); }
  void reset() { check(scope_state_reset(handle())); }
  std::vector<char> save(void* stream = nullptr) const {
    size_t bytes = 0;
    check(scope_state_save(handle(), stream, nullptr, 0, &bytes));
    std::vector<char> saved(bytes);
    check(scope_state_save(handle(), stream, saved.data(), bytes, nullptr));
    return saved;
  }
  void load(const std::vector<char>& saved, void* stream = nullptr) {
    check(scope_state_load(handle(), stream, saved.data(), saved.size()));
  }

 private:
  struct Destroy {
    void operator()(scope_state* state) const { scope_state_destroy(state); }
  };
  void create(const Plan& plan, void* memory) {
    if (plan.info().state_bytes == 0) return;
    scope_state* made = nullptr;
    check(scope_state_create(plan.handle(), memory, &made));
    handle_.reset(made);
  }
  std::vector<std::max_align_t> memory_;
  std::unique_ptr<scope_state, Destroy> handle_;
};

}  // namespace scope_attn
