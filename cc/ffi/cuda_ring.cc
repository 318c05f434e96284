// Handlers that work on a ring on a GPU: names, operands and results as in ffi/ring.cc, and two more.
//
//   connect             mem -> mem                 behind register on all ranks: peers may be reached from now on
//   publish_external    mem, y -> mem, y           a kernel that is not ours has published both halves of a chunk
//   ring_forward_local  as ring_forward, with a workspace instead of statistics: one rank, which needs no slot
//   after             values..., others... -> values...   in place; schedule order is stream order, so it only copies
//                                                  what XLA did not alias
//
// Contract: handlers only enqueue. The index of a chunk lies in device memory, so the host takes it from the attribute
// static_chunk; -1 means the program computes it, and it must be the next one. ring_forward(_local) is one handler
// without side stream and carries the command-buffer trait: host code does not run on replay, all counters are in
// device memory. The others never carry it, since a side stream must not stay unjoined in a capture.
#include "ffi/cuda_ring.h"

#include <algorithm>
#include <cstring>

#include "cuda/status.h"
#include "cuda/stream.h"
#include "ffi/decode.h"
#include "kernels/launch.h"

namespace streammoe::ffi_glue {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

cuda::Stream& stream_of(const RingCall& call) { return static_cast<cuda::Stream&>(*call.member->stream); }

Status register_ring(cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in,
                     Result mem_out) {
  AttrReader attrs(dictionary);
  RingCall call;
  STREAMMOE_RETURN_IF_ERROR(register_memory(attrs, ordinal, mem_in, *mem_out, &call));
  return stream_of(call).attach(stream);
}

ffi::Error register_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Result mem_out) {
  return to_ffi(register_ring(stream, ordinal, attrs, mem_in, mem_out));
}
XLA_FFI_DEFINE_HANDLER(kRegister, register_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Ret<Buffer>());  // mem

ffi::Error connect_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary dictionary, Buffer mem_in,
                        Result mem_out) {
  AttrReader attrs(dictionary);
  const std::string name = attrs.text("ring");
  RingCall call;
  Status status = attrs.status();
  if (status.ok()) status = find_ring(name, ordinal, mem_in, *mem_out, &call);
  if (status.ok()) status = stream_of(call).connect(stream);
  return to_ffi(status);
}
XLA_FFI_DEFINE_HANDLER(kConnect, connect_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Ret<Buffer>());  // mem

ffi::Error open_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer gate, Buffer up,
                     Buffer down, Buffer b_gate, Buffer b_up, Buffer b_down, Result mem_out, Result y) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  CallSpec spec;
  ExpertWeights weights;
  RingCall call;
  Status status = find_layer(ordinal, attrs, mem_in, *mem_out, operands, *y, &spec, &weights, &call);
  if (status.ok()) status = stream_of(call).open(spec, weights, stream);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kOpen, open_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // gate
                           .Arg<Buffer>()    // up
                           .Arg<Buffer>()    // down
                           .Arg<Buffer>()    // b_gate
                           .Arg<Buffer>()    // b_up
                           .Arg<Buffer>()    // b_down
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>());  // y [T, H]

// The ring of a call on a stream that must be open, its y carried over.
Status resume_ring(const char* what, cudaStream_t stream, int32_t ordinal, AttrReader& attrs, Buffer mem_in,
                   Buffer y_in, Result mem_out, Result y_out, RingCall* call) {
  STREAMMOE_RETURN_IF_ERROR(find_open_ring(what, ordinal, attrs, mem_in, *mem_out, call));
  STREAMMOE_RETURN_IF_ERROR(expect_y(stream_of(*call).spec(), y_in));
  return carry_on(stream, "y", y_in, *y_out);
}

// The chunk of a publication as the host knows it.
Status read_chunk(const cuda::Stream& stream, Phase phase, AttrReader& attrs, int64_t* chunk) {
  *chunk = attrs.i64("static_chunk");
  if (*chunk < 0) *chunk = stream.next_chunk(phase);
  return attrs.status();
}

