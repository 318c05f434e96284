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
// are operands of close too, so that XLA keeps them alive while waves read them.
#include "ffi/ring.h"

#include <cstring>

#include "ffi/decode.h"

namespace streammoe::ffi_glue {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// An error after the ring was found costs the ring (its memory was donated): peers are told and the worker ends before
// the error is reported, since XLA frees the call's memory next.
ffi::Error finish(const RingCall& call, const Status& status) {
  // A stream that is open is ended even when its ring was refused: its worker may be inside an expert pass.
  if (!status.ok() && call.member != nullptr && (call.in_place || call.member->stream->is_open())) {
    call.member->stream->abort(status);
  }
  return to_ffi(status);
}

// XLA aliases y in and out; should it ever copy instead, the rows written so far must follow.
void carry(const Buffer& in, Result& out) {
  if (out->untyped_data() != in.untyped_data()) std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
}

void write_stats(const cpu::CallStats& stats, Result& expert_rows, Result& counts) {
  std::memcpy(expert_rows->untyped_data(), stats.expert_rows.data(), stats.expert_rows.size() * sizeof(int32_t));
  int32_t* out = counts->typed_data<int32_t>();
  out[0] = stats.dropped, out[1] = stats.invalid, out[2] = stats.masked;
}

Status register_ring(int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in, Result mem_out) {
  AttrReader attrs(dictionary);
  const std::string name = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  const auto ring = Registry::get().find(name);
  if (ring == nullptr)
    return error(Code::kNotFound, "ring '", name, "' was not created before its memory is registered");
  Member* member = ring->find_member(ordinal);
  if (member == nullptr) return error(Code::kNotFound, "ring '", name, "' has no rank on device ", ordinal);
  if (mem_in.untyped_data() != mem_out->untyped_data()) {
    return error(Code::kFailedPrecondition, "ring '", name, "': its memory was copied while it was registered");
  }
  member->registered = mem_in.untyped_data();
  if (!ring->shared()) {
    const int64_t bytes = ring->layout().total;
    if (static_cast<int64_t>(mem_in.size_bytes()) != bytes) {
      return error(Code::kFailedPrecondition, "ring '", name, "' needs ", bytes, " bytes, its memory has ",
                   mem_in.size_bytes());
    }
    ring->set_base(member->group, member->rank, static_cast<uint8_t*>(mem_out->untyped_data()));
  }
  uint8_t* base = ring->base(member->group, member->rank);
  std::memset(base, 0, static_cast<size_t>(ring->layout().slots));
  reinterpret_cast<RingHeader*>(base + ring->layout().header)->magic = kRingMagic;
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
                   const Buffer (&operands)[kNumWeights], RingCall* call) {
  AttrReader attrs(dictionary);
  cpu::CallSpec spec = read_call(attrs);
  const std::string name = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(find_ring(name, ordinal, mem_in, *mem_out, call));
  const RingShape& shape = call->ring->shape();
  if (shape.hidden != spec.problem.hidden || shape.top_k != spec.problem.top_k ||
      shape.itemsize != dtype_bytes(spec.problem.dtype) || spec.chunk_tokens > shape.chunk_tokens) {
    return error(Code::kFailedPrecondition, "ring '", name, "' was made for another config: hidden ", shape.hidden,
                 ", top_k ", shape.top_k, ", itemsize ", shape.itemsize, ", chunk_tokens ", shape.chunk_tokens,
                 "; the call has hidden ", spec.problem.hidden, ", top_k ", spec.problem.top_k, ", itemsize ",
                 dtype_bytes(spec.problem.dtype), ", chunks of ", spec.chunk_tokens);
  }
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(spec.problem, operands, &weights));
  return call->member->stream->open(spec, weights);
}

ffi::Error open_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer gate, Buffer up, Buffer down,
                     Buffer b_gate, Buffer b_up, Buffer b_down, Result mem_out, Result y) {
  (void)y;  // allocated by XLA here, written by later calls
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  const Status status = open_stream(ordinal, attrs, mem_in, mem_out, operands, &call);
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

Status find_open_ring(int32_t ordinal, const ffi::Dictionary& dictionary, Buffer mem_in, Result mem_out,
                      RingCall* call) {
  AttrReader attrs(dictionary);
  const std::string name = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  return find_ring(name, ordinal, mem_in, *mem_out, call);
}

ffi::Error publish_route_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in, Buffer chunk,
                              Buffer ids, Buffer topk_weights, Result mem_out, Result y_out) {
  carry(y_in, y_out);
  RingCall call;
  Status status = find_open_ring(ordinal, attrs, mem_in, mem_out, &call);
  if (status.ok()) {
    status = call.member->stream->publish_route(*chunk.typed_data<int32_t>(), ids.typed_data<int32_t>(),
                                                topk_weights.typed_data<float>(), y_out->untyped_data());
  }
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

ffi::Error publish_layout_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in, Buffer chunk,
                               Buffer x, Result mem_out, Result y_out) {
  carry(y_in, y_out);
  RingCall call;
  Status status = find_open_ring(ordinal, attrs, mem_in, mem_out, &call);
  if (status.ok()) {
    status = call.member->stream->publish_layout(*chunk.typed_data<int32_t>(), x.untyped_data(), y_out->untyped_data());
  }
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

ffi::Error close_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer y_in, Buffer gate, Buffer up,
                      Buffer down, Buffer b_gate, Buffer b_up, Buffer b_down, Result mem_out, Result y_out,
                      Result expert_rows, Result counts) {
  (void)gate, (void)up, (void)down, (void)b_gate, (void)b_up, (void)b_down;  // kept alive until here, see above
  carry(y_in, y_out);
  RingCall call;
  cpu::CallStats stats;
  Status status = find_open_ring(ordinal, attrs, mem_in, mem_out, &call);
  if (status.ok()) status = call.member->stream->close(y_out->untyped_data(), &stats);
  if (status.ok()) write_stats(stats, expert_rows, counts);
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
                    cpu::CallStats* stats) {
  STREAMMOE_RETURN_IF_ERROR(open_stream(ordinal, dictionary, mem_in, mem_out, operands, call));
  cpu::Stream& stream = *call->member->stream;
  const RingShape& shape = call->ring->shape();
  for (int64_t chunk = 0; chunk < stream.spec().num_chunks; ++chunk) {
    const int64_t start = stream.spec().chunk_bounds(chunk).first;
    STREAMMOE_RETURN_IF_ERROR(stream.publish_route(chunk, ids.typed_data<int32_t>() + start * shape.top_k,
                                                   topk_weights.typed_data<float>() + start * shape.top_k,
                                                   y->untyped_data()));
    STREAMMOE_RETURN_IF_ERROR(stream.publish_layout(
        chunk, static_cast<const uint8_t*>(x.untyped_data()) + start * shape.hidden * shape.itemsize,
        y->untyped_data()));
  }
  return stream.close(y->untyped_data(), stats);
}

ffi::Error ring_forward_impl(int32_t ordinal, ffi::Dictionary attrs, Buffer mem_in, Buffer x, Buffer ids,
                             Buffer topk_weights, Buffer gate, Buffer up, Buffer down, Buffer b_gate, Buffer b_up,
                             Buffer b_down, Result mem_out, Result y, Result expert_rows, Result counts) {
  const Buffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  RingCall call;
  cpu::CallStats stats;
  const Status status = ring_forward(&call, ordinal, attrs, mem_in, x, ids, topk_weights, operands, mem_out, y, &stats);
  if (status.ok()) write_stats(stats, expert_rows, counts);
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
