// The weighted sum of a token's expert rows: y[t] = RN(sum over k of weights[t, k] * rows[pair_row[t, k]]).
//
// Contract: acc starts at +0 and is fmaf(w_k, row_k, acc) in float32, k ascending, taken routes only; one rounding to
// bf16 at the end; a token without routes gives +0. Weights of routes that are not taken are not used, NaN or not.
// A warp walks over pieces of 512 bytes of a token; the next piece's row numbers are loaded before this piece's rows
// are waited for, so that a warp has one memory latency per piece and not two. Trade-off: lanes hold the routes (one
// each) and shuffle them out, which keeps registers low enough for 28 warps per SM.
#include <algorithm>

#include "device/ptx_sm90.cuh"
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
  const int32_t* pair_row;
  uint4* y;
  int64_t num_tokens;
  int32_t top_k, words, pieces;  // 16-byte words of a row, and its pieces of 32 words
};

__device__ __forceinline__ Routes load_routes(const CombineParams& p, int64_t token, int32_t base, int lane) {
  Routes routes{-1, 0.0f};
  if (base + lane < p.top_k) {
    routes.row = p.pair_row[token * p.top_k + base + lane];
    routes.weight = p.topk_weights[token * p.top_k + base + lane];
  }
  return routes;
}

__device__ __forceinline__ void fma_word(float (&acc)[8], float w, const uint4& word) {
  const uint32_t parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc[2 * i] = __fmaf_rn(w, bf16_low(parts[i]), acc[2 * i]);
    acc[2 * i + 1] = __fmaf_rn(w, bf16_high(parts[i]), acc[2 * i + 1]);
  }
}

__global__ void __launch_bounds__(kCombineThreads, kCombineCtas) combine_bf16_sm90(CombineParams p) {
  dependent_launch_wait();  // rows, by gemm_down
  dependent_launch_trigger();
  const int lane = threadIdx.x & 31;
  // Token and piece advance without a division per step.
  const int32_t warps = gridDim.x * (kCombineThreads / 32);
  const int32_t warp = blockIdx.x * (kCombineThreads / 32) + (threadIdx.x >> 5);
  const int32_t token_step = warps / p.pieces, piece_step = warps % p.pieces;
  int32_t token = warp / p.pieces, piece = warp % p.pieces;
  Routes next{-1, 0.0f};
  if (token < p.num_tokens) next = load_routes(p, token, 0, lane);
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
      if (first > 0 && first % 32 == 0) routes = load_routes(p, this_token, first, lane);
      uint4 data[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= p.top_k) break;
        // A route that is not taken reads row 0 and drops it: a select costs less than a divergent branch.
        const int32_t row = max(__shfl_sync(0xffffffffu, routes.row, (first + i) % 32), 0);
        data[i] = p.rows[static_cast<int64_t>(row) * p.words + min(word, p.words - 1)];
      }
      if (first == 0 && token < p.num_tokens) next = load_routes(p, token, 0, lane);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= p.top_k) break;
        const bool taken = __shfl_sync(0xffffffffu, routes.row, (first + i) % 32) >= 0;
        const float weight = __shfl_sync(0xffffffffu, routes.weight, (first + i) % 32);
        if (taken) fma_word(acc, weight, data[i]);  // uniform over the warp
      }
    }
    if (inside) {
      p.y[this_token * p.words + word] = make_uint4(pack_bf16(acc[0], acc[1]), pack_bf16(acc[2], acc[3]),
                                                    pack_bf16(acc[4], acc[5]), pack_bf16(acc[6], acc[7]));
    }
  }
}

}  // namespace

cudaError_t launch_combine(const CombineArgs& args, const Plan& plan, cudaStream_t stream) {
  if (args.hidden < 8 || args.hidden % 8 != 0 || args.top_k < 1 || args.num_tokens >= (int64_t{1} << 30))
    return cudaErrorInvalidValue;
  if (args.num_tokens == 0) return cudaSuccess;
  int device = 0, sms = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) return e;
  CombineParams p;
  p.rows = static_cast<const uint4*>(args.rows);
  p.topk_weights = args.topk_weights;
  p.pair_row = plan.pair_row;
  p.y = static_cast<uint4*>(args.y);
  p.top_k = static_cast<int32_t>(args.top_k);
  p.words = static_cast<int32_t>(args.hidden / 8);
  p.pieces = (p.words + 31) / 32;
  p.num_tokens = args.num_tokens;
  const int64_t ctas = (args.num_tokens * p.pieces + kCombineThreads / 32 - 1) / (kCombineThreads / 32);
  const dim3 grid(static_cast<uint32_t>(std::min<int64_t>(ctas, static_cast<int64_t>(kCombineCtas) * sms)));
  return launch_dependent(combine_bf16_sm90, grid, kCombineThreads, 0, stream, p);
}

}  // namespace streammoe::sm90
