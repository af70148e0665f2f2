// Each method as the settings that make it.
#include "methods/methods.h"

#include "core/nearest.h"
#include "methods/models.h"
#include "stages/choices.h"

namespace scope {

namespace {

// A model's rho is ours, not the baselines'.
void scope_model(const Model& model, Settings& settings) { settings.rho = model.rho; }

void svg2_model(const Model& model, Settings& settings) {
  settings.groups = model.svg2.groups;
  settings.dense_steps = model.svg2.dense_steps;
}

void svoo_model(const Model& model, Settings& settings) {
  settings.rho = model.svoo.p;
  settings.profile_low = model.svoo.low;
  settings.profile_high = model.svoo.high;
  settings.reuse_start = model.svoo.start;
  settings.reuse_interval = model.svoo.interval;
  settings.reuse_steps = model.svoo.steps;
  settings.warm_prefix = false;  // each of its clusterings starts from random rows
}

void no_model(const Model&, Settings&) {}

// What goes beyond the paper, as whole videos chose it (docs/notebook/choices.md).
Settings with_means() {
  return {.warm_sample = 0.25, .proxy = ProxyKind::exact, .select_stride = 2, .tail = Tail::means, .tail_weight = 1};
}

// scope-mean at one density, without dense steps and layers, for every model.
Settings preset(double density) {
  Settings settings = with_means();
  settings.target_density = density;
  settings.dense_layers = 0;
  settings.dense_steps = 0;
  return settings;
}

void preset_model(const Model& model, Settings& settings) {
  scope_model(model, settings);
  settings.dense_layers = 0;
  settings.dense_steps = 0;
}

// Where a density is met is a row's own: one rho for all heads was measured for ours (docs/notebook/choices.md), not for
// the baselines.
constexpr Method kTable[] = {
    {.name = "scope",
     .help =
         "SCOPE; the numbers of groups and codes follow the sequence length, and the first K-means sees a sample of tokens",
     .apply_model = scope_model,
     .defaults = [] { return Settings{}; }},
    {.name = "scope-paper",
     .help = "SCOPE with the paper's settings: 300 groups, 333 codes per subspace, 50 full first iterations",
     .shares_branches = true,  // "the same implementation as SVG2"
     .apply_model = scope_model,
     .defaults = [] { return Settings{.groups = 300, .codes = 333, .first_sample = 1.0, .alpha_first = true}; }},
    {.name = "scope-exact",
     .help = "SCOPE with the exact proxy: centroids score the keys themselves, and nothing is encoded",
     .apply_model = scope_model,
     .defaults = [] { return Settings{.proxy = ProxyKind::exact}; }},
    {.name = "scope-mean",
     .help = "scope-exact with a tail that is not in the paper: means of the keys that a group drops stand for them",
     .apply_model = scope_model,
     .defaults = with_means},
    {.name = "fast",
     .help = "preset: scope-mean at density 0.12, without dense steps and layers",
     .apply_model = preset_model,
     .defaults = [] { return preset(0.12); }},
    {.name = "quality",
     .help = "preset: scope-mean at density 0.18, without dense steps and layers",
     .apply_model = preset_model,
     .defaults = [] { return preset(0.18); }},
    {.name = "svg2",
     .help =
         "Sparse VideoGen2: keeps whole clusters of keys by weight; 300 groups, 1,000 clusters, 50 full first iterations",
     .shares_branches = true,
     .apply_model = svg2_model,
     .defaults =
         [] {
           return Settings{.groups = 300, .partition = "even:1", .codes = 1000, .first_sample = 1.0, .rule = Rule::clusters};
         }},
    {.name = "svg2-ear",
     .help = "svg2 with SVG-EAR: keeps the clusters that cost most to leave out; centroids stand for the others",
     .apply_model = svg2_model,
     .defaults =
         [] {
           return Settings{.groups = 300,
                           .partition = "even:1",
                           .codes = 1000,
                           .first_sample = 1.0,
                           .rule = Rule::error_aware,
                           .tail = Tail::centroids};
         }},
    {.name = "svoo",
     .help = "SVOO: clusters queries into 256 and keys into 1,024, together; a profile gives the least share of clusters to "
             "keep",
     .shares_branches = true,
     .profiled = true,
     .apply_model = svoo_model,
     .defaults =
         [] {
           return Settings{.group = Grouping::cocluster,
                           .groups = 256,
                           .encode = Encoding::cocluster,
                           .partition = "even:1",
                           .codes = 1024,
                           .first_iterations = 2,
                           .first_sample = 1.0,
                           .rule = Rule::clusters,
                           .profile_low = 0.15,
                           .profile_high = 0.2,
                           .target_scope = TargetScope::head,
                           .reuse_start = 11,
                           .reuse_interval = 40,
                           .reuse_steps = 50};
         }},
    {.name = "sparge",
     .help = "SpargeAttn, topk form: each block of 64 queries keeps half of the blocks of 128 keys, by block means",
     .apply_model = no_model,
     .defaults =
         [] {
           return Settings{.group = Grouping::blocks,
                           .encode = Encoding::blocks,
                           .partition = "even:1",
                           .rule = Rule::blocks_topk,
                           .density = 0.5,
                           .target_scope = TargetScope::head};
         }},
    {.name = "sparge-cdf",
     .help = "SpargeAttn, cdf form: keeps blocks within 0.98 of their softmax, and every block that is not similar",
     .apply_model = no_model,
     .defaults =
         [] {
           return Settings{.group = Grouping::blocks,
                           .encode = Encoding::blocks,
                           .partition = "even:1",
                           .rule = Rule::blocks_cdf,
                           .rho = 0.98,
                           .target_scope = TargetScope::head,
                           .similarity = 0.6};
         }},
    {.name = "sol",
     .help = "Sol-Attn: keeps blocks of 64 that score a deviation above their row's mean; block means stand for the others",
     .morton = true,
     .apply_model = no_model,
     .defaults =
         [] {
           return Settings{.group = Grouping::blocks,
                           .encode = Encoding::means,
                           .partition = "even:1",
                           .k_block = 64,
                           .rule = Rule::deviation,
                           .rho = 0.158655,  // of a normal row lies above one deviation
                           .tail = Tail::centroids};
         }},
    {.name = "dense",
     .help = "every query attends to every key",
     .apply_model = scope_model,
     .defaults = [] { return Settings{.dense = true}; }},
};

}  // namespace

std::span<const Method> methods_table() { return kTable; }

const Method& default_method() { return kTable[0]; }

const Method& find_method(std::string_view name) {
  for (const Method& method : kTable) {
    if (name == method.name) return method;
  }
  fail(Status::invalid_argument, "method: there is no \"{}\"{}; there are {}", name, did_you_mean_row(name, methods_table()),
       names(methods_table(), ", "));
}

}  // namespace scope
