// Sizes and choices of the CUDA path as pure functions of the problem, testable without a GPU.
//
// Contract: host arithmetic in 64 bits, no CUDA call, no state. What is returned depends on the arguments
// only, so that all ranks and every replay of a graph agree. The constants are for the H200 (132 SMs, 50 MB
// of L2); another part changes them here and nowhere else. Trade-off: measured constants instead of an
// autotuner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "device/block_info.h"
#include "protocol/ring.h"

namespace streammoe {

// Local experts a plan can hold: per-warp counters of 8 warps x 1024 experts x 4 bytes = 32 KB of shared
// memory.
inline constexpr int64_t kMaxLocalExperts = 1024;

// Routes of a plan, so that a row number and a padded row count fit 32 bits.
inline constexpr int64_t kMaxPlanPairs = std::numeric_limits<int32_t>::max() - kBlockM * kMaxLocalExperts;

static_assert(kRowBlock == kBlockM, "the ring's pool is measured in the row blocks of the kernels");

// Routes per plan CTA: at least 1024 (8 warps x 4 loads of 32), and at most 128 CTAs, because each CTA of the
// second plan kernel reads all counts of the first: 128 x 128 experts x 4 B = 64 KB of L2 reads per CTA.
inline constexpr int64_t plan_chunk_pairs(int64_t num_pairs) {
  const int64_t spread = (num_pairs + 127) / 128;
  return std::max<int64_t>(1024, (spread + 255) / 256 * 256);
}

inline constexpr int64_t plan_chunks(int64_t num_pairs) {
  const int64_t chunk = plan_chunk_pairs(num_pairs);
  return std::max<int64_t>(1, (num_pairs + chunk - 1) / chunk);
}

// Row pairs that walk through all column tiles together. 8 pairs x 8 column tiles fill 64 of 66 clusters: the
// smallest footprint (2048 rows and 2048 columns at once) for one wave of the machine.
inline constexpr int32_t gemm_raster_pairs() { return 8; }

// Whether the up product gathers its rows itself or finds them sorted by a kernel of its own. Gathering saves
// T K H x 4 bytes of traffic, about 180 / I of the product's time, and costs about 2 % of it (copies by threads instead
// of the copy engine): even near I = 9000. Measured: 6 % of the layer won at I = 768, 1 to 3 % lost at 14336. Below
// 8 rows per expert there is nothing to save, and a gathering producer starts its weights later: 7 us lost at T = 1.
inline constexpr bool gather_in_gemm(int64_t num_pairs, int64_t num_experts, int64_t intermediate) {
  return intermediate < 8192 && num_pairs >= 8 * num_experts;
}

// Whether the tiles of a weight gradient walk along its rows first. Both operands are read by every tile of a row or a
// column of tiles: the shorter side is walked first, so that its operand stays in L2 while the longer one is read once.
// At mixtral's W_down (I = 14336 by H = 4096, 2048 rows) the other order reads 58 MB again for each of 16 column tiles.
inline constexpr bool gradient_rows_first(int64_t row_pairs, int64_t column_tiles) { return row_pairs <= column_tiles; }

}  // namespace streammoe
