// Handlers of cc/ffi/cuda_ring.cc: the ring operations on a GPU. Names and operands are those of cc/ffi/ring.cc.
#pragma once

#include <memory>
#include <vector>

#include "ffi/cuda_layer.h"
#include "host/registry.h"

namespace streammoe::ffi_glue {

std::vector<CudaHandler> cuda_ring_handlers();
// The stream of one rank of a ring on GPUs.
std::shared_ptr<RankStream> make_cuda_stream(Ring* ring, int64_t group, int64_t rank);

}  // namespace streammoe::ffi_glue
