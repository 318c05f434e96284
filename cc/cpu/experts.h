// Expert rows: row = RN(a * W_down + b_down), a = RN(act(x * W_gate + b_gate, x * W_up + b_up)), unweighted.
//
// Contract: rows are computed in blocks of exactly block_m (cc/cpu/gemm.h says why), so that a row depends on its x
// and its expert only. Only the rows named by a block are read and written; padding is zero and stays in scratch.
// Bits do not depend on the number of threads or on whether weights are packed or split. f32 weights are used in place;
// bf16 and f16 weights are converted once per call, a few experts at a time. Trade-off: parallel over blocks, not
// inside one, so that a call of a single block uses a single thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/plan.h"
#include "host/problem.h"

namespace streammoe::cpu {

// One row: x [H] and where its result [H] goes, both of the problem's dtype.
struct RowTask {
  const void* x;
  void* out;
  void* gate_up = nullptr;  // [2 I], ungated [I]: where to keep what enters the activation; nullptr: nowhere
};

// `count` (1..block_m) rows of one expert: rows[first] .. rows[first + count - 1].
struct ExpertBlock {
  int64_t expert, first, count;
};

// Blocks of a plan whose rows are tasks in plan order: block_m rows each, the last one of an expert shorter.
std::vector<ExpertBlock> split_blocks(const Plan& plan, int64_t block_m);

// Computes all blocks on up to problem.threads threads. Blocks of one expert are best adjacent: its weights are then
// read (and converted) once.
void run_expert_blocks(const ExpertProblem& problem, const ExpertWeights& weights, std::span<const ExpertBlock> blocks,
                       const RowTask* rows);

// The weights of one expert in float32: in place for f32, else converted copies. Shared with the backward.
struct ExpertView {
  const float *gate = nullptr, *up = nullptr, *down = nullptr;
  const float *b_gate = nullptr, *b_up = nullptr, *b_down = nullptr;
  int64_t ld_gate = 0, ld_up = 0, ld_down = 0;
};

// Floats of scratch that a converted expert takes; 0 for f32.
int64_t view_floats(const ExpertProblem& problem);
// Tasks into which one expert's conversion is cut; 0 for f32.
int64_t view_tasks(const ExpertProblem& problem);
// Runs one of them. The tasks of an expert are independent of each other.
void convert_view_task(const ExpertProblem& problem, const ExpertWeights& weights, int64_t expert, int64_t task,
                       float* scratch);
// The view; its scratch must be converted by then.
ExpertView make_view(const ExpertProblem& problem, const ExpertWeights& weights, int64_t expert, const float* scratch);

// gate, up [block_m, I] = x [block_m, H] times the projections, biases added to the first `count` rows. up is null
// when the activation is ungated.
void project_rows(const ExpertProblem& problem, const ExpertView& view, const float* x, int64_t count, float* gate,
                  float* up);

}  // namespace streammoe::cpu
