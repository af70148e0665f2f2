// When each stage of a call began on the GPU, as events that a context makes once and reuses.
#pragma once

#include <memory>

namespace scope::cuda {

class Clock;
// Null in a build without CUDA.
std::shared_ptr<Clock> make_clock(int device);

}  // namespace scope::cuda
