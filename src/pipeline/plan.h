// plan: shape + method -> what a call needs (workspace, state) and how it will run. Immutable once made.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "methods/settings.h"
#include "stages/backend.h"

namespace scope {

// What calls run on: threads and an instruction set, or a GPU. One per host thread that calls, or shared by plans that are
// not used at the same time.
class Context {
 public:
  // threads: 0 = one per core. instruction_set: "auto", "avx512", "avx2" or "portable".
  explicit Context(int threads = 0, std::string_view instruction_set = "auto");
  // A GPU by its index. Host work around it (reading files, measuring) still gets `threads`.
  static Context on_gpu(int index, int threads = 0);

  const Backend& backend() const { return *backend_; }
  const Exec& exec() const { return exec_; }
  int threads() const { return pool_->threads(); }
  // avx512, avx2 or portable; sm_90 and the like on a GPU.
  const std::string& instruction_set() const { return instruction_set_; }
  const cuda::Device* device() const { return exec_.device; }

 private:
  const Backend* backend_;
  std::unique_ptr<ThreadPool> pool_;
  std::shared_ptr<const cuda::Device> device_;
  std::shared_ptr<cuda::Clock> clock_;
  Exec exec_;
  std::string instruction_set_;
};

struct Shape {
  int64_t batch = 1, heads = 1;
  int64_t q_tokens = 0, k_tokens = 0;
  int64_t dim = 0;
  DType dtype = DType::f32;
  std::vector<int64_t> rope;   // channels along T, H and W; for partition rope
  Partition subspaces;         // overrides the setting `partition` when not empty, unless whole codes are kept
  bool dense_queries = false;  // calls may name queries that attend densely: the selection gets one more group
};

// Pointers into the workspace of one call, for `chunk` heads at a time; shapes are those of one head, and the heads of a
// chunk lie one after the other.
struct Workspace {
  uint32_t* status;                    // [1] of the call: kNotFinite, kStateNotStarted
  HeadStats* report;                   // [batch, heads] of the call
  int64_t* all_queries;                // [2] 0, valid queries: one group of them all
  int32_t *q_rows, *k_rows;            // of the sample: see DescribeArgs
  uint32_t* valid;                     // of the sample
  uint32_t* keep;                      // of the sample
  int32_t* labels;                     // [q_tokens]
  int32_t *sizes, *counts, *top_p;     // [groups + 1]
  int32_t* order;                      // [q_tokens]
  int64_t* offsets;                    // [groups + 2]
  float* centroids;                    // [groups, dim]
  float* codebooks;                    // [codes * dim]
  int32_t* codes;                      // [subspaces, k_tokens]
  int64_t* empty;                      // [subspaces]
  float *q_similarity, *k_similarity;  // [groups], [codes]; blocks rules only
  float* tables;                       // [groups, subspaces, codes]
  uint32_t* mask;                      // [groups + 1, mask_words(k_tokens)]
  // First-order tail: [groups, dim], [groups, dim], [groups]. Compensation: none, [codes, dim], [codes].
  float *tail_k, *tail_v, *tail_bias;
  uint32_t* tail_mask;  // [groups + 1, mask_words(groups, or codes of the sample)]
  float* errors;        // [groups, codes]; rule error_aware only
  Scratch scratch;
};

// Most heads of a chunk: a call keeps their arguments on its stack.
inline constexpr int64_t kMostChunk = 64;

// Bits of a call's status word, for what only a device knows.
inline constexpr uint32_t kNotFinite = 1;        // q or k held NaN or Inf among the tokens that take part
inline constexpr uint32_t kStateNotStarted = 2;  // a warm call found a state that no first call of its shape has filled

struct Plan {
  Plan(const Context& context, const Settings& settings, const Shape& shape);

  const Context& context;
  Settings settings;
  Shape shape;
  const Backend* backend;
  Exec exec;                     // the context's, with this plan's choice of kernel; the stream comes with each call
  int64_t chunk = 1;             // heads that are processed at a time
  Partition partition;           // empty for dense and exact
  int64_t groups = 0;            // upper bound over samples; 0 for dense
  int64_t codes = 0;             // per subspace, upper bound over samples
  int64_t selection_groups = 0;  // groups, plus one when the shape has dense queries
  int64_t workspace_bytes = 0;
  int64_t state_bytes = 0;  // 0 for dense

  bool has_tail(Tail tail) const { return !settings.dense && settings.tail == tail; }
  // Needs the mean values of clusters, and with them v.
  bool compensates() const { return has_tail(Tail::centroids) || (!settings.dense && settings.rule == Rule::error_aware); }
  bool reuses() const { return !settings.dense && settings.reuse_interval > 1; }  // its states hold labels and codes too
  const char* kernel() const;  // of attend: avx512, avx2, portable; wgmma or portable on a GPU
  Workspace layout(void* memory, int64_t bytes) const;

 private:
  void check_device() const;
  void check_codes() const;
  void check_compensation() const;
  void check_cocluster() const;
  void check_reuse() const;
  void check_profile() const;
  Workspace cut(Arena& arena, int64_t heads) const;
};

// Makes a plan's device current while it lives; nothing on the CPU.
class DeviceScope {
 public:
  explicit DeviceScope(const Plan& plan) : DeviceScope(plan, plan.exec) {}
  DeviceScope(const Plan& plan, const Exec& exec)
      : backend_(*plan.backend), previous_(backend_.enter == nullptr ? 0 : backend_.enter(exec)) {}
  ~DeviceScope() {
    if (backend_.leave != nullptr) backend_.leave(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const Backend& backend_;
  int previous_;
};

}  // namespace scope
