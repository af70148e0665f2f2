// Normal numbers from a random stream, four at a time, so that every thread makes its own.
#pragma once

#include <cmath>

#include "core/random.h"

namespace scope {

struct FourNormals {
  float number[4];
};

// Numbers 4 i to 4 i + 3 of a stream, by Box and Muller in f32. Devices and hosts may differ in the last bits.
SCOPE_HOST_DEVICE inline FourNormals four_normals(const RandomStream& stream, uint64_t i) {
  FourNormals out{};
  for (int pair = 0; pair < 2; ++pair) {
    const uint64_t bits = stream.bits(2 * i + static_cast<uint64_t>(pair));
    const float u = (static_cast<float>(static_cast<uint32_t>(bits)) + 0.5f) * 0x1p-32f;
    const float turns = static_cast<float>(static_cast<uint32_t>(bits >> 32)) * 0x1p-31f;  // halves of a circle
    const float radius = sqrtf(-2.0f * logf(u));
#ifdef __CUDA_ARCH__
    float sine, cosine;
    sincospif(turns, &sine, &cosine);
#else
    const float sine = sinf(3.14159265f * turns), cosine = cosf(3.14159265f * turns);
#endif
    out.number[2 * pair] = radius * cosine;
    out.number[2 * pair + 1] = radius * sine;
  }
  return out;
}

}  // namespace scope
