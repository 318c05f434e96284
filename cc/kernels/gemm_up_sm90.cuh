// The first product of the expert layer with its activation: act[row, I] = RN(act(A W_gate (+b), A W_up (+b))).
//
// Contract: see gemm_core_sm90.cuh; gate and up stay in float32 registers up to the one rounding. Gated activations
// take 128 columns of each per tile, ungated ones 256 of the single projection. Rows are sorted already or gathered
// from x, or sorted and their gate and up kept too. Trade-off: one kernel per type, activation and kind (36) instead of
// branches in the hot loops; each type is a translation unit of its own, gemm_up_<type>_sm90.cu, so that they build
// side by side.
#pragma once

#include "kernels/gemm_launch.cuh"

namespace streammoe::sm90 {
namespace {

// kGated is a parameter only because device code may not call the host function is_gated.
template <DType kType, Activation kActivation, UpKind kKind, bool kGated = is_gated(kActivation)>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_up_sm90(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b0,
                 const __grid_constant__ CUtensorMap map_b1, const __grid_constant__ CUtensorMap map_out,
                 const __grid_constant__ GemmParams params) {
  grouped_gemm<kType, kKind == UpKind::kGather, false, kGated, true, kActivation, kKind == UpKind::kKeep>(
      map_a, map_b0, map_b1, map_out, params);
}

template <DType kType, Activation kActivation>
GemmKernel gemm_up_of(UpKind kind) {
  switch (kind) {
    case UpKind::kSorted:
      return gemm_up_sm90<kType, kActivation, UpKind::kSorted>;
    case UpKind::kGather:
      return gemm_up_sm90<kType, kActivation, UpKind::kGather>;
    case UpKind::kKeep:
      return gemm_up_sm90<kType, kActivation, UpKind::kKeep>;
  }
  return nullptr;
}

}  // namespace

template <DType kType>
GemmKernel gemm_up_kernel(Activation activation, UpKind kind) {
  switch (activation) {
    case Activation::kSwiGLU:
      return gemm_up_of<kType, Activation::kSwiGLU>(kind);
    case Activation::kSwiGLUOAI:
      return gemm_up_of<kType, Activation::kSwiGLUOAI>(kind);
    case Activation::kGeGLU:
      return gemm_up_of<kType, Activation::kGeGLU>(kind);
    case Activation::kSiLU:
      return gemm_up_of<kType, Activation::kSiLU>(kind);
    case Activation::kGELU:
      return gemm_up_of<kType, Activation::kGELU>(kind);
    case Activation::kReLU2:
      return gemm_up_of<kType, Activation::kReLU2>(kind);
  }
  return nullptr;
}

}  // namespace streammoe::sm90
