// A backend: its stages as a struct of function pointers, and what it can do as data.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "stages/attend.h"
#include "stages/bookkeeping.h"
#include "stages/clock.h"
#include "stages/cocluster.h"
#include "stages/compensate.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"
#include "stages/split.h"
#include "stages/tail.h"

namespace scope {

// Some of an enumeration's choices.
template <class Choice>
class Choices {
 public:
  constexpr Choices(std::initializer_list<Choice> some) {
    for (const Choice choice : some) bits_ |= 1u << static_cast<int>(choice);
  }
  constexpr bool has(Choice choice) const { return (bits_ >> static_cast<int>(choice) & 1u) != 0; }

 private:
  uint32_t bits_ = 0;
};

// What a backend takes. Plans, checks of arguments, scope_supports and the docs read it; nobody else knows.
struct Capabilities {
  Choices<DType> dtypes;
  int64_t most_dim, dim_multiple;
  int64_t row_bytes;           // rows begin at multiples of this; 0: of their element
  int64_t most_tokens;         // of queries, and of keys where nothing is selected
  int64_t most_selected_keys;  // keys of a call that selects
  int64_t most_whole_codes;    // codes under a rule that keeps whole codes
  bool profiles;               // floors may differ from head to head
  // Tensors, states and workspaces are the host's memory and a call is done when it returns. Without: they are a device's,
  // and what a call found is known after `read`.
  bool host;
  Choices<Grouping> groupings;
  Choices<Encoding> encodings;
  Choices<ProxyKind> proxies;
  Choices<Rule> rules;
  Choices<TargetScope> target_scopes;
  Choices<Tail> tails;
  Choices<Products> products;
  bool mean_in_keep;  // where single keys are kept, `keep` makes the mean in the pass of its masks, and `tail` is not called
};

struct ContextOptions {
  std::string backend = "cpu";
  int threads = 0;                       // 0: one per core; on a device, of the host's work around it
  std::string instruction_set = "auto";  // the CPU's
  int device = 0;                        // which one
  ForeignThreads foreign{};              // in the place of threads of our own
};

// An opened backend: what its stages run on, kept alive with it.
struct Machine {
  Exec exec;
  std::string name;                   // avx512, avx2 or portable; sm_90 and the like
  std::string device;                 // a device's name; empty: the host
  std::shared_ptr<const void> parts;  // what exec points to, besides the pool
};

// Every stage takes a chunk of heads of one sample and must give each head the same bits whatever the chunk. On a device:
//   - every pointer but `partition` and WeighArgs::alpha is device memory, and so are the scalars that a stage returns;
//   - a call only enqueues on exec.stream: it does not allocate, copy from the host or wait.
// Scratch: what the function beside a stage says, an upper bound for every chunk of the given sizes.
struct Backend {
  const char* name;
  Capabilities can;

  // Throws Status::unsupported where there is none, or not as the options want it.
  Machine (*open)(const ContextOptions& options, ThreadPool& pool);
  bool (*present)();                        // whether `open` can find a device
  std::vector<std::string> (*inventory)();  // what there is, a line each, for people
  // The kernels that a plan asked for by name; throws Status::unsupported for what this machine lacks, as these do products.
  void (*configure)(Exec&, std::string_view kernels, DType, Products);
  const char* (*kernel)(const Exec&);                       // of attend
  const char* (*arithmetic)(const Exec&, DType, Products);  // of attend: f32, bf16, f16, s8+bf16 or the like
  // Heads that go through the stages at a time. bytes(n): the workspace of n heads; limit: bytes that a plan allows.
  int64_t (*chunk)(int64_t heads, int64_t limit, const std::function<int64_t(int64_t)>& bytes);

