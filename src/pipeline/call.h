// call: the five stages in order, for every sample and head.
#pragma once

#include "pipeline/plan.h"
#include "pipeline/schedule.h"
#include "pipeline/state.h"

namespace scope {

struct HeadStats {
  double density = 0;             // sum n_c r_c / (queries x keys) over the tokens that take part in selection; 1 when dense
  double total_density = 0;       // with always-kept keys and densely attending queries, over all valid pairs
  double rho = 0, alpha = 0;      // as used
  int64_t head_budget = 0;        // k_head
  int64_t queries = 0, keys = 0;  // that take part in selection
  int64_t groups = 0, codes = 0;  // effective
  int64_t empty_groups = 0, empty_codes = 0;
  int64_t min_count = 0, max_count = 0;  // of r_c over non-empty groups
};

struct CallStats {
  Reason reason = Reason::sparse;
  bool warm = false;            // every sample started from its state
  int iterations = 0;           // K-means iterations run; 0: none
  const char* arithmetic = "";  // of attend: f32 or bf16
  const char* instruction_set = "";
  double density = 0;  // mean over heads
  double total_density = 0;
  // Seconds
  double check = 0, group = 0, encode = 0, score = 0, select = 0, attend = 0, total = 0;
};

// Where a call writes its selection; every pointer is optional. G = plan.selection_groups, C = plan.codes.
struct SelectionOut {
  int32_t* labels = nullptr;   // [batch, heads, q_tokens]; -1: padding
  int32_t* sizes = nullptr;    // [batch, heads, G]
  int32_t* counts = nullptr;   // [batch, heads, G]
  uint32_t* mask = nullptr;    // [batch, heads, G, mask_words(k_tokens)]
  uint32_t* keep = nullptr;    // [batch, mask_words(k_tokens)]
  float* centroids = nullptr;  // [batch, heads, plan.groups, dim]
  float* codebooks = nullptr;  // subspace after subspace: [batch, heads, C, dim_m]
  int32_t* codes = nullptr;    // [subspaces, batch, heads, k_tokens]; -1: not encoded
};

struct CallArgs {
  TensorView q, k, v;                       // [batch, heads, tokens, dim]
  MutableTensorView out;                    // like q; may be null when only a selection is asked for
  float* lse = nullptr;                     // [batch, heads, q_tokens]
  const int64_t* q_lengths = nullptr;       // [batch] valid queries; null: all
  const int64_t* k_lengths = nullptr;       // [batch] valid keys; null: all
  const uint32_t* keep = nullptr;           // [batch, mask_words(k_tokens)] keys that every query sees
  const uint32_t* dense_queries = nullptr;  // [batch, mask_words(q_tokens)] queries that see every valid key
  Place place;
  void* state = nullptr;  // plan.state_bytes, initialised; null: every call is a first call
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  SelectionOut selection;
  CallStats* stats = nullptr;
  HeadStats* head_stats = nullptr;  // [batch, heads]
};

// Throws before anything is written when an argument is wrong.
void call(const Plan& plan, const CallArgs& args);

// attend alone, on a selection in the public format (labels, mask, keep); mask rows: plan.selection_groups.
struct SelectedArgs {
  const int32_t* labels = nullptr;  // [batch, heads, q_tokens]
  const uint32_t* mask = nullptr;   // [batch, heads, G, mask_words(k_tokens)]
  const uint32_t* keep = nullptr;   // [batch, mask_words(k_tokens)]; optional
};
void attend_selected(const Plan& plan, const CallArgs& args, const SelectedArgs& selected);

}  // namespace scope
