// Where everything lies in one rank's ring, compiled for host and device alike.
//
// Contract: every rank of a ring has the same RingShape, so every offset here is equal on all ranks and a peer's
// word or slot is `peer base + offset`. Python's byte formulas (jax_streammoe/layout.py) are pinned to this file
// by a test. Regions are aligned to 128 bytes; each polled word has a 128-byte line of its own, so that a
// poller never shares a line with another writer. The price is R * S lines per word table.
// On a GPU (num_experts > 0) the payload does not lie in the slots but by token: every token of a macro-chunk, of every
// rank, has its own row of the token pool (TokenOrder), the same on all ranks, and its owner keeps its routes in
// combine_ids and combine_weights. So nothing is copied twice and nothing inside a macro-chunk is ever overwritten; the
// slots hold descriptors only. The kernels' tables and the activations between the two products lie behind the pool,
// because work on a side stream outlives XLA's scratch.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define STREAMMOE_HD __host__ __device__
#else
#define STREAMMOE_HD
#endif

namespace streammoe {

inline constexpr int64_t kLineBytes = 128;
inline constexpr int64_t kErrorBytes = 512;                    // text of the first failure of this rank, NUL terminated
inline constexpr int64_t kScaleColumns = 128;                  // columns of x that share one scale
inline constexpr uint64_t kRingMagic = 0x31676e69724d5353ull;  // "SSMring1", little endian

STREAMMOE_HD constexpr int64_t align_line(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

struct RingShape {
  int64_t num_ranks = 1;     // R
  int64_t num_slots = 1;     // S
  int64_t chunk_tokens = 1;  // C
  int64_t hidden = 8;        // H
  int64_t top_k = 1;         // K
  int64_t itemsize = 4;      // bytes of one activation element
  int64_t pool_tokens = 1;   // P, token rows that this rank can hold for its experts; R * S * C on a GPU
  int64_t num_experts = 0;   // L on a GPU, 0 on the host, whose experts work in their own memory
  int64_t intermediate = 0;  // I on a GPU

  STREAMMOE_HD constexpr bool on_gpu() const { return num_experts > 0; }
  // Of one chunk of a call: a slot's on the host; on a GPU, where tokens do not lie in slots, all that the ring has.
  STREAMMOE_HD constexpr int64_t most_chunk_tokens() const {
    return on_gpu() ? num_slots * chunk_tokens : chunk_tokens;
  }
};

// Row blocks that `pairs` routes to `experts` experts can fill, each expert's last block being partial.
inline constexpr int64_t kRowBlock = 128;
STREAMMOE_HD constexpr int64_t most_row_blocks(int64_t pairs, int64_t experts) {
  const int64_t used = pairs < experts ? pairs : experts;
  const int64_t blocks = (pairs + used * (kRowBlock - 1)) / kRowBlock;
  return blocks > 1 ? blocks : 1;
}
// The tables of a plan: a pair per row, 16 bytes per block, counts of at most 128 partial plans and of the whole, and
// the gaps between tables.
STREAMMOE_HD constexpr int64_t plan_table_bytes(int64_t blocks, int64_t experts) {
  return align_line(blocks * (kRowBlock * 4 + 16) + 130 * (experts + 1) * 4 + 4096);
}

// First line of the control region. Written by the owning rank only, between calls, but for resident_ctas.
struct RingHeader {
  uint64_t magic;
  uint64_t sequence_base;  // chunks published over the ring's life before the current call
  uint64_t call_number;    // calls completed
  uint64_t macro_number;   // macro-chunks completed, the unit of the done words
  // On a GPU: where its failures are told (DeviceError), how long it waits, and CTAs of the up products that ran beside
  // a producer, over the ring's life. Here, so that a captured graph follows a ring that is made again.
  uint64_t error_record;
  uint64_t timeout_ns;
  uint32_t resident_ctas;
};

struct RingLayout {
  // control
  int64_t header = 0;
  int64_t call = 0;          // CallState of the call in progress, on a GPU
  int64_t peers = 0;         // [R] u64, where every rank's ring lies in this rank's address space, on a GPU
  int64_t route_ready = 0;   // [R][S] lines, written by source r
  int64_t layout_ready = 0;  // [R][S] lines, written by source r
  int64_t consumed = 0;      // [R][S] lines at the owner of the slot, written by reader r
  int64_t done = 0;          // [R] lines, written by rank r
  int64_t abort = 0;         // [R] lines, written by rank r
  int64_t error = 0;         // kErrorBytes
  // payload: S slots, each slot_stride bytes from `slots`
  int64_t slots = 0;
  int64_t slot_stride = 0;
  int64_t slot_x = 0;                  // [C, H]
  int64_t slot_x_scale = 0;            // [C, ceil(H / 128)] f32
  int64_t slot_topk_ids = 0;           // [C, K] i32, -1: no route
  int64_t slot_topk_weights = 0;       // [C, K] f32
  int64_t slot_route_descriptor = 0;   // SlotDescriptor of the routing half
  int64_t slot_layout_descriptor = 0;  // SlotDescriptor of the activation half
  // pool
  int64_t token_pool = 0;       // [P, H] tokens waiting for this rank's experts
  int64_t combine_rows = 0;     // [S * C, K, H] unweighted expert rows of this rank's tokens
  int64_t combine_ids = 0;      // [S * C, K] i32, the owner's own copy: slots are reused inside a macro-chunk
  int64_t combine_weights = 0;  // [S * C, K] f32, likewise
  int64_t combine_flags = 0;    // [S * C, K] u8, 1: the route was dropped by `capacity`
  // work, on a GPU only
  int64_t stats = 0;     // [L + 3] i32: rows per expert, then dropped, invalid and masked routes
  int64_t routes = 0;    // [R * S * C, K] i32, ids of all ranks in pool order; none with one rank: combine_ids is that
  int64_t computed = 0;  // [2][L] i32: routes of each expert that waves have computed, alternating by wave
  int64_t plan = 0;      // tables of a wave's plan
  int64_t activations = 0;  // [rows, I], rows of the largest wave
  // In the place of the activations, during a backward over ranks, which keeps its own elsewhere: gradients of y by
  // token like the token pool, and those of the owner's weights, [S * C, K] f32.
  int64_t gradient_pool = 0;
  int64_t weight_gradients = 0;
  int64_t total = 0;

  STREAMMOE_HD constexpr int64_t word(int64_t table, int64_t rank, int64_t slot, int64_t num_slots) const {
    return table + (rank * num_slots + slot) * kLineBytes;
  }
  STREAMMOE_HD constexpr int64_t slot(int64_t slot_idx) const { return slots + slot_idx * slot_stride; }
};

STREAMMOE_HD constexpr RingLayout make_ring_layout(const RingShape& s) {
  RingLayout l;
  int64_t at = 0;
  l.header = at, at += kLineBytes;
  l.call = at, at += kLineBytes;
  l.peers = at, at += s.on_gpu() ? align_line(s.num_ranks * 8) : 0;
  l.route_ready = at, at += s.num_ranks * s.num_slots * kLineBytes;
  l.layout_ready = at, at += s.num_ranks * s.num_slots * kLineBytes;
  l.consumed = at, at += s.num_ranks * s.num_slots * kLineBytes;
  l.done = at, at += s.num_ranks * kLineBytes;
  l.abort = at, at += s.num_ranks * kLineBytes;
  l.error = at, at += kErrorBytes;

  int64_t in = 0;
  const int64_t slot_tokens = s.on_gpu() ? 0 : s.chunk_tokens;
  l.slot_x = in, in += align_line(slot_tokens * s.hidden * s.itemsize);
  l.slot_x_scale = in, in += align_line(slot_tokens * ((s.hidden + kScaleColumns - 1) / kScaleColumns) * 4);
  l.slot_topk_ids = in, in += align_line(slot_tokens * s.top_k * 4);
  l.slot_topk_weights = in, in += align_line(slot_tokens * s.top_k * 4);
  l.slot_route_descriptor = in, in += kLineBytes;
  l.slot_layout_descriptor = in, in += kLineBytes;
  l.slots = at, l.slot_stride = in, at += s.num_slots * in;

  const int64_t macro_tokens = s.num_slots * s.chunk_tokens;
  l.token_pool = at, at += align_line(s.pool_tokens * s.hidden * s.itemsize);
  l.combine_rows = at, at += align_line(macro_tokens * s.top_k * s.hidden * s.itemsize);
  l.combine_ids = at, at += align_line(macro_tokens * s.top_k * 4);
  l.combine_weights = at, at += align_line(macro_tokens * s.top_k * 4);
  l.combine_flags = at, at += align_line(macro_tokens * s.top_k);
  const int64_t blocks = s.on_gpu() ? most_row_blocks(s.num_ranks * macro_tokens * s.top_k, s.num_experts) : 0;
  l.stats = at, at += s.on_gpu() ? align_line((s.num_experts + 3) * 4) : 0;
  l.routes = at, at += s.on_gpu() && s.num_ranks > 1 ? align_line(s.num_ranks * macro_tokens * s.top_k * 4) : 0;
  l.computed = at, at += align_line(2 * s.num_experts * 4);
  l.plan = at, at += s.on_gpu() ? plan_table_bytes(blocks, s.num_experts) : 0;
  l.activations = l.gradient_pool = at;
  const int64_t forward_bytes = align_line(blocks * kRowBlock * s.intermediate * s.itemsize);
  const int64_t pool_bytes = align_line(s.pool_tokens * s.hidden * s.itemsize);
  l.weight_gradients = at + pool_bytes;
  const int64_t backward_bytes =
      s.on_gpu() && s.num_ranks > 1 ? pool_bytes + align_line(macro_tokens * s.top_k * 4) : 0;
  l.total = at + (forward_bytes > backward_bytes ? forward_bytes : backward_bytes);
  return l;
}

}  // namespace streammoe
