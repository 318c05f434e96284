// Row-major single precision GEMM on one thread: C = beta * C + op(A) * op(B), by OpenBLAS.
//
// Contract: OpenBLAS is held to one thread (the library runs blocks in parallel instead). For fixed (transA, transB,
// m, n, k) a row of C depends on its row of op(A) and on B only: not on its position, its neighbours, strides or
// addresses. It does depend on m: OpenBLAS chooses kernels and tiles by the sizes of the call. Therefore every
// expert GEMM has exactly block_m rows, zero padded. beta == 0 never reads C.
// Trade-off: the padding costs up to block_m - 1 rows per expert and buys rows that batch, wave and rank cannot change.
#pragma once

#include <cstdint>

namespace streammoe::cpu {

// op(A) is [m, k], op(B) is [k, n], C is [m, n]; ld* are row strides in elements of the stored matrices. Sizes and
// strides must fit 31 bits (OpenBLAS's 32-bit interface).
void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
           int64_t ldb, float beta, float* c, int64_t ldc);

}  // namespace streammoe::cpu
