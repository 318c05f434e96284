// Publishing a chunk from a CUDA kernel: where its payload goes, and how the library learns that it is there.
//
// Contract: for kernels of a program between open_stream and close_stream, on the stream XLA gave to their handler,
// with the ring's `mem` as an operand that they return in place. `Slot` says where rows and routes of a chunk belong;
// all of the chunk's tokens must be written. Then publish(), once per half, by one thread that has seen all of the
// payload written: after a barrier in a kernel of one CTA, or, with several, by the thread for which last_to_arrive()
// is true. Ids outside -1 .. E-1 take no expert. After the kernel the program calls sm.publish_external, which starts
// the waves that the chunk completes. The ring must be on a GPU, the shape the one of sm.ring_attributes(ring), rank
// the own one. Trade-off: everything about the call is read from the ring's control region, a few L2 reads per CTA, so
// that the kernel needs no argument that a captured graph would freeze.
#pragma once

#include "protocol/descriptor.h"
#include "protocol/ring.h"
#include "protocol/sequence.h"

namespace streammoe {

// A rank's ring on its own device.
struct RingView {
  uint8_t* mem = nullptr;
  RingShape shape;
  RingLayout at;
  int64_t rank = 0;

  __device__ __forceinline__ CallState& call() const { return *reinterpret_cast<CallState*>(mem + at.call); }
};

STREAMMOE_HD inline RingView make_ring_view(void* mem, const RingShape& shape, int64_t rank) {
  return {static_cast<uint8_t*>(mem), shape, make_ring_layout(shape), rank};
}

// Where the payload of a chunk belongs.
struct Slot {
  int64_t num_tokens;   // rows of this chunk; 0 for a chunk that only the plan needs
  int64_t first_token;  // of the call
  void* x;              // [num_tokens, H] of the ring's dtype
  int32_t* topk_ids;    // [num_tokens, K]
  float* topk_weights;  // [num_tokens, K]
};

__device__ __forceinline__ Slot slot_of(const RingView& ring, int64_t chunk) {
  const CallState& call = ring.call();
  const int64_t token = call.chunk_base(chunk);
  const int64_t pair = token * ring.shape.top_k;
  Slot slot;
  slot.num_tokens = call.chunk_size(chunk);
  const int64_t row = token * ring.shape.num_ranks + ring.rank * slot.num_tokens;  // TokenOrder
  slot.first_token = chunk / call.chunks_per_macro * call.macro_tokens + token;
  slot.x = ring.mem + ring.at.token_pool + row * ring.shape.hidden * ring.shape.itemsize;
  slot.topk_ids = reinterpret_cast<int32_t*>(ring.mem + ring.at.combine_ids) + pair;
  slot.topk_weights = reinterpret_cast<float*>(ring.mem + ring.at.combine_weights) + pair;
  return slot;
}

enum class Half : int32_t { kRoute = 0, kLayout = 1 };

// True for thread 0 of the CTA that arrives last, once all `num_ctas` CTAs have; every thread of each of them calls it,
// after its last store. Whoever gets true has seen all their writes: barrier, then acquire-release at GPU scope. One
// grid per half at a time, and the counter is left at zero for the next.
__device__ __forceinline__ bool last_to_arrive(const RingView& ring, Half half, uint32_t num_ctas) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  uint32_t* arrivals = ring.call().arrivals + static_cast<int32_t>(half);
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  if (before != num_ctas - 1) return false;
  *arrivals = 0;
  return true;
}

// Writes the descriptor of the half and stores its ready word at every reader. The fence publishes all that the calling
// thread has written or seen written. One thread. A call that has failed tells nobody: its peers know.
__device__ __forceinline__ void publish(const RingView& ring, Half half, int64_t chunk) {
  const CallState& call = ring.call();
  if (call.failed != 0) return;
  const uint64_t q = chunk_sequence(call.sequence_base, chunk);
  const int64_t slot = sequence_slot(q, ring.shape.num_slots);
  const bool route = half == Half::kRoute;
  auto* descriptor = reinterpret_cast<SlotDescriptor*>(
      ring.mem + ring.at.slot(slot) + (route ? ring.at.slot_route_descriptor : ring.at.slot_layout_descriptor));
  *descriptor = {q, call.call, call.tag, chunk, call.chunk_base(chunk), call.chunk_size(chunk)};
  const int64_t word =
      ring.at.word(route ? ring.at.route_ready : ring.at.layout_ready, ring.rank, slot, ring.shape.num_slots);
  const auto* peers = reinterpret_cast<uint8_t* const*>(ring.mem + ring.at.peers);
  fence_release();
  for (int64_t peer = 0; peer < ring.shape.num_ranks; ++peer) {
    store_relaxed(reinterpret_cast<uint64_t*>(peers[peer] + word), q);
  }
}

}  // namespace streammoe
