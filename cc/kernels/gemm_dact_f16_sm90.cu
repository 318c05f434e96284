// The first product of the backward for f16 rows and weights.
//
// Contract and trade-off: see gemm_dact_sm90.cuh.
#include "kernels/gemm_dact_sm90.cuh"

namespace streammoe::sm90 {

template DactKernel gemm_dact_kernel<DType::kF16>(Activation activation, bool kept);

}  // namespace streammoe::sm90
