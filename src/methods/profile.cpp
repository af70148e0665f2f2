// Reads and writes a profile's CSV, merges profiles, and holds one against a model's shape.
#include "methods/profile.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>

#include "io/file.h"

namespace scope {

namespace {

constexpr std::string_view kHeader = "step,layer,head,density", kAuthorsHeader = "Step,Layer,Head,Sparsity";
constexpr int64_t kMostHeads = 1 << 20,
                  kMostSteps = 1'000'000'000;      // far more than any model's; the next number still exists
constexpr int64_t kMostBytes = int64_t{64} << 20;  // 50 steps of 40 layers of 40 heads take 2 MiB

// Takes the number at the front of `text` and the comma after it.
template <class T>
bool take(std::string_view& text, T& value, bool last = false) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  if (last) return text.empty();
  if (text.empty() || text.front() != ',') return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

Profile read_profile(const std::string& path) {
  const std::vector<std::byte> bytes = io::read_file(path, kMostBytes);
  std::istringstream text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  return parse_profile(text, path);
}

Profile parse_profile(std::istream& file, const std::string& path) {
  Profile profile;
  profile.path = path;
  file.exceptions(std::ios::badbit);  // getline hides a lack of memory otherwise, and the line would look empty
  std::string line;
  const auto next_line = [&] {
    if (!std::getline(file, line)) return false;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return true;
  };
  next_line();  // an empty file has an empty one
  const bool ours = line == kHeader;
  require(ours || line == kAuthorsHeader, Status::format, "profile: {} line 1: got \"{}\", expected {} or {}", path,
          io::printable(line, 80), kHeader, kAuthorsHeader);
  const int64_t first_step = ours ? 0 : 1;
  std::map<std::pair<int64_t, int64_t>, int64_t> heads;  // entries of each step and layer
  for (int64_t number = 2; next_line(); ++number) {
    int64_t step = 0, layer = 0, head = 0;
    double density = 0;
    std::string_view text = line;
    require(take(text, step) && take(text, layer) && take(text, head) && take(text, density, true) && step >= first_step &&
                step <= kMostSteps && layer >= 0 && head >= 0 && head < kMostHeads && density >= 0 && density <= 1,
            Status::format,
            "profile: {} line {}: got \"{}\", expected a step from {}, layer and head from 0 and a density in [0, 1], as "
            "10,2,0,0.25",
            path, number, io::printable(line, 80), first_step);
    require(!profile.densities.contains({step - first_step, layer, head}), Status::format,
            "profile: {} line {}: step {}, layer {}, head {} has an entry already", path, number, step, layer, head);
    raise_density(profile, step - first_step, layer, head, density);
    ++heads[{step, layer}];
  }
  require(!profile.densities.empty(), Status::format, "profile: {} has no entries", path);
  for (const auto& [at, count] : heads) {
    require(count == profile.heads, Status::format, "profile: {}: step {}, layer {} has {} of {} heads", path, at.first,
            at.second, count, profile.heads);
  }
  return profile;
}

std::string profile_csv(const Profile& profile) {
  std::string csv = fmt::format("{}\n", kHeader);
  for (const auto& [at, density] : profile.densities) {
    const auto [step, layer, head] = at;
    csv += fmt::format("{},{},{},{:.6f}\n", step, layer, head, density);
  }
  return csv;
}

void raise_density(Profile& profile, int64_t step, int64_t layer, int64_t head, double density) {
  double& entry = profile.densities[{step, layer, head}];
  entry = std::max(entry, density);
  profile.heads = std::max(profile.heads, head + 1);
  profile.steps = std::max(profile.steps, step + 1);
}

void merge_profile(Profile& profile, const Profile& other) {
  require(profile.heads == 0 || profile.heads == other.heads, Status::shape, "profile: {} has {} heads, the others have {}",
          other.path, other.heads, profile.heads);
  for (const auto& [at, density] : other.densities) {
    const auto [step, layer, head] = at;
    raise_density(profile, step, layer, head, density);
  }
}

void check_profile(const Profile& profile, int64_t heads, int64_t layers, int64_t first_layer) {
  require(profile.heads == heads, Status::shape, "profile: {} has {} heads, the shape has {}", profile.path, profile.heads,
          heads);
  if (layers == 0) return;
  std::set<int64_t> found;
  for (const auto& [at, density] : profile.densities) found.insert(std::get<1>(at));
  require(*found.rbegin() < layers, Status::shape, "profile: {} has layer {}, the model has layers 0..{}", profile.path,
          *found.rbegin(), layers - 1);
  for (int64_t layer = first_layer; layer < layers; ++layer) {
    require(found.contains(layer), Status::shape,
            "profile: {} has {} of the model's {} layers, and layer {} is not among them", profile.path, found.size(),
            layers, layer);
  }
}

}  // namespace scope
