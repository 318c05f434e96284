#pragma once
#include "device/ptx_sm90.cuh"
#include "host/problem.h"
namespace streammoe::sm90 {
inline uint64_t smem_descriptor(uint32_t address, uint32_t leading, uint32_t stride, uint32_t swizzle) {
  return (static_cast<uint64_t>(swizzle) << 62) | (static_cast<uint64_t>((stride >> 4) & 0x3fff) << 32) |
         (static_cast<uint64_t>((leading >> 4) & 0x3fff) << 16) | ((address >> 4) & 0x3fff);
}
inline void wgmma_fence() {}
void wgmma_commit();
void wgmma_wait_n(int n);
template <int k> inline void wgmma_wait() { wgmma_wait_n(k); }
template <int n> inline void fence_accumulators(float (&d)[n]) { asm volatile("" ::"r"(d) : "memory"); }
void wgmma_op(float* d, int n, int ta, int tb, bool f16, uint64_t a, uint64_t b, int accumulate);
template <int kN, int kTA, int kTB, DType kType = DType::kBF16>
struct Wgmma {
  static void mma(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) { wgmma_op(d, kN, kTA, kTB, kType == DType::kF16, a, b, accumulate); }
};
}
