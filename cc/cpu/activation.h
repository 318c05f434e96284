// The activations of the expert layer on float32 rows, forward and backward.
//
// Contract: act(gate, up) as host/problem.h defines it, with an own exponential (multiply and add only): the same bits
// for an element at any position and on any x86 level. NaN and infinity pass through the clamps like through
// jnp.minimum and jnp.maximum: NaN stays NaN. gelu is the tanh form, written x * sigmoid(2 z). The gradient of a clamp
// is zero strictly beyond the bound and one at it. Trade-off: about 2 ulp of the exponential (libm: 1) for a loop that
// vectorises; libm's scalar exponential would cost as much as the GEMMs.
#pragma once

#include <cstdint>

#include "host/problem.h"

namespace streammoe::cpu {

// out[i] = act(gate[i], up[i]); `up` is ignored (may be null) by ungated activations. out may be gate.
void activate(Activation activation, float limit, int64_t n, const float* gate, const float* up, float* out);

// d_gate[i], d_up[i] = d_a[i] * the partial derivatives of act at (gate[i], up[i]). up and d_up may be null when
// ungated. d_gate may be gate, d_up may be up.
void activate_backward(Activation activation, float limit, int64_t n, const float* gate, const float* up,
                       const float* d_a, float* d_gate, float* d_up);

// e^x of each element, for tests: |relative error| <= 2 ulp, subnormal results kept, 0 and inf beyond the range.
void exp_f32(int64_t n, const float* x, float* out);

}  // namespace streammoe::cpu
