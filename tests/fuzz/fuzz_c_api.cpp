// Fuzzes the C ABI's arguments: methods, shapes, strides, lengths, masks and states from the input, on buffers of bounded
// size.
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <vector>

#include "scope/scope.h"

namespace {

// Reads small integers from the input; past its end everything is 0.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  int64_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  int64_t wild() {  // mostly small, sometimes anything
    const int64_t kind = byte();
    if (kind < 224) return kind % 40;
    int64_t value = 0;
    for (int i = 0; i < 8; ++i)
      value = static_cast<int64_t>(static_cast<uint64_t>(value) << 8 | static_cast<uint64_t>(byte()));
    return value;
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

constexpr int64_t kFloats = 1 << 17;  // q, k, v and out each

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static scope_context* context = [] {
    scope_context* made = nullptr;
    scope_context_options options{};
    options.struct_size = sizeof options;
    options.threads = 1;
    scope_context_create(&options, &made);
    return made;
  }();
  static const std::vector<const char*> methods = [] {
    std::vector<const char*> names = {"nonsense"};
    scope_method_info info{};
    info.struct_size = sizeof info;
    for (int32_t i = 0; scope_method_at(i, &info) == SCOPE_OK; ++i) names.push_back(info.name);
    return names;
  }();
  static std::vector<float> q(kFloats), k(kFloats), v(kFloats), out(kFloats);
  Reader in(data, size);
  scope_method* method = nullptr;
  if (scope_method_create(methods[static_cast<size_t>(in.byte()) % methods.size()], &method) != SCOPE_OK) return 0;
  static const char* const kSets[][2] = {{"rule", "target"},
                                         {"rule", "fixed"},
                                         {"rule", "top_p"},
                                         {"tail", "first_order"},
                                         {"rho", "1"},
                                         {"density", "0.01"},
                                         {"group", "raster"},
                                         {"groups", "3"},
                                         {"codes", "5"},
                                         {"partition", "even:2"},
                                         {"partition", "random:3"},
                                         {"rho", "7"},
                                         {"q_block", "4"},
                                         {"k_block", "3"},
                                         {"target_density", "0.3"},
                                         {"target_scope", "sample"},
                                         {"reuse_start", "1"},
                                         {"reuse_interval", "2"},
                                         {"warm_prefix", "yes"},
                                         {"state_dtype", "bf16"},
                                         {"density_steps", "0.5:1,1:0.3"}};
  scope_method_set(method, "first_iterations", "3");
  for (int64_t i = in.byte() % 4; i > 0; --i) {
    const auto& set = kSets[static_cast<size_t>(in.byte()) % std::size(kSets)];
    scope_method_set(method, set[0], set[1]);
  }
  scope_shape shape{};
  shape.struct_size = in.byte() == 255 ? 1 : sizeof shape;
  shape.batch = 1 + in.wild() % 3;
  shape.heads = 1 + in.wild() % 3;
  shape.q_tokens = in.wild();
  shape.k_tokens = in.wild();
  shape.dim = in.wild();
  shape.dtype = static_cast<int32_t>(in.byte() % 4);
  shape.dense_queries = static_cast<int32_t>(in.byte() & 1);
  for (auto& range : shape.rope) range = in.wild();
  int64_t sizes[4] = {in.byte() % 9, in.byte() % 9, in.byte() % 9, in.byte() % 9};
  int32_t channels[256];
  for (auto& channel : channels) channel = static_cast<int32_t>(in.byte());
  shape.subspaces = in.byte() % 5;
  shape.subspace_sizes = sizes;
  shape.subspace_channels = channels;
  if (in.byte() % 4 != 0) {  // a shape that every method takes, so that calls are reached too
    shape.dim = 8 * (1 + in.byte() % 4);
    shape.dtype = static_cast<int32_t>(in.byte() % 3);
    shape.rope[0] = shape.dim / 2;
    shape.rope[1] = shape.rope[2] = shape.dim / 4;
    shape.subspaces = 0;
  }
  scope_plan* plan = nullptr;
  if (scope_plan_create(context, method, &shape, &plan) == SCOPE_OK) {
    scope_plan_info info{};
    info.struct_size = sizeof info;
    scope_plan_get_info(plan, &info);
    // Only shapes whose memory the target really has are run.
    const bool fits = shape.batch <= 3 && shape.heads <= 3 && shape.q_tokens <= 64 && shape.k_tokens <= 64 &&
                      info.workspace_bytes < (64 << 20);
    if (fits) {
      for (int64_t i = 0; i < kFloats; i += 97) q[i] = static_cast<float>(in.byte()) - 100.0f;
      for (int64_t i = 0; i < kFloats; i += 89) k[i] = static_cast<float>(in.byte()) - 100.0f;
      std::vector<char> workspace(static_cast<size_t>(info.workspace_bytes)),
          memory(static_cast<size_t>(info.state_bytes) + 16), report(static_cast<size_t>(info.report_bytes) + 16);
      std::vector<int64_t> lengths(3);
      for (auto& length : lengths) length = in.wild();
      std::vector<uint32_t> keep(3 * 3), dense(3 * 3), valid(3 * 3);
      for (auto* words : {&keep, &dense, &valid}) {
        for (auto& word : *words) word = static_cast<uint32_t>(in.wild());
      }
      scope_run_args args{};
      args.struct_size = in.byte() == 255 ? static_cast<size_t>(in.byte()) : sizeof args;
      const auto tensor = [&](std::vector<float>& x, int64_t tokens) {
        scope_tensor t{x.data(), shape.heads * tokens * shape.dim, tokens * shape.dim, shape.dim};
        const int64_t kind = in.byte();
        if (kind == 255) t.data = nullptr;
        if (kind == 254) t.token_stride = in.wild() % 2 == 0 ? -1 : 0;
        return t;
      };
      args.q = tensor(q, shape.q_tokens);
      args.k = tensor(k, shape.k_tokens);
      args.v = tensor(v, shape.k_tokens);
      args.out = tensor(out, shape.q_tokens);
      args.q_lengths = (in.byte() & 1) != 0 ? lengths.data() : nullptr;
      args.k_lengths = (in.byte() & 1) != 0 ? lengths.data() : nullptr;
      args.keep = (in.byte() & 1) != 0 ? keep.data() : nullptr;
      args.dense_queries = (in.byte() & 1) != 0 ? dense.data() : nullptr;
      args.valid_queries = (in.byte() & 1) != 0 ? valid.data() : nullptr;
      args.valid_keys = (in.byte() & 1) != 0 ? valid.data() : nullptr;
      args.scale = static_cast<float>(in.wild()) / 16;
      const auto place = [&](int64_t usual) { return in.byte() == 255 ? in.wild() : usual; };
      args.layer = place(in.byte() % 4 - 1);
      args.step = place(in.byte() % 40 - 1);
      args.steps = place(40);
      args.workspace = workspace.data();
      args.workspace_bytes = info.workspace_bytes - (in.byte() == 255 ? 1 : 0);
      const auto aligned = [](std::vector<char>& bytes) {
        return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 15) / 16 * 16);
      };
      if ((in.byte() & 1) != 0) args.report = aligned(report);
      scope_state* state = nullptr;
      if ((in.byte() & 1) != 0 && scope_state_create(plan, aligned(memory), &state) == SCOPE_OK) args.state = state;
      const scope_status status = scope_run(plan, &args);
      if (status == SCOPE_ERROR_INTERNAL) std::abort();
      if (status != SCOPE_OK && scope_last_error()[0] == '\0') std::abort();
      if (status == SCOPE_OK && scope_run(plan, &args) != SCOPE_OK) std::abort();
      if (state != nullptr) {  // what was saved loads, and what is not a state does not harm one
        size_t bytes = 0;
        if (scope_state_save(state, nullptr, nullptr, 0, &bytes) != SCOPE_OK) std::abort();
        std::vector<char> saved(bytes);
        if (scope_state_save(state, nullptr, saved.data(), bytes, nullptr) != SCOPE_OK) std::abort();
        if (scope_state_load(state, nullptr, saved.data(), bytes) != SCOPE_OK) std::abort();
        for (int64_t i = in.byte() % 4; i > 0; --i) {
          saved[static_cast<size_t>(in.wild()) % bytes] = static_cast<char>(in.byte());
        }
        scope_state_load(state, nullptr, saved.data(), bytes - static_cast<size_t>(in.byte() == 255));
        if (status == SCOPE_OK && scope_run(plan, &args) == SCOPE_ERROR_INTERNAL) std::abort();
      }
      scope_state_destroy(state);
    }
    scope_plan_destroy(plan);
  }
  scope_method_destroy(method);
  return 0;
}
