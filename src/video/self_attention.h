// The self-attentions of a generation: one plan for every layer, its workspace, and a state for each layer and branch.
#pragma once

#include "pipeline/call.h"
#include "video/model.h"

namespace scope::video {

// One self-attention of a generation. branch: 0 with the prompt, 1 with the negative one.
struct CallReport {
  int64_t step = 0, layer = 0, branch = 0;
  CallStats stats;
  std::vector<HeadStats> heads;
};

// What every self-attention of a model is planned for.
Shape attention_shape(const ModelConfig& config, const std::array<int64_t, 3>& grid, DType dtype);

// Neither branch warms the other, but where the method shares them. On a device a call is only queued: nobody waits before
// the reports are read.
class SelfAttention {
 public:
  SelfAttention(Engine& engine, const ModelConfig& config, const Settings& settings, const std::array<int64_t, 3>& grid,
                int64_t branches);
  // What one takes of the engine's memory.
  static int64_t bytes(const Engine& engine, const ModelConfig& config, const Settings& settings,
                       const std::array<int64_t, 3>& grid, int64_t branches);

  void forget();  // every state is as before its first call
  std::vector<std::vector<std::byte>> save() const;
  void load(const std::vector<std::vector<std::byte>>& saved);

  // q, k, v and out as in Attend. At most every layer and branch once before the reports are taken.
  void run(const Place& place, int64_t branch, Matrix q, Matrix k, Matrix v, Matrix out, const TextTokens& text);
  // Of the calls since the last taking, in order; waits for them. Throws what only the device found, with the call's place.
  std::vector<CallReport> take_reports();

 private:
  TensorView view(Matrix x) const;
  // Where a call's statistics go, and what it shares with all others.
  CallArgs args_of(CallReport& report, size_t slot) const;

  Engine& engine_;
  const ModelConfig& config_;
  Plan plan_;
  Buffer workspace_;
  int64_t branches_;  // that have states of their own
  std::vector<Buffer> state_memory_;
  std::vector<State> states_;
  std::vector<CallReport> queued_;              // of calls whose reports were not read yet
  std::vector<std::shared_ptr<Clock>> clocks_;  // of the call in each place of queued_
  Buffer reports_;                              // [layers x branches, report_bytes]
};

}  // namespace scope::video
