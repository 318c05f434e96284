// CUDA's errors as the library's own. A failed launch is reported by the call that made it.
#pragma once

#include <cuda_runtime_api.h>

#include "host/status.h"

namespace streammoe::cuda {

inline Status cuda_status(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return {};
  return error(Code::kFailedPrecondition, what, ": ", cudaGetErrorName(result), ", ", cudaGetErrorString(result));
}

#define STREAMMOE_CUDA(call, what) STREAMMOE_RETURN_IF_ERROR(::streammoe::cuda::cuda_status(call, what))

}  // namespace streammoe::cuda
