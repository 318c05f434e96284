// The conversion loops, one set per x86 level.
//
// Contract: see convert.h. Each element is a few integer operations and selects without branches. f16 needs one float
// operation per direction for subnormals: exact when widening, and rounding in the default mode when narrowing, which
// parallel_for sets. Trade-off: memory bound in practice, so no wider unrolling by hand.
#include "cpu/convert.h"

#include <cstring>

namespace streammoe::cpu {
namespace {

STREAMMOE_INLINE float bf16_to_f32(uint16_t h) { return bit_cast<float>(static_cast<uint32_t>(h) << 16); }

STREAMMOE_INLINE uint16_t f32_to_bf16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;  // rounding could carry a NaN into infinity
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

STREAMMOE_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
  // The exponent field moves from bias 15 to 127 by a product with 2^112, which also normalises subnormals.
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * bit_cast<float>(0x77800000u));
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  return bit_cast<float>((magnitude >= 0x0F800000u ? special : finite) | sign);
}

STREAMMOE_INLINE uint16_t f32_to_f16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  // Adding 0.5 puts the units of f16's subnormals into the last bits and rounds them there.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= 0x47800000u ? special : finite) | sign);
}

STREAMMOE_CLONES void widen_bf16(const uint16_t* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(in[i]);
}
STREAMMOE_CLONES void widen_f16(const uint16_t* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(in[i]);
}
STREAMMOE_CLONES void narrow_bf16(const float* in, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(in[i]);
}
STREAMMOE_CLONES void narrow_f16(const float* in, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_f16(in[i]);
}
STREAMMOE_CLONES void round_bf16(int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = bf16_to_f32(f32_to_bf16(values[i]));
}
STREAMMOE_CLONES void round_f16(int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = f16_to_f32(f32_to_f16(values[i]));
}

}  // namespace

void to_f32(DType dtype, const void* in, int64_t n, float* out) {
  if (n <= 0) return;
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kBF16:
      widen_bf16(static_cast<const uint16_t*>(in), n, out);
      return;
    case DType::kF16:
      widen_f16(static_cast<const uint16_t*>(in), n, out);
      return;
  }
}

void from_f32(DType dtype, const float* in, int64_t n, void* out) {
  if (n <= 0) return;
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kBF16:
      narrow_bf16(in, n, static_cast<uint16_t*>(out));
      return;
    case DType::kF16:
      narrow_f16(in, n, static_cast<uint16_t*>(out));
      return;
  }
}

void round_to(DType dtype, int64_t n, float* values) {
  switch (dtype) {
    case DType::kF32:
      return;
    case DType::kBF16:
      round_bf16(n, values);
      return;
    case DType::kF16:
      round_f16(n, values);
      return;
  }
}

}  // namespace streammoe::cpu
