// Checks where a command writes, and puts its results in place.
#include "outputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "json.h"
#include "terminal.h"

namespace scope::cli {

namespace fs = std::filesystem;

namespace {

bool run_writes(const std::string& name) {
  if (name == "run.json" || name == "clip.mp4" || name == "latents.safetensors") return true;
  if (!name.starts_with("frame_") || !name.ends_with(".png")) return false;
  const std::string number = name.substr(6, name.size() - 10);
  return number.size() >= 3 && number.find_first_not_of("0123456789") == std::string::npos;
}

// The name of something in a folder that no run wrote; empty: there is none.
std::string find_foreign(const std::string& folder) {
  bool has_run = false, empty = true;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::string name = entry.path().filename();
    if (!run_writes(name) || !fs::is_regular_file(entry.symlink_status())) return name;
    empty = false;
    has_run = has_run || name == "run.json";
  }
  require(!error, Status::io, "cannot read {}: {}", folder, error.message());
  return has_run || empty ? "" : "frames without a run.json";
}

std::string canonical(const std::string& path) {
  std::error_code error;
  fs::path found = fs::absolute(path, error);
  if (!error) found = fs::weakly_canonical(found, error);
  return error ? path : found.string();
}

// What a link leads to, which is written in its place.
std::string through_link(const std::string& flag, const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  const fs::path found = fs::canonical(path, error);
  require(!error, Status::io, "{}: cannot write {}: {}", flag, path, error.message());
  return found;
}

bool lies_in(const std::string& path, const std::string& folder) { return path.starts_with(folder + "/"); }

// Tries it out: a temporary beside it is made and removed.
void check_writable(const std::string& flag, const fs::path& path, io::Temporary::Kind kind) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code error;
  require(fs::is_directory(folder, error), Status::io, "{}: cannot write into {}: there is no such folder", flag,
          folder.string());
  try {
    const io::Temporary probe(path, kind);
  } catch (const Error& failure) {
    fail(failure.status(), "{}: {}", flag, failure.what());
  }
}

void check_file(const std::string& flag, const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require(path.has_filename() && !fs::is_directory(status), Status::io, "{}: cannot write {}: it is a folder", flag,
          path.string());
  require(!fs::exists(status) || fs::is_regular_file(status), Status::io, "{}: cannot write {}: not a regular file", flag,
          path.string());
}

}  // namespace

void Outputs::add(Entry entry) {
  entry.canonical = canonical(entry.path);
  entry.identity = io::identity(entry.path);
  for (const Entry& other : entries_) {
    if (entry.kind == Kind::input && other.kind == Kind::input) continue;
    const bool same = entry.identity.empty() ? entry.canonical == other.canonical : entry.identity == other.identity;
    require(!same, Status::invalid_argument, "{}: got {}, which is also {}; expected a path of its own", entry.flag,
            entry.given, other.flag);
    const bool inside = other.kind == Kind::run && lies_in(entry.canonical, other.canonical);
    const bool around = entry.kind == Kind::run && lies_in(other.canonical, entry.canonical);
    require(!inside && !around, Status::invalid_argument,
            "{}: {} lies in {}, the folder of a run, which is replaced as a whole; expected another place",
            inside ? entry.flag : other.flag, inside ? entry.given : other.given, inside ? other.given : entry.given);
  }
  entries_.push_back(std::move(entry));
}

void Outputs::reads(const std::string& flag, const std::string& path) {
  if (!path.empty()) add({.flag = flag, .given = path, .path = path, .kind = Kind::input});
}

void Outputs::reads(const InputFlags& input) {
  reads("input", input.path);
  reads("--q", input.q);
  reads("--k", input.k);
  reads("--v", input.v);
}

void Outputs::reads(const Settings& settings) {
  if (settings.profile != nullptr) reads("profile", settings.profile->path);
}

void Outputs::reads_model(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".safetensors") || name.ends_with("index.json") || name == "config.json" || name == "scope.json") {
      reads("--model", entry.path());
    }
  }
}

void Outputs::writes(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  check_file(flag, path);
  const std::string target = through_link(flag, path);
  add({.flag = flag, .given = path, .path = target, .kind = Kind::file});
  check_writable(flag, target, io::Temporary::Kind::file);
}

