// How far one video is from another: PSNR and SSIM of its frames, or of its latents.
#pragma once

#include <array>
#include <vector>

#include "io/png.h"

namespace scope {

inline constexpr int64_t kSsimWindow = 11;

struct FrameQuality {
  double mse = 0;   // over pixels and channels, RGB in [0, 1]
  double psnr = 0;  // 10 log10(1 / mse) dB; infinite for equal frames
  double ssim =
      0;  // 11 x 11 Gaussian window, sigma 1.5, C1 = 0.01^2, C2 = 0.03^2; windows inside the frame; mean of R, G, B
};
// Frames of one size, at least as large as the window.
FrameQuality compare_frames(const io::Image& a, const io::Image& b);

// Takes each channel of a latent [channels, T, H, W], over the whole video, to [0, 1]; one that is constant is only moved.
struct LatentScale {
  std::vector<double> low, factor;  // by channel

  LatentScale(const std::vector<float>& latent, int64_t channels);
};
// The same measures with the channels of frame `frame` of two latents, by the scale of the reference, in the place of R, G
// and B: for comparing videos of one model among themselves. size: T, H and W; Error(Status::non_finite) on NaN.
FrameQuality compare_latents(const std::vector<float>& a, const std::vector<float>& b, const std::array<int64_t, 3>& size,
                             const LatentScale& scale, int64_t frame);

struct VideoQuality {
  std::vector<FrameQuality> frames;
  int64_t skip = 0;          // at the start, not counted below
  double mean_psnr = 0;      // of the frames'; infinite where one is
  double pooled_psnr = 0;    // of the mean mse
  double mse = 0, ssim = 0;  // means over frames
  int64_t equal_frames = 0;
  int64_t worst = 0;  // the frame of the lowest PSNR
};
// The first `skip` frames do not count: a model may have been given them. One at least must.
VideoQuality summarise(std::vector<FrameQuality> frames, int64_t skip = 0);

}  // namespace scope
