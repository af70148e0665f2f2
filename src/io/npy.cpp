// Parses and writes .npy files; the header is a Python dictionary, read by a parser that knows just its three keys.
#include "io/npy.h"

#include <charconv>
#include <optional>

#include "core/numeric.h"

namespace scope::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

struct Descr {
  std::string_view text;
  ElementType type;
};
// NumPy writes exactly these; byte order has no meaning for one byte, hence '|'.
constexpr Descr kDescrs[] = {{"<f8", ElementType::f64}, {"<f4", ElementType::f32}, {"<f2", ElementType::f16},
                             {"<i8", ElementType::i64}, {"<i4", ElementType::i32}, {"<i2", ElementType::i16},
                             {"|i1", ElementType::i8},  {"<u8", ElementType::u64}, {"<u4", ElementType::u32},
                             {"<u2", ElementType::u16}, {"|u1", ElementType::u8},  {"|b1", ElementType::boolean}};

ElementType parse_descr(const std::string& text) {
  for (const Descr& descr : kDescrs) {
    if (descr.text == text) return descr.type;
  }
  const std::string found = printable(text);
  require(!text.starts_with('>'), Status::format, ".npy header: 'descr' is '{}' (big-endian), expected little-endian",
          found);
  require(text.find('O') == std::string::npos, Status::format,
          ".npy header: 'descr' is '{}' (Python objects), expected numbers or booleans", found);
  fail(Status::format, ".npy header: 'descr' is '{}', expected one of <f8 <f4 <f2 <i8 <i4 <i2 |i1 <u8 <u4 <u2 |u1 |b1",
       found);
}

struct Header {
  std::optional<ElementType> type;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

class HeaderParser {
 public:
  // `start` is the text's place in the file, for messages.
  HeaderParser(std::string_view text, int64_t start) : text_(text), start_(start) {}

  Header parse() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted("a quoted key");
      expect(':');
      if (key == "descr") {
        set(header.type, parse_descr(quoted("a quoted 'descr' (structured types are not supported)")), key);
      } else if (key == "fortran_order") {
        set(header.fortran_order, boolean(), key);
      } else if (key == "shape") {
        set(header.shape, tuple(), key);
      } else {
        fail(Status::format, ".npy header: unknown key '{}', expected descr, fortran_order and shape", printable(key));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_spaces();
    if (text_.substr(at_) != "\n") unexpected("spaces and one final newline");
    require(header.type && header.fortran_order && header.shape, Status::format,
            ".npy header: key '{}' is missing, expected descr, fortran_order and shape",
            !header.type ? "descr" : (!header.fortran_order ? "fortran_order" : "shape"));
    return header;
  }

 private:
  [[noreturn]] void unexpected(const char* expected) const {
    const std::string found =
        at_ < text_.size() ? fmt::format("'{}'", printable(text_.substr(at_), 20)) : "the header's end";
    fail(Status::format, ".npy header: found {} at byte {}, expected {}", found, start_ + static_cast<int64_t>(at_),
         expected);
  }

  template <class Value>
  static void set(std::optional<Value>& field, Value value, const std::string& key) {
    require(!field, Status::format, ".npy header: key '{}' appears twice, expected once", key);
    field = std::move(value);
  }

  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  bool accept(std::string_view token) {
    skip_spaces();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }
  bool accept(char c) { return accept(std::string_view(&c, 1)); }

  void expect(char c) {
    if (!accept(c)) unexpected(std::string({'\'', c, '\''}).c_str());
  }

  std::string quoted(const char* expected) {
    skip_spaces();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') unexpected(expected);
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) unexpected("a closing quote");
    std::string out(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return out;
  }

  bool boolean() {
    if (accept("True")) return true;
    if (!accept("False")) unexpected("True or False");
    return false;
  }

