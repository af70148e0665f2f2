// The settings table.
#include "methods/settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/numeric.h"
#include "methods/partition.h"

namespace scope {

namespace {

[[noreturn]] void refuse(const char* name, std::string_view got, const char* expected) {
  fail(Status::invalid_argument, "{}: got \"{}\", expected {}", name, got, expected);
}

int64_t integer(const char* name, std::string_view text, int64_t low, int64_t high, const char* expected) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) refuse(name, text, expected);
  return value;
}

// Shares are held in millionths, so a value that rounds to 0 where 0 is not allowed is refused too.
double share(const char* name, std::string_view text, bool zero_allowed, const char* expected) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0.0 && value <= 1.0))
    refuse(name, text, expected);
  if (!zero_allowed && to_millionths(value) == 0) refuse(name, text, expected);
  return value;
}

template <size_t n>
int choice(const char* name, std::string_view text, const char* const (&names)[n], const char* expected) {
  for (size_t i = 0; i < n; ++i) {
    if (text == names[i]) return static_cast<int>(i);
  }
  refuse(name, text, expected);
}

constexpr const char* kGroupings[] = {"kmeans", "raster"};
constexpr const char* kProxies[] = {"codes", "exact"};
constexpr const char* kRules[] = {"fixed", "top_p", "hybrid", "online", "target"};
constexpr const char* kTails[] = {"none", "first_order"};
constexpr const char* kSwitch[] = {"no", "yes"};
constexpr const char* kStateTypes[] = {"f32", "bf16"};
constexpr const char* kKernels[] = {"auto", "wgmma", "portable"};
constexpr int64_t kMostClusters = 65536;

std::string count_text(int64_t value) { return value == 0 ? "auto" : std::to_string(value); }

int64_t count_or_auto(const char* name, std::string_view text) {
  return text == "auto" ? 0 : integer(name, text, 1, kMostClusters, "auto or 1..65536");
}

