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

double cosine(const char* name, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= -1.0 && value <= 1.0))
    refuse(name, text, "a cosine in [-1, 1]");
  return value;
}

template <size_t n>
int choice(const char* name, std::string_view text, const char* const (&names)[n], const char* expected) {
  for (size_t i = 0; i < n; ++i) {
    if (text == names[i]) return static_cast<int>(i);
  }
  refuse(name, text, expected);
}

constexpr const char* kGroupings[] = {"kmeans", "raster", "blocks", "cocluster"};
constexpr const char* kEncodings[] = {"kmeans", "blocks", "cocluster"};
constexpr const char* kProxies[] = {"codes", "exact"};
constexpr const char* kRules[] = {"fixed",    "top_p",       "hybrid",     "online",     "target",
                                  "clusters", "blocks_topk", "blocks_cdf", "error_aware"};
constexpr const char* kTails[] = {"none", "first_order", "centroids"};
constexpr const char* kSwitch[] = {"no", "yes"};
constexpr const char* kStateTypes[] = {"f32", "bf16"};
constexpr const char* kKernels[] = {"auto", "wgmma", "portable"};
constexpr int64_t kMostClusters = 65536, kMostSteps = 1'000'000'000;

std::string count_text(int64_t value) { return value == 0 ? "auto" : std::to_string(value); }

int64_t count_or_auto(const char* name, std::string_view text) {
  return text == "auto" ? 0 : integer(name, text, 1, kMostClusters, "auto or 1..65536");
}

