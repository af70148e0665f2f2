// plan: shape + method -> what a call needs (workspace, state) and how it will run. Immutable once made.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/numeric.h"
#include "methods/settings.h"
#include "stages/backend.h"
#include "stages/choices.h"

namespace scope {

// What calls run on: threads and an instruction set, or a GPU. One per host thread that calls, or shared by plans that are
// not used at the same time.
class Context {
 public:
  explicit Context(const ContextOptions& options);
  // On the CPU.
  explicit Context(int threads = 0, std::string_view instruction_set = "auto");

  const Backend& backend() const { return *backend_; }
  const Exec& exec() const { return machine_.exec; }
  int threads() const { return pool_->threads(); }
  // avx512, avx2 or portable; sm_90 and the like on a GPU.
  const std::string& instruction_set() const { return machine_.name; }
  // Of a device; empty: the host.
  const std::string& device() const { return machine_.device; }
  // Whether tensors are the host's memory.
  bool host() const { return backend_->can.host; }

 private:
  const Backend* backend_;
  std::unique_ptr<ThreadPool> pool_;
  Machine machine_;
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
// chunk lie one after the other. Where one rho is solved for a sample, what its heads must keep until then has room for all
// of them, and this points to those of one chunk.
struct Workspace {
  void* report;                        // of the call: see ReportLayout
  int64_t* all_queries;                // [2] 0, valid queries: one group of them all
  int32_t *q_rows, *k_rows;            // of the sample: see DescribeArgs
  uint32_t *valid, *keep, *queries;    // of the sample
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
  // A tail's virtual keys. Per group: [groups, dim], [groups, dim], [groups]; per code: none, [codes, dim], [codes].
  float *tail_k, *tail_v, *tail_bias;
  float* tail_share;  // [groups + 1], and tail_v [groups + 1, dim], where the tail mixes
  // [groups * parts, dim], [q_tokens], [groups * parts], [groups], and tail_v [groups * parts, dim], where it splits groups
  float* part_centroids;
  int32_t *part_labels, *part_sizes;
  float* log_mass;
  uint32_t* tail_mask;              // [groups + 1, mask_words(groups, or codes of the sample)]
  float* errors;                    // [groups, codes]; rules that need them only
  double* rho;                      // [1] of the sample, where one is solved for it
  Scratch scratch;                  // of the chunk, for each stage in turn
  Scratch weights, beside_weights;  // the same memory while weigh hands over to keep; of all heads: weights have their own
};

// What a call found, in memory of its backend: a status word, then [batch, heads] HeadStats at a multiple of 16.
struct ReportLayout {
  static constexpr int64_t kHeads = 16;
  static int64_t bytes(const Shape& shape) {
    return round_up(kHeads + shape.batch * shape.heads * static_cast<int64_t>(sizeof(HeadStats)), 16);
  }
  static uint32_t* status(void* report) { return static_cast<uint32_t*>(report); }
  static HeadStats* heads(void* report) { return reinterpret_cast<HeadStats*>(static_cast<std::byte*>(report) + kHeads); }
};

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
  int64_t report_bytes = 0;
  std::vector<double> alphas;  // [chunk] settings.alpha, for a method without a profile

  const RuleRow& rule() const { return row(settings.rule); }
  const TailRow& tail() const { return row(settings.tail); }
  // Needs the mean values of clusters, and with them v.
  bool compensates() const { return !settings.dense && (tail().per_code || rule().errors); }
  // How many values stand for dropped keys in one head: one for each code, or for each group.
  int64_t tail_values() const {
    return std::max(compensates() ? codes : 0, tail().splits      ? groups * settings.tail_parts
                                               : tail().mixes     ? groups + 1
                                               : tail().per_group ? groups
                                                                  : 0);
  }
  // Parts of a group that have a centroid each; 0: groups are not split.
  int64_t parts() const { return !settings.dense && tail().splits ? settings.tail_parts : 0; }
  // One rho is solved for all heads of a sample; of a single head it is that head's own.
  bool solves_sample() const {
    return !settings.dense && shape.heads > 1 && settings.target_scope == TargetScope::sample &&
           (settings.target_density > 0 || rule().meets == Meets::by_rho);
  }
  // Whether select weighs the keys themselves and keeps them one by one.
  bool selects_exact_keys() const { return !settings.dense && !row(settings.proxy).codes && !rule().whole_codes; }
  int64_t select_stride() const { return selects_exact_keys() ? settings.select_stride : 1; }
  bool needs_v() const { return settings.dense || settings.tail != Tail::none || compensates(); }
  bool reuses() const { return !settings.dense && settings.reuse_interval > 1; }  // its states hold labels and codes too
  int64_t subspaces() const { return static_cast<int64_t>(partition.size()); }
  const char* kernel() const { return backend->kernel(exec); }
  // As the chunk that begins at head `first` sees it.
  Workspace layout(void* memory, int64_t bytes, int64_t first = 0) const;

 private:
  void check_backend() const;
  void check_codes() const;
  void check_compensation() const;
  void check_cocluster() const;
  void check_reuse() const;
  void check_profile() const;
  Sizes sizes(int64_t heads) const;
  Workspace cut(Arena& arena, int64_t heads, int64_t first = 0) const;
};

// Makes a plan's device current while it lives; nothing on the CPU.
class DeviceScope {
 public:
  explicit DeviceScope(const Plan& plan) : DeviceScope(plan, plan.exec) {}
  DeviceScope(const Plan& plan, const Exec& exec) : backend_(*plan.backend), previous_(backend_.enter(exec)) {}
  ~DeviceScope() { backend_.leave(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const Backend& backend_;
  int previous_;
};

}  // namespace scope
