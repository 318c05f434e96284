// The number of SMs of the current device, asked for once per device: launches happen on every call.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace streammoe::sm90 {

inline cudaError_t device_sms(int* sms) {
  static std::array<std::atomic<int>, 128> known{};  // by device ordinal; 0: not asked yet
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  const bool fits = device < static_cast<int>(known.size());
  if (fits && (*sms = known[static_cast<size_t>(device)].load(std::memory_order_relaxed)) != 0) return cudaSuccess;
  const cudaError_t result = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
  if (fits && result == cudaSuccess) known[static_cast<size_t>(device)].store(*sms, std::memory_order_relaxed);
  return result;
}

}  // namespace streammoe::sm90
