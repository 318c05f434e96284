// The activation loops, one instance per activation and x86 level.
//
// Contract: see activation.h. Every expression is written in the order it is rounded; -ffp-contract=off keeps it so.
// The exponential: n = round(x log2 e), r = x - n ln 2 in two parts (n * kLn2High is exact), a degree 6 polynomial on
// |r| <= ln 2 / 2, then two exact scalings by powers of two, so that the result may be subnormal or infinite.
// Trade-off: one division per element for the logistic function instead of a reciprocal estimate with corrections.
#include "cpu/activation.h"

#include "cpu/convert.h"

namespace streammoe::cpu {
namespace {

constexpr float kAlpha = 1.702f;                   // swigluoai
constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

// Selects in this form keep NaN: every comparison with NaN is false.
STREAMMOE_INLINE float at_most(float x, float bound) { return x > bound ? bound : x; }
STREAMMOE_INLINE float at_least(float x, float bound) { return x < bound ? bound : x; }

STREAMMOE_INLINE float power_of_two(uint32_t exponent) {  // exponent in -126..127, as two's complement
  return bit_cast<float>((exponent + 127u) << 23);
}

STREAMMOE_INLINE float exponential(float x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;  // 10 bits: n * kLn2High is exact for |n| <= 2^14
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const float y = at_least(at_most(x, 89.0f), -104.0f);  // e^89 is above, e^-104 below all finite floats' halves
  const float shifted = y * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (y - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const uint32_t whole = bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(kRound);
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(whole) >> 1);  // garbage for NaN, and harmless
  return (p * power_of_two(half)) * power_of_two(whole - half);
}

STREAMMOE_INLINE float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

STREAMMOE_INLINE float gelu_slope(float x) {  // s of x * s
  return logistic(2.0f * (kGeluScale * (x + kGeluCubic * ((x * x) * x))));
}

template <Activation kActivation>
STREAMMOE_INLINE float forward_one(float gate, float up, float limit) {
  if constexpr (kActivation == Activation::kSwiGLU) {
    const float g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
    return (g * logistic(g)) * u;
  } else if constexpr (kActivation == Activation::kSwiGLUOAI) {
    const float g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
    return (g * logistic(kAlpha * g)) * (u + 1.0f);
  } else if constexpr (kActivation == Activation::kGeGLU) {
    return (gate * gelu_slope(gate)) * up;
  } else if constexpr (kActivation == Activation::kSiLU) {
    return gate * logistic(gate);
  } else if constexpr (kActivation == Activation::kGELU) {
    return gate * gelu_slope(gate);
  } else {
    const float positive = at_least(gate, 0.0f);
    return positive * positive;
  }
}

struct Gradients {
  float gate, up;
};

// Of (g * logistic(alpha g)) * (u + shift) under the clamps. Beyond a bound the gradient is 0 whatever d is.
STREAMMOE_INLINE Gradients clamped_glu_backward(float gate, float up, float limit, float d, float alpha, float shift) {
  const float g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
  const float s = logistic(alpha * g);
  const float d_gate = (d * (u + shift)) * (s * (1.0f + (alpha * g) * (1.0f - s)));
  const float d_up = d * (g * s);
  return {gate > limit ? 0.0f : d_gate, (up > limit) | (up < -limit) ? 0.0f : d_up};
}

STREAMMOE_INLINE float gelu_derivative(float x, float s) {  // s = gelu_slope(x)
  // s (1 - s) is 0 long before |x| = 16; the bound keeps infinity out of the product with it.
  const float t = at_least(at_most(x, 16.0f), -16.0f);
  const float inner = 2.0f * (kGeluScale * (1.0f + (3.0f * kGeluCubic) * (t * t)));
  return s + (t * (s * (1.0f - s))) * inner;
}

template <Activation kActivation>
STREAMMOE_INLINE Gradients backward_one(float gate, float up, float limit, float d) {
  if constexpr (kActivation == Activation::kSwiGLU) {
    return clamped_glu_backward(gate, up, limit, d, 1.0f, 0.0f);
  } else if constexpr (kActivation == Activation::kSwiGLUOAI) {
    return clamped_glu_backward(gate, up, limit, d, kAlpha, 1.0f);
  } else if constexpr (kActivation == Activation::kGeGLU) {
    const float s = gelu_slope(gate);
    return {(d * up) * gelu_derivative(gate, s), d * (gate * s)};
  } else if constexpr (kActivation == Activation::kSiLU) {
    const float s = logistic(gate);
    return {d * (s * (1.0f + gate * (1.0f - s))), 0.0f};
  } else if constexpr (kActivation == Activation::kGELU) {
    return {d * gelu_derivative(gate, gelu_slope(gate)), 0.0f};
  } else {
    return {d * (2.0f * at_least(gate, 0.0f)), 0.0f};
  }
}

// target_clones does not apply to templates, hence one pair of plain functions per activation. The element-wise
// arguments may alias at equal indices only, which ivdep tells the vectoriser.
#define STREAMMOE_ACTIVATION(name, kind)                                                                              \
  STREAMMOE_CLONES void name##_forward(float limit, int64_t n, const float* gate, const float* up, float* out) {      \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {                                                            \
      out[i] = forward_one<kind>(gate[i], is_gated(kind) ? up[i] : 0.0f, limit);                                      \
    }                                                                                                                 \
  }                                                                                                                   \
  STREAMMOE_CLONES void name##_backward(float limit, int64_t n, const float* gate, const float* up, const float* d_a, \
                                        float* d_gate, float* d_up) {                                                 \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {                                                            \
      const Gradients d = backward_one<kind>(gate[i], is_gated(kind) ? up[i] : 0.0f, limit, d_a[i]);                  \
      d_gate[i] = d.gate;                                                                                             \
      if constexpr (is_gated(kind)) d_up[i] = d.up;                                                                   \
    }                                                                                                                 \
  }
