// A film of a run's frames, where ffmpeg is installed.
#pragma once

#include <cstdint>
#include <string>

namespace scope::cli {

// False where ffmpeg is there and made no clip.mp4. Where it is not installed, nothing is missing.
bool write_mp4(const std::string& folder, int64_t width);

}  // namespace scope::cli