Status publish_route(RingCall* call, cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary,
                     Buffer mem_in, Buffer y_in, Buffer chunk, Buffer ids, Buffer topk_weights, Result mem_out,
                     Result y_out) {
  AttrReader attrs(dictionary);
  STREAMMOE_RETURN_IF_ERROR(resume_ring("publish_route", stream, ordinal, attrs, mem_in, y_in, mem_out, y_out, call));
  cuda::Stream& side = stream_of(*call);
  const CallSpec& spec = side.spec();
  int64_t index = 0;
  STREAMMOE_RETURN_IF_ERROR(read_chunk(side, Phase::kPublishRoute, attrs, &index));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("chunk", chunk, ffi::DataType::S32, 1));
  const int64_t top_k = spec.problem.top_k;
  STREAMMOE_RETURN_IF_ERROR(expect_chunk(spec, index, "topk_ids", ids, ffi::DataType::S32, top_k));
  STREAMMOE_RETURN_IF_ERROR(expect_chunk(spec, index, "topk_weights", topk_weights, ffi::DataType::F32, top_k));
  return side.publish_route(index, chunk.typed_data<int32_t>(), ids.typed_data<int32_t>(),
                            topk_weights.typed_data<float>(), y_out->untyped_data(), stream);
}

ffi::Error publish_route_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in,
                              Buffer chunk, Buffer ids, Buffer topk_weights, Result mem_out, Result y_out) {
  RingCall call;
  const Status status =
      publish_route(&call, stream, ordinal, attrs, mem_in, y_in, chunk, ids, topk_weights, mem_out, y_out);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kPublishRoute, publish_route_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // y
                           .Arg<Buffer>()    // chunk [] i32
                           .Arg<Buffer>()    // topk_ids [c, K] i32
                           .Arg<Buffer>()    // topk_weights [c, K] f32
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>());  // y

Status publish_layout(RingCall* call, cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary,
                      Buffer mem_in, Buffer y_in, Buffer chunk, Buffer x, Result mem_out, Result y_out) {
  AttrReader attrs(dictionary);
  STREAMMOE_RETURN_IF_ERROR(resume_ring("publish_layout", stream, ordinal, attrs, mem_in, y_in, mem_out, y_out, call));
  cuda::Stream& side = stream_of(*call);
  const CallSpec& spec = side.spec();
  int64_t index = 0;
  STREAMMOE_RETURN_IF_ERROR(read_chunk(side, Phase::kPublishLayout, attrs, &index));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("chunk", chunk, ffi::DataType::S32, 1));
  STREAMMOE_RETURN_IF_ERROR(expect_chunk(spec, index, "x", x, element_type(spec.problem.dtype), spec.problem.hidden));
  return side.publish_layout(index, chunk.typed_data<int32_t>(), x.untyped_data(), y_out->untyped_data(), stream);
}

ffi::Error publish_layout_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in,
                               Buffer chunk, Buffer x, Result mem_out, Result y_out) {
  RingCall call;
  const Status status = publish_layout(&call, stream, ordinal, attrs, mem_in, y_in, chunk, x, mem_out, y_out);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kPublishLayout, publish_layout_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // y
                           .Arg<Buffer>()    // chunk [] i32
                           .Arg<Buffer>()    // x [c, H]
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>());  // y

ffi::Error publish_external_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary dictionary, Buffer mem_in,
                                 Buffer y_in, Result mem_out, Result y_out) {
  RingCall call;
  AttrReader attrs(dictionary);
  Status status = resume_ring("publish_external", stream, ordinal, attrs, mem_in, y_in, mem_out, y_out, &call);
  if (status.ok()) {
    int64_t chunk = 0;
    status = read_chunk(stream_of(call), Phase::kPublishRoute, attrs, &chunk);
    if (status.ok()) status = stream_of(call).publish_external(chunk, stream);
  }
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kPublishExternal, publish_external_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // y
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>());  // y

