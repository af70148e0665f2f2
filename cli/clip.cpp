// Finds the frames of a clip and compares two clips.
#include "clip.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <set>

namespace scope::cli {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMostJson = int64_t{64} << 20;  // 50 steps of 40 layers of 40 heads, two branches, take 2 MiB

// "frame_3.png, frame_4.png and 7 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", io::printable(names[i]));
  }
  return names.size() > kShown ? fmt::format("{} and {} more", text, names.size() - kShown) : text;
}

// Frames are compared by their names: one that only one of the clips has would shift all that follow.
void check_partners(const Clip& a, const Clip& b) {
  const auto names = [](const Clip& clip) {
    std::set<std::string> out;
    for (const std::string& frame : clip.frames) out.insert(fs::path(frame).filename());
    return out;
  };
  const std::set<std::string> of_a = names(a), of_b = names(b);
  const auto alone = [](const std::set<std::string>& x, const std::set<std::string>& y, const Clip& clip) {
    std::vector<std::string> out;
    std::set_difference(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(out));
    return out.empty() ? "" : fmt::format("; only {} has {}", clip.path, listed(out));
  };
  require(of_a == of_b, Status::shape, "{}: {} frames, and {} has {}{}{}", b.path, of_b.size(), a.path, of_a.size(),
          alone(of_a, of_b, a), alone(of_b, of_a, b));
}

}  // namespace

Clip open_clip(const std::string& path) {
  Clip clip{.path = path, .name = fs::path(path).lexically_normal().filename(), .frames = {}, .run = {}};
  std::error_code error;
  if (clip.name.empty() || clip.name == ".") clip.name = fs::weakly_canonical(path, error).parent_path().filename();
  for (const auto& entry : fs::directory_iterator(path, error)) {
    if (entry.path().extension() == ".png") clip.frames.push_back(entry.path());
  }
  require(!error, Status::io, "cannot read {}: {}", path, error.message());
  require(!clip.frames.empty(), Status::io, "{}: there is no .png file; expected a folder of frames", path);
  // frame_1000 comes after frame_999
  std::sort(clip.frames.begin(), clip.frames.end(),
            [](const std::string& a, const std::string& b) { return a.size() != b.size() ? a.size() < b.size() : a < b; });
  const std::string run = path + "/run.json";
  if (!io::exists(run)) return clip;
  const auto bytes = io::read_file(run, kMostJson);
  const auto shallow = [&](int depth, nlohmann::ordered_json::parse_event_t, nlohmann::ordered_json&) {
    require(depth <= 16, Status::format, "{}: JSON nested deeper than 16 levels", run);
    return true;
  };
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  clip.run = nlohmann::ordered_json::parse(text, shallow, false);
  require(clip.run.is_object(), Status::format, "{}: not a JSON object", run);
  return clip;
}

void Clip::declare(Outputs& outputs) const {
  for (const std::string& frame : frames) outputs.reads("a frame of " + path, frame);
  if (!run.is_null()) outputs.reads("run.json of " + path, path + "/run.json");
}

VideoQuality compare_clips(ThreadPool& pool, const Clip& a, const Clip& b, int64_t skip, const std::function<void()>& done) {
  check_partners(a, b);
  require(skip < std::ssize(a.frames), Status::invalid_argument, "--skip: got {}, expected less than the {} frames", skip,
          a.frames.size());
  const io::Image first = io::read_png(a.frames[0]);
  const auto read = [&](const std::string& path) {
    io::Image image = io::read_png(path);
    require(image.width == first.width && image.height == first.height, Status::shape,
            "{}: {} x {} pixels, expected the {} x {} of {}", path, image.width, image.height, first.width, first.height,
            a.frames[0]);
    return image;
  };
  std::vector<FrameQuality> frames(a.frames.size());
  std::mutex mutex;
  pool.run(std::ssize(frames), [&](int64_t i, int) {
    frames[i] = compare_frames(read(a.frames[i]), read(b.frames[i]));
    const std::lock_guard lock(mutex);
    done();
  });
  return summarise(std::move(frames), skip);
}

nlohmann::ordered_json quality_json(const VideoQuality& quality) {
  nlohmann::ordered_json json{{"psnr", quality.mean_psnr},    {"pooled_psnr", quality.pooled_psnr},
                              {"ssim", quality.ssim},         {"mse", quality.mse},
                              {"skip", quality.skip},         {"equal_frames", quality.equal_frames},
                              {"worst_frame", quality.worst}, {"frames", nlohmann::ordered_json::array()}};
  for (const FrameQuality& frame : quality.frames) {
    json["frames"].push_back({{"mse", frame.mse}, {"psnr", frame.psnr}, {"ssim", frame.ssim}});
  }
  return json;
}

std::string decibel(double psnr) { return std::isinf(psnr) ? "equal" : fmt::format("{:.2f} dB", psnr); }

}  // namespace scope::cli
