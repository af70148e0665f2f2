// JSON and text that commands write.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "methods/settings.h"

namespace scope::cli {

nlohmann::ordered_json settings_json(const Settings& settings);
// The text itself where it is UTF-8; otherwise with every byte that is not ASCII as \xNN. Names of files may be anything.
std::string utf8_text(const std::string& text);
// What `dump` gives, with strings that are not UTF-8 escaped so.
std::string json_text(const nlohmann::ordered_json& json, int indent = -1, bool ascii = false);
// Of this command, with its commit.
std::string version();
// With the version and the commit of this command first, unless `json` has its own.
void write_json(const std::string& path, const nlohmann::ordered_json& json);
void write_text(const std::string& path, const std::string& text);

}  // namespace scope::cli
