// attend on Hopper: one warp expands selections into lists of keys, three gather their rows, and three warpgroups multiply.
#include "cuda/attend_sm90_feed.cuh"
#include "cuda/attend_sm90_multiply.cuh"

namespace scope::cuda {

namespace {

using namespace attend90;

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attend_kernel(const __grid_constant__ AttendLaunch at) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTiles; ++i) {
      // Every thread arrives for what it wrote or read: it costs nothing here, and race checkers can follow it.
      barrier_init(shared_address(&shared.tile_full[i]), 1);
      barrier_init(shared_address(&shared.tile_empty[i]), kLoaders + 128 * C::kConsumers);
    }
    for (int i = 0; i < C::kLists; ++i) {
      barrier_init(shared_address(&shared.list_full[i]), 32);
      barrier_init(shared_address(&shared.list_empty[i]), kLoaders);
    }
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), kLoaders);
      barrier_init(shared_address(&shared.v_full[i]), kLoaders);
      barrier_init(shared_address(&shared.k_empty[i]), 4 * C::kConsumers);
      barrier_init(shared_address(&shared.v_empty[i]), 4 * C::kConsumers);
    }
    for (int i = 0; i < 4 * C::kConsumers; ++i) barrier_init(shared_address(&shared.have_read[i]), 32);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    shrink_registers<C::kFeederRegisters>();
    threadIdx.x < 32 ? expand<C>(at, shared) : load<C>(at, shared);
  } else {
    grow_registers<C::kConsumerRegisters>();
    consume<C>(at, shared);
  }
}

template <class C>
void launch_kernel(const Exec& exec, const AttendLaunch& at) {
  static_assert(sizeof(Shared<C>) <= 227 * 1024);
  const int blocks = std::min(exec.device->multiprocessors, at.most_tiles);
  if (blocks > 0) launch(exec, "attend_sm90", attend_kernel<C>, blocks, C::kThreads, sizeof(Shared<C>), at);
}

template <DType kType>
void launch_type(const Exec& exec, const AttendLaunch& at) {
  // Blocks of as many keys as the registers hold: spilled accumulators would also serialise the products.
  const bool narrow = at.dim <= 64;
  switch (at.products) {
    case Products::bf16:
      return narrow ? launch_kernel<Config<kType, 64, 96, 44>>(exec, at)
                    : launch_kernel<Config<kType, 128, 80, 27>>(exec, at);
    case Products::qk8:
      return narrow ? launch_kernel<Config<kType, 64, 96, 44, Products::qk8>>(exec, at)
                    : launch_kernel<Config<kType, 128, 80, 53, Products::qk8>>(exec, at);
    case Products::qkv8:
      return narrow ? launch_kernel<Config<kType, 64, 96, 44, Products::qkv8>>(exec, at)
                    : launch_kernel<Config<kType, 128, 96, 14, Products::qkv8>>(exec, at);
  }
}

}  // namespace

void attend_sm90(const Exec& exec, const AttendLaunch& at) {
  if (at.dtype == DType::bf16) {
    launch_type<DType::bf16>(exec, at);
  } else {
    launch_type<DType::f16>(exec, at);
  }
}

}  // namespace scope::cuda
