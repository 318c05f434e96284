// Which tile of which expert's weight gradient a cluster works on; host and device.
//
// Contract: a gradient is a [rows, columns] matrix per expert, in tiles of 128 x n. A cluster tile is two row tiles
// with the same columns, whose operand the pair shares; with an odd number of row tiles the last pair has one that is
// empty. Cluster tiles are numbered expert by expert, ascending, so that an expert's rows are read from memory once;
// all experts have the same number, also those without rows, whose tiles become zeros. Trade-off: every expert costs
// all its tiles in index space, which is what must be written anyway.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define STREAMMOE_HOST_DEVICE __host__ __device__
#else
#define STREAMMOE_HOST_DEVICE
#endif

namespace streammoe {

struct GradientSpace {
  int32_t row_pairs;     // ceil(row tiles / 2)
  int32_t column_tiles;  // of all matrices that a tile's columns may belong to
  bool rows_first;       // walk through all row pairs before the next column tile
};

struct GradientTile {
  int32_t expert, row_pair, column_tile;
};

STREAMMOE_HOST_DEVICE inline int32_t gradient_tiles(const GradientSpace& space) {
  return space.row_pairs * space.column_tiles;
}

STREAMMOE_HOST_DEVICE inline GradientTile gradient_tile(const GradientSpace& space, int32_t index) {
  const int32_t tiles = gradient_tiles(space);
  const int32_t expert = index / tiles, within = index - expert * tiles;
  const int32_t inner = space.rows_first ? space.row_pairs : space.column_tiles;
  const int32_t slow = within / inner, fast = within - slow * inner;
  return space.rows_first ? GradientTile{expert, fast, slow} : GradientTile{expert, slow, fast};
}

}  // namespace streammoe

#undef STREAMMOE_HOST_DEVICE
