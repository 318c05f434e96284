// The weighted sum of a token's expert rows: y[t] = RN(sum over k of weights[t, k] * rows[pair_row[t, k]]).
//
// Contract: acc starts at +0 and is fmaf(w_k, row_k, acc) in float32, k ascending, taken routes only; one rounding to
// the rows' type at the end; a token without routes gives +0. Weights of routes that are not taken are not used, NaN or
// not. A warp walks over pieces of 512 bytes of a token; the next piece's row numbers are loaded before this piece's
// rows are waited for, so that a warp has one memory latency per piece and not two. Trade-off: lanes hold the routes
// (one each) and shuffle them out, which keeps registers low enough for 28 warps per SM.
#include <algorithm>
#include <limits>

#include "device/element.cuh"
#include "device/ptx_sm90.cuh"
#include "kernels/device_sms.h"
#include "kernels/launch.h"
#include "kernels/launch_dependent.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kCombineThreads = 128;
constexpr int kCombineCtas = 7;  // per SM: 28 warps x 4 KB of rows in flight at 72 registers
constexpr int kAhead = 8;        // rows in flight per thread, the usual K at once

// The routes of one token that this warp's lanes hold: lane i has route base + i.
struct Routes {
  int32_t row;
  float weight;
};

struct CombineParams {
  const uint4* rows;
  const float* topk_weights;
  const int32_t* pair_row;  // by the plan
  PairRoutes routes;        // or by pair
  uint4* y;
  int64_t num_tokens;
  int32_t top_k, words, pieces;  // 16-byte words of a row, and its pieces of 32 words
};

template <bool kByPair>
__device__ __forceinline__ Routes load_routes(const CombineParams& p, int64_t token, int32_t base, int lane) {
  Routes routes{-1, 0.0f};
  if (base + lane < p.top_k) {
    const int64_t pair = token * p.top_k + base + lane;
    if constexpr (kByPair) {
      const int32_t id = p.routes.topk_ids[pair];
      const bool dropped = p.routes.dropped != nullptr && p.routes.dropped[pair] != 0;
      const bool taken = static_cast<uint32_t>(id) < static_cast<uint32_t>(p.routes.num_experts) && !dropped;
      routes.row = taken ? static_cast<int32_t>(pair) : -1;
    } else {
      routes.row = p.pair_row[pair];
    }
    routes.weight = p.topk_weights == nullptr ? 1.0f : p.topk_weights[pair];
  }
  return routes;
}

template <DType kType>
__device__ __forceinline__ void fma_word(float (&acc)[8], float w, const uint4& word) {
  const uint32_t parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc[2 * i] = __fmaf_rn(w, Element<kType>::low(parts[i]), acc[2 * i]);
    acc[2 * i + 1] = __fmaf_rn(w, Element<kType>::high(parts[i]), acc[2 * i + 1]);
  }
}

