// The activations of the expert layer in float32, once, for every kernel that needs one.
//
// Contract: explicit rounding (no contraction left to the compiler) and one exponential, so that the forward,
// the recompute of the backward and every tile shape give the same bits. NaN stays NaN (min.NaN, max.NaN);
// limit is +infinity when there is no clamp. Trade-off: ex2.approx and rcp.approx (about 2 ulp together)
// instead of the exact functions: the special-function unit gives 16 results a clock and SM, and the result
// is rounded to 16 bits anyway.
#pragma once

#include "host/problem.h"

namespace streammoe::sm90 {

__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// 1 / (1 + 2^t). The callers fold -log2(e) and their slope into t. Saturates to 0 and 1, never NaN for finite
// t.
__device__ __forceinline__ float logistic_base2(float t) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(e) : "f"(t));
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(__fadd_rn(1.0f, e)));
  return r;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kSwiGLUOAIAlpha = 1.702f;
// gelu_tanh(x) = x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), the tanh form written with one exponential.
constexpr float kGeluScale = -2.0f * 0.7978845608028654f * kLog2E;
constexpr float kGeluCubic = 0.044715f;

__device__ __forceinline__ float silu(float x) { return __fmul_rn(x, logistic_base2(__fmul_rn(x, -kLog2E))); }

__device__ __forceinline__ float gelu_tanh(float x) {
  const float inner = __fmaf_rn(__fmul_rn(__fmul_rn(x, x), x), kGeluCubic, x);
  return __fmul_rn(x, logistic_base2(__fmul_rn(inner, kGeluScale)));
}

// act(gate, up). Ungated activations ignore `up`.
template <Activation kActivation>
__device__ __forceinline__ float activate(float gate, float up, float limit) {
  if constexpr (kActivation == Activation::kSwiGLU) {
    gate = min_nan(gate, limit);
    up = max_nan(min_nan(up, limit), -limit);
    return __fmul_rn(silu(gate), up);
  } else if constexpr (kActivation == Activation::kSwiGLUOAI) {
    gate = min_nan(gate, limit);
    up = max_nan(min_nan(up, limit), -limit);
    const float glu = __fmul_rn(gate, logistic_base2(__fmul_rn(gate, -kSwiGLUOAIAlpha * kLog2E)));
    return __fmul_rn(glu, __fadd_rn(up, 1.0f));
  } else if constexpr (kActivation == Activation::kGeGLU) {
    return __fmul_rn(gelu_tanh(gate), up);
  } else if constexpr (kActivation == Activation::kSiLU) {
    return silu(gate);
  } else if constexpr (kActivation == Activation::kGELU) {
    return gelu_tanh(gate);
  } else {
    const float positive = max_nan(gate, 0.0f);
    return __fmul_rn(positive, positive);
  }
}

}  // namespace streammoe::sm90
