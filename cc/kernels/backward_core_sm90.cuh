// What the three grouped products of the backward share: barriers, loads of weights, the multiply loop.
//
// Contract: shape, stages, pairs of CTAs, tile queue and the order of bits are those of gemm_core_sm90.cuh: every
// element is one float32 accumulator from +0, k ascending in steps of 16. What differs are the operands: weights are
// read along their rows (K-major) where the forward reads along their columns, and two products may follow each other
// through one pipeline, on one accumulator or on two. Trade-off: roles are written out in each kernel instead of a
// framework with a policy per product; what is here has no branch on who uses it.
#pragma once

#include "kernels/gemm_core_sm90.cuh"

namespace streammoe::sm90 {

// Where a CTA's barriers and buffers lie in its dynamic shared memory (kGemmSharedBytes), and who the thread is.
struct Frame {
  uint32_t base, staging, full, empty;  // stages, 2 x kStagingBytes, barriers of the stages
  uint32_t queue_slot, queue_full, queue_empty;
  int32_t rank;  // of the CTA in its pair
  int warp, lane;

  __device__ __forceinline__ TileQueue queue() const { return TileQueue(queue_slot, queue_full, queue_empty); }
};

// Sets up the barriers and meets the peer; no global memory is touched. All threads of both CTAs call it first.
__device__ __forceinline__ Frame make_frame() {
  extern __shared__ uint8_t shared[];
  Frame f;
  // Swizzled boxes want 1024-byte alignment; the same offset in both CTAs, as multicast needs.
  f.base = (smem_address(shared) + 1023u) & ~1023u;
  f.staging = f.base + kStages * kStageBytes;
  f.full = f.staging + 2 * kStagingBytes;
  f.empty = f.full + kStages * 8;
  f.queue_slot = f.empty + kStages * 8;
  f.queue_full = f.queue_slot + 16;
  f.queue_empty = f.queue_slot + 24;
  f.rank = static_cast<int32_t>(cluster_cta_rank());
  f.warp = threadIdx.x >> 5;
  f.lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbar_init(f.full + 8 * s, 1);    // the producer's expect_tx
      mbar_init(f.empty + 8 * s, 16);  // 2 CTAs x 2 warpgroups x 4 warps
    }
    mbar_init(f.queue_full, 1);       // the scheduler's message
    mbar_init(f.queue_empty, 2 * 9);  // readers of both CTAs: eight math warps and the TMA thread
    fence_mbar_init();
  }
  cluster_sync();  // the peer's barriers exist before anything is multicast to them
  return f;
}

// Before a CTA ends: the peer may still arrive at its barriers or multicast into its stages.
__device__ __forceinline__ void leave_together() {
  __syncwarp();
  cluster_sync();
}

// Registers per thread when a math thread holds 192 accumulators: 256 * 232 + 128 * 40 = 64512, as at entry.
inline constexpr int kWideProducerRegisters = 40;
inline constexpr int kWideMathRegisters = 232;

// One [64 n][64 k] box of expert `e`'s weights, from a map whose rows are k (MN-major, as the forward reads them) or n
// (K-major).
template <bool kKMajor>
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t bar, int32_t n, int32_t k,
                                         int32_t expert, bool both) {
  const int32_t c0 = kKMajor ? k : n, c1 = kKMajor ? n : k;
  if (both) {
    tma_load_3d_multicast(dst, map, bar, c0, c1, expert, kBothCtas);
  } else {
    tma_load_3d(dst, map, bar, c0, c1, expert);
  }
}

// kBoxes boxes of 64 columns n for one stage, columns from `column` on. A pair that shares weight columns loads one
// half each, for both.
template <int kBoxes, bool kKMajor>
__device__ __forceinline__ void load_columns(const CUtensorMap* map, const Tile& tile, int32_t rank, int32_t column,
                                             int32_t k, uint32_t b, uint32_t bar) {
  if (!tile.share_rows) {
#pragma unroll
    for (int i = 0; i < kBoxes / 2; ++i) {
      const int32_t box = rank * (kBoxes / 2) + i;
      load_box<kKMajor>(b + box * kBoxBytes, map, bar, column + 64 * box, k, tile.expert, true);
    }
  } else {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_box<kKMajor>(b + box * kBoxBytes, map, bar, column + 64 * box, k, tile.expert, false);
    }
  }
}

// [128 rows][64 k] of a matrix of sorted rows. A pair that shares a row block loads one half each, for both.
__device__ __forceinline__ void load_rows(const CUtensorMap* map, const Tile& tile, int32_t rank, int32_t k, uint32_t a,
                                          uint32_t bar) {
  const int32_t row = tile.block * kBlockM;
  if (!tile.share_rows) {
    tma_load_2d(a, map, bar, k, row);
    tma_load_2d(a + kBoxBytes, map, bar, k, row + 64);
  } else {
    tma_load_2d_multicast(a + rank * kBoxBytes, map, bar, k, row + 64 * rank, kBothCtas);
  }
}

// Waits until a stage is empty in both CTAs, and tells its barrier how many bytes come; returns the stage's address.
__device__ __forceinline__ uint32_t begin_stage(const Frame& f, const Pipeline& pipe, uint32_t bytes) {
  mbar_wait(f.empty + 8 * pipe.stage, pipe.phase ^ 1, "an empty stage");
  mbar_arrive_expect_tx(f.full + 8 * pipe.stage, bytes);
  return f.base + pipe.stage * kStageBytes;
}

// Distance of one k16 step in a stage's operand, in units of a descriptor: 32 bytes along swizzled rows when K-major,
// two 8-deep groups when MN-major.
template <int kTrans>
__device__ __forceinline__ constexpr uint64_t k16_step() {
  return (kTrans ? 2048 : 32) >> 4;
}

// acc = the product of `steps` stages for this warpgroup's 64 rows, started from +0. Returns with the last stage's
// instructions still running: `held` is that stage, -1 for none, and a product before this one may have left its own.
template <DType kType, int kN, int kTransA, int kTransB>
__device__ __forceinline__ void multiply_stages(float (&acc)[kN / 2], const Frame& f, Pipeline& pipe, int& held,
                                                int32_t steps, uint64_t a_base, uint64_t b_base) {
  for (int32_t k = 0; k < steps; ++k) {
    mbar_wait(f.full + 8 * pipe.stage, pipe.phase, "a full stage");
    const uint64_t offset = static_cast<uint64_t>(pipe.stage * (kStageBytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      Wgmma<kN, kTransA, kTransB, kType>::mma(acc, a_base + offset + step * k16_step<kTransA>(),
                                              b_base + offset + step * k16_step<kTransB>(), step == 0 ? k : 1);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (held >= 0) release_stage(f.empty, held, f.lane);
    held = pipe.stage;
    pipe.advance();
  }
}

// All products are complete; the accumulators may be read after fence_accumulators().
__device__ __forceinline__ void finish_products(const Frame& f, int& held) {
  wgmma_wait<0>();
  if (held >= 0) release_stage(f.empty, held, f.lane);
  held = -1;
}

}  // namespace streammoe::sm90
