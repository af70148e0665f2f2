// The C++ face of scope.h: handles that clean up after themselves and errors as exceptions; header-only.
#pragma once

#include <scope/scope.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
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
  explicit Context(int threads = 0, const char* instruction_set = nullptr) {
    scope_context* made = nullptr;
    check(scope_context_create(threads, instruction_set, &made));
    handle_.reset(made);
  }
  static Context on_gpu(int device = 0) {
    scope_context* made = nullptr;
    check(scope_context_create_cuda(device, &made));
    return Context(made, true);
  }
  scope_context* handle() const { return handle_.get(); }
  bool gpu() const { return gpu_; }
  std::string instruction_set() const { return scope_context_instruction_set(handle()); }

 private:
  Context(scope_context* made, bool on_gpu) : handle_(made), gpu_(on_gpu) {}
  struct Destroy {
    void operator()(scope_context* context) const { scope_context_destroy(context); }
  };
  std::unique_ptr<scope_context, Destroy> handle_;
  bool gpu_ = false;
};

class Method {
 public:
  explicit Method(const char* name = "scope") {
    scope_method* made = nullptr;
    check(scope_method_create(name, &made));
    handle_.reset(made);
  }
  Method& set(const std::string& name, const std::string& value) {
    check(scope_method_set(handle(), name.c_str(), value.c_str()));
    return *this;
  }
  Method& model(const std::string& name) {
    check(scope_method_apply_model(handle(), name.c_str()));
    return *this;
  }
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

// [batch, heads, tokens, dim] and [batch, tokens, heads, dim] memory without gaps.
inline scope_tensor head_major(const void* data, int64_t heads, int64_t tokens, int64_t dim) {
  return {const_cast<void*>(data), heads * tokens * dim, tokens * dim, dim};
}
inline scope_tensor token_major(const void* data, int64_t heads, int64_t tokens, int64_t dim) {
  return {const_cast<void*>(data), tokens * heads * dim, dim, heads * dim};
}

class Plan {
 public:
  Plan(const Context& context, const Method& method, const scope_shape& shape) : gpu_(context.gpu()) {
    scope_plan* made = nullptr;
    check(scope_plan_create(context.handle(), method.handle(), &shape, &made));
    handle_.reset(made);
  }
  scope_plan_info info() const {
    scope_plan_info info{};
    info.struct_size = sizeof info;
    check(scope_plan_get_info(handle(), &info));
    return info;
  }
  // Host memory for one (layer, branch), initialised; empty for a method that keeps none.
  std::vector<std::max_align_t> make_state() const {
    if (gpu_) throw Error(SCOPE_ERROR_UNSUPPORTED, "state: a GPU plan's state is device memory; allocate state_bytes there");
    const auto bytes = static_cast<size_t>(info().state_bytes);
    std::vector<std::max_align_t> state((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    if (bytes > 0) check(scope_state_init(handle(), state.data()));
    return state;
  }
  // Uses a host workspace of its own when the arguments bring none; a GPU call must bring
  // device memory, and is refused without.
  void run(scope_run_args args) {
    bring_workspace(args);
    check(scope_run(handle(), &args));
  }
  // After calls on a GPU: waits for args.stream and completes the statistics.
  void read_stats(const scope_run_args& args) { check(scope_read_stats(handle(), &args)); }
  void run_selection(scope_run_args args) {
    bring_workspace(args);
    check(scope_run_selection(handle(), &args));
  }
  scope_plan* handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(scope_plan* plan) const { scope_plan_destroy(plan); }
  };
  void bring_workspace(scope_run_args& args) {
    if (args.workspace != nullptr || gpu_) return;
    workspace_.resize(static_cast<size_t>(info().workspace_bytes));
    args.workspace = workspace_.data();
    args.workspace_bytes = static_cast<int64_t>(workspace_.size());
  }
  std::unique_ptr<scope_plan, Destroy> handle_;
  std::vector<char> workspace_;
  bool gpu_;
};

}  // namespace scope_attn
