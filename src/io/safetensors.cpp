// Parses and writes .safetensors files; the JSON header is read as events, which sees duplicate keys and needs no tree.
#include "io/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/numeric.h"

namespace scope::io {
namespace {

using nlohmann::json;

constexpr std::string_view kMetadata = "__metadata__";

struct TypeName {
  std::string_view text;
  ElementType type;
};
constexpr TypeName kTypeNames[] = {{"F64", ElementType::f64},     {"F32", ElementType::f32}, {"F16", ElementType::f16},
                                   {"BF16", ElementType::bf16},   {"I64", ElementType::i64}, {"I32", ElementType::i32},
                                   {"I16", ElementType::i16},     {"I8", ElementType::i8},   {"U64", ElementType::u64},
                                   {"U32", ElementType::u32},     {"U16", ElementType::u16}, {"U8", ElementType::u8},
                                   {"BOOL", ElementType::boolean}};

struct Entry {
  ElementType type = ElementType::f32;
  std::vector<int64_t> shape;
  std::vector<int64_t> offsets;  // begin and end, from the end of the header
};

struct Header {
  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> metadata;
  int64_t end = 0;  // in the file: where the data begin
};

// Receives the JSON's events. It knows at each place what may come, so that nesting past three levels, long arrays and
// unknown fields are refused as they appear, and memory stays in proportion to the header.
class HeaderReader : public json::json_sax_t {
 public:
  Header header;

  bool start_object(size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = name_ == kMetadata ? Place::metadata : Place::tensor;
      std::fill(std::begin(seen_), std::end(seen_), false);
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& text) override {
    bool is_new = false;
    if (place_ == Place::top) {
      name_ = text;
      is_new = name_ == kMetadata ? !std::exchange(has_metadata_, true) : header.entries.try_emplace(name_).second;
      check_count(std::ssize(header.entries), "tensors");
    } else if (place_ == Place::metadata) {
      field_ = text;
      is_new = header.metadata.try_emplace(field_).second;
      check_count(std::ssize(header.metadata), "metadata entries");
    } else {
      field_ = text;
      const auto* known = std::find(std::begin(kFields), std::end(kFields), text);
      require(known != std::end(kFields), Status::format, "{}: unknown field, expected dtype, shape and data_offsets",
              where());
      is_new = !std::exchange(seen_[known - kFields], true);
    }
    require(is_new, Status::format, ".safetensors header: key '{}' appears twice in one object, expected once",
            printable(text));
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      for (size_t i = 0; i < std::size(kFields); ++i) {
        require(seen_[i], Status::format, "tensor '{}': field '{}' is missing", printable(name_), kFields[i]);
      }
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::tensor || field_ == "dtype") unexpected("an array");
    place_ = Place::array;
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    require(field_ == "shape" || entry().offsets.size() == 2, Status::format, "{}: {} numbers, expected 2", where(),
            entry().offsets.size());
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::array || value > INT64_MAX) unexpected(fmt::format("the number {}", value));
    std::vector<int64_t>& numbers = field_ == "shape" ? entry().shape : entry().offsets;
    const int64_t limit = field_ == "shape" ? kMaxRank : 2;
    require(std::ssize(numbers) < limit, Status::format, "{}: more than {} numbers", where(), limit);
    numbers.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::metadata) {
      header.metadata[field_] = text;
    } else if (place_ == Place::tensor && field_ == "dtype") {
      const auto* known =
          std::find_if(std::begin(kTypeNames), std::end(kTypeNames), [&](auto& t) { return t.text == text; });
      require(known != std::end(kTypeNames), Status::format,
              "{}: '{}', expected F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8 or BOOL", where(),
              printable(text));
      entry().type = known->type;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool number_integer(int64_t value) override { unexpected(fmt::format("the number {}", value)); }
  bool number_float(double, const std::string& text) override {
    std::string quoted = text;  // in which the parser has put the locale's decimal point
    if (const size_t at = quoted.find_first_not_of("0123456789eE+-"); at != std::string::npos) quoted[at] = '.';
    unexpected("the number " + printable(quoted));
  }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool null() override { unexpected("null"); }
  bool binary(json::binary_t&) override { unexpected("binary data"); }  // never in JSON text

  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    fail(Status::format, ".safetensors header: not JSON at byte {}: {}", position + 7, printable(error.what(), 300));
  }

 private:
  enum class Place { outside, top, metadata, tensor, array };
  static constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};

  Entry& entry() { return header.entries.at(name_); }

  std::string where() const {
    if (place_ == Place::top || place_ == Place::outside) return fmt::format("'{}'", printable(name_));
    return fmt::format("{} '{}', '{}'", place_ == Place::metadata ? "metadata" : "tensor", printable(name_),
                       printable(field_));
  }

  [[noreturn]] void unexpected(const std::string& found) const {
    const char* expected = "an object";
    if (place_ == Place::metadata) expected = "a string";
    if (place_ == Place::tensor) expected = field_ == "dtype" ? "a string" : "an array";
    if (place_ == Place::array) expected = "an integer from 0 to 2^63 - 1";
    fail(Status::format, ".safetensors header: {}: found {}, expected {}", where(), found, expected);
  }

  static void check_count(int64_t count, const char* what) {
    require(count <= kMaxTensors, Status::format, ".safetensors header: more than {} {}", kMaxTensors, what);
  }

  Place place_ = Place::outside;
  std::string name_;   // the current key of the top object
  std::string field_;  // the current key inside it
  bool seen_[std::size(kFields)] = {};
  bool has_metadata_ = false;
};

