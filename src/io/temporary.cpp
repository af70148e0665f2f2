// Makes, places and removes temporaries, and knows all of this process for the day that it is interrupted.
#include "io/temporary.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <new>
#include <system_error>
#include <vector>

#include "core/error.h"

namespace scope::io {

namespace {

struct Unplaced {
  std::recursive_mutex mutex;  // a command that places several holds it around them
  std::vector<const Temporary*> all;
};

// Never destroyed: an interrupt may come while the process ends.
Unplaced& unplaced() {
  static auto& instance = *new Unplaced;
  return instance;
}

bool make_file(const std::string& name) {
  const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

bool renamed(const std::string& from, const std::string& to) { return ::rename(from.c_str(), to.c_str()) == 0; }

}  // namespace

std::string make_beside(const std::string& path, std::string_view suffix, bool folder) {
  // A taken name belongs to another thread, to a process elsewhere or to one that was killed, so try the next.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    std::string name = fmt::format("{}.{}-{}.{}", path, ::getpid(), attempt, suffix);
    if (folder ? ::mkdir(name.c_str(), 0777) == 0 : make_file(name)) return name;
    if (errno != EEXIST) break;
  }
  const int error = errno;
  fail(Status::io, "cannot create a temporary {} to write {}: {}", folder ? "folder" : "file", path,
       std::generic_category().message(error));
}

std::string identity(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? fmt::format("{}:{}", info.st_dev, info.st_ino) : "";
}

Temporary::Temporary(std::string path, Kind kind) : path_(std::move(path)), kind_(kind) {
  const auto lock = hold_interrupts();
  unplaced().all.reserve(unplaced().all.size() + 1);  // once it is made nothing may fail, or it would stay
  if (kind == Kind::parent) {
    name_ = path_;
    const int error = ::mkdir(name_.c_str(), 0777) == 0 ? 0 : errno;
    if (error == EEXIST) return;  // somebody else's
    require(error == 0, Status::io, "cannot create {}: {}", path_, std::generic_category().message(error));
  } else {
    name_ = make_beside(path_, "tmp", kind == Kind::folder);
  }
  unplaced().all.push_back(this);
}

Temporary::~Temporary() {
  const auto lock = hold_interrupts();
  const auto& all = unplaced().all;
  if (std::find(all.begin(), all.end(), this) == all.end()) return;
  remove();
  release();
}

void Temporary::release() {
  const auto lock = hold_interrupts();
  std::erase(unplaced().all, this);
}

bool Temporary::holds(const std::string& path) const {
  return kind_ != Kind::parent && path.starts_with(name_) && (path.size() == name_.size() || path[name_.size()] == '/');
}

void Temporary::remove() const {
  if (kind_ != Kind::folder) {
    std::remove(name_.c_str());
    return;
  }
  try {
    std::error_code ignored;
    std::filesystem::remove_all(name_, ignored);
  } catch (const std::bad_alloc&) {  // listing a folder takes memory: without it, the folder stays
  }
}

void Temporary::place() {
  const auto lock = hold_interrupts();
  const auto check = [&](bool done) {
    const int error = errno;
    require(done, Status::io, "cannot rename the written temporary to {}: {}", path_,
            std::generic_category().message(error));
  };
  if (kind_ == Kind::parent) return release();
  const auto rename_with = [&](unsigned flags) {
    return ::renameat2(AT_FDCWD, name_.c_str(), AT_FDCWD, path_.c_str(), flags) == 0;
  };
  struct stat info {};
  const bool there = ::lstat(path_.c_str(), &info) == 0;
  errno = EISDIR;
  check(kind_ == Kind::folder || !there || !S_ISDIR(info.st_mode));
  do {  // somebody may put something there, or take it away, between the two
    if (rename_with(RENAME_EXCHANGE)) return;
    if (errno == ENOENT && rename_with(RENAME_NOREPLACE)) return release();
  } while (errno == EEXIST);
  if (::lstat(path_.c_str(), &info) == 0) {
    const std::string old = name_ + ".old";
    const bool linked = kind_ == Kind::file && ::link(path_.c_str(), old.c_str()) == 0;
    check(linked || renamed(path_, old));
    const bool placed = renamed(name_, path_);
    if (placed && renamed(old, name_)) return;
    const int error = errno;
    if (linked && !placed) {
      ::unlink(old.c_str());
    } else {  // the old one goes back; a file's rename replaces the new one, a folder must make room first
      if (placed && !linked) renamed(path_, name_);
      renamed(old, path_);
    }
    errno = error;
    check(false);
  }
  check(renamed(name_, path_));
  release();
}

bool in_temporary(const std::string& path) {
  const auto lock = hold_interrupts();
  const auto& all = unplaced().all;
  return std::any_of(all.begin(), all.end(), [&](const Temporary* each) { return each->holds(path); });
}

std::unique_lock<std::recursive_mutex> hold_interrupts() { return std::unique_lock(unplaced().mutex); }

void abandon_temporaries() {
  unplaced().mutex.lock();
  const auto& all = unplaced().all;
  // Folders after what is in them, and again for what a thread or ffmpeg put there meanwhile.
  for (int i = 0; i < 10; ++i) std::for_each(all.rbegin(), all.rend(), [](const Temporary* each) { each->remove(); });
}

}  // namespace scope::io
