// Files and folders that are made under names of their own and then put in place, whole.
#pragma once

#include <mutex>
#include <string>
#include <string_view>

namespace scope::io {

// Makes an empty file or folder beside `path`, under a name that nothing else has: path.PID-N.suffix. Returns the name.
std::string make_beside(const std::string& path, std::string_view suffix, bool folder);

// What stands at a path, links followed, as device and inode; empty: nothing does.
std::string identity(const std::string& path);

// Made beside `path`, and removed again unless it is put there.
class Temporary {
 public:
  enum class Kind {
    file,
    folder,  // removed with all that it holds
    parent,  // `path` itself, a folder that others are written into; removed while it is empty
  };
  Temporary(std::string path, Kind kind);
  ~Temporary();
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  const std::string& name() const { return name_; }
  // Now at `path`. It changes places with what is there (RENAME_EXCHANGE), so that one of both is there at every moment, and
  // the old one is under name() and goes with this object, whoever wrote it. On a file system without that, a folder takes
  // two renames: a process that is killed between them leaves the old one whole as name() + ".old".
  void place();
  // Whatever is under name() stays.
  void release();
  // Whether `path` is this one or lies in it.
  bool holds(const std::string& path) const;

 private:
  friend void abandon_temporaries();
  void remove() const;
  std::string path_, name_;
  Kind kind_;
};

// Whether one of this process holds `path`.
bool in_temporary(const std::string& path);

// While it is held, an interrupt waits.
std::unique_lock<std::recursive_mutex> hold_interrupts();

// Removes every temporary of this process. From here on nobody makes or places one: who tries waits until the process ends.
void abandon_temporaries();

}  // namespace scope::io
