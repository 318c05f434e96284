// The parts of the CPU compute: threads, conversions, activations with their derivatives, plans.
//
// Contract: a plain main() that prints every broken promise with its values and exits with 1.
#include "tests/compute_layer.h"

namespace streammoe::cpu {
namespace {

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

void run_tests() {
  test_threads();
  test_convert();
  test_exp();
  test_activations();
  test_plan();
}

}  // namespace
}  // namespace streammoe::cpu

int main() {
  streammoe::cpu::run_tests();
  std::printf(streammoe::cpu::failures == 0 ? "%s: ok\n" : "%s: %d failures\n", "cpu_parts_test",
              streammoe::cpu::failures);
  return streammoe::cpu::failures == 0 ? 0 : 1;
}
