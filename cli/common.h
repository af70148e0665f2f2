// What the commands share: q, k, v from files, one call with its buffers, tables, progress, exit codes.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bounds.h"
#include "core/built_from.h"
#include "io/file.h"
#include "measure/recall.h"
#include "measure/synthetic.h"
#include "methods/effects.h"
#include "pipeline/call.h"

namespace scope::cli {

// q, k and v as [batch, heads, tokens, dim], with what the file's metadata or the flags said of them.
struct Qkv {
  io::Array q, k, v;
  int64_t batch = 1, heads = 0, q_tokens = 0, k_tokens = 0, dim = 0;
  bool batched = false;  // the file had a batch dimension
  DType dtype = DType::f32;
  std::vector<int64_t> rope;
  Partition subspaces;

  TensorView view(const io::Array& x, int64_t tokens) const;
};

// Checks ranks, dtypes and shapes; the arrays come from anywhere.
Qkv make_qkv_input(io::Array q, io::Array k, io::Array v);
// What `scope make-qkv` makes, in f32, f16 or bf16; `done` is called after each head.
Qkv synthetic_qkv(
    const SyntheticSpec& spec, const std::string& dtype, ThreadPool& pool, const std::function<void()>& done = [] {});
std::vector<int64_t> parse_list(const std::string& name, const std::string& text, char separator);
Partition parse_subspaces(const std::string& json);

// q, k, v and the optional per-sample inputs that a file may carry beside them.
struct Input {
  Qkv qkv;
  std::string grid = {};  // TxHxW; empty: not said
  std::vector<int64_t> q_lengths = {}, k_lengths = {};
  std::vector<uint32_t> keep = {}, dense_queries = {};

  Shape shape() const;
  CallArgs args() const;  // points into this
  void check_measurable(const char* flag) const;
};
struct InputFlags {
  std::string path, q, k, v, grid, rope, subspaces;
  int64_t text = 0;
  void add(CLI::App& app);
  Input read(const std::string& model) const;
  // The channel sets of an input beside a method's partition: whether it reads them; both given for one method is refused.
  bool reads_subspaces(const Input& input, const std::string& method, const std::vector<std::string>& set,
                       const Settings& settings) const;
};

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

nlohmann::ordered_json settings_json(const Settings& settings);
nlohmann::ordered_json stats_json(const Runner& runner);
nlohmann::ordered_json machine_json(const Context& context);
// The text itself where it is UTF-8; otherwise with every byte that is not ASCII as \xNN. Names of files may be anything.
std::string utf8_text(const std::string& text);
// What `dump` gives, with strings that are not UTF-8 escaped so.
std::string json_text(const nlohmann::ordered_json& json, int indent = -1, bool ascii = false);
// Of this command, with its commit.
std::string version();
// With the version and the commit of this command first, unless `json` has its own.
void write_json(const std::string& path, const nlohmann::ordered_json& json);

std::vector<std::string> split(std::string_view text, char separator);
// Methods with their settings, separated by commas; one before a digit belongs to a value: scope:density_steps=0.2:0.3,1:0.1
std::vector<std::string> split_methods(std::string_view text);

// --profile, where none of the methods takes one.
[[noreturn]] void refuse_profile(const std::string& methods);

// A method by its name, or with settings: scope:partition=even:8+rule=hybrid. `model` may be empty; `set` holds values of
// --set, which come before the method's own.
Settings parse_method(const std::string& text, const std::string& model, const std::vector<std::string>& set = {});
// Refuses a setting that the text or `set` gives and that `settings`, what calls are made with, do not have or do not read.
// What the method has anyway may be said again.
void check_effects(const std::string& text, const std::string& model, const std::vector<std::string>& set,
                   const Settings& settings, const Surroundings& with);
// Whether the text or `set` gives this setting.
bool gives(const std::string& text, const std::vector<std::string>& set, std::string_view name);
// What meeting a target density took, a line each: a lowered alpha, or the nearest density where the steps are coarse.
// Throws when the least that the method keeps is above the target. target 0: none.
std::vector<std::string> target_notes(const Runner& runner, double target, const std::string& method);
// The same for heads of several sparse calls; settings: their plan's.
std::vector<std::string> target_notes(const Settings& settings, double density, std::span<const HeadStats> heads,
                                      double target, const std::string& method);
// The value of --density: shares separated by commas.
std::vector<double> parse_densities(const std::string& list);

// What the methods of a comparison share: settings, and a density to meet or a rho to run at.
struct PointFlags {
  std::vector<std::string> set;
  std::string density, rho;  // lists; rho is empty or stands in the place of density
  void add(CLI::App& app);
  bool at_rho() const { return !rho.empty(); }
  std::vector<double> points() const;
  // `settings` at one of the points; throws where their rule compares with no rho.
  Settings at(Settings settings, double point, const std::string& name) const;
};

// Options that several commands take.
struct MethodFlags {
  std::string method = "scope", model;
  std::vector<std::string> set;
  void add(CLI::App& app, bool with_method = true);
  // target_density: the value of a command's own option; empty: not given.
  Settings settings(const Surroundings& with, const std::string& target_density = "") const;
};
struct MachineFlags {
  int threads = 0;
  std::string instruction_set = "auto", backend = "cpu";
  int device = 0;
  void add(CLI::App& app);
  void add_host(CLI::App& app);  // of a command that runs on the CPU alone
  bool on_device() const;
  Context context() const;
};
// f32 where the backend takes it.
DType finest_dtype(const Context& context);

// On stderr. What cannot be told there (it may be closed, or a full disk) is no reason to lose a result.
template <class... Args>
void tell(fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(fmt::format(format, std::forward<Args>(args)...).c_str(), stderr);
}

// A line on stderr that is redrawn in place, only when stderr is a terminal.
class Progress {
 public:
  Progress(std::string what, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& note = "");

 private:
  std::string what_;
  int64_t total_, done_ = 0;
  bool shown_;
  double start_;
};

// A count, or `all`.
int64_t parse_samples(const std::string& text, const std::string& flag = "--samples");
void write_text(const std::string& path, const std::string& text);

double now_seconds();
double mean(const std::vector<double>& values);
std::string bold(const std::string& text);  // only when stdout is a terminal

// The commands; each adds itself and runs through its callback.
void add_ablate(CLI::App& app);
void add_make_qkv(CLI::App& app);
void add_attend(CLI::App& app);
void add_bench(CLI::App& app);
void add_compare(CLI::App& app);
void add_demo(CLI::App& app);
void add_doctor(CLI::App& app);
void add_evaluate(CLI::App& app);
void add_inspect(CLI::App& app);
void add_generate(CLI::App& app);
void add_methods(CLI::App& app);
void add_profile(CLI::App& app);
void add_report(CLI::App& app);
void add_steps(CLI::App& app);

}  // namespace scope::cli
