// Handlers of cc/ffi/cuda_layer.cc for the CUDA platform.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ffi/cuda_call.h"
#include "host/problem.h"
#include "host/status.h"

namespace streammoe::ffi_glue {

std::vector<CudaHandler> cuda_layer_handlers();
// Enqueues the batch-ready layer: x [T, H], ids and weights [T, K] -> y [T, H]. capacity: rows per expert, -1 for all.
// gate_up, unless null: [T, K, 2I], ungated [T, K, I], what enters the activations; zeros for routes not taken.
Status cuda_forward(cudaStream_t stream, const ExpertProblem& problem, int64_t capacity, const ExpertWeights& weights,
                    const xla::ffi::AnyBuffer& x, const xla::ffi::AnyBuffer& ids,
                    const xla::ffi::AnyBuffer& topk_weights, const xla::ffi::AnyBuffer& y,
                    const xla::ffi::AnyBuffer& workspace, const xla::ffi::AnyBuffer* gate_up = nullptr);
// Bytes of the workspace that `forward` needs on CUDA; with hidden = 0, of the one that `rows` needs.
int64_t cuda_forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                           int64_t num_experts);

}  // namespace streammoe::ffi_glue
