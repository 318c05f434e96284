// The backward of a layer over the ranks of a ring, on XLA's stream alone. See stream.h for the contract.
//
// The ring is found by its name and not by an operand, so it may be in use: by a stream that XLA has not closed yet,
// which is an error that every rank gets alike, since they run one program. All tokens of a rank are one chunk, in one
// macro-chunk: then rows lie in the order of (rank, token), and sums over rows have the bits of one GPU. Gradients of y
// are published and fetched beside x; rows of d_x and gradients of weights go to their owners from the kernels that
// make them, which is told before the weight gradients are computed, and are combined when all ranks have told.
#include "cuda/status.h"
#include "cuda/stream.h"
#include "kernels/launch.h"

namespace streammoe::cuda {

CallSpec backward_spec(const sm90::BackwardArgs& args) {
  const sm90::BackwardSizes& s = args.sizes;
  CallSpec spec;
  spec.problem.num_experts = s.num_experts, spec.problem.hidden = s.hidden, spec.problem.intermediate = s.intermediate;
  spec.problem.top_k = s.top_k, spec.problem.dtype = args.dtype, spec.problem.activation = args.activation;
  spec.problem.limit = args.limit;
  spec.num_tokens = spec.chunk_tokens = spec.macro_tokens = s.num_tokens;
  spec.num_chunks = 1;
  spec.macro_ends = spec.wave_ends = {1};
  spec.backward = true;
  return spec;
}

Status Stream::expect_backward(int64_t num_tokens) const {
  if (open_) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(),
                 "': a backward while a stream is open on it: the gradient of one call was scheduled inside another; ",
                 "put the later call behind it, ring = sm.after(ring, gradients)");
  }
  const int64_t ring_tokens = shape_.num_slots * shape_.chunk_tokens;
  if (num_tokens >= 1 && num_tokens <= ring_tokens) return {};
  return error(Code::kInvalidArgument, "ring '", ring_->name(), "': a backward takes 1..", ring_tokens,
               " tokens (num_slots * chunk_tokens), got ", num_tokens);
}

Status Stream::backward(const sm90::BackwardArgs& own, const sm90::HalfTensors& gradients, uint8_t* workspace,
                        cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  Span span(ring_->name(), group_, rank_, Phase::kBackward);
  const int64_t num_tokens = own.sizes.num_tokens;
  STREAMMOE_RETURN_IF_ERROR(expect_backward(num_tokens));
  const CallSpec spec = backward_spec(own);
  STREAMMOE_CUDA(sm90::launch_open(device_ring(), spec, stream), "opening a backward");
  STREAMMOE_RETURN_IF_ERROR(publish_backward(spec, own, stream));
  STREAMMOE_CUDA(sm90::launch_await_chunks(device_ring(), 0, 1, stream), "waiting for the tokens of all ranks");

  // The layer of one device, on the tokens of all and the experts of this one.
  uint8_t* base = mem();
  sm90::BackwardArgs args = own;
  args.sizes.num_tokens = num_tokens * shape_.num_ranks;
  auto* weights = reinterpret_cast<float*>(workspace + sm90::backward_bytes(args.sizes));
  STREAMMOE_CUDA(sm90::launch_fetch_backward(device_ring(), spec, weights, stream), "fetching tokens and gradients");
  args.x = base + at_.token_pool, args.dy = base + at_.gradient_pool;
  args.topk_ids = reinterpret_cast<const int32_t*>(base + at_.routes), args.topk_weights = weights;
  args.dx = nullptr, args.d_weights = nullptr;
  args.first_expert = rank_ * shape_.num_experts, args.total_experts = shape_.num_experts * shape_.num_ranks;
  auto* const peers = reinterpret_cast<uint8_t* const*>(base + at_.peers);
  const TokenOrder order = spec.token_order(shape_.num_ranks, 0);
  args.dx_owners = {peers, at_.combine_rows, order};
  args.d_weights_owners = {peers, at_.weight_gradients, order};
  args.failed = &reinterpret_cast<const CallState*>(base + at_.call)->failed;
  STREAMMOE_CUDA(sm90::launch_backward_rows_sm90(args, workspace, stream), "gradients of rows");
  // What this rank owes to others is done; they need not wait for its experts.
  STREAMMOE_CUDA(sm90::launch_tell_done(device_ring(), spec, 0, stream), "telling that a backward's rows are sent");
  STREAMMOE_CUDA(sm90::launch_backward_experts_sm90(args, workspace, stream), "gradients of experts");
  STREAMMOE_CUDA(sm90::launch_await_done(device_ring(), spec, 0, stream), "waiting for the rows of all ranks");
  sm90::CombineArgs combine;
  combine.dtype = own.dtype, combine.rows = base + at_.combine_rows, combine.y = own.dx;
  combine.num_tokens = num_tokens, combine.top_k = shape_.top_k, combine.hidden = shape_.hidden;
  sm90::PairRoutes routes;
  routes.topk_ids = reinterpret_cast<const int32_t*>(base + at_.combine_ids);
  routes.num_experts = static_cast<int32_t>(args.total_experts), routes.failed = args.failed;
  STREAMMOE_CUDA(sm90::launch_combine_pairs(combine, routes, stream), "combining the gradients of tokens");
  STREAMMOE_CUDA(sm90::launch_take_weight_gradients(device_ring(), num_tokens * shape_.top_k, own.d_weights, stream),
                 "taking the gradients of weights");
  STREAMMOE_CUDA(sm90::launch_spoil_if_failed(device_ring(), gradients, stream), "the gradients of a failed call");
  return cuda_status(sm90::launch_advance(device_ring(), spec, stream), "closing a backward");
}

// Routes, x, and the gradient of y where peers look for it. Its copy comes first: it is complete, in stream order,
// before the kernel starts whose fence publishes the layout, and so it is published to every rank's await_chunks with
// it.
Status Stream::publish_backward(const CallSpec& spec, const sm90::BackwardArgs& args, cudaStream_t stream) {
  bool silent = false;
  const Status fault = Faults::get().hit(ring_->name(), rank_, Phase::kBackward, &silent);
  if (silent) return {};
  STREAMMOE_RETURN_IF_ERROR(fault);
  const int64_t bytes = spec.num_tokens * shape_.hidden * shape_.itemsize;
  STREAMMOE_CUDA(cudaMemcpyAsync(mem() + at_.gradient_pool + rank_ * bytes, args.dy, static_cast<size_t>(bytes),
                                 cudaMemcpyDeviceToDevice, stream),
                 "placing the gradient of y");
  STREAMMOE_CUDA(sm90::launch_publish_route(device_ring(), 0, nullptr, spec.num_tokens, args.topk_ids,
                                            args.topk_weights, shape_.num_experts * shape_.num_ranks, stream),
                 "publishing the routes of a backward");
  return cuda_status(sm90::launch_publish_layout(device_ring(), 0, nullptr, spec.num_tokens, args.x, stream),
                     "publishing the tokens of a backward");
}

}  // namespace streammoe::cuda
