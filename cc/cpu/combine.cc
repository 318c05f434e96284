// The combine loop, one instance per dtype and x86 level.
//
// Contract: see combine.h. The accumulator of a token lives in a stack tile of kTile columns, so that it stays in
// registers and L1 for any hidden size. Trade-off: routing of a token is looked up once per tile, K loads each time.
#include "cpu/combine.h"

#include <algorithm>
#include <cmath>

#include "cpu/convert.h"
#include "cpu/threads.h"

namespace streammoe::cpu {
namespace {

constexpr int64_t kTile = 512;              // columns of the accumulator: 2 KiB
constexpr int64_t kTaskElements = 1 << 16;  // elements of y per task, some tens of microseconds

// std::fma is one rounding by definition; the clones with FMA compile it to the instruction.
STREAMMOE_CLONES void accumulate(float w, const float* row, int64_t n, float* acc) {
  for (int64_t i = 0; i < n; ++i) acc[i] = std::fma(w, row[i], acc[i]);
}

}  // namespace

void combine(DType dtype, int64_t hidden, int64_t top_k, int64_t num_tokens, const void* rows, const int32_t* ids,
             const float* weights, const uint8_t* dropped, void* y, int threads) {
  const auto combine_tile = [&](int64_t token, int64_t column, int64_t n) {
    float acc[kTile], wide[kTile];
    std::fill(acc, acc + n, 0.0f);
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
      if (ids[pair] < 0 || (dropped != nullptr && dropped[pair] != 0)) continue;
      const void* row = element(dtype, rows, pair * hidden + column);
      if (dtype != DType::kF32) to_f32(dtype, row, n, wide);
      accumulate(weights == nullptr ? 1.0f : weights[pair],
                 dtype == DType::kF32 ? static_cast<const float*>(row) : wide, n, acc);
    }
    from_f32(dtype, acc, n, element(dtype, y, token * hidden + column));
  };
  const int64_t tokens_per_task = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, hidden));
  const int64_t num_tasks = (num_tokens + tokens_per_task - 1) / tokens_per_task;
  parallel_for(threads, num_tasks, [&](int64_t task) {
    const int64_t end = std::min(num_tokens, (task + 1) * tokens_per_task);
    for (int64_t token = task * tokens_per_task; token < end; ++token) {
      for (int64_t column = 0; column < hidden; column += kTile) {
        combine_tile(token, column, std::min(kTile, hidden - column));
      }
    }
  });
}

}  // namespace streammoe::cpu
