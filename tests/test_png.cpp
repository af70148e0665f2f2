// Tests PNG against files packed and unpacked by hand with zlib: every colour type, every truncation and bit flip, full
// disks.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <set>

#include "io/png.h"
#include "temporary_folder.h"

namespace scope::io {
namespace {

namespace fs = std::filesystem;

std::string big_endian(uint32_t value) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 255);
  return out;
}

std::string chunk(const std::string& name, const std::string& data) {
  const std::string body = name + data;
  const uLong crc = crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()));
  return big_endian(static_cast<uint32_t>(data.size())) + body + big_endian(static_cast<uint32_t>(crc));
}

std::string deflated(const std::string& data) {
  std::string out(compressBound(data.size()), '\0');
  uLongf bytes = out.size();
  EXPECT_EQ(compress(reinterpret_cast<Bytef*>(out.data()), &bytes, reinterpret_cast<const Bytef*>(data.data()), data.size()),
            Z_OK);
  out.resize(bytes);
  return out;
}

const std::string kSignature = "\x89PNG\r\n\x1a\n";

// `scanlines`: each with its filter byte in front.
std::string hand_made(uint32_t height, uint32_t width, int bits, int colour, const std::string& scanlines,
                      const std::string& before_data = "") {
  const std::string header =
      big_endian(width) + big_endian(height) + static_cast<char>(bits) + static_cast<char>(colour) + std::string(3, '\0');
  return kSignature + chunk("IHDR", header) + before_data + chunk("IDAT", deflated(scanlines)) + chunk("IEND", "");
}

// Undoes what an encoder may do to 8-bit RGB: five filters, several IDAT chunks.
Image hand_read(std::span<const std::byte> bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const auto number = [&](size_t i) { return byte(i) << 24 | byte(i + 1) << 16 | byte(i + 2) << 8 | byte(i + 3); };
  Image image;
  std::string packed;
  for (size_t at = 8; at < bytes.size(); at += static_cast<size_t>(number(at)) + 12) {
    const auto length = static_cast<size_t>(number(at));
    const std::string name(reinterpret_cast<const char*>(&bytes[at + 4]), 4);
    if (name == "IHDR") {
      EXPECT_EQ(byte(at + 16), 8);
      EXPECT_EQ(byte(at + 17), 2);
      image = make_image(number(at + 12), number(at + 8));
    }
    if (name == "IDAT") packed.append(reinterpret_cast<const char*>(&bytes[at + 8]), length);
  }
  const int64_t stride = image.width * 3;
  std::string lines(static_cast<size_t>(image.height * (stride + 1)), '\0');
  uLongf size = lines.size();
  EXPECT_EQ(uncompress(reinterpret_cast<Bytef*>(lines.data()), &size, reinterpret_cast<const Bytef*>(packed.data()),
                       packed.size()),
            Z_OK);
  EXPECT_EQ(size, lines.size());
  const auto done = [&](int64_t y, int64_t i) -> int { return y < 0 || i < 0 ? 0 : image.rgb[y * stride + i]; };
  for (int64_t y = 0; y < image.height; ++y) {
    const int filter = static_cast<uint8_t>(lines[y * (stride + 1)]);
    for (int64_t i = 0; i < stride; ++i) {
      const int a = done(y, i - 3), b = done(y - 1, i), c = i < 3 ? 0 : done(y - 1, i - 3);
      const int p = a + b - c;
      const int paeth = std::abs(p - a) <= std::abs(p - b) && std::abs(p - a) <= std::abs(p - c) ? a
                        : std::abs(p - b) <= std::abs(p - c)                                     ? b
                                                                                                 : c;
      const int guess[] = {0, a, b, (a + b) / 2, paeth};
      image.rgb[y * stride + i] =
          static_cast<uint8_t>(static_cast<uint8_t>(lines[y * (stride + 1) + 1 + i]) + guess[filter]);
    }
  }
  return image;
}

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::optional<Error> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

// Smooth colours with noise, so that an encoder uses its filters.
Image picture(int64_t height, int64_t width, uint32_t seed) {
  std::mt19937 random(seed);
  Image image = make_image(height, width);
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int c = 0; c < 3; ++c) image.pixel(y, x)[c] = static_cast<uint8_t>(3 * x + 5 * y + 40 * c + random() % 4);
    }
  }
  return image;
}

TEST(Png, WritesWhatAnotherReaderReads) {
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{1, 1}, {1, 7}, {9, 1}, {33, 64}, {257, 300}}) {
    const Image image = picture(height, width, 1);
    EXPECT_EQ(hand_read(encode_png(image)), image) << height << " x " << width;
    EXPECT_EQ(decode_png(encode_png(image)), image) << height << " x " << width;
  }
}

