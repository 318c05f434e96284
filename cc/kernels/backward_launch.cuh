// Host half of the backward's grouped products: argument checks, tile spaces, grids.
//
// Contract: cudaErrorInvalidValue for sizes the kernels do not take; a launch needs prepare_frame() of its kernel to
// have run on the device. The grid is clusters of two CTAs over the SMs asked for, never more than there can be tiles.
// Trade-off: tensor maps are encoded per launch, about a microsecond of host time each; see tensor_map.h.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/backward.h"
#include "kernels/device_sms.h"
#include "kernels/gemm_core_sm90.cuh"
#include "kernels/launch_dependent.cuh"
#include "kernels/tensor_map.h"

namespace streammoe::sm90 {

template <class Kernel>
cudaError_t prepare_frame(Kernel* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGemmSharedBytes);
}

inline cudaError_t check_sizes(const BackwardArgs& args, const Plan& plan) {
  const BackwardSizes& s = args.sizes;
  const bool ok = s.hidden > 0 && s.intermediate > 0 && s.hidden % 8 == 0 && s.intermediate % 8 == 0 &&
                  std::max(s.hidden, s.intermediate) < (int64_t{1} << 30) && s.num_experts > 0 &&
                  s.gated == is_gated(args.activation) && args.dtype != DType::kF32 && plan.row_capacity > 0 &&
                  plan.row_capacity <= std::numeric_limits<int32_t>::max() - kBlockM && plan.counters != nullptr &&
                  args.weights.gate.data != nullptr && args.weights.down.data != nullptr &&
                  (!s.gated || args.weights.up.data != nullptr);
  return ok ? cudaSuccess : cudaErrorInvalidValue;
}

inline TileSpace tile_space(int64_t width, int64_t tile_columns) {
  TileSpace space;
  space.n_tiles = static_cast<int32_t>((width + tile_columns - 1) / tile_columns);
  space.half_tiles = (space.n_tiles + 1) / 2;
  space.raster = gemm_raster_pairs();
  return space;
}

inline cudaError_t encode_matrix(CUtensorMap* map, DType dtype, const ExpertMatrix<const void*>& matrix,
                                 int64_t experts, int64_t depth, int64_t columns) {
  return encode_experts(map, dtype, matrix.data, experts, depth, columns, matrix.expert_stride, matrix.row_stride);
}

struct Grid {
  uint32_t ctas = 0;
};

// max_tiles: cluster tiles that there can be; they are counted in 32 bits.
inline cudaError_t grid_of(int64_t max_tiles, int32_t num_sms, Grid* grid) {
  int sms = 0;
  if (cudaError_t e = device_sms(&sms); e != cudaSuccess) return e;
  if (num_sms > 0) sms = std::min(sms, num_sms);
  if (max_tiles > std::numeric_limits<int32_t>::max() - sms) return cudaErrorInvalidValue;
  grid->ctas = static_cast<uint32_t>(2 * std::max<int64_t>(1, std::min<int64_t>(sms / 2, max_tiles)));
  return cudaSuccess;
}

}  // namespace streammoe::sm90
