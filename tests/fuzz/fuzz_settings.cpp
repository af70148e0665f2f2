// Fuzzes setting names and values: any text is either accepted and printed back to itself, or refused with an Error. The
// value of `profile` is taken for the file's contents.
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "methods/partition.h"
#include "methods/profile.h"
#include "methods/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return 0;
  if (text.substr(0, equals) == "profile") {
    try {
      std::istringstream file{std::string(text.substr(equals + 1))};
      const scope::Profile profile = scope::parse_profile(file, "fuzz");
      std::istringstream written{scope::profile_csv(profile)};
      if (scope::parse_profile(written, "fuzz").densities.size() != profile.densities.size()) std::abort();
    } catch (const scope::Error& error) {
      if (error.status() != scope::Status::format) std::abort();
    }
    return 0;
  }
  scope::Settings settings;
  try {
    scope::set_setting(settings, text.substr(0, equals), text.substr(equals + 1));
  } catch (const scope::Error& error) {
    if (error.status() != scope::Status::invalid_argument) std::abort();
    return 0;
  }
  // What was accepted must survive a round trip, and a partition that was accepted must be a partition.
  const std::string value = scope::get_setting(settings, text.substr(0, equals));
  scope::Settings again;
  scope::set_setting(again, text.substr(0, equals), value);
  if (scope::get_setting(again, text.substr(0, equals)) != value) std::abort();
  try {
    scope::check_partition(scope::make_partition(settings.partition, 128, {44, 42, 42}, settings.seed), 128);
  } catch (const scope::Error& error) {
    if (settings.partition == "rope") std::abort();
  }
  return 0;
}
