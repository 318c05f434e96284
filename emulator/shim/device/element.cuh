#pragma once
#include "emu.h"
#include "host/problem.h"
namespace streammoe::sm90 {
inline uint16_t emu_round(bool f16, float v) {
  if (f16) { _Float16 h = static_cast<_Float16>(v); uint16_t u; std::memcpy(&u, &h, 2); return u; }
  uint32_t b; std::memcpy(&b, &v, 4);
  if (v != v) return 0x7fff;
  return static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline float emu_widen(bool f16, uint16_t u) {
  if (f16) { _Float16 h; std::memcpy(&h, &u, 2); return static_cast<float>(h); }
  return __uint_as_float(static_cast<uint32_t>(u) << 16);
}
template <DType kType> struct Element {
  static constexpr bool f16 = kType == DType::kF16;
  static uint32_t pack(float low, float high) { return emu_round(f16, low) | static_cast<uint32_t>(emu_round(f16, high)) << 16; }
  static uint32_t saturate(uint32_t p) { if (!f16) return p; auto s = [](uint32_t h) { return h == 0x7c00 ? 0x7bffu : h == 0xfc00 ? 0xfbffu : h; }; return s(p & 0xffff) | s(p >> 16) << 16; }
  static float low(uint32_t p) { return emu_widen(f16, static_cast<uint16_t>(p)); }
  static float high(uint32_t p) { return emu_widen(f16, static_cast<uint16_t>(p >> 16)); }
};
}
