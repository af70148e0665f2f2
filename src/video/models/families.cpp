// The families of models that the runner knows: each is a folder here, and a row below.
#include "video/model.h"

namespace scope::video {

extern const Family kHunyuan, kWan;

std::span<const Family* const> families() {
  static constexpr const Family* kFamilies[] = {&kWan, &kHunyuan};
  return kFamilies;
}

}  // namespace scope::video
