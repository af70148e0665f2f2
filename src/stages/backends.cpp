// Lists the backends of this build.
#include "stages/backends.h"

#include "cpu/backend.h"
#include "cuda/backend.h"

namespace scope {

std::span<const Backend* const> backends() {
  static const std::vector<const Backend*> kAll = [] {
    std::vector<const Backend*> all = {cpu_backend()};
    if (cuda_backend() != nullptr) all.push_back(cuda_backend());
    return all;
  }();
  return kAll;
}

const Backend& find_backend(std::string_view name) {
  std::string names;
  for (const Backend* backend : backends()) {
    if (name == backend->name) return *backend;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", backend->name);
  }
  fail(Status::unsupported, "backend: this build has no \"{}\"; it has {}", name, names);
}

}  // namespace scope
