// Handlers that work on a ring: each takes the ring's memory as its first operand and returns it in place.
//
//   register        mem -> mem                          called by make_ring only: notes the address, zeroes control
//   open            mem, experts -> mem, y
//   publish_route   mem, y, chunk, ids, weights -> mem, y
//   publish_layout  mem, y, chunk, x -> mem, y
//   close           mem, y, experts -> mem, y, stats
//   ring_forward    mem, x, ids, weights, experts -> mem, y, stats   open, publish all, close in one call
//
// `y` is threaded through a stream because rows of a completed macro-chunk leave the pool while it is open. The experts
// are operands of close too, so that XLA keeps them alive, and where they are, while waves read them.
#include "ffi/ring.h"

#include <cstring>

#include "cpu/stream.h"
#include "ffi/decode.h"

namespace streammoe::ffi_glue {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

cpu::Stream& stream_of(const RingCall& call) { return static_cast<cpu::Stream&>(*call.member->stream); }

void write_stats(const CallStats& stats, Result& expert_rows, Result& counts) {
  std::memcpy(expert_rows->untyped_data(), stats.expert_rows.data(), stats.expert_rows.size() * sizeof(int32_t));
  int32_t* out = counts->typed_data<int32_t>();
  out[0] = stats.dropped, out[1] = stats.invalid, out[2] = stats.masked;
}

Status register_ring(int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in, Result mem_out) {
  AttrReader attrs(dictionary);
  RingCall call;
  STREAMMOE_RETURN_IF_ERROR(register_memory(attrs, ordinal, mem_in, *mem_out, &call));
  const RingLayout& at = call.ring->layout();
  uint8_t* base = call.ring->base(call.member->group, call.member->rank);
  std::memset(base, 0, static_cast<size_t>(at.slots));
  reinterpret_cast<RingHeader*>(base + at.header)->magic = kRingMagic;
  return {};
}

ffi::Error register_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Result mem_out) {
  return to_ffi(register_ring(ordinal, attrs, mem_in, mem_out));
}
XLA_FFI_DEFINE_HANDLER(kRegister, register_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Ret<Buffer>());  // mem

// Opens the stream of a call: attributes, experts and the ring must fit each other.
Status open_stream(int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in, Result mem_out,
                   const Buffer (&operands)[kNumWeights], const Buffer& y, ExpertWeights* weights, RingCall* call) {
  CallSpec spec;
  STREAMMOE_RETURN_IF_ERROR(find_layer(ordinal, dictionary, mem_in, *mem_out, operands, y, &spec, weights, call));
  return stream_of(*call).open(spec, *weights);
}

ffi::Error open_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer gate, Buffer up, Buffer down,
                     Buffer b_gate, Buffer b_up, Buffer b_down, Result mem_out, Result y) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  ExpertWeights weights;
  RingCall call;
  // y is allocated by XLA here and written by later calls.
  const Status status = open_stream(ordinal, attrs, mem_in, mem_out, operands, *y, &weights, &call);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kOpen, open_impl,
                       ffi::Ffi::Bind()
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

// The ring of a call on a stream that must be open, its y carried over: XLA aliases y in and out, but should it ever
// copy instead, the rows written so far must follow.
Status resume_ring(const char* what, int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in, Buffer y_in,
                   Result mem_out, Result y_out, RingCall* call) {
  AttrReader attrs(dictionary);
  STREAMMOE_RETURN_IF_ERROR(find_open_ring(what, ordinal, attrs, mem_in, *mem_out, call));
  STREAMMOE_RETURN_IF_ERROR(expect_y(stream_of(*call).spec(), y_in));
  return carry("y", y_in, *y_out);
}

Status publish_route(RingCall* call, int32_t ordinal, const ffi::Dictionary& attrs, Buffer mem_in, Buffer y_in,
                     Buffer chunk, Buffer ids, Buffer topk_weights, Result mem_out, Result y_out) {
  STREAMMOE_RETURN_IF_ERROR(resume_ring("publish_route", ordinal, attrs, mem_in, y_in, mem_out, y_out, call));
  cpu::Stream& stream = stream_of(*call);
  const CallSpec& spec = stream.spec();
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("chunk", chunk, ffi::DataType::S32, 1));
  const int64_t index = *chunk.typed_data<int32_t>(), top_k = spec.problem.top_k;
  STREAMMOE_RETURN_IF_ERROR(expect_chunk(spec, index, "topk_ids", ids, ffi::DataType::S32, top_k));
  STREAMMOE_RETURN_IF_ERROR(expect_chunk(spec, index, "topk_weights", topk_weights, ffi::DataType::F32, top_k));
  return stream.publish_route(index, ids.typed_data<int32_t>(), topk_weights.typed_data<float>(),
                              y_out->untyped_data());
}

ffi::Error publish_route_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in, Buffer chunk,
                              Buffer ids, Buffer topk_weights, Result mem_out, Result y_out) {
  RingCall call;
  const Status status = publish_route(&call, ordinal, attrs, mem_in, y_in, chunk, ids, topk_weights, mem_out, y_out);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kPublishRoute, publish_route_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // y
                           .Arg<Buffer>()    // chunk [] i32
                           .Arg<Buffer>()    // topk_ids [c, K] i32
                           .Arg<Buffer>()    // topk_weights [c, K] f32
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>());  // y

