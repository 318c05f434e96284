// Handlers of cc/ffi/cuda_backward.cc for the CUDA platform.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/cuda_call.h"

namespace streammoe::ffi_glue {

std::vector<CudaHandler> cuda_backward_handlers();
// Bytes of the workspace that `backward` needs for so many tokens; `ring_backward` needs them for the tokens of all
// ranks, and 4 more for each of their routes.
int64_t cuda_backward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                            int64_t num_experts, bool gated);

}  // namespace streammoe::ffi_glue
