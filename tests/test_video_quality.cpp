// Tests PSNR and SSIM against their definitions, window by window.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "measure/video_quality.h"

namespace scope {
namespace {

io::Image noise(int64_t height, int64_t width, uint32_t seed, int spread) {
  std::mt19937 random(seed);
  io::Image image = io::make_image(height, width);
  for (size_t i = 0; i < image.rgb.size(); ++i) {
    image.rgb[i] =
        static_cast<uint8_t>(100 + 60 * std::sin(0.05 * static_cast<double>(i)) + static_cast<int>(random() % spread));
  }
  return image;
}

// Every window by itself, with two-dimensional weights and centred sums.
double plain_ssim(const io::Image& a, const io::Image& b) {
  double total = 0, windows = 0;
  for (int c = 0; c < 3; ++c) {
    for (int64_t top = 0; top + 11 <= a.height; ++top) {
      for (int64_t left = 0; left + 11 <= a.width; ++left) {
        double weight = 0, ma = 0, mb = 0, va = 0, vb = 0, cov = 0;
        const auto each = [&](auto body) {
          for (int64_t y = 0; y < 11; ++y) {
            for (int64_t x = 0; x < 11; ++x) {
              const auto d = static_cast<double>((y - 5) * (y - 5) + (x - 5) * (x - 5));
              body(std::exp(-d / 4.5), a.pixel(top + y, left + x)[c] / 255.0, b.pixel(top + y, left + x)[c] / 255.0);
            }
          }
        };
        each([&](double w, double p, double q) { weight += w, ma += w * p, mb += w * q; });
        ma /= weight, mb /= weight;
        each([&](double w, double p, double q) {
          va += w / weight * (p - ma) * (p - ma), vb += w / weight * (q - mb) * (q - mb),
              cov += w / weight * (p - ma) * (q - mb);
        });
        total += (2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma * ma + mb * mb + 1e-4) * (va + vb + 9e-4));
        windows += 1;
      }
    }
  }
  return total / windows;
}

// The colours of an image are channels of a latent at any scale: the dense video's range is what counts.
TEST(VideoQuality, LatentsAreScaledByTheReference) {
  io::Image a = noise(12, 15, 1, 20), b = noise(12, 15, 2, 20);
  for (size_t c = 0; c < 3; ++c) a.rgb[c] = 0, a.rgb[3 + c] = 255;
  std::vector<float> x, y;
  for (size_t c = 0; c < 3; ++c) {
    for (size_t i = c; i < a.rgb.size(); i += 3) x.push_back(2.5f * a.rgb[i] - 70), y.push_back(2.5f * b.rgb[i] - 70);
  }
  const FrameQuality expected = compare_frames(a, b), got = compare_latents(x, y, {1, 12, 15}, LatentScale(x, 3), 0);
  EXPECT_NEAR(got.mse, expected.mse, 1e-7);
  EXPECT_NEAR(got.ssim, expected.ssim, 1e-6);
  EXPECT_TRUE(std::isinf(compare_latents(x, x, {1, 12, 15}, LatentScale(x, 3), 0).psnr));
  const std::vector<float> flat(x.size(), 4.0f);  // nothing to divide by
  EXPECT_TRUE(std::isinf(compare_latents(flat, flat, {1, 12, 15}, LatentScale(flat, 3), 0).psnr));
  y[3] = NAN;
  EXPECT_THROW(compare_latents(x, y, {1, 12, 15}, LatentScale(x, 3), 0), Error);
  EXPECT_THROW(compare_latents(x, x, {1, 9, 20}, LatentScale(x, 3), 0), Error);
}

TEST(VideoQuality, IsTheDefinition) {
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{11, 11}, {12, 30}, {25, 17}}) {
    for (const int spread : {2, 20, 90}) {
      const io::Image a = noise(height, width, 1, spread), b = noise(height, width, 2, spread);
      const FrameQuality got = compare_frames(a, b);
      double mse = 0;
      for (size_t i = 0; i < a.rgb.size(); ++i) {
        mse += std::pow((a.rgb[i] - b.rgb[i]) / 255.0, 2) / static_cast<double>(a.rgb.size());
      }
      EXPECT_NEAR(got.mse, mse, 1e-15);
      EXPECT_NEAR(got.psnr, 10 * std::log10(1 / mse), 1e-9);
      EXPECT_NEAR(got.ssim, plain_ssim(a, b), 1e-10);
      EXPECT_LT(got.ssim, 1);
    }
  }
}

TEST(VideoQuality, EqualFramesAreInfinitelyGood) {
  const io::Image a = noise(20, 20, 3, 50);
  const FrameQuality got = compare_frames(a, a);
  EXPECT_EQ(got.mse, 0);
  EXPECT_TRUE(std::isinf(got.psnr) && got.psnr > 0);
  EXPECT_NEAR(got.ssim, 1, 1e-12);
}

TEST(VideoQuality, BlackAgainstWhiteIsZeroDecibel) {
  const FrameQuality got = compare_frames(io::make_image(16, 16, 0), io::make_image(16, 16, 255));
  EXPECT_EQ(got.mse, 1);
  EXPECT_EQ(got.psnr, 0);
  EXPECT_NEAR(got.ssim, 1e-4 / (1 + 1e-4), 1e-12);
}

TEST(VideoQuality, TheTwoAveragesDiffer) {
  const VideoQuality video = summarise({{0.01, 20, 0.5}, {0.0001, 40, 0.9}});
  EXPECT_EQ(video.mean_psnr, 30);
  EXPECT_NEAR(video.pooled_psnr, -10 * std::log10(0.00505), 1e-12);
  EXPECT_NEAR(video.ssim, 0.7, 1e-12);
  EXPECT_EQ(video.worst, 0);
  EXPECT_EQ(video.equal_frames, 0);
  const VideoQuality rest = summarise({{0.01, 20, 0.5}, {0.0001, 40, 0.9}, {0.0001, 40, 0.8}}, 1);
  EXPECT_EQ(rest.mean_psnr, 40);
  EXPECT_NEAR(rest.pooled_psnr, 40, 1e-12);
  EXPECT_NEAR(rest.ssim, 0.85, 1e-12);
  EXPECT_EQ(rest.worst, 1);
  EXPECT_EQ(rest.frames.size(), 3u);
  EXPECT_THROW(summarise({{0.01, 20, 0.5}}, 1), Error);
}

TEST(VideoQuality, RefusesOtherSizes) {
  EXPECT_THROW(compare_frames(io::make_image(16, 16), io::make_image(16, 17)), Error);
  EXPECT_THROW(compare_frames(io::make_image(10, 16), io::make_image(10, 16)), Error);
}

}  // namespace
}  // namespace scope
