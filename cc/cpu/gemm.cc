// The one place that calls OpenBLAS.
//
// Contract: see gemm.h. The wheel's own copy of OpenBLAS has prefixed symbols (scipy_), so that holding it to one
// thread does not touch the OpenBLAS of NumPy or SciPy in the same process. Trade-off: each call packs its weights
// anew; OpenBLAS has no public way to keep the packed form for the next block of the same expert.
#include "cpu/gemm.h"

#include <cblas.h>

namespace streammoe::cpu {

void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
           int64_t ldb, float beta, float* c, int64_t ldc) {
  [[maybe_unused]] static const bool single_threaded = (scipy_openblas_set_num_threads(1), true);
  if (m <= 0 || n <= 0) return;
  const auto size = [](int64_t value) { return static_cast<blasint>(value); };
  scipy_cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, size(m),
                    size(n), size(k), 1.0f, a, size(lda), b, size(ldb), beta, c, size(ldc));
}

}  // namespace streammoe::cpu
