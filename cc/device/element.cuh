// The 16-bit element types of rows and weights on the device: pairs of them, to and from float32.
//
// Contract: a pair is a 32-bit word with the element of the lower address in its low half. pack() rounds each float
// once, to nearest even: what exceeds the range becomes infinite, what is below the normal range subnormal, NaN stays
// NaN. low() and high() are exact, subnormals included. saturate() makes infinities the largest finite value, where the
// range is not float32's. Trade-off: kernels take the type as a template parameter and pointers to 16-bit words; one
// instantiation per type costs build time instead of a branch in every loop.
#pragma once

#include <cstdint>

#include "host/problem.h"

namespace streammoe::sm90 {

template <DType kType>
struct Element;

template <>
struct Element<DType::kBF16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  static __device__ __forceinline__ uint32_t saturate(uint32_t pair) { return pair; }
};

template <>
struct Element<DType::kF16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static __device__ __forceinline__ float low(uint32_t pair) {
    float value;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}\n" : "=f"(value) : "r"(pair));
    return value;
  }
  static __device__ __forceinline__ float high(uint32_t pair) {
    float value;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}\n" : "=f"(value) : "r"(pair));
    return value;
  }
  static __device__ __forceinline__ uint32_t saturate(uint32_t pair) {
    constexpr uint32_t kLargest = 0x7bff7bffu, kSmallest = 0xfbfffbffu;  // +-65504, twice
    asm("min.NaN.f16x2 %0, %0, %1;\nmax.NaN.f16x2 %0, %0, %2;\n" : "+r"(pair) : "r"(kLargest), "r"(kSmallest));
    return pair;
  }
};

}  // namespace streammoe::sm90
