// Reads files in pieces and writes them all or nothing (temporary, sync, rename), for the .npy and .safetensors code.
#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "io/temporary.h"

namespace scope::io {

static_assert(std::endian::native == std::endian::little, "both formats are little-endian and read without swapping");

namespace {

struct ElementInfo {
  const char* name;
  int64_t bytes;
};

// In the order of ElementType.
constexpr ElementInfo kElements[] = {{"f64", 8}, {"f32", 4}, {"f16", 2}, {"bf16", 2}, {"i64", 8}, {"i32", 4}, {"i16", 2},
                                     {"i8", 1},  {"u64", 8}, {"u32", 4}, {"u16", 2},  {"u8", 1},  {"bool", 1}};

[[noreturn]] void fail_io(const char* action, const std::string& path, int error) {
  fail(Status::io, "cannot {} {}: {}", action, path, std::generic_category().message(error));
}

struct Descriptor {
  int fd = -1;
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

int64_t element_bytes(ElementType type) { return kElements[static_cast<size_t>(type)].bytes; }
const char* element_name(ElementType type) { return kElements[static_cast<size_t>(type)].name; }

int64_t dense_bytes(ElementType type, std::span<const int64_t> shape, Status status, const std::string& what) {
  require(std::ssize(shape) <= kMaxRank, status, "{}: rank is {}, expected at most {}", what, shape.size(), kMaxRank);
  int64_t bytes = element_bytes(type);
  for (const int64_t size : shape) {
    require(size >= 0, status, "{}: a dimension is {}, expected 0 or more", what, size);
    require(!__builtin_mul_overflow(bytes, size, &bytes), status,
            "{}: shape ({}) of {} overflows, expected under 2^63 bytes", what, join(shape), element_name(type));
  }
  return bytes;
}

void check_array(const Array& array, const std::string& what) {
  const int64_t bytes = dense_bytes(array.type, array.shape, Status::shape, what);
  require(std::ssize(array.data) == bytes, Status::shape, "{}: data has {} bytes, shape ({}) of {} expects {}", what,
          array.data.size(), join(array.shape), element_name(array.type), bytes);
}

Source memory_source(std::span<const std::byte> bytes) {
  return {std::ssize(bytes), [bytes](int64_t offset, std::span<std::byte> out) {
            const auto piece = bytes.subspan(static_cast<size_t>(offset), out.size());
            std::copy(piece.begin(), piece.end(), out.begin());
          }};
}

Source file_source(const std::string& path) {
  auto file = std::make_shared<Descriptor>();
  file->fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: do not wait for a pipe's writer
  if (file->fd < 0) fail_io("open", path, errno);
  struct stat info {};
  if (::fstat(file->fd, &info) != 0) fail_io("inspect", path, errno);
  if (S_ISDIR(info.st_mode)) fail_io("read", path, EISDIR);
  require(S_ISREG(info.st_mode), Status::io, "cannot read {}: not a regular file", path);

  auto read = [file, path](int64_t offset, std::span<std::byte> out) {
    while (!out.empty()) {
      const ssize_t got = ::pread(file->fd, out.data(), out.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_io("read", path, errno);
      require(got > 0, Status::io, "cannot read {}: it ended at byte {} while being read", path, offset);
      out = out.subspan(static_cast<size_t>(got));
      offset += got;
    }
  };
  return {info.st_size, std::move(read)};
}

std::vector<std::byte> read_file(const std::string& path, int64_t max_bytes) {
  const Source source = file_source(path);
  require(source.size <= max_bytes, Status::size_limit, "{}: {} bytes, expected at most {}", path, source.size, max_bytes);
  std::vector<std::byte> bytes(static_cast<size_t>(source.size));
  source.read(0, bytes);
  return bytes;
}

void write_file(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  struct stat info {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) fail_io("write", path, EISDIR);
  // rename would replace a device such as /dev/null by a plain file
  require(!exists || S_ISREG(info.st_mode), Status::io, "cannot write {}: not a regular file", path);
  // What is not in place yet needs no second name.
  std::optional<Temporary> temporary;
  if (!in_temporary(path)) temporary.emplace(path, Temporary::Kind::file);
  Descriptor file;
  file.fd = ::open((temporary ? temporary->name() : path).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file.fd < 0) fail_io("write", path, errno);
  for (std::span<const std::byte> rest : parts) {
    while (!rest.empty()) {
      const ssize_t put = ::write(file.fd, rest.data(), rest.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail_io("write", path, errno);
      rest = rest.subspan(static_cast<size_t>(put));
    }
  }
  if (::fsync(file.fd) != 0) fail_io("sync", path, errno);
  if (temporary) temporary->place();
}

std::string join(std::span<const int64_t> numbers, std::string_view separator) {
  std::string out;
  for (const int64_t number : numbers) {
    if (!out.empty()) out += separator;
    out += std::to_string(number);
  }
  return out;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string printable(std::string_view text, size_t limit) {
  std::string out(text.substr(0, limit));
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text.size() > limit ? out + "..." : out;
}

}  // namespace scope::io
