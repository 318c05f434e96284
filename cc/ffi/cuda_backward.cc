// Handlers of the layer's backward on CUDA, bf16 and f16.
//
//   backward       x, dy, ids, weights, experts -> dx, d_weights, gradients of the expert tensors, workspace
//   backward_kept  and gate_up, as forward_kept kept them -> the same
//   rows_backward  the same with dx_rows [N, K, H] for dx: the backward of rows, between XLA's collectives
//   ring_backward  token, x, dy, ids, weights, experts -> token, as backward: over the ranks of a ring, by its name
//
// Attribute wide: gradients of the expert tensors are float32, not rounded (not over a ring).
// Contract: a call only enqueues kernels, copies and memsets on XLA's stream. The workspace is a result that XLA
// allocates and nobody reads. Results of absent tensors are cleared: nobody else writes them. All but ring_backward
// carry the command-buffer trait: its ring is no operand, so only the order of thunks, which the token fixes, keeps it
// apart from the other calls on that ring. Trade-off of the name for the operand: a gradient cannot take a ring that
// the forward call has given back already.
#include "ffi/cuda_backward.h"

#include <cuda_runtime_api.h>

#include <iterator>

#include "cuda/status.h"
#include "cuda/stream.h"
#include "kernels/backward.h"

namespace streammoe::ffi_glue {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Operands and results of a backward, as its handlers have them.
struct BackwardCall {
  const Buffer &x, &dy, &ids, &topk_weights;
  const Buffer (&operands)[kNumWeights];
  const Buffer &dx, &d_weights;
  const Buffer (&results)[kNumWeights];
  const Buffer& workspace;
  const Buffer* gate_up = nullptr;  // nullptr: computed again
};

// Checks everything but the workspace. by_route: the first result is dx_rows [N, K, H], a row per route, and not their
// sums dx [T, H].
Status read_backward(AttrReader& attrs, bool by_route, const BackwardCall& call, sm90::BackwardArgs* args) {
  const ExpertProblem p = read_problem(attrs);
  args->capacity = kernel_capacity(attrs.i64("capacity"));
  args->wide = attrs.i32("wide") != 0;
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(expect_kernel_type(p.dtype));
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, call.operands, &args->weights));
  ExpertProblem of_gradients = p;
  if (args->wide) of_gradients.dtype = DType::kF32;
  STREAMMOE_RETURN_IF_ERROR(read_gradients(of_gradients, call.results, &args->gradients));
  sm90::BackwardSizes& s = args->sizes;
  s.num_tokens = tokens_of(call.ids, p);
  STREAMMOE_RETURN_IF_ERROR(expect_batch(p, s.num_tokens, call.x, call.ids, call.topk_weights));
  const ffi::DataType type = element_type(p.dtype);
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("dy", call.dy, type, s.num_tokens * p.hidden));
  const int64_t dx_rows = by_route ? s.num_tokens * p.top_k : s.num_tokens;
  STREAMMOE_RETURN_IF_ERROR(expect_buffer(by_route ? "dx_rows" : "dx", call.dx, type, dx_rows * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("d_weights", call.d_weights, ffi::DataType::F32, s.num_tokens * p.top_k));
  if (call.gate_up != nullptr) {
    STREAMMOE_RETURN_IF_ERROR(expect_gate_up(p, s.num_tokens, *call.gate_up));
    args->gate_up = call.gate_up->untyped_data();
  }
  s.top_k = p.top_k, s.hidden = p.hidden, s.intermediate = p.intermediate;
  s.num_experts = p.num_experts, s.gated = is_gated(p.activation);
  args->activation = p.activation, args->limit = p.limit, args->dtype = p.dtype;
  args->x = call.x.untyped_data(), args->dy = call.dy.untyped_data();
  (by_route ? args->dx_rows : args->dx) = call.dx.untyped_data();
  args->topk_ids = call.ids.typed_data<int32_t>(), args->topk_weights = call.topk_weights.typed_data<float>();
  args->d_weights = call.d_weights.typed_data<float>();
  return {};
}

Status clear_absent(const Buffer (&results)[kNumWeights], cudaStream_t stream) {
  for (const Buffer& result : results) {
    if (result.element_count() > 1) continue;
    STREAMMOE_CUDA(cudaMemsetAsync(result.untyped_data(), 0, result.size_bytes(), stream),
                   "clearing the gradient of an absent tensor");
  }
  return {};
}

