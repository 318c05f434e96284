// wgmma for bf16 or f16 operands from shared memory, float32 accumulators: descriptors and the m64nNk16 instruction.
//
// Contract: `Wgmma<N, TransA, TransB, Type>::mma(d, a, b, accumulate)` adds A[64,16] B[16,N] to d, or starts d from
// +0 when accumulate is 0. d holds N/2 floats per thread of the warpgroup: for column group j (8 columns)
// d[4j], d[4j+1] lie in row (lane / 4), d[4j+2], d[4j+3] eight rows below, columns 8j + 2 (lane % 4) and the
// next. Trans 0 is K-major, 1 is MN-major. The instruction is asynchronous: d may be read only after
// wgmma_wait and fence_accumulators. Trade-off: one asm block per N, written out, so that the kernels need no
// third-party header.
#pragma once

#include <cstdint>

#include "host/problem.h"

namespace streammoe::sm90 {

// Shared-memory matrix descriptor. Offsets are in bytes and stored in units of 16. Swizzle codes: 0 none, 1
// 128 B. K-major, 128 B: stride = distance of 8-row groups (1024), leading unused. MN-major, 128 B: stride =
// distance of 8-deep k groups (1024), leading = distance of 64-wide column chunks. No swizzle: see
// benchmarks/gpu/bit_test.cu.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t leading, uint32_t stride,
                                                    uint32_t swizzle) {
  return (static_cast<uint64_t>(swizzle) << 62) | (static_cast<uint64_t>((stride >> 4) & 0x3fff) << 32) |
         (static_cast<uint64_t>((leading >> 4) & 0x3fff) << 16) | ((address >> 4) & 0x3fff);
}

// Orders this warp's earlier register accesses (accumulators) before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until at most kPending committed groups of this warp are unfinished; shared memory they read is free
// then.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Tells the compiler that the accumulators change here, so that no read of them moves above the wait before
// it.
template <int kCount>
__device__ __forceinline__ void fence_accumulators(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kN, int kTransA, int kTransB, DType kType = DType::kBF16>
struct Wgmma;

// clang-format off
#define STREAMMOE_ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define STREAMMOE_ACC16(d, i) \
  STREAMMOE_ACC4(d, i), STREAMMOE_ACC4(d, i + 4), STREAMMOE_ACC4(d, i + 8), STREAMMOE_ACC4(d, i + 12)
#define STREAMMOE_ACC32(d, i) STREAMMOE_ACC16(d, i), STREAMMOE_ACC16(d, i + 16)

// The accumulators as operands, sixteen at a time.
#define STREAMMOE_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define STREAMMOE_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define STREAMMOE_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define STREAMMOE_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define STREAMMOE_R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define STREAMMOE_R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define STREAMMOE_R6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define STREAMMOE_R7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// One instruction; ia, ib, ip, ita, itb are the numbers of the operands behind the accumulators.
#define STREAMMOE_MMA(n, type, accumulators, ia, ib, ip, ita, itb, ...)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ip ", 0;\n"                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" accumulators "}, %" #ia ", %" #ib \
               ", p, 1, 1, %" #ita ", %" #itb ";\n}\n"                                                                \
               : __VA_ARGS__                                                                                          \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB))

#define STREAMMOE_WGMMA(n, ...)                                                                                       \
  template <int kTransA, int kTransB, DType kType>                                                                    \
  struct Wgmma<n, kTransA, kTransB, kType> {                                                                          \
    static_assert(kType == DType::kBF16 || kType == DType::kF16);                                                     \
    static __device__ __forceinline__ void mma(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {           \
      if constexpr (kType == DType::kBF16) {                                                                          \
        STREAMMOE_MMA(n, "bf16", __VA_ARGS__);                                                                        \
      } else {                                                                                                        \
        STREAMMOE_MMA(n, "f16", __VA_ARGS__);                                                                         \
      }                                                                                                               \
    }                                                                                                                 \
  }

STREAMMOE_WGMMA(8, "%0, %1, %2, %3", 4, 5, 6, 7, 8, STREAMMOE_ACC4(d, 0));
STREAMMOE_WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", 8, 9, 10, 11, 12, STREAMMOE_ACC4(d, 0), STREAMMOE_ACC4(d, 4));
STREAMMOE_WGMMA(32, STREAMMOE_R0, 16, 17, 18, 19, 20, STREAMMOE_ACC16(d, 0));
STREAMMOE_WGMMA(64, STREAMMOE_R0 ", " STREAMMOE_R1, 32, 33, 34, 35, 36,
                STREAMMOE_ACC32(d, 0));
STREAMMOE_WGMMA(96, STREAMMOE_R0 ", " STREAMMOE_R1 ", " STREAMMOE_R2, 48, 49, 50, 51, 52,
                STREAMMOE_ACC32(d, 0), STREAMMOE_ACC16(d, 32));
STREAMMOE_WGMMA(128, STREAMMOE_R0 ", " STREAMMOE_R1 ", " STREAMMOE_R2 ", " STREAMMOE_R3, 64, 65, 66, 67, 68,
                STREAMMOE_ACC32(d, 0), STREAMMOE_ACC32(d, 32));
STREAMMOE_WGMMA(192, STREAMMOE_R0 ", " STREAMMOE_R1 ", " STREAMMOE_R2 ", "
                STREAMMOE_R3 ", " STREAMMOE_R4 ", " STREAMMOE_R5, 96, 97, 98, 99, 100,
                STREAMMOE_ACC32(d, 0), STREAMMOE_ACC32(d, 32), STREAMMOE_ACC32(d, 64));
STREAMMOE_WGMMA(256, STREAMMOE_R0 ", " STREAMMOE_R1 ", " STREAMMOE_R2 ", " STREAMMOE_R3 ", "
                STREAMMOE_R4 ", " STREAMMOE_R5 ", " STREAMMOE_R6 ", " STREAMMOE_R7, 128, 129, 130, 131, 132,
                STREAMMOE_ACC32(d, 0), STREAMMOE_ACC32(d, 32), STREAMMOE_ACC32(d, 64), STREAMMOE_ACC32(d, 96));

#undef STREAMMOE_WGMMA
#undef STREAMMOE_MMA
#undef STREAMMOE_R0
#undef STREAMMOE_R1
#undef STREAMMOE_R2
#undef STREAMMOE_R3
#undef STREAMMOE_R4
#undef STREAMMOE_R5
#undef STREAMMOE_R6
#undef STREAMMOE_R7
#undef STREAMMOE_ACC32
#undef STREAMMOE_ACC16
#undef STREAMMOE_ACC4
// clang-format on

}  // namespace streammoe::sm90
