// Each kind of field: look it up, hold it against its range, say what was expected.
#include "video/fields.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "io/file.h"

namespace scope::video {

using nlohmann::json;

namespace {

int64_t number(const char* name, const json& value, int64_t low, int64_t high) {
  const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX) &&
                    value.get<int64_t>() >= low && value.get<int64_t>() <= high;
  require(fits, Status::format, "{}: got {}, expected an integer in {}..{}", name, shown(value), low, high);
  return value.get<int64_t>();
}

}  // namespace

std::string shown(const json& value) { return io::printable(value.dump(-1, ' ', true, json::error_handler_t::replace), 60); }

// What nests deeply would exhaust the stack of whoever walks it, and of two values of one key the last would win unseen.
json parse_json(std::string_view text) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  return json::parse(
      text,
      [&](int depth, json::parse_event_t event, json& value) {
        require(depth <= 8, Status::format, "JSON nested deeper than 8 levels");
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key) {
          require(keys.back().insert(value.get<std::string>()).second, Status::format, "key {} appears twice in one object",
                  shown(value));
        }
        return true;
      },
      false);
}

Fields::Fields(std::string_view text) : json_(parse_json(text)) {
  require(json_.is_object(), Status::format, "not a JSON object");
}

void Fields::integer(const char* name, int64_t low, int64_t high, int64_t& value, bool nullable) {
  const json* found = find(name);
  if (found == nullptr) return;
  if (nullable && found->is_null()) {
    value = 0;
    return;
  }
  value = number(name, *found, low, high);
}

void Fields::triple(const char* name, int64_t low, int64_t high, std::array<int64_t, 3>& value) {
  const json* found = find(name);
  if (found == nullptr) return;
  require(found->is_array() && found->size() == 3, Status::format, "{}: got {}, expected three integers", name,
          shown(*found));
  for (size_t i = 0; i < 3; ++i) value[i] = number(name, (*found)[i], low, high);
}

void Fields::boolean(const char* name, bool& value) {
  const json* found = find(name);
  if (found == nullptr) return;
  require(found->is_boolean(), Status::format, "{}: got {}, expected true or false", name, shown(*found));
  value = found->get<bool>();
}

void Fields::real(const char* name, double low, double high, double& value) {
  const json* found = find(name);
  if (found == nullptr) return;
  require(found->is_number() && found->get<double>() >= low && found->get<double>() <= high, Status::format,
          "{}: got {}, expected a number in {}..{}", name, shown(*found), low, high);
  value = found->get<double>();
}

size_t Fields::text(const char* name, const std::vector<std::string>& expected, bool nullable) {
  const json* found = find(name);
  if (nullable && (found == nullptr || found->is_null())) return expected.size();
  const auto at = found == nullptr || !found->is_string()
                      ? expected.end()
                      : std::find(expected.begin(), expected.end(), found->get_ref<const std::string&>());
  require(at != expected.end(), Status::format, "{}: got {}, expected \"{}\"", name,
          found == nullptr ? "nothing" : shown(*found), fmt::join(expected, "\" or \""));
  return static_cast<size_t>(at - expected.begin());
}

void Fields::end() const {
  for (const auto& item : json_.items()) {
    require(item.key().starts_with('_') || known_.contains(item.key()), Status::format,
            "'{}': unknown key, and it may change the model", io::printable(item.key()));
  }
}

const json* Fields::find(const char* name) {
  known_.insert(name);
  const auto at = json_.find(name);
  return at == json_.end() ? nullptr : &*at;
}

}  // namespace scope::video
