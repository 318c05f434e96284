// Handlers of the layer on one CUDA device: forward, batch-ready, bf16 and f16.
//
// Contract: a call only enqueues kernels on XLA's stream; nothing is allocated, synchronised or read back. The
// workspace is a result that XLA allocates and nobody reads, so that a captured call keeps it: the handler carries the
// command-buffer trait. Kernels are loaded when the executable is initialised, never while a peer might wait.
#include "ffi/cuda_layer.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/status.h"
#include "ffi/decode.h"
#include "kernels/launch.h"

namespace streammoe::ffi_glue {
namespace {

ffi::Error initialize_impl() {
  return to_ffi(cuda::cuda_status(sm90::prepare_device(), "loading the kernels for sm_90a"));
}
XLA_FFI_DEFINE_HANDLER(kForwardInitialize, initialize_impl, ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>());

Status forward(cudaStream_t stream, const ffi::Dictionary& dictionary, const ffi::AnyBuffer& x,
               const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights,
               const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& y,
               const ffi::AnyBuffer& workspace) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t capacity = attrs.i64("capacity");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, operands, &weights));
  return cuda_forward(stream, p, capacity, weights, x, ids, topk_weights, y, workspace);
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

}  // namespace

Status cuda_forward(cudaStream_t stream, const ExpertProblem& p, int64_t capacity, const ExpertWeights& weights,
                    const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights,
                    const ffi::AnyBuffer& y, const ffi::AnyBuffer& workspace) {
  if (p.dtype == DType::kF32) {
    return error(Code::kInvalidArgument, "the CUDA kernels take bfloat16 and float16, got float32");
  }
  sm90::ForwardArgs args;
  args.dtype = p.dtype, args.weights = weights;
  if (capacity >= 0) args.capacity = static_cast<int32_t>(std::min<int64_t>(capacity, args.capacity));
  args.num_tokens = static_cast<int64_t>(ids.element_count()) / p.top_k;
  const int64_t num_pairs = args.num_tokens * p.top_k;
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_ids", ids, ffi::DataType::S32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_weights", topk_weights, ffi::DataType::F32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("x", x, element_type(p.dtype), args.num_tokens * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("y", y, element_type(p.dtype), args.num_tokens * p.hidden));
  args.top_k = p.top_k, args.hidden = p.hidden, args.intermediate = p.intermediate, args.num_experts = p.num_experts;
  args.activation = p.activation, args.limit = p.limit;
  args.x = x.untyped_data(), args.topk_ids = ids.typed_data<int32_t>();
  args.topk_weights = topk_weights.typed_data<float>(), args.y = y.untyped_data();
  const int64_t needed = cuda_forward_bytes(args.num_tokens, p.top_k, p.hidden, p.intermediate, p.num_experts);
  if (static_cast<int64_t>(workspace.size_bytes()) < needed) {
    return error(Code::kInvalidArgument, "the workspace must have ", needed, " bytes, got ", workspace.size_bytes());
  }
  return cuda::cuda_status(sm90::launch_forward_sm90(args, workspace.untyped_data(), stream), "launching the layer");
}

std::vector<CudaHandler> cuda_layer_handlers() {
  return {{"forward", "initialize", reinterpret_cast<void*>(+kForwardInitialize)},
          {"forward", "execute", reinterpret_cast<void*>(+kForward)}};
}

int64_t cuda_forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                           int64_t num_experts) {
  return static_cast<int64_t>(sm90::forward_bytes(num_tokens, top_k, hidden, intermediate, num_experts));
}

}  // namespace streammoe::ffi_glue
