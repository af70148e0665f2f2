// Pixels to latents and back, as tools/tiny_video/video.py defines them.
#include "video/media.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "video/fields.h"

namespace scope::video {

namespace {

using nlohmann::json;

constexpr float kScale = 4.0f;  // latent = (rgb - 0.5) * 4
constexpr float kUnit = 64.0f;  // pixels of one unit of length

// Latent channel of a pixel: 4 colour + 2 (row mod 2) + (column mod 2).
int64_t channel_of(int64_t colour, int64_t y, int64_t x) { return 4 * colour + 2 * (y % 2) + x % 2; }

}  // namespace

Notes parse_notes(std::string_view text) {
  const json all = parse_json(text);
  require(all.is_object(), Status::format, "not a JSON object");
  Notes notes;
  for (const auto& item : all.items()) {
    const json& value = item.value();
    if (item.key() == "latent") {
      require(value == "rgb", Status::format, "latent: expected \"rgb\"");
      notes.rgb = true;
    } else if (item.key() == "shift") {
      require(value.is_number() && value.get<double>() > 0 && value.get<double>() < 1000, Status::format,
              "shift: expected a number in (0, 1000)");
      notes.shift = value.get<double>();
    } else if (item.key() == "grid") {
      const auto fits = [](const json& x) { return x.is_number_unsigned() && x >= 1 && x <= 4096; };
      require(value.is_array() && value.size() == 3 && std::all_of(value.begin(), value.end(), fits), Status::format,
              "grid: expected three integers in 1..4096");
      for (size_t i = 0; i < 3; ++i) notes.grid[i] = value[i].get<int64_t>();
    } else if (item.key() == "steps") {
      require(value.is_number_unsigned() && value >= 1 && value <= 10000, Status::format,
              "steps: expected an integer in 1..10000");
      notes.steps = value.get<int64_t>();
    } else if (item.key() == "prompts") {
      require(value.is_boolean(), Status::format, "prompts: expected true or false");
      notes.prompts = value.get<bool>();
    } else {
      fail(Status::format, "'{}': unknown key, expected latent, shift, grid, steps or prompts", io::printable(item.key()));
    }
  }
  return notes;
}

Notes read_notes(const std::string& folder) {
  const std::string path = folder + "/scope.json";
  if (!io::exists(path)) return {};
  return io::with_path(path, [&] {
    const auto bytes = io::read_file(path, 1 << 16);
    return parse_notes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  });
}

std::vector<float> first_frame_condition(const io::Image& first, const std::array<int64_t, 3>& size, int64_t guides) {
  const auto [frames, height, width] = size;
  require(first.height == 2 * height && first.width == 2 * width, Status::shape,
          "first frame: got {} x {} pixels, this grid needs {} x {} (width x height)", first.width, first.height, 2 * width,
          2 * height);
  const int64_t plane = height * width, volume = frames * plane;
  std::vector<float> out(static_cast<size_t>((guides + kRgbChannels) * volume));
  const auto centred = [](int64_t i, int64_t n) {
    return (static_cast<float>(i) + 0.5f - static_cast<float>(n) / 2) * 2 / kUnit;
  };
  for (int64_t t = 0; t < frames; ++t) {
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        float* at = out.data() + t * plane + y * width + x;
        const float all[kMostGuides] = {t == 0 ? 1.0f : 0.0f,
                                        static_cast<float>(t) / static_cast<float>(std::max<int64_t>(frames - 1, 1)),
                                        centred(y, height), centred(x, width)};
        for (int64_t i = 0; i < guides; ++i) at[i * volume] = all[i];
      }
    }
  }
  for (int64_t y = 0; y < first.height; ++y) {
    for (int64_t x = 0; x < first.width; ++x) {
      for (int64_t colour = 0; colour < 3; ++colour) {
        const float value = static_cast<float>(first.pixel(y, x)[colour]) / 255.0f;
        const int64_t at = (guides + channel_of(colour, y, x)) * volume + y / 2 * width + x / 2;
        out[static_cast<size_t>(at)] = (value - 0.5f) * kScale;
      }
    }
  }
  return out;
}

std::vector<io::Image> to_frames(const std::vector<float>& latent, const std::array<int64_t, 3>& size) {
  const auto [frames, height, width] = size;
  std::vector<io::Image> out;
  for (int64_t t = 0; t < frames; ++t) {
    io::Image& image = out.emplace_back(io::Image{2 * height, 2 * width, {}});
    image.rgb.resize(static_cast<size_t>(12 * height * width));
    for (int64_t y = 0; y < image.height; ++y) {
      for (int64_t x = 0; x < image.width; ++x) {
        for (int64_t colour = 0; colour < 3; ++colour) {
          const int64_t at = ((channel_of(colour, y, x) * frames + t) * height + y / 2) * width + x / 2;
          const float value = std::clamp(latent[static_cast<size_t>(at)] / kScale + 0.5f, 0.0f, 1.0f);
          image.pixel(y, x)[colour] = static_cast<uint8_t>(std::nearbyint(value * 255.0f));
        }
      }
    }
  }
  return out;
}

}  // namespace scope::video