Status publish_layout(RingCall* call, int32_t ordinal, const ffi::Dictionary& attrs, Buffer mem_in, Buffer y_in,
                      Buffer chunk, Buffer x, Result mem_out, Result y_out) {
  STREAMMOE_RETURN_IF_ERROR(resume_ring("publish_layout", ordinal, attrs, mem_in, y_in, mem_out, y_out, call));
  cpu::Stream& stream = stream_of(*call);
  const CallSpec& spec = stream.spec();
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("chunk", chunk, ffi::DataType::S32, 1));
  const int64_t index = *chunk.typed_data<int32_t>();
  STREAMMOE_RETURN_IF_ERROR(expect_chunk(spec, index, "x", x, element_type(spec.problem.dtype), spec.problem.hidden));
  return stream.publish_layout(index, x.untyped_data(), y_out->untyped_data());
}

ffi::Error publish_layout_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in, Buffer chunk,
                               Buffer x, Result mem_out, Result y_out) {
  RingCall call;
  const Status status = publish_layout(&call, ordinal, attrs, mem_in, y_in, chunk, x, mem_out, y_out);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kPublishLayout, publish_layout_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // y
                           .Arg<Buffer>()    // chunk [] i32
                           .Arg<Buffer>()    // x [c, H]
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>());  // y

Status close_stream(RingCall* call, int32_t ordinal, const ffi::Dictionary& attrs, Buffer mem_in, Buffer y_in,
                    const Buffer (&operands)[kNumWeights], Result mem_out, Result y_out, Result expert_rows,
                    Result counts) {
  STREAMMOE_RETURN_IF_ERROR(resume_ring("close_stream", ordinal, attrs, mem_in, y_in, mem_out, y_out, call));
  cpu::Stream& stream = stream_of(*call);
  STREAMMOE_RETURN_IF_ERROR(expect_stats(stream.spec(), *expert_rows, *counts));
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(stream.spec().problem, operands, &weights));
  CallStats stats;
  STREAMMOE_RETURN_IF_ERROR(stream.close(weights, y_out->untyped_data(), &stats));
  write_stats(stats, expert_rows, counts);
  return {};
}

ffi::Error close_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in, Buffer gate, Buffer up,
                      Buffer down, Buffer b_gate, Buffer b_up, Buffer b_down, Result mem_out, Result y_out,
                      Result expert_rows, Result counts) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  const Status status =
      close_stream(&call, ordinal, attrs, mem_in, y_in, operands, mem_out, y_out, expert_rows, counts);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kClose, close_impl,
                       ffi::Ffi::Bind()
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

Status ring_forward(RingCall* call, int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in, Buffer x,
                    Buffer ids, Buffer topk_weights, const Buffer (&operands)[kNumWeights], Result mem_out, Result y,
                    Result expert_rows, Result counts) {
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(open_stream(ordinal, dictionary, mem_in, mem_out, operands, *y, &weights, call));
  cpu::Stream& stream = stream_of(*call);
  const CallSpec& spec = stream.spec();
  const RingShape& shape = call->ring->shape();
  STREAMMOE_RETURN_IF_ERROR(expect_batch(spec.problem, spec.num_tokens, x, ids, topk_weights));
  STREAMMOE_RETURN_IF_ERROR(expect_stats(spec, *expert_rows, *counts));
  for (int64_t chunk = 0; chunk < spec.num_chunks; ++chunk) {
    const int64_t start = spec.chunk_bounds(chunk).first;
    STREAMMOE_RETURN_IF_ERROR(stream.publish_route(chunk, ids.typed_data<int32_t>() + start * shape.top_k,
                                                   topk_weights.typed_data<float>() + start * shape.top_k,
                                                   y->untyped_data()));
    STREAMMOE_RETURN_IF_ERROR(stream.publish_layout(
        chunk, static_cast<const uint8_t*>(x.untyped_data()) + start * shape.hidden * shape.itemsize,
        y->untyped_data()));
  }
  CallStats stats;
  STREAMMOE_RETURN_IF_ERROR(stream.close(weights, y->untyped_data(), &stats));
  write_stats(stats, expert_rows, counts);
  return {};
}

ffi::Error ring_forward_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer x, Buffer ids,
                             Buffer topk_weights, Buffer gate, Buffer up, Buffer down, Buffer b_gate, Buffer b_up,
                             Buffer b_down, Result mem_out, Result y, Result expert_rows, Result counts) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  const Status status =
      ring_forward(&call, ordinal, attrs, mem_in, x, ids, topk_weights, operands, mem_out, y, expert_rows, counts);
  return finish(call, status);
}
XLA_FFI_DEFINE_HANDLER(kRingForward, ring_forward_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<Buffer>()    // mem
                           .Arg<Buffer>()    // x [T, H]
                           .Arg<Buffer>()    // topk_ids [T, K] i32
                           .Arg<Buffer>()    // topk_weights [T, K] f32
                           .Arg<Buffer>()    // gate
                           .Arg<Buffer>()    // up
                           .Arg<Buffer>()    // down
                           .Arg<Buffer>()    // b_gate
                           .Arg<Buffer>()    // b_up
                           .Arg<Buffer>()    // b_down
                           .Ret<Buffer>()    // mem
                           .Ret<Buffer>()    // y [T, H]
                           .Ret<Buffer>()    // expert_rows [L] i32
                           .Ret<Buffer>());  // counts [3] i32: dropped, invalid, masked

}  // namespace

std::vector<std::pair<const char*, void*>> ring_handlers() {
  return {{"register", reinterpret_cast<void*>(+kRegister)},
          {"open", reinterpret_cast<void*>(+kOpen)},
          {"publish_route", reinterpret_cast<void*>(+kPublishRoute)},
          {"publish_layout", reinterpret_cast<void*>(+kPublishLayout)},
          {"close", reinterpret_cast<void*>(+kClose)},
          {"ring_forward", reinterpret_cast<void*>(+kRingForward)}};
}

}  // namespace streammoe::ffi_glue
