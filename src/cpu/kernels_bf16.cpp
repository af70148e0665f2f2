// bf16 dot products for attend (AVX-512 BF16), the one file of intrinsics: Highway 1.0 has no such target.
#include "cpu/kernels.h"

namespace scope::cpu {

const AttendKernels* bf16_dot_kernels() { return nullptr; }

}  // namespace scope::cpu
