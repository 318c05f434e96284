// C entry points over cc/kernels/backward.h for the ctypes harness; not part of the product.
//
// Contract: as capi.cu. A backward is run whole or part by part on one workspace, so that a check can look at what lies
// between two kernels.
#include "kernels/backward.h"

namespace sm90 = streammoe::sm90;
using streammoe::Activation;
using streammoe::DType;

extern "C" {

int64_t sm_backward_bytes(int64_t t, int64_t k, int64_t h, int64_t i, int64_t l, int64_t gated) {
  return static_cast<int64_t>(sm90::backward_bytes({t, k, h, i, l, gated != 0}));
}

// Byte offsets in the workspace of row_pair, pair_row, expert_rows, totals; x, dy, d_gate, d_up (-1 when ungated), wa,
// row_weight, partial, expert_first; then the row capacity.
void sm_backward_layout(int64_t t, int64_t k, int64_t h, int64_t i, int64_t l, int64_t gated, int64_t* out) {
  char* base = reinterpret_cast<char*>(4096);
  const sm90::BackwardSizes sizes{t, k, h, i, l, gated != 0};
  const sm90::Plan plan = sm90::make_backward_plan(base, sizes);
  const sm90::BackwardRows rows = sm90::make_backward_rows(base, sizes);
  const void* tables[] = {plan.row_pair, plan.pair_row,   plan.expert_rows, plan.totals,
                          rows.x,        rows.dy,         rows.d_gate,      rows.d_up,
                          rows.wa,       rows.row_weight, rows.partial,     rows.expert_first};
  for (const void* table : tables) *out++ = table == nullptr ? -1 : static_cast<const char*>(table) - base;
  *out = plan.row_capacity;
}

// part: 0 all of it; else one of: 1 plan, 2 rows, 3 dact, 4 biases, 5 dW_down, 6 dW_gate and dW_up, 7 rows of d_x (over
// those of dy), 8 combine, 9 d_weights, 10 the rows of d_x by route, to dx [T, K, H]. Weights and their gradients lie
// alike: gate and up with one pair of strides.
int sm_backward(int64_t part, void* workspace, const void* x, const void* dy, const int32_t* ids, const float* weights,
                void* dx, float* d_weights, const void* gate, const void* up, const void* down, void* d_gate,
                void* d_up, void* d_down, const void* b_gate, const void* b_up, const void* b_down, void* db_gate,
                void* db_up, void* db_down, int64_t gate_expert_stride, int64_t gate_row_stride, int64_t bias_stride,
                int64_t t, int64_t k, int64_t h, int64_t i, int64_t l, int64_t gated, int64_t activation, float limit,
                int64_t capacity, int64_t num_sms, int64_t dtype, cudaStream_t stream) {
  sm90::BackwardArgs args;
  args.x = x, args.dy = dy, args.topk_ids = ids, args.topk_weights = weights, args.dx = dx, args.d_weights = d_weights;
  args.weights.gate = {gate, gate_expert_stride, gate_row_stride};
  args.weights.up = {up, gate_expert_stride, gate_row_stride};
  args.weights.down = {down, i * h, h};
  args.weights.b_gate = {b_gate, bias_stride, 0};
  args.weights.b_up = {b_up, bias_stride, 0};
  args.weights.b_down = {b_down, h, 0};
  args.gradients.gate = {d_gate, gate_expert_stride, gate_row_stride};
  args.gradients.up = {d_up, gate_expert_stride, gate_row_stride};
  args.gradients.down = {d_down, i * h, h};
  args.gradients.b_gate = {db_gate, bias_stride, 0};
  args.gradients.b_up = {db_up, bias_stride, 0};
  args.gradients.b_down = {db_down, h, 0};
  args.sizes = {t, k, h, i, l, gated != 0};
  args.activation = static_cast<Activation>(activation);
  args.limit = limit;
  if (capacity >= 0) args.capacity = static_cast<int32_t>(capacity);
  args.num_sms = static_cast<int32_t>(num_sms);
  args.dtype = static_cast<DType>(dtype);
  const sm90::Plan plan = sm90::make_backward_plan(workspace, args.sizes);
  const sm90::BackwardRows rows = sm90::make_backward_rows(workspace, args.sizes);
  switch (part) {
    case 0:
      return sm90::launch_backward_sm90(args, workspace, stream);
    case 1: {
      sm90::PlanArgs plan_args;
      plan_args.topk_ids = ids, plan_args.num_tokens = t, plan_args.top_k = k;
      plan_args.num_experts = plan_args.total_experts = l;
      plan_args.window.capacity = args.capacity;
      return sm90::launch_plan(plan_args, plan, stream);
    }
    case 2:
      return sm90::launch_backward_rows(args, plan, rows, stream);
    case 3:
      return sm90::launch_gemm_dact_sm90(args, plan, rows, stream);
    case 4:
      return sm90::launch_bias_sums(args, plan, rows, stream);
    case 5:
      return sm90::launch_gemm_dw_sm90(true, args, plan, rows, stream);
    case 6:
      return sm90::launch_gemm_dw_sm90(false, args, plan, rows, stream);
    case 7:
      return sm90::launch_gemm_dx_sm90(args, plan, rows, rows.dy, stream);
    case 8:
      return sm90::launch_combine({rows.dy, nullptr, dx, t, k, h, args.dtype}, plan, stream);
    case 9:
      return sm90::launch_d_weights(args, plan, rows, stream);
    case 10:
      args.dx_rows = dx;
      return sm90::launch_spread_rows(args, plan, rows, stream);
  }
  return cudaErrorInvalidValue;
}

}  // extern "C"
