// Calls of a generation as files for the commands that take q, k and v.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "video/model.h"

namespace scope::cli {

// q, k, v of a call as [heads, tokens, dim], with the metadata that the other commands read.
void write_qkv(const std::string& path, const video::ModelConfig& config, const std::array<int64_t, 3>& grid, DType dtype,
               std::initializer_list<std::pair<const char*, const std::vector<std::byte>*>> parts);

}  // namespace scope::cli