STREAMMOE_ACTIVATION(swiglu, Activation::kSwiGLU)
STREAMMOE_ACTIVATION(swigluoai, Activation::kSwiGLUOAI)
STREAMMOE_ACTIVATION(geglu, Activation::kGeGLU)
STREAMMOE_ACTIVATION(silu, Activation::kSiLU)
STREAMMOE_ACTIVATION(gelu, Activation::kGELU)
STREAMMOE_ACTIVATION(relu2, Activation::kReLU2)
#undef STREAMMOE_ACTIVATION

STREAMMOE_CLONES void exp_loop(int64_t n, const float* x, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = exponential(x[i]);
}

}  // namespace

void activate(Activation activation, float limit, int64_t n, const float* gate, const float* up, float* out) {
  switch (activation) {
    case Activation::kSwiGLU:
      return swiglu_forward(limit, n, gate, up, out);
    case Activation::kSwiGLUOAI:
      return swigluoai_forward(limit, n, gate, up, out);
    case Activation::kGeGLU:
      return geglu_forward(limit, n, gate, up, out);
    case Activation::kSiLU:
      return silu_forward(limit, n, gate, up, out);
    case Activation::kGELU:
      return gelu_forward(limit, n, gate, up, out);
    case Activation::kReLU2:
      return relu2_forward(limit, n, gate, up, out);
  }
}

void activate_backward(Activation activation, float limit, int64_t n, const float* gate, const float* up,
                       const float* d_a, float* d_gate, float* d_up) {
  switch (activation) {
    case Activation::kSwiGLU:
      return swiglu_backward(limit, n, gate, up, d_a, d_gate, d_up);
    case Activation::kSwiGLUOAI:
      return swigluoai_backward(limit, n, gate, up, d_a, d_gate, d_up);
    case Activation::kGeGLU:
      return geglu_backward(limit, n, gate, up, d_a, d_gate, d_up);
    case Activation::kSiLU:
      return silu_backward(limit, n, gate, up, d_a, d_gate, d_up);
    case Activation::kGELU:
      return gelu_backward(limit, n, gate, up, d_a, d_gate, d_up);
    case Activation::kReLU2:
      return relu2_backward(limit, n, gate, up, d_a, d_gate, d_up);
  }
}

void exp_f32(int64_t n, const float* x, float* out) { exp_loop(n, x, out); }

}  // namespace streammoe::cpu
