// The second product of the expert layer: row[row, H] = RN(act[row, I] W_down (+ b)), unweighted, in sorted order.
//
// Contract: see gemm_core_sm90.cuh. Router weights enter in combine, so that the row's bits are the same whoever asks
// for it. Trade-off: rows go through memory once more instead of being added in place; that keeps the sum in k order
// without atomics.
#include "kernels/gemm_launch.cuh"

namespace streammoe::sm90 {
namespace {

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_down_bf16_sm90(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b0,
                        const __grid_constant__ CUtensorMap map_b1, const __grid_constant__ CUtensorMap map_out,
                        const __grid_constant__ GemmParams params) {
  grouped_gemm<false, false, false, Activation::kSiLU>(map_a, map_b0, map_b1, map_out, params);
}

}  // namespace

cudaError_t prepare_gemm_down_bf16_sm90() { return prepare_gemm(gemm_down_bf16_sm90); }

cudaError_t launch_gemm_down_bf16_sm90(const GemmArgs& args, cudaStream_t stream) {
  if (args.row_pair != nullptr) return cudaErrorInvalidValue;  // its rows are the sorted activations
  return launch_gemm(gemm_down_bf16_sm90, false, args, stream);
}

}  // namespace streammoe::sm90
