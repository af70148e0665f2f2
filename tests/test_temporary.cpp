// Temporaries: names that nobody else has, folders that are never missing, and nothing left behind.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "core/error.h"
#include "io/file.h"
#include "io/temporary.h"
#include "temporary_folder.h"

namespace scope::io {
namespace {

namespace fs = std::filesystem;
using Kind = Temporary::Kind;

using Temporaries = test::TemporaryFolder;

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
std::string read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(Temporaries, GoUnlessTheyArePlaced) {
  {
    const Temporary file(path("a"), Kind::file), folder(path("b"), Kind::folder), parent(path("c"), Kind::parent);
    write(folder.name() + "/inside", "x");
    EXPECT_TRUE(in_temporary(file.name()) && in_temporary(folder.name() + "/inside"));
    EXPECT_FALSE(in_temporary(file.name() + "x") || in_temporary(path("a")) || in_temporary(path("c/inside")));
    EXPECT_EQ(names().size(), 4u);
  }
  EXPECT_TRUE(names().empty());
  {
    Temporary file(path("a"), Kind::file), folder(path("b"), Kind::folder), parent(path("c"), Kind::parent);
    write(folder.name() + "/inside", "x");
    file.place(), folder.place(), parent.place();
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a", "b", "b/inside", "c"}));
}

TEST_F(Temporaries, AParentStaysWhereItIsNotEmptyOrWasThere) {
  fs::create_directory(path("b"));
  {
    const Temporary there(path("b"), Kind::parent), made(path("c"), Kind::parent);
    write(path("c/theirs"), "x");
  }
  EXPECT_EQ(names(), (std::set<std::string>{"b", "c", "c/theirs"}));
}

TEST_F(Temporaries, AnothersFolderIsNeverTaken) {
  const std::string taken = fmt::format("run.{}-0.tmp", ::getpid());
  fs::create_directory(path(taken));
  write(path(taken + "/stale"), "x");
  {
    Temporary folder(path("run"), Kind::folder);
    EXPECT_TRUE(fs::is_empty(folder.name()));
    folder.place();
  }
  EXPECT_EQ(names(), (std::set<std::string>{"run", taken, taken + "/stale"}));
}

TEST_F(Temporaries, AReplacedFolderIsThereAtEveryMoment) {
  fs::create_directory(path("run"));
  write(path("run/file"), "0");
  std::atomic<bool> stop = false;
  std::atomic<int64_t> missed = 0, seen = 0;
  std::thread reader([&] {
    struct stat info {};
    while (!stop) ++(::stat(path("run/file").c_str(), &info) == 0 ? seen : missed);
  });
  for (int i = 1; i <= 500; ++i) {
    Temporary folder(path("run"), Kind::folder);
    write(folder.name() + "/file", std::to_string(i));
    folder.place();
  }
  stop = true;
  reader.join();
  EXPECT_EQ(missed, 0);
  EXPECT_GT(seen, 0);
  EXPECT_EQ(names(), (std::set<std::string>{"run", "run/file"}));
  std::ifstream file(path("run/file"));
  EXPECT_EQ(std::string(std::istreambuf_iterator(file), {}), "500");
}

TEST_F(Temporaries, AReleasedOneStays) {
  fs::create_directory(path("run"));
  write(path("run/old"), "x");
  Temporary folder(path("run"), Kind::folder);
  folder.place();
  EXPECT_TRUE(fs::exists(folder.name() + "/old")) << "what was there took our name";
  folder.release();
  EXPECT_FALSE(in_temporary(folder.name()));
}

TEST_F(Temporaries, AReplacedFileIsThereUntilItIsLookedAt) {
  write(path("a"), "old");
  {
    Temporary file(path("a"), Kind::file);
    write(file.name(), "new");
    const std::string theirs = path("b");
    write(theirs, "theirs");
    fs::rename(theirs, path("a"));  // by another process, at the last moment
    file.place();
    EXPECT_EQ(read(file.name()), "theirs");
    EXPECT_EQ(read(path("a")), "new");
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a"}));
}

TEST_F(Temporaries, AFileDoesNotReplaceAFolder) {
  fs::create_directory(path("a"));
  write(path("a/theirs"), "x");
  {
    Temporary file(path("a"), Kind::file);
    EXPECT_THROW(file.place(), Error);
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a", "a/theirs"}));
}

TEST_F(Temporaries, AnInterruptRemovesAllAndStopsTheRest) {
  const auto interrupted = [&] {
    const Temporary file(path("a"), Kind::file), parent(path("c"), Kind::parent), inside(path("c/d"), Kind::file);
    Temporary placed(path("b"), Kind::folder), folder(path("e"), Kind::folder);
    write(folder.name() + "/inside", "x");
    placed.place();
    abandon_temporaries();
    std::thread late([&] { write_file(path("late"), {}); });  // waits for ever
    ::usleep(50'000);
    ::_exit(fs::exists(path("late")) ? 1 : 0);
  };
  EXPECT_EXIT(interrupted(), ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(names(), std::set<std::string>{"b"});
}

}  // namespace
}  // namespace scope::io