const Setting kTable[] = {
    {"group", "group", "kmeans | raster | blocks | cocluster",
     "how queries are grouped: by K-means, in raster order as `groups` runs or as blocks of `q_block`, or with the keys",
     [](Settings& s, std::string_view t) {
       s.group = static_cast<Grouping>(choice("group", t, kGroupings, "kmeans, raster, blocks or cocluster"));
     },
     [](const Settings& s) { return std::string(kGroupings[static_cast<int>(s.group)]); }},
    {"groups", "group", "auto | 1..65536", "query groups; auto = clamp(ceil(tokens / 96), 16, 300)",
     [](Settings& s, std::string_view t) { s.groups = count_or_auto("groups", t); },
     [](const Settings& s) { return count_text(s.groups); }},
    {"q_block", "group", "1..65536", "queries of a block (group = blocks)",
     [](Settings& s, std::string_view t) { s.q_block = integer("q_block", t, 1, kMostClusters, "1..65536"); },
     [](const Settings& s) { return std::to_string(s.q_block); }},
    {"encode", "encode", "kmeans | blocks | cocluster",
     "what a key's code is: its cluster in each subspace, its block of `k_block` keys in raster order, or its cluster when "
     "clustered with the queries",
     [](Settings& s, std::string_view t) {
       s.encode = static_cast<Encoding>(choice("encode", t, kEncodings, "kmeans, blocks or cocluster"));
     },
     [](const Settings& s) { return std::string(kEncodings[static_cast<int>(s.encode)]); }},
    {"partition", "encode", "rope | even:M | random:M", "how channels are split into subspaces; rope = the T/H/W ranges",
     [](Settings& s, std::string_view t) {
       check_partition_name(t);
       s.partition = t;
     },
     [](const Settings& s) { return s.partition; }},
    {"codes", "encode", "auto | 1..65536", "codebook entries per subspace; auto = clamp(ceil(tokens / 64), 16, 333)",
     [](Settings& s, std::string_view t) { s.codes = count_or_auto("codes", t); },
     [](const Settings& s) { return count_text(s.codes); }},
    {"k_block", "encode", "1..65536", "keys of a block (encode = blocks)",
     [](Settings& s, std::string_view t) { s.k_block = integer("k_block", t, 1, kMostClusters, "1..65536"); },
     [](const Settings& s) { return std::to_string(s.k_block); }},
    {"iterations", "kmeans", "1..10000", "K-means iterations of a warm call; rounds of co-clustering in every call",
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
    {"rule", "select", "fixed | top_p | hybrid | online | target | clusters | blocks_topk | blocks_cdf | error_aware",
     "how many keys a group keeps; target solves rho for `density`; the last four keep whole codes of a single subspace",
     [](Settings& s, std::string_view t) {
       s.rule = static_cast<Rule>(choice("rule", t, kRules,
                                         "fixed, top_p, hybrid, online, target, clusters, blocks_topk, "
                                         "blocks_cdf or error_aware"));
     },
     [](const Settings& s) { return std::string(kRules[static_cast<int>(s.rule)]); }},
    {"rho", "select", "(0, 1]",
     "proxy mass that a group's keys must reach (top_p, hybrid, online, clusters, error_aware) or not pass (blocks_cdf)",
     [](Settings& s, std::string_view t) { s.rho = share("rho", t, false, "a share in (0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.rho); }},
    {"alpha", "select", "[0, 1]",
     "least share of keys (hybrid, online, target) or codes (clusters, error_aware) that a group keeps",
     [](Settings& s, std::string_view t) { s.alpha = share("alpha", t, true, "a share in [0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.alpha); }},
    {"profile", "select", "none | FILE",
     "CSV of `scope profile`: in the place of alpha, each head's density at the call's step and layer; alpha where it has "
     "none (clusters, error_aware)",
     [](Settings& s, std::string_view t) {
       s.profile = t == "none" ? nullptr : std::make_shared<const Profile>(read_profile(std::string(t)));
     },
     [](const Settings& s) { return s.profile == nullptr ? "none" : s.profile->path; }},
    {"profile_low", "select", "[0, 1]", "what a density of the profile is raised to",
     [](Settings& s, std::string_view t) { s.profile_low = share("profile_low", t, true, "a share in [0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.profile_low); }},
    {"profile_high", "select", "[0, 1]", "what a density of the profile is lowered to",
     [](Settings& s, std::string_view t) { s.profile_high = share("profile_high", t, true, "a share in [0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.profile_high); }},
    {"density", "select", "(0, 1]",
     "share of keys kept by every group (fixed) or on average in each head (target), or of codes by every group "
     "(blocks_topk)",
     [](Settings& s, std::string_view t) { s.density = share("density", t, false, "a share in (0, 1]"); },
     [](const Settings& s) { return fmt::format("{}", s.density); }},
    {"target_density", "select", "none | (0, 1]",
     "density that each head is to meet, whatever the rule: rho (blocks_topk: the share of codes) is solved in the call, "
     "and an alpha above half of it is lowered to half (error_aware: a quarter)",
     [](Settings& s, std::string_view t) {
       s.target_density = t == "none" ? 0.0 : share("target_density", t, false, "none or a share in (0, 1]");
     },
     [](const Settings& s) { return s.target_density == 0 ? "none" : fmt::format("{}", s.target_density); }},
    {"similarity", "select", "[-1, 1]",
     "mean cosine within a block above which it is similar; others are kept whole (blocks_topk, blocks_cdf)",
     [](Settings& s, std::string_view t) { s.similarity = cosine("similarity", t); },
     [](const Settings& s) { return fmt::format("{}", s.similarity); }},
    {"tail", "attend", "none | first_order | centroids",
     "what stands for the keys that a group drops: one virtual key per group, or one per whole cluster that it drops",
     [](Settings& s, std::string_view t) {
       s.tail = static_cast<Tail>(choice("tail", t, kTails, "none, first_order or centroids"));
     },
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
    {"reuse_start", "schedule", "0..1000000000", "step from which on clusters are reused (reuse_interval > 1)",
     [](Settings& s, std::string_view t) { s.reuse_start = integer("reuse_start", t, 0, kMostSteps, "0..1000000000"); },
     [](const Settings& s) { return std::to_string(s.reuse_start); }},
    {"reuse_interval", "schedule", "1..1000000000",
     "steps from one clustering to the next, from reuse_start on; between them clusters come from the state as they are",
     [](Settings& s, std::string_view t) {
       s.reuse_interval = integer("reuse_interval", t, 1, kMostSteps, "1..1000000000");
     },
     [](const Settings& s) { return std::to_string(s.reuse_interval); }},
    {"layers", "schedule", "0..100000", "layers of the model, which a profile must have; 0 = not said",
     [](Settings& s, std::string_view t) { s.layers = integer("layers", t, 0, 100000, "0..100000"); },
     [](const Settings& s) { return std::to_string(s.layers); }},
    {"state_dtype", "state", "f32 | bf16", "how centroids are kept between calls; bf16 halves the state",
     [](Settings& s, std::string_view t) {
       s.state_dtype = choice("state_dtype", t, kStateTypes, "f32 or bf16") == 0 ? DType::f32 : DType::bf16;
     },
     [](const Settings& s) { return std::string(dtype_name(s.state_dtype)); }},
    {"check_finite", "call", "no | yes", "refuse NaN and Inf in q and k before anything is written",
     [](Settings& s, std::string_view t) { s.check_finite = choice("check_finite", t, kSwitch, "no or yes") == 1; },
     [](const Settings& s) { return std::string(kSwitch[s.check_finite ? 1 : 0]); }},
    {"kernel", "attend", "auto | wgmma | portable",
     "which CUDA kernels attend and K-means use: wgmma needs sm_90, portable runs on sm_80 and later",
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
  if (settings.group == Grouping::blocks) return ceil_div(n, settings.q_block);
  const int64_t wanted = settings.groups != 0 ? settings.groups : std::clamp<int64_t>(ceil_div(n, 96), 16, 300);
  return std::min(wanted, n);
}

int64_t effective_codes(const Settings& settings, int64_t n) {
  if (settings.encode == Encoding::blocks) return ceil_div(n, settings.k_block);
  const int64_t wanted = settings.codes != 0 ? settings.codes : std::clamp<int64_t>(ceil_div(n, 64), 16, 333);
  return std::min(wanted, n);
}

int64_t effective_sample(const Settings& settings, int64_t n, int64_t clusters) {
  return std::min(n, std::max(ceil_share(settings.first_sample, n), 8 * clusters));
}

}  // namespace scope
