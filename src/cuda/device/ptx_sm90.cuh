// Hopper instructions that C++ has no words for: mbarrier, asynchronous copies, wgmma and register reallocation.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "cuda/device/ptx_sm80.cuh"

namespace scope::cuda {

// ---- mbarrier: a phase ends when the expected number of arrivals has come; phases alternate in parity, from 0 ----

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier, int count = 1) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Arrives once this thread's copies so far have landed.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity has ended.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Arrives, and returns once all have: for a warp, what race checkers see, where __syncwarp compiles to nothing.
__device__ inline void barrier_meet(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 phase;\n"
      ".reg .pred done;\n"
      "mbarrier.arrive.release.cta.shared::cta.b64 phase, [%0];\n"
      "again:\n"
      "mbarrier.try_wait.acquire.cta.shared::cta.b64 done, [%0], phase;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier)
      : "memory");
}
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Barrier `id` (0 is __syncthreads) among `threads` threads.
__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies ----

// 16 or 4 bytes from global to shared memory, of which the first `bytes` (all or none) are read and the rest are zero.
__device__ inline void copy_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns once at most kPending of this thread's committed groups of copies are under way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// A store without a branch.
__device__ inline void store_if(bool condition, uint32_t to, int32_t value) {
  const int predicate = condition ? 1 : 0;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.shared.b32 [%1], %2; }" ::"r"(predicate), "r"(to), "r"(value)
               : "memory");
}
// What copy_16 wrote becomes visible to wgmma, which reads shared memory by another path.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers per thread, for all warps of a warpgroup ----

template <int kCount>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- bytes of rows turned into bytes of columns, and back into shared memory ----

// Matrix i of four has its 8 rows of 16 bytes where lanes 8 i .. 8 i + 7 say; transposed as 16-bit elements: lane l holds
// columns l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline void load_transposed(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}
// The other way without a transposition: lane l holds bytes 4 (l % 4) .. + 3 of row l / 4.
__device__ inline void store_rows(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma: D[64, N] += A[64, 16] B[16, N] by the four warps of a warpgroup, in float ----
//
// Thread t holds rows 16 (t / 32) + t % 32 / 4 (+ 8) of D: d[4 j + 2 h + i] is row + 8 h, column 8 j + 2 (t % 4) + i.
// Tiles in shared memory are panels of 64 channels: rows of 128 bytes, whose 16-byte chunk c sits at c xor (row mod 8).

__device__ inline uint64_t panel_descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{leading_bytes >> 4} << 16 | (address & 0x3ffff) >> 4;
}

// Tiles of bytes without a swizzle: 8 rows of 16 bytes lie together, the next 8 rows behind them, the next 16 columns
// column_bytes further.
__device__ inline uint64_t core_descriptor(uint32_t address, uint32_t column_bytes) {
  constexpr uint64_t kEightRows = uint64_t{128 >> 4} << 32;
  return kEightRows | uint64_t{column_bytes >> 4} << 16 | (address & 0x3ffff) >> 4;
}

__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of an accumulator over a wait.
template <int kCount>
__device__ inline void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ inline void pin(int32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Operands of the statements below: the accumulators' numbers, and the accumulators.
#define SCOPE_R0_31                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SCOPE_R32_39 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SCOPE_R40_47 "%40, %41, %42, %43, %44, %45, %46, %47"
#define SCOPE_R48_63 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SCOPE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SCOPE_D8(i) SCOPE_D4(i), SCOPE_D4(i + 4)
#define SCOPE_D32(i) SCOPE_D8(i), SCOPE_D8(i + 8), SCOPE_D8(i + 16), SCOPE_D8(i + 24)

// A and B in shared memory, both with consecutive channels (S = Q K^T); without kAdd, D is overwritten.
#define SCOPE_WGMMA_SS(shape, type, numbers, a_at, b_at, add_at, ...)                                               \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " add_at ", 0; wgmma.mma_async.sync.aligned." shape ".f32." type \
               "." type " {" numbers "}, " a_at ", " b_at ", add, 1, 1, 0, 0; }"                                    \
               : __VA_ARGS__                                                                                        \
               : "l"(a), "l"(b), "n"(kAdd ? 1 : 0))

