// Handlers of the layer on one rank's own tokens: no ring, no peer.
//
//   forward   x, ids, weights -> y                   the batch-ready layer
//   forward_kept                  -> y, gate_up       the same, and what enters the activations, for backward_kept
//   rows      x, ids -> one unweighted row per route  the expert half, for transports made of XLA collectives
//   check_ids ids -> ids                              an error when one names no expert
//   combine   rows, ids, weights -> y                 the owner's half
//   backward  x, dy, ids, weights -> gradients per route, per weight and per expert tensor
//   backward_kept  and gate_up    -> the same, from gate and up as they were kept
//   after     values, others -> values                available to the program once the others are: XLA keeps this
//                                                     order (it drops optimization_barrier before it schedules on CPU)
//
// Each: the library function is in cc/cpu, the implementation here reads buffers, the handler symbol binds them.
#include "ffi/layer.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cpu/backward.h"
#include "cpu/combine.h"
#include "cpu/experts.h"
#include "cpu/ids.h"
#include "cpu/plan.h"
#include "ffi/decode.h"
#include "host/events.h"

namespace streammoe::ffi_glue {
namespace {

std::span<const int32_t> as_ids(const ffi::AnyBuffer& ids) { return {ids.typed_data<int32_t>(), ids.element_count()}; }

// Computes the row of every planned pair into rows[pair]; gate_up [pair], unless null: what enters its activation.
void run_rows(const ExpertProblem& p, const ExpertWeights& weights, const cpu::Plan& plan, const void* x, void* rows,
              void* gate_up = nullptr) {
  const int64_t row_bytes = p.hidden * dtype_bytes(p.dtype), kept_bytes = gate_up_width(p) * dtype_bytes(p.dtype);
  std::vector<cpu::RowTask> tasks;
  tasks.reserve(plan.pairs.size());
  for (const int64_t pair : plan.pairs) {
    tasks.push_back({static_cast<const uint8_t*>(x) + pair / p.top_k * row_bytes,
                     static_cast<uint8_t*>(rows) + pair * row_bytes,
                     gate_up == nullptr ? nullptr : static_cast<uint8_t*>(gate_up) + pair * kept_bytes});
  }
  const auto blocks = cpu::split_blocks(plan, p.block_m);
  cpu::run_expert_blocks(p, weights, blocks, tasks.data());
}

void write_expert_rows(const cpu::Plan& plan, int32_t* out) {
  for (size_t e = 0; e + 1 < plan.offsets.size(); ++e) {
    out[e] = static_cast<int32_t>(plan.offsets[e + 1] - plan.offsets[e]);
  }
}

// gate_up: nullptr when nothing is kept; rows of routes that are not taken are zeros then, never what the buffer held.
Status forward(const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights,
               const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& y, const ffi::AnyBuffer* gate_up,
               const ffi::AnyBuffer& expert_rows, const ffi::AnyBuffer& counts_out, const ffi::Dictionary& dictionary) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t capacity = attrs.i64("capacity");
  const bool checks = attrs.i32("checks") != 0;
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, operands, &weights));

  const int64_t num_tokens = tokens_of(ids, p), num_pairs = num_tokens * p.top_k;
  STREAMMOE_RETURN_IF_ERROR(expect_batch(p, num_tokens, x, ids, topk_weights));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("y", y, element_type(p.dtype), num_tokens * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("expert_rows", expert_rows, ffi::DataType::S32, p.num_experts));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("counts", counts_out, ffi::DataType::S32, 3));
  if (gate_up != nullptr) STREAMMOE_RETURN_IF_ERROR(expect_gate_up(p, num_tokens, *gate_up));
  if (checks) STREAMMOE_RETURN_IF_ERROR(cpu::check_ids(as_ids(ids), p.top_k, p.num_experts));
  std::vector<int32_t> clean(static_cast<size_t>(num_pairs));
  const cpu::IdCounts counts = cpu::sanitise_ids(as_ids(ids), p.num_experts, clean.data());
  std::vector<uint8_t> dropped(static_cast<size_t>(num_pairs), 0);
  const cpu::Plan plan = cpu::make_plan(clean, p.num_experts, capacity, dropped.data());
  if (gate_up != nullptr) {
    const int64_t bytes = gate_up_width(p) * dtype_bytes(p.dtype);
    for (const int64_t pair : cpu::pairs_without_row(plan, num_pairs)) {
      std::memset(static_cast<uint8_t*>(gate_up->untyped_data()) + pair * bytes, 0, static_cast<size_t>(bytes));
    }
  }
  // Uninitialised on purpose: combine reads the rows of planned pairs only.
  const std::unique_ptr<uint8_t[]> rows(
      new uint8_t[static_cast<size_t>(num_pairs * p.hidden * dtype_bytes(p.dtype)) + 1]);
  run_rows(p, weights, plan, x.untyped_data(), rows.get(), gate_up == nullptr ? nullptr : gate_up->untyped_data());
  cpu::combine(p.dtype, p.hidden, p.top_k, num_tokens, rows.get(), clean.data(), topk_weights.typed_data<float>(),
               dropped.data(), y.untyped_data(), p.threads);
  write_expert_rows(plan, expert_rows.typed_data<int32_t>());
  int32_t* out = counts_out.typed_data<int32_t>();
  out[0] = static_cast<int32_t>(std::count(dropped.begin(), dropped.end(), 1));
  out[1] = counts.invalid, out[2] = counts.masked;
  return {};
}

