// A selection that anyone made: which keys each group of queries keeps, from a file.
#include <string>
#include <vector>

#include "input.h"
#pragma once

namespace scope::cli {

// labels [batch, heads, q_tokens], mask [batch, heads, groups, words], keep [batch, words] or empty: the form of
// `scope attend --dump` (docs/reference/abi.md).
struct GivenSelection {
  std::string name, path;
  int64_t groups = 0;
  std::vector<int32_t> labels = {};
  std::vector<uint32_t> mask = {}, keep = {};

  // Kept pairs over all pairs of labelled queries and keys that are not always kept, as a mean over heads.
  double density(const Input& input) const;
};

// NAME=FILE, or FILE, which is its own name.
GivenSelection name_selection(const std::string& text);
// Reads its file. What does not fit q and k, or is no selection at all, is an error that names the tensor.
void read_selection(GivenSelection& selection, const Input& input);

}  // namespace scope::cli
