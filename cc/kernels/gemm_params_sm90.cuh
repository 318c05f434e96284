// Shape and parameters of the grouped GEMM of gemm_core_sm90.cuh.
//
// Contract: what a launch passes to its kernel, and the sizes that its stages, its epilogues and its launch agree on.
// Trade-off: one struct for up and down, some of whose members only one of them reads.
#pragma once

#include "device/row_owners.h"
#include "device/scheduler.cuh"

namespace streammoe::sm90 {

inline constexpr int kBlockN = 256;  // weight columns per tile: the widest instruction, the fewest reads of A
inline constexpr int kBlockK = 64;   // 128 bytes: the widest swizzle
inline constexpr int kStages = 4;    // 192 KB, what fits beside the staging buffers; 4 x 0.7 us covers an L2 miss
inline constexpr int kBoxBytes = 64 * 64 * 2;
inline constexpr int kStageBytesA = 2 * kBoxBytes;  // [128 rows][64 k], two boxes of 64 rows
inline constexpr int kStageBytesB = 4 * kBoxBytes;  // [64 k][256 columns], four boxes of 64 columns
inline constexpr int kStageBytes = kStageBytesA + kStageBytesB;
inline constexpr int kStagingBytes = 2 * kBoxBytes;         // per math warpgroup
inline constexpr int kGemmThreads = 384;                    // producer warpgroup + two math warpgroups
inline constexpr int kBarrierBytes = 2 * kStages * 8 + 32;  // stages, then the tile queue: entry, full, empty
inline constexpr int kGemmSharedBytes = 1024 + kStages * kStageBytes + 2 * kStagingBytes + kBarrierBytes;
// 65536 registers over 384 threads give 168 at entry; a math thread needs 128 accumulators and its addresses, a
// gathering producer thread eight row sources and the claim of tiles. 128 * 72 + 256 * 216 = 64512.
inline constexpr int kProducerRegisters = 72;
inline constexpr int kMathRegisters = 216;

// Pointers to uint16_t are to elements of the kernel's type.
struct GemmParams {
  const BlockInfo* blocks;
  const int32_t* num_blocks;  // on the device: the launch does not know how many rows there are
  TileSpace space;
  TileCounters* counters;
  int32_t k_steps;                     // ceil(K / kBlockK)
  int32_t n_size;                      // columns of the output
  float limit;                         // clamp of the activation, +infinity for none
  const uint16_t* bias0;               // gate (gated) or the only one; nullptr for none
  const uint16_t* bias1;               // up
  int64_t bias0_stride, bias1_stride;  // elements from one expert to the next
  // Gathered A, scattered out or kept gate and up: the sorted rows' pairs.
  const int32_t* row_pair;
  RowOwners owners;
  uint32_t* resident;    // counts CTAs that have their SM; nullptr for none
  bool holds_successor;  // the next kernel may take SMs only when this one has finished with them
  // Gathered A only: x [T, depth], routes per token.
  const uint16_t* x;
  int32_t top_k;
  int32_t depth;
  // Scattered out only: the matrix [pairs, n_size].
  uint16_t* out;
  // Kept gate and up only: the matrix [pairs, 2 n_size], gate first; ungated [pairs, n_size].
  uint16_t* gate_up;
};

}  // namespace streammoe::sm90
