// A fixture with a folder of its own, which goes with the test.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <set>
#include <string>

namespace scope::test {

// In memory where that is a folder: for tests that sync files some thousand times.
inline std::filesystem::path memory_place() {
  const std::filesystem::path shared = "/dev/shm";
  return std::filesystem::exists(shared) ? shared : std::filesystem::temp_directory_path();
}

class TemporaryFolder : public ::testing::Test {
 protected:
  explicit TemporaryFolder(const std::filesystem::path& place = std::filesystem::temp_directory_path()) : place_(place) {}
  void SetUp() override {
    std::string pattern = place_ / "scope_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }
  // Of everything below the folder.
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
      out.insert(entry.path().lexically_relative(folder_));  // links as they are
    }
    return out;
  }

  std::filesystem::path place_, folder_;
};

}  // namespace scope::test