Status close_stream(RingCall* call, cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary,
                    Buffer mem_in, Buffer y_in, const Buffer (&operands)[kNumWeights], Result mem_out, Result y_out,
                    Result expert_rows, Result counts) {
  AttrReader attrs(dictionary);
  STREAMMOE_RETURN_IF_ERROR(resume_ring("close_stream", stream, ordinal, attrs, mem_in, y_in, mem_out, y_out, call));
  cuda::Stream& side = stream_of(*call);
  STREAMMOE_RETURN_IF_ERROR(expect_stats(side.spec(), *expert_rows, *counts));
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(side.spec().problem, operands, &weights));
  return side.close(weights, y_out->untyped_data(), expert_rows->typed_data<int32_t>(), counts->typed_data<int32_t>(),
                    stream);
}

ffi::Error close_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in,
                      Buffer gate, Buffer up, Buffer down, Buffer b_gate, Buffer b_up, Buffer b_down, Result mem_out,
                      Result y_out, Result expert_rows, Result counts) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  const Status status =
      close_stream(&call, stream, ordinal, attrs, mem_in, y_in, operands, mem_out, y_out, expert_rows, counts);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kClose, close_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // y
                           .Arg<Buffer>()    // gate
                           .Arg<Buffer>()    // up
                           .Arg<Buffer>()    // down
                           .Arg<Buffer>()    // b_gate
                           .Arg<Buffer>()    // b_up
                           .Arg<Buffer>()    // b_down
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>()    // y
                           .Ret<Buffer>()    // expert_rows [L] i32
                           .Ret<Buffer>());  // counts [3] i32: dropped, invalid, masked

// The batch-ready layer over ranks: a stream whose chunks are all there, on XLA's stream alone.
Status ring_forward(RingCall* call, cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary,
                    Buffer mem_in, Buffer x, Buffer ids, Buffer topk_weights, const Buffer (&operands)[kNumWeights],
                    Result mem_out, Result y, Result expert_rows, Result counts) {
  CallSpec spec;
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(find_layer(ordinal, dictionary, mem_in, *mem_out, operands, *y, &spec, &weights, call));
  const int64_t hidden = spec.problem.hidden, top_k = spec.problem.top_k, item = dtype_bytes(spec.problem.dtype);
  STREAMMOE_RETURN_IF_ERROR(expect_batch(spec.problem, spec.num_tokens, x, ids, topk_weights));
  STREAMMOE_RETURN_IF_ERROR(expect_stats(spec, *expert_rows, *counts));
  if (spec.overlap) return error(Code::kInvalidArgument, "ring_forward runs on one stream: overlap must be 0");
  cuda::Stream& side = stream_of(*call);
  STREAMMOE_RETURN_IF_ERROR(side.open(spec, weights, stream));
  for (int64_t chunk = 0; chunk < spec.num_chunks; ++chunk) {
    const int64_t start = spec.chunk_bounds(chunk).first;
    const auto* rows = static_cast<const uint8_t*>(x.untyped_data()) + start * hidden * item;
    STREAMMOE_RETURN_IF_ERROR(side.publish_layout(chunk, nullptr, rows, y->untyped_data(), stream));
    STREAMMOE_RETURN_IF_ERROR(side.publish_route(chunk, nullptr, ids.typed_data<int32_t>() + start * top_k,
                                                 topk_weights.typed_data<float>() + start * top_k, y->untyped_data(),
                                                 stream));
  }
  return side.close(weights, y->untyped_data(), expert_rows->typed_data<int32_t>(), counts->typed_data<int32_t>(),
                    stream);
}

ffi::Error ring_forward_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer x,
                             Buffer ids, Buffer topk_weights, Buffer gate, Buffer up, Buffer down, Buffer b_gate,
                             Buffer b_up, Buffer b_down, Result mem_out, Result y, Result expert_rows, Result counts) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  const Status status = ring_forward(&call, stream, ordinal, attrs, mem_in, x, ids, topk_weights, operands, mem_out, y,
                                     expert_rows, counts);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kRingForward, ring_forward_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()   // mem
                           .Arg<Buffer>()   // x [T, H]
                           .Arg<Buffer>()   // topk_ids [T, K] i32
                           .Arg<Buffer>()   // topk_weights [T, K] f32
                           .Arg<Buffer>()   // gate
                           .Arg<Buffer>()   // up
                           .Arg<Buffer>()   // down
                           .Arg<Buffer>()   // b_gate
                           .Arg<Buffer>()   // b_up
                           .Arg<Buffer>()   // b_down
                           .Ret<Buffer>()   // mem
                           .Ret<Buffer>()   // y [T, H]
                           .Ret<Buffer>()   // expert_rows [L] i32
                           .Ret<Buffer>(),  // counts [3] i32: dropped, invalid, masked
                       {ffi::Traits::kCmdBufferCompatible});