TEST(Png, ReadsEveryColourTypeAsRgb) {
  const auto expect = [](const std::string& file, const std::vector<uint8_t>& rgb) {
    EXPECT_EQ(decode_png(as_bytes(file)).rgb, rgb);
  };
  using namespace std::string_literals;
  expect(hand_made(2, 1, 8, 2, "\0\1\2\3\0\xfe\xfd\xfc"s), {1, 2, 3, 254, 253, 252});
  expect(hand_made(1, 2, 8, 6, "\0\1\2\3\x80\4\5\6\0"s), {1, 2, 3, 4, 5, 6});  // alpha
  expect(hand_made(1, 2, 8, 0, "\0\7\xc8"s), {7, 7, 7, 200, 200, 200});
  expect(hand_made(1, 2, 8, 4, "\0\7\xff\xc8\0"s), {7, 7, 7, 200, 200, 200});
  expect(hand_made(1, 3, 1, 0, "\0\xa0"s), {255, 255, 255, 0, 0, 0, 255, 255, 255});
  expect(hand_made(1, 2, 4, 0, "\0\x1f"s), {17, 17, 17, 255, 255, 255});
  expect(hand_made(1, 1, 16, 2, "\0\1\0\x80\0\xff\xff"s), {1, 128, 255});
  expect(hand_made(1, 1, 16, 2, "\0\0\xff\1\xc0\xfe\x40"s), {1, 2, 253});  // 0.99, 1.74 and 253.26
  expect(hand_made(1, 3, 8, 3, "\0\1\0\1"s, chunk("PLTE", "\1\2\3\4\5\6"s) + chunk("tRNS", "\0"s)),
         {4, 5, 6, 1, 2, 3, 4, 5, 6});
  // A gamma says how to show the values, not what they are.
  expect(hand_made(1, 1, 8, 2, "\0\1\2\3"s, chunk("gAMA", big_endian(100000))), {1, 2, 3});
}

TEST(Png, EveryTruncationAndEveryFlippedBitIsRefused) {
  const std::vector<std::byte> good = encode_png(picture(5, 6, 2));
  for (size_t size = 0; size < good.size(); ++size) {
    const std::vector<std::byte> part(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    const auto error = error_of([&] { decode_png(part); });
    ASSERT_TRUE(error) << size << " of " << good.size() << " bytes";
    EXPECT_EQ(error->status(), Status::format);
  }
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::vector<std::byte> flipped = good;
    flipped[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const auto error = error_of([&] { decode_png(flipped); });
    ASSERT_TRUE(error) << "bit " << bit;
    EXPECT_TRUE(error->status() == Status::format || error->status() == Status::size_limit) << error->what();
  }
}

TEST(Png, ASmallFileCannotAskForMuchMemory) {
  const auto error = error_of([&] { decode_png(as_bytes(hand_made(1 << 13, 1 << 13, 8, 2, ""))); });
  ASSERT_TRUE(error);
  EXPECT_NE(std::string(error->what()).find("8192 x 8192 pixels cannot be in"), std::string::npos) << error->what();
  // A chunk that says 2 GB: refused by its length, before memory for it is cleared.
  const std::string header = big_endian(1) + big_endian(1) + std::string("\x08\x02\0\0\0", 5);
  const auto chunks = error_of([&] {
    decode_png(as_bytes(kSignature + chunk("IHDR", header) + big_endian(0x7a000006) + "sPLT" + std::string(8, '\0')));
  });
  ASSERT_TRUE(chunks);
  EXPECT_NE(std::string(chunks->what()).find("a chunk is larger than the file"), std::string::npos) << chunks->what();
}

TEST(Png, RefusesImagesThatAreNone) {
  const Image cases[] = {
      {0, 5, {}}, {2, 2, std::vector<uint8_t>(11)}, {int64_t{1} << 40, int64_t{1} << 40, {}}, {-1, -1, {1, 2, 3}}};
  for (const Image& image : cases) {
    const auto error = error_of([&] { encode_png(image); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->status(), Status::shape);
  }
  EXPECT_TRUE(error_of([] { make_image(int64_t{1} << 20, int64_t{1} << 20); }));
}

using PngFiles = test::TemporaryFolder;

TEST_F(PngFiles, ErrorsNameThePathAndTheReason) {
  write_png(path("good.png"), picture(20, 30, 3));
  EXPECT_EQ(read_png(path("good.png")), picture(20, 30, 3));
  const auto absent = error_of([&] { read_png(path("absent.png")); });
  ASSERT_TRUE(absent);
  EXPECT_EQ(absent->what(), "cannot open " + path("absent.png") + ": " + std::strerror(ENOENT));
  std::ofstream(path("text.png")) << "not a picture";
  const auto text = error_of([&] { read_png(path("text.png")); });
  ASSERT_TRUE(text);
  EXPECT_EQ(text->what(), path("text.png") + ": not a readable PNG: Not a PNG file");
  fs::resize_file(path("good.png"), 100);
  const auto cut = error_of([&] { read_png(path("good.png")); });
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->what(), path("good.png") + ": not a readable PNG: the file is cut short");
}

TEST_F(PngFiles, AFullDiskLeavesWhatWasThere) {
  const Image small = picture(2, 2, 4), large = picture(200, 200, 5);
  write_png(path("a"), small);
  rlimit old_limit{};  // a limit on file sizes stands for a full disk: the write fails part way
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  rlimit limit = old_limit;
  limit.rlim_cur = 4096;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto replaced = error_of([&] { write_png(path("a"), large); });
  const auto created = error_of([&] { write_png(path("b"), large); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  ASSERT_TRUE(replaced && created);
  EXPECT_EQ(replaced->status(), Status::io);
  EXPECT_EQ(names(), std::set<std::string>{"a"});
  EXPECT_EQ(read_png(path("a")), small);
}

}  // namespace
}  // namespace scope::io
