// What a layer does with expert ids as they come from a router.
//
// Contract: -1 is a masked route, 0..E-1 names an expert, anything else is invalid: an error under `checks`, else
// counted and skipped like a masked one. One definition serves the batch-ready layer and the stream.
#pragma once

#include <cstdint>
#include <span>

#include "host/status.h"

namespace streammoe::cpu {

struct IdCounts {
  int32_t invalid = 0;  // ids outside [-1, E)
  int32_t masked = 0;   // ids equal to -1
};

// InvalidArgument that names the first invalid id. ids: [T, K] of the tokens from first_token on.
Status check_ids(std::span<const int32_t> ids, int64_t top_k, int64_t num_experts, int64_t first_token = 0);
// out[pair] = ids[pair], or -1 where that names no expert.
IdCounts sanitise_ids(std::span<const int32_t> ids, int64_t num_experts, int32_t* out);

}  // namespace streammoe::cpu