  void (*group)(const Exec&, const GroupArgs&);
  int64_t (*group_scratch)(const Exec&, const Sizes&);
  void (*split)(const Exec&, const SplitArgs&);  // null where `can` has no tail that splits groups
  int64_t (*split_scratch)(const Exec&, const Sizes&);
  void (*encode)(const Exec&, const EncodeArgs&);
  int64_t (*encode_scratch)(const Exec&, const Sizes&);
  void (*cocluster)(const Exec&, const CoclusterArgs&);  // null where `can` has no such grouping
  int64_t (*cocluster_scratch)(const Exec&, const Sizes&);
  void (*score)(const Exec&, const ScoreArgs&);
  void (*compensate)(const Exec&, const CompensateArgs&);  // null where `can` has neither error_aware nor centroids
  int64_t (*compensate_scratch)(const Exec&, const Sizes&);
  void (*weigh)(const Exec&, const WeighArgs&);
  void (*solve)(const Exec&, const SolveArgs&);  // null where `can` has no target over a sample
  int64_t (*solve_scratch)(const Exec&, const Sizes&);
  void (*keep)(const Exec&, const KeepArgs&);
  int64_t (*weights_bytes)(const Exec&, const Sizes&);  // of n heads: n times that of one
  int64_t (*weigh_scratch)(const Exec&, const Sizes&);  // of either half
  void (*tail)(const Exec&, const TailArgs&);
  int64_t (*tail_scratch)(const Exec&, const Sizes&);
  void (*attend)(const Exec&, const AttendArgs&);
  int64_t (*attend_scratch)(const Exec&, const Sizes&);

  void (*describe)(const Exec&, const DescribeArgs&);
  void (*finish)(const Exec&, const FinishArgs&);
  void (*import_selection)(const Exec&, const ImportArgs&);
  void (*reuse)(const Exec&, const ReuseArgs&);
  void (*set_slot)(const Exec&, StateSlot* slot, StateSlot value);
  // Sets kStateNotFilled in *status unless the state begins with `header` [64 bytes, host] and its slot holds `expected`.
  void (*check_slot)(const Exec&, const void* state, const void* header, const StateSlot* slot, StateSlot expected,
                     uint32_t* status);
  // `rows` pieces of `count` 32-bit words, each one `step` words after the last; a copy's from_step may be 0.
  void (*fill)(const Exec&, void* to, int64_t step, uint32_t value, int64_t count, int64_t rows);
  void (*copy)(const Exec&, const void* from, int64_t from_step, void* to, int64_t to_step, int64_t count, int64_t rows);
  // The nearest numbers of a type; may be in place.
  void (*round_to)(const Exec&, DType type, const float* from, float* to, int64_t count);
  // f32 <-> f32 or bf16.
  void (*convert)(const Exec&, const void* from, DType from_type, void* to, DType to_type, int64_t count);
  // to[h * to_step + rows[j]] = from[h * from_step + j] for j < count; null rows: to[h * to_step + j].
  void (*scatter)(const Exec&, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                  int64_t to_step, int64_t heads);

  // Around a call.
  int (*enter)(const Exec&);               // makes the device current and returns the one that was; throws if it is lost
  void (*leave)(int previous);             // noexcept
  bool (*capturing)(const Exec&);          // the stream records a graph: nothing runs now
  std::shared_ptr<Clock> (*make_clock)();  // beside the context's, for a call whose times are read after others ran
  // Refuses NaN, Inf and magnitudes over 1e18 in [batch, heads, tokens, dim] by name before anything is written; null on a
  // device, which flags them in the call's status instead. valid: [batch, mask_words(tokens)] bits; null: all.
  void (*check_finite)(const Exec&, const char* name, const TensorView& x, const int64_t* lengths, const uint32_t* valid);
  void (*read)(const Exec&, const void* from, void* host, int64_t bytes);  // waits for the stream
  void (*write)(const Exec&, const void* host, void* to, int64_t bytes);   // waits; never in a call

  // Memory for the command, the runner and the tests; a call never uses it.
  void* (*allocate)(const Exec&, int64_t bytes);
  void (*release)(void* memory);
};

}  // namespace scope