ffi::Error forward_impl(ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer topk_weights,
                        ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::AnyBuffer b_gate,
                        ffi::AnyBuffer b_up, ffi::AnyBuffer b_down, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> expert_rows, ffi::Result<ffi::AnyBuffer> counts) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  return to_ffi(forward(x, ids, topk_weights, operands, *y, nullptr, *expert_rows, *counts, attrs));
}
XLA_FFI_DEFINE_HANDLER(kForward, forward_impl,
                       ffi::Ffi::Bind()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // x [T, H]
                           .Arg<ffi::AnyBuffer>()    // topk_ids [T, K] i32
                           .Arg<ffi::AnyBuffer>()    // topk_weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()    // gate
                           .Arg<ffi::AnyBuffer>()    // up
                           .Arg<ffi::AnyBuffer>()    // down
                           .Arg<ffi::AnyBuffer>()    // b_gate
                           .Arg<ffi::AnyBuffer>()    // b_up
                           .Arg<ffi::AnyBuffer>()    // b_down
                           .Ret<ffi::AnyBuffer>()    // y [T, H]
                           .Ret<ffi::AnyBuffer>()    // expert_rows [L] i32
                           .Ret<ffi::AnyBuffer>());  // counts [3] i32: dropped, invalid, masked

ffi::Error forward_kept_impl(ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer topk_weights,
                             ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::AnyBuffer b_gate,
                             ffi::AnyBuffer b_up, ffi::AnyBuffer b_down, ffi::Result<ffi::AnyBuffer> y,
                             ffi::Result<ffi::AnyBuffer> gate_up, ffi::Result<ffi::AnyBuffer> expert_rows,
                             ffi::Result<ffi::AnyBuffer> counts) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const ffi::AnyBuffer kept = *gate_up;
  return to_ffi(forward(x, ids, topk_weights, operands, *y, &kept, *expert_rows, *counts, attrs));
}
XLA_FFI_DEFINE_HANDLER(kForwardKept, forward_kept_impl,
                       ffi::Ffi::Bind()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // x [T, H]
                           .Arg<ffi::AnyBuffer>()    // topk_ids [T, K] i32
                           .Arg<ffi::AnyBuffer>()    // topk_weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()    // gate
                           .Arg<ffi::AnyBuffer>()    // up
                           .Arg<ffi::AnyBuffer>()    // down
                           .Arg<ffi::AnyBuffer>()    // b_gate
                           .Arg<ffi::AnyBuffer>()    // b_up
                           .Arg<ffi::AnyBuffer>()    // b_down
                           .Ret<ffi::AnyBuffer>()    // y [T, H]
                           .Ret<ffi::AnyBuffer>()    // gate_up [T, K, 2I], ungated [T, K, I]
                           .Ret<ffi::AnyBuffer>()    // expert_rows [L] i32
                           .Ret<ffi::AnyBuffer>());  // counts [3] i32: dropped, invalid, masked

