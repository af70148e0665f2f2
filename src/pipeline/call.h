// call: the five stages in order, for every sample and head.
#pragma once

#include "pipeline/plan.h"
#include "pipeline/schedule.h"
#include "pipeline/state.h"

namespace scope {

struct CallStats {
  Reason reason = Reason::sparse;
  bool warm = false;            // every sample started from its state, or reused its clusters
  int iterations = 0;           // K-means iterations run; 0: none
  const char* arithmetic = "";  // of attend: f32, bf16, f16, s8+bf16 or the like
  const char* kernel = "";      // of attend: avx512, avx2, portable; wgmma or portable on a GPU
  // The rest is NaN after a call on a device, until read_stats.
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
  float scale = 0;                          // of a logit; 0: 1 / sqrt(dim)
  const int64_t* q_lengths = nullptr;       // [batch] queries from there on are padding; null: none
  const int64_t* k_lengths = nullptr;       // [batch] keys from there on are padding; null: none
  const uint32_t* valid_queries = nullptr;  // [batch, mask_words(q_tokens)] queries that are not padding; null: all
  const uint32_t* valid_keys = nullptr;     // [batch, mask_words(k_tokens)] keys that are not padding; null: all
  const uint32_t* keep = nullptr;           // [batch, mask_words(k_tokens)] keys that every query sees
  const uint32_t* dense_queries = nullptr;  // [batch, mask_words(q_tokens)] queries that see every valid key
  Place place;
  State* state = nullptr;  // null: every call is a first call
  void* stream = nullptr;  // a device's queue of everything this call does
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* report = nullptr;  // plan.report_bytes of the backend's memory for what the call finds; null: in the workspace
  SelectionOut selection;
  CallStats* stats = nullptr;
  HeadStats* head_stats = nullptr;  // [batch, heads]
  Clock* clock = nullptr;           // of this call alone, until read_stats; null: the context's, until the next call
};

// Throws before anything is written when an argument is wrong. On a device every tensor, the state, the workspace, lse, the
// report and the selection are its memory, lengths and bitmasks are the host's, the call returns before the work is done,
// and head_stats must be null.
void call(const Plan& plan, const CallArgs& args);
// What the last call with this workspace (or report) found: waits for args.stream, completes *args.stats and fills
// args.head_stats. Throws Status::non_finite or invalid_argument (state) where the call could not.
void read_stats(const Plan& plan, const CallArgs& args);
// The same from a report that was copied to the host, but for times; both outputs are optional.
void read_report(const Plan& plan, const void* report, CallStats* stats, HeadStats* heads);

// attend alone, on a selection in the public format (labels, mask, keep); mask rows: plan.selection_groups.
struct SelectedArgs {
  const int32_t* labels = nullptr;  // [batch, heads, q_tokens]
  const uint32_t* mask = nullptr;   // [batch, heads, G, mask_words(k_tokens)]
  const uint32_t* keep = nullptr;   // [batch, mask_words(k_tokens)]; optional
};
void attend_selected(const Plan& plan, const CallArgs& args, const SelectedArgs& selected);

}  // namespace scope
