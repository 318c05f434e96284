// Expert blocks on the CPU: gather, two projections, activation, one projection, scatter.
//
// Contract: see experts.h. Scratch belongs to the thread that runs a block and is kept between calls. Weights that
// need conversion are handled in groups of experts that fit kGroupBytes: all threads convert, then all threads compute,
// so that converted weights are still in the last-level cache when the first block reads them.
// Trade-off: two joins per group of experts instead of a dependency graph between conversions and blocks.
#include "cpu/experts.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/activation.h"
#include "cpu/convert.h"
#include "cpu/gemm.h"
#include "cpu/threads.h"

namespace streammoe::cpu {
namespace {

constexpr int64_t kGroupBytes = int64_t{32} << 20;  // converted weights held at a time, unless one expert is larger
constexpr int64_t kTaskElements = 1 << 16;          // elements of one conversion task

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The matrices of one expert as the conversion sees them: rows of `columns` elements.
struct Part {
  const ExpertMatrix<const void*>* matrix;
  int64_t rows, columns, offset;  // offset: first float of the converted copy
  int64_t rows_per_task() const { return std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, columns)); }
};

struct Parts {
  Part part[6];  // gate, up, down, b_gate, b_up, b_down
  int64_t floats;
};

Parts parts_of(const ExpertProblem& p, const ExpertWeights& w) {
  const int64_t up_rows = is_gated(p.activation) ? p.hidden : 0, up_row = is_gated(p.activation) ? 1 : 0;
  Parts parts{{{&w.gate, p.hidden, p.intermediate, 0},
               {&w.up, up_rows, p.intermediate, 0},
               {&w.down, p.intermediate, p.hidden, 0},
               {&w.b_gate, 1, p.intermediate, 0},
               {&w.b_up, up_row, p.intermediate, 0},
               {&w.b_down, 1, p.hidden, 0}},
              0};
  for (Part& part : parts.part) {
    part.offset = parts.floats;
    parts.floats += part.rows * part.columns;
  }
  return parts;
}

float* grown(std::vector<float>* scratch, int64_t floats) {
  if (scratch->size() < static_cast<size_t>(floats)) scratch->resize(static_cast<size_t>(floats));
  return scratch->data();
}

// Reads the block's rows of x into [block_m, H]; the rest of the rows is zero.
void gather(const ExpertProblem& p, const RowTask* rows, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) to_f32(p.dtype, rows[i].x, p.hidden, x + i * p.hidden);
  std::fill(x + count * p.hidden, x + p.block_m * p.hidden, 0.0f);
}

void add_bias(const float* bias, int64_t rows, int64_t columns, float* values) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) values[i * columns + j] += bias[j];
  }
}

// up: null when ungated. In f16 what exceeds the range is the largest value, because the derivative of an infinity
// would be NaN.
void keep(const ExpertProblem& p, const RowTask* rows, int64_t count, const float* gate, const float* up) {
  constexpr float kLargestF16 = 65504.0f;
  static thread_local std::vector<float> scratch;
  const int64_t width = p.intermediate;
  const auto store = [&](const float* values, void* out) {
    if (p.dtype == DType::kF16) {
      float* const clamped = grown(&scratch, width);
      for (int64_t j = 0; j < width; ++j) {
        const float v = values[j];  // NaN stays
        clamped[j] = v > kLargestF16 ? kLargestF16 : v < -kLargestF16 ? -kLargestF16 : v;
      }
      values = clamped;
    }
    from_f32(p.dtype, values, width, out);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i].gate_up == nullptr) continue;
    store(gate + i * width, rows[i].gate_up);
    if (up != nullptr) store(up + i * width, element(p.dtype, rows[i].gate_up, width));
  }
}

void run_block(const ExpertProblem& p, const ExpertView& view, const RowTask* rows, int64_t count) {
  static thread_local std::vector<float> scratch;
  const bool gated = is_gated(p.activation);
  const int64_t wide = p.block_m * p.intermediate;
  float* const x = grown(&scratch, p.block_m * p.hidden + (gated ? 2 : 1) * wide);
  float* const gate = x + p.block_m * p.hidden;
  float* const up = gated ? gate + wide : nullptr;
  gather(p, rows, count, x);
  project_rows(p, view, x, count, gate, up);
  keep(p, rows, count, gate, up);
  // Padding rows of gate are zero and stay so: the activation sees the block's own rows only.
  activate(p.activation, p.limit, count * p.intermediate, gate, up, gate);
  round_to(p.dtype, count * p.intermediate, gate);
  float* const out = x;  // x is not needed any more
  sgemm(false, false, p.block_m, p.hidden, p.intermediate, gate, p.intermediate, view.down, view.ld_down, 0.0f, out,
        p.hidden);
  add_bias(view.b_down, count, p.hidden, out);
  for (int64_t i = 0; i < count; ++i) from_f32(p.dtype, out + i * p.hidden, p.hidden, rows[i].out);
}

}  // namespace

