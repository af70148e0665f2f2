// Finds the clips of an ablation.
#include "ablation_clips.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "io/safetensors.h"
#include "parse.h"

namespace scope::cli::ablation {

namespace {

constexpr size_t kChoosingVideos = 2;

}  // namespace

Clips find_clips(const AblateOptions& options, const std::string& condition, const std::string& transformer, bool prompts) {
  Clips clips;
  const auto files = [](const char* flag, const std::string& list) {
    std::vector<std::string> names = split(list, ',');
    for (const std::string& name : names) {
      require(!name.empty(), Status::invalid_argument, "{}: got \"{}\", expected names of files separated by commas", flag,
              list);
    }
    return names;
  };
  const bool given = !options.images.empty();
  const std::vector<std::string> images = given ? files("--image", options.images) : std::vector<std::string>{""};
  int64_t samples = 1;
  if (prompts || options.images.empty()) {
    const std::string path = condition.empty() ? transformer + "/examples.safetensors" : condition;
    const io::SafeTensors file = io::read_safetensors(path);
    const char* name = prompts ? "prompt_embeds" : "truth";
    const auto found = file.tensors.find(name);
    require(found != file.tensors.end(), Status::format, "{}: there is no tensor \"{}\"", path, name);
    const auto& shape = found->second.shape;
    samples = prompts && shape.size() < 3 ? 1 : shape[0];
    require(samples > 0, Status::shape, "{}: {} holds no samples", path, name);
  }
  for (const int64_t sample : parse_set("--clips", options.clips, samples)) {
    for (const std::string& image : images) clips.shown.push_back({image, condition, sample});
  }
  if (options.match != Match::run) return clips;
  if (given) {
    require(!options.choose.empty(), Status::invalid_argument,
            "--choose: with --image, name the PNG files of other first frames, on which thresholds are found");
    for (const std::string& image : files("--choose", options.choose)) {
      clips.choosing.push_back({image, condition, clips.shown[0].example});
    }
  } else {
    for (const int64_t sample : parse_set("--choose", options.choose, samples)) {
      clips.choosing.push_back({"", condition, sample});
    }
  }
  clips.choosing.resize(std::min(clips.choosing.size(), kChoosingVideos));
  while (clips.choosing.size() < kChoosingVideos) clips.choosing.push_back(clips.choosing[0]);  // with other noise
  return clips;
}

std::vector<std::string> Clips::names() const {
  std::vector<std::string> names;
  for (const VideoInputs& clip : shown) {
    names.push_back(clip.image.empty()
                        ? std::to_string(clip.example)
                        : fmt::format("{} of {}", std::filesystem::path(clip.image).filename().string(), clip.example));
  }
  return names;
}

}  // namespace scope::cli::ablation