Status backward(bool by_route, cudaStream_t stream, const ffi::Dictionary& dictionary, const BackwardCall& call) {
  AttrReader attrs(dictionary);
  sm90::BackwardArgs args;
  STREAMMOE_RETURN_IF_ERROR(read_backward(attrs, by_route, call, &args));
  STREAMMOE_RETURN_IF_ERROR(expect_workspace(call.workspace, static_cast<int64_t>(sm90::backward_bytes(args.sizes))));
  STREAMMOE_RETURN_IF_ERROR(clear_absent(call.results, stream));
  return cuda::cuda_status(sm90::launch_backward_sm90(args, call.workspace.untyped_data(), stream),
                           "launching the layer's backward");
}

template <bool kByRoute>
ffi::Error backward_impl(cudaStream_t stream, ffi::Dictionary attrs, Buffer x, Buffer dy, Buffer ids,
                         Buffer topk_weights, Buffer gate, Buffer up, Buffer down, Buffer b_gate, Buffer b_up,
                         Buffer b_down, Result dx, Result d_weights, Result d_gate, Result d_up, Result d_down,
                         Result d_b_gate, Result d_b_up, Result d_b_down, Result workspace) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const Buffer results[kNumWeights] = {*d_gate, *d_up, *d_down, *d_b_gate, *d_b_up, *d_b_down};
  const BackwardCall call = {x, dy, ids, topk_weights, operands, *dx, *d_weights, results, *workspace};
  return to_ffi(backward(kByRoute, stream, attrs, call));
}
auto bind_backward() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Attrs<ffi::Dictionary>()
      .Arg<Buffer>()  // x [T, H]
      .Arg<Buffer>()  // dy [T, H]
      .Arg<Buffer>()  // topk_ids [T, K] i32
      .Arg<Buffer>()  // topk_weights [T, K] f32
      .Arg<Buffer>()  // gate
      .Arg<Buffer>()  // up
      .Arg<Buffer>()  // down
      .Arg<Buffer>()  // b_gate
      .Arg<Buffer>()  // b_up
      .Arg<Buffer>()  // b_down
      .Ret<Buffer>()  // dx [T, H], or dx_rows [T, K, H]
      .Ret<Buffer>()  // d_weights [T, K] f32
      .Ret<Buffer>()  // gradients, as the six tensors
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>();  // workspace u8
}
XLA_FFI_DEFINE_HANDLER(kBackward, backward_impl<false>, bind_backward(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRowsBackward, backward_impl<true>, bind_backward(), {ffi::Traits::kCmdBufferCompatible});

ffi::Error backward_kept_impl(cudaStream_t stream, ffi::Dictionary attrs, Buffer x, Buffer dy, Buffer ids,
                              Buffer topk_weights, Buffer gate_up, Buffer gate, Buffer up, Buffer down, Buffer b_gate,
                              Buffer b_up, Buffer b_down, Result dx, Result d_weights, Result d_gate, Result d_up,
                              Result d_down, Result d_b_gate, Result d_b_up, Result d_b_down, Result workspace) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const Buffer results[kNumWeights] = {*d_gate, *d_up, *d_down, *d_b_gate, *d_b_up, *d_b_down};
  const BackwardCall call = {x, dy, ids, topk_weights, operands, *dx, *d_weights, results, *workspace, &gate_up};
  return to_ffi(backward(false, stream, attrs, call));
}
XLA_FFI_DEFINE_HANDLER(kBackwardKept, backward_kept_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()  // x [T, H]
                           .Arg<Buffer>()  // dy [T, H]
                           .Arg<Buffer>()  // topk_ids [T, K] i32
                           .Arg<Buffer>()  // topk_weights [T, K] f32
                           .Arg<Buffer>()  // gate_up [T, K, 2I], ungated [T, K, I]
                           .Arg<Buffer>()  // gate
                           .Arg<Buffer>()  // up
                           .Arg<Buffer>()  // down
                           .Arg<Buffer>()  // b_gate
                           .Arg<Buffer>()  // b_up
                           .Arg<Buffer>()  // b_down
                           .Ret<Buffer>()  // dx [T, H]
                           .Ret<Buffer>()  // d_weights [T, K] f32
                           .Ret<Buffer>()  // gradients, as the six tensors
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>(),  // workspace u8
                       {ffi::Traits::kCmdBufferCompatible});

