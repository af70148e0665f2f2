// q, k, v with what a file or the flags say of them, for the commands that take them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/call.h"
#include "qkv.h"

namespace CLI {
class App;
}

namespace scope::cli {

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

}  // namespace scope::cli