// ids are local here: -1 or outside 0..L-1 is a route of another rank or of none.
Status rows(const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids, const ffi::AnyBuffer (&operands)[kNumWeights],
            const ffi::AnyBuffer& out, const ffi::AnyBuffer& dropped, const ffi::AnyBuffer& expert_rows,
            const ffi::Dictionary& dictionary) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t capacity = attrs.i64("capacity");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, operands, &weights));
  STREAMMOE_RETURN_IF_ERROR(expect_rows(p, tokens_of(ids, p), x, ids, out, dropped, expert_rows));
  std::memset(dropped.untyped_data(), 0, dropped.size_bytes());
  const cpu::Plan plan = cpu::make_plan(as_ids(ids), p.num_experts, capacity, dropped.typed_data<uint8_t>());
  // Rows of other ranks' experts travel back as zeros, never as whatever the buffer held.
  std::memset(out.untyped_data(), 0, out.size_bytes());
  run_rows(p, weights, plan, x.untyped_data(), out.untyped_data());
  write_expert_rows(plan, expert_rows.typed_data<int32_t>());
  return {};
}

ffi::Error rows_impl(ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer gate,
                     ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::AnyBuffer b_gate, ffi::AnyBuffer b_up,
                     ffi::AnyBuffer b_down, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> dropped,
                     ffi::Result<ffi::AnyBuffer> expert_rows) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  return to_ffi(rows(x, ids, operands, *out, *dropped, *expert_rows, attrs));
}
XLA_FFI_DEFINE_HANDLER(kRows, rows_impl,
                       ffi::Ffi::Bind()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // x [N, H]
                           .Arg<ffi::AnyBuffer>()    // local ids [N, K] i32
                           .Arg<ffi::AnyBuffer>()    // gate
                           .Arg<ffi::AnyBuffer>()    // up
                           .Arg<ffi::AnyBuffer>()    // down
                           .Arg<ffi::AnyBuffer>()    // b_gate
                           .Arg<ffi::AnyBuffer>()    // b_up
                           .Arg<ffi::AnyBuffer>()    // b_down
                           .Ret<ffi::AnyBuffer>()    // rows [N, K, H]
                           .Ret<ffi::AnyBuffer>()    // dropped [N, K] u8
                           .Ret<ffi::AnyBuffer>());  // expert_rows [L] i32

// ids -> ids, or an error that names the first id outside -1..E-1 of this rank's tokens. When another rank has one,
// this rank fails with it: it would wait for that rank in the next collective.
Status check_ids(const ffi::AnyBuffer& ids, const ffi::AnyBuffer& any_invalid, const ffi::AnyBuffer& out,
                 const ffi::Dictionary& dictionary) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t total_experts = attrs.i64("total_experts");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_ids", ids, ffi::DataType::S32, tokens_of(ids, p) * p.top_k));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("any_invalid", any_invalid, ffi::DataType::S32, 1));
  STREAMMOE_RETURN_IF_ERROR(cpu::check_ids(as_ids(ids), p.top_k, total_experts));
  if (*any_invalid.typed_data<int32_t>() != 0) {
    return error(Code::kInvalidArgument, "topk_ids of another rank name no expert, see its error");
  }
  return carry("topk_ids", ids, out);
}

