// Every setting of a method, in one table that also yields --help, the docs and the C ABI's scope_method_set.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "methods/profile.h"
#include "stages/attend.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"
#include "stages/split.h"
#include "stages/tail.h"

namespace scope {

struct Method;
// The row `scope`, whose settings are the defaults below.
const Method& default_method();

// What calls are to meet before the share `until` of the steps.
struct DensityStep {
  double until, density;
};

enum class KernelChoice { automatic, wgmma, portable };

struct Settings {
  const Method* method = &default_method();  // whose row these began as
  bool dense = false;                        // the method `dense`: no selection at all
  Grouping group = Grouping::kmeans;
  int64_t groups = 0;    // 0: auto
  int64_t q_block = 64;  // queries of a block
  Encoding encode = Encoding::kmeans;
  std::string partition = "rope";
  int64_t codes = 0;      // per subspace; 0: auto
  int64_t k_block = 128;  // keys of a block
  int iterations = 2;     // and rounds of co-clustering
  int first_iterations = 50;
  double first_sample = 0.1, warm_sample = 1;
  uint64_t seed = 0;
  ProxyKind proxy = ProxyKind::codes;
  Rule rule = Rule::online;
  double rho = 0.9;
  double alpha = 0.1;
  std::shared_ptr<const Profile> profile = nullptr;  // null: alpha for every head
  double profile_low = 0, profile_high = 1;
  double density = 0.2;
  double target_density = 0;                    // 0: none
  std::vector<DensityStep> density_steps = {};  // rising, the last until 1; empty: none
  TargetScope target_scope = TargetScope::sample;
  bool alpha_first = false;   // a target leaves alpha as it is where it can
  int64_t select_stride = 1;  // keys for one that select decides from
  double similarity = -0.1;
  Tail tail = Tail::none;
  double tail_weight = 0.75;                // of what tails mean and means mix in
  int64_t tail_parts = 8, tail_stride = 8;  // of tail means, as the next
  double tail_follow = 0.4;
  int64_t dense_layers = 1;
  double dense_steps = 0.2;
  double dense_last_steps = 0;
  bool warm_prefix = false;
  int64_t reuse_start = 1, reuse_interval = 1;  // steps, the first of them 1
  int64_t reuse_steps = 0;                      // of the run that the two are meant for; 0: of any
  int64_t layers = 0;                           // of the model; 0: not said
  bool check_finite = true;
  DType state_dtype = DType::f32;
  KernelChoice kernel = KernelChoice::automatic;
  Products products = Products::bf16;
  int64_t workspace_limit = 0;  // MiB; 0: auto
};

struct Setting {
  const char* name;
  const char* stage;   // whose choice it is
  std::string values;  // what it takes, for people
  std::string help;
  void (*set)(Settings&, std::string_view text);  // throws on a value outside `values`
  std::string (*get)(const Settings&);
};

std::span<const Setting> settings_table();  // lives as long as the process
// Throws Status::invalid_argument; an unknown name lists those that exist.
void set_setting(Settings& settings, std::string_view name, std::string_view text);
std::string get_setting(const Settings& settings, std::string_view name);

// `groups` and `codes` for n tokens, `auto` resolved; never more than n.
int64_t effective_groups(const Settings& settings, int64_t n);
int64_t effective_codes(const Settings& settings, int64_t n);
// Tokens that a sampled iteration of K-means sees, of n: `share`, but at least 8 for each cluster.
int64_t effective_sample(double share, int64_t n, int64_t clusters);

}  // namespace scope
