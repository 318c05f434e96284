// What a source says about one published half of a slot, so that a reader can refuse what it did not expect.
//
// Contract: written by the owner before the release store of the ready word that publishes it, read by peers
// after their acquire. The tag is a hash of the call's static plan: ranks that run different programs fail with
// both values instead of mixing tokens.
#pragma once

#include <cstdint>

#include "protocol/ring.h"

namespace streammoe {

struct SlotDescriptor {
  uint64_t sequence;   // q of the chunk, over the ring's life
  uint64_t call;       // call number of the ring
  uint64_t tag;        // hash of the call's plan, equal on all ranks
  int64_t chunk;       // index of the chunk in its call
  int64_t token_base;  // first token of the chunk, counted from the start of its macro-chunk
  int64_t num_tokens;  // rows present in the slot
};
static_assert(sizeof(SlotDescriptor) <= kLineBytes);

// Where the tokens of a macro-chunk lie in the token pool of a GPU: chunk by chunk as they are published, within a
// chunk rank by rank, within a rank in order. Equal on all ranks, and never moved by a later chunk. All chunks but the
// last have chunk_tokens tokens per rank.
struct TokenOrder {
  int32_t num_ranks = 1;
  int32_t chunk_tokens = 1;
  int32_t num_tokens = 0;  // of the macro-chunk, per rank

  struct Owner {
    int32_t rank;
    int32_t token;
  };
  STREAMMOE_HD constexpr int32_t chunk_size(int32_t base) const {
    return num_tokens - base < chunk_tokens ? num_tokens - base : chunk_tokens;
  }
  STREAMMOE_HD constexpr int32_t row(int32_t rank, int32_t token) const {
    const int32_t base = token / chunk_tokens * chunk_tokens;
    return base * num_ranks + rank * chunk_size(base) + (token - base);
  }
  STREAMMOE_HD constexpr Owner owner(int32_t row) const {
    const int32_t base = row / (chunk_tokens * num_ranks) * chunk_tokens;
    const int32_t within = row - base * num_ranks, size = chunk_size(base);
    return {within / size, base + within % size};
  }
};

// What the device knows of the call in progress: written by `open` in stream order, read by every later kernel of the
// call. All macro-chunks but the last have chunks_per_macro chunks, all chunks but the last of a macro-chunk
// chunk_tokens tokens.
struct CallState {
  uint64_t sequence_base;  // as of the header at `open`
  uint64_t call;
  uint64_t macro_base;
  uint64_t tag;
  int64_t num_tokens;
  int64_t chunk_tokens;
  int64_t macro_tokens;
  int64_t chunks_per_macro;
  uint64_t failed;       // non-zero once a kernel of the call has failed: what is combined is NaN
  uint32_t arrivals[2];  // CTAs that have arrived at a publication in progress, by half

  // First token of a chunk, counted from the start of its macro-chunk, and how many it has.
  STREAMMOE_HD constexpr int64_t chunk_base(int64_t chunk) const { return chunk % chunks_per_macro * chunk_tokens; }
  STREAMMOE_HD constexpr int64_t chunk_size(int64_t chunk) const {
    const int64_t macro_start = chunk / chunks_per_macro * macro_tokens;
    const int64_t in_macro = num_tokens - macro_start < macro_tokens ? num_tokens - macro_start : macro_tokens;
    const int64_t left = in_macro - chunk_base(chunk);
    return left <= 0 ? 0 : left < chunk_tokens ? left : chunk_tokens;
  }
};
static_assert(sizeof(CallState) <= kLineBytes);

// Mixes one more value into a tag (the finaliser constants are those of splitmix64).
STREAMMOE_HD constexpr uint64_t mix_tag(uint64_t tag, uint64_t value) {
  uint64_t z = tag + 0x9e3779b97f4a7c15ull + value;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Sequence of a chunk, its slot, and the sequence that must have been consumed before the slot is written.
STREAMMOE_HD constexpr uint64_t chunk_sequence(uint64_t base, int64_t chunk) {
  return base + static_cast<uint64_t>(chunk) + 1;
}
STREAMMOE_HD constexpr int64_t sequence_slot(uint64_t q, int64_t num_slots) {
  return static_cast<int64_t>((q - 1) % static_cast<uint64_t>(num_slots));
}
STREAMMOE_HD constexpr uint64_t reuse_sequence(uint64_t q, int64_t num_slots) {
  return q > static_cast<uint64_t>(num_slots) ? q - static_cast<uint64_t>(num_slots) : 0;
}

}  // namespace streammoe
