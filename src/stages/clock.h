// Whose time the moments of a call belong to, and what records it.
#pragma once

#include "stages/exec.h"

namespace scope {

enum class Moment : int { check, group, encode, score, select, attend, other, end };
inline constexpr int kMoments = 8;

// Of the last call that it was given to.
class Clock {
 public:
  Clock() = default;
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  virtual ~Clock() = default;

  virtual void mark(const Exec& exec, Moment moment) = 0;  // from here on, time belongs to `moment`
  // [kMoments] of exec.call, which is done; false: not recorded.
  virtual bool times(const Exec& exec, double* seconds) const = 0;
};

}  // namespace scope
