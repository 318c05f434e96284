// Copies each token's row of x to the rows its routes take: rows[pair_row[t, k]] = x[t].
//
// Contract: a pure copy of 16-byte pieces, so NaN and every other bit pattern pass through; routes that are not taken
// (-1) and padding rows are not written. Token-major: x is read once, K copies are written from registers. On the way
// it can zero another matrix's rows of the routes that are not taken.
// Trade-off: it writes and the product reads T*K*H*2 bytes (83 us at T 8192, K 8, H 2048) that gathering inside the
// product saves; it stays for wide intermediates, where the product is slowed by more than that.
#include "device/ptx_sm90.cuh"
#include "kernels/launch.h"
#include "kernels/launch_dependent.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kGatherThreads = 256;  // 8 pieces of (token, 32 x kVectors 16-byte words) per CTA, one per warp
constexpr int kVectors = 4;          // loads in flight per thread: 2 KB of a row per warp

struct Params {
  const uint4* x;
  uint4* rows;
  uint4* cleared;
  const int32_t* pair_row;
  int64_t num_tokens;
  int32_t top_k;
  int32_t words, cleared_words;  // of a row
  int32_t pieces;                // of a token
};

__global__ void __launch_bounds__(kGatherThreads) gather_rows(Params p) {
  dependent_launch_wait();  // pair_row, by plan_scatter
  dependent_launch_trigger();
  const int64_t piece_idx = static_cast<int64_t>(blockIdx.x) * (kGatherThreads / 32) + (threadIdx.x >> 5);
  const int64_t token = piece_idx / p.pieces;
  if (token >= p.num_tokens) return;
  const int32_t word = static_cast<int32_t>(piece_idx - token * p.pieces) * (32 * kVectors) + (threadIdx.x & 31);
  uint4 data[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (word + 32 * v < p.words) data[v] = p.x[token * p.words + word + 32 * v];
  }
  for (int32_t k = 0; k < p.top_k; ++k) {
    const int64_t pair = token * p.top_k + k;
    const int32_t row = p.pair_row[pair];
    if (row < 0) {
      for (int32_t w = word; w < p.cleared_words; w += p.pieces * 32 * kVectors) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (w + 32 * v < p.cleared_words) p.cleared[pair * p.cleared_words + w + 32 * v] = make_uint4(0, 0, 0, 0);
        }
      }
      continue;
    }
    uint4* out = p.rows + static_cast<int64_t>(row) * p.words + word;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (word + 32 * v < p.words) out[32 * v] = data[v];
    }
  }
}

}  // namespace

cudaError_t prepare_gather_rows() { return load_kernels(gather_rows); }

cudaError_t launch_gather_rows(const GatherArgs& args, const Plan& plan, cudaStream_t stream) {
  if (args.hidden < 8 || args.hidden % 8 != 0 || args.cleared_width % 8 != 0) return cudaErrorInvalidValue;
  if (args.num_tokens == 0) return cudaSuccess;
  Params p = {};
  p.x = static_cast<const uint4*>(args.x);
  p.rows = static_cast<uint4*>(args.rows);
  p.cleared = static_cast<uint4*>(args.cleared);
  p.pair_row = plan.pair_row;
  p.num_tokens = args.num_tokens;
  p.top_k = static_cast<int32_t>(args.top_k);
  p.words = static_cast<int32_t>(args.hidden / 8);
  p.cleared_words = args.cleared == nullptr ? 0 : static_cast<int32_t>(args.cleared_width / 8);
  p.pieces = (p.words + 32 * kVectors - 1) / (32 * kVectors);
  const int64_t warps = args.num_tokens * p.pieces;
  const dim3 grid(static_cast<uint32_t>((warps + kGatherThreads / 32 - 1) / (kGatherThreads / 32)));
  return launch_dependent(gather_rows, grid, kGatherThreads, 0, stream, p);
}

}  // namespace streammoe::sm90
