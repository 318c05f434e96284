// Gradients of the expert layer: per route (d_x rows), per routing weight, per expert tensor.
//
// Contract: gate, up and a are recomputed as in the forward, or a from the gate and up that it kept, rounded; dy
// arrives unscaled, so that d_weights is right where a weight is 0. With dA' = dy * W_down^T in f32:
//   d_weights = <dA', a> + <dy, b_down>           64-column groups, ascending
//   dG, dU    = RN(act'(w * dA'))                 d_x row = RN(dG * W_gate^T + dU * W_up^T)
//   dW_down   = sum RN(w * a)^T dy                dW_gate = sum x^T dG,  dW_up = sum x^T dU,  db: sums of rows
// Weight gradients add blocks of block_m rows in pair order in f32 and round once. Every output element is written: +0
// for skipped or dropped routes and for experts without rows; rows that nobody owns are never read.
// Trade-off: parallel over experts only, which needs no order between threads and leaves cores idle when L is small.
#pragma once

#include <cstdint>

#include "host/problem.h"

namespace streammoe::cpu {

struct BackwardArgs {
  const void* x = nullptr;         // [N, H]
  const void* dy = nullptr;        // [N, H]
  const int32_t* ids = nullptr;    // [N, K] local ids; outside 0..L-1: skipped
  const float* weights = nullptr;  // [N, K]
  int64_t num_tokens = 0;          // N
  int64_t capacity = -1;           // rows per expert, -1 for no bound
  const void* gate_up = nullptr;   // [N, K, 2I], ungated [N, K, I], as the forward kept it; nullptr: computed again
};

// dx_rows: [N, K, H] of the problem's dtype, combined by the owner with weight 1. d_weights: [N, K]. A null matrix of
// `gradients` is not computed.
void backward(const ExpertProblem& problem, const ExpertWeights& weights, const BackwardArgs& args, void* dx_rows,
              float* d_weights, const ExpertGradients& gradients);

}  // namespace streammoe::cpu