  int64_t dimension() {
    skip_spaces();
    const char* begin = text_.data() + at_;
    const char* end = text_.data() + text_.size();
    const bool digit = begin != end && *begin >= '0' && *begin <= '9';  // from_chars would also take a minus sign
    int64_t value = 0;
    const auto [rest, error] = std::from_chars(begin, end, value);
    const bool leading_zero = digit && *begin == '0' && rest - begin > 1;
    if (!digit || leading_zero || error != std::errc()) unexpected("a dimension from 0 to 2^63 - 1");
    at_ += static_cast<size_t>(rest - begin);
    return value;
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> shape;
    expect('(');
    while (!accept(')')) {
      if (std::ssize(shape) == kMaxRank) unexpected("at most 8 dimensions");
      shape.push_back(dimension());
      if (accept(',')) continue;
      if (shape.size() == 1) unexpected("',' after a single dimension");  // to Python, (3) is a number
      expect(')');
      break;
    }
    return shape;
  }

  std::string_view text_;
  int64_t start_;
  size_t at_ = 0;
};

Array parse(const Source& source) {
  // Magic, version (major, minor), then the header's length: 2 bytes in version 1, else 4.
  unsigned char prefix[12] = {};
  const std::span<std::byte> prefix_bytes = std::as_writable_bytes(std::span(prefix));
  require(source.size >= 10, Status::format, ".npy: {} bytes, expected at least 10", source.size);
  source.read(0, prefix_bytes.first(10));
  const std::string_view magic(reinterpret_cast<char*>(prefix), kMagic.size());
  require(magic == kMagic, Status::format, ".npy: begins with '{}', expected the magic '\\x93NUMPY'", printable(magic));
  require(prefix[6] >= 1 && prefix[6] <= 3 && prefix[7] == 0, Status::format,
          ".npy: version {}.{} at byte 6, expected 1.0, 2.0 or 3.0", prefix[6], prefix[7]);
  const int64_t start = prefix[6] == 1 ? 10 : 12;
  require(source.size >= start, Status::format, ".npy: {} bytes, expected at least {}", source.size, start);
  source.read(0, prefix_bytes.first(static_cast<size_t>(start)));
  const int64_t length = prefix[8] | prefix[9] << 8 | prefix[10] << 16 | int64_t{prefix[11]} << 24;
  require(length <= kMaxNpyHeader, Status::format, ".npy: the header's length at byte 8 is {}, expected at most {}", length,
          kMaxNpyHeader);
  require(length <= source.size - start, Status::format, ".npy: the header of {} bytes at byte {} passes the end, byte {}",
          length, start, source.size);

  std::string text(static_cast<size_t>(length), '\0');
  source.read(start, std::as_writable_bytes(std::span(text)));
  const Header header = HeaderParser(text, start).parse();
  require(!*header.fortran_order, Status::format,
          ".npy header: 'fortran_order' is True, expected False (save numpy.ascontiguousarray(array))");

  Array array{*header.type, *header.shape, {}};
  const int64_t bytes = dense_bytes(array.type, array.shape, Status::format, ".npy header");
  const int64_t found = source.size - start - length;
  require(found == bytes, Status::format, ".npy: {} bytes of data at byte {}, shape ({}) of {} expects {}", found,
          start + length, join(array.shape), element_name(array.type), bytes);
  array.data.resize(static_cast<size_t>(bytes));
  source.read(start + length, array.data);
  return array;
}

}  // namespace

Array parse_npy(std::span<const std::byte> bytes) { return parse(memory_source(bytes)); }

Array read_npy(const std::string& path) {
  return with_path(path, [&] { return parse(file_source(path)); });
}

std::string npy_header(const Array& array) {
  check_array(array, ".npy array");
  std::string_view descr;
  for (const Descr& known : kDescrs) {
    if (known.type == array.type) descr = known.text;
  }
  require(!descr.empty(), Status::dtype, ".npy has no type for {}, expected another type or a .safetensors file",
          element_name(array.type));
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr, join(array.shape),
                                 array.shape.size() == 1 ? "," : "");
  constexpr int64_t kPrefix = 10;
  const int64_t length = round_up(kPrefix + std::ssize(text) + 1, 64) - kPrefix;
  text.resize(static_cast<size_t>(length - 1), ' ');
  return fmt::format("{}\x01{}{}{}{}\n", kMagic, '\0', static_cast<char>(length & 255), static_cast<char>(length >> 8),
                     text);
}

void write_npy(const std::string& path, const Array& array) {
  with_path(path, [&] {
    const std::string header = npy_header(array);
    const std::span<const std::byte> parts[] = {std::as_bytes(std::span(header)), array.data};
    write_file(path, parts);
  });
}

}  // namespace scope::io
