// Handlers of the layer on one CUDA device, bf16 and f16; names and meaning as in ffi/layer.cc.
//
//   forward  x, ids, weights -> y, workspace                          the batch-ready layer
//   forward_kept             -> y, gate_up, workspace                 the same, for backward_kept
//   rows     x, ids -> one row per route, dropped, expert_rows, workspace   the expert half, between XLA's collectives
//   combine  rows, ids, weights, dropped -> y                         the owner's half
//
// Contract: a call only enqueues kernels and memsets on XLA's stream; nothing is allocated, synchronised or read back.
// A workspace is a result that XLA allocates and nobody reads, so that a captured call keeps it: the handlers carry the
// command-buffer trait. Kernels are loaded when the executable is initialised, never while a peer might wait. rows and
// combine give the bits of forward. Trade-off: rows that are not computed here are cleared in full before the product
// writes the others, which costs their bytes once more and no pass over the plan.
#include "ffi/cuda_layer.h"

#include <cuda_runtime_api.h>

#include <limits>

#include "cuda/status.h"
#include "ffi/decode.h"
#include "kernels/launch.h"

namespace streammoe::ffi_glue {
namespace {

ffi::Error initialize_impl() {
  return to_ffi(cuda::cuda_status(sm90::prepare_device(), "loading the kernels for sm_90a"));
}
XLA_FFI_DEFINE_HANDLER(kInitialize, initialize_impl, ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>());

// gate_up: nullptr when nothing is kept.
Status forward(cudaStream_t stream, const ffi::Dictionary& dictionary, const ffi::AnyBuffer& x,
               const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights,
               const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& y, const ffi::AnyBuffer& workspace,
               const ffi::AnyBuffer* gate_up = nullptr) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t capacity = attrs.i64("capacity");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, operands, &weights));
  return cuda_forward(stream, p, capacity, weights, x, ids, topk_weights, y, workspace, gate_up);
}

ffi::Error forward_impl(cudaStream_t stream, ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer ids,
                        ffi::AnyBuffer topk_weights, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down,
                        ffi::AnyBuffer b_gate, ffi::AnyBuffer b_up, ffi::AnyBuffer b_down,
                        ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  return to_ffi(forward(stream, attrs, x, ids, topk_weights, operands, *y, *workspace));
}
XLA_FFI_DEFINE_HANDLER(kForward, forward_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()   // x [T, H]
                           .Arg<ffi::AnyBuffer>()   // topk_ids [T, K] i32
                           .Arg<ffi::AnyBuffer>()   // topk_weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()   // gate
                           .Arg<ffi::AnyBuffer>()   // up
                           .Arg<ffi::AnyBuffer>()   // down
                           .Arg<ffi::AnyBuffer>()   // b_gate
                           .Arg<ffi::AnyBuffer>()   // b_up
                           .Arg<ffi::AnyBuffer>()   // b_down
                           .Ret<ffi::AnyBuffer>()   // y [T, H]
                           .Ret<ffi::AnyBuffer>(),  // workspace u8
                       {ffi::Traits::kCmdBufferCompatible});

ffi::Error forward_kept_impl(cudaStream_t stream, ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer ids,
                             ffi::AnyBuffer topk_weights, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down,
                             ffi::AnyBuffer b_gate, ffi::AnyBuffer b_up, ffi::AnyBuffer b_down,
                             ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> gate_up,
                             ffi::Result<ffi::AnyBuffer> workspace) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const ffi::AnyBuffer kept = *gate_up;
  return to_ffi(forward(stream, attrs, x, ids, topk_weights, operands, *y, *workspace, &kept));
}
XLA_FFI_DEFINE_HANDLER(kForwardKept, forward_kept_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()   // x [T, H]
                           .Arg<ffi::AnyBuffer>()   // topk_ids [T, K] i32
                           .Arg<ffi::AnyBuffer>()   // topk_weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()   // gate
                           .Arg<ffi::AnyBuffer>()   // up
                           .Arg<ffi::AnyBuffer>()   // down
                           .Arg<ffi::AnyBuffer>()   // b_gate
                           .Arg<ffi::AnyBuffer>()   // b_up
                           .Arg<ffi::AnyBuffer>()   // b_down
                           .Ret<ffi::AnyBuffer>()   // y [T, H]
                           .Ret<ffi::AnyBuffer>()   // gate_up [T, K, 2I], ungated [T, K, I]
                           .Ret<ffi::AnyBuffer>(),  // workspace u8
                       {ffi::Traits::kCmdBufferCompatible});

