// Arrays as files hold them, with reading in pieces and all-or-nothing writing, shared by .npy and .safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace scope::io {

inline constexpr int64_t kMaxRank = 8;

enum class ElementType { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

int64_t element_bytes(ElementType type);
const char* element_name(ElementType type);

// Row-major and dense: data.size() == element_bytes(type) * product(shape). A boolean is a byte; any but 0 is true.
struct Array {
  ElementType type = ElementType::f32;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;
  bool operator==(const Array&) const = default;
};

// Bytes of a dense array. Rank > 8, a negative dimension or overflow is Error(status); `what` names the array.
int64_t dense_bytes(ElementType type, std::span<const int64_t> shape, Status status, const std::string& what);

// What a writer asks of its caller: data as long as type and shape say. Else Error(Status::shape).
void check_array(const Array& array, const std::string& what);

// Bytes read in pieces, so that a parser checks a header before it allocates or reads what the header announces.
// read() is only called with ranges inside [0, size).
struct Source {
  int64_t size = 0;
  std::function<void(int64_t offset, std::span<std::byte> out)> read;
};
Source memory_source(std::span<const std::byte> bytes);  // the bytes must outlive it
Source file_source(const std::string& path);             // regular files only: their size is known and bounds memory

// A file over max_bytes is Error(Status::size_limit); any failure to read is Error(Status::io).
std::vector<std::byte> read_file(const std::string& path, int64_t max_bytes);

// Writes a temporary beside `path`, syncs it and renames it; what is or lies in a temporary itself (io/temporary.h) is
// written as it is. On failure the temporary is removed, what was at `path` is intact, and Error(Status::io) names the path.
// The folder is not synced: after a power cut `path` holds either the old or the new file, whole.
void write_file(const std::string& path, std::span<const std::span<const std::byte>> parts);

// Whether anything stands at a path, links followed. What cannot be looked up (a loop, a name that is too long) does not:
// who opens it says why.
bool exists(const std::string& path);

// "2, 3, 4". Not fmt::join, on which g++ 12 at -O3 warns falsely.
std::string join(std::span<const int64_t> numbers, std::string_view separator = ", ");

// Text from a file, made safe for an error message: short, and ASCII without control characters.
std::string printable(std::string_view text, size_t limit = 100);

// Runs body(); its errors get the path in front (I/O errors already name it).
template <class Body>
auto with_path(const std::string& path, Body body) {
  try {
    return body();
  } catch (const Error& error) {
    if (error.status() == Status::io) throw;
    throw Error(error.status(), path + ": " + error.what());
  }
}

}  // namespace scope::io
