// GPUs: what there is, and what a launch needs to know of the one it runs on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scope::cuda {

struct Device {
  std::string name;
  int index = 0;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int64_t shared_bytes = 0;  // most that one block can have
  int64_t memory_bytes = 0;
};

// Of shared_bytes: consumer GPUs (sm_86, sm_89, sm_120) have this much, all others more.
inline constexpr int64_t kLeastSharedBytes = 99 << 10;

// Codes that select sorts for one group where it keeps whole codes.
inline constexpr int64_t kMostRankedCodes = 4096;

// Empty without a driver or a GPU; throws std::bad_alloc alone.
std::vector<Device> devices();

}  // namespace scope::cuda
