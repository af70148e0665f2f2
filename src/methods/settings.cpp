// The settings table.
#include "methods/settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <vector>

#include "core/nearest.h"
#include "core/numeric.h"
#include "methods/partition.h"
#include "stages/choices.h"

namespace scope {

namespace {

[[noreturn]] void refuse(const char* name, std::string_view got, std::string_view expected) {
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

// "0.2:0.3,1:0.08", in millionths rising.
std::vector<DensityStep> density_steps(std::string_view text) {
  const char* expected = "none or SHARE:DENSITY,... in (0, 1], each share above the one before and the last 1";
  std::vector<DensityStep> steps;
  int64_t before = 0;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view entry = text.substr(at, end - at);
    const size_t colon = entry.find(':');
    if (colon == std::string_view::npos) refuse("density_steps", text, expected);
    steps.push_back({share("density_steps", entry.substr(0, colon), false, expected),
                     share("density_steps", entry.substr(colon + 1), false, expected)});
    const int64_t until = to_millionths(steps.back().until);
    if (until <= before) refuse("density_steps", text, expected);
    before = until;
    at = end + 1;
  }
  if (before != to_millionths(1)) refuse("density_steps", text, expected);
  return steps;
}

std::string density_steps_text(const std::vector<DensityStep>& steps) {
  std::string text;
  for (const DensityStep& step : steps) text += fmt::format("{}{}:{}", text.empty() ? "" : ",", step.until, step.density);
  return text.empty() ? "none" : text;
}

double cosine(const char* name, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= -1.0 && value <= 1.0))
    refuse(name, text, "a cosine in [-1, 1]");
  return value;
}

template <class Row>
auto choice(const char* name, std::string_view text, std::span<const Row> rows) {
  for (const Row& each : rows) {
    if (text == each.name) return each.choice;
  }
  refuse(name, text, "one of " + names(rows, ", ") + did_you_mean_row(text, rows));
}

// A choice that no stage makes, and so no more than a name.
template <class Choice>
struct NameRow {
  Choice choice;
  const char* name;
};
constexpr NameRow<bool> kSwitchRows[] = {{false, "no"}, {true, "yes"}};
constexpr NameRow<DType> kStateTypeRows[] = {{DType::f32, "f32"}, {DType::bf16, "bf16"}};
constexpr NameRow<KernelChoice> kKernelRows[] = {
    {KernelChoice::automatic, "auto"}, {KernelChoice::wgmma, "wgmma"}, {KernelChoice::portable, "portable"}};
constexpr std::span<const NameRow<bool>> kSwitch = kSwitchRows;
constexpr std::span<const NameRow<DType>> kStateTypes = kStateTypeRows;
constexpr std::span<const NameRow<KernelChoice>> kKernels = kKernelRows;

template <class Choice>
std::string name_of(Choice choice, std::span<const NameRow<Choice>> rows) {
  return std::find_if(rows.begin(), rows.end(), [&](const auto& each) { return each.choice == choice; })->name;
}
constexpr int64_t kMostClusters = 65536, kMostSteps = 1'000'000'000;

// What `auto` is for n tokens.
struct Auto {
  int64_t tokens, least, most;  // tokens of a cluster; clusters
  int64_t clusters(int64_t n) const { return std::clamp(ceil_div(n, tokens), least, most); }
  std::string text() const { return fmt::format("clamp(ceil(tokens / {}), {}, {})", tokens, least, most); }
};
constexpr Auto kAutoGroups{36, 16, 300}, kAutoCodes{64, 16, 333};

std::string count_text(int64_t value) { return value == 0 ? "auto" : std::to_string(value); }

int64_t count_or_auto(const char* name, std::string_view text) {
  return text == "auto" ? 0 : integer(name, text, 1, kMostClusters, "auto or 1..65536");
}

// "kmeans: by K-means over all channels; raster: …"
template <class Row>
std::string help_of(std::span<const Row> rows) {
  std::string text;
  for (const Row& each : rows) text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", each.name, each.help);
  return text;
}

// "clusters, error_aware": the rows of which something holds.
template <class Row, class Holds>
std::string names_where(std::span<const Row> rows, const Holds& holds) {
  std::string text;
  for (const Row& each : rows) {
    if (holds(each)) text.append(text.empty() ? "" : ", ").append(each.name);
  }
  return text;
}

