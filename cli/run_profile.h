// The profile of a dense generation: how dense the attention of each of its calls with the prompt is.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "methods/profile.h"
#include "video/model.h"

namespace scope::cli {

inline constexpr double kProfileMass = 0.95;  // SVOO's share of a query's softmax

class RunProfile {
 public:
  // What is at `path` must be a profile of a run with as many steps, layers and heads, of another prompt: of the two
  // densities the higher one stays. samples: queries of each head, or `all`.
  RunProfile(std::string path, const std::string& samples, const Settings& settings, const video::ModelConfig& config,
             int64_t steps);
  // q and k: [tokens, heads x head_dim] on the host.
  void add(ThreadPool& pool, int64_t step, int64_t layer, DType dtype, const std::vector<std::byte>& q,
           const std::vector<std::byte>& k);
  std::string csv() const { return profile_csv(profile_); }
  nlohmann::ordered_json json() const;

 private:
  std::string path_;
  int64_t samples_, heads_, head_dim_;
  double seconds_ = 0;
  Profile profile_;
};

}  // namespace scope::cli
