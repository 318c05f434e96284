// Kernel launch with programmatic dependence: the kernel may be scheduled while its predecessor drains.
//
// Contract: a kernel launched so calls dependent_launch_wait() in every thread before it touches global
// memory, and triggers its successor only after that; then "the kernel before me is complete" holds along the
// whole stream, and a predecessor that knows nothing of this (any other library's kernel) simply runs to its
// end first. Loads of what the predecessor writes must not be marked read-only (const restrict), or the
// compiler may lift them above the wait.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace streammoe::sm90 {

// Launches in plain stream order; the status is this launch's own.
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                          Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// Launches with programmatic dependence: the kernel may be scheduled while its predecessor drains.
template <class... Params, class... Args>
cudaError_t launch_dependent(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                             cudaStream_t stream, Args... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// Loads kernels now: by default the driver loads one at its first launch, which may not happen beside a kernel that
// waits.
template <class... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaError_t result = cudaSuccess;
  cudaFuncAttributes attributes;
  ((result = result == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : result), ...);
  return result;
}

}  // namespace streammoe::sm90
