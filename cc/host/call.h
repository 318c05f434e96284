// What one call on a ring is: its static plan and options, the statistics it returns. The same for CPU and CUDA.
//
// Contract: plain data from jax_streammoe/waves.py, equal on all ranks of a ring; check() refuses a plan that does not
// fit the ring, because whoever calls a handler by name has passed Python's checks by.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host/problem.h"
#include "host/status.h"
#include "protocol/descriptor.h"

namespace streammoe {

// The static plan of a call (jax_streammoe/waves.py) and its options. Equal on all ranks.
struct CallSpec {
  ExpertProblem problem;
  int64_t num_tokens = 0;    // T
  int64_t chunk_tokens = 0;  // tokens of a full chunk
  int64_t macro_tokens = 0;  // tokens of a full macro-chunk
  int64_t num_chunks = 0;
  std::vector<int64_t> macro_ends, wave_ends;  // exclusive chunk indices
  int64_t min_carry_rows = 0;                  // a non-final wave computes an expert from this many pending rows on
  int64_t capacity = -1;                       // rows per expert over all ranks' tokens, -1: dropless
  bool packed = true;                          // waves carry partial blocks; else each wave computes all it has
  bool overlap = false;
  bool checks = false;
  bool backward = false;     // the gradients of such a call, in one chunk
  int32_t producer_sms = 0;  // of a GPU, left to the producer by waves that run beside it

  uint64_t tag() const;  // what all ranks must agree on
  // InvalidArgument unless the plan is consistent and fits a ring of that shape.
  Status check(const RingShape& shape) const;
  int64_t macro_of(int64_t chunk) const;
  int64_t wave_of(int64_t chunk) const;
  int64_t wave_begin(int64_t wave) const { return wave > 0 ? wave_ends[static_cast<size_t>(wave - 1)] : 0; }
  int64_t macro_begin(int64_t macro) const { return macro > 0 ? macro_ends[static_cast<size_t>(macro - 1)] : 0; }
  // Where the tokens of a macro-chunk lie in the pool of a GPU.
  TokenOrder token_order(int64_t num_ranks, int64_t macro) const {
    const int64_t left = num_tokens - macro * macro_tokens;
    return {static_cast<int32_t>(num_ranks), static_cast<int32_t>(chunk_tokens),
            static_cast<int32_t>(left < macro_tokens ? left : macro_tokens)};
  }
  // The last wave of a macro-chunk.
  int64_t seal_wave(int64_t macro) const { return wave_of(macro_ends[static_cast<size_t>(macro)] - 1); }
  // First token of the chunk and one past its last, clipped to its macro-chunk and to T.
  std::pair<int64_t, int64_t> chunk_bounds(int64_t chunk) const;
};

struct CallStats {
  std::vector<int32_t> expert_rows;  // [L] rows computed by this rank's experts
  int32_t dropped = 0;               // routes of this rank's tokens beyond capacity
  int32_t invalid = 0;               // ids outside [-1, E)
  int32_t masked = 0;                // ids equal to -1, padding tokens among them
};

}  // namespace streammoe
