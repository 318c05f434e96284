// What the plan writes for the grouped GEMMs: the row block table and the tile counters; host and device.
//
// Contract: experts own disjoint runs of blocks of kBlockM rows, ascending by expert. Entry b of the table
// says whose block b is and where that expert's run begins, so that a scheduler finds its tile with one
// 16-byte load and no search. Trade-off: 16 bytes per block instead of a prefix sum per expert; 64 KB at half
// a million routes.
#pragma once

#include <cstdint>

namespace streammoe {

// Rows per block: two m64 instructions, one per math warpgroup. A last block of at most 64 rows costs half.
inline constexpr int32_t kBlockM = 128;

struct alignas(16) BlockInfo {
  int32_t expert;       // local expert
  int32_t first_block;  // the expert's first block
  int32_t num_blocks;   // blocks of the expert
  int32_t num_rows;     // valid rows of the expert
};

// The claims of the grouped GEMMs of one plan, which run one after the other. The plan zeroes them, every GEMM leaves
// them zero.
struct TileCounters {
  int32_t claimed;   // tiles claimed beyond each cluster's first
  int32_t finished;  // clusters that found nothing left
};

}  // namespace streammoe
