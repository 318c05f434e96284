// The kernels of a stream that move no matrix: open, publish, await, close, as functions on a ring and a CUDA stream.
//
// Contract: everything about the call is read from, or written to, the ring's control region in device memory; nothing
// is allocated, synchronised or copied to the host. Kernels run in stream order; await_chunks and launch_seal wait for
// words, with the deadline of the ring: for publications of a lower ticket, and for the same wave of the other ranks,
// which store theirs before they wait (docs/protocol.md). A failure is recorded in `error` and in the call's state; the
// kernels behind it still run, no row is computed or sent any more, and what is combined from then on is NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/call.h"
#include "protocol/device_error.h"
#include "protocol/ring.h"

namespace streammoe::sm90 {

// A rank's ring as its host sees it.
struct DeviceRing {
  uint8_t* mem = nullptr;
  RingShape shape;
  int64_t rank = 0;
  DeviceError* error = nullptr;  // pinned host memory, as the device addresses it
  double timeout_s = 100;
};

// Zeroes the control region and writes the magic. Once, by make_ring.
cudaError_t launch_register(const DeviceRing& ring, cudaStream_t stream);
// Tells the device where the rings of all ranks [R] lie. Once, when all are registered; copies from host memory.
cudaError_t launch_connect(const DeviceRing& ring, uint8_t* const* peers, cudaStream_t stream);
// Starts a call: its state from the header and the plan.
cudaError_t launch_open(const DeviceRing& ring, const CallSpec& spec, cudaStream_t stream);
// Copies ids and weights [c, K] to their place and publishes them. chunk_operand: the program's index on the device,
// which must be `chunk`; nullptr when the host knows. Ids outside -1 .. total_experts-1 become -1 and are counted.
cudaError_t launch_publish_route(const DeviceRing& ring, int64_t chunk, const int32_t* chunk_operand,
                                 int64_t num_tokens, const int32_t* topk_ids, const float* topk_weights,
                                 int64_t total_experts, cudaStream_t stream);
// Copies x [c, H] to its place and publishes it.
cudaError_t launch_publish_layout(const DeviceRing& ring, int64_t chunk, const int32_t* chunk_operand,
                                  int64_t num_tokens, const void* x, cudaStream_t stream);
// Ends when both halves of chunks first .. last - 1 are published by all ranks, or have failed to be in time.
cudaError_t launch_await_chunks(const DeviceRing& ring, int64_t first, int64_t last, cudaStream_t stream);
// Brings in what the chunks first .. last - 1 of the other ranks hold for the local experts first_expert and on: the
// ids of all their tokens, and each token that has a route here, once. Behind await_chunks.
cudaError_t launch_fetch_chunks(const DeviceRing& ring, const CallSpec& spec, int64_t first, int64_t last,
                                cudaStream_t stream);
// The same of all chunks of a backward: also the gradients of the tokens' y, and to `weights` [R * T, K] those of their
// routes.
cudaError_t launch_fetch_backward(const DeviceRing& ring, const CallSpec& spec, float* weights, cudaStream_t stream);
// out [num_pairs] = the gradients of this rank's weights, which the ranks of their experts have left here. Behind the
// seal.
cudaError_t launch_take_weight_gradients(const DeviceRing& ring, int64_t num_pairs, float* out, cudaStream_t stream);
// Fills tensors of 16-bit elements with NaN if the call has failed. Absent ones have no elements.
struct HalfTensor {
  void* data = nullptr;
  int64_t num_elements = 0;
};
struct HalfTensors {
  HalfTensor of[6];
};
cudaError_t launch_spoil_if_failed(const DeviceRing& ring, const HalfTensors& tensors, cudaStream_t stream);
// Tells all ranks that this one has read and written what it ever will of the macro-chunk, and waits for all of them:
// at once, or with work of this rank between the two.
cudaError_t launch_seal(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream);
cudaError_t launch_tell_done(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream);
cudaError_t launch_await_done(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream);
// Tells all ranks that this one has failed.
cudaError_t launch_abort(const DeviceRing& ring, cudaStream_t stream);
// Ends when the up products of the ring have had `ctas` CTAs on their SMs, over its life, or after a millisecond: a
// kernel of XLA that were launched first would take the SMs one CTA at a time and keep the products out.
cudaError_t launch_await_resident(const DeviceRing& ring, uint32_t ctas, cudaStream_t stream);
// Ends a call: advances the header, acknowledges the chunks, writes expert_rows [L] and counts [3] (dropped, invalid,
// masked).
cudaError_t launch_close(const DeviceRing& ring, const CallSpec& spec, int32_t* expert_rows, int32_t* counts,
                         cudaStream_t stream);
// Advances the header past a call that used no slot.
cudaError_t launch_advance(const DeviceRing& ring, const CallSpec& spec, cudaStream_t stream);

}  // namespace streammoe::sm90
