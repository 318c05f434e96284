// The batch-ready layer on one device: plan, gather, up, down, combine, on one stream.
//
// Contract: the workspace is forward_bytes() long, needs no initial value and is free again when the last kernel is
// done. The up product gathers its rows from x, or they are first copied into the memory that the down product then
// reuses; both give the same bits. With gate and up kept they are copied. Five or six launches, none of which waits for
// the host. Trade-off: memory for row_capacity rows of H and of I, whatever the routing turns out to be; nothing is
// read back.
#include "kernels/backward.h"
#include "kernels/launch.h"

namespace streammoe::sm90 {

cudaError_t prepare_plan();
cudaError_t prepare_gemm_up_sm90();
cudaError_t prepare_gemm_down_sm90();
cudaError_t prepare_gather_rows();
cudaError_t prepare_combine();
cudaError_t prepare_stream();
cudaError_t prepare_ring_rows();

cudaError_t prepare_device() {
  for (const auto prepare : {prepare_plan, prepare_gemm_up_sm90, prepare_gemm_down_sm90, prepare_gather_rows,
                             prepare_combine, prepare_stream, prepare_ring_rows, prepare_backward}) {
    if (cudaError_t e = prepare(); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

namespace {

constexpr int64_t kAlign = 1024;
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// What both products of a pass share.
GemmArgs product(const ExpertPass& pass, const Plan& plan) {
  GemmArgs gemm;
  gemm.blocks = plan.blocks, gemm.num_blocks = plan.totals, gemm.counters = plan.counters;
  gemm.row_capacity = plan.row_capacity, gemm.block_capacity = plan.block_capacity;
  gemm.num_experts = pass.num_experts, gemm.top_k = pass.top_k;
  gemm.dtype = pass.dtype, gemm.activation = pass.activation, gemm.limit = pass.limit, gemm.num_sms = pass.num_sms;
  return gemm;
}

}  // namespace

GemmArgs up_product(const ExpertPass& pass, const Plan& plan) {
  GemmArgs gemm = product(pass, plan);
  gemm.a = pass.rows, gemm.out = pass.activations, gemm.depth = pass.hidden, gemm.width = pass.intermediate;
  gemm.row_pair = pass.gather ? plan.row_pair : nullptr;
  gemm.b0 = pass.weights.gate, gemm.b1 = pass.weights.up;
  gemm.bias0 = pass.weights.b_gate, gemm.bias1 = pass.weights.b_up;
  return gemm;
}

GemmArgs down_product(const ExpertPass& pass, const Plan& plan) {
  GemmArgs gemm = product(pass, plan);
  gemm.a = pass.activations, gemm.out = pass.out, gemm.depth = pass.intermediate, gemm.width = pass.hidden;
  gemm.row_pair = pass.scatter ? plan.row_pair : nullptr, gemm.scatter = pass.scatter;
  gemm.b0 = pass.weights.down, gemm.bias0 = pass.weights.b_down;
  return gemm;
}

size_t forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate, int64_t num_experts) {
  const int64_t rows = most_row_blocks(num_tokens * top_k, num_experts) * kBlockM;
  return static_cast<size_t>(aligned(static_cast<int64_t>(plan_bytes(num_tokens, top_k, num_experts))) +
                             aligned(rows * hidden * 2) + aligned(rows * intermediate * 2));
}

cudaError_t launch_forward_sm90(const ForwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.dtype == DType::kF32) return cudaErrorInvalidValue;
  if (args.num_tokens == 0) return cudaSuccess;
  char* base = static_cast<char*>(workspace);
  const Plan plan = make_plan(base, args.num_tokens, args.top_k, args.num_experts);
  char* rows = base + aligned(static_cast<int64_t>(plan_bytes(args.num_tokens, args.top_k, args.num_experts)));
  char* act = rows + aligned(plan.row_capacity * args.hidden * 2);

  PlanArgs plan_args;
  plan_args.topk_ids = args.topk_ids;
  plan_args.num_tokens = args.num_tokens;
  plan_args.top_k = args.top_k;
  plan_args.num_experts = plan_args.total_experts = args.num_experts;
  plan_args.window.capacity = args.capacity;
  if (cudaError_t e = launch_plan(plan_args, plan, stream); e != cudaSuccess) return e;

  const int64_t pairs = args.num_tokens * args.top_k;
  const bool fuse = args.gather == Gather::kAuto ? gather_in_gemm(pairs, args.num_experts, args.intermediate)
                                                 : args.gather == Gather::kFused;
  const bool fused = fuse && args.gate_up == nullptr;
  if (!fused) {
    GatherArgs gather{args.x, rows, args.num_tokens, args.top_k, args.hidden};
    if (args.gate_up != nullptr) {
      gather.cleared = args.gate_up;
      gather.cleared_width = gate_up_width(args.activation, args.intermediate);
    }
    if (cudaError_t e = launch_gather_rows(gather, plan, stream); e != cudaSuccess) return e;
  }

  ExpertPass pass;
  pass.weights = args.weights, pass.num_experts = args.num_experts;
  pass.hidden = args.hidden, pass.intermediate = args.intermediate, pass.top_k = args.top_k;
  pass.dtype = args.dtype, pass.activation = args.activation, pass.limit = args.limit, pass.num_sms = args.num_sms;
  pass.rows = fused ? args.x : rows, pass.gather = fused;
  pass.activations = act, pass.out = rows, pass.scatter = false;
  GemmArgs up = up_product(pass, plan);
  if (args.gate_up != nullptr) up.gate_up = args.gate_up, up.row_pair = plan.row_pair;
  if (cudaError_t e = launch_gemm_up_sm90(up, stream); e != cudaSuccess) return e;
  if (cudaError_t e = launch_gemm_down_sm90(down_product(pass, plan), stream); e != cudaSuccess) return e;

  const CombineArgs combine{rows, args.topk_weights, args.y, args.num_tokens, args.top_k, args.hidden, args.dtype};
  return launch_combine(combine, plan, stream);
}

}  // namespace streammoe::sm90
