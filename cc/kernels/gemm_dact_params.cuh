// What a launch of gemm_dact_sm90.cuh's kernels passes to them.
//
// Contract: pointers to uint16_t are to elements of the kernel's type. Trade-off: eight tensor maps are 1 KB of
// parameters; they cannot lie in global memory without a fence that costs more.
#pragma once

#include <cuda.h>

#include "device/scheduler.cuh"
#include "host/problem.h"

namespace streammoe::sm90 {

inline constexpr int kDactColumns = 128;  // of I per tile

struct DactMaps {
  CUtensorMap x, dy, gate, up, down;  // read: rows [R, H], and [L, H, I], [L, H, I], [L, I, H]
  CUtensorMap d_gate, d_up, wa;       // written: [R, I]
};

struct DactParams {
  const BlockInfo* blocks;
  const int32_t* num_blocks;
  TileSpace space;
  TileCounters* counters;
  int32_t k_steps;  // of each product: ceil(H / kBlockK)
  int32_t width;    // I
  float limit;
  const uint16_t* bias0;  // gate; nullptr for none
  const uint16_t* bias1;  // up
  int64_t bias0_stride, bias1_stride;
  const float* row_weight;  // [R]
  float* partial;           // [ceil(I / 64)][R]
  int64_t row_capacity;     // R
  // Kept gate and up only: the matrix [pairs, 2 width], gate first, ungated [pairs, width]; the sorted rows' pairs.
  const uint16_t* gate_up;
  const int32_t* row_pair;
};

using DactKernel = void (*)(DactMaps, DactParams);

// Instantiated in gemm_dact_bf16_sm90.cu and gemm_dact_f16_sm90.cu; nullptr for an activation that does not exist.
// kept: gate and up are read and not computed.
template <DType kType>
DactKernel gemm_dact_kernel(Activation activation, bool kept);

}  // namespace streammoe::sm90
