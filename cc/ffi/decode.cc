// Decoding of attributes and buffers. See decode.h for the contract.
#include "ffi/decode.h"

#include <algorithm>
#include <cstring>

namespace streammoe::ffi_glue {

ffi::Error to_ffi(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case Code::kFailedPrecondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message());
    case Code::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message());
    case Code::kAborted:
      return ffi::Error(ffi::ErrorCode::kAborted, status.message());
    case Code::kNotFound:
      return ffi::Error(ffi::ErrorCode::kNotFound, status.message());
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message());
}

template <class T>
T AttrReader::read(const char* name, T fallback) {
  auto value = attrs_.get<T>(name);
  if (value.has_value()) return *value;
  if (status_.ok()) status_ = error(Code::kInvalidArgument, "attribute ", name, ": ", value.error().message());
  return fallback;
}

int64_t AttrReader::i64(const char* name) { return read<int64_t>(name, 0); }
int32_t AttrReader::i32(const char* name) { return read<int32_t>(name, 0); }
float AttrReader::f32(const char* name) { return read<float>(name, 0.f); }
std::string AttrReader::text(const char* name) { return std::string(read<std::string_view>(name, {})); }
std::vector<int64_t> AttrReader::list(const char* name) {
  const auto span = read<ffi::Span<const int64_t>>(name, {});
  return {span.begin(), span.end()};
}

ExpertProblem read_problem(AttrReader& attrs) {
  ExpertProblem problem;
  problem.num_experts = attrs.i64("num_experts");
  problem.hidden = attrs.i64("hidden");
  problem.intermediate = attrs.i64("intermediate");
  problem.top_k = attrs.i64("top_k");
  problem.dtype = static_cast<DType>(attrs.i32("dtype"));
  problem.activation = static_cast<Activation>(attrs.i32("activation"));
  problem.limit = attrs.f32("limit");
  problem.block_m = attrs.i64("block_m");
  problem.threads = attrs.i32("threads");
  const int64_t smallest =
      std::min({problem.num_experts, problem.hidden, problem.intermediate, problem.top_k, problem.block_m});
  if (smallest < 1) {
    attrs.fail(error(Code::kInvalidArgument,
                     "num_experts, hidden, intermediate, top_k and block_m must be at least 1, got ", smallest));
  }
  if (problem.dtype < DType::kF32 || problem.dtype > DType::kF16 || problem.activation < Activation::kSwiGLU ||
      problem.activation > Activation::kReLU2) {
    attrs.fail(error(Code::kInvalidArgument, "unknown dtype code ", static_cast<int32_t>(problem.dtype),
                     " or activation code ", static_cast<int32_t>(problem.activation)));
  }
  return problem;
}

CallSpec read_call(AttrReader& attrs) {
  CallSpec spec;
  spec.problem = read_problem(attrs);
  spec.num_tokens = attrs.i64("num_tokens");
  spec.chunk_tokens = attrs.i64("chunk_tokens");
  spec.macro_tokens = attrs.i64("macro_tokens");
  spec.num_chunks = attrs.i64("num_chunks");
  spec.macro_ends = attrs.list("macro_ends");
  spec.wave_ends = attrs.list("wave_ends");
  spec.min_carry_rows = attrs.i64("min_carry_rows");
  spec.capacity = attrs.i64("capacity");
  spec.packed = attrs.i32("packed") != 0;
  spec.overlap = attrs.i32("overlap") != 0;
  spec.checks = attrs.i32("checks") != 0;
  spec.producer_sms = attrs.i32("producer_sms");
  return spec;
}

ffi::DataType element_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ffi::DataType::F32;
    case DType::kBF16:
      return ffi::DataType::BF16;
    case DType::kF16:
      return ffi::DataType::F16;
  }
  return ffi::DataType::INVALID;
}

Status expect_buffer(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t num_elements) {
  if (buffer.element_type() == type && static_cast<int64_t>(buffer.element_count()) == num_elements) return {};
  return error(Code::kInvalidArgument, name, " must have ", num_elements, " elements of type ", type, ", got ",
               buffer.element_count(), " of type ", buffer.element_type());
}

