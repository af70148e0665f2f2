// Numbers that an option takes, with their bounds in words.
#pragma once

#include <cstdint>
#include <limits>

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace scope::cli {

inline constexpr int64_t kMostSteps = 1'000'000'000, kMostSamplerSteps = 100'000, kMostLayers = 100'000,
                         kMostSamples = int64_t{1} << 31, kMostHeads = 65'536, kMostFrames = 1'000'000, kMostRepeats = 1000,
                         kMostSeed = std::numeric_limits<int64_t>::max();

// "got -1, expected a whole number from 0 to 1024"
CLI::Validator whole(int64_t low, int64_t high);
// A number above `low` and at most `high`.
CLI::Validator above(double low, double high);

// --threads, the same for every command.
void add_threads(CLI::App& app, int& threads);

}  // namespace scope::cli
