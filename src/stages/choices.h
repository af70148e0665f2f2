// The rows of every choice that a method makes: its name, what it needs, and how a target density is met under it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "stages/attend.h"
#include "stages/encode.h"
#include "stages/group.h"
#include "stages/score.h"
#include "stages/select.h"
#include "stages/tail.h"

namespace scope {

struct GroupingRow {
  Grouping choice;
  const char *name, *help;
  bool iterates;   // runs K-means iterations, or rounds of co-clustering
  bool warm;       // starts from a state's centroids
  bool blocks;     // groups are runs of q_block queries
  bool reusable;   // what a state holds of it can stand for a call's own
  bool with_keys;  // clusters queries and keys as one: `encode` must be the same choice
};

struct EncodingRow {
  Encoding choice;
  const char *name, *help;
  bool iterates, warm;
  bool blocks;  // codes are runs of k_block keys
  bool reusable;
  bool with_queries;
  bool means;  // a code is the mean of its keys, and so may stand for them
};

struct ProxyRow {
  ProxyKind choice;
  const char *name, *help;
  bool codes;  // reads codebooks and codes: keys are encoded
};

// How a target density is met under a rule.
enum class Meets {
  itself,     // `density` is that target, of every group
  by_rho,     // `density` is that target, and rho is solved for it in the call
  as_target,  // by rule `target`
  by_bound,   // what the rule compares with is solved in the call
};

struct RuleRow {  // NOLINT(clang-analyzer-optin.performance.Padding): read in this order, and few
  Rule choice;
  const char *name, *help;
  bool whole_codes;  // keeps every key of some codes of one subspace, and no other
  bool similarity;   // needs to know how alike the rows of a block are: blocks on both sides
  bool errors;       // needs what leaving a cluster out costs
  bool profile;      // takes least shares from a profile in the place of alpha
  bool rho;          // compares with a given rho; others keep the share `density`
  int floor;         // under a target, alpha is lowered to at most target / floor; 0: the rule has no floor
  Meets meets;
  bool diagonal = false;  // keeps a query block's own keys and their neighbours: blocks of one size on both sides
};

struct TargetScopeRow {
  TargetScope choice;
  const char *name, *help;
};

struct TailRow {  // NOLINT(clang-analyzer-optin.performance.Padding): read in this order, and few
  Tail choice;
  const char *name, *help;
  bool per_group;       // virtual keys, one for each group that drops single keys
  bool per_code;        // virtual keys, one for each whole cluster that a group drops
  bool mixes;           // a row for each group, or part of one, that its queries mix in
  bool splits = false;  // ... for each part
};

struct ProductsRow {
  Products choice;
  const char *name, *help;
};

std::span<const GroupingRow> grouping_rows();
std::span<const EncodingRow> encoding_rows();
std::span<const ProxyRow> proxy_rows();
std::span<const RuleRow> rule_rows();
std::span<const TargetScopeRow> target_scope_rows();
std::span<const TailRow> tail_rows();
std::span<const ProductsRow> products_rows();

const GroupingRow& row(Grouping choice);
const EncodingRow& row(Encoding choice);
const ProxyRow& row(ProxyKind choice);
const RuleRow& row(Rule choice);
const TargetScopeRow& row(TargetScope choice);
const TailRow& row(Tail choice);
const ProductsRow& row(Products choice);

// What a head's alpha is lowered to for the density `goal`; 0: none is asked for. Heads that meet it together keep their
// shares of the mean. A rule without a floor only reports it.
double lowered_alpha(const WeighArgs& args, int64_t head, double goal);

// "fixed | top_p | …", as settings list their values.
template <class Row>
std::string names(std::span<const Row> rows, std::string_view between = " | ") {
  std::string text;
  for (const Row& each : rows) text.append(text.empty() ? "" : between).append(each.name);
  return text;
}

}  // namespace scope