template <DType kType, bool kAdd>
__device__ inline void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b) {
#define SCOPE_N64(type) SCOPE_WGMMA_SS("m64n64k16", type, SCOPE_R0_31, "%32", "%33", "%34", SCOPE_D32(0))
  if constexpr (kType == DType::bf16)
    SCOPE_N64("bf16");
  else
    SCOPE_N64("f16");
#undef SCOPE_N64
}
template <DType kType, bool kAdd>
__device__ inline void wgmma_ss(float (&d)[40], uint64_t a, uint64_t b) {
#define SCOPE_N80(type) \
  SCOPE_WGMMA_SS("m64n80k16", type, SCOPE_R0_31 ", " SCOPE_R32_39, "%40", "%41", "%42", SCOPE_D32(0), SCOPE_D8(32))
  if constexpr (kType == DType::bf16)
    SCOPE_N80("bf16");
  else
    SCOPE_N80("f16");
#undef SCOPE_N80
}
template <DType kType, bool kAdd>
__device__ inline void wgmma_ss(float (&d)[48], uint64_t a, uint64_t b) {
#define SCOPE_N96(type)                                                                                                 \
  SCOPE_WGMMA_SS("m64n96k16", type, SCOPE_R0_31 ", " SCOPE_R32_39 ", " SCOPE_R40_47, "%48", "%49", "%50", SCOPE_D32(0), \
                 SCOPE_D8(32), SCOPE_D8(40))
  if constexpr (kType == DType::bf16)
    SCOPE_N96("bf16");
  else
    SCOPE_N96("f16");
#undef SCOPE_N96
}

// A in registers, laid out as D is with pairs of columns packed; B in shared memory with consecutive columns (O += P V).
#define SCOPE_WGMMA_RS(shape, type, numbers, a_at, b_at, ...)                                                       \
  asm volatile("{ .reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned." shape ".f32." type "." type \
               " {" numbers "}, {" a_at "}, " b_at ", add, 1, 1, 1; }"                                              \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <DType kType>
__device__ inline void wgmma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
#define SCOPE_N64(type) SCOPE_WGMMA_RS("m64n64k16", type, SCOPE_R0_31, "%32, %33, %34, %35", "%36", SCOPE_D32(0))
  if constexpr (kType == DType::bf16)
    SCOPE_N64("bf16");
  else
    SCOPE_N64("f16");
#undef SCOPE_N64
}
template <DType kType>
__device__ inline void wgmma_rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#define SCOPE_N128(type)                                                                                \
  SCOPE_WGMMA_RS("m64n128k16", type, SCOPE_R0_31 ", " SCOPE_R32_39 ", " SCOPE_R40_47 ", " SCOPE_R48_63, \
                 "%64, %65, %66, %67", "%68", SCOPE_D32(0), SCOPE_D32(32))
  if constexpr (kType == DType::bf16)
    SCOPE_N128("bf16");
  else
    SCOPE_N128("f16");
#undef SCOPE_N128
}

// ---- the same with 8-bit operands, 32 to a step, which must both have consecutive bytes along it ----

#define SCOPE_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define SCOPE_I8(i) SCOPE_I4(i), SCOPE_I4(i + 4)
#define SCOPE_I32(i) SCOPE_I8(i), SCOPE_I8(i + 8), SCOPE_I8(i + 16), SCOPE_I8(i + 24)
#define SCOPE_WGMMA_S8(shape, numbers, a_at, b_at, ...)                                                              \
  asm volatile("{ .reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned." shape ".s32.s8.s8 {" numbers \
               "}, " a_at ", " b_at ", add; }"                                                                       \
               : __VA_ARGS__                                                                                         \
               : "l"(a), "l"(b))

__device__ inline void wgmma_s8(int32_t (&d)[40], uint64_t a, uint64_t b) {
  SCOPE_WGMMA_S8("m64n80k32", SCOPE_R0_31 ", " SCOPE_R32_39, "%40", "%41", SCOPE_I32(0), SCOPE_I8(32));
}
__device__ inline void wgmma_s8(int32_t (&d)[48], uint64_t a, uint64_t b) {
  SCOPE_WGMMA_S8("m64n96k32", SCOPE_R0_31 ", " SCOPE_R32_39 ", " SCOPE_R40_47, "%48", "%49", SCOPE_I32(0), SCOPE_I8(32),
                 SCOPE_I8(40));
}

#define SCOPE_WGMMA_E4M3(shape, numbers, a_at, b_at, ...)                                     \
  asm volatile("{ .reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned." shape \
               ".f32.e4m3.e4m3"                                                               \
               " {" numbers "}, {" a_at "}, " b_at ", add, 1, 1; }"                           \
               : __VA_ARGS__                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ inline void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  SCOPE_WGMMA_E4M3("m64n64k32", SCOPE_R0_31, "%32, %33, %34, %35", "%36", SCOPE_D32(0));
}
__device__ inline void wgmma_e4m3(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  SCOPE_WGMMA_E4M3("m64n128k32", SCOPE_R0_31 ", " SCOPE_R32_39 ", " SCOPE_R40_47 ", " SCOPE_R48_63, "%64, %65, %66, %67",
                   "%68", SCOPE_D32(0), SCOPE_D32(32));
}

#undef SCOPE_R0_31
#undef SCOPE_R32_39
#undef SCOPE_R40_47
#undef SCOPE_R48_63
#undef SCOPE_D4
#undef SCOPE_D8
#undef SCOPE_D32
#undef SCOPE_WGMMA_SS
#undef SCOPE_I4
#undef SCOPE_I8
#undef SCOPE_I32
#undef SCOPE_WGMMA_S8
#undef SCOPE_WGMMA_E4M3
#undef SCOPE_WGMMA_RS

}  // namespace scope::cuda
