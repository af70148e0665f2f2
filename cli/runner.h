// One plan with all that its calls need, and the quality and statistics of the last one.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "measure/recall.h"
#include "pipeline/call.h"
#include "qkv.h"

namespace scope::cli {

// One plan with everything that a call needs, owned.
class Runner {
 public:
  Runner(const Context& context, const Settings& settings, const Shape& shape);
  const Plan& plan() const { return plan_; }
  // Buffers for the selection, filled by every run from now on.
  void want_selection();
  // From now on every run attends to this selection, in labels, mask and keep, which are the caller's to fill.
  void take_selection(const std::vector<int32_t>& labels_given, const std::vector<uint32_t>& mask_given,
                      const std::vector<uint32_t>& keep_given);
  // Inputs are host memory on every backend. On a device q, k and v are uploaded when the address of q changes, and results
  // come back unless `fetch` is off.
  void run(CallArgs args);
  // From here on calls go on from one another; a second time: from the start again. A method without a state has none.
  void init_state();
  // Empty without a state.
  std::vector<std::byte> save_state() const;
  // Of a runner with the same shape and method, after init_state.
  void load_state(std::span<const std::byte> saved);
  bool fetch = true;
  bool attend = true;  // off: a selection alone

  std::vector<std::byte> out;  // [batch, heads, q_tokens, dim]
  std::vector<int32_t> labels, sizes, counts, codes;
  std::vector<uint32_t> mask, keep;
  std::vector<float> centroids, codebooks;
  CallStats stats;
  std::vector<HeadStats> head_stats;

 private:
  using Memory = std::shared_ptr<void>;  // of the backend
  Memory make_memory(int64_t bytes) const;
  void run_on_device(CallArgs args);
  void launch(const CallArgs& args, const SelectedArgs& selected) const;

  Plan plan_;
  Memory workspace_, state_memory_;
  std::optional<State> state_;
  bool given_ = false;  // the selection is the caller's
  struct Device {
    Memory q, k, v, out, lse, labels, sizes, counts, mask, keep, centroids, codebooks, codes;
    const void* uploaded = nullptr;
  } device_;
};

// Quality of the last run, averaged over heads. `exact` [batch x heads] holds what was computed before for the same queries;
// null: it is computed here.
using ExactHeads = std::vector<std::vector<ExactQuery>>;
Quality measure(const Context& context, const Qkv& qkv, const Runner& runner, bool dense, int64_t samples,
                const ExactHeads* exact = nullptr);

nlohmann::ordered_json stats_json(const Runner& runner);

}  // namespace scope::cli
