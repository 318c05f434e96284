// The backward of one expert, block by block, and the loop over experts.
//
// Contract: see backward.h. One thread owns an expert from its first row to its last, so that sums over rows have one
// order. Padding rows of both operands of a weight gradient are zero. Trade-off: float32 gradients accumulate in the
// output itself; bf16 and f16 ones need a float32 copy of one expert's gradients and weights per thread.
#include "cpu/backward.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/activation.h"
#include "cpu/convert.h"
#include "cpu/experts.h"
#include "cpu/gemm.h"
#include "cpu/plan.h"
#include "cpu/threads.h"

namespace streammoe::cpu {
namespace {

constexpr int64_t kGroup = 64;  // columns of one partial sum of d_weights
constexpr int64_t kLanes = 16;

// Sum of a[i] * b[i]: groups of 64 columns ascending; inside a group 16 lanes (column modulo 16) ascending, then
// halves of the lanes. The order is written out, hence the same on every level of x86.
STREAMMOE_CLONES float grouped_dot(int64_t n, const float* a, const float* b) {
  float sum = 0.0f;
  for (int64_t group = 0; group < n; group += kGroup) {
    float lane[kLanes] = {};
    const int64_t end = group + kGroup < n ? group + kGroup : n;
    int64_t i = group;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) lane[l] += a[i + l] * b[i + l];
    }
    for (int64_t l = 0; i + l < end; ++l) lane[l] += a[i + l] * b[i + l];
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    sum += lane[0];
  }
  return sum;
}

STREAMMOE_CLONES void scale(float w, int64_t n, const float* in, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = w * in[i];
}

STREAMMOE_CLONES void add(int64_t n, const float* in, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += in[i];
}

// A float32 accumulator of one expert's gradient of one tensor: [rows, columns] at `data` with row stride `ld`.
struct Accumulator {
  const ExpertMatrix<void*>* out = nullptr;
  int64_t rows = 0, columns = 0, ld = 0;
  float* data = nullptr;  // null: not wanted
};

class ExpertBackward {
 public:
  ExpertBackward(const ExpertProblem& problem, const ExpertWeights& weights, const BackwardArgs& args, const Plan& plan,
                 void* dx_rows, float* d_weights, const ExpertGradients& gradients)
      : p_(problem),
        weights_(weights),
        args_(args),
        plan_(plan),
        dx_rows_(dx_rows),
        d_weights_(d_weights),
        gradients_(gradients),
        gated_(is_gated(problem.activation)) {}

  // Everything of one expert. Its scratch is freed at the end: a backward is rare and needs much of it.
  void run(int64_t expert) {
    const auto e = static_cast<size_t>(expert);
    const int64_t begin = plan_.offsets[e], end = plan_.offsets[e + 1];
    init_accumulators(expert, begin == end);
    if (begin == end) return;
    init_scratch();
    const std::unique_ptr<float[]> converted(new float[static_cast<size_t>(view_floats(p_)) + 1]);
    for (int64_t task = 0; task < view_tasks(p_); ++task)
      convert_view_task(p_, weights_, expert, task, converted.get());
    view_ = make_view(p_, weights_, expert, converted.get());
    for (int64_t first = begin; first < end; first += p_.block_m) {
      run_block(plan_.pairs.data() + first, std::min(p_.block_m, end - first), first == begin);
    }
    store_accumulators(expert);
  }