ffi::Error check_ids_impl(ffi::Dictionary attrs, ffi::AnyBuffer ids, ffi::AnyBuffer any_invalid,
                          ffi::Result<ffi::AnyBuffer> out) {
  return to_ffi(check_ids(ids, any_invalid, *out, attrs));
}
XLA_FFI_DEFINE_HANDLER(kCheckIds, check_ids_impl,
                       ffi::Ffi::Bind()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // topk_ids [T, K] i32
                           .Arg<ffi::AnyBuffer>()    // any_invalid [] i32
                           .Ret<ffi::AnyBuffer>());  // topk_ids

Status combine_rows(const ffi::AnyBuffer& row_buffer, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights,
                    const ffi::AnyBuffer& dropped, const ffi::AnyBuffer& y, const ffi::Dictionary& dictionary) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  const int64_t num_tokens = tokens_of(ids, p);
  STREAMMOE_RETURN_IF_ERROR(expect_combine(p, num_tokens, row_buffer, ids, topk_weights, dropped, y));
  cpu::combine(p.dtype, p.hidden, p.top_k, num_tokens, row_buffer.untyped_data(), ids.typed_data<int32_t>(),
               topk_weights.typed_data<float>(), dropped.typed_data<uint8_t>(), y.untyped_data(), p.threads);
  return {};
}

ffi::Error combine_impl(ffi::Dictionary attrs, ffi::AnyBuffer row_buffer, ffi::AnyBuffer ids,
                        ffi::AnyBuffer topk_weights, ffi::AnyBuffer dropped, ffi::Result<ffi::AnyBuffer> y) {
  return to_ffi(combine_rows(row_buffer, ids, topk_weights, dropped, *y, attrs));
}
XLA_FFI_DEFINE_HANDLER(kCombine, combine_impl,
                       ffi::Ffi::Bind()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // rows [T, K, H]
                           .Arg<ffi::AnyBuffer>()    // ids [T, K] i32, negative: skipped
                           .Arg<ffi::AnyBuffer>()    // weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()    // dropped [T, K] u8
                           .Ret<ffi::AnyBuffer>());  // y [T, H]

// Where an event of the backward lies in the timeline: the member's place in its ring, else the device.
std::pair<int64_t, int64_t> group_and_rank(const std::string& ring_name, int32_t ordinal) {
  const auto ring = ring_name.empty() ? nullptr : Registry::get().find(ring_name);
  const Member* member = ring == nullptr ? nullptr : ring->find_member(ordinal);
  if (member == nullptr) return {0, ordinal};
  return {member->group, member->rank};
}

