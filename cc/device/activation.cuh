// The activations of the expert layer in float32, once, for every kernel that needs one.
//
// Contract: explicit rounding (no contraction left to the compiler) and one exponential, so that the forward,
// the recompute of the backward and every tile shape give the same bits. NaN stays NaN (min.NaN, max.NaN);
// limit is +infinity when there is no clamp. activate() is the forward, activate_backward() the same value
// with both derivatives. Trade-off: ex2.approx and rcp.approx (about 2 ulp together)
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

__device__ __forceinline__ float gelu_tanh_slope(float x) {  // s of x * s
  const float inner = __fmaf_rn(__fmul_rn(__fmul_rn(x, x), x), kGeluCubic, x);
  return logistic_base2(__fmul_rn(inner, kGeluScale));
}
__device__ __forceinline__ float gelu_tanh(float x) { return __fmul_rn(x, gelu_tanh_slope(x)); }

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

// The value, and d times its derivative by gate and by up.
struct ActivationGradient {
  float value, gate, up;
};

// Of (g * logistic(alpha g)) * (u + shift) under the clamps. Beyond a bound the gradient is 0 whatever d is; a NaN is
// beyond no bound.
template <bool kOAI>
__device__ __forceinline__ ActivationGradient clamped_glu_backward(float gate, float up, float limit, float d) {
  constexpr float kAlpha = kOAI ? kSwiGLUOAIAlpha : 1.0f;
  const float g = min_nan(gate, limit);
  const float u = max_nan(min_nan(up, limit), -limit);
  const float s = logistic_base2(__fmul_rn(g, -kAlpha * kLog2E));
  const float glu = __fmul_rn(g, s);
  const float shifted = kOAI ? __fadd_rn(u, 1.0f) : u;
  const float scaled = kOAI ? __fmul_rn(kAlpha, g) : g;
  const float slope = __fmul_rn(s, __fmaf_rn(scaled, __fadd_rn(1.0f, -s), 1.0f));
  const float d_gate = __fmul_rn(__fmul_rn(d, shifted), slope);
  const float d_up = __fmul_rn(d, glu);
  return {__fmul_rn(glu, shifted), gate > limit ? 0.0f : d_gate, up > limit || up < -limit ? 0.0f : d_up};
}

// d gelu_tanh(x) / dx, given s = logistic of the forward: s + x s (1 - s) * 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2).
// s (1 - s) is 0 long before |x| = 16; the bound keeps infinity out of the product with it.
__device__ __forceinline__ float gelu_derivative(float x, float s) {
  constexpr float kSlope = 2.0f * 0.7978845608028654f;
  const float t = max_nan(min_nan(x, 16.0f), -16.0f);
  const float inner = __fmul_rn(kSlope, __fmaf_rn(3.0f * kGeluCubic, __fmul_rn(t, t), 1.0f));
  return __fmaf_rn(__fmul_rn(t, __fmul_rn(s, __fadd_rn(1.0f, -s))), inner, s);
}

// `value` has the bits of activate(). Ungated activations ignore `up`, and their gradient by it is 0.
template <Activation kActivation>
__device__ __forceinline__ ActivationGradient activate_backward(float gate, float up, float limit, float d) {
  if constexpr (kActivation == Activation::kSwiGLU) {
    return clamped_glu_backward<false>(gate, up, limit, d);
  } else if constexpr (kActivation == Activation::kSwiGLUOAI) {
    return clamped_glu_backward<true>(gate, up, limit, d);
  } else if constexpr (kActivation == Activation::kGeGLU || kActivation == Activation::kGELU) {
    const float s = gelu_tanh_slope(gate);
    const float gelu = __fmul_rn(gate, s);
    const float derivative = gelu_derivative(gate, s);
    if constexpr (kActivation == Activation::kGELU) return {gelu, __fmul_rn(d, derivative), 0.0f};
    return {__fmul_rn(gelu, up), __fmul_rn(__fmul_rn(d, up), derivative), __fmul_rn(d, gelu)};
  } else if constexpr (kActivation == Activation::kSiLU) {
    const float s = logistic_base2(__fmul_rn(gate, -kLog2E));
    const float slope = __fmul_rn(s, __fmaf_rn(gate, __fadd_rn(1.0f, -s), 1.0f));
    return {__fmul_rn(gate, s), __fmul_rn(d, slope), 0.0f};
  } else {
    const float positive = max_nan(gate, 0.0f);
    return {__fmul_rn(positive, positive), __fmul_rn(d, __fmul_rn(2.0f, positive)), 0.0f};
  }
}

}  // namespace streammoe::sm90