const Setting kTable[] = {
    {"group", "group", "kmeans | raster", "how queries are grouped: by K-means, or in raster order",
     [](Settings& s, std::string_view t) {
       s.group = static_cast<Grouping>(choice("group", t, kGroupings, "kmeans or raster"));
     },
     [](const Settings& s) { return std::string(kGroupings[static_cast<int>(s.group)]); }},
    {"groups", "group", "auto | 1..65536", "query groups; auto = clamp(ceil(tokens / 96), 16, 300)",
     [](Settings& s, std::string_view t) { s.groups = count_or_auto("groups", t); },
     [](const Settings& s) { return count_text(s.groups); }},
    {"partition", "encode", "rope | even:M | random:M", "how channels are split into subspaces; rope = the T/H/W ranges",
     [](Settings& s, std::string_view t) {
       check_partition_name(t);
       s.partition = t;
     },
     [](const Settings& s) { return s.partition; }},
    {"codes", "encode", "auto | 1..65536", "codebook entries per subspace; auto = clamp(ceil(tokens / 64), 16, 333)",
     [](Settings& s, std::string_view t) { s.codes = count_or_auto("codes", t); },
     [](const Settings& s) { return count_text(s.codes); }},
    {"iterations", "kmeans", "1..10000", "K-means iterations of a warm call",
     [](Settings& s, std::string_view t) {
       s.iterations = static_cast<int>(integer("iterations", t, 1, 10000, "1..10000"));
     },
     [](const Settings& s) { return std::to_string(s.iterations); }},
    {"first_iterations", "kmeans", "1..10000", "K-means iterations of a first call, which starts from random rows",
     [](Settings& s, std::string_view t) {
       s.first_iterations = static_cast<int>(integer("first_iterations", t, 1, 10000, "1..10000"));
     },
     [](const Settings& s) { return std::to_string(s.first_iterations); }},
    {"first_sample", "kmeans", "(0, 1]",
     "share of tokens that all but the last 2 first-call iterations see (at least 8 per cluster)",
     [](Settings& s, std::string_view t) { s.first_sample = share("first_sample", t, false, "a share in (0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.first_sample); }},
    {"seed", "kmeans", "0..9223372036854775807",
     "names the random starting rows; the same for every head, batch slot and rank",
     [](Settings& s, std::string_view t) {
       s.seed = static_cast<uint64_t>(integer("seed", t, 0, std::numeric_limits<int64_t>::max(), "an integer >= 0"));
     },
     [](const Settings& s) { return std::to_string(s.seed); }},
    {"proxy", "score", "codes | exact", "score keys by their codes, or exactly against the group centroids (no encode)",
     [](Settings& s, std::string_view t) {
       s.proxy = static_cast<ProxyKind>(choice("proxy", t, kProxies, "codes or exact"));
     },
     [](const Settings& s) { return std::string(kProxies[static_cast<int>(s.proxy)]); }},
    {"rule", "select", "fixed | top_p | hybrid | online | target",
     "how many keys a group keeps; target solves rho for `density`",
     [](Settings& s, std::string_view t) {
       s.rule = static_cast<Rule>(choice("rule", t, kRules, "fixed, top_p, hybrid, online or target"));
     },
     [](const Settings& s) { return std::string(kRules[static_cast<int>(s.rule)]); }},
    {"rho", "select", "(0, 1]", "proxy mass that a group's keys must reach (top_p, hybrid, online)",
     [](Settings& s, std::string_view t) { s.rho = share("rho", t, false, "a share in (0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.rho); }},
    {"alpha", "select", "[0, 1]", "least share of keys that a group keeps (hybrid, online, target)",
     [](Settings& s, std::string_view t) { s.alpha = share("alpha", t, true, "a share in [0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.alpha); }},
    {"density", "select", "(0, 1]", "share of keys kept: by every group (fixed), or on average in each head (target)",
     [](Settings& s, std::string_view t) { s.density = share("density", t, false, "a share in (0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.density); }},
    {"tail", "attend", "none | first_order", "first_order: one virtual key per group stands for the keys it drops",
     [](Settings& s, std::string_view t) { s.tail = static_cast<Tail>(choice("tail", t, kTails, "none or first_order")); },
     [](const Settings& s) { return std::string(kTails[static_cast<int>(s.tail)]); }},
    {"dense_layers", "schedule", "0..100000", "layers below this index attend densely at every step",
     [](Settings& s, std::string_view t) { s.dense_layers = integer("dense_layers", t, 0, 100000, "0..100000"); },
     [](const Settings& s) { return std::to_string(s.dense_layers); }},
    {"dense_steps", "schedule", "[0, 1]", "share of the first denoising steps that attend densely",
     [](Settings& s, std::string_view t) { s.dense_steps = share("dense_steps", t, true, "a share in [0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.dense_steps); }},
    {"dense_last_steps", "schedule", "[0, 1]", "share of the last denoising steps that attend densely",
     [](Settings& s, std::string_view t) { s.dense_last_steps = share("dense_last_steps", t, true, "a share in [0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.dense_last_steps); }},
    {"warm_prefix", "schedule", "no | yes",
     "cluster during the scheduled dense calls too, so that the first sparse call is warm",
     [](Settings& s, std::string_view t) { s.warm_prefix = choice("warm_prefix", t, kSwitch, "no or yes") == 1; },
     [](const Settings& s) { return std::string(kSwitch[s.warm_prefix ? 1 : 0]); }},
    {"state_dtype", "state", "f32 | bf16", "how centroids are kept between calls; bf16 halves the state",
     [](Settings& s, std::string_view t) {
       s.state_dtype = choice("state_dtype", t, kStateTypes, "f32 or bf16") == 0 ? DType::f32 : DType::bf16;
     },
     [](const Settings& s) { return std::string(dtype_name(s.state_dtype)); }},
    {"check_finite", "call", "no | yes", "refuse NaN and Inf in q and k before anything is written",
     [](Settings& s, std::string_view t) { s.check_finite = choice("check_finite", t, kSwitch, "no or yes") == 1; },
     [](const Settings& s) { return std::string(kSwitch[s.check_finite ? 1 : 0]); }},
    {"kernel", "attend", "auto | wgmma | portable",
     "which CUDA attend kernel: wgmma needs sm_90a, portable runs on sm_80 and later",
     [](Settings& s, std::string_view t) {
       s.kernel = static_cast<KernelChoice>(choice("kernel", t, kKernels, "auto, wgmma or portable"));
     },
     [](const Settings& s) { return std::string(kKernels[static_cast<int>(s.kernel)]); }},
    {"workspace_limit", "call", "1..1048576",
     "MiB of workspace on a GPU: heads are processed in as few chunks as fit, with the same bits",
     [](Settings& s, std::string_view t) {
       s.workspace_limit = integer("workspace_limit", t, 1, 1048576, "1..1048576 MiB");
     },
     [](const Settings& s) { return std::to_string(s.workspace_limit); }},
};

const Setting& find(std::string_view name) {
  for (const Setting& setting : kTable) {
    if (name == setting.name) return setting;
  }
  std::string names;
  for (const Setting& setting : kTable) names += fmt::format("{}{}", names.empty() ? "" : ", ", setting.name);
  fail(Status::invalid_argument, "setting: there is no \"{}\"; there are {}", name, names);
}

}  // namespace

std::span<const Setting> settings_table() { return kTable; }

void set_setting(Settings& settings, std::string_view name, std::string_view text) { find(name).set(settings, text); }

std::string get_setting(const Settings& settings, std::string_view name) { return find(name).get(settings); }

int64_t effective_groups(const Settings& settings, int64_t n) {
  const int64_t wanted = settings.groups != 0 ? settings.groups : std::clamp<int64_t>(ceil_div(n, 96), 16, 300);
  return std::min(wanted, n);
}

int64_t effective_codes(const Settings& settings, int64_t n) {
  const int64_t wanted = settings.codes != 0 ? settings.codes : std::clamp<int64_t>(ceil_div(n, 64), 16, 333);
  return std::min(wanted, n);
}

int64_t effective_sample(const Settings& settings, int64_t n, int64_t clusters) {
  return std::min(n, std::max(ceil_share(settings.first_sample, n), 8 * clusters));
}

}  // namespace scope