Status ring_backward(RingCall* ring, cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary,
                     const Buffer& token_in, const Buffer& token_out, const BackwardCall& call) {
  AttrReader attrs(dictionary);
  const std::string name = attrs.text("ring");
  const int64_t num_ranks = attrs.i64("num_ranks");
  sm90::BackwardArgs args;
  STREAMMOE_RETURN_IF_ERROR(read_backward(attrs, false, call, &args));
  if (args.wide) return error(Code::kInvalidArgument, "ring_backward has no wide gradients");
  STREAMMOE_RETURN_IF_ERROR(find_member(name, ordinal, ring));
  if (num_ranks < 2 || ring->ring->shape().num_ranks != num_ranks) {
    return error(Code::kFailedPrecondition, "ring '", name, "' has ", ring->ring->shape().num_ranks,
                 " ranks, a backward on it was compiled for ", num_ranks, " and wants at least 2");
  }
  auto& side = static_cast<cuda::Stream&>(*ring->member->stream);
  STREAMMOE_RETURN_IF_ERROR(expect_layer(*ring->ring, cuda::backward_spec(args)));
  STREAMMOE_RETURN_IF_ERROR(side.expect_backward(args.sizes.num_tokens));
  sm90::BackwardSizes all = args.sizes;
  all.num_tokens *= num_ranks;
  const int64_t needed = static_cast<int64_t>(sm90::backward_bytes(all)) + all.num_tokens * all.top_k * 4;
  STREAMMOE_RETURN_IF_ERROR(expect_workspace(call.workspace, needed));
  ring->in_place = true;  // from here on an error costs the ring: peers may be waiting for this rank
  STREAMMOE_RETURN_IF_ERROR(clear_absent(call.results, stream));
  STREAMMOE_RETURN_IF_ERROR(carry_on(stream, "token", token_in, token_out));
  sm90::HalfTensors gradients;
  static_assert(std::size(sm90::HalfTensors{}.of) == kNumWeights);
  for (size_t n = 0; n < kNumWeights; ++n) {
    const auto count = static_cast<int64_t>(call.results[n].element_count());
    if (count > 1) gradients.of[n] = {call.results[n].untyped_data(), count};
  }
  return side.backward(args, gradients, static_cast<uint8_t*>(call.workspace.untyped_data()), stream);
}

ffi::Error ring_backward_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer token, Buffer x,
                              Buffer dy, Buffer ids, Buffer topk_weights, Buffer gate, Buffer up, Buffer down,
                              Buffer b_gate, Buffer b_up, Buffer b_down, Result token_out, Result dx, Result d_weights,
                              Result d_gate, Result d_up, Result d_down, Result d_b_gate, Result d_b_up,
                              Result d_b_down, Result workspace) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const Buffer results[kNumWeights] = {*d_gate, *d_up, *d_down, *d_b_gate, *d_b_up, *d_b_down};
  const BackwardCall call = {x, dy, ids, topk_weights, operands, *dx, *d_weights, results, *workspace};
  RingCall ring;
  const Status status = ring_backward(&ring, stream, ordinal, attrs, token, *token_out, call);
  return finish(ring, status);
}
XLA_FFI_DEFINE_HANDLER(kRingBackward, ring_backward_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()  // token
                           .Arg<Buffer>()  // x [T, H]
                           .Arg<Buffer>()  // dy [T, H]
                           .Arg<Buffer>()  // topk_ids [T, K] i32, of all ranks' experts
                           .Arg<Buffer>()  // topk_weights [T, K] f32
                           .Arg<Buffer>()  // gate
                           .Arg<Buffer>()  // up
                           .Arg<Buffer>()  // down
                           .Arg<Buffer>()  // b_gate
                           .Arg<Buffer>()  // b_up
                           .Arg<Buffer>()  // b_down
                           .Ret<Buffer>()  // token
                           .Ret<Buffer>()  // dx [T, H]
                           .Ret<Buffer>()  // d_weights [T, K] f32
                           .Ret<Buffer>()  // gradients, as the six tensors
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>()
                           .Ret<Buffer>());  // workspace u8

}  // namespace

std::vector<CudaHandler> cuda_backward_handlers() {
  return {{"backward", "initialize", load_kernels_handler()},
          {"backward", "execute", reinterpret_cast<void*>(+kBackward)},
          {"backward_kept", "initialize", load_kernels_handler()},
          {"backward_kept", "execute", reinterpret_cast<void*>(+kBackwardKept)},
          {"rows_backward", "initialize", load_kernels_handler()},
          {"rows_backward", "execute", reinterpret_cast<void*>(+kRowsBackward)},
          {"ring_backward", "execute", reinterpret_cast<void*>(+kRingBackward)}};
}

int64_t cuda_backward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                            int64_t num_experts, bool gated) {
  return static_cast<int64_t>(sm90::backward_bytes({num_tokens, top_k, hidden, intermediate, num_experts, gated}));
}

}  // namespace streammoe::ffi_glue
