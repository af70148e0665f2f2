// Marks functions that kernels call too.
#pragma once

#ifdef __CUDACC__
#define SCOPE_HOST_DEVICE __host__ __device__
#else
#define SCOPE_HOST_DEVICE
#endif
