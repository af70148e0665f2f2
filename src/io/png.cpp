// Reads and writes PNG with libpng, whose errors jump: between setjmp and its return nothing here has a destructor.
#include "io/png.h"

#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace scope::io {

namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 30;

// What libpng's callbacks see.
struct Session {
  std::span<const std::byte> input;  // what is left to read
  std::vector<std::byte>* output = nullptr;
  size_t most_bytes = std::numeric_limits<size_t>::max();  // of one allocation
  bool too_large = false, out_of_memory = false;
  char message[200] = "unknown";
  std::jmp_buf escape;
};

[[noreturn]] void on_error(png_structp png, png_const_charp text) {
  auto* session = static_cast<Session*>(png_get_error_ptr(png));
  std::strncpy(session->message, text, sizeof(session->message) - 1);
  std::longjmp(session->escape, 1);
}
void* on_allocate(png_structp png, png_alloc_size_t bytes) {
  auto* session = static_cast<Session*>(png_get_mem_ptr(png));
  if (bytes > session->most_bytes) {
    session->too_large = true;
    return nullptr;
  }
  void* made = std::malloc(bytes);
  if (made == nullptr) session->out_of_memory = true;
  return made;
}
void on_free(png_structp /*png*/, void* block) { std::free(block); }
void on_warning(png_structp /*png*/, png_const_charp /*text*/) {}  // such as a colour profile that it does not like

void on_read(png_structp png, png_bytep out, size_t bytes) {
  auto* session = static_cast<Session*>(png_get_io_ptr(png));
  if (bytes > session->input.size()) png_error(png, "the file is cut short");
  std::memcpy(out, session->input.data(), bytes);
  session->input = session->input.subspan(bytes);
}

void on_write(png_structp png, png_bytep data, size_t bytes) {
  auto* session = static_cast<Session*>(png_get_io_ptr(png));
  try {
    const auto* begin = reinterpret_cast<const std::byte*>(data);
    session->output->insert(session->output->end(), begin, begin + bytes);
  } catch (const std::bad_alloc&) {
    session->out_of_memory = true;
  }
  if (session->out_of_memory) png_error(png, "out of memory");
}
void on_flush(png_structp /*png*/) {}

struct Reader {
  Session session;
  png_structp png = nullptr;
  png_infop info = nullptr;
  explicit Reader(std::span<const std::byte> bytes) {
    session.input = bytes;
    // libpng allocates and clears what a chunk says is its length, before it reads. A row takes 8 MB at most.
    session.most_bytes = std::max<size_t>(bytes.size(), 16'000'000);
    png = png_create_read_struct_2(PNG_LIBPNG_VER_STRING, &session, on_error, on_warning, &session, on_allocate, on_free);
    if (png != nullptr) info = png_create_info_struct(png);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { png_destroy_read_struct(&png, &info, nullptr); }

  bool read_header() {
    if (png == nullptr || info == nullptr || setjmp(session.escape) != 0) return false;
    png_set_read_fn(png, &session, on_read);
    png_set_crc_action(png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
    png_read_info(png, info);
    png_set_expand(png);
    png_set_scale_16(png);
    png_set_strip_alpha(png);
    png_set_gray_to_rgb(png);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    return true;
  }
  bool read_pixels(png_bytepp rows) {
    if (setjmp(session.escape) != 0) return false;
    png_read_image(png, rows);
    png_read_end(png, nullptr);
    return true;
  }
};

struct Writer {
  Session session;
  png_structp png = nullptr;
  png_infop info = nullptr;
  explicit Writer(std::vector<std::byte>& out) {
    session.output = &out;
    png = png_create_write_struct_2(PNG_LIBPNG_VER_STRING, &session, on_error, on_warning, &session, on_allocate, on_free);
    if (png != nullptr) info = png_create_info_struct(png);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer() { png_destroy_write_struct(&png, &info); }

  bool write(const Image& image) {
    if (png == nullptr || info == nullptr || setjmp(session.escape) != 0) return false;
    png_set_write_fn(png, &session, on_write, on_flush);
    png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);  // the caller has checked
    png_set_IHDR(png, info, static_cast<png_uint_32>(image.width), static_cast<png_uint_32>(image.height), 8,
                 PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    png_write_info(png, info);
    for (int64_t y = 0; y < image.height; ++y) png_write_row(png, image.pixel(y, 0));
    png_write_end(png, nullptr);
    return true;
  }
};

}  // namespace

Image make_image(int64_t height, int64_t width, uint8_t grey) {
  require(height > 0 && width > 0 && height <= kMaxPixels / width, Status::size_limit,
          "image: got {} x {} pixels, expected 1 to {} in all", width, height, kMaxPixels);
  return {height, width, std::vector<uint8_t>(static_cast<size_t>(height * width * 3), grey)};
}

Image decode_png(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto broken = [&] {
    if (reader.session.out_of_memory) throw std::bad_alloc();
    require(!reader.session.too_large, Status::format, "not a readable PNG: a chunk is larger than the file");
    fail(Status::format, "not a readable PNG: {}", printable(reader.session.message));
  };
  if (!reader.read_header()) broken();
  // A pixel has one bit at least and deflate packs at most 1032 bytes into one: what cannot be there is not allocated.
  const int64_t height = png_get_image_height(reader.png, reader.info), width = png_get_image_width(reader.png, reader.info);
  require(height <= kMaxPixels && height * width <= std::ssize(bytes) * 8 * 1032, Status::format,
          "not a readable PNG: {} x {} pixels cannot be in {} bytes", width, height, bytes.size());
  Image image = make_image(height, width);
  require(static_cast<int64_t>(png_get_rowbytes(reader.png, reader.info)) == image.width * 3, Status::internal,
          "png: got rows of {} bytes, expected {}", png_get_rowbytes(reader.png, reader.info), image.width * 3);
  std::vector<png_bytep> rows(static_cast<size_t>(image.height));
  for (int64_t y = 0; y < image.height; ++y) rows[y] = image.pixel(y, 0);
  // Without memory for a part that it can do without, libpng only warns.
  if (!reader.read_pixels(rows.data()) || reader.session.out_of_memory || reader.session.too_large) broken();
  return image;
}

std::vector<std::byte> encode_png(const Image& image) {
  require(image.height > 0 && image.width > 0 && image.height <= kMaxPixels / image.width &&
              std::ssize(image.rgb) == image.height * image.width * 3,
          Status::shape, "image: got {} x {} pixels in {} bytes, expected 1 to {} pixels of 3", image.width, image.height,
          image.rgb.size(), kMaxPixels);
  std::vector<std::byte> out;
  Writer writer(out);
  const bool written = writer.write(image);
  if (writer.session.out_of_memory) throw std::bad_alloc();
  if (!written) fail(Status::internal, "png: {}", printable(writer.session.message));
  return out;
}

Image read_png(const std::string& path) {
  const std::vector<std::byte> bytes = read_file(path, kMaxFileBytes);
  return with_path(path, [&] { return decode_png(bytes); });
}

void write_png(const std::string& path, const Image& image) {
  const std::vector<std::byte> bytes = with_path(path, [&] { return encode_png(image); });
  const std::span<const std::byte> parts[] = {bytes};
  write_file(path, parts);
}

}  // namespace scope::io
