// The list of engines: one for each backend that has one.
#include "video/engine.h"

namespace scope::video {

std::unique_ptr<Engine> make_engine(const Context& context, DType compute, LinearMode mode) {
  const std::string_view name = context.backend().name;
  if (name == "cpu") {
    require(mode == LinearMode::plain, Status::unsupported,
            "fp8 linear layers: the cpu backend has none, and a GPU of sm_89 or later does");
    return make_cpu_engine(context, compute);
  }
  if (name == "cuda") return make_cuda_engine(context, mode);
  fail(Status::unsupported, "backend: {} has no video engine", name);
}

}  // namespace scope::video
