// What one call of the expert layer is: sizes, dtypes, activation, and where the weights lie.
//
// Contract: plain data, no XLA or Python type. Handlers fill these structs, the CPU and CUDA back ends read
// them. Strides are in elements, so that packed [L, H, 2I] and split [L, H, I] weights are the same problem.
#pragma once

#include <cstdint>
#include <limits>

namespace streammoe {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

inline constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Gated activations read gate and up; the others read the gate projection only.
enum class Activation : int32_t {
  kSwiGLU = 0,     // silu(gate) * up, optionally clamped: gate <= limit, |up| <= limit
  kSwiGLUOAI = 1,  // gate * sigmoid(1.702 gate) * (up + 1), clamped by limit (7 by default)
  kGeGLU = 2,      // gelu_tanh(gate) * up
  kSiLU = 3,
  kGELU = 4,   // tanh form
  kReLU2 = 5,  // max(gate, 0)^2
};

inline constexpr bool is_gated(Activation a) { return a <= Activation::kGeGLU; }

// Columns of what enters the activation of a row: gate, then up.
inline constexpr int64_t gate_up_width(Activation activation, int64_t intermediate) {
  return (is_gated(activation) ? 2 : 1) * intermediate;
}

struct ExpertProblem {
  int64_t num_experts = 0;   // L, the experts of this rank
  int64_t hidden = 0;        // H
  int64_t intermediate = 0;  // I
  int64_t top_k = 0;         // K
  DType dtype = DType::kF32;
  Activation activation = Activation::kSwiGLU;
  float limit = std::numeric_limits<float>::infinity();  // clamp, infinity when absent
  int64_t block_m = 128;                                 // rows of every expert GEMM call
  int32_t threads = 1;                                   // threads of the library one call may use
};

inline constexpr int64_t gate_up_width(const ExpertProblem& p) { return gate_up_width(p.activation, p.intermediate); }

// A stack of row-major matrices, one per expert. data == nullptr: absent (bias, or up of an ungated layer).
template <class Pointer>
struct ExpertMatrix {
  Pointer data = nullptr;
  int64_t expert_stride = 0;
  int64_t row_stride = 0;
  bool operator==(const ExpertMatrix&) const = default;
};

// gate, up: [L, H, I]; down: [L, I, H]; b_gate, b_up: [L, I]; b_down: [L, H]. All of the problem's dtype.
template <class Pointer>
struct ExpertTensors {
  ExpertMatrix<Pointer> gate, up, down, b_gate, b_up, b_down;
  bool operator==(const ExpertTensors&) const = default;  // the same memory, not equal values
};

using ExpertWeights = ExpertTensors<const void*>;
using ExpertGradients = ExpertTensors<void*>;

}  // namespace streammoe
