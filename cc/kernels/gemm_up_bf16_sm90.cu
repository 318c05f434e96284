// The first product of the expert layer with its activation: act[row, I] = RN(act(A W_gate (+b), A W_up (+b))).
//
// Contract: see gemm_core_sm90.cuh; gate and up stay in float32 registers up to the one rounding. Gated activations
// take 128 columns of each per tile, ungated ones 256 of the single projection. Rows are sorted already or gathered
// from x. Trade-off: one kernel per activation and source of rows (twelve) instead of branches in the hot loops.
#include "kernels/gemm_launch.cuh"

namespace streammoe::sm90 {
namespace {

// kGated is a parameter only because device code may not call the host function is_gated.
template <Activation kActivation, bool kGather, bool kGated = is_gated(kActivation)>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_up_bf16_sm90(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b0,
                      const __grid_constant__ CUtensorMap map_b1, const __grid_constant__ CUtensorMap map_out,
                      const __grid_constant__ GemmParams params) {
  grouped_gemm<kGather, kGated, true, kActivation>(map_a, map_b0, map_b1, map_out, params);
}

template <bool kGather>
GemmKernel up_kernel(Activation activation) {
  switch (activation) {
    case Activation::kSwiGLU:
      return gemm_up_bf16_sm90<Activation::kSwiGLU, kGather>;
    case Activation::kSwiGLUOAI:
      return gemm_up_bf16_sm90<Activation::kSwiGLUOAI, kGather>;
    case Activation::kGeGLU:
      return gemm_up_bf16_sm90<Activation::kGeGLU, kGather>;
    case Activation::kSiLU:
      return gemm_up_bf16_sm90<Activation::kSiLU, kGather>;
    case Activation::kGELU:
      return gemm_up_bf16_sm90<Activation::kGELU, kGather>;
    case Activation::kReLU2:
      return gemm_up_bf16_sm90<Activation::kReLU2, kGather>;
  }
  return nullptr;
}

}  // namespace

cudaError_t prepare_gemm_up_bf16_sm90() {
  for (int32_t a = 0; a <= static_cast<int32_t>(Activation::kReLU2); ++a) {
    const Activation activation = static_cast<Activation>(a);
    if (cudaError_t e = prepare_gemm(up_kernel<false>(activation)); e != cudaSuccess) return e;
    if (cudaError_t e = prepare_gemm(up_kernel<true>(activation)); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_up_bf16_sm90(const GemmArgs& args, cudaStream_t stream) {
  const bool gather = args.row_pair != nullptr;
  const GemmKernel kernel = gather ? up_kernel<true>(args.activation) : up_kernel<false>(args.activation);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return launch_gemm(kernel, is_gated(args.activation), args, stream);
}

}  // namespace streammoe::sm90
