// Says what goes on, where a terminal shows it.
#include "terminal.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace scope::cli {

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string bold(const std::string& text) { return isatty(STDOUT_FILENO) == 1 ? "\x1b[1m" + text + "\x1b[0m" : text; }

std::string over_progress() { return isatty(STDERR_FILENO) == 1 ? "\r\x1b[K" : ""; }

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)), total_(total), shown_(isatty(STDERR_FILENO) == 1), start_(now_seconds()) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::step(const std::string& note) {
  ++done_;
  if (!shown_) return;
  constexpr int64_t kWidth = 30;
  const int64_t filled = kWidth * done_ / std::max<int64_t>(total_, 1);
  const double left = (now_seconds() - start_) / static_cast<double>(done_) * static_cast<double>(total_ - done_);
  tell("\r\x1b[K{} [{}{}] {}/{} {:.0f} s left  {}", what_, std::string(static_cast<size_t>(filled), '#'),
       std::string(static_cast<size_t>(kWidth - filled), '.'), done_, total_, left, note);
  std::fflush(stderr);
}

}  // namespace scope::cli
