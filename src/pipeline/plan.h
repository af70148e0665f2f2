// plan: shape + method -> what a call needs (workspace, state) and how it will run. Immutable once made.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "methods/settings.h"
#include "stages/backend.h"

namespace scope {

// Threads and instruction set; one per host thread that calls, or shared by plans that are not used at the same time.
class Context {
 public:
  // threads: 0 = one per core. instruction_set: "auto", "avx512", "avx2" or "portable".
  explicit Context(int threads = 0, std::string_view instruction_set = "auto");
  const Exec& exec() const { return exec_; }
  int threads() const { return pool_.threads(); }
  const std::string& instruction_set() const { return instruction_set_; }

 private:
  ThreadPool pool_;
  Exec exec_;
  std::string instruction_set_;
};

struct Shape {
  int64_t batch = 1, heads = 1;
  int64_t q_tokens = 0, k_tokens = 0;
  int64_t dim = 0;
  DType dtype = DType::f32;
  std::vector<int64_t> rope;   // channels along T, H and W; for partition rope
  Partition subspaces;         // overrides the setting `partition` when not empty
  bool dense_queries = false;  // calls may name queries that attend densely: the selection gets one more group
};

// Pointers into the workspace of one call, for one head at a time.
struct Workspace {
  int32_t *q_rows, *k_rows;            // [q_tokens], [k_tokens] tokens that take part in selection
  uint32_t* valid;                     // [mask_words(k_tokens)] valid keys that are not always kept
  uint32_t* keep;                      // [mask_words(k_tokens)] valid keys that are always kept
  int32_t* labels;                     // [q_tokens]
  int32_t *sizes, *counts, *top_p;     // [groups + 1]
  int32_t* order;                      // [q_tokens]
  int64_t* offsets;                    // [groups + 2]
  float* centroids;                    // [groups, dim]
  float* codebooks;                    // [codes * dim]
  int32_t* codes;                      // [subspaces, k_tokens]
  int64_t* empty;                      // [subspaces]
  float* tables;                       // [groups, subspaces, codes]
  uint32_t* mask;                      // [groups + 1, mask_words(k_tokens)]
  float *tail_k, *tail_v, *tail_bias;  // [groups, dim], [groups, dim], [groups]; first-order tail only
  uint32_t* tail_mask;                 // [groups + 1, mask_words(groups)]
  Scratch scratch;
};

struct Plan {
  Plan(const Context& context, const Settings& settings, const Shape& shape);

  const Context& context;
  Settings settings;
  Shape shape;
  const Backend* backend;
  Partition partition;           // empty for dense and exact
  int64_t groups = 0;            // upper bound over samples; 0 for dense
  int64_t codes = 0;             // per subspace, upper bound over samples
  int64_t selection_groups = 0;  // groups, plus one when the shape has dense queries
  int64_t workspace_bytes = 0;
  int64_t state_bytes = 0;  // 0 for dense

  Workspace layout(void* memory, int64_t bytes) const;

 private:
  Workspace cut(Arena& arena) const;
};

}  // namespace scope
