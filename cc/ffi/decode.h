// From XLA's calls to the library's structures: attributes, buffers, errors.
//
// Contract: one place knows the attribute names and the order of the weight operands (gate, up, down, b_gate, b_up,
// b_down; an absent one is an array of one element). Python packs them in jax_streammoe/ffi.py with exact types: sizes
// are int64, codes and flags int32. XLA headers are included in cc/ffi only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/call.h"
#include "host/problem.h"
#include "host/registry.h"
#include "host/status.h"
#include "xla/ffi/api/ffi.h"

namespace streammoe::ffi_glue {

namespace ffi = xla::ffi;

ffi::Error to_ffi(const Status& status);

// Reads attributes by name; the first missing or mistyped one is kept and reported by status().
class AttrReader {
 public:
  explicit AttrReader(const ffi::Dictionary& attrs) : attrs_(attrs) {}
  int64_t i64(const char* name);
  int32_t i32(const char* name);
  float f32(const char* name);
  std::string text(const char* name);
  std::vector<int64_t> list(const char* name);
  void fail(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  const Status& status() const { return status_; }

 private:
  template <class T>
  T read(const char* name, T fallback);
  const ffi::Dictionary& attrs_;
  Status status_;
};

ffi::DataType element_type(DType dtype);
// InvalidArgument unless a buffer has that type and number of elements: the FFI's typed accessors check nothing in a
// release build, and whoever calls a target by name reaches the handlers past Python's checks.
Status expect_buffer(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t num_elements);
// Writes `in` to a result that XLA did not alias with it.
Status carry(const char* name, const ffi::AnyBuffer& in, const ffi::AnyBuffer& out);

// Number of weight operands, in the order of the header comment.
inline constexpr size_t kNumWeights = 6;

ExpertProblem read_problem(AttrReader& attrs);
CallSpec read_call(AttrReader& attrs);
// Shapes follow from the problem. An absent up with a gate of width 2I is the packed [L, H, 2I] form.
Status read_weights(const ExpertProblem& problem, const ffi::AnyBuffer (&operands)[kNumWeights],
                    ExpertWeights* weights);
Status read_gradients(const ExpertProblem& problem, const ffi::AnyBuffer (&results)[kNumWeights],
                      ExpertGradients* gradients);

// Tokens of an [T, K] operand; expect_buffer then refuses one that is not a whole number of tokens.
int64_t tokens_of(const ffi::AnyBuffer& ids, const ExpertProblem& problem);
// The operands of a batch-ready layer: x [T, H], ids [T, K] i32, weights [T, K] f32.
Status expect_batch(const ExpertProblem& problem, int64_t num_tokens, const ffi::AnyBuffer& x,
                    const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights);
// What a forward keeps for its backward: [T, K, 2I], ungated [T, K, I].
Status expect_gate_up(const ExpertProblem& problem, int64_t num_tokens, const ffi::AnyBuffer& gate_up);
// Of `rows`: x [N, H], local ids [N, K] i32 -> rows [N, K, H], dropped [N, K] u8, expert_rows [L] i32.
Status expect_rows(const ExpertProblem& problem, int64_t num_tokens, const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids,
                   const ffi::AnyBuffer& rows, const ffi::AnyBuffer& dropped, const ffi::AnyBuffer& expert_rows);
// Of `combine`: rows [T, K, H], ids [T, K] i32, weights [T, K] f32, dropped [T, K] u8 -> y [T, H].
Status expect_combine(const ExpertProblem& problem, int64_t num_tokens, const ffi::AnyBuffer& rows,
                      const ffi::AnyBuffer& ids, const ffi::AnyBuffer& topk_weights, const ffi::AnyBuffer& dropped,
                      const ffi::AnyBuffer& y);

// What ring handlers expect of their operands, given the call: y [T, H], the results of a close, the operand [c, width]
// of a chunk. A chunk that does not exist is refused by the stream itself.
Status expect_y(const CallSpec& spec, const ffi::AnyBuffer& y);
Status expect_stats(const CallSpec& spec, const ffi::AnyBuffer& expert_rows, const ffi::AnyBuffer& counts);
Status expect_chunk(const CallSpec& spec, int64_t chunk, const char* name, const ffi::AnyBuffer& buffer,
                    ffi::DataType type, int64_t width);
// FailedPrecondition unless the call is one of the layer the ring was made for.
Status expect_layer(const Ring& ring, const CallSpec& spec);

// The ring a handler works on, after the checks that make it safe to touch.
struct RingCall {
  std::shared_ptr<Ring> ring;
  Member* member = nullptr;  // also when a check failed, so that a stream that is open there can be ended
  bool in_place = false;     // all checks passed
};
// The registering call of make_ring: notes where the ring named by attribute `ring` lies on this device.
Status register_memory(AttrReader& attrs, int32_t ordinal, const ffi::AnyBuffer& mem_in, const ffi::AnyBuffer& mem_out,
                       RingCall* call);
// The rank of this device in a ring that is alive.
Status find_member(const std::string& name, int32_t ordinal, RingCall* call);
// The same, and checks that `mem` is where it was registered, and that XLA gave it back in place.
Status find_ring(const std::string& name, int32_t ordinal, const ffi::AnyBuffer& mem_in, const ffi::AnyBuffer& mem_out,
                 RingCall* call);
// The call of a handler that starts one: its ring and its experts, all checked against each other.
Status find_layer(int32_t ordinal, const ffi::Dictionary& attrs, const ffi::AnyBuffer& mem_in,
                  const ffi::AnyBuffer& mem_out, const ffi::AnyBuffer (&operands)[kNumWeights], const ffi::AnyBuffer& y,
                  CallSpec* spec, ExpertWeights* weights, RingCall* call);
// The ring of a handler that goes on with one: a stream must be open on it. `what` names the handler.
Status find_open_ring(const char* what, int32_t ordinal, AttrReader& attrs, const ffi::AnyBuffer& mem_in,
                      const ffi::AnyBuffer& mem_out, RingCall* call);
// An error after the ring was found costs the ring (its memory was donated): peers are told, and nothing of the call
// touches memory any more, before the error is reported: XLA frees the call's memory next.
ffi::Error finish(const RingCall& call, const Status& status);

}  // namespace streammoe::ffi_glue