std::vector<ExpertBlock> split_blocks(const Plan& plan, int64_t block_m) {
  std::vector<ExpertBlock> blocks;
  for (size_t e = 0; e + 1 < plan.offsets.size(); ++e) {
    for (int64_t first = plan.offsets[e]; first < plan.offsets[e + 1]; first += block_m) {
      blocks.push_back({static_cast<int64_t>(e), first, std::min(block_m, plan.offsets[e + 1] - first)});
    }
  }
  return blocks;
}

int64_t view_floats(const ExpertProblem& problem) {
  return problem.dtype == DType::kF32 ? 0 : parts_of(problem, {}).floats;
}

int64_t view_tasks(const ExpertProblem& problem) {
  if (problem.dtype == DType::kF32) return 0;
  int64_t tasks = 0;
  for (const Part& part : parts_of(problem, {}).part) tasks += ceil_div(part.rows, part.rows_per_task());
  return tasks;
}

void convert_view_task(const ExpertProblem& problem, const ExpertWeights& weights, int64_t expert, int64_t task,
                       float* scratch) {
  const Parts parts = parts_of(problem, weights);
  for (const Part& part : parts.part) {
    const int64_t tasks = ceil_div(part.rows, part.rows_per_task());
    if (task >= tasks) {
      task -= tasks;
      continue;
    }
    if (part.matrix->data == nullptr) return;  // an absent bias
    const int64_t first = task * part.rows_per_task();
    const int64_t end = std::min(part.rows, first + part.rows_per_task());
    for (int64_t row = first; row < end; ++row) {
      const int64_t at = expert * part.matrix->expert_stride + row * part.matrix->row_stride;
      to_f32(problem.dtype, element(problem.dtype, part.matrix->data, at), part.columns,
             scratch + part.offset + row * part.columns);
    }
    return;
  }
}

ExpertView make_view(const ExpertProblem& problem, const ExpertWeights& weights, int64_t expert, const float* scratch) {
  const Parts parts = parts_of(problem, weights);
  const bool in_place = problem.dtype == DType::kF32;
  const auto data = [&](const Part& part) -> const float* {
    if (part.matrix->data == nullptr || part.rows == 0) return nullptr;
    if (!in_place) return scratch + part.offset;
    return static_cast<const float*>(part.matrix->data) + expert * part.matrix->expert_stride;
  };
  const auto stride = [&](const Part& part) { return in_place ? part.matrix->row_stride : part.columns; };
  const auto& [gate, up, down, b_gate, b_up, b_down] = parts.part;
  return {data(gate),   data(up),     data(down), data(b_gate), data(b_up),
          data(b_down), stride(gate), stride(up), stride(down)};
}

void project_rows(const ExpertProblem& problem, const ExpertView& view, const float* x, int64_t count, float* gate,
                  float* up) {
  const int64_t h = problem.hidden, i = problem.intermediate;
  sgemm(false, false, problem.block_m, i, h, x, h, view.gate, view.ld_gate, 0.0f, gate, i);
  add_bias(view.b_gate, count, i, gate);
  if (up == nullptr) return;
  sgemm(false, false, problem.block_m, i, h, x, h, view.up, view.ld_up, 0.0f, up, i);
  add_bias(view.b_up, count, i, up);
}

void run_expert_blocks(const ExpertProblem& problem, const ExpertWeights& weights, std::span<const ExpertBlock> blocks,
                       const RowTask* rows) {
  const int64_t floats = view_floats(problem), tasks = view_tasks(problem);
  if (floats == 0) {  // used in place
    parallel_for(problem.threads, static_cast<int64_t>(blocks.size()), [&](int64_t b) {
      const ExpertBlock& block = blocks[static_cast<size_t>(b)];
      run_block(problem, make_view(problem, weights, block.expert, nullptr), rows + block.first, block.count);
    });
    return;
  }
  const int64_t group_size = std::max<int64_t>(1, kGroupBytes / (floats * static_cast<int64_t>(sizeof(float))));
  std::unique_ptr<float[]> scratch;
  std::vector<int64_t> experts, slot;  // experts of the group; slot of each of the group's blocks
  for (size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
    experts.clear(), slot.clear();
    for (; end < blocks.size(); ++end) {
      if (experts.empty() || experts.back() != blocks[end].expert) {
        if (static_cast<int64_t>(experts.size()) == group_size) break;
        experts.push_back(blocks[end].expert);
      }
      slot.push_back(static_cast<int64_t>(experts.size()) - 1);
    }
    if (scratch == nullptr) {  // the first group is the largest but for experts that repeat
      scratch.reset(new float[static_cast<size_t>(floats * std::min(group_size, static_cast<int64_t>(blocks.size())))]);
    }
    parallel_for(problem.threads, static_cast<int64_t>(experts.size()) * tasks, [&](int64_t t) {
      convert_view_task(problem, weights, experts[static_cast<size_t>(t / tasks)], t % tasks,
                        scratch.get() + t / tasks * floats);
    });
    parallel_for(problem.threads, static_cast<int64_t>(end - begin), [&](int64_t b) {
      const ExpertBlock& block = blocks[begin + static_cast<size_t>(b)];
      const float* view = scratch.get() + slot[static_cast<size_t>(b)] * floats;
      run_block(problem, make_view(problem, weights, block.expert, view), rows + block.first, block.count);
    });
  }
}

}  // namespace streammoe::cpu
