// Host half of the grouped GEMMs: argument checks, tensor maps, launch attributes; shared by up and down.
//
// Contract: cudaErrorInvalidValue for sizes the kernels do not take; a launch needs prepare_gemm() to have
// run on the device. The grid is clusters of two CTAs over the SMs asked for and never more than the tiles
// there can be.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/device_sms.h"
#include "kernels/gemm_core_sm90.cuh"
#include "kernels/launch.h"
#include "kernels/launch_dependent.cuh"
#include "kernels/tensor_map.h"

namespace streammoe::sm90 {

using GemmKernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap, GemmParams);

// Rows of an up product: sorted already, gathered from x, or sorted with their gate and up kept.
enum class UpKind { kSorted, kGather, kKeep };

// Defined in gemm_up_sm90.cuh, instantiated in gemm_up_bf16_sm90.cu and gemm_up_f16_sm90.cu; nullptr for an activation
// that does not exist.
template <DType kType>
GemmKernel gemm_up_kernel(Activation activation, UpKind kind);

inline cudaError_t prepare_gemm(GemmKernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGemmSharedBytes);
}

inline cudaError_t launch_gemm(GemmKernel kernel, bool gated, const GemmArgs& args, cudaStream_t stream,
                               uint32_t* ctas = nullptr) {
  const bool sizes_ok = args.depth > 0 && args.width > 0 && args.depth % 8 == 0 && args.width % 8 == 0 &&
                        args.num_experts > 0 && args.row_capacity > 0 &&
                        args.row_capacity <= std::numeric_limits<int32_t>::max() - kBlockM;
  if (!sizes_ok || args.b0.data == nullptr || (gated && args.b1.data == nullptr)) return cudaErrorInvalidValue;
  int sms = 0;
  if (cudaError_t e = device_sms(&sms); e != cudaSuccess) return e;
  if (args.num_sms > 0) sms = std::min(sms, args.num_sms);

  const int64_t tile_columns = gated ? kBlockN / 2 : kBlockN;
  GemmParams params = {};
  params.blocks = args.blocks;
  params.num_blocks = args.num_blocks;
  params.space.n_tiles = static_cast<int32_t>((args.width + tile_columns - 1) / tile_columns);
  params.space.half_tiles = (params.space.n_tiles + 1) / 2;
  params.space.raster = gemm_raster_pairs();
  params.k_steps = static_cast<int32_t>((args.depth + kBlockK - 1) / kBlockK);
  params.n_size = static_cast<int32_t>(args.width);
  params.limit = args.limit;
  params.bias0 = static_cast<const uint16_t*>(args.bias0.data);
  params.bias1 = static_cast<const uint16_t*>(args.bias1.data);
  params.bias0_stride = args.bias0.expert_stride;
  params.bias1_stride = args.bias1.expert_stride;
  params.counters = args.counters;
  params.row_pair = args.row_pair;
  params.owners = args.owners;
  params.resident = args.resident;
  params.holds_successor = args.holds_successor;
  params.x = static_cast<const uint16_t*>(args.a);
  params.top_k = static_cast<int32_t>(args.top_k);
  params.depth = static_cast<int32_t>(args.depth);
  params.out = static_cast<uint16_t*>(args.out);
  params.gate_up = static_cast<uint16_t*>(args.gate_up);
  const bool gather = args.row_pair != nullptr && !args.scatter && args.gate_up == nullptr;
  if (args.counters == nullptr || (gather && args.top_k < 1)) return cudaErrorInvalidValue;
  const int64_t max_tiles = args.block_capacity * params.space.half_tiles;
  if (max_tiles > std::numeric_limits<int32_t>::max() - sms) return cudaErrorInvalidValue;

  CUtensorMap map_a, map_b0, map_b1, map_out;
  if (cudaError_t e = encode_experts(&map_b0, args.dtype, args.b0.data, args.num_experts, args.depth, args.width,
                                     args.b0.expert_stride, args.b0.row_stride);
      e != cudaSuccess)
    return e;
  map_b1 = map_b0;
  if (gated) {
    if (cudaError_t e = encode_experts(&map_b1, args.dtype, args.b1.data, args.num_experts, args.depth, args.width,
                                       args.b1.expert_stride, args.b1.row_stride);
        e != cudaSuccess)
      return e;
  }
  map_a = map_out = map_b0;  // not used when gathering, when scattering
  if (!gather) {
    if (cudaError_t e = encode_rows(&map_a, args.dtype, args.a, args.row_capacity, args.depth); e != cudaSuccess)
      return e;
  }
  if (!args.scatter) {
    if (cudaError_t e = encode_rows(&map_out, args.dtype, args.out, args.row_capacity, args.width); e != cudaSuccess)
      return e;
  }

  const int64_t clusters = std::max<int64_t>(1, std::min<int64_t>(sms / 2, max_tiles));
  if (ctas != nullptr) *ctas = static_cast<uint32_t>(2 * clusters);
  return launch_dependent(kernel, dim3(static_cast<uint32_t>(2 * clusters)), kGemmThreads, kGemmSharedBytes, stream,
                          map_a, map_b0, map_b1, map_out, params);
}

}  // namespace streammoe::sm90
