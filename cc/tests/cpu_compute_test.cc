// The layer on the CPU, forward and backward, against slow float64 loops, and its promises about bits.
//
// Contract: a plain main() that prints every broken promise with its values and exits with 1. `--bench` prints
// GFLOP/s instead.
#include "tests/compute_layer.h"

namespace streammoe::cpu {
namespace {

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