 private:
  // Points the accumulators at the outputs (f32) or at scratch, and clears them: all bytes of an expert without rows,
  // else the bias gradients, which have no beta. The weight gradients start with beta == 0.
  void init_accumulators(int64_t expert, bool no_rows) {
    const int64_t h = p_.hidden, i = p_.intermediate;
    acc_[kGate] = {&gradients_.gate, h, i}, acc_[kUp] = {&gradients_.up, gated_ ? h : 0, i};
    acc_[kDown] = {&gradients_.down, i, h}, acc_[kBiasGate] = {&gradients_.b_gate, 1, i};
    acc_[kBiasUp] = {&gradients_.b_up, gated_ ? 1 : 0, i}, acc_[kBiasDown] = {&gradients_.b_down, 1, h};
    int64_t floats = 0;
    for (Accumulator& acc : acc_) {
      if (acc.out->data == nullptr) acc.rows = 0;
      floats += acc.rows * acc.columns;
    }
    if (no_rows) {
      for (const Accumulator& acc : acc_) {
        for (int64_t row = 0; row < acc.rows; ++row) {
          std::memset(out_row(acc, expert, row), 0, static_cast<size_t>(acc.columns * dtype_bytes(p_.dtype)));
        }
      }
      return;
    }
    if (p_.dtype != DType::kF32) sums_.reset(new float[static_cast<size_t>(floats) + 1]);
    float* next = sums_.get();
    for (int which = 0; which < kNumAccumulators; ++which) {
      Accumulator& acc = acc_[which];
      if (acc.rows == 0) continue;
      acc.data = p_.dtype == DType::kF32 ? static_cast<float*>(out_row(acc, expert, 0)) : next;
      acc.ld = p_.dtype == DType::kF32 && acc.rows > 1 ? acc.out->row_stride : acc.columns;
      next += p_.dtype == DType::kF32 ? 0 : acc.rows * acc.columns;
      if (which >= kBiasGate) std::fill(acc.data, acc.data + acc.columns, 0.0f);
    }
  }

  void store_accumulators(int64_t expert) {
    if (p_.dtype == DType::kF32) return;  // summed in place
    for (const Accumulator& acc : acc_) {
      for (int64_t row = 0; row < acc.rows; ++row) {
        from_f32(p_.dtype, acc.data + row * acc.ld, acc.columns, out_row(acc, expert, row));
      }
    }
  }

  void* out_row(const Accumulator& acc, int64_t expert, int64_t row) const {
    return element(p_.dtype, acc.out->data, expert * acc.out->expert_stride + row * acc.out->row_stride);
  }

  // Five [block_m, I] and three [block_m, H] matrices; `up`, `d_up` exist for ungated activations too, unused.
  void init_scratch() {
    const int64_t wide = p_.block_m * p_.intermediate, narrow = p_.block_m * p_.hidden;
    scratch_.reset(new float[static_cast<size_t>(5 * wide + 3 * narrow)]);
    gate_ = scratch_.get(), up_ = gate_ + wide, a_ = up_ + wide, d_gate_ = a_ + wide, d_up_ = d_gate_ + wide;
    x_ = d_up_ + wide, dy_ = x_ + narrow, dx_ = dy_ + narrow;
  }

  void gather(const void* source, const int64_t* pairs, int64_t count, float* out) const {
    for (int64_t r = 0; r < count; ++r) {
      to_f32(p_.dtype, element(p_.dtype, source, pairs[r] / p_.top_k * p_.hidden), p_.hidden, out + r * p_.hidden);
    }
    std::fill(out + count * p_.hidden, out + p_.block_m * p_.hidden, 0.0f);
  }

  // gate_ and up_ of a block's rows.
  void project(const int64_t* pairs, int64_t count) {
    if (args_.gate_up == nullptr) {
      project_rows(p_, view_, x_, count, gate_, gated_ ? up_ : nullptr);
      return;
    }
    const int64_t i = p_.intermediate, width = gate_up_width(p_);
    for (int64_t r = 0; r < count; ++r) {
      to_f32(p_.dtype, element(p_.dtype, args_.gate_up, pairs[r] * width), i, gate_ + r * i);
      if (gated_) to_f32(p_.dtype, element(p_.dtype, args_.gate_up, pairs[r] * width + i), i, up_ + r * i);
    }
  }

  void run_block(const int64_t* pairs, int64_t count, bool is_first) {
    const int64_t m = p_.block_m, h = p_.hidden, i = p_.intermediate, live = count * i, all = m * i;
    gather(args_.x, pairs, count, x_);
    gather(args_.dy, pairs, count, dy_);
    project(pairs, count);
    activate(p_.activation, p_.limit, live, gate_, up_, a_);
    round_to(p_.dtype, live, a_);
    float* const d_a = d_gate_;
    sgemm(false, true, m, i, h, dy_, h, view_.down, view_.ld_down, 0.0f, d_a, i);  // dA' = dy W_down^T
    for (int64_t r = 0; r < count; ++r) {
      const int64_t pair = pairs[r], at = r * i;
      const float w = args_.weights[pair];
      d_weights_[pair] = grouped_dot(i, d_a + at, a_ + at) +
                         (view_.b_down == nullptr ? 0.0f : grouped_dot(h, dy_ + r * h, view_.b_down));
      scale(w, i, d_a + at, d_a + at);
      scale(w, i, a_ + at, a_ + at);
    }
    round_to(p_.dtype, live, a_);  // RN(w * a), the operand of dW_down
    activate_backward(p_.activation, p_.limit, live, gate_, up_, d_a, d_gate_, d_up_);
    round_to(p_.dtype, live, d_gate_);
    if (gated_) round_to(p_.dtype, live, d_up_);
    for (float* padded : {a_, d_gate_, d_up_}) std::fill(padded + live, padded + all, 0.0f);
    store_dx(pairs, count);
    accumulate(pairs, count, is_first ? 0.0f : 1.0f);
  }

