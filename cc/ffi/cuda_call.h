// What the handlers of one CUDA device share: how they are listed, and checks of what the kernels take.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/status.h"
#include "ffi/decode.h"

namespace streammoe::ffi_glue {

// A handler by target name without version suffix.
struct CudaHandler {
  const char* name;
  const char* stage;  // "initialize" or "execute"
  void* address;
};

// The handler that loads every kernel when an executable is initialised, never while a peer might wait.
void* load_kernels_handler();

// A capacity attribute as the kernels take it; -1 is none.
inline int32_t kernel_capacity(int64_t capacity) {
  constexpr int64_t kNone = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(capacity < 0 ? kNone : std::min(capacity, kNone));
}

inline Status expect_kernel_type(DType dtype) {
  if (dtype != DType::kF32) return {};
  return error(Code::kInvalidArgument, "the CUDA kernels take bfloat16 and float16, got float32");
}

inline Status expect_workspace(const ffi::AnyBuffer& workspace, int64_t needed) {
  if (static_cast<int64_t>(workspace.size_bytes()) >= needed) return {};
  return error(Code::kInvalidArgument, "the workspace must have ", needed, " bytes, got ", workspace.size_bytes());
}

// An operand that XLA did not alias with its result follows its stream.
inline Status carry_on(cudaStream_t stream, const char* name, const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  const auto num_elements = static_cast<int64_t>(in.element_count());
  STREAMMOE_RETURN_IF_ERROR(expect_buffer(name, out, in.element_type(), num_elements));
  if (out.untyped_data() == in.untyped_data()) return {};
  return cuda::cuda_status(
      cudaMemcpyAsync(out.untyped_data(), in.untyped_data(), in.size_bytes(), cudaMemcpyDeviceToDevice, stream),
      "carrying an operand over");
}

}  // namespace streammoe::ffi_glue
