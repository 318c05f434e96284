// Launches the first product of the backward; the kernels are in gemm_dact_sm90.cuh.
//
// Contract: cudaErrorInvalidValue for a type or an activation that has no kernel. Trade-off: as in gemm_up_sm90.cu, all
// kernels are loaded when the device is prepared.
#include "kernels/backward_launch.cuh"
#include "kernels/gemm_dact_params.cuh"

namespace streammoe::sm90 {

cudaError_t prepare_gemm_dact_sm90() {
  for (int32_t a = 0; a <= static_cast<int32_t>(Activation::kReLU2); ++a) {
    const Activation activation = static_cast<Activation>(a);
    for (const bool kept : {false, true}) {
      if (cudaError_t e = prepare_frame(gemm_dact_kernel<DType::kBF16>(activation, kept)); e != cudaSuccess) return e;
      if (cudaError_t e = prepare_frame(gemm_dact_kernel<DType::kF16>(activation, kept)); e != cudaSuccess) return e;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_dact_sm90(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                                  cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  if (cudaError_t e = check_sizes(args, plan); e != cudaSuccess) return e;
  const bool kept = args.gate_up != nullptr;
  const DactKernel kernel = args.dtype == DType::kF16 ? gemm_dact_kernel<DType::kF16>(args.activation, kept)
                                                      : gemm_dact_kernel<DType::kBF16>(args.activation, kept);
  if (kernel == nullptr) return cudaErrorInvalidValue;

  DactMaps maps;
  const int64_t capacity = plan.row_capacity;
  if (cudaError_t e = encode_rows(&maps.x, args.dtype, rows.x, capacity, s.hidden); e != cudaSuccess) return e;
  if (cudaError_t e = encode_rows(&maps.dy, args.dtype, rows.dy, capacity, s.hidden); e != cudaSuccess) return e;
  if (cudaError_t e = encode_matrix(&maps.gate, args.dtype, args.weights.gate, s.num_experts, s.hidden, s.intermediate);
      e != cudaSuccess)
    return e;
  if (cudaError_t e = encode_matrix(&maps.down, args.dtype, args.weights.down, s.num_experts, s.intermediate, s.hidden);
      e != cudaSuccess)
    return e;
  if (cudaError_t e = encode_rows_narrow(&maps.d_gate, args.dtype, rows.d_gate, capacity, s.intermediate);
      e != cudaSuccess)
    return e;
  if (cudaError_t e = encode_rows_narrow(&maps.wa, args.dtype, rows.wa, capacity, s.intermediate); e != cudaSuccess)
    return e;
  maps.up = maps.gate, maps.d_up = maps.d_gate;  // not used when ungated
  if (s.gated) {
    if (cudaError_t e = encode_matrix(&maps.up, args.dtype, args.weights.up, s.num_experts, s.hidden, s.intermediate);
        e != cudaSuccess)
      return e;
    if (cudaError_t e = encode_rows_narrow(&maps.d_up, args.dtype, rows.d_up, capacity, s.intermediate);
        e != cudaSuccess)
      return e;
  }

  DactParams params = {};
  params.blocks = plan.blocks;
  params.num_blocks = plan.totals;
  params.space = tile_space(s.intermediate, kDactColumns);
  params.counters = plan.counters;
  params.k_steps = static_cast<int32_t>((s.hidden + kBlockK - 1) / kBlockK);
  params.width = static_cast<int32_t>(s.intermediate);
  params.limit = args.limit;
  params.bias0 = static_cast<const uint16_t*>(args.weights.b_gate.data);
  params.bias1 = static_cast<const uint16_t*>(args.weights.b_up.data);
  params.bias0_stride = args.weights.b_gate.expert_stride;
  params.bias1_stride = args.weights.b_up.expert_stride;
  params.row_weight = rows.row_weight;
  params.partial = rows.partial;
  params.row_capacity = capacity;
  params.gate_up = static_cast<const uint16_t*>(args.gate_up);
  params.row_pair = plan.row_pair;
  Grid grid;
  if (cudaError_t e = grid_of(plan.block_capacity * params.space.half_tiles, args.num_sms, &grid); e != cudaSuccess)
    return e;
  return launch_dependent(kernel, dim3(grid.ctas), kGemmThreads, kGemmSharedBytes, stream, maps, params);
}

}  // namespace streammoe::sm90
