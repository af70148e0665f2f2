// What a command writes: every path is checked before any work, and all of it is put in place together at the end.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "input.h"
#include "io/temporary.h"

namespace scope::cli {

// First everything that the command reads and writes is declared. An output that is also an input or another output (links
// followed), that cannot be written or would replace what is not ours is refused there, by its flag. An empty path is none.
class Outputs {
 public:
  void reads(const std::string& flag, const std::string& path);
  void reads(const InputFlags& input);
  void reads(const Settings& settings);  // their profile
  void reads_model(const std::string& folder);
  void writes(const std::string& flag, const std::string& path);
  // A file in a folder that is made where there is none.
  void writes_into(const std::string& flag, const std::string& folder, const std::string& name);
  // The folder of a run, which is replaced as a whole. One that holds anything but a run is refused.
  void writes_run(const std::string& flag, const std::string& folder);

  // A new file, or a run's new folder, that stands for a declared path until `place`.
  std::string open(const std::string& path);
  // What is done so far of the result for `path`, in a file of its own beside it: it stays when the command is stopped, and
  // never replaces a result. `place` removes it.
  void keep_unfinished(const std::string& path, const nlohmann::ordered_json& json);
  // A file that is replaced as a whole whenever `replace` writes it, and removed by `place`: what a stopped run goes on
  // from. The caller has looked at what is there.
  void writes_checkpoint(const std::string& flag, const std::string& path);
  void replace_checkpoint(const std::function<void(const std::string& name)>& write);
  // Everything that was opened, at once, or nothing where one of it fails. What another process put there since it was
  // declared is kept beside it, and said.
  void place();

 private:
  enum class Kind { input, file, run };
  struct Entry {
    std::string flag, given, path;  // given: by the user; path: the same, or what a link there leads to
    Kind kind;
    std::string identity = {}, canonical = {};  // when it was declared
    std::unique_ptr<io::Temporary> temporary = nullptr;
  };
  static void take_back(Entry& entry);
  void add(Entry entry);
  void make_parents(const std::string& path);

  std::vector<std::unique_ptr<io::Temporary>> parents_;  // outlive what is in them
  std::vector<Entry> entries_;
  std::string unfinished_, checkpoint_;
};

}  // namespace scope::cli