// Plan, up, and down to the rows of the routes. workspace: the activations, then the plan, whose expert_rows is a
// result.
Status launch_rows(cudaStream_t stream, const ExpertProblem& p, int64_t capacity, const ExpertWeights& weights,
                   int64_t num_tokens, const void* x, const int32_t* ids, void* rows, uint8_t* dropped,
                   int32_t* expert_rows, uint8_t* workspace) {
  // A multiple of 128 rows of 16 bytes: whatever comes behind is aligned.
  const int64_t activation_bytes =
      most_row_blocks(num_tokens * p.top_k, p.num_experts) * kBlockM * p.intermediate * dtype_bytes(p.dtype);
  sm90::Plan plan = sm90::make_plan(workspace + activation_bytes, num_tokens, p.top_k, p.num_experts, false);
  plan.expert_rows = expert_rows;
  sm90::PlanArgs args;
  args.topk_ids = ids, args.num_tokens = num_tokens, args.top_k = p.top_k;
  args.num_experts = args.total_experts = p.num_experts;
  args.window.capacity = kernel_capacity(capacity), args.window.dropped = dropped;
  STREAMMOE_CUDA(sm90::launch_plan(args, plan, stream), "planning the rows");

  sm90::ExpertPass pass;
  pass.weights = weights, pass.num_experts = p.num_experts;
  pass.hidden = p.hidden, pass.intermediate = p.intermediate, pass.top_k = p.top_k;
  pass.dtype = p.dtype, pass.activation = p.activation, pass.limit = p.limit;
  pass.rows = x, pass.activations = workspace, pass.out = rows;
  STREAMMOE_CUDA(sm90::launch_gemm_up_sm90(sm90::up_product(pass, plan), stream), "the up product of the rows");
  return cuda::cuda_status(sm90::launch_gemm_down_sm90(sm90::down_product(pass, plan), stream),
                           "the down product of the rows");
}

// ids are local here: -1 or outside 0..L-1 is a route of another rank or of none.
Status rows(cudaStream_t stream, const ffi::Dictionary& dictionary, const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids,
            const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& out, const ffi::AnyBuffer& dropped,
            const ffi::AnyBuffer& expert_rows, const ffi::AnyBuffer& workspace) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t capacity = attrs.i64("capacity");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(expect_kernel_type(p.dtype));
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, operands, &weights));
  const int64_t num_tokens = tokens_of(ids, p);
  STREAMMOE_RETURN_IF_ERROR(expect_rows(p, num_tokens, x, ids, out, dropped, expert_rows));
  // The batch-ready layer's workspace, but for its rows.
  const int64_t needed = cuda_forward_bytes(num_tokens, p.top_k, 0, p.intermediate, p.num_experts);
  STREAMMOE_RETURN_IF_ERROR(expect_workspace(workspace, needed));
  if (num_tokens > 0) {
    STREAMMOE_CUDA(cudaMemsetAsync(dropped.untyped_data(), 0, dropped.size_bytes(), stream), "clearing `dropped`");
    // Rows of other ranks' experts travel back as zeros, never as whatever the buffer held.
    STREAMMOE_CUDA(cudaMemsetAsync(out.untyped_data(), 0, out.size_bytes(), stream), "clearing the rows");
  }
  return launch_rows(stream, p, capacity, weights, num_tokens, x.untyped_data(), ids.typed_data<int32_t>(),
                     out.untyped_data(), dropped.typed_data<uint8_t>(), expert_rows.typed_data<int32_t>(),
                     static_cast<uint8_t*>(workspace.untyped_data()));
}

ffi::Error rows_impl(cudaStream_t stream, ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer ids,
                     ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::AnyBuffer b_gate,
                     ffi::AnyBuffer b_up, ffi::AnyBuffer b_down, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::AnyBuffer> dropped, ffi::Result<ffi::AnyBuffer> expert_rows,
                     ffi::Result<ffi::AnyBuffer> workspace) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  return to_ffi(rows(stream, attrs, x, ids, operands, *out, *dropped, *expert_rows, *workspace));
}
XLA_FFI_DEFINE_HANDLER(kRows, rows_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()   // x [N, H]
                           .Arg<ffi::AnyBuffer>()   // local ids [N, K] i32
                           .Arg<ffi::AnyBuffer>()   // gate
                           .Arg<ffi::AnyBuffer>()   // up
                           .Arg<ffi::AnyBuffer>()   // down
                           .Arg<ffi::AnyBuffer>()   // b_gate
                           .Arg<ffi::AnyBuffer>()   // b_up
                           .Arg<ffi::AnyBuffer>()   // b_down
                           .Ret<ffi::AnyBuffer>()   // rows [N, K, H]
                           .Ret<ffi::AnyBuffer>()   // dropped [N, K] u8
                           .Ret<ffi::AnyBuffer>()   // expert_rows [L] i32
                           .Ret<ffi::AnyBuffer>(),  // workspace u8
                       {ffi::Traits::kCmdBufferCompatible});

