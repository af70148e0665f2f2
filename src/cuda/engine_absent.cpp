// The answer of a build without CUDA to who asks for its video engine.
#include "video/engine.h"

namespace scope::video {

std::unique_ptr<Engine> make_cuda_engine(const Context&, LinearMode) {
  fail(Status::unsupported, "backend: this build has no CUDA");
}

}  // namespace scope::video
