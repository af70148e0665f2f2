// Every file operation of the readers and writers fails once, in turn: Status::io, no file lost, no temporary or descriptor
// left, and the same call made again succeeds. The operations are those of fault_shim.c, which is part of this program.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "io/npy.h"
#include "io/png.h"
#include "io/safetensors.h"
#include "io/temporary.h"
#include "methods/profile.h"
#include "temporary_folder.h"

extern "C" {
extern char fault_under[];
extern std::atomic<long> fault_at, fault_seen;
}

namespace scope::io {
namespace {

namespace fs = std::filesystem;

class FaultyFiles : public test::TemporaryFolder {
 protected:
  FaultyFiles() : TemporaryFolder(test::memory_place()) {}
  void SetUp() override {
    TemporaryFolder::SetUp();
    std::strcpy(fault_under, folder_.c_str());
  }
  void TearDown() override {
    fault_under[0] = '\0';
    TemporaryFolder::TearDown();
  }
  // Names with contents.
  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      std::ifstream file(entry.path());
      found[entry.path()] = std::string(std::istreambuf_iterator<char>(file), {});
    }
    return found;
  }
  static int64_t descriptors() { return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()); }
  // Fails operation 1, 2, 3, ... of `body` until it meets none; then what was there is put back.
  template <class Body>
  void each_operation(const char* name, Body body) {
    const auto before = files();
    int64_t failed = 0;
    for (long at = 1;; ++at) {
      SCOPED_TRACE(testing::Message() << name << ", operation " << at);
      const int64_t open = descriptors();
      fault_seen = 0;
      fault_at = at;
      Status status = Status::ok;
      try {
        body();
      } catch (const Error& error) {
        status = error.status();
      }
      fault_at = 0;
      EXPECT_EQ(descriptors(), open);
      if (status != Status::ok) {
        ++failed;
        EXPECT_EQ(status, Status::io);
        EXPECT_EQ(files(), before);
      }
      const bool reached = fault_seen >= at;
      body();
      const auto after = files();
      if (after != before) {  // as it was, for the next one
        for (const auto& [file, text] : before) {
          if (!fs::is_directory(file)) std::ofstream(file) << text;
        }
        EXPECT_EQ(files(), before);
      }
      if (HasFailure() || !reached) break;
    }
    EXPECT_GT(failed, 1) << name;
  }
};

TEST_F(FaultyFiles, EveryOperationOfReadersAndWriters) {
  const Array array{ElementType::f32, {2, 3}, std::vector<std::byte>(24)};
  const SafeTensors tensors{{{"a", array}}, {{"made by", "a test"}}};
  const Image image = make_image(5, 4, 128);
  for (const char* name : {"a.npy", "a.safetensors", "a.png"}) std::ofstream(path(name)) << "what was there";
  std::ofstream(path("a.csv")) << "step,layer,head,density\n0,0,0,0.25\n";

  each_operation("write_npy", [&] { write_npy(path("a.npy"), array); });
  each_operation("write_safetensors", [&] { write_safetensors(path("a.safetensors"), tensors); });
  each_operation("write_png", [&] { write_png(path("a.png"), image); });
  write_npy(path("a.npy"), array);
  write_safetensors(path("a.safetensors"), tensors);
  write_png(path("a.png"), image);
  each_operation("read_npy", [&] { EXPECT_EQ(read_npy(path("a.npy")), array); });
  each_operation("read_safetensors", [&] { EXPECT_EQ(read_safetensors(path("a.safetensors")), tensors); });
  each_operation("shapes", [&] { EXPECT_EQ(read_safetensors_shapes(path("a.safetensors")).size(), 1u); });
  each_operation("read_png", [&] { EXPECT_EQ(read_png(path("a.png")), image); });
  each_operation("read_profile", [&] { EXPECT_EQ(read_profile(path("a.csv")).densities.size(), 1u); });
  each_operation("a folder", [&] {
    Temporary run(path("run"), Temporary::Kind::folder);
    write_npy(run.name() + "/a.npy", array);
    run.place();
    fs::remove_all(path("run"));  // whether it was there before or not
  });
}

}  // namespace
}  // namespace scope::io
