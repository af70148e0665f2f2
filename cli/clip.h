// A generated clip: a folder of PNG frames, and run.json where it was made by scope generate.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "measure/video_quality.h"
#include "outputs.h"

namespace scope::cli {

struct Clip {
  std::string path, name;  // name: the folder's
  std::vector<std::string> frames;
  nlohmann::ordered_json run;            // null where there is no run.json
  void declare(Outputs& outputs) const;  // what it reads
};
// A folder without frames, and a run.json that is not JSON, are refused.
Clip open_clip(const std::string& path);

// Frame by frame, by their names. One without a partner is refused by name, another size with the numbers; `done` is called
// after each frame.
VideoQuality compare_clips(ThreadPool& pool, const Clip& a, const Clip& b, int64_t skip, const std::function<void()>& done);

// Numbers of a comparison; an infinite PSNR is null.
nlohmann::ordered_json quality_json(const VideoQuality& quality);
// Density, PSNR, SSIM, times and speedups of each clip; the first is the reference. qualities[0] is not read.
void print_run_table(const std::vector<Clip>& clips, const std::vector<nlohmann::ordered_json>& qualities);
std::string decibel(double psnr);  // "31.42 dB", or "equal"

}  // namespace scope::cli
