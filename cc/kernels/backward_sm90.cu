// The backward of the batch-ready layer on one device, on one stream.
//
// Contract: the workspace is backward_bytes() long, needs no initial value and is free again when the last kernel is
// done. Ten to fourteen launches, none of which waits for the host. Rows of d_x take the place of those of dy once no
// kernel reads these any more. Trade-off: gate and up are computed again unless the forward kept them, a third more
// products; what a layer keeps between the passes is otherwise x, ids and weights.
#include <algorithm>
#include <type_traits>

#include "kernels/backward.h"

namespace streammoe::sm90 {

cudaError_t prepare_gemm_dact_sm90();
cudaError_t prepare_gemm_dx_sm90();
cudaError_t prepare_gemm_dw_sm90();
cudaError_t prepare_backward_rows();

cudaError_t prepare_backward() {
  for (const auto prepare :
       {prepare_gemm_dact_sm90, prepare_gemm_dx_sm90, prepare_gemm_dw_sm90, prepare_backward_rows}) {
    if (cudaError_t e = prepare(); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

namespace {

constexpr int64_t kAlign = 1024;
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int64_t plan_size(const BackwardSizes& s) {
  return aligned(static_cast<int64_t>(plan_bytes(s.num_tokens, s.top_k, s.num_experts)));
}

// The one place that lays out the workspace behind the plan; base == nullptr only counts bytes.
int64_t layout_rows(char* base, const BackwardSizes& s, BackwardRows* rows) {
  const int64_t capacity = most_row_blocks(s.num_tokens * s.top_k, s.num_experts) * kBlockM;
  int64_t offset = plan_size(s);
  auto take = [&](auto*& pointer, int64_t bytes) {
    if (base != nullptr) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + offset);
    offset += aligned(bytes);
  };
  take(rows->x, capacity * s.hidden * 2);
  take(rows->dy, capacity * s.hidden * 2);
  take(rows->d_gate, capacity * s.intermediate * 2);
  if (s.gated) take(rows->d_up, capacity * s.intermediate * 2);
  take(rows->wa, capacity * s.intermediate * 2);
  take(rows->row_weight, capacity * 4);
  take(rows->partial, (s.intermediate + 63) / 64 * capacity * 4);
  take(rows->expert_first, s.num_experts * 4);
  return offset;
}

}  // namespace

size_t backward_bytes(const BackwardSizes& sizes) {
  BackwardRows rows;
  return static_cast<size_t>(layout_rows(nullptr, sizes, &rows));
}

Plan make_backward_plan(void* workspace, const BackwardSizes& s) {
  return make_plan(workspace, s.num_tokens, s.top_k, s.num_experts);
}

BackwardRows make_backward_rows(void* workspace, const BackwardSizes& sizes) {
  BackwardRows rows;
  layout_rows(static_cast<char*>(workspace), sizes, &rows);
  return rows;
}

namespace {

cudaError_t launch_until_dact(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                              cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  PlanArgs plan_args;
  plan_args.topk_ids = args.topk_ids;
  plan_args.num_tokens = s.num_tokens;
  plan_args.top_k = s.top_k;
  plan_args.num_experts = s.num_experts;
  plan_args.first_expert = args.first_expert;
  plan_args.total_experts = args.total_experts > 0 ? args.total_experts : s.num_experts;
  plan_args.window.capacity = args.capacity;
  plan_args.window.failed = args.failed;
  if (cudaError_t e = launch_plan(plan_args, plan, stream); e != cudaSuccess) return e;
  if (cudaError_t e = launch_backward_rows(args, plan, rows, stream); e != cudaSuccess) return e;
  return launch_gemm_dact_sm90(args, plan, rows, stream);
}

}  // namespace

cudaError_t launch_backward_rows_sm90(const BackwardArgs& args, void* workspace, cudaStream_t stream) {
  const Plan plan = make_backward_plan(workspace, args.sizes);
  const BackwardRows rows = make_backward_rows(workspace, args.sizes);
  if (cudaError_t e = launch_until_dact(args, plan, rows, stream); e != cudaSuccess) return e;
  if (cudaError_t e = launch_gemm_dx_sm90(args, plan, rows, nullptr, stream); e != cudaSuccess) return e;
  return launch_d_weights(args, plan, rows, stream);
}

cudaError_t launch_backward_experts_sm90(const BackwardArgs& args, void* workspace, cudaStream_t stream) {
  const Plan plan = make_backward_plan(workspace, args.sizes);
  const BackwardRows rows = make_backward_rows(workspace, args.sizes);
  if (cudaError_t e = launch_bias_sums(args, plan, rows, stream); e != cudaSuccess) return e;
  if (cudaError_t e = launch_gemm_dw_sm90(true, args, plan, rows, stream); e != cudaSuccess) return e;
  return launch_gemm_dw_sm90(false, args, plan, rows, stream);
}

cudaError_t launch_backward_sm90(const BackwardArgs& args, void* workspace, cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  if (args.over_ranks()) return cudaErrorInvalidValue;  // in two halves, with words between them
  const Plan plan = make_backward_plan(workspace, s);
  const BackwardRows rows = make_backward_rows(workspace, s);
  if (cudaError_t e = launch_until_dact(args, plan, rows, stream); e != cudaSuccess) return e;
  if (cudaError_t e = launch_backward_experts_sm90(args, workspace, stream); e != cudaSuccess) return e;
  if (cudaError_t e = launch_gemm_dx_sm90(args, plan, rows, rows.dy, stream); e != cudaSuccess) return e;
  if (args.dx_rows != nullptr) {
    if (cudaError_t e = launch_spread_rows(args, plan, rows, stream); e != cudaSuccess) return e;
  } else {
    const CombineArgs combine{rows.dy, nullptr, args.dx, s.num_tokens, s.top_k, s.hidden, args.dtype};
    if (cudaError_t e = launch_combine(combine, plan, stream); e != cudaSuccess) return e;
  }
  return launch_d_weights(args, plan, rows, stream);
}

}  // namespace streammoe::sm90