template <DType kType, bool kByPair>
__global__ void __launch_bounds__(kCombineThreads, kCombineCtas) combine_sm90(CombineParams p) {
  using Type = Element<kType>;
  dependent_launch_wait();  // rows, by gemm_down
  dependent_launch_trigger();
  const int lane = threadIdx.x & 31;
  // Token and piece advance without a division per step.
  const int32_t warps = gridDim.x * (kCombineThreads / 32);
  const int32_t warp = blockIdx.x * (kCombineThreads / 32) + (threadIdx.x >> 5);
  const int32_t token_step = warps / p.pieces, piece_step = warps % p.pieces;
  int32_t token = warp / p.pieces, piece = warp % p.pieces;
  Routes next{-1, 0.0f};
  if (token < p.num_tokens) next = load_routes<kByPair>(p, token, 0, lane);
  while (token < p.num_tokens) {
    const int32_t word = piece * 32 + lane;
    const int64_t this_token = token;
    const bool inside = word < p.words;
    Routes routes = next;
    token += token_step;
    piece += piece_step;
    if (piece >= p.pieces) {
      piece -= p.pieces;
      ++token;
    }
    float acc[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t first = 0; first < p.top_k; first += kAhead) {
      if (first > 0 && first % 32 == 0) routes = load_routes<kByPair>(p, this_token, first, lane);
      uint4 data[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= p.top_k) break;
        // A route that is not taken reads row 0 and drops it: a select costs less than a divergent branch.
        const int32_t row = max(__shfl_sync(0xffffffffu, routes.row, (first + i) % 32), 0);
        data[i] = p.rows[static_cast<int64_t>(row) * p.words + min(word, p.words - 1)];
      }
      if (first == 0 && token < p.num_tokens) next = load_routes<kByPair>(p, token, 0, lane);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= p.top_k) break;
        const bool taken = __shfl_sync(0xffffffffu, routes.row, (first + i) % 32) >= 0;
        const float weight = __shfl_sync(0xffffffffu, routes.weight, (first + i) % 32);
        if (taken) fma_word<kType>(acc, weight, data[i]);  // uniform over the warp
      }
    }
    if (kByPair && p.routes.failed != nullptr && *p.routes.failed != 0) {
#pragma unroll
      for (float& value : acc) value = __int_as_float(0x7fc00000);  // a call that failed has no result
    }
    if (inside) {
      p.y[this_token * p.words + word] = make_uint4(Type::pack(acc[0], acc[1]), Type::pack(acc[2], acc[3]),
                                                    Type::pack(acc[4], acc[5]), Type::pack(acc[6], acc[7]));
    }
  }
}

template <bool kByPair>
cudaError_t launch(CombineParams p, const CombineArgs& args, cudaStream_t stream) {
  if (args.hidden < 8 || args.hidden % 8 != 0 || args.top_k < 1 || args.num_tokens >= (int64_t{1} << 30) ||
      args.num_tokens * args.top_k > std::numeric_limits<int32_t>::max() || args.dtype == DType::kF32)
    return cudaErrorInvalidValue;
  if (args.num_tokens == 0) return cudaSuccess;
  int sms = 0;
  if (cudaError_t e = device_sms(&sms); e != cudaSuccess) return e;
  p.rows = static_cast<const uint4*>(args.rows);
  p.topk_weights = args.topk_weights;
  p.y = static_cast<uint4*>(args.y);
  p.top_k = static_cast<int32_t>(args.top_k);
  p.words = static_cast<int32_t>(args.hidden / 8);
  p.pieces = (p.words + 31) / 32;
  p.num_tokens = args.num_tokens;
  const int64_t ctas = (args.num_tokens * p.pieces + kCombineThreads / 32 - 1) / (kCombineThreads / 32);
  const dim3 grid(static_cast<uint32_t>(std::min<int64_t>(ctas, static_cast<int64_t>(kCombineCtas) * sms)));
  const auto kernel =
      args.dtype == DType::kF16 ? combine_sm90<DType::kF16, kByPair> : combine_sm90<DType::kBF16, kByPair>;
  return launch_dependent(kernel, grid, kCombineThreads, 0, stream, p);
}

}  // namespace

cudaError_t prepare_combine() {
  return load_kernels(combine_sm90<DType::kBF16, false>, combine_sm90<DType::kBF16, true>,
                      combine_sm90<DType::kF16, false>, combine_sm90<DType::kF16, true>);
}

cudaError_t launch_combine(const CombineArgs& args, const Plan& plan, cudaStream_t stream) {
  CombineParams p = {};
  p.pair_row = plan.pair_row;
  return launch<false>(p, args, stream);
}

cudaError_t launch_combine_pairs(const CombineArgs& args, const PairRoutes& routes, cudaStream_t stream) {
  CombineParams p = {};
  p.routes = routes;
  return launch<true>(p, args, stream);
}

}  // namespace streammoe::sm90