Status combine_rows(cudaStream_t stream, const ffi::Dictionary& dictionary, const ffi::AnyBuffer& row_buffer,
                    const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights, const ffi::AnyBuffer& dropped,
                    const ffi::AnyBuffer& y) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(expect_kernel_type(p.dtype));
  sm90::CombineArgs args;
  args.num_tokens = tokens_of(ids, p);
  STREAMMOE_RETURN_IF_ERROR(expect_combine(p, args.num_tokens, row_buffer, ids, topk_weights, dropped, y));
  args.top_k = p.top_k, args.hidden = p.hidden, args.dtype = p.dtype;
  args.rows = row_buffer.untyped_data(), args.topk_weights = topk_weights.typed_data<float>();
  args.y = y.untyped_data();
  sm90::PairRoutes routes;
  routes.topk_ids = ids.typed_data<int32_t>(), routes.dropped = dropped.typed_data<uint8_t>();
  // Ids are those of all ranks' experts, of which the problem knows this rank's only. Their owners have cleaned them:
  // whatever is not negative names an expert.
  routes.num_experts = std::numeric_limits<int32_t>::max();
  return cuda::cuda_status(sm90::launch_combine_pairs(args, routes, stream), "combining the rows");
}

ffi::Error combine_impl(cudaStream_t stream, ffi::Dictionary attrs, ffi::AnyBuffer row_buffer, ffi::AnyBuffer ids,
                        ffi::AnyBuffer topk_weights, ffi::AnyBuffer dropped, ffi::Result<ffi::AnyBuffer> y) {
  return to_ffi(combine_rows(stream, attrs, row_buffer, ids, topk_weights, dropped, *y));
}
XLA_FFI_DEFINE_HANDLER(kCombine, combine_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()   // rows [T, K, H]
                           .Arg<ffi::AnyBuffer>()   // ids [T, K] i32, negative: skipped
                           .Arg<ffi::AnyBuffer>()   // weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()   // dropped [T, K] u8
                           .Ret<ffi::AnyBuffer>(),  // y [T, H]
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Status cuda_forward(cudaStream_t stream, const ExpertProblem& p, int64_t capacity, const ExpertWeights& weights,
                    const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights,
                    const ffi::AnyBuffer& y, const ffi::AnyBuffer& workspace, const ffi::AnyBuffer* gate_up) {
  STREAMMOE_RETURN_IF_ERROR(expect_kernel_type(p.dtype));
  sm90::ForwardArgs args;
  args.dtype = p.dtype, args.weights = weights, args.capacity = kernel_capacity(capacity);
  args.num_tokens = tokens_of(ids, p);
  STREAMMOE_RETURN_IF_ERROR(expect_batch(p, args.num_tokens, x, ids, topk_weights));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("y", y, element_type(p.dtype), args.num_tokens * p.hidden));
  if (gate_up != nullptr) {
    STREAMMOE_RETURN_IF_ERROR(expect_gate_up(p, args.num_tokens, *gate_up));
    args.gate_up = gate_up->untyped_data();
  }
  args.top_k = p.top_k, args.hidden = p.hidden, args.intermediate = p.intermediate, args.num_experts = p.num_experts;
  args.activation = p.activation, args.limit = p.limit;
  args.x = x.untyped_data(), args.topk_ids = ids.typed_data<int32_t>();
  args.topk_weights = topk_weights.typed_data<float>(), args.y = y.untyped_data();
  const int64_t needed = cuda_forward_bytes(args.num_tokens, p.top_k, p.hidden, p.intermediate, p.num_experts);
  STREAMMOE_RETURN_IF_ERROR(expect_workspace(workspace, needed));
  return cuda::cuda_status(sm90::launch_forward_sm90(args, workspace.untyped_data(), stream), "launching the layer");
}

void* load_kernels_handler() { return reinterpret_cast<void*>(+kInitialize); }

std::vector<CudaHandler> cuda_layer_handlers() {
  return {{"forward", "initialize", load_kernels_handler()},
          {"forward", "execute", reinterpret_cast<void*>(+kForward)},
          {"forward_kept", "initialize", load_kernels_handler()},
          {"forward_kept", "execute", reinterpret_cast<void*>(+kForwardKept)},
          {"rows", "initialize", load_kernels_handler()},
          {"rows", "execute", reinterpret_cast<void*>(+kRows)},
          {"combine", "initialize", load_kernels_handler()},
          {"combine", "execute", reinterpret_cast<void*>(+kCombine)}};
}

int64_t cuda_forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                           int64_t num_experts) {
  return static_cast<int64_t>(sm90::forward_bytes(num_tokens, top_k, hidden, intermediate, num_experts));
}

}  // namespace streammoe::ffi_glue