// gate_up: nullptr when they are computed again.
Status backward(const ffi::AnyBuffer& x, const ffi::AnyBuffer& dy, const ffi::AnyBuffer& ids,
                const ffi::AnyBuffer& topk_weights, const ffi::AnyBuffer* gate_up,
                const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& dx_rows,
                const ffi::AnyBuffer& d_weights, const ffi::AnyBuffer (&results)[kNumWeights],
                const ffi::Dictionary& dictionary, int32_t ordinal) {
  AttrReader attrs(dictionary);
  const ExpertProblem p = read_problem(attrs);
  const int64_t capacity = attrs.i64("capacity");
  const std::string ring = attrs.text("ring");
  STREAMMOE_RETURN_IF_ERROR(attrs.status());
  const auto [group, rank] = group_and_rank(ring, ordinal);
  Span span(ring, group, rank, Phase::kBackward);
  ExpertWeights weights;
  STREAMMOE_RETURN_IF_ERROR(read_weights(p, operands, &weights));
  for (const auto& result : results) {  // of an absent tensor: nobody else writes it
    if (result.element_count() <= 1) std::memset(result.untyped_data(), 0, result.size_bytes());
  }
  ExpertGradients gradients;
  STREAMMOE_RETURN_IF_ERROR(read_gradients(p, results, &gradients));
  const int64_t num_tokens = tokens_of(ids, p), num_pairs = num_tokens * p.top_k;
  const ffi::DataType type = element_type(p.dtype);
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("local ids", ids, ffi::DataType::S32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("topk_weights", topk_weights, ffi::DataType::F32, num_pairs));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("x", x, type, num_tokens * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("dy", dy, type, num_tokens * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("dx_rows", dx_rows, type, num_pairs * p.hidden));
  STREAMMOE_RETURN_IF_ERROR(expect_buffer("d_weights", d_weights, ffi::DataType::F32, num_pairs));
  cpu::BackwardArgs args;
  args.x = x.untyped_data(), args.dy = dy.untyped_data();
  args.ids = ids.typed_data<int32_t>(), args.weights = topk_weights.typed_data<float>();
  args.num_tokens = num_tokens;
  args.capacity = capacity;
  if (gate_up != nullptr) {
    STREAMMOE_RETURN_IF_ERROR(expect_gate_up(p, num_tokens, *gate_up));
    args.gate_up = gate_up->untyped_data();
  }
  cpu::backward(p, weights, args, dx_rows.untyped_data(), d_weights.typed_data<float>(), gradients);
  return {};
}

ffi::Error backward_impl(int32_t ordinal, ffi::Dictionary attrs, ffi::AnyBuffer token_in, ffi::AnyBuffer x,
                         ffi::AnyBuffer dy, ffi::AnyBuffer ids, ffi::AnyBuffer topk_weights, ffi::AnyBuffer gate,
                         ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::AnyBuffer b_gate, ffi::AnyBuffer b_up,
                         ffi::AnyBuffer b_down, ffi::Result<ffi::AnyBuffer> token_out,
                         ffi::Result<ffi::AnyBuffer> dx_rows, ffi::Result<ffi::AnyBuffer> d_weights,
                         ffi::Result<ffi::AnyBuffer> d_gate, ffi::Result<ffi::AnyBuffer> d_up,
                         ffi::Result<ffi::AnyBuffer> d_down, ffi::Result<ffi::AnyBuffer> d_b_gate,
                         ffi::Result<ffi::AnyBuffer> d_b_up, ffi::Result<ffi::AnyBuffer> d_b_down) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const ffi::AnyBuffer results[kNumWeights] = {*d_gate, *d_up, *d_down, *d_b_gate, *d_b_up, *d_b_down};
  Status status = carry("token", token_in, *token_out);
  if (status.ok()) {
    status = backward(x, dy, ids, topk_weights, nullptr, operands, *dx_rows, *d_weights, results, attrs, ordinal);
  }
  return to_ffi(status);
}
XLA_FFI_DEFINE_HANDLER(kBackward, backward_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // token: orders backward calls
                           .Arg<ffi::AnyBuffer>()    // x [N, H]
                           .Arg<ffi::AnyBuffer>()    // dy [N, H]
                           .Arg<ffi::AnyBuffer>()    // local ids [N, K] i32
                           .Arg<ffi::AnyBuffer>()    // weights [N, K] f32
                           .Arg<ffi::AnyBuffer>()    // gate
                           .Arg<ffi::AnyBuffer>()    // up
                           .Arg<ffi::AnyBuffer>()    // down
                           .Arg<ffi::AnyBuffer>()    // b_gate
                           .Arg<ffi::AnyBuffer>()    // b_up
                           .Arg<ffi::AnyBuffer>()    // b_down
                           .Ret<ffi::AnyBuffer>()    // token
                           .Ret<ffi::AnyBuffer>()    // dx_rows [N, K, H]
                           .Ret<ffi::AnyBuffer>()    // d_weights [N, K] f32
                           .Ret<ffi::AnyBuffer>()    // d_gate
                           .Ret<ffi::AnyBuffer>()    // d_up
                           .Ret<ffi::AnyBuffer>()    // d_down
                           .Ret<ffi::AnyBuffer>()    // d_b_gate
                           .Ret<ffi::AnyBuffer>()    // d_b_up
                           .Ret<ffi::AnyBuffer>());  // d_b_down

