// Writes JSON that any reader takes.
#include "json.h"

#include <fmt/format.h>

#include <span>

#include "core/built_from.h"
#include "io/file.h"

namespace scope::cli {

namespace {

// With every string and key as utf8_text gives it.
nlohmann::ordered_json escaped(const nlohmann::ordered_json& json) {
  if (json.is_string()) return utf8_text(json.get<std::string>());
  if (!json.is_structured()) return json;
  nlohmann::ordered_json out = json.is_array() ? nlohmann::ordered_json::array() : nlohmann::ordered_json::object();
  for (const auto& [key, value] : json.items()) {
    if (json.is_array()) {
      out.push_back(escaped(value));
    } else {
      out[utf8_text(key)] = escaped(value);
    }
  }
  return out;
}

}  // namespace

nlohmann::ordered_json settings_json(const Settings& settings) {
  nlohmann::ordered_json json;
  for (const Setting& setting : settings_table()) json[setting.name] = setting.get(settings);
  return json;
}

std::string utf8_text(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return text;
  } catch (const nlohmann::json::type_error&) {
    std::string out;
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      out += byte < 0x80 ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
    }
    return out;
  }
}

std::string json_text(const nlohmann::ordered_json& json, int indent, bool ascii) {
  try {
    return json.dump(indent, ' ', ascii);
  } catch (const nlohmann::json::type_error&) {
    return escaped(json).dump(indent, ' ', ascii);
  }
}

std::string version() { return fmt::format("{} (commit {})", SCOPE_VERSION, built_from()); }

void write_json(const std::string& path, const nlohmann::ordered_json& json) {
  nlohmann::ordered_json whole{{"version", SCOPE_VERSION}, {"commit", built_from()}};
  whole.update(json);
  write_text(path, json_text(whole, 2) + "\n");
}

void write_text(const std::string& path, const std::string& text) {
  const std::span<const std::byte> part = std::as_bytes(std::span(text));
  io::write_file(path, {&part, 1});
}

}  // namespace scope::cli
