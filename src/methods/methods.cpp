// Each method as the settings that make it.
#include "methods/methods.h"

namespace scope {

namespace {

const Method kTable[] = {
    {"scope", "SCOPE with group and code counts that follow the sequence length, and a sampled first K-means",
     [] { return Settings{}; }},
    {"scope-paper", "SCOPE with the paper's settings: 300 groups, 333 codes per subspace, 50 full first iterations",
     [] { return Settings{.groups = 300, .codes = 333, .first_sample = 1.0}; }},
    {"scope-exact", "SCOPE with the exact proxy: centroids score the keys themselves, and nothing is encoded",
     [] { return Settings{.proxy = ProxyKind::exact}; }},
    {"svg2", "Sparse VideoGen2: whole clusters of keys by weight, 300 groups and 1,000 clusters, 50 full first iterations",
     [] {
       return Settings{.groups = 300, .partition = "even:1", .codes = 1000, .first_sample = 1.0, .rule = Rule::clusters};
     }},
    {"svg2-ear",
     "svg2 with SVG-EAR: clusters by the error of leaving them out, and centroids in the place of those left out",
     [] {
       return Settings{.groups = 300,
                       .partition = "even:1",
                       .codes = 1000,
                       .first_sample = 1.0,
                       .rule = Rule::error_aware,
                       .tail = Tail::centroids};
     }},
    {"svoo", "SVOO: queries and keys clustered together, 256 and 1,024, and a least share of clusters from a profile",
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
                       .reuse_start = 11,
                       .reuse_interval = 40};
     }},
    {"sparge", "SpargeAttn, topk form: blocks of 64 queries keep half of the blocks of 128 keys, by block means",
     [] {
       return Settings{.group = Grouping::blocks,
                       .encode = Encoding::blocks,
                       .partition = "even:1",
                       .rule = Rule::blocks_topk,
                       .density = 0.5};
     }},
    {"sparge-cdf", "SpargeAttn, cdf form: 0.98 of the blocks' softmax, and dissimilar blocks whole",
     [] {
       return Settings{.group = Grouping::blocks,
                       .encode = Encoding::blocks,
                       .partition = "even:1",
                       .rule = Rule::blocks_cdf,
                       .rho = 0.98,
                       .similarity = 0.6};
     }},
    {"dense", "every query attends to every key", [] { return Settings{.dense = true}; }},
};

}  // namespace

std::span<const Method> methods_table() { return kTable; }

const Method& find_method(std::string_view name) {
  for (const Method& method : kTable) {
    if (name == method.name) return method;
  }
  std::string names;
  for (const Method& method : kTable) names += fmt::format("{}{}", names.empty() ? "" : ", ", method.name);
  fail(Status::invalid_argument, "method: there is no \"{}\"; there are {}", name, names);
}

}  // namespace scope