  // d_x = RN(dG W_gate^T + dU W_up^T), one f32 chain.
  void store_dx(const int64_t* pairs, int64_t count) {
    const int64_t m = p_.block_m, h = p_.hidden, i = p_.intermediate;
    sgemm(false, true, m, h, i, d_gate_, i, view_.gate, view_.ld_gate, 0.0f, dx_, h);
    if (gated_) sgemm(false, true, m, h, i, d_up_, i, view_.up, view_.ld_up, 1.0f, dx_, h);
    for (int64_t r = 0; r < count; ++r) {
      from_f32(p_.dtype, dx_ + r * h, h, element(p_.dtype, dx_rows_, pairs[r] * h));
    }
  }

  void accumulate(const int64_t* pairs, int64_t count, float beta) {
    const int64_t m = p_.block_m, h = p_.hidden, i = p_.intermediate;
    const auto weight = [&](int which, const float* rows_a, const float* rows_b) {
      const Accumulator& acc = acc_[which];
      if (acc.data == nullptr) return;
      sgemm(true, false, acc.rows, acc.columns, m, rows_a, acc.rows, rows_b, acc.columns, beta, acc.data, acc.ld);
    };
    weight(kDown, a_, dy_);
    weight(kGate, x_, d_gate_);
    weight(kUp, x_, d_up_);
    float* const scaled_dy = dx_;  // d_x is stored
    for (int64_t r = 0; r < count; ++r) {
      if (acc_[kBiasGate].data != nullptr) add(i, d_gate_ + r * i, acc_[kBiasGate].data);
      if (acc_[kBiasUp].data != nullptr) add(i, d_up_ + r * i, acc_[kBiasUp].data);
      if (acc_[kBiasDown].data == nullptr) continue;
      scale(args_.weights[pairs[r]], h, dy_ + r * h, scaled_dy);
      add(h, scaled_dy, acc_[kBiasDown].data);
    }
  }

  enum Which { kGate, kUp, kDown, kBiasGate, kBiasUp, kBiasDown, kNumAccumulators };

  const ExpertProblem& p_;
  const ExpertWeights& weights_;
  const BackwardArgs& args_;
  const Plan& plan_;
  void* const dx_rows_;
  float* const d_weights_;
  const ExpertGradients& gradients_;
  const bool gated_;
  Accumulator acc_[kNumAccumulators];
  ExpertView view_;
  std::unique_ptr<float[]> sums_, scratch_;
  float *gate_ = nullptr, *up_ = nullptr, *a_ = nullptr, *d_gate_ = nullptr, *d_up_ = nullptr;
  float *x_ = nullptr, *dy_ = nullptr, *dx_ = nullptr;
};

}  // namespace

void backward(const ExpertProblem& problem, const ExpertWeights& weights, const BackwardArgs& args, void* dx_rows,
              float* d_weights, const ExpertGradients& gradients) {
  const int64_t num_pairs = args.num_tokens * problem.top_k;
  const Plan plan = make_plan({args.ids, static_cast<size_t>(num_pairs)}, problem.num_experts, args.capacity, nullptr);
  const auto row_bytes = static_cast<size_t>(problem.hidden * dtype_bytes(problem.dtype));
  for (const int64_t pair : pairs_without_row(plan, num_pairs)) {
    std::memset(element(problem.dtype, dx_rows, pair * problem.hidden), 0, row_bytes);
    d_weights[pair] = 0.0f;
  }
  parallel_for(problem.threads, problem.num_experts, [&](int64_t expert) {
    ExpertBackward(problem, weights, args, plan, dx_rows, d_weights, gradients).run(expert);
  });
}

}  // namespace streammoe::cpu
