// The owner's half: y = sum over the routes of a token, in the order of its slots.
//
// Contract: acc = +0; for k ascending over the valid routes acc = fma(w_k, float(row_k), acc); y = RN(acc). A token
// without a valid route is exactly +0, and rows of skipped routes are never read. The fma is one rounding on every
// level of x86. Trade-off: on a processor without FMA libm emulates it, slowly and with the same bits.
#pragma once

#include <cstdint>

#include "host/problem.h"

namespace streammoe::cpu {

// rows: [T, K, H]; ids: [T, K], a negative one is skipped; weights: [T, K], null means 1; dropped: [T, K] or null,
// non-zero is skipped; y: [T, H].
void combine(DType dtype, int64_t hidden, int64_t top_k, int64_t num_tokens, const void* rows, const int32_t* ids,
             const float* weights, const uint8_t* dropped, void* y, int threads);

}  // namespace streammoe::cpu
