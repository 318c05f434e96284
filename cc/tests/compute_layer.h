// A layer with random operands on the CPU, what it computes, and the same by slow float64 loops. For tests.
//
// Contract: EXPECT prints a broken promise with its values and counts it in `failures`. Inputs are scaled so that |y|
// is near 1, thus a zero output fails. Error bounds are relative to the largest reference value: a few roundings of the
// dtype, or of float32 times the square root of the depth. Trade-off: the reference has no rounding to the dtype
// inside, which makes it simple and the bf16 bounds wider.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpu/activation.h"
#include "cpu/backward.h"
#include "cpu/combine.h"
#include "cpu/convert.h"
#include "cpu/experts.h"
#include "cpu/gemm.h"
#include "cpu/plan.h"
#include "cpu/threads.h"

namespace streammoe::cpu {

inline int failures = 0;

#define EXPECT(condition, ...)                                 \
  do {                                                         \
    if (!(condition) && ++failures <= 40) {                    \
      std::printf("FAIL line %d: %s: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                \
      std::printf("\n");                                       \
    }                                                          \
  } while (false)

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr Activation kActivations[] = {Activation::kSwiGLU, Activation::kSwiGLUOAI, Activation::kGeGLU,
                                              Activation::kSiLU,   Activation::kGELU,      Activation::kReLU2};
inline constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// A tensor of a dtype: its bytes, and the same values in float64 for the reference.
struct Tensor {
  DType dtype = DType::kF32;
  std::vector<uint8_t> bytes;
  std::vector<double> values;

  Tensor() = default;
  Tensor(DType type, int64_t n) : dtype(type), bytes(static_cast<size_t>(n * dtype_bytes(type))) {}
  int64_t size() const { return static_cast<int64_t>(bytes.size()) / dtype_bytes(dtype); }
  void set(const std::vector<float>& data) {
    from_f32(dtype, data.data(), size(), bytes.data());
    refresh();
  }
  void refresh() {
    std::vector<float> wide(static_cast<size_t>(size()));
    to_f32(dtype, bytes.data(), size(), wide.data());
    values.assign(wide.begin(), wide.end());
  }
  void* at(int64_t idx) { return element(dtype, static_cast<void*>(bytes.data()), idx); }
  const void* data() const { return bytes.empty() ? nullptr : bytes.data(); }
};

inline Tensor random_tensor(std::mt19937& random, DType dtype, int64_t n, double scale) {
  std::normal_distribution<float> normal;
  std::vector<float> data(static_cast<size_t>(n));
  for (float& value : data) value = static_cast<float>(scale) * normal(random);
  Tensor tensor(dtype, n);
  tensor.set(data);
  return tensor;
}

// ---------------------------------------------------------------- the layer under test and its reference

struct Layer {
  ExpertProblem p;
  int64_t num_tokens = 0, capacity = -1;
  bool has_up = true, has_bias = false;
  Tensor x, dy, gate, up, down, b_gate, b_up, b_down, packed;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  int64_t pairs() const { return num_tokens * p.top_k; }

  ExpertWeights split_weights() const {
    const int64_t h = p.hidden, i = p.intermediate;
    ExpertWeights w;
    w.gate = {gate.data(), h * i, i}, w.down = {down.data(), i * h, h};
    if (has_up) w.up = {up.data(), h * i, i};
    if (has_bias) w.b_gate = {b_gate.data(), i, i}, w.b_down = {b_down.data(), h, h};
    if (has_bias && has_up) w.b_up = {b_up.data(), i, i};
    return w;
  }

  // gate and up as halves of [L, H, 2I].
  ExpertWeights packed_weights() {
    const int64_t h = p.hidden, i = p.intermediate, row = i * dtype_bytes(p.dtype);
    packed = Tensor(p.dtype, p.num_experts * h * 2 * i);
    for (int64_t r = 0; r < p.num_experts * h; ++r) {
      std::memcpy(packed.at(2 * r * i), gate.at(r * i), static_cast<size_t>(row));
      std::memcpy(packed.at((2 * r + 1) * i), up.at(r * i), static_cast<size_t>(row));
    }
    ExpertWeights w = split_weights();
    w.gate = {packed.data(), 2 * h * i, 2 * i}, w.up = {packed.at(i), 2 * h * i, 2 * i};
    return w;
  }
};

inline Layer make_layer(DType dtype, Activation activation, float limit, bool bias, uint32_t seed) {
  Layer layer;
  layer.p = {.num_experts = 5,
             .hidden = 96,
             .intermediate = 40,
             .top_k = 3,
             .dtype = dtype,
             .activation = activation,
             .limit = limit,
             .block_m = 32,
             .threads = 2};
  layer.num_tokens = 77, layer.has_up = is_gated(activation), layer.has_bias = bias;
  const int64_t l = layer.p.num_experts, h = layer.p.hidden, i = layer.p.intermediate;
  std::mt19937 random(seed);
  layer.x = random_tensor(random, dtype, layer.num_tokens * h, 1.0);
  layer.dy = random_tensor(random, dtype, layer.num_tokens * h, 1.0);
  layer.gate = random_tensor(random, dtype, l * h * i, 1.5 / std::sqrt(static_cast<double>(h)));
  layer.up = random_tensor(random, dtype, l * h * i, 1.5 / std::sqrt(static_cast<double>(h)));
  layer.down = random_tensor(random, dtype, l * i * h, 1.0 / std::sqrt(static_cast<double>(i)));
  layer.b_gate = random_tensor(random, dtype, l * i, 0.3);
  layer.b_up = random_tensor(random, dtype, l * i, 0.3);
  layer.b_down = random_tensor(random, dtype, l * h, 0.3);
  constexpr int32_t kEmptyExpert = 3;
  for (int64_t pair = 0; pair < layer.pairs(); ++pair) {
    auto id = static_cast<int32_t>(random() % 4);
    layer.ids.push_back(id >= kEmptyExpert ? id + 1 : id);
    layer.weights.push_back(static_cast<float>(random() % 1000) / 700.0f - 0.2f);
  }
  for (int64_t pair = 4; pair < layer.pairs(); pair += 11) layer.ids[static_cast<size_t>(pair)] = -1;
  layer.ids[0] = layer.ids[1] = layer.ids[2] = 4;  // duplicates
  layer.weights[9] = 0.0f;
  for (const int64_t masked : {int64_t{5}, int64_t{40}}) {  // owned by nobody, and poisoned
    for (int64_t k = 0; k < 3; ++k) layer.ids[static_cast<size_t>(masked * 3 + k)] = -1;
    const std::vector<float> poison(static_cast<size_t>(h), kNaN);
    from_f32(dtype, poison.data(), h, layer.x.at(masked * h));
    from_f32(dtype, poison.data(), h, layer.dy.at(masked * h));
  }
  layer.x.refresh(), layer.dy.refresh();
  return layer;
}

struct Forward {
  Tensor rows, y;
  std::vector<uint8_t> dropped;
};

inline Forward run_forward(Layer& layer, const ExpertWeights& weights) {
  const ExpertProblem& p = layer.p;
  Forward out{Tensor(p.dtype, layer.pairs() * p.hidden), Tensor(p.dtype, layer.num_tokens * p.hidden),
              std::vector<uint8_t>(static_cast<size_t>(layer.pairs()), 0)};
  std::fill(out.rows.bytes.begin(), out.rows.bytes.end(), 0xFF);  // NaN: a skipped row must not be read
  std::fill(out.y.bytes.begin(), out.y.bytes.end(), 0xFF);
  const Plan plan = make_plan(layer.ids, p.num_experts, layer.capacity, out.dropped.data());
  std::vector<RowTask> tasks;
  for (const int64_t pair : plan.pairs) {
    tasks.push_back({layer.x.at(pair / p.top_k * p.hidden), out.rows.at(pair * p.hidden)});
  }
  const auto blocks = split_blocks(plan, p.block_m);
  run_expert_blocks(p, weights, blocks, tasks.data());
  combine(p.dtype, p.hidden, p.top_k, layer.num_tokens, out.rows.data(), layer.ids.data(), layer.weights.data(),
          out.dropped.data(), out.y.bytes.data(), p.threads);
  out.rows.refresh(), out.y.refresh();
  return out;
}

struct Backward {
  Tensor dx_rows, gate, up, down, b_gate, b_up, b_down;
  std::vector<float> d_weights;
};

inline Backward run_backward(const Layer& layer, const ExpertWeights& weights) {
  const ExpertProblem& p = layer.p;
  const int64_t l = p.num_experts, h = p.hidden, i = p.intermediate;
  Backward out;
  out.dx_rows = Tensor(p.dtype, layer.pairs() * h);
  out.gate = out.up = out.down = Tensor(p.dtype, l * h * i);
  out.b_gate = out.b_up = Tensor(p.dtype, l * i), out.b_down = Tensor(p.dtype, l * h);
  out.d_weights.assign(static_cast<size_t>(layer.pairs()), kNaN);
  Tensor* const all[] = {&out.dx_rows, &out.gate, &out.up, &out.down, &out.b_gate, &out.b_up, &out.b_down};
  for (Tensor* tensor : all) std::fill(tensor->bytes.begin(), tensor->bytes.end(), 0xFF);
  ExpertGradients d;
  d.gate = {out.gate.at(0), h * i, i}, d.down = {out.down.at(0), i * h, h};
  if (layer.has_up) d.up = {out.up.at(0), h * i, i};
  if (layer.has_bias) d.b_gate = {out.b_gate.at(0), i, i}, d.b_down = {out.b_down.at(0), h, h};
  if (layer.has_bias && layer.has_up) d.b_up = {out.b_up.at(0), i, i};
  const BackwardArgs args{layer.x.data(),       layer.dy.data(),  layer.ids.data(),
                          layer.weights.data(), layer.num_tokens, layer.capacity};
  backward(p, weights, args, out.dx_rows.bytes.data(), out.d_weights.data(), d);
  for (Tensor* tensor : all) tensor->refresh();
  return out;
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double gelu_ref(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

struct Value {
  double a, d_gate, d_up;
};

// Activation and its derivatives by the textbook formulas. gelu' is a central difference.
inline Value activation_ref(Activation kind, double limit, double gate, double up) {
  const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
  const double pass_g = gate > limit ? 0 : 1, pass_u = std::abs(up) > limit ? 0 : 1, s = sigmoid(g),
               s17 = sigmoid(1.702 * g);
  const double slope = (gelu_ref(gate + 1e-5) - gelu_ref(gate - 1e-5)) / 2e-5, plain = sigmoid(gate);
  switch (kind) {
    case Activation::kSwiGLU:
      return {g * s * u, pass_g * u * (s + g * s * (1 - s)), pass_u * g * s};
    case Activation::kSwiGLUOAI:
      return {g * s17 * (u + 1), pass_g * (u + 1) * (s17 + 1.702 * g * s17 * (1 - s17)), pass_u * g * s17};
    case Activation::kGeGLU:
      return {gelu_ref(gate) * up, slope * up, gelu_ref(gate)};
    case Activation::kSiLU:
      return {gate * plain, plain + gate * plain * (1 - plain), 0};
    case Activation::kGELU:
      return {gelu_ref(gate), slope, 0};
    case Activation::kReLU2:
      return {std::pow(std::max(gate, 0.0), 2), 2 * std::max(gate, 0.0), 0};
  }
  return {};
}

struct Reference {
  std::vector<double> rows, y, dx_rows, d_weights, gate, up, down, b_gate, b_up, b_down;
};

// One route at a time. `used` tells which routes count (planned and not beyond capacity).
inline Reference reference(const Layer& layer, const std::vector<uint8_t>& dropped) {
  const ExpertProblem& p = layer.p;
  const auto l = static_cast<size_t>(p.num_experts), h = static_cast<size_t>(p.hidden),
             i = static_cast<size_t>(p.intermediate);
  const auto pairs = static_cast<size_t>(layer.pairs()), top_k = static_cast<size_t>(p.top_k);
  Reference ref;
  ref.rows.assign(pairs * h, 0), ref.dx_rows = ref.rows, ref.y.assign(pairs / top_k * h, 0),
                                 ref.d_weights.assign(pairs, 0);
  ref.gate.assign(l * h * i, 0), ref.up = ref.down = ref.gate, ref.b_gate.assign(l * i, 0), ref.b_up = ref.b_gate;
  ref.b_down.assign(l * h, 0);
  for (size_t pair = 0; pair < pairs; ++pair) {
    if (layer.ids[pair] < 0 || dropped[pair]) continue;
    const auto e = static_cast<size_t>(layer.ids[pair]);
    const size_t token = pair / top_k;
    const double w = layer.weights[pair];
    const double* x = &layer.x.values[token * h];
    const double* dy = &layer.dy.values[token * h];
    std::vector<Value> value(i);
    for (size_t c = 0; c < i; ++c) {
      double g = layer.has_bias ? layer.b_gate.values[e * i + c] : 0,
             u = layer.has_bias ? layer.b_up.values[e * i + c] : 0;
      for (size_t r = 0; r < h; ++r) {
        g += x[r] * layer.gate.values[(e * h + r) * i + c];
        u += x[r] * layer.up.values[(e * h + r) * i + c];
      }
      value[c] = activation_ref(p.activation, p.limit, g, u);
    }
    for (size_t c = 0; c < h; ++c) {
      double row = layer.has_bias ? layer.b_down.values[e * h + c] : 0;
      for (size_t r = 0; r < i; ++r) row += value[r].a * layer.down.values[(e * i + r) * h + c];
      ref.rows[pair * h + c] = row;
      ref.y[token * h + c] += w * row;
      ref.d_weights[pair] += dy[c] * row;
      ref.b_down[e * h + c] += w * dy[c];
    }
    for (size_t c = 0; c < i; ++c) {
      double d_a = 0;
      for (size_t r = 0; r < h; ++r) {
        d_a += w * dy[r] * layer.down.values[(e * i + c) * h + r];
        ref.down[(e * i + c) * h + r] += w * value[c].a * dy[r];
      }
      const double d_g = d_a * value[c].d_gate, d_u = d_a * value[c].d_up;
      ref.b_gate[e * i + c] += d_g, ref.b_up[e * i + c] += d_u;
      for (size_t r = 0; r < h; ++r) {
        ref.gate[(e * h + r) * i + c] += x[r] * d_g, ref.up[(e * h + r) * i + c] += x[r] * d_u;
        ref.dx_rows[pair * h + r] +=
            d_g * layer.gate.values[(e * h + r) * i + c] + d_u * layer.up.values[(e * h + r) * i + c];
      }
    }
  }
  return ref;
}

inline double bound_of(DType dtype) { return dtype == DType::kF32 ? 4e-6 : dtype == DType::kBF16 ? 2e-2 : 2.5e-3; }

inline void expect_close(const char* what, const Layer& layer, const std::vector<double>& got,
                         const std::vector<double>& wanted) {
  double largest = 0, worst = 0;
  size_t where = 0;
  for (const double value : wanted) largest = std::max(largest, std::abs(value));
  for (size_t n = 0; n < wanted.size(); ++n) {
    const double error = std::isnan(got[n]) ? kInf : std::abs(got[n] - wanted[n]);
    if (error > worst) worst = error, where = n;
  }
  EXPECT(largest > 0.05 && worst <= bound_of(layer.p.dtype) * largest,
         "%s, dtype %d, activation %d, limit %g, bias %d: element %zu wanted %g, got %g, error %g of largest %g", what,
         static_cast<int>(layer.p.dtype), static_cast<int>(layer.p.activation), static_cast<double>(layer.p.limit),
         layer.has_bias, where, wanted[where], got[where], worst, largest);
}

}  // namespace streammoe::cpu
