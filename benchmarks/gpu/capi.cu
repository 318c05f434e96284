// C entry points over cc/kernels/launch.h for the ctypes harness; not part of the product.
//
// Contract: every function returns a cudaError_t as int; pointers and the stream are passed as integers by
// the caller. Plain long argument lists, so that Python needs no struct layouts.
#include "kernels/launch.h"

namespace sm90 = streammoe::sm90;
using streammoe::Activation;
using streammoe::DType;

extern "C" {

int sm_prepare() { return sm90::prepare_device(); }
const char* sm_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int64_t sm_plan_bytes(int64_t t, int64_t k, int64_t l) { return static_cast<int64_t>(sm90::plan_bytes(t, k, l)); }

// Byte offsets of row_pair, pair_row, blocks, expert_rows, totals in the workspace, then both capacities.
void sm_plan_layout(int64_t t, int64_t k, int64_t l, int64_t* out) {
  char* base = reinterpret_cast<char*>(4096);
  const sm90::Plan p = sm90::make_plan(base, t, k, l);
  out[0] = reinterpret_cast<char*>(p.row_pair) - base;
  out[1] = reinterpret_cast<char*>(p.pair_row) - base;
  out[2] = reinterpret_cast<char*>(p.blocks) - base;
  out[3] = reinterpret_cast<char*>(p.expert_rows) - base;
  out[4] = reinterpret_cast<char*>(p.totals) - base;
  out[5] = p.row_capacity;
  out[6] = p.block_capacity;
}

int sm_plan(void* workspace, const int32_t* ids, int64_t t, int64_t k, int64_t l, int64_t first, int64_t total,
            cudaStream_t stream) {
  sm90::PlanArgs args;
  args.topk_ids = ids;
  args.num_tokens = t;
  args.top_k = k;
  args.num_experts = l;
  args.first_expert = first;
  args.total_experts = total;
  return sm90::launch_plan(args, sm90::make_plan(workspace, t, k, l), stream);
}

int sm_gather(void* workspace, const void* x, void* rows, int64_t t, int64_t k, int64_t l, int64_t h,
              cudaStream_t stream) {
  return sm90::launch_gather_rows({x, rows, t, k, h}, sm90::make_plan(workspace, t, k, l), stream);
}

int sm_combine(void* workspace, const void* rows, const float* weights, void* y, int64_t t, int64_t k, int64_t l,
               int64_t h, int dtype, cudaStream_t stream) {
  return sm90::launch_combine({rows, weights, y, t, k, h, static_cast<DType>(dtype)},
                              sm90::make_plan(workspace, t, k, l), stream);
}

// up != 0: the up kernel with `activation`; otherwise down. by_pair != 0: up gathers, a is x [T, depth]; down scatters,
// out is [T * K, width].
int sm_gemm(int up, int by_pair, void* workspace, int64_t t, int64_t k, int64_t l, const void* a, void* out,
            int64_t depth, int64_t width, const void* b0, const void* b1, int64_t expert_stride, int64_t row_stride,
            const void* bias0, const void* bias1, int64_t bias_stride, int activation, float limit, int num_sms,
            int dtype, cudaStream_t stream) {
  const sm90::Plan plan = sm90::make_plan(workspace, t, k, l);
  sm90::GemmArgs args;
  args.a = a;
  args.out = out;
  args.blocks = plan.blocks;
  args.num_blocks = plan.totals;
  args.row_pair = by_pair ? plan.row_pair : nullptr;
  args.scatter = by_pair && !up;
  args.dtype = static_cast<DType>(dtype);
  args.counters = plan.counters;
  args.top_k = k;
  args.row_capacity = plan.row_capacity;
  args.block_capacity = plan.block_capacity;
  args.num_experts = l;
  args.depth = depth;
  args.width = width;
  args.b0 = {b0, expert_stride, row_stride};
  args.b1 = {b1, expert_stride, row_stride};
  args.bias0 = {bias0, bias_stride, 0};
  args.bias1 = {bias1, bias_stride, 0};
  args.activation = static_cast<Activation>(activation);
  args.limit = limit;
  args.num_sms = num_sms;
  return up ? sm90::launch_gemm_up_sm90(args, stream) : sm90::launch_gemm_down_sm90(args, stream);
}

int64_t sm_forward_bytes(int64_t t, int64_t k, int64_t h, int64_t i, int64_t l) {
  return static_cast<int64_t>(sm90::forward_bytes(t, k, h, i, l));
}

// Packed w_gate_up [L, H, 2I] and w_down [L, I, H], no biases.
int sm_forward(void* workspace, const void* x, const int32_t* ids, const float* weights, void* y, const void* w_gate_up,
               const void* w_down, int64_t t, int64_t k, int64_t h, int64_t i, int64_t l, int activation, float limit,
               int gather, int dtype, cudaStream_t stream) {
  sm90::ForwardArgs args;
  args.gather = static_cast<sm90::Gather>(gather);
  args.dtype = static_cast<DType>(dtype);
  args.x = x;
  args.topk_ids = ids;
  args.topk_weights = weights;
  args.y = y;
  args.weights.gate = {w_gate_up, h * 2 * i, 2 * i};
  args.weights.up = {static_cast<const char*>(w_gate_up) + i * 2, h * 2 * i, 2 * i};
  args.weights.down = {w_down, i * h, h};
  args.num_tokens = t;
  args.top_k = k;
  args.hidden = h;
  args.intermediate = i;
  args.num_experts = l;
  args.activation = static_cast<Activation>(activation);
  args.limit = limit;
  return sm90::launch_forward_sm90(args, workspace, stream);
}

}  // extern "C"
