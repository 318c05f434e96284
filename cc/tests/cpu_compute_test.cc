// The CPU compute of the layer against slow float64 loops, and its promises about bits.
//
// Contract: a plain main() that prints every broken promise with its values and exits with 1. `--bench` prints
// GFLOP/s instead. Inputs are scaled so that |y| is near 1, thus a zero output fails. Error bounds are relative to the
// largest reference value: a few roundings of the dtype, or of float32 times the square root of the depth.
// Trade-off: the reference has no rounding to the dtype inside, which makes it simple and the bf16 bounds wider.
#include <algorithm>
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
namespace {

int failures = 0;

#define EXPECT(condition, ...)                                 \
  do {                                                         \
    if (!(condition) && ++failures <= 40) {                    \
      std::printf("FAIL line %d: %s: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                \
      std::printf("\n");                                       \
    }                                                          \
  } while (false)

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr Activation kActivations[] = {Activation::kSwiGLU, Activation::kSwiGLUOAI, Activation::kGeGLU,
                                       Activation::kSiLU,   Activation::kGELU,      Activation::kReLU2};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

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

Tensor random_tensor(std::mt19937& random, DType dtype, int64_t n, double scale) {
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

Layer make_layer(DType dtype, Activation activation, float limit, bool bias, uint32_t seed) {
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

Forward run_forward(Layer& layer, const ExpertWeights& weights) {
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

Backward run_backward(const Layer& layer, const ExpertWeights& weights) {
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

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double gelu_ref(double x) { return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }

struct Value {
  double a, d_gate, d_up;
};

// Activation and its derivatives by the textbook formulas. gelu' is a central difference.
Value activation_ref(Activation kind, double limit, double gate, double up) {
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
Reference reference(const Layer& layer, const std::vector<uint8_t>& dropped) {
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

double bound_of(DType dtype) { return dtype == DType::kF32 ? 4e-6 : dtype == DType::kBF16 ? 2e-2 : 2.5e-3; }

void expect_close(const char* what, const Layer& layer, const std::vector<double>& got,
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

// ---------------------------------------------------------------- tests of the parts

void test_threads() {
  for (const int threads : {1, 2, 5}) {
    std::vector<std::thread> callers;
    std::atomic<int64_t> total{0};
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int round = 0; round < 200; ++round) {
          std::vector<int> seen(37, 0);
          parallel_for(threads, 37, [&](int64_t i) {
            ++seen[static_cast<size_t>(i)];
            parallel_for(threads, 3, [&](int64_t j) { total += j; });
          });
          for (const int count : seen) EXPECT(count == 1, "a task ran %d times", count);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT(total == 4 * 200 * 37 * 3, "wanted %d, got %lld", 4 * 200 * 37 * 3, static_cast<long long>(total));
  }
#if defined(__x86_64__)
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // flush subnormals, like XLA's threads
  parallel_for(2, 64, [&](int64_t) { EXPECT((_mm_getcsr() & 0x8040) == 0, "subnormals are flushed inside a task"); });
  EXPECT((_mm_getcsr() & 0x8040) == 0x8040, "the caller's mode is not restored");
  _mm_setcsr(mode);
#endif
}

// Round to nearest even to `digits` significant bits with smallest exponent `low`, through exact float64 arithmetic.
double rounded(double value, int digits, int low, double largest) {
  if (value == 0 || std::isinf(value)) return value;
  const int exponent = std::max(std::ilogb(value), low) - digits + 1;
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
  return std::abs(result) > largest ? std::copysign(kInf, result) : result;
}

void test_convert() {
  std::mt19937 random(1);
  std::vector<float> values = {0.0f,     -0.0f, kInf,     -kInf,         65504.0f, 65519.9f,
                               65520.0f, 1e-8f, 2.98e-8f, 2.9802322e-8f, 3.4e38f};
  for (int n = 0; n < 60000; ++n) {
    const float value = bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(value)) values.push_back(value);
    values.push_back(std::ldexp(bit_cast<float>(0x3F800000u | (static_cast<uint32_t>(random()) & 0x7FFFFFu)),
                                static_cast<int>(random() % 50) - 30));
    values.push_back(std::ldexp(1.0f + static_cast<float>(random() % 4096) / 4096.0f,
                                static_cast<int>(random() % 36) - 26));  // ties
  }
  const auto n = static_cast<int64_t>(values.size());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const bool bf16 = dtype == DType::kBF16;
    std::vector<uint16_t> half(values.size());
    std::vector<float> back(values.size()), in_place = values;
    from_f32(dtype, values.data(), n, half.data());
    to_f32(dtype, half.data(), n, back.data());
    round_to(dtype, n, in_place.data());
    for (size_t k = 0; k < values.size(); ++k) {
      const double wanted =
          bf16 ? rounded(values[k], 8, -126, 3.3895313892515355e38) : rounded(values[k], 11, -14, 65504);
      EXPECT(static_cast<double>(back[k]) == wanted && std::signbit(back[k]) == std::signbit(values[k]),
             "%a to dtype %d: wanted %a, got %a", static_cast<double>(values[k]), static_cast<int>(dtype), wanted,
             static_cast<double>(back[k]));
      EXPECT(bit_cast<uint32_t>(in_place[k]) == bit_cast<uint32_t>(back[k]), "round_to(%a)",
             static_cast<double>(values[k]));
    }
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      float wide;
      uint16_t again;
      to_f32(dtype, &pattern, 1, &wide);
      from_f32(dtype, &wide, 1, &again);
      EXPECT(std::isnan(wide) ? (again & 0x7FFF) > (bf16 ? 0x7F80 : 0x7C00) : again == pattern,
             "dtype %d, 0x%04x came back as 0x%04x", static_cast<int>(dtype), bits, again);
    }
    for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
      float value = bit_cast<float>(bits);
      round_to(dtype, 1, &value);
      EXPECT(std::isnan(value), "NaN 0x%08x became %g", bits, static_cast<double>(value));
    }
  }
}

void test_exp() {
  std::vector<float> x;
  for (double v = -110; v < 95; v += 0.000731) x.push_back(static_cast<float>(v));
  x.insert(x.end(), {0.0f, -0.0f, 1e-30f, 88.72283f, 88.72284f, -87.33655f, -103.97f, -103.98f, kInf, -kInf, kNaN,
                     3e38f, -3e38f});
  std::vector<float> got(x.size());
  exp_f32(static_cast<int64_t>(x.size()), x.data(), got.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const auto wanted = static_cast<float>(exact);
    if (!std::isfinite(wanted)) {
      EXPECT(std::isnan(wanted) ? std::isnan(got[i]) : got[i] == wanted, "exp(%g) = %g", static_cast<double>(x[i]),
             static_cast<double>(got[i]));
      continue;
    }
    const double ulp = std::max(static_cast<double>(std::nextafter(wanted, kInf)) - static_cast<double>(wanted), 1e-45);
    EXPECT(std::abs(static_cast<double>(got[i]) - exact) <= 2 * ulp, "exp(%.9g) wanted %.9g, got %.9g",
           static_cast<double>(x[i]), exact, static_cast<double>(got[i]));
  }
}

void test_activations() {
  std::vector<float> gate, up, d_a;
  for (float g = -30; g <= 30; g += 0.37f) {
    for (float u = -9; u <= 9; u += 0.9f) gate.push_back(g), up.push_back(u), d_a.push_back(0.5f + u / 7);
  }
  const auto n = static_cast<int64_t>(gate.size());
  std::vector<float> a(gate.size()), d_gate(gate.size()), d_up(gate.size());
  for (const Activation kind : kActivations) {
    for (const float limit : {kInf, 4.0f}) {
      activate(kind, limit, n, gate.data(), up.data(), a.data());
      activate_backward(kind, limit, n, gate.data(), up.data(), d_a.data(), d_gate.data(), d_up.data());
      for (size_t i = 0; i < gate.size(); ++i) {
        const Value ref = activation_ref(kind, limit, gate[i], up[i]);
        const double d = d_a[i],
                     scale = 1 + std::abs(ref.a) + std::abs(ref.d_gate) + std::abs(static_cast<double>(up[i]));
        EXPECT(std::abs(a[i] - ref.a) <= 2e-6 * scale, "activation %d(%g, %g) wanted %g, got %g",
               static_cast<int>(kind), static_cast<double>(gate[i]), static_cast<double>(up[i]), ref.a,
               static_cast<double>(a[i]));
        EXPECT(std::abs(d_gate[i] - d * ref.d_gate) <= 4e-6 * scale, "d_gate of %d(%g, %g) wanted %g, got %g",
               static_cast<int>(kind), static_cast<double>(gate[i]), static_cast<double>(up[i]), d * ref.d_gate,
               static_cast<double>(d_gate[i]));
        EXPECT(!is_gated(kind) || std::abs(d_up[i] - d * ref.d_up) <= 4e-6 * (scale + std::abs(ref.d_up)),
               "d_up of %d(%g, %g) wanted %g, got %g", static_cast<int>(kind), static_cast<double>(gate[i]),
               static_cast<double>(up[i]), d * ref.d_up, static_cast<double>(d_up[i]));
      }
    }
    for (const bool in_gate : {true, false}) {  // NaN passes the clamps; other elements of the row do not see it
      if (!in_gate && !is_gated(kind)) continue;
      const float g[2] = {in_gate ? kNaN : 1.0f, 1.0f}, u[2] = {in_gate ? 1.0f : kNaN, 1.0f};
      float out[2];
      activate(kind, 2.0f, 2, g, u, out);
      EXPECT(std::isnan(out[0]) && std::isfinite(out[1]), "activation %d: NaN became %g, neighbour %g",
             static_cast<int>(kind), static_cast<double>(out[0]), static_cast<double>(out[1]));
    }
  }
  const float g[3] = {2.0f, 2.5f, 1.0f}, u[3] = {-2.0f, 1.0f, 2.5f}, d[3] = {1.0f, kNaN, kNaN};
  float dg[3], du[3];
  activate_backward(Activation::kSwiGLU, 2.0f, 3, g, u, d, dg, du);
  EXPECT(dg[0] != 0 && du[0] != 0, "gradient at the bound: %g, %g", static_cast<double>(dg[0]),
         static_cast<double>(du[0]));
  EXPECT(dg[1] == 0 && du[2] == 0, "gradient beyond the bound: %g, %g", static_cast<double>(dg[1]),
         static_cast<double>(du[2]));
}

void test_plan() {
  const std::vector<int32_t> ids = {2, -1, 0, 2, 7, 2, 0, -5};
  std::vector<uint8_t> dropped(ids.size(), 0);
  const Plan all = make_plan(ids, 3, -1, dropped.data());
  EXPECT((all.offsets == std::vector<int64_t>{0, 2, 2, 5}), "offsets[1] = %lld",
         static_cast<long long>(all.offsets[1]));
  EXPECT((all.pairs == std::vector<int64_t>{2, 6, 0, 3, 5}), "pairs[0] = %lld", static_cast<long long>(all.pairs[0]));
  EXPECT(std::count(dropped.begin(), dropped.end(), 0) == 8, "a dropless plan dropped a route");
  const Plan capped = make_plan(ids, 3, 1, dropped.data());
  EXPECT((capped.pairs == std::vector<int64_t>{2, 0}), "%zu pairs", capped.pairs.size());
  EXPECT((dropped == std::vector<uint8_t>{0, 0, 0, 1, 0, 1, 1, 0}), "dropped[3] = %d", dropped[3]);
  EXPECT(make_plan({}, 3, -1, nullptr).offsets.size() == 4, "an empty plan");
}

// ---------------------------------------------------------------- tests of the layer

void test_layer(const Layer& base) {
  Layer layer = base;
  const ExpertProblem& p = layer.p;
  const Forward forward = run_forward(layer, layer.split_weights());
  const Reference ref = reference(layer, forward.dropped);
  expect_close("y", layer, forward.y.values, ref.y);
  for (size_t token : {size_t{5}, size_t{40}}) {
    for (int64_t c = 0; c < p.hidden * dtype_bytes(p.dtype); ++c) {
      EXPECT(
          forward.y.bytes[token * static_cast<size_t>(p.hidden * dtype_bytes(p.dtype)) + static_cast<size_t>(c)] == 0,
          "a masked token is not +0");
    }
  }
  const Backward backward = run_backward(layer, layer.split_weights());
  expect_close("dx_rows", layer, backward.dx_rows.values, ref.dx_rows);
  expect_close("d_weights", layer, {backward.d_weights.begin(), backward.d_weights.end()}, ref.d_weights);
  expect_close("dW_gate", layer, backward.gate.values, ref.gate);
  expect_close("dW_down", layer, backward.down.values, ref.down);
  if (layer.has_up) expect_close("dW_up", layer, backward.up.values, ref.up);
  if (layer.has_bias) {
    expect_close("db_gate", layer, backward.b_gate.values, ref.b_gate);
    expect_close("db_down", layer, backward.b_down.values, ref.b_down);
    if (layer.has_up) expect_close("db_up", layer, backward.b_up.values, ref.b_up);
  }
  const size_t expert_bytes = static_cast<size_t>(p.hidden * p.intermediate * dtype_bytes(p.dtype));
  for (const Tensor* tensor : {&backward.gate, &backward.down}) {  // expert 3 has no rows
    const uint8_t* const bytes = tensor->bytes.data() + 3 * expert_bytes;
    EXPECT(std::count(bytes, bytes + expert_bytes, 0) == static_cast<int64_t>(expert_bytes),
           "gradient of an idle expert is not +0");
  }
}

void expect_same_gradients(const Backward& a, const Backward& b, const char* what) {
  EXPECT(std::memcmp(a.d_weights.data(), b.d_weights.data(), a.d_weights.size() * sizeof(float)) == 0, "%s: d_weights",
         what);
  EXPECT(a.dx_rows.bytes == b.dx_rows.bytes && a.gate.bytes == b.gate.bytes && a.up.bytes == b.up.bytes &&
             a.down.bytes == b.down.bytes && a.b_gate.bytes == b.b_gate.bytes && a.b_up.bytes == b.b_up.bytes &&
             a.b_down.bytes == b.b_down.bytes,
         "%s: gradients differ", what);
}

void test_same_bits(const Layer& base) {
  Layer layer = base;
  const Forward two = run_forward(layer, layer.split_weights());
  const Backward backward_two = run_backward(layer, layer.split_weights());
  const ExpertWeights packed = layer.packed_weights();
  EXPECT(run_forward(layer, packed).rows.bytes == two.rows.bytes, "packed and split weights differ, dtype %d",
         static_cast<int>(layer.p.dtype));
  expect_same_gradients(backward_two, run_backward(layer, packed), "packed weights");
  layer.p.threads = 1;
  const Forward one = run_forward(layer, layer.split_weights());
  EXPECT(one.rows.bytes == two.rows.bytes && one.y.bytes == two.y.bytes, "1 and 2 threads differ, dtype %d",
         static_cast<int>(layer.p.dtype));
  expect_same_gradients(backward_two, run_backward(layer, layer.split_weights()), "1 thread");
}

// One x row alone, at other positions, and among NaN rows: equal bits, forward and d_x.
void test_row_position(DType dtype, int64_t block_m, int64_t hidden, int64_t intermediate) {
  std::mt19937 random(7);
  Layer layer;
  layer.p = {.num_experts = 1,
             .hidden = hidden,
             .intermediate = intermediate,
             .top_k = 1,
             .dtype = dtype,
             .activation = Activation::kSwiGLU,
             .block_m = block_m,
             .threads = 1};
  layer.gate = random_tensor(random, dtype, hidden * intermediate, 1.0 / std::sqrt(static_cast<double>(hidden)));
  layer.up = random_tensor(random, dtype, hidden * intermediate, 1.0 / std::sqrt(static_cast<double>(hidden)));
  layer.down = random_tensor(random, dtype, hidden * intermediate, 1.0 / std::sqrt(static_cast<double>(intermediate)));
  const Tensor x = random_tensor(random, dtype, hidden, 1.0), dy = random_tensor(random, dtype, hidden, 1.0);
  const auto row_bytes = x.bytes.size();
  std::vector<uint8_t> first_row, first_dx;
  float first_weight = 0;
  for (const int64_t count : {int64_t{1}, block_m / 2 + 1, block_m}) {
    for (int64_t position = 0; position < count; position += std::max<int64_t>(1, count / 5)) {
      layer.num_tokens = count;
      layer.ids.assign(static_cast<size_t>(count), 0), layer.weights.assign(static_cast<size_t>(count), 0.75f);
      layer.x = Tensor(dtype, count * hidden), layer.dy = Tensor(dtype, count * hidden);
      std::fill(layer.x.bytes.begin(), layer.x.bytes.end(), 0xFF),
          std::fill(layer.dy.bytes.begin(), layer.dy.bytes.end(), 0xFF);
      std::memcpy(layer.x.at(position * hidden), x.data(), row_bytes),
          std::memcpy(layer.dy.at(position * hidden), dy.data(), row_bytes);
      Forward forward = run_forward(layer, layer.split_weights());
      Backward backward = run_backward(layer, layer.split_weights());
      const auto* row = static_cast<const uint8_t*>(forward.rows.at(position * hidden));
      const auto* dx = static_cast<const uint8_t*>(backward.dx_rows.at(position * hidden));
      const float weight = backward.d_weights[static_cast<size_t>(position)];
      if (first_row.empty())
        first_row.assign(row, row + row_bytes), first_dx.assign(dx, dx + row_bytes), first_weight = weight;
      EXPECT(std::isfinite(weight) && weight == first_weight && std::memcmp(first_row.data(), row, row_bytes) == 0 &&
                 std::memcmp(first_dx.data(), dx, row_bytes) == 0,
             "row %lld of %lld differs, dtype %d, block_m %lld, H %lld, I %lld", static_cast<long long>(position),
             static_cast<long long>(count), static_cast<int>(dtype), static_cast<long long>(block_m),
             static_cast<long long>(hidden), static_cast<long long>(intermediate));
    }
  }
}

void run_tests() {
  test_threads();
  test_convert();
  test_exp();
  test_activations();
  test_plan();
  uint32_t seed = 100;
  for (const DType dtype : kDTypes) {
    for (const Activation activation : kActivations) {
      for (const float limit : {kInf, 0.7f}) {
        for (const bool bias : {false, true}) test_layer(make_layer(dtype, activation, limit, bias, ++seed));
      }
    }
    Layer capped = make_layer(dtype, Activation::kSwiGLU, kInf, true, ++seed);
    capped.capacity = 20;
    test_layer(capped);
    test_same_bits(capped);
    test_same_bits(make_layer(dtype, Activation::kSwiGLUOAI, 7.0f, true, ++seed));
    for (const int64_t block_m : {16, 32, 64, 128}) {
      test_row_position(dtype, block_m, 96, 40);
      test_row_position(dtype, block_m, 704, 96);
    }
    test_row_position(dtype, 128, 512, 1024);
  }
}

void bench() {
  for (const DType dtype : kDTypes) {
    Layer layer;
    layer.p = {.num_experts = 16,
               .hidden = 512,
               .intermediate = 1024,
               .top_k = 2,
               .dtype = dtype,
               .threads = default_threads()};
    layer.num_tokens = 2048;
    std::mt19937 random(3);
    const int64_t matrix = layer.p.num_experts * layer.p.hidden * layer.p.intermediate;
    layer.x = random_tensor(random, dtype, layer.num_tokens * layer.p.hidden, 1.0), layer.dy = layer.x;
    layer.gate = random_tensor(random, dtype, matrix, 0.05), layer.up = random_tensor(random, dtype, matrix, 0.05);
    layer.down = random_tensor(random, dtype, matrix, 0.03);
    for (int64_t pair = 0; pair < layer.pairs(); ++pair)
      layer.ids.push_back(static_cast<int32_t>(pair * 7 % 16)), layer.weights.push_back(0.5f);
    Forward out{Tensor(dtype, layer.pairs() * layer.p.hidden), Tensor(dtype, layer.num_tokens * layer.p.hidden), {}};
    const double flop = 6.0 * static_cast<double>(layer.pairs() * layer.p.hidden * layer.p.intermediate);
    const auto measure = [&](const char* what, double work, const auto& body) {
      double best = kInf;
      for (int round = 0; round < 15; ++round) {
        const auto start = std::chrono::steady_clock::now();
        body();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      std::printf("dtype %d, %d threads, %-10s %8.3f ms %7.1f G/s\n", static_cast<int>(dtype), layer.p.threads, what,
                  best * 1e3, work / best / 1e9);
    };
    const Plan plan = make_plan(layer.ids, 16, -1, nullptr);
    std::vector<RowTask> tasks;
    for (const int64_t pair : plan.pairs) tasks.push_back({layer.x.at(pair / 2 * 512), out.rows.at(pair * 512)});
    const auto blocks = split_blocks(plan, layer.p.block_m);
    for (const int threads : {1, default_threads()}) {
      layer.p.threads = threads;
      measure("experts", flop, [&] { run_expert_blocks(layer.p, layer.split_weights(), blocks, tasks.data()); });
      measure("combine", static_cast<double>(layer.pairs() * 512 * dtype_bytes(dtype)), [&] {
        combine(dtype, 512, 2, layer.num_tokens, out.rows.data(), layer.ids.data(), layer.weights.data(), nullptr,
                out.y.bytes.data(), threads);
      });
      std::vector<float> gate(128 * 1024, 0.3f), up(128 * 1024, 0.2f), a(128 * 1024);
      measure("activation", 32.0 * 128 * 1024, [&] {
        for (int b = 0; b < 32; ++b) activate(Activation::kSwiGLU, kInf, 128 * 1024, gate.data(), up.data(), a.data());
      });
    }
    std::vector<float> d_weights(static_cast<size_t>(layer.pairs()));
    Tensor d_gate(dtype, matrix), d_up(dtype, matrix), d_down(dtype, matrix), dx(dtype, layer.pairs() * 512);
    ExpertGradients d;
    d.gate = {d_gate.at(0), 512 * 1024, 1024}, d.up = {d_up.at(0), 512 * 1024, 1024},
    d.down = {d_down.at(0), 512 * 1024, 512};
    const BackwardArgs args{layer.x.data(),       layer.dy.data(),  layer.ids.data(),
                            layer.weights.data(), layer.num_tokens, -1};
    measure("backward", flop * 8 / 3,
            [&] { backward(layer.p, layer.split_weights(), args, dx.bytes.data(), d_weights.data(), d); });
  }
}

}  // namespace
}  // namespace streammoe::cpu

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--bench") {
    streammoe::cpu::bench();
    return 0;
  }
  streammoe::cpu::run_tests();
  std::printf(streammoe::cpu::failures == 0 ? "cpu_compute_test: ok\n" : "cpu_compute_test: %d failures\n",
              streammoe::cpu::failures);
  return streammoe::cpu::failures == 0 ? 0 : 1;
}
