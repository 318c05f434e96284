// Which routes an expert computes, and in which order.
//
// Contract: the rows of an expert are its pairs (pair_idx = token * K + k) in ascending order, whatever thread or wave
// asks; an id outside 0..L-1 makes no row. With a capacity the lowest pairs of each expert stay, the others are marked.
// Trade-off: a stable counting sort on one thread, two passes over the ids: its cost is far below one GEMM block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace streammoe::cpu {

struct Plan {
  std::vector<int64_t> offsets;  // [L + 1] rows of expert e are pairs[offsets[e]] .. pairs[offsets[e + 1] - 1]
  std::vector<int64_t> pairs;    // [rows] pair_idx of each row
};

// ids: [pairs] local expert ids. capacity: rows an expert may have, -1 for no bound. dropped: [pairs] or null; set to
// 1 for pairs beyond the capacity, left alone for the others.
Plan make_plan(std::span<const int32_t> ids, int64_t num_experts, int64_t capacity, uint8_t* dropped);

// The pairs 0 .. num_pairs - 1 that have no row, ascending.
std::vector<int64_t> pairs_without_row(const Plan& plan, int64_t num_pairs);

}  // namespace streammoe::cpu
