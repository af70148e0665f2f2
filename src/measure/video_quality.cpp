// Squared differences, and local means, variances and covariances by a separable Gaussian, in float64.
#include "measure/video_quality.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace scope {

namespace {

double psnr_of(double mse) { return mse > 0 ? -10 * std::log10(mse) : std::numeric_limits<double>::infinity(); }

std::array<double, kSsimWindow> gaussian() {
  std::array<double, kSsimWindow> weights{};
  double sum = 0;
  for (int64_t i = 0; i < kSsimWindow; ++i) {
    const auto x = static_cast<double>(2 * i - kSsimWindow + 1) / 2;
    sum += weights[i] = std::exp(-x * x / (2 * 1.5 * 1.5));
  }
  for (double& w : weights) w /= sum;
  return weights;
}

// One channel of a frame, or a product of two, in [0, 1].
struct Plane {
  int64_t height = 0, width = 0;
  std::vector<double> values;

  Plane(int64_t h, int64_t w) : height(h), width(w), values(static_cast<size_t>(h * w)) {}
};

// Weighted means over every window inside the plane.
Plane blurred(const Plane& in) {
  static const auto kWeights = gaussian();
  Plane rows(in.height, in.width - kSsimWindow + 1), out(in.height - kSsimWindow + 1, rows.width);
  for (int64_t y = 0; y < rows.height; ++y) {
    for (int64_t x = 0; x < rows.width; ++x) {
      double sum = 0;
      for (int64_t i = 0; i < kSsimWindow; ++i) sum += kWeights[i] * in.values[y * in.width + x + i];
      rows.values[y * rows.width + x] = sum;
    }
  }
  for (int64_t y = 0; y < out.height; ++y) {
    for (int64_t i = 0; i < kSsimWindow; ++i) {
      for (int64_t x = 0; x < out.width; ++x)
        out.values[y * out.width + x] += kWeights[i] * rows.values[(y + i) * out.width + x];
    }
  }
  return out;
}

double plane_ssim(const Plane& x, const Plane& y) {
  Plane xx(x.height, x.width), yy = xx, xy = xx;
  for (size_t i = 0; i < x.values.size(); ++i) {
    const double p = x.values[i], q = y.values[i];
    xx.values[i] = p * p;
    yy.values[i] = q * q;
    xy.values[i] = p * q;
  }
  const Plane mx = blurred(x), my = blurred(y), mxx = blurred(xx), myy = blurred(yy), mxy = blurred(xy);
  constexpr double kC1 = 0.01 * 0.01, kC2 = 0.03 * 0.03;
  double sum = 0;
  for (size_t i = 0; i < mx.values.size(); ++i) {
    const double p = mx.values[i], q = my.values[i];
    const double vx = mxx.values[i] - p * p, vy = myy.values[i] - q * q, covariance = mxy.values[i] - p * q;
    sum += (2 * p * q + kC1) * (2 * covariance + kC2) / ((p * p + q * q + kC1) * (vx + vy + kC2));
  }
  return sum / static_cast<double>(mx.values.size());
}

Plane colour(const io::Image& image, int64_t channel) {
  Plane out(image.height, image.width);
  for (size_t i = 0; i < out.values.size(); ++i) out.values[i] = image.rgb[3 * i + channel] / 255.0;
  return out;
}

}  // namespace

FrameQuality compare_frames(const io::Image& a, const io::Image& b) {
  require(a.height == b.height && a.width == b.width, Status::shape,
          "frame: got {} x {} and {} x {} pixels, expected one size", a.width, a.height, b.width, b.height);
  require(a.height >= kSsimWindow && a.width >= kSsimWindow, Status::shape,
          "frame: got {} x {} pixels, expected at least SSIM's window of {} x {}", a.width, a.height, kSsimWindow,
          kSsimWindow);
  int64_t squares = 0;
  for (size_t i = 0; i < a.rgb.size(); ++i) {
    const int64_t difference = a.rgb[i] - b.rgb[i];
    squares += difference * difference;
  }
  FrameQuality quality;
  quality.mse = static_cast<double>(squares) / (255.0 * 255.0) / static_cast<double>(a.rgb.size());
  quality.psnr = psnr_of(quality.mse);
  for (int64_t c = 0; c < 3; ++c) quality.ssim += plane_ssim(colour(a, c), colour(b, c)) / 3;
  return quality;
}

LatentScale::LatentScale(const std::vector<float>& latent, int64_t channels) {
  const int64_t each = std::ssize(latent) / channels;
  for (int64_t c = 0; c < channels; ++c) {
    const auto [least, greatest] = std::minmax_element(latent.begin() + c * each, latent.begin() + (c + 1) * each);
    low.push_back(*least);
    factor.push_back(*greatest > *least ? 1 / (static_cast<double>(*greatest) - *least) : 1);
  }
}

FrameQuality compare_latents(const std::vector<float>& a, const std::vector<float>& b, const std::array<int64_t, 3>& size,
                             const LatentScale& scale, int64_t frame) {
  const int64_t frames = size[0], height = size[1], width = size[2], pixels = height * width,
                channels = std::ssize(scale.low);
  require(height >= kSsimWindow && width >= kSsimWindow, Status::shape,
          "latents: got {} x {} elements in a frame, expected at least SSIM's window of {} x {}", width, height, kSsimWindow,
          kSsimWindow);
  FrameQuality quality;
  for (int64_t c = 0; c < channels; ++c) {
    const auto plane = [&](const std::vector<float>& latent) {
      Plane out(height, width);
      const float* from = latent.data() + (c * frames + frame) * pixels;
      for (int64_t i = 0; i < pixels; ++i) out.values[i] = (from[i] - scale.low[c]) * scale.factor[c];
      return out;
    };
    const Plane x = plane(a), y = plane(b);
    for (int64_t i = 0; i < pixels; ++i) {
      quality.mse += (x.values[i] - y.values[i]) * (x.values[i] - y.values[i]) / static_cast<double>(channels * pixels);
    }
    quality.ssim += plane_ssim(x, y) / static_cast<double>(channels);
  }
  require(std::isfinite(quality.mse), Status::non_finite, "latents: frame {} holds NaN or Inf", frame);
  quality.psnr = psnr_of(quality.mse);
  return quality;
}

VideoQuality summarise(std::vector<FrameQuality> frames, int64_t skip) {
  require(skip >= 0 && skip < std::ssize(frames), Status::invalid_argument,
          "skip: got {} of {} frames, expected one to count", skip, frames.size());
  VideoQuality video{.frames = std::move(frames), .skip = skip, .worst = skip};
  const auto count = static_cast<double>(std::ssize(video.frames) - skip);
  for (int64_t i = skip; i < std::ssize(video.frames); ++i) {
    const FrameQuality& frame = video.frames[i];
    video.mean_psnr += frame.psnr / count;
    video.mse += frame.mse / count;
    video.ssim += frame.ssim / count;
    video.equal_frames += frame.mse == 0 ? 1 : 0;
    if (frame.psnr < video.frames[video.worst].psnr) video.worst = i;
  }
  video.pooled_psnr = psnr_of(video.mse);
  return video;
}

}  // namespace scope
