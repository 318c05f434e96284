// The up products of bf16 rows and weights.
//
// Contract and trade-off: see gemm_up_sm90.cuh.
#include "kernels/gemm_up_sm90.cuh"

namespace streammoe::sm90 {

template GemmKernel gemm_up_kernel<DType::kBF16>(Activation activation, UpKind kind);

}  // namespace streammoe::sm90
