// Rows between an activation dtype (f32, bf16, f16) and float32.
//
// Contract: to float32 is exact; from float32 rounds to nearest, ties to even, overflow to infinity; NaN stays NaN.
// Sources and destinations need no alignment beyond their element. The loops are integer arithmetic in select form, so
// that they vectorise on every target and every clone gives the same bits. Trade-off: no F16C instruction, which
// costs f16 a few operations per element and saves a code path.
#pragma once

#include <cstdint>

#include "host/problem.h"

// Hot loops are compiled for three levels of x86; with -ffp-contract=off all of them give the same bits. Sanitizers
// instrument the resolver that picks a clone and crash in it, thus none there.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define STREAMMOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define STREAMMOE_CLONES
#endif
#define STREAMMOE_INLINE inline __attribute__((always_inline))

namespace streammoe::cpu {

// std::bit_cast is not always_inline, and GCC does not inline a plain function into a clone of another architecture.
template <class To, class From>
STREAMMOE_INLINE To bit_cast(From value) {
  return __builtin_bit_cast(To, value);
}

// out[i] = float(in[i])
void to_f32(DType dtype, const void* in, int64_t n, float* out);
// out[i] = RN(in[i])
void from_f32(DType dtype, const float* in, int64_t n, void* out);
// values[i] = float(RN(values[i])): what a round trip through the dtype leaves. Nothing for f32.
void round_to(DType dtype, int64_t n, float* values);

inline const void* element(DType dtype, const void* base, int64_t idx) {
  return static_cast<const char*>(base) + idx * dtype_bytes(dtype);
}
inline void* element(DType dtype, void* base, int64_t idx) {
  return static_cast<char*>(base) + idx * dtype_bytes(dtype);
}

}  // namespace streammoe::cpu
