// Hopper instructions that C++ has no words for: mbarrier, asynchronous copies, wgmma and register reallocation.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace scope::cuda {

__device__ inline uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

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
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Named barriers: `threads` in all, of which some only arrive.
__device__ inline void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies ----

// 16 bytes from global to shared memory, of which the first `bytes` (16 or 0) are read and the rest are zero.
__device__ inline void copy_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
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
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.shared.b32 [%1], %2; }" ::"r"(static_cast<int>(condition)), "r"(to),
               "r"(value)
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

// ---- wgmma: D[64, N] += A[64, 16] B[16, N] by the four warps of a warpgroup, in float ----
//
// Thread t holds rows 16 (t / 32) + t % 32 / 4 (+ 8) of D: d[4 j + 2 h + i] is row + 8 h, column 8 j + 2 (t % 4) + i.
// Tiles in shared memory are panels of 64 channels: rows of 128 bytes, whose 16-byte chunk c sits at c xor (row mod 8).

__device__ inline uint64_t panel_descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{leading_bytes >> 4} << 16 | (address & 0x3ffff) >> 4;
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

// wgmma_ss: A and B in shared memory, both with consecutive channels (S = Q K^T).
// wgmma_rs: A in registers, B in shared memory with consecutive columns (O += P V).
template <DType kType, bool kAdd, int kRegisters>
__device__ inline void wgmma_ss(float (&d)[kRegisters], uint64_t a, uint64_t b);
template <DType kType, bool kAdd, bool kTurn, int kRegisters>
__device__ inline void wgmma_rs(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b);

// GENERATED
// Operand lists of the asm statements below: their text by eights, and the accumulators themselves.
#define SCOPE_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SCOPE_R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define SCOPE_R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define SCOPE_R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define SCOPE_R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SCOPE_R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define SCOPE_R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define SCOPE_R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define SCOPE_R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define SCOPE_R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define SCOPE_R80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define SCOPE_R0_31 SCOPE_R0 ", " SCOPE_R8 ", " SCOPE_R16 ", " SCOPE_R24
#define SCOPE_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SCOPE_D32(i) SCOPE_D8(i), SCOPE_D8(i + 8), SCOPE_D8(i + 16), SCOPE_D8(i + 24)
#define SCOPE_WGMMA_SS(shape, type, text, operands, a_at, b_at, add_at)                                                \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " add_at ", 0; wgmma.mma_async.sync.aligned." shape ".f32." type "." type \
               " {" text "}, " a_at ", " b_at ", add, 1, 1, 0, 0; }"                                                \
               : operands                                                                                              \
               : "l"(a), "l"(b), "n"(kAdd ? 1 : 0))
#define SCOPE_WGMMA_RS(shape, type, text, operands, a_at, b_at, add_at, turn_at)                                                        \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " add_at ", 0; wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" text \
               "}, {" a_at "}, " b_at ", add, 1, 1, " turn_at "; }"                                                                                       \
               : operands                                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0), "n"(kTurn ? 1 : 0))

#define TEXT64 SCOPE_R0_31
#define OPS64 SCOPE_D32(0)
#define TEXT80 SCOPE_R0_31 ", " SCOPE_R32
#define OPS80 SCOPE_D32(0), SCOPE_D8(32)
#define TEXT96 SCOPE_R0_31 ", " SCOPE_R32 ", " SCOPE_R40
#define OPS96 SCOPE_D32(0), SCOPE_D8(32), SCOPE_D8(40)
#define TEXT112 SCOPE_R0_31 ", " SCOPE_R32 ", " SCOPE_R40 ", " SCOPE_R48
#define OPS112 SCOPE_D32(0), SCOPE_D8(32), SCOPE_D8(40), SCOPE_D8(48)
#define TEXT128 SCOPE_R0_31 ", " SCOPE_R32 ", " SCOPE_R40 ", " SCOPE_R48 ", " SCOPE_R56
#define OPS128 SCOPE_D32(0), SCOPE_D32(32)
#define TEXT144 SCOPE_R0_31 ", " SCOPE_R32 ", " SCOPE_R40 ", " SCOPE_R48 ", " SCOPE_R56 ", " SCOPE_R64
#define OPS144 SCOPE_D32(0), SCOPE_D32(32), SCOPE_D8(64)
#define TEXT160 SCOPE_R0_31 ", " SCOPE_R32 ", " SCOPE_R40 ", " SCOPE_R48 ", " SCOPE_R56 ", " SCOPE_R64 ", " SCOPE_R72
#define OPS160 SCOPE_D32(0), SCOPE_D32(32), SCOPE_D8(64), SCOPE_D8(72)
#define TEXT176 SCOPE_R0_31 ", " SCOPE_R32 ", " SCOPE_R40 ", " SCOPE_R48 ", " SCOPE_R56 ", " SCOPE_R64 ", " SCOPE_R72 ", " SCOPE_R80
#define OPS176 SCOPE_D32(0), SCOPE_D32(32), SCOPE_D8(64), SCOPE_D8(72), SCOPE_D8(80)

