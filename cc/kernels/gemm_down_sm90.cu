// The second product of the expert layer: RN(act[row, I] W_down (+ b)), unweighted, to out[row] in sorted order, or
// scattered, to out[row_pair[row]].
//
// Contract: see gemm_core_sm90.cuh. Router weights enter in combine, so that the row's bits are the same whoever asks
// for it. Scattered rows stand where their token's combine looks for them, whatever sorted order computed them.
// Trade-off: rows go through memory once more instead of being added in place; that keeps the sum in k order without
// atomics.
#include "kernels/gemm_launch.cuh"

namespace streammoe::sm90 {
namespace {

template <DType kType, bool kScatter>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_down_sm90(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b0,
                   const __grid_constant__ CUtensorMap map_b1, const __grid_constant__ CUtensorMap map_out,
                   const __grid_constant__ GemmParams params) {
  grouped_gemm<kType, false, kScatter, false, false, Activation::kSiLU>(map_a, map_b0, map_b1, map_out, params);
}

template <DType kType>
GemmKernel down_kernel(bool scatter) {
  return scatter ? gemm_down_sm90<kType, true> : gemm_down_sm90<kType, false>;
}

}  // namespace

cudaError_t prepare_gemm_down_sm90() {
  for (const bool scatter : {false, true}) {
    if (cudaError_t e = prepare_gemm(down_kernel<DType::kBF16>(scatter)); e != cudaSuccess) return e;
    if (cudaError_t e = prepare_gemm(down_kernel<DType::kF16>(scatter)); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_down_sm90(const GemmArgs& args, cudaStream_t stream) {
  // A is in sorted order always: row_pair belongs to scattering.
  if (args.scatter != (args.row_pair != nullptr) || args.dtype == DType::kF32) return cudaErrorInvalidValue;
  const GemmKernel kernel =
      args.dtype == DType::kF16 ? down_kernel<DType::kF16>(args.scatter) : down_kernel<DType::kBF16>(args.scatter);
  return launch_gemm(kernel, false, args, stream);
}

}  // namespace streammoe::sm90
