// What a command tells while it works: messages, a line of progress, bold text.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace scope::cli {

// On stderr. What cannot be told there (it may be closed, or a full disk) is no reason to lose a result.
template <class... Args>
void tell(fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(fmt::format(format, std::forward<Args>(args)...).c_str(), stderr);
}

// A line on stderr that is redrawn in place, only when stderr is a terminal.
class Progress {
 public:
  Progress(std::string what, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& note = "");

 private:
  std::string what_;
  int64_t total_, done_ = 0;
  bool shown_;
  double start_;
};

// Before a message: takes back the line of progress, where stderr is a terminal.
std::string over_progress();

std::string bold(const std::string& text);  // only when stdout is a terminal
double now_seconds();

}  // namespace scope::cli