Status carry(const char* name, const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  const auto num_elements = static_cast<int64_t>(in.element_count());
  STREAMMOE_RETURN_IF_ERROR(expect_buffer(name, out, in.element_type(), num_elements));
  if (out.untyped_data() != in.untyped_data()) std::memcpy(out.untyped_data(), in.untyped_data(), in.size_bytes());
  return {};
}

int64_t tokens_of(const ffi::AnyBuffer& ids, const ExpertProblem& p) {
  return static_cast<int64_t>(ids.element_count()) / p.top_k;
}

Status expect_batch(const ExpertProblem& p, int64_t num_tokens, const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids,
                    const ffi::AnyBuffer& topk_weights) {
  const int64_t num_pairs = num_tokens * p.top_k;
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_ids", ids, ffi::DataType::S32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_weights", topk_weights, ffi::DataType::F32, num_pairs));
  return expect_buffer("x", x, element_type(p.dtype), num_tokens * p.hidden);
}

Status expect_gate_up(const ExpertProblem& problem, int64_t num_tokens, const ffi::AnyBuffer& gate_up) {
  return expect_buffer("gate_up", gate_up, element_type(problem.dtype),
                       num_tokens * problem.top_k * gate_up_width(problem));
}

Status expect_rows(const ExpertProblem& p, int64_t num_tokens, const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids,
                   const ffi::AnyBuffer& rows, const ffi::AnyBuffer& dropped, const ffi::AnyBuffer& expert_rows) {
  const int64_t num_pairs = num_tokens * p.top_k;
  const ffi::DataType type = element_type(p.dtype);
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("local ids", ids, ffi::DataType::S32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("x", x, type, num_tokens * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("rows", rows, type, num_pairs * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("dropped", dropped, ffi::DataType::U8, num_pairs));
  return expect_buffer("expert_rows", expert_rows, ffi::DataType::S32, p.num_experts);
}

Status expect_combine(const ExpertProblem& p, int64_t num_tokens, const ffi::AnyBuffer& rows, const ffi::AnyBuffer& ids,
                      const ffi::AnyBuffer& topk_weights, const ffi::AnyBuffer& dropped, const ffi::AnyBuffer& y) {
  const int64_t num_pairs = num_tokens * p.top_k;
  const ffi::DataType type = element_type(p.dtype);
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_ids", ids, ffi::DataType::S32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_weights", topk_weights, ffi::DataType::F32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("dropped", dropped, ffi::DataType::U8, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("rows", rows, type, num_pairs * p.hidden));
  return expect_buffer("y", y, type, num_tokens * p.hidden);
}

Status expect_y(const CallSpec& spec, const ffi::AnyBuffer& y) {
  return expect_buffer("y", y, element_type(spec.problem.dtype), spec.num_tokens * spec.problem.hidden);
}

Status expect_stats(const CallSpec& spec, const ffi::AnyBuffer& expert_rows, const ffi::AnyBuffer& counts) {
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("expert_rows", expert_rows, ffi::DataType::S32, spec.problem.num_experts));
  return expect_buffer("counts", counts, ffi::DataType::S32, 3);
}

Status expect_chunk(const CallSpec& spec, int64_t chunk, const char* name, const ffi::AnyBuffer& buffer,
                    ffi::DataType type, int64_t width) {
  if (chunk < 0 || chunk >= spec.num_chunks) return {};
  const auto [start, stop] = spec.chunk_bounds(chunk);
  return expect_buffer(name, buffer, type, (stop - start) * width);
}

Status expect_layer(const Ring& ring, const CallSpec& spec) {
  const RingShape& shape = ring.shape();
  const bool same_pool = !shape.on_gpu() || (shape.num_experts == spec.problem.num_experts &&
                                             shape.intermediate == spec.problem.intermediate);
  if (shape.hidden == spec.problem.hidden && shape.top_k == spec.problem.top_k && same_pool &&
      shape.itemsize == dtype_bytes(spec.problem.dtype) && spec.chunk_tokens <= shape.most_chunk_tokens()) {
    return {};
  }
  const auto experts = [&](int64_t num_experts, int64_t intermediate) {
    return same_pool ? std::string()
                     : ", experts " + std::to_string(num_experts) + ", intermediate " + std::to_string(intermediate);
  };
  return error(Code::kFailedPrecondition, "ring '", ring.name(), "' was made for another config: hidden ", shape.hidden,
               ", top_k ", shape.top_k, ", itemsize ", shape.itemsize, ", chunk_tokens ", shape.chunk_tokens,
               experts(shape.num_experts, shape.intermediate), "; the call has hidden ", spec.problem.hidden,
               ", top_k ", spec.problem.top_k, ", itemsize ", dtype_bytes(spec.problem.dtype), ", chunks of ",
               spec.chunk_tokens, experts(spec.problem.num_experts, spec.problem.intermediate));
}

namespace {

// One definition of where the six tensors lie serves weights (const) and gradients (mutable).
template <class Pointer>
Status read_tensors(const ExpertProblem& p, const ffi::AnyBuffer (&buffers)[kNumWeights], ExpertTensors<Pointer>* out) {
  const int64_t h = p.hidden, i = p.intermediate, l = p.num_experts, item = dtype_bytes(p.dtype);
  // Absent tensors come as one element, not as none: JAX 0.11's partitioner crashes on empty arrays.
  const auto count = [&](size_t n) -> int64_t {
    const auto elements = static_cast<int64_t>(buffers[n].element_count());
    return elements <= 1 ? 0 : elements;
  };
  const auto data = [&](size_t n) -> Pointer { return count(n) == 0 ? nullptr : buffers[n].untyped_data(); };
  const auto offset = [&](Pointer base, int64_t elements) -> Pointer {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const uint8_t, uint8_t>;
    return base == nullptr ? nullptr : static_cast<Byte*>(base) + elements * item;
  };
  const bool packed = is_gated(p.activation) && count(1) == 0;
  const int64_t width = packed ? 2 * i : i;
  const auto expect = [&](size_t n, int64_t elements, const char* name) -> Status {
    if (elements == 0 && count(n) == 0) return {};
    return expect_buffer(name, buffers[n], element_type(p.dtype), elements);
  };
  STREAMMOE_RETURN_IF_ERROR(expect(0, l * h * width, "gate"));
  STREAMMOE_RETURN_IF_ERROR(expect(1, !is_gated(p.activation) || packed ? 0 : l * h * i, "up"));
  STREAMMOE_RETURN_IF_ERROR(expect(2, l * i * h, "down"));
  const bool biased = count(3) + count(5) != 0;
  if (biased) {
    STREAMMOE_RETURN_IF_ERROR(expect(3, l * width, "b_gate"));
    STREAMMOE_RETURN_IF_ERROR(expect(4, !is_gated(p.activation) || packed ? 0 : l * i, "b_up"));
    STREAMMOE_RETURN_IF_ERROR(expect(5, l * h, "b_down"));
  }
  out->gate = {data(0), h * width, width};
  out->b_gate = {data(3), width, width};
  if (packed) {
    out->up = {offset(data(0), i), h * width, width};
    out->b_up = {offset(data(3), i), width, width};
  } else if (is_gated(p.activation)) {
    out->up = {data(1), h * i, i};
    out->b_up = {data(4), i, i};
  }
  out->down = {data(2), i * h, h};
  out->b_down = {data(5), h, h};
  return {};
}

}  // namespace

Status read_weights(const ExpertProblem& problem, const ffi::AnyBuffer (&operands)[kNumWeights],
                    ExpertWeights* weights) {
  return read_tensors(problem, operands, weights);
}

Status read_gradients(const ExpertProblem& problem, const ffi::AnyBuffer (&results)[kNumWeights],
                      ExpertGradients* gradients) {
  return read_tensors(problem, results, gradients);
}

Status register_memory(AttrReader& attrs, int32_t ordinal, const ffi::AnyBuffer& mem_in, const ffi::AnyBuffer& mem_out,
                       RingCall* call) {
  const std::string name = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  call->ring = Registry::get().find(name);
  if (call->ring == nullptr) {
    return error(Code::kNotFound, "ring '", name, "' was not created before its memory is registered");
  }
  Member* member = call->member = call->ring->find_member(ordinal);
  if (member == nullptr) return error(Code::kNotFound, "ring '", name, "' has no rank on device ", ordinal);
  if (mem_in.untyped_data() != mem_out.untyped_data()) {
    return error(Code::kFailedPrecondition, "ring '", name, "': its memory was copied while it was registered");
  }
  member->registered = mem_in.untyped_data();
  if (call->ring->shared()) return {};
  const int64_t bytes = call->ring->layout().total;
  if (static_cast<int64_t>(mem_in.size_bytes()) != bytes) {
    return error(Code::kFailedPrecondition, "ring '", name, "' needs ", bytes, " bytes, its memory has ",
                 mem_in.size_bytes());
  }
  call->ring->set_base(member->group, member->rank, static_cast<uint8_t*>(mem_out.untyped_data()));
  return {};
}

Status find_member(const std::string& name, int32_t ordinal, RingCall* call) {
  call->ring = Registry::get().find(name);
  if (call->ring == nullptr) {
    return error(Code::kNotFound, "ring '", name,
                 "' does not exist in this process: it was closed, or never made; call ",
                 "make_ring before the jitted program runs");
  }
  call->member = call->ring->find_member(ordinal);
  call->ring->poll();
  if (const std::string why = call->ring->failure(); !why.empty()) {
    return error(Code::kFailedPrecondition, "ring '", name,
                 "' is unusable, make_ring again on all ranks (nothing needs recompiling); it failed with: ", why);
  }
  if (call->member == nullptr) {
    return error(Code::kFailedPrecondition, "ring '", name, "' has no rank on device ", ordinal,
                 ": run the program on the devices of the mesh that make_ring was given");
  }
  return {};
}

Status find_ring(const std::string& name, int32_t ordinal, const ffi::AnyBuffer& mem_in, const ffi::AnyBuffer& mem_out,
                 RingCall* call) {
  STREAMMOE_RETURN_IF_ERROR(find_member(name, ordinal, call));
  const Member* member = call->member;
  if (mem_in.untyped_data() != mem_out.untyped_data() || mem_in.untyped_data() != member->registered) {
    return error(
        Code::kFailedPrecondition, "ring '", name, "' (rank ", member->rank,
        ") is not at the address it was made at: XLA copied it. A ring is one linear resource: pass it to jit with ",
        "donate_argnames, return it, and use each returned ring once. Causes: not donated, not returned, captured "
        "by a closure, used by two calls, copied (tree.map, pickle, a checkpoint restore), a NumPy view held, read by "
        "XLA ops, of another spec, or jax.checkpoint without sm.checkpoint_policy. Nothing was written; a ring that ",
        "was donated is gone: call make_ring again");
  }
  call->in_place = true;
  return {};
}

Status find_layer(int32_t ordinal, const ffi::Dictionary& dictionary, const ffi::AnyBuffer& mem_in,
                  const ffi::AnyBuffer& mem_out, const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& y,
                  CallSpec* spec, ExpertWeights* weights, RingCall* call) {
  AttrReader attrs(dictionary);
  *spec = read_call(attrs);
  const std::string name = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(find_ring(name, ordinal, mem_in, mem_out, call));
  STREAMMOE_RETURN_IF_ERROR(expect_layer(*call->ring, *spec));
  STREAMMOE_RETURN_IF_ERROR(expect_y(*spec, y));
  return read_weights(spec->problem, operands, weights);
}

Status find_open_ring(const char* what, int32_t ordinal, AttrReader& attrs, const ffi::AnyBuffer& mem_in,
                      const ffi::AnyBuffer& mem_out, RingCall* call) {
  const std::string name = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(find_ring(name, ordinal, mem_in, mem_out, call));
  return call->member->stream->require_open(name, what);
}

ffi::Error finish(const RingCall& call, const Status& status) {
  // A stream that is open is ended even when its ring was refused: its worker may be inside an expert pass.
  if (!status.ok() && call.member != nullptr && (call.in_place || call.member->stream->is_open())) {
    call.member->stream->abort(status);
  } else if (!status.ok() && call.member != nullptr && call.ring->failed()) {
    call.ring->quiesce();  // an earlier call failed: its kernels may not be over, and XLA frees this program's memory
  }
  return to_ffi(status);
}

}  // namespace streammoe::ffi_glue