// Tensors must tile [0, data_bytes) with neither holes nor overlaps; afterwards every range is known to lie in the file.
void check_layout(const std::map<std::string, Entry>& entries, int64_t data_bytes) {
  std::vector<const std::pair<const std::string, Entry>*> order;
  order.reserve(entries.size());
  for (const auto& item : entries) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->second.offsets < b->second.offsets; });
  int64_t at = 0;
  for (const auto* item : order) {
    const Entry& entry = item->second;
    const std::string name = fmt::format("tensor '{}'", printable(item->first));
    const int64_t begin = entry.offsets[0], end = entry.offsets[1];
    require(begin == at, Status::format, "{}: begins at data byte {}, expected {} ({})", name, begin, at,
            begin > at ? "a hole" : "an overlap");
    require(begin <= end && end <= data_bytes, Status::format, "{}: ends at data byte {}, expected {} to {}", name, end,
            begin, data_bytes);
    const int64_t bytes = dense_bytes(entry.type, entry.shape, Status::format, name);
    require(end - begin == bytes, Status::format, "{}: {} bytes of data, shape ({}) of {} expects {}", name, end - begin,
            join(entry.shape), element_name(entry.type), bytes);
    at = end;
  }
  require(at == data_bytes, Status::format, ".safetensors: {} bytes of data, the tensors cover {}", data_bytes, at);
}

Header parse_header(const Source& source) {
  uint64_t length = 0;
  require(source.size >= 8, Status::format, ".safetensors: {} bytes, expected at least 8", source.size);
  source.read(0, std::as_writable_bytes(std::span(&length, 1)));
  require(length <= kMaxSafetensorsHeader, Status::format,
          ".safetensors: the header's length at byte 0 is {}, expected at most {}", length, kMaxSafetensorsHeader);
  const int64_t start = 8 + static_cast<int64_t>(length);
  require(start <= source.size, Status::format, ".safetensors: the header of {} bytes at byte 8 passes the end, byte {}",
          length, source.size);

  std::string text(length, '\0');
  source.read(8, std::as_writable_bytes(std::span(text)));
  require(text.starts_with('{'), Status::format, ".safetensors header: begins with '{}', expected '{{'",
          printable(text.substr(0, 1)));
  const size_t zero = text.find('\0');  // the JSON parser takes it for the end and would hide what follows
  require(zero == std::string::npos, Status::format, ".safetensors header: zero at byte {}, expected JSON", zero + 8);
  HeaderReader reader;
  json::sax_parse(text, &reader);
  check_layout(reader.header.entries, source.size - start);
  reader.header.end = start;
  return std::move(reader.header);
}

SafeTensors parse(const Source& source) {
  Header header = parse_header(source);
  SafeTensors out;
  out.metadata = std::move(header.metadata);
  for (auto& [name, entry] : header.entries) {
    Array& array = out.tensors[name];
    array.type = entry.type;
    array.shape = std::move(entry.shape);
    array.data.resize(static_cast<size_t>(entry.offsets[1] - entry.offsets[0]));
    source.read(header.end + entry.offsets[0], array.data);
  }
  return out;
}

std::string_view type_text(ElementType type) {
  return std::find_if(std::begin(kTypeNames), std::end(kTypeNames), [&](auto& t) { return t.type == type; })->text;
}

std::string quote(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    fail(Status::invalid_argument, ".safetensors: '{}' is not UTF-8", printable(text));
  }
}

}  // namespace

SafeTensors parse_safetensors(std::span<const std::byte> bytes) { return parse(memory_source(bytes)); }

SafeTensors read_safetensors(const std::string& path) {
  return with_path(path, [&] { return parse(file_source(path)); });
}

std::map<std::string, std::vector<int64_t>> read_safetensors_shapes(const std::string& path) {
  return with_path(path, [&] {
    std::map<std::string, std::vector<int64_t>> shapes;
    for (auto& [name, entry] : parse_header(file_source(path)).entries) shapes[name] = std::move(entry.shape);
    return shapes;
  });
}

std::string safetensors_header(const SafeTensors& file) {
  const int64_t most = static_cast<int64_t>(std::max(file.tensors.size(), file.metadata.size()));
  require(most <= kMaxTensors, Status::size_limit, ".safetensors: {} tensors or metadata entries, expected at most {}", most,
          kMaxTensors);
  std::string text = "{";
  if (!file.metadata.empty()) {
    text += fmt::format("\"{}\":{{", kMetadata);
    for (const auto& [name, value] : file.metadata) text += quote(name) + ":" + quote(value) + ",";
    text.back() = '}';
    text += ',';
  }
  int64_t at = 0;
  for (const auto& [name, array] : file.tensors) {
    require(name != kMetadata, Status::invalid_argument, ".safetensors: a tensor cannot be called {}", kMetadata);
    check_array(array, fmt::format("tensor '{}'", printable(name)));
    const int64_t end = checked_add(at, std::ssize(array.data), "the tensors' bytes");
    text += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)", quote(name), type_text(array.type),
                        join(array.shape, ","), at, end);
    at = end;
  }
  if (text.ends_with(',')) text.pop_back();
  text += '}';
  text.resize(static_cast<size_t>(round_up(std::ssize(text), 8)), ' ');
  require(std::ssize(text) <= kMaxSafetensorsHeader, Status::size_limit,
          ".safetensors: a header of {} bytes, expected at most {}", text.size(), kMaxSafetensorsHeader);
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

void write_safetensors(const std::string& path, const SafeTensors& file) {
  with_path(path, [&] {
    const std::string header = safetensors_header(file);
    std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(header))};
    for (const auto& item : file.tensors) parts.push_back(item.second.data);
    write_file(path, parts);
  });
}

}  // namespace scope::io