ffi::Error backward_kept_impl(int32_t ordinal, ffi::Dictionary attrs, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                              ffi::AnyBuffer ids, ffi::AnyBuffer topk_weights, ffi::AnyBuffer gate_up,
                              ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::AnyBuffer b_gate,
                              ffi::AnyBuffer b_up, ffi::AnyBuffer b_down, ffi::Result<ffi::AnyBuffer> dx_rows,
                              ffi::Result<ffi::AnyBuffer> d_weights, ffi::Result<ffi::AnyBuffer> d_gate,
                              ffi::Result<ffi::AnyBuffer> d_up, ffi::Result<ffi::AnyBuffer> d_down,
                              ffi::Result<ffi::AnyBuffer> d_b_gate, ffi::Result<ffi::AnyBuffer> d_b_up,
                              ffi::Result<ffi::AnyBuffer> d_b_down) {
  const ffi::AnyBuffer operands[kNumWeights] = {gate, up, down, b_gate, b_up, b_down};
  const ffi::AnyBuffer results[kNumWeights] = {*d_gate, *d_up, *d_down, *d_b_gate, *d_b_up, *d_b_down};
  return to_ffi(backward(x, dy, ids, topk_weights, &gate_up, operands, *dx_rows, *d_weights, results, attrs, ordinal));
}
XLA_FFI_DEFINE_HANDLER(kBackwardKept, backward_kept_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()    // x [T, H]
                           .Arg<ffi::AnyBuffer>()    // dy [T, H]
                           .Arg<ffi::AnyBuffer>()    // topk_ids [T, K] i32
                           .Arg<ffi::AnyBuffer>()    // topk_weights [T, K] f32
                           .Arg<ffi::AnyBuffer>()    // gate_up [T, K, 2I], ungated [T, K, I]
                           .Arg<ffi::AnyBuffer>()    // gate
                           .Arg<ffi::AnyBuffer>()    // up
                           .Arg<ffi::AnyBuffer>()    // down
                           .Arg<ffi::AnyBuffer>()    // b_gate
                           .Arg<ffi::AnyBuffer>()    // b_up
                           .Arg<ffi::AnyBuffer>()    // b_down
                           .Ret<ffi::AnyBuffer>()    // dx_rows [T, K, H]
                           .Ret<ffi::AnyBuffer>()    // d_weights [T, K] f32
                           .Ret<ffi::AnyBuffer>()    // d_gate
                           .Ret<ffi::AnyBuffer>()    // d_up
                           .Ret<ffi::AnyBuffer>()    // d_down
                           .Ret<ffi::AnyBuffer>()    // d_b_gate
                           .Ret<ffi::AnyBuffer>()    // d_b_up
                           .Ret<ffi::AnyBuffer>());  // d_b_down

ffi::Error after_impl(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  for (size_t n = 0; n < rets.size(); ++n) {
    const auto in = args.get<ffi::AnyBuffer>(n);
    auto out = rets.get<ffi::AnyBuffer>(n);
    if (in.has_error()) return in.error();
    if (out.has_error()) return out.error();
    if (const Status status = carry("value", *in, **out); !status.ok()) return to_ffi(status);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(kAfter, after_impl,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets());  // values, others -> values

}  // namespace

std::vector<std::pair<const char*, void*>> layer_handlers() {
  return {{"forward", reinterpret_cast<void*>(+kForward)},
          {"forward_kept", reinterpret_cast<void*>(+kForwardKept)},
          {"rows", reinterpret_cast<void*>(+kRows)},
          {"check_ids", reinterpret_cast<void*>(+kCheckIds)},
          {"combine", reinterpret_cast<void*>(+kCombine)},
          {"backward", reinterpret_cast<void*>(+kBackward)},
          {"backward_kept", reinterpret_cast<void*>(+kBackwardKept)},
          {"after", reinterpret_cast<void*>(+kAfter)}};
}

}  // namespace streammoe::ffi_glue
