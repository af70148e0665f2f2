// The JSON of a model's folder, which is not trusted: every field with the range it must lie in.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace scope::video {

// Discarded where it is no JSON; what nests deeply is Error(Status::format).
nlohmann::json parse_json(std::string_view text);
std::string shown(const nlohmann::json& value);

// An object whose keys are read one by one. Whatever does not fit is Error(Status::format).
class Fields {
 public:
  explicit Fields(std::string_view text);

  // An absent field keeps the value it has; null is allowed where `nullable`, as 0.
  void integer(const char* name, int64_t low, int64_t high, int64_t& value, bool nullable = false);
  void triple(const char* name, int64_t low, int64_t high, std::array<int64_t, 3>& value);
  void boolean(const char* name, bool& value);
  void real(const char* name, double low, double high, double& value);
  // Only one of these texts will do: which. Where `nullable`, an absent field and null are their number.
  size_t text(const char* name, const std::vector<std::string>& expected, bool nullable = false);
  // What nobody asked for is refused, because it could change the model; keys that begin with _ cannot.
  void end() const;

 private:
  const nlohmann::json* find(const char* name);

  nlohmann::json json_;
  std::set<std::string> known_;
};

}  // namespace scope::video
