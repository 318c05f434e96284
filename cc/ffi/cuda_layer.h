// Handlers of cc/ffi/cuda_layer.cc for the CUDA platform, by target name without version suffix and stage.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace streammoe::ffi_glue {

struct CudaHandler {
  const char* name;
  const char* stage;  // "initialize" or "execute"
  void* address;
};

std::vector<CudaHandler> cuda_layer_handlers();
// Bytes of the workspace operand that `forward` needs on CUDA.
int64_t cuda_forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                           int64_t num_experts);

}  // namespace streammoe::ffi_glue