void Outputs::writes_into(const std::string& flag, const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  check_file(flag, path);
  add({.flag = flag, .given = path, .path = path, .kind = Kind::file});
  std::error_code error;
  fs::path there = fs::absolute(folder, error);
  while (!fs::exists(fs::symlink_status(there, error)) && there.has_relative_path()) there = there.parent_path();
  check_writable(flag, there / name, io::Temporary::Kind::file);
}

void Outputs::writes_run(const std::string& flag, const std::string& folder) {
  std::string path = folder;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  std::error_code error;
  const fs::path name = fs::path(path).filename();
  require(!name.empty() && name != "." && name != "..", Status::invalid_argument,
          "{}: got {}, expected the name of a folder to make or replace", flag, folder);
  path = through_link(flag, path);
  if (fs::exists(path, error)) {
    require(fs::is_directory(path), Status::invalid_argument, "{}: {} exists and is no folder; it is left alone", flag,
            folder);
    const std::string foreign = find_foreign(path);
    require(foreign.empty(), Status::invalid_argument, "{}: {} exists and holds {}, which no run wrote; it is left alone",
            flag, folder, foreign);
  }
  add({.flag = flag, .given = folder, .path = path, .kind = Kind::run});
  check_writable(flag, path, io::Temporary::Kind::folder);
}

void Outputs::make_parents(const std::string& path) {
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path at = fs::path(path).parent_path(); !at.empty() && !fs::exists(at, error); at = at.parent_path()) {
    missing.push_back(at);
  }
  for (auto at = missing.rbegin(); at != missing.rend(); ++at) {
    parents_.push_back(std::make_unique<io::Temporary>(*at, io::Temporary::Kind::parent));
  }
}

std::string Outputs::open(const std::string& path) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.kind != Kind::input && entry.given == path; });
  require(found != entries_.end(), Status::internal, "{} was not declared", path);
  make_parents(found->path);
  found->temporary = std::make_unique<io::Temporary>(
      found->path, found->kind == Kind::run ? io::Temporary::Kind::folder : io::Temporary::Kind::file);
  return found->temporary->name();
}

void Outputs::keep_unfinished(const std::string& path, const nlohmann::ordered_json& json) {
  const auto lock = io::hold_interrupts();  // so that no empty file stays
  if (unfinished_.empty()) {
    unfinished_ = io::make_beside(path, "unfinished", false);
    tell("{}what is done is kept in {} until all is\n", over_progress(), unfinished_);
  }
  write_json(unfinished_, json);
}

void Outputs::writes_checkpoint(const std::string& flag, const std::string& path) {
  writes(flag, path);
  if (!path.empty()) checkpoint_ = entries_.back().path;
}

void Outputs::replace_checkpoint(const std::function<void(const std::string& name)>& write) {
  io::Temporary next(checkpoint_, io::Temporary::Kind::file);
  write(next.name());
  next.place();
}

void Outputs::take_back(Entry& entry) {
  std::error_code ignored;
  if (io::identity(entry.temporary->name()).empty()) {
    fs::remove_all(entry.path, ignored);
    return;
  }
  try {
    entry.temporary->place();  // both change places again
  } catch (const Error&) {     // no second time: what was there stays under the temporary's name
    entry.temporary->release();
    tell("scope: what was at {} is now {}\n", entry.given, entry.temporary->name());
  }
}

void Outputs::place() {
  const auto lock = io::hold_interrupts();
  std::vector<Entry*> placed;
  try {
    for (Entry& entry : entries_) {
      if (entry.temporary == nullptr) continue;
      placed.reserve(placed.size() + 1);
      entry.temporary->place();
      placed.push_back(&entry);
    }
  } catch (...) {  // all or none: what was there goes back
    for (Entry* entry : placed) take_back(*entry);
    throw;
  }
  for (Entry* entry : placed) {
    const std::string& old = entry->temporary->name();  // what was there
    const std::string identity = io::identity(old), other = old + ".other";
    if (identity.empty()) continue;
    const bool changed = identity != entry->identity || (entry->kind == Kind::run && !find_foreign(old).empty());
    if (!changed) continue;
    entry->temporary->release();
    std::error_code error;
    fs::rename(old, other, error);
    tell("scope: {} was changed by others meanwhile; theirs is kept as {}\n", entry->given, error ? old : other);
  }
  for (const auto& parent : parents_) parent->release();
  std::error_code ignored;
  for (const std::string& path : {unfinished_, checkpoint_}) {
    if (!path.empty()) fs::remove(path, ignored);
  }
  entries_.clear();  // and with it the runs that were replaced
}

}  // namespace scope::cli
