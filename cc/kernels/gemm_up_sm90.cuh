// The first product of the expert layer with its activation: act[row, I] = RN(act(A W_gate (+b), A W_up (+b))).
//
// Contract: see gemm_core_sm90.cuh; gate and up stay in float32 registers up to the one rounding. Gated activations
// take 128 columns of each per tile, ungated ones 256 of the single projection. Rows are sorted already or gathered
// from x. Trade-off: one kernel per type, activation and source of rows (24) instead of branches in the hot loops; each
// type is a translation unit of its own, gemm_up_<type>_sm90.cu, so that they build side by side.
#pragma once

#include "kernels/gemm_launch.cuh"

namespace streammoe::sm90 {
namespace {

// kGated is a parameter only because device code may not call the host function is_gated.
template <DType kType, Activation kActivation, bool kGather, bool kGated = is_gated(kActivation)>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_up_sm90(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b0,
                 const __grid_constant__ CUtensorMap map_b1, const __grid_constant__ CUtensorMap map_out,
                 const __grid_constant__ GemmParams params) {
  grouped_gemm<kType, kGather, false, kGated, true, kActivation>(map_a, map_b0, map_b1, map_out, params);
}

}  // namespace

template <DType kType>
GemmKernel gemm_up_kernel(Activation activation, bool gather) {
  switch (activation) {
    case Activation::kSwiGLU:
      return gather ? gemm_up_sm90<kType, Activation::kSwiGLU, true> : gemm_up_sm90<kType, Activation::kSwiGLU, false>;
    case Activation::kSwiGLUOAI:
      return gather ? gemm_up_sm90<kType, Activation::kSwiGLUOAI, true>
                    : gemm_up_sm90<kType, Activation::kSwiGLUOAI, false>;
    case Activation::kGeGLU:
      return gather ? gemm_up_sm90<kType, Activation::kGeGLU, true> : gemm_up_sm90<kType, Activation::kGeGLU, false>;
    case Activation::kSiLU:
      return gather ? gemm_up_sm90<kType, Activation::kSiLU, true> : gemm_up_sm90<kType, Activation::kSiLU, false>;
    case Activation::kGELU:
      return gather ? gemm_up_sm90<kType, Activation::kGELU, true> : gemm_up_sm90<kType, Activation::kGELU, false>;
    case Activation::kReLU2:
      return gather ? gemm_up_sm90<kType, Activation::kReLU2, true> : gemm_up_sm90<kType, Activation::kReLU2, false>;
  }
  return nullptr;
}

}  // namespace streammoe::sm90
