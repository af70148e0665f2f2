// Runs ffmpeg.
#include "mp4.h"

#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

namespace scope::cli {

namespace fs = std::filesystem;

bool write_mp4(const std::string& folder, int64_t width) {
  const int64_t zoom = std::max<int64_t>(1, 512 / width);
  const std::string frames = folder + "/frame_%03d.png", clip = folder + "/clip.mp4";
  const std::string scale = fmt::format("scale=iw*{}:ih*{}:flags=neighbor", zoom, zoom);
  const char* arguments[] = {"ffmpeg",       "-nostdin", "-loglevel",   "error",    "-framerate", "8",          "-i",
                             frames.c_str(), "-vf",      scale.c_str(), "-pix_fmt", "yuv420p",    clip.c_str(), nullptr};
  // Interrupts are blocked here, for the thread that takes them, and must end ffmpeg; so must a broken pipe.
  sigset_t none, ignored_here;
  sigemptyset(&none);
  sigemptyset(&ignored_here);
  for (const int number : {SIGPIPE, SIGXFSZ}) sigaddset(&ignored_here, number);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &ignored_here);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, "ffmpeg", nullptr, &attributes, const_cast<char* const*>(arguments), environ);
  posix_spawnattr_destroy(&attributes);
  if (failed == ENOENT || failed == ENOTDIR || failed == EACCES) return true;
  int status = failed;
  while (failed == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  std::error_code ignored;
  if (status == 0 && fs::exists(clip, ignored)) return true;
  fs::remove(clip, ignored);
  return false;
}

}  // namespace scope::cli