// "1/2 of the target (hybrid, …) or 1/4 (…)": what an alpha is lowered to under a target.
std::string floors() {
  std::map<int, std::string> rules;
  for (const RuleRow& rule : rule_rows()) {
    if (rule.floor == 0) continue;
    std::string& which = rules[rule.floor];
    which.append(which.empty() ? "" : ", ").append(rule.name);
  }
  std::string text;
  for (const auto& [floor, which] : rules) {
    text += fmt::format("{}1/{}{} ({})", text.empty() ? "" : " or ", floor, text.empty() ? " of the target" : "", which);
  }
  return text;
}

std::vector<Setting> make_table() {
  return {
      {"group", "group", names(grouping_rows()), "how queries are grouped. " + help_of(grouping_rows()),
       [](Settings& s, std::string_view t) { s.group = choice("group", t, grouping_rows()); },
       [](const Settings& s) { return std::string(row(s.group).name); }},
      {"groups", "group", "auto | 1..65536", "number of query groups; auto = " + kAutoGroups.text(),
       [](Settings& s, std::string_view t) { s.groups = count_or_auto("groups", t); },
       [](const Settings& s) { return count_text(s.groups); }},
      {"q_block", "group", "1..65536",
       fmt::format("queries in a block (group = {})",
                   names_where(grouping_rows(), [](const GroupingRow& each) { return each.blocks; })),
       [](Settings& s, std::string_view t) { s.q_block = integer("q_block", t, 1, kMostClusters, "1..65536"); },
       [](const Settings& s) { return std::to_string(s.q_block); }},
      {"encode", "encode", names(encoding_rows()), "what a key's code is. " + help_of(encoding_rows()),
       [](Settings& s, std::string_view t) { s.encode = choice("encode", t, encoding_rows()); },
       [](const Settings& s) { return std::string(row(s.encode).name); }},
      {"partition", "encode", "rope | even:M | random:M",
       "how channels are split into subspaces. rope: the T, H and W ranges; even:M: M runs of channels; random:M: M sets of "
       "shuffled channels",
       [](Settings& s, std::string_view t) {
         check_partition_name(t);
         s.partition = t;
       },
       [](const Settings& s) { return s.partition; }},
      {"codes", "encode", "auto | 1..65536", "codebook entries in each subspace; auto = " + kAutoCodes.text(),
       [](Settings& s, std::string_view t) { s.codes = count_or_auto("codes", t); },
       [](const Settings& s) { return count_text(s.codes); }},
      {"k_block", "encode", "1..65536",
       fmt::format("keys in a block (encode = {})",
                   names_where(encoding_rows(), [](const EncodingRow& each) { return each.blocks; })),
       [](Settings& s, std::string_view t) { s.k_block = integer("k_block", t, 1, kMostClusters, "1..65536"); },
       [](const Settings& s) { return std::to_string(s.k_block); }},
      {"iterations", "kmeans", "1..10000", "K-means iterations in a warm call; under cocluster, rounds in every call",
       [](Settings& s, std::string_view t) {
         s.iterations = static_cast<int>(integer("iterations", t, 1, 10000, "1..10000"));
       },
       [](const Settings& s) { return std::to_string(s.iterations); }},
      {"first_iterations", "kmeans", "1..10000", "K-means iterations in a first call, which starts from random rows",
       [](Settings& s, std::string_view t) {
         s.first_iterations = static_cast<int>(integer("first_iterations", t, 1, 10000, "1..10000"));
       },
       [](const Settings& s) { return std::to_string(s.first_iterations); }},
      {"first_sample", "kmeans", "(0, 1]",
       "share of the tokens that a first call's iterations see, all but the last 2 (at least 8 tokens for each cluster)",
       [](Settings& s, std::string_view t) { s.first_sample = share("first_sample", t, false, "a share in (0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.first_sample); }},
      {"warm_sample", "kmeans", "(0, 1]",
       "share of the tokens that a warm call's iterations see, all but the last (at least 8 tokens for each cluster)",
       [](Settings& s, std::string_view t) { s.warm_sample = share("warm_sample", t, false, "a share in (0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.warm_sample); }},
      {"seed", "kmeans", "0..9223372036854775807",
       "seed of the starting rows and of partition random:M; draws are the same for every head, batch slot and rank",
       [](Settings& s, std::string_view t) {
         s.seed = static_cast<uint64_t>(integer("seed", t, 0, std::numeric_limits<int64_t>::max(), "an integer >= 0"));
       },
       [](const Settings& s) { return std::to_string(s.seed); }},
      {"proxy", "score", names(proxy_rows()), "how keys are scored. " + help_of(proxy_rows()),
       [](Settings& s, std::string_view t) { s.proxy = choice("proxy", t, proxy_rows()); },
       [](const Settings& s) { return std::string(row(s.proxy).name); }},
      {"rule", "select", names(rule_rows()),
       fmt::format("what a group keeps: keys, or whole codes of a single subspace ({1}). {0}", help_of(rule_rows()),
                   names_where(rule_rows(), [](const RuleRow& each) { return each.whole_codes; })),
       [](Settings& s, std::string_view t) { s.rule = choice("rule", t, rule_rows()); },
       [](const Settings& s) { return std::string(row(s.rule).name); }},
      {"rho", "select", "(0, 1]",
       "share of the proxy's mass that the kept keys must reach, or must not pass, where the rule says so",
       [](Settings& s, std::string_view t) { s.rho = share("rho", t, false, "a share in (0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.rho); }},
      {"alpha", "select", "[0, 1]",
       fmt::format("least share of keys ({}) or codes ({}) that a group keeps",
                   names_where(rule_rows(), [](const RuleRow& each) { return each.floor > 0 && !each.whole_codes; }),
                   names_where(rule_rows(), [](const RuleRow& each) { return each.floor > 0 && each.whole_codes; })),
       [](Settings& s, std::string_view t) { s.alpha = share("alpha", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.alpha); }},
      {"alpha_first", "select", names(kSwitch),
       "whether a target density leaves alpha as it is. no: a target lowers alpha as target_density says, so that heads may "
       "differ; yes: only a target that is not above alpha lowers it",
       [](Settings& s, std::string_view t) { s.alpha_first = choice("alpha_first", t, kSwitch); },
       [](const Settings& s) { return name_of(s.alpha_first, kSwitch); }},
      {"profile", "select", "none | FILE",
       fmt::format("CSV of `scope profile` or of SVOO's authors. In the place of alpha it gives each head's density at the "
                   "call's step and layer; alpha holds where it has none ({})",
                   names_where(rule_rows(), [](const RuleRow& each) { return each.profile; })),
       [](Settings& s, std::string_view t) {
         s.profile = t == "none" ? nullptr : std::make_shared<const Profile>(read_profile(std::string(t)));
       },
       [](const Settings& s) { return s.profile == nullptr ? "none" : s.profile->path; }},
      {"profile_low", "select", "[0, 1]", "a lower density of the profile is raised to this",
       [](Settings& s, std::string_view t) { s.profile_low = share("profile_low", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.profile_low); }},
      {"profile_high", "select", "[0, 1]", "a higher density of the profile is lowered to this",
       [](Settings& s, std::string_view t) { s.profile_high = share("profile_high", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.profile_high); }},
      {"density", "select", "(0, 1]",
       "share of keys or blocks to keep, where the rule says so: by every group, or on average (target)",
       [](Settings& s, std::string_view t) { s.density = share("density", t, false, "a share in (0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.density); }},
      {"target_density", "select", "none | (0, 1]",
       "density that each call meets, under any rule: the call solves for what the rule compares with; a larger alpha is "
       "lowered to " +
           floors(),
       [](Settings& s, std::string_view t) {
         s.target_density = t == "none" ? 0.0 : share("target_density", t, false, "none or a share in (0, 1]");
       },
       [](const Settings& s) { return s.target_density == 0 ? "none" : fmt::format("{}", s.target_density); }},
      {"density_steps", "select", "none | SHARE:DENSITY,...",
       "target_density by step. 0.2:0.3,1:0.08 is 0.3 in the first fifth of the steps, then 0.08. Shares rise to 1; density "
       "1 is a dense call; a call without a step takes the last",
       [](Settings& s, std::string_view t) {
         s.density_steps = t == "none" ? std::vector<DensityStep>{} : density_steps(t);
       },
       [](const Settings& s) { return density_steps_text(s.density_steps); }},
      {"target_scope", "select", names(target_scope_rows()),
       "what meets target_density or density_steps, or density under rule target. " + help_of(target_scope_rows()),
       [](Settings& s, std::string_view t) { s.target_scope = choice("target_scope", t, target_scope_rows()); },
       [](const Settings& s) { return std::string(row(s.target_scope).name); }},
      {"select_stride", "select", "1..64",
       fmt::format("n, where what a group keeps is decided from every n-th key, once these are {} or more (proxy = exact)",
                   kFewestSampledKeys),
       [](Settings& s, std::string_view t) { s.select_stride = integer("select_stride", t, 1, 64, "1..64"); },
       [](const Settings& s) { return std::to_string(s.select_stride); }},
      {"similarity", "select", "[-1, 1]",
       fmt::format(
           "a block is similar if the mean cosine of its rows is above this; blocks that are not are kept whole ({})",
           names_where(rule_rows(), [](const RuleRow& each) { return each.similarity; })),
       [](Settings& s, std::string_view t) { s.similarity = cosine("similarity", t); },
       [](const Settings& s) { return fmt::format("{}", s.similarity); }},
      {"tail", "attend", names(tail_rows()), "what stands for the keys that a group drops. " + help_of(tail_rows()),
       [](Settings& s, std::string_view t) {
         const Tail tail = choice("tail", t, tail_rows());
         require(!s.dense || tail == Tail::none, Status::invalid_argument, "tail: got {}, and method dense drops no keys",
                 t);
         s.tail = tail;
       },
       [](const Settings& s) { return std::string(row(s.tail).name); }},
      {"tail_weight", "attend", "[0, 1]", "share of the dropped keys' weight that goes to their mean (tail = mean, means)",
       [](Settings& s, std::string_view t) { s.tail_weight = share("tail_weight", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.tail_weight); }},
      {"tail_parts", "attend", "1..16", "parts that each group is split into, each with a mean of its own (tail = means)",
       [](Settings& s, std::string_view t) { s.tail_parts = integer("tail_parts", t, 1, kMostParts, "1..16"); },
       [](const Settings& s) { return std::to_string(s.tail_parts); }},
      {"tail_stride", "attend", "1..64", "n, where the means are taken from every n-th key (tail = means)",
       [](Settings& s, std::string_view t) { s.tail_stride = integer("tail_stride", t, 1, 64, "1..64"); },
       [](const Settings& s) { return std::to_string(s.tail_stride); }},
      {"tail_follow", "attend", "[0, 1]",
       "how much of a query's difference from those beside it goes into what stands for the dropped keys (tail = means)",
       [](Settings& s, std::string_view t) { s.tail_follow = share("tail_follow", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.tail_follow); }},
      {"dense_layers", "schedule", "0..100000", "how many of the first layers attend densely at every step",
       [](Settings& s, std::string_view t) { s.dense_layers = integer("dense_layers", t, 0, 100000, "0..100000"); },
       [](const Settings& s) { return std::to_string(s.dense_layers); }},
      {"dense_steps", "schedule", "[0, 1]",
       "share of the steps that attend densely at the start, rounded down to whole steps",
       [](Settings& s, std::string_view t) { s.dense_steps = share("dense_steps", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.dense_steps); }},
      {"dense_last_steps", "schedule", "[0, 1]",
       "share of the steps that attend densely at the end, rounded down to whole steps",
       [](Settings& s, std::string_view t) { s.dense_last_steps = share("dense_last_steps", t, true, "a share in [0, 1]"); },
       [](const Settings& s) { return fmt::format("{}", s.dense_last_steps); }},
      {"warm_prefix", "schedule", names(kSwitch),
       "cluster in the dense calls of dense_steps and density_steps too, so that the first sparse call is warm",
       [](Settings& s, std::string_view t) { s.warm_prefix = choice("warm_prefix", t, kSwitch); },
       [](const Settings& s) { return name_of(s.warm_prefix, kSwitch); }},
      {"reuse_start", "schedule", "1..1000000000",
       "first step, counted from 1, whose clusters are reused (reuse_interval > 1): it clusters, the steps after it reuse",
       [](Settings& s, std::string_view t) { s.reuse_start = integer("reuse_start", t, 1, kMostSteps, "1..1000000000"); },
       [](const Settings& s) { return std::to_string(s.reuse_start); }},
      {"reuse_interval", "schedule", "1..1000000000",
       "steps from one clustering to the next, from reuse_start on; calls between them take the state's clusters as they "
       "are",
       [](Settings& s, std::string_view t) {
         s.reuse_interval = integer("reuse_interval", t, 1, kMostSteps, "1..1000000000");
       },
       [](const Settings& s) { return std::to_string(s.reuse_interval); }},
      {"reuse_steps", "schedule", "0..1000000000",
       "steps of the run that reuse_start and reuse_interval are meant for; a longer or shorter run scales them; 0 = never",
       [](Settings& s, std::string_view t) { s.reuse_steps = integer("reuse_steps", t, 0, kMostSteps, "0..1000000000"); },
       [](const Settings& s) { return std::to_string(s.reuse_steps); }},
      {"layers", "schedule", "0..100000", "number of the model's layers, which a profile must have; 0 = not said",
       [](Settings& s, std::string_view t) { s.layers = integer("layers", t, 0, 100000, "0..100000"); },
       [](const Settings& s) { return std::to_string(s.layers); }},
      {"state_dtype", "state", names(kStateTypes),
       "type of the centroids that are kept between calls; bf16 halves the state",
       [](Settings& s, std::string_view t) { s.state_dtype = choice("state_dtype", t, kStateTypes); },
       [](const Settings& s) { return name_of(s.state_dtype, kStateTypes); }},
      {"check_finite", "call", names(kSwitch),
       "refuse NaN, Inf and magnitudes over 1e18 in q and k before anything is written; a GPU sees less, and later",
       [](Settings& s, std::string_view t) { s.check_finite = choice("check_finite", t, kSwitch); },
       [](const Settings& s) { return name_of(s.check_finite, kSwitch); }},
      {"kernel", "attend", names(kKernels),
       "CUDA kernels of attend, K-means and the mean; wgmma needs sm_90, portable runs on sm_80 and later",
       [](Settings& s, std::string_view t) { s.kernel = choice("kernel", t, kKernels); },
       [](const Settings& s) { return name_of(s.kernel, kKernels); }},
      {"products", "attend", names(products_rows()),
       "what attend multiplies, in dense calls too. " + help_of(products_rows()),
       [](Settings& s, std::string_view t) { s.products = choice("products", t, products_rows()); },
       [](const Settings& s) { return std::string(row(s.products).name); }},
      {"workspace_limit", "call", "auto | 1..1048576",
       "MiB of workspace on a GPU. Heads go in as few chunks as fit, with the same bits. auto = the most of 400, 1 % of "
       "the GPU's memory (with 8-bit products 4 times as much) and 1.5 times the least",
       [](Settings& s, std::string_view t) {
         s.workspace_limit = t == "auto" ? 0 : integer("workspace_limit", t, 1, 1048576, "auto or 1..1048576 MiB");
       },
       [](const Settings& s) { return count_text(s.workspace_limit); }},
  };
}

// Never freed: scope_setting_at hands out its strings. (A list inside `*new` is destroyed at every call by clang 14.)
const std::vector<Setting>& table() {
  static const auto& rows = *new std::vector<Setting>(make_table());
  return rows;
}

const Setting& find(std::string_view name) {
  for (const Setting& setting : table()) {
    if (name == setting.name) return setting;
  }
  fail(Status::invalid_argument, "setting: there is no \"{}\"{}; there are {}", name, did_you_mean_row(name, table()),
       names(settings_table(), ", "));
}

}  // namespace

std::span<const Setting> settings_table() { return table(); }

void set_setting(Settings& settings, std::string_view name, std::string_view text) { find(name).set(settings, text); }

std::string get_setting(const Settings& settings, std::string_view name) { return find(name).get(settings); }

int64_t effective_groups(const Settings& settings, int64_t n) {
  if (row(settings.group).blocks) return ceil_div(n, settings.q_block);
  const int64_t wanted = settings.groups != 0 ? settings.groups : kAutoGroups.clusters(n);
  return std::min(wanted, n);
}

int64_t effective_codes(const Settings& settings, int64_t n) {
  if (row(settings.encode).blocks) return ceil_div(n, settings.k_block);
  const int64_t wanted = settings.codes != 0 ? settings.codes : kAutoCodes.clusters(n);
  return std::min(wanted, n);
}

int64_t effective_sample(double share, int64_t n, int64_t clusters) {
  return std::min(n, std::max(ceil_share(share, n), 8 * clusters));
}

}  // namespace scope