template <DType kType, bool kAdd, int kRegisters>
__device__ inline void wgmma_ss(float (&d)[kRegisters], uint64_t a, uint64_t b) {
  if constexpr (kRegisters == 32 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n64k16", "bf16", TEXT64, OPS64, "%32", "%33", "%34");
  if constexpr (kRegisters == 32 && kType == DType::f16) SCOPE_WGMMA_SS("m64n64k16", "f16", TEXT64, OPS64, "%32", "%33", "%34");
  if constexpr (kRegisters == 40 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n80k16", "bf16", TEXT80, OPS80, "%40", "%41", "%42");
  if constexpr (kRegisters == 40 && kType == DType::f16) SCOPE_WGMMA_SS("m64n80k16", "f16", TEXT80, OPS80, "%40", "%41", "%42");
  if constexpr (kRegisters == 48 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n96k16", "bf16", TEXT96, OPS96, "%48", "%49", "%50");
  if constexpr (kRegisters == 48 && kType == DType::f16) SCOPE_WGMMA_SS("m64n96k16", "f16", TEXT96, OPS96, "%48", "%49", "%50");
  if constexpr (kRegisters == 56 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n112k16", "bf16", TEXT112, OPS112, "%56", "%57", "%58");
  if constexpr (kRegisters == 56 && kType == DType::f16) SCOPE_WGMMA_SS("m64n112k16", "f16", TEXT112, OPS112, "%56", "%57", "%58");
  if constexpr (kRegisters == 64 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n128k16", "bf16", TEXT128, OPS128, "%64", "%65", "%66");
  if constexpr (kRegisters == 64 && kType == DType::f16) SCOPE_WGMMA_SS("m64n128k16", "f16", TEXT128, OPS128, "%64", "%65", "%66");
  if constexpr (kRegisters == 72 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n144k16", "bf16", TEXT144, OPS144, "%72", "%73", "%74");
  if constexpr (kRegisters == 72 && kType == DType::f16) SCOPE_WGMMA_SS("m64n144k16", "f16", TEXT144, OPS144, "%72", "%73", "%74");
  if constexpr (kRegisters == 80 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n160k16", "bf16", TEXT160, OPS160, "%80", "%81", "%82");
  if constexpr (kRegisters == 80 && kType == DType::f16) SCOPE_WGMMA_SS("m64n160k16", "f16", TEXT160, OPS160, "%80", "%81", "%82");
  if constexpr (kRegisters == 88 && kType == DType::bf16) SCOPE_WGMMA_SS("m64n176k16", "bf16", TEXT176, OPS176, "%88", "%89", "%90");
  if constexpr (kRegisters == 88 && kType == DType::f16) SCOPE_WGMMA_SS("m64n176k16", "f16", TEXT176, OPS176, "%88", "%89", "%90");
}
template <DType kType, bool kAdd, bool kTurn, int kRegisters>
__device__ inline void wgmma_rs(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kRegisters == 32 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n64k16", "bf16", TEXT64, OPS64, "%32, %33, %34, %35", "%36", "%37", "%38");
  if constexpr (kRegisters == 32 && kType == DType::f16) SCOPE_WGMMA_RS("m64n64k16", "f16", TEXT64, OPS64, "%32, %33, %34, %35", "%36", "%37", "%38");
  if constexpr (kRegisters == 40 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n80k16", "bf16", TEXT80, OPS80, "%40, %41, %42, %43", "%44", "%45", "%46");
  if constexpr (kRegisters == 40 && kType == DType::f16) SCOPE_WGMMA_RS("m64n80k16", "f16", TEXT80, OPS80, "%40, %41, %42, %43", "%44", "%45", "%46");
  if constexpr (kRegisters == 48 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n96k16", "bf16", TEXT96, OPS96, "%48, %49, %50, %51", "%52", "%53", "%54");
  if constexpr (kRegisters == 48 && kType == DType::f16) SCOPE_WGMMA_RS("m64n96k16", "f16", TEXT96, OPS96, "%48, %49, %50, %51", "%52", "%53", "%54");
  if constexpr (kRegisters == 56 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n112k16", "bf16", TEXT112, OPS112, "%56, %57, %58, %59", "%60", "%61", "%62");
  if constexpr (kRegisters == 56 && kType == DType::f16) SCOPE_WGMMA_RS("m64n112k16", "f16", TEXT112, OPS112, "%56, %57, %58, %59", "%60", "%61", "%62");
  if constexpr (kRegisters == 64 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n128k16", "bf16", TEXT128, OPS128, "%64, %65, %66, %67", "%68", "%69", "%70");
  if constexpr (kRegisters == 64 && kType == DType::f16) SCOPE_WGMMA_RS("m64n128k16", "f16", TEXT128, OPS128, "%64, %65, %66, %67", "%68", "%69", "%70");
  if constexpr (kRegisters == 72 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n144k16", "bf16", TEXT144, OPS144, "%72, %73, %74, %75", "%76", "%77", "%78");
  if constexpr (kRegisters == 72 && kType == DType::f16) SCOPE_WGMMA_RS("m64n144k16", "f16", TEXT144, OPS144, "%72, %73, %74, %75", "%76", "%77", "%78");
  if constexpr (kRegisters == 80 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n160k16", "bf16", TEXT160, OPS160, "%80, %81, %82, %83", "%84", "%85", "%86");
  if constexpr (kRegisters == 80 && kType == DType::f16) SCOPE_WGMMA_RS("m64n160k16", "f16", TEXT160, OPS160, "%80, %81, %82, %83", "%84", "%85", "%86");
  if constexpr (kRegisters == 88 && kType == DType::bf16) SCOPE_WGMMA_RS("m64n176k16", "bf16", TEXT176, OPS176, "%88, %89, %90, %91", "%92", "%93", "%94");
  if constexpr (kRegisters == 88 && kType == DType::f16) SCOPE_WGMMA_RS("m64n176k16", "f16", TEXT176, OPS176, "%88, %89, %90, %91", "%92", "%93", "%94");
}
// END
}  // namespace scope::cuda
