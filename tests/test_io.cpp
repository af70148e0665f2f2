// Tests io: round trips, malformed files, every truncation and header bit flip of the seeds, failing reads and writes.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <set>
#include <thread>

#include "io/npy.h"
#include "io/safetensors.h"
#include "io_cases.h"
#include "support.h"
#include "temporary_folder.h"

namespace {
std::atomic<int64_t> allocated{0};  // by the whole program since its start, whether freed or not
}

// Counted, so that the tests can bound the memory that a small file makes a parser ask for.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  allocated += static_cast<int64_t>(bytes);
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* operator new(size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // GCC inlines the replacements and takes them for strangers
#endif
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace scope::io {
namespace {

namespace fs = std::filesystem;

using io_cases::Malformed;

constexpr ElementType kAllTypes[] = {ElementType::f64,    ElementType::f32, ElementType::f16, ElementType::bf16,
                                     ElementType::i64,    ElementType::i32, ElementType::i16, ElementType::i8,
                                     ElementType::u64,    ElementType::u32, ElementType::u16, ElementType::u8,
                                     ElementType::boolean};
const std::vector<std::vector<int64_t>> kShapes = {{},     {1},       {0},          {7},
                                                   {2, 3}, {3, 0, 5}, {2, 3, 4, 5}, {1, 2, 1, 2, 1, 2, 1, 2}};

// A copy of the very size, so that the address sanitizer sees a read past the end.
std::vector<std::byte> to_bytes(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string to_text(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Array make_array(ElementType type, const std::vector<int64_t>& shape) {
  Array array{type, shape, {}};
  array.data.resize(static_cast<size_t>(dense_bytes(type, shape, Status::internal, "test")));
  for (size_t i = 0; i < array.data.size(); ++i) {
    array.data[i] = static_cast<std::byte>(type == ElementType::boolean ? i % 3 == 0 : (i * 37 + 11) % 256);
  }
  return array;
}

std::string serialize(const Array& array) { return npy_header(array) + to_text(array.data); }
std::string serialize(const SafeTensors& file) {
  std::string out = safetensors_header(file);
  for (const auto& item : file.tensors) out += to_text(item.second.data);
  return out;
}

// The error that a call raises, if it does; any other exception fails the test.
template <class Call>
std::optional<Error> error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

template <class Call>
void expect_error(Status status, const std::string& says, Call call) {
  const std::optional<Error> error = error_of(call);
  ASSERT_TRUE(error) << "no error, expected one with: " << says;
  EXPECT_EQ(error->status(), status) << error->what();
  EXPECT_NE(std::string(error->what()).find(says), std::string::npos) << error->what() << "\nexpected: " << says;
}

void check_consistent(const Array& array) {
  EXPECT_EQ(dense_bytes(array.type, array.shape, Status::internal, "parsed"), std::ssize(array.data));
  EXPECT_EQ(parse_npy(to_bytes(serialize(array))), array);
}
void check_consistent(const SafeTensors& file) {
  for (const auto& [name, array] : file.tensors) {
    EXPECT_EQ(dense_bytes(array.type, array.shape, Status::internal, name), std::ssize(array.data));
  }
  EXPECT_EQ(parse_safetensors(to_bytes(serialize(file))), file);
}

// Parses; what comes is consistent or a format error. Memory is bounded in either case. True if it parsed.
template <class Parse>
bool survives(Parse parse, const std::string& text) {
  const std::vector<std::byte> bytes = to_bytes(text);
  const int64_t before = allocated;
  std::optional<Error> error;
  try {
    const auto result = parse(bytes);
    EXPECT_LE(allocated - before, 16'384 + 32 * std::ssize(bytes));
    check_consistent(result);
  } catch (const Error& caught) {
    EXPECT_LE(allocated - before, 16'384 + 32 * std::ssize(bytes)) << caught.what();
    EXPECT_EQ(caught.status(), Status::format) << caught.what();
    EXPECT_LT(std::string_view(caught.what()).size(), 700u);
    return false;
  }
  return true;
}

struct Seed {
  std::string name;
  std::string bytes;
};

// The fuzzers' seeds: the .npy files were written by NumPy.
std::vector<Seed> seeds(const std::string& kind) {
  std::vector<Seed> out;
  for (const auto& entry : fs::directory_iterator(fs::path(test::repository()) / "tests" / "fuzz" / "corpus" / kind)) {
    out.push_back({entry.path().filename(), to_text(read_file(entry.path(), 1024))});
  }
  EXPECT_GE(out.size(), 5u);
  return out;
}

using IoFiles = test::TemporaryFolder;

void write_text(const std::string& path, const std::string& text) {
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(text))};
  write_file(path, parts);
}

// --- Round trips -----------------------------------------------------------------------------------------------------

TEST_F(IoFiles, NpyRoundTripsEveryTypeAndShape) {
  for (const ElementType type : kAllTypes) {
    if (type == ElementType::bf16) continue;
    for (const auto& shape : kShapes) {
      const Array array = make_array(type, shape);
      write_npy(path("a.npy"), array);
      EXPECT_EQ(read_npy(path("a.npy")), array) << element_name(type);
      EXPECT_EQ(npy_header(array).size() % 64, 0u);
    }
  }
  EXPECT_EQ(names(), std::set<std::string>{"a.npy"});
}

TEST_F(IoFiles, SafetensorsRoundTripsEveryTypeAndShape) {
  SafeTensors file;
  for (const ElementType type : kAllTypes) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      file.tensors[fmt::format("{} {}", element_name(type), i)] = make_array(type, kShapes[i]);
    }
  }
  file.tensors["\"quoted\" \\ \n \xF0\x9F\x98\x80"] = make_array(ElementType::f32, {2});
  file.tensors[""] = make_array(ElementType::u8, {1});
  file.metadata = {{"format", "pt"}, {"", "\t\"\\\x7f"}, {"\xC3\xA9", ""}};
  write_safetensors(path("a.safetensors"), file);
  EXPECT_EQ(read_safetensors(path("a.safetensors")), file);
  EXPECT_EQ(safetensors_header(file).size() % 8, 0u);
  EXPECT_EQ(read_file(path("a.safetensors"), 1 << 20), to_bytes(serialize(file)));
  EXPECT_EQ(names(), std::set<std::string>{"a.safetensors"});
}

TEST(Safetensors, WritesTheseBytes) {
  SafeTensors file;
  file.tensors["b"] = make_array(ElementType::bf16, {1, 2});
  file.tensors["a"] = make_array(ElementType::u8, {3});
  file.metadata["k"] = "v";
  const std::string json = R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                           R"("b":{"dtype":"BF16","shape":[1,2],"data_offsets":[3,7]}})";
  const std::string padded = json + std::string((8 - json.size() % 8) % 8, ' ');
  EXPECT_EQ(safetensors_header(file), io_cases::little_endian(padded.size(), 8) + padded);
  EXPECT_EQ(parse_safetensors(to_bytes(serialize(file))), file);
  EXPECT_EQ(safetensors_header({}), io_cases::little_endian(8, 8) + "{}      ");
}

TEST(Npy, WritesTheBytesOfNumpy) {
  for (const Seed& seed : seeds("npy")) {
    // Versions 2 and 3 are for headers that do not fit version 1; this code never writes them.
    if (seed.name.find("version") != std::string::npos || seed.name.find("refused") != std::string::npos) continue;
    EXPECT_EQ(serialize(parse_npy(to_bytes(seed.bytes))), seed.bytes) << seed.name;
  }
}

TEST(Npy, AcceptsWhatOtherWritersPut) {
  const Array expected{ElementType::f32, {2, 3}, to_bytes(std::string(24, 'x'))};
  for (const std::string header :
       {"{\"shape\":(2,3,),\"fortran_order\":False,\"descr\":\"<f4\"}",
        "   {  'descr'  :  '<f4'  ,  'fortran_order'  :  False  ,  'shape'  :  ( 2 , 3 )  }   "}) {
    for (const int version : {1, 2, 3}) EXPECT_EQ(parse_npy(to_bytes(io_cases::npy(header, 24, version))), expected);
  }
  const std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}";
  const std::string longest = dictionary + std::string(9'999 - dictionary.size(), ' ');
  EXPECT_EQ(parse_npy(to_bytes(io_cases::npy(longest, 24))), expected);
}

TEST(Safetensors, AcceptsWhatOtherWritersPut) {
  // Any order of tensors and fields, spaces, empty tensors between others; a large dimension beside a zero is no overflow.
  const std::string header =
      R"({ "z" : {"shape":[2], "data_offsets":[0,2],"dtype":"U8"},"e":{"dtype":"F64","shape":[0,9223372036854775807],)"
      R"("data_offsets":[2,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},"__metadata__":{}} )";
  const SafeTensors file = parse_safetensors(to_bytes(io_cases::raw_safetensors(header.size(), header, "xyz")));
  ASSERT_EQ(file.tensors.size(), 3u);
  EXPECT_EQ(to_text(file.tensors.at("z").data), "xy");
  EXPECT_EQ(to_text(file.tensors.at("a").data), "z");
  EXPECT_EQ(file.tensors.at("e").data.size(), 0u);
  EXPECT_TRUE(file.metadata.empty());
}

TEST(Safetensors, AcceptsTheLimits) {
  SafeTensors file;
  for (int i = 0; i < kMaxTensors; ++i) file.tensors[std::to_string(i)] = make_array(ElementType::u8, {1});
  EXPECT_EQ(parse_safetensors(to_bytes(serialize(file))), file);
  const std::string header = "{}" + std::string(kMaxSafetensorsHeader - 2, ' ');
  EXPECT_EQ(parse_safetensors(to_bytes(io_cases::safetensors(header))), SafeTensors{});
}

TEST_F(IoFiles, PythonReadsWhatIsWrittenAndBack) {
  if (std::system("python3 -c 'import numpy' 2>/dev/null") != 0) GTEST_SKIP() << "needs python3 with numpy";
  SafeTensors file;
  for (const ElementType type : kAllTypes) {
    if (type == ElementType::bf16) continue;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const std::string name = fmt::format("{}_{}", element_name(type), i);
      file.tensors[name] = make_array(type, kShapes[i]);
      write_npy(path(name + ".npy"), file.tensors[name]);
    }
  }
  file.metadata["count"] = std::to_string(file.tensors.size());
  write_safetensors(path("all.safetensors"), file);
  std::ofstream(path("check.py")) << R"(
import json, os, sys
import numpy as np
os.chdir(sys.argv[1])
raw = open('all.safetensors', 'rb').read()
start = 8 + int.from_bytes(raw[:8], 'little')
header = json.loads(raw[8:start])
names = {name[:-4] for name in os.listdir() if name.endswith('.npy')}
if names != set(header) - {'__metadata__'} or header['__metadata__'] != {'count': str(len(names))}:
    sys.exit('names differ')
kinds = {'F': 'f', 'I': 'i', 'U': 'u', 'B': 'b'}
for name in names:
    entry = header[name]
    begin, end = entry['data_offsets']
    array = np.load(name + '.npy')
    expected = 'b1' if entry['dtype'] == 'BOOL' else kinds[entry['dtype'][0]] + str(int(entry['dtype'][1:]) // 8)
    same = array.dtype.str[1:] == expected and list(array.shape) == entry['shape']
    if not same or array.tobytes() != raw[start + begin:start + end]:
        sys.exit(name + ' differs')
    np.save('from_numpy_' + name, array)
)";
  ASSERT_EQ(std::system(fmt::format("python3 '{0}/check.py' '{0}'", folder_.string()).c_str()), 0);
  for (const auto& [name, array] : file.tensors) EXPECT_EQ(read_npy(path("from_numpy_" + name + ".npy")), array) << name;
}

// --- Malformed files -------------------------------------------------------------------------------------------------

template <class Parse>
void check_malformed(const std::vector<Malformed>& cases, Parse parse) {
  std::set<std::string> names, contents;
  for (const Malformed& item : cases) {
    SCOPED_TRACE(item.name);
    EXPECT_TRUE(names.insert(item.name).second);
    EXPECT_TRUE(contents.insert(item.bytes).second) << "the same bytes as another case";
    EXPECT_FALSE(survives(parse, item.bytes));
    const std::vector<std::byte> bytes = to_bytes(item.bytes);
    expect_error(item.status, item.says, [&] { parse(bytes); });
  }
}

TEST(Npy, RefusesMalformedFiles) {
  const auto cases = io_cases::npy_cases();
  EXPECT_GE(cases.size(), 100u);
  check_malformed(cases, parse_npy);
}

TEST(Safetensors, RefusesMalformedFiles) {
  const auto cases = io_cases::safetensors_cases();
  EXPECT_GE(cases.size(), 120u);
  check_malformed(cases, parse_safetensors);
}

// Both formats fix the file's length, so nothing shorter or longer may parse.
template <class Parse>
void check_truncations(const std::string& kind, Parse parse) {
  for (const Seed& seed : seeds(kind)) {
    SCOPED_TRACE(seed.name);
    EXPECT_EQ(survives(parse, seed.bytes), seed.name.find("refused") == std::string::npos);
    for (size_t length = 0; length < seed.bytes.size(); ++length) {
      EXPECT_FALSE(survives(parse, seed.bytes.substr(0, length))) << "first " << length << " bytes";
    }
    for (const char extra : {'\0', ' ', '}'}) EXPECT_FALSE(survives(parse, seed.bytes + extra));
  }
}

template <class Parse>
void check_bit_flips(const std::string& kind, Parse parse) {
  int refused = 0;
  for (const Seed& seed : seeds(kind)) {
    for (size_t bit = 0; bit < seed.bytes.size() * 8; ++bit) {  // the data too: the files are small
      SCOPED_TRACE(fmt::format("{}, bit {}", seed.name, bit));
      std::string bytes = seed.bytes;
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
      refused += !survives(parse, bytes);
    }
  }
  EXPECT_GE(refused, 1500);  // most of a header means something
}

TEST(Npy, RefusesEveryTruncation) { check_truncations("npy", parse_npy); }
TEST(Npy, SurvivesEveryBitFlip) { check_bit_flips("npy", parse_npy); }
TEST(Safetensors, RefusesEveryTruncation) { check_truncations("safetensors", parse_safetensors); }
TEST(Safetensors, SurvivesEveryBitFlip) { check_bit_flips("safetensors", parse_safetensors); }

TEST_F(IoFiles, MalformedFilesAreNamed) {
  write_text(path("bad.npy"), "hello, this is not an array");
  write_text(path("bad.safetensors"), "hello");
  expect_error(Status::format, path("bad.npy") + ": .npy: begins with 'hello,', expected the magic",
               [&] { read_npy(path("bad.npy")); });
  expect_error(Status::format, path("bad.safetensors") + ": .safetensors: 5 bytes, expected at least 8",
               [&] { read_safetensors(path("bad.safetensors")); });
}

// --- Reading and writing ---------------------------------------------------------------------------------------------

TEST_F(IoFiles, ReadFailuresNameThePath) {
  const std::string missing = path("missing");
  expect_error(Status::io, missing + ": " + std::strerror(ENOENT), [&] { read_file(missing, 10); });
  expect_error(Status::io, missing + ": " + std::strerror(ENOENT), [&] { read_npy(missing); });
  expect_error(Status::io, missing + ": " + std::strerror(ENOENT), [&] { read_safetensors(missing); });
  expect_error(Status::io, std::strerror(EISDIR), [&] { read_npy(folder_); });
  expect_error(Status::io, ": not a regular file", [&] { read_npy("/dev/zero"); });
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_error(Status::io, ": not a regular file", [&] { read_safetensors(path("pipe")); });  // and does not wait
  write_text(path("five"), "12345");
  EXPECT_EQ(to_text(read_file(path("five"), 5)), "12345");
  expect_error(Status::size_limit, "5 bytes, expected at most 4", [&] { read_file(path("five"), 4); });
}

TEST_F(IoFiles, HugeFilesAreRefusedFromTheirHeaders) {
  const Array array = make_array(ElementType::f32, {2, 3});
  SafeTensors file;
  file.tensors["a"] = array;
  write_npy(path("a.npy"), array);
  write_safetensors(path("a.safetensors"), file);
  for (const char* name : {"a.npy", "a.safetensors"}) {
    if (::truncate(path(name).c_str(), off_t{1} << 40) != 0) GTEST_SKIP() << "no sparse files here";
  }
  const int64_t before = allocated;
  expect_error(Status::format, "expects 24", [&] { read_npy(path("a.npy")); });
  expect_error(Status::format, "the tensors cover 24", [&] { read_safetensors(path("a.safetensors")); });
  EXPECT_LT(allocated - before, 1 << 16);
}

TEST_F(IoFiles, FailedWritesLeaveNothingBehind) {
  const Array array = make_array(ElementType::f32, {2, 3});
  expect_error(Status::io, std::string("missing/a.npy: ") + std::strerror(ENOENT),
               [&] { write_npy(path("missing/a.npy"), array); });
  fs::create_directory(path("folder"));
  expect_error(Status::io, std::string("folder: ") + std::strerror(EISDIR), [&] { write_npy(path("folder"), array); });
  expect_error(Status::io, std::strerror(ENAMETOOLONG), [&] { write_npy(path(std::string(300, 'n')), array); });
  // Through a link, so that a broken writer run by root replaces the link and not the machine's device.
  fs::create_symlink("/dev/full", path("device"));
  expect_error(Status::io, "device: not a regular file", [&] { write_npy(path("device"), array); });
  EXPECT_TRUE(fs::is_symlink(path("device")));
  EXPECT_EQ(names(), (std::set<std::string>{"device", "folder"}));
}

TEST_F(IoFiles, FullDiskKeepsTheOldFile) {
  SafeTensors small, large;
  small.tensors["a"] = make_array(ElementType::f32, {2});
  large.tensors["a"] = make_array(ElementType::f32, {100'000});
  write_safetensors(path("a"), small);

  rlimit old_limit{};  // a limit on file sizes stands for a full disk: the write fails part way
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  rlimit limit = old_limit;
  limit.rlim_cur = 4096;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto replaced = error_of([&] { write_safetensors(path("a"), large); });
  const auto created = error_of([&] { write_safetensors(path("b"), large); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);

  ASSERT_TRUE(replaced && created);
  EXPECT_EQ(replaced->status(), Status::io);
  EXPECT_EQ(replaced->what(), "cannot write " + path("a") + ": " + std::strerror(EFBIG));
  EXPECT_EQ(names(), std::set<std::string>{"a"});
  EXPECT_EQ(read_safetensors(path("a")), small);
  write_safetensors(path("a"), large);
  EXPECT_EQ(read_safetensors(path("a")), large);
}

TEST_F(IoFiles, ATakenTemporaryNameIsLeftAlone) {
  const std::string taken = fmt::format("a.{}-0.tmp", ::getpid());
  write_text(path(taken), "another's");
  write_text(path("a"), "mine");
  EXPECT_EQ(names(), (std::set<std::string>{"a", taken}));
  EXPECT_EQ(to_text(read_file(path(taken), 100)), "another's");
}

TEST_F(IoFiles, ConcurrentWritersLeaveOneWholeFile) {
  std::vector<std::thread> writers;
  for (int i = 0; i < 8; ++i) {
    writers.emplace_back([&, i] { write_text(path("a"), std::string(100'000, static_cast<char>('a' + i))); });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string text = to_text(read_file(path("a"), 1 << 20));
  EXPECT_EQ(text, std::string(100'000, text.at(0)));
  EXPECT_EQ(names(), std::set<std::string>{"a"});
}

TEST_F(IoFiles, WrittenFilesHaveTheUsualMode) {
  const mode_t mask = ::umask(022);
  write_text(path("a"), "");
  ::umask(mask);
  EXPECT_EQ(fs::status(path("a")).permissions(), fs::perms(0644));
  EXPECT_EQ(read_file(path("a"), 0).size(), 0u);
}

TEST_F(IoFiles, WritersRefuseWhatTheyCannotRepresent) {
  const auto refuse_npy = [&](Status status, const std::string& says, const Array& array) {
    expect_error(status, says, [&] { write_npy(path("a"), array); });
  };
  const auto refuse = [&](Status status, const std::string& says, const SafeTensors& file) {
    expect_error(status, says, [&] { write_safetensors(path("a"), file); });
  };
  const Array good = make_array(ElementType::f32, {2});
  const Array short_data{ElementType::f32, {2}, std::vector<std::byte>(7)};
  const Array negative{ElementType::f32, {-1, -2}, std::vector<std::byte>(8)};
  const Array rank_9{ElementType::f32, {1, 1, 1, 1, 1, 1, 1, 1, 2}, std::vector<std::byte>(8)};
  const Array overflow{ElementType::f32, {int64_t{1} << 62, 4}, {}};
  refuse_npy(Status::dtype, "a: .npy has no type for bf16", make_array(ElementType::bf16, {2}));
  const std::map<std::string, Array> broken = {{"data has 7 bytes, shape (2) of f32 expects 8", short_data},
                                               {"a dimension is -1", negative},
                                               {"rank is 9", rank_9},
                                               {"overflows", overflow}};
  for (const auto& [says, array] : broken) {
    refuse_npy(Status::shape, says, array);
    refuse(Status::shape, says, {{{"t", array}}, {}});
  }
  refuse(Status::invalid_argument, "cannot be called __metadata__", {{{"__metadata__", good}}, {}});
  refuse(Status::invalid_argument, "'?' is not UTF-8", {{{"\xff", good}}, {}});
  refuse(Status::invalid_argument, "'?' is not UTF-8", {{}, {{"\xff", ""}}});
  refuse(Status::invalid_argument, "'?' is not UTF-8", {{}, {{"", "\xff"}}});
  refuse(Status::size_limit, "a header of", {{}, {{"", std::string(kMaxSafetensorsHeader, ' ')}}});
  SafeTensors many;
  for (int i = 0; i <= kMaxTensors; ++i) many.metadata[std::to_string(i)];
  refuse(Status::size_limit, "65537 tensors or metadata entries", many);
  EXPECT_TRUE(names().empty());
}

TEST(Elements, HaveTheirSizes) {
  const int64_t bytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};
  const char* names[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool"};
  for (size_t i = 0; i < std::size(kAllTypes); ++i) {
    EXPECT_EQ(element_bytes(kAllTypes[i]), bytes[i]);
    EXPECT_STREQ(element_name(kAllTypes[i]), names[i]);
  }
}

}  // namespace
}  // namespace scope::io