// The batch-ready layer on one GPU needs no slot: it reads its operands where they are and leaves its mark on the
// ring's counters only.
Status ring_forward_local(RingCall* call, cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& dictionary,
                          Buffer mem_in, Buffer x, Buffer ids, Buffer topk_weights,
                          const Buffer (&operands)[kNumWeights], Result mem_out, Result y, Result workspace) {
  CallSpec spec;
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(find_layer(ordinal, dictionary, mem_in, *mem_out, operands, *y, &spec, &weights, call));
  STREAMMOE_RETURN_IF_ERROR(spec.check(call->ring->shape()));
  STREAMMOE_RETURN_IF_ERROR(stream_of(*call).advance(spec, stream));
  return cuda_forward(stream, spec.problem, spec.capacity, weights, x, ids, topk_weights, *y, *workspace);
}

ffi::Error ring_forward_local_impl(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer x,
                                   Buffer ids, Buffer topk_weights, Buffer gate, Buffer up, Buffer down, Buffer b_gate,
                                   Buffer b_up, Buffer b_down, Result mem_out, Result y, Result workspace) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  const Status status =
      ring_forward_local(&call, stream, ordinal, attrs, mem_in, x, ids, topk_weights, operands, mem_out, y, workspace);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kRingForwardLocal, ring_forward_local_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()   // mem
                           .Arg<Buffer>()   // x [T, H]
                           .Arg<Buffer>()   // topk_ids [T, K] i32
                           .Arg<Buffer>()   // topk_weights [T, K] f32
                           .Arg<Buffer>()   // gate
                           .Arg<Buffer>()   // up
                           .Arg<Buffer>()   // down
                           .Arg<Buffer>()   // b_gate
                           .Arg<Buffer>()   // b_up
                           .Arg<Buffer>()   // b_down
                           .Ret<Buffer>()   // mem
                           .Ret<Buffer>()   // y [T, H]
                           .Ret<Buffer>(),  // workspace u8
                       {ffi::Traits::kCmdBufferCompatible});

ffi::Error after_impl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  for (size_t n = 0; n < rets.size(); ++n) {
    const auto in = args.get<Buffer>(n);
    auto out = rets.get<Buffer>(n);
    if (in.has_error()) return in.error();
    if (out.has_error()) return out.error();
    if (const Status status = carry_on(stream, "value", *in, **out); !status.ok()) return to_ffi(status);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(kAfter, after_impl,
                       ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets());

}  // namespace

std::vector<CudaHandler> cuda_ring_handlers() {
  return {{"register", "execute", reinterpret_cast<void*>(+kRegister)},
          {"open", "execute", reinterpret_cast<void*>(+kOpen)},
          {"publish_route", "execute", reinterpret_cast<void*>(+kPublishRoute)},
          {"publish_layout", "execute", reinterpret_cast<void*>(+kPublishLayout)},
          {"publish_external", "execute", reinterpret_cast<void*>(+kPublishExternal)},
          {"close", "execute", reinterpret_cast<void*>(+kClose)},
          {"ring_forward", "execute", reinterpret_cast<void*>(+kRingForward)},
          {"ring_forward_local", "execute", reinterpret_cast<void*>(+kRingForwardLocal)},
          {"connect", "execute", reinterpret_cast<void*>(+kConnect)},
          {"after", "execute", reinterpret_cast<void*>(+kAfter)}};
}

std::shared_ptr<RankStream> make_cuda_stream(Ring* ring, int64_t group, int64_t rank) {
  return std::make_shared<cuda::Stream>(ring, group, rank);
}

}  // namespace streammoe::ffi_glue
