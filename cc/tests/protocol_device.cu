// The protocol headers as device code: that they compile for sm_90a is the test, so that host and device can share
// them.
//
// Contract: built with every CUDA build, linked into nothing. The kernel touches what a publishing and a polling kernel
// need: offsets, sequences, the acquire and release of a word, the abort words.
#include "protocol/descriptor.h"
#include "protocol/ring.h"
#include "protocol/sequence.h"

namespace streammoe {

__global__ void publish_and_poll(uint8_t* peer, RingShape shape, uint64_t base, int64_t chunk, int64_t* seen) {
  const RingLayout at = make_ring_layout(shape);
  const uint64_t q = chunk_sequence(base, chunk);
  const int64_t slot = sequence_slot(q, shape.num_slots);
  auto* ready = reinterpret_cast<uint64_t*>(peer + at.word(at.route_ready, 0, slot, shape.num_slots));
  store_release(ready, q);  // publishes this thread's earlier stores to whoever acquires the word
  seen[0] = static_cast<int64_t>(load_acquire(ready) - reuse_sequence(q, shape.num_slots));
  seen[1] = AbortWords{peer + at.abort, shape.num_ranks}.first();
}

}  // namespace streammoe
