// The tile order of the weight gradients, and the choices behind it, as pure functions.
//
// Contract: a plain main() that prints every broken promise and exits with 1: each tile of each expert once, experts
// ascending, the shorter side walked first, and nothing outside 32 bits. Trade-off: no GPU, so this says nothing about
// the kernel that walks.
#include "device/gradient_tiles.h"

#include <cstdint>
#include <cstdio>
#include <vector>

#include "host/heuristics.h"

namespace streammoe {
namespace {

int failures = 0;

void expect(bool condition, const char* what, const GradientSpace& space, int32_t index) {
  if (condition || ++failures > 20) return;
  std::printf("FAIL %s: %d row pairs, %d column tiles, rows first %d, index %d\n", what, space.row_pairs,
              space.column_tiles, space.rows_first, index);
}

void check_space(int32_t row_pairs, int32_t column_tiles, int32_t experts) {
  const GradientSpace space{row_pairs, column_tiles, gradient_rows_first(row_pairs, column_tiles)};
  const int32_t tiles = gradient_tiles(space);
  std::vector<int> seen(static_cast<size_t>(experts * tiles), 0);
  GradientTile before{0, 0, 0};
  for (int32_t index = 0; index < experts * tiles; ++index) {
    const GradientTile tile = gradient_tile(space, index);
    const bool inside = tile.expert >= 0 && tile.expert < experts && tile.row_pair >= 0 && tile.row_pair < row_pairs &&
                        tile.column_tile >= 0 && tile.column_tile < column_tiles;
    expect(inside, "a tile lies outside of its gradient", space, index);
    if (!inside) continue;
    expect(tile.expert == index / tiles, "experts do not ascend", space, index);
    ++seen[static_cast<size_t>((tile.expert * row_pairs + tile.row_pair) * column_tiles + tile.column_tile)];
    const bool same_expert = index > 0 && before.expert == tile.expert;
    const bool shorter_moved =
        row_pairs <= column_tiles ? before.row_pair != tile.row_pair : before.column_tile != tile.column_tile;
    const int32_t shorter = row_pairs <= column_tiles ? row_pairs : column_tiles;
    expect(!same_expert || shorter == 1 || shorter_moved, "the longer side is walked first", space, index);
    before = tile;
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    expect(seen[i] == 1, "a tile is not visited once", space, static_cast<int32_t>(i));
  }
}

}  // namespace
}  // namespace streammoe

int main() {
  for (const int32_t rows : {1, 2, 3, 8, 28, 56}) {
    for (const int32_t columns : {1, 2, 5, 16, 112}) {
      for (const int32_t experts : {1, 2, 7}) streammoe::check_space(rows, columns, experts);
    }
  }
  // 1024 experts of 30000 by 30000: the largest index of a tile, and beyond.
  const streammoe::GradientSpace wide{118, 118, true};
  streammoe::expect(streammoe::gradient_tile(wide, 1023 * 118 * 118 + 5).expert == 1023, "large", wide, 0);
  std::printf(streammoe::failures == 0 ? "gradient_tiles_test: ok\n" : "gradient_tiles_test: %d failures\n",
              streammoe::failures);
  return streammoe::failures == 0 ? 0 : 1;
}
