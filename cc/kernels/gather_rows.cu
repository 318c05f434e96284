// Copies each token's row of x to the rows its routes take: rows[pair_row[t, k]] = x[t].
//
// Contract: a pure copy of 16-byte pieces, so NaN and every other bit pattern pass through; routes that are not taken
// (-1) and padding rows are not written. Token-major: x is read once, K copies are written from registers.
// Trade-off: it writes and the product reads T*K*H*2 bytes (83 us at T 8192, K 8, H 2048) that gathering inside the
// product saves; it stays for wide intermediates, where the product is slowed by more than that.
#include "device/ptx_sm90.cuh"
#include "kernels/launch.h"
#include "kernels/launch_dependent.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kGatherThreads = 256;  // 8 pieces of (token, 32 x kVectors 16-byte words) per CTA, one per warp
constexpr int kVectors = 4;          // loads in flight per thread: 2 KB of a row per warp

__global__ void __launch_bounds__(kGatherThreads)
    gather_rows(const uint4* x, uint4* rows, const int32_t* pair_row, int64_t num_tokens, int32_t top_k, int32_t words,
                int32_t pieces) {
  dependent_launch_wait();  // pair_row, by plan_scatter
  dependent_launch_trigger();
  const int64_t piece_idx = static_cast<int64_t>(blockIdx.x) * (kGatherThreads / 32) + (threadIdx.x >> 5);
  const int64_t token = piece_idx / pieces;
  if (token >= num_tokens) return;
  const int32_t word = static_cast<int32_t>(piece_idx - token * pieces) * (32 * kVectors) + (threadIdx.x & 31);
  uint4 data[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (word + 32 * v < words) data[v] = x[token * words + word + 32 * v];
  }
  for (int32_t k = 0; k < top_k; ++k) {
    const int32_t row = pair_row[token * top_k + k];
    if (row < 0) continue;
    uint4* out = rows + static_cast<int64_t>(row) * words + word;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (word + 32 * v < words) out[32 * v] = data[v];
    }
  }
}

}  // namespace

cudaError_t prepare_gather_rows() { return load_kernels(gather_rows); }

cudaError_t launch_gather_rows(const GatherArgs& args, const Plan& plan, cudaStream_t stream) {
  if (args.hidden < 8 || args.hidden % 8 != 0) return cudaErrorInvalidValue;
  if (args.num_tokens == 0) return cudaSuccess;
  const int32_t words = static_cast<int32_t>(args.hidden / 8);
  const int32_t pieces = (words + 32 * kVectors - 1) / (32 * kVectors);
  const int64_t warps = args.num_tokens * pieces;
  const dim3 grid(static_cast<uint32_t>((warps + kGatherThreads / 32 - 1) / (kGatherThreads / 32)));
  return launch_dependent(gather_rows, grid, kGatherThreads, 0, stream, static_cast<const uint4*>(args.x),
                          static_cast<uint4*>(args.rows), plan.pair_row, args.num_tokens,
                          static_cast<int32_t>(args.top_k), words, pieces);
}

}  // namespace streammoe::sm90
