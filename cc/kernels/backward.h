// The kernels of the layer's backward on sm_90a, as functions on plain device pointers and a stream.
//
// Contract: as launch.h. With the rows of the plan, gate, up and a recomputed as in the forward (or a from the rounded
// gate and up that it kept), dA' = dy W_down^T in float32 from the unscaled dy, and w the route's weight:
//   d_weights = <dA', a> + <dy, b_down>     64-column groups, ascending; 0 for routes that are not taken
//   dG, dU    = RN(act'(gate, up, w * dA'))  and  wa = RN(w * a)
//   d_x       = RN(sum over k of RN(dG W_gate^T + dU W_up^T))
//   dW_gate   = RN(rows(x)^T dG),  dW_up = RN(rows(x)^T dU),  dW_down = RN(wa^T rows(dy)),  biases: RN(sums of rows)
// The last four are not rounded when they are `wide`. Sums over rows are one float32 chain in the order of the plan.
// Padding rows are zero in both operands of such a sum; an expert without rows gets +0. Every element of every result
// is written. Trade-off: x and dy are copied to sorted rows, because the sums over rows need them so; that is 2 x T K H
// elements.
#pragma once

#include "kernels/launch.h"

namespace streammoe::sm90 {

cudaError_t prepare_backward();

// Device memory of one backward, beside its plan. R: the plan's row capacity. Matrices [R, ...] of the layer's type are
// in sorted order; rows of a row block that has valid rows are zero where they are padding, up to the next 64.
struct BackwardRows {
  void* x = nullptr;                // [R, H]
  void* dy = nullptr;               // [R, H]; then the rows of d_x
  void* d_gate = nullptr;           // [R, I]
  void* d_up = nullptr;             // [R, I]; nullptr when ungated
  void* wa = nullptr;               // [R, I] RN(w * a)
  float* row_weight = nullptr;      // [R] w, 0 in the padding
  float* partial = nullptr;         // [ceil(I / 64)][R] of d_weights
  int32_t* expert_first = nullptr;  // [L] first row; of experts that have rows
};

// Sizes of the layer; what decides about memory.
struct BackwardSizes {
  int64_t num_tokens = 0, top_k = 0, hidden = 0, intermediate = 0, num_experts = 0;
  bool gated = true;
};

struct BackwardArgs {
  const void* x = nullptr;              // [T, H]
  const void* dy = nullptr;             // [T, H]
  const int32_t* topk_ids = nullptr;    // [T, K]
  const float* topk_weights = nullptr;  // [T, K]
  const void* gate_up = nullptr;        // [T, K, 2 I] ([T, K, I]), as the forward kept it; nullptr: computed again
  void* dx = nullptr;                   // [T, H], or:
  void* dx_rows = nullptr;              // [T, K, H] what each route adds to d_x, 0 where it is not taken
  float* d_weights = nullptr;           // [T, K]
  ExpertWeights weights;
  ExpertGradients gradients;  // biases absent where the weights' are
  BackwardSizes sizes;
  Activation activation = Activation::kSwiGLU;
  float limit = std::numeric_limits<float>::infinity();
  int32_t num_sms = 0;
  int32_t capacity = std::numeric_limits<int32_t>::max();  // rows per expert; later routes are dropped
  DType dtype = DType::kBF16;                              // kBF16 or kF16
  bool wide = false;                                       // `gradients` are float32: the sums, not rounded
  // Over ranks: the tokens are those of all, of whose E experts this rank has first_expert and on. What a route adds to
  // d_x, and its d_weights, goes to the token's owner, and nothing to dx or d_weights; these are left to whoever knows
  // that all ranks are done.
  int64_t first_expert = 0;
  int64_t total_experts = 0;         // 0: as many as there are here
  RowOwners dx_owners;               // [T, K, H] at the owner
  RowOwners d_weights_owners;        // [T, K] f32 at the owner
  const uint64_t* failed = nullptr;  // when it is not zero, no row is taken
  bool over_ranks() const { return dx_owners.peers != nullptr; }
};

// The plan, then BackwardRows: plan_bytes + R * (2 H + 3 I) * 2 + R * (1 + ceil(I / 64)) * 4 bytes and some alignment,
// of which 2 I R less when ungated.
size_t backward_bytes(const BackwardSizes& sizes);
cudaError_t launch_backward_sm90(const BackwardArgs& args, void* workspace, cudaStream_t stream);
// The same in two: what goes to other ranks, and may be told to them when it is done; then the gradients that stay
// here.
cudaError_t launch_backward_rows_sm90(const BackwardArgs& args, void* workspace, cudaStream_t stream);
cudaError_t launch_backward_experts_sm90(const BackwardArgs& args, void* workspace, cudaStream_t stream);

// The parts of launch_backward_sm90, for it and for checks of one kernel at a time.
Plan make_backward_plan(void* workspace, const BackwardSizes& sizes);
BackwardRows make_backward_rows(void* workspace, const BackwardSizes& sizes);

// rows.x, rows.dy, rows.row_weight, rows.expert_first.
cudaError_t launch_backward_rows(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                                 cudaStream_t stream);
// rows.d_gate, rows.d_up, rows.wa, rows.partial, from rows.x, rows.dy, rows.row_weight.
cudaError_t launch_gemm_dact_sm90(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                                  cudaStream_t stream);
// out [R, H] = RN(d_gate W_gate^T + d_up W_up^T); over ranks its rows go to their tokens' owners instead.
cudaError_t launch_gemm_dx_sm90(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows, void* out,
                                cudaStream_t stream);
// Gradients of W_gate and W_up, or of W_down.
cudaError_t launch_gemm_dw_sm90(bool down, const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                                cudaStream_t stream);
// Gradients of the biases that are there; b_down's reads rows.dy.
cudaError_t launch_bias_sums(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows, cudaStream_t stream);
// args.dx_rows, from the rows of d_x in the place of rows.dy.
cudaError_t launch_spread_rows(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                               cudaStream_t stream);
cudaError_t launch_d_weights(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows, cudaStream_t stream);

}  // namespace streammoe::sm90
