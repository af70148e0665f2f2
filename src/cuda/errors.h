// What a CUDA error means for a call, and how it is said.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"

namespace scope::cuda {

inline Status status_of(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return Status::out_of_memory;
    case cudaErrorIllegalAddress:  // these are sticky: every later use of the device in this process fails too
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorContextIsDestroyed:
      return Status::device_lost;
    default:
      return Status::device;
  }
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Error(status_of(error), std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace scope::cuda
