// The grouped GEMM of the expert layer on sm_90a: out[rows, N] = epilogue(A[rows, K] x b[expert][K, N]).
//
// Contract: elements are bf16 or f16 (kType). Every output element is one float32 accumulator, started from +0, k
// ascending in steps of 16, of the instruction m64n256k16; nothing else enters it, so its bits depend on its own row
// and its expert's weights alone. Rows past an expert's count hold anything: they reach only rows nobody reads. K and N
// need only be multiples of 8: TMA fills with zeros past K and clips past N, and weights are 3-D maps, so no box
// reaches into the next expert. A is a matrix of sorted rows, loaded by TMA, or gathered, row r being x[row_pair[r] /
// top_k], by threads with cp.async, because TMA on this part cannot gather rows. Out is a matrix of sorted rows,
// written by TMA, or scattered, row r going to out[row_pair[r]], by threads; then rows past the count are not written.
// The bits are the same. kKeep: what enters the activation is scattered as well, before it (keep_tile). Shape:
// persistent clusters of 2 CTAs; tile 128 x 256 x 64; four 48-KB stages; a producer warpgroup and two math warpgroups
// of 64 rows each that do not wait for each other, so that one's epilogue hides behind the other's wgmma. Gated: the
// 256 columns are 128 of gate and 128 of up, which so meet in one thread's registers. Trade-off: 224 KB of shared
// memory, one CTA per SM; the output is staged 16 KB at a time per warpgroup.
#pragma once

#include <cuda.h>

#include "device/ptx_sm90.cuh"
#include "device/scheduler.cuh"
#include "device/wgmma_sm90.cuh"
#include "kernels/gemm_epilogue_sm90.cuh"
#include "kernels/gemm_params_sm90.cuh"

namespace streammoe::sm90 {

inline constexpr int kGatherThreads = 128;  // the producer warpgroup
inline constexpr uint16_t kBothCtas = 3;    // multicast mask of the pair

struct Pipeline {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// This CTA's boxes of the weights for one stage. A pair that shares weight columns loads one half each, for both.
template <bool kGated>
__device__ __forceinline__ void load_weights(const CUtensorMap& map_b0, const CUtensorMap& map_b1, const Tile& tile,
                                             int32_t rank, uint32_t b, uint32_t bar, int32_t depth) {
  const CUtensorMap* maps[2] = {&map_b0, kGated ? &map_b1 : &map_b0};
  const int32_t column0 = tile.n_tile * (kGated ? kBlockN / 2 : kBlockN);
  const int32_t column1 = kGated ? column0 : column0 + kBlockN / 2;
  if (!tile.share_rows) {
    const uint32_t half = b + rank * 2 * kBoxBytes;
    const CUtensorMap* map = rank ? maps[1] : maps[0];
    const int32_t column = rank ? column1 : column0;
    tma_load_3d_multicast(half, map, bar, column, depth, tile.expert, kBothCtas);
    tma_load_3d_multicast(half + kBoxBytes, map, bar, column + 64, depth, tile.expert, kBothCtas);
  } else {
    tma_load_3d(b, maps[0], bar, column0, depth, tile.expert);
    tma_load_3d(b + kBoxBytes, maps[0], bar, column0 + 64, depth, tile.expert);
    tma_load_3d(b + 2 * kBoxBytes, maps[1], bar, column1, depth, tile.expert);
    tma_load_3d(b + 3 * kBoxBytes, maps[1], bar, column1 + 64, depth, tile.expert);
  }
}

// The producer: one thread fills the stages of its CTA, its half of the shared operand for both CTAs of the pair.
template <bool kGated>
__device__ __forceinline__ void produce(const CUtensorMap& map_a, const CUtensorMap& map_b0, const CUtensorMap& map_b1,
                                        const GemmParams& p, TileQueue queue, int32_t rank, uint32_t stage_base,
                                        uint32_t full, uint32_t empty) {
  Pipeline pipe;
  Tile tile;
  while (queue.next<false>(tile, 0)) {
    const int32_t row = tile.block * kBlockM;
    for (int32_t k = 0; k < p.k_steps; ++k) {
      const uint32_t a = stage_base + pipe.stage * kStageBytes;
      const uint32_t bar = full + 8 * pipe.stage;
      // Both CTAs' math warps have read the stage: the boxes below overwrite it here and in the peer.
      mbar_wait(empty + 8 * pipe.stage, pipe.phase ^ 1, "an empty stage");
      mbar_arrive_expect_tx(bar, kStageBytes);
      const int32_t depth = k * kBlockK;
      if (!tile.share_rows) {
        tma_load_2d(a, &map_a, bar, depth, row);
        tma_load_2d(a + kBoxBytes, &map_a, bar, depth, row + 64);
      } else {
        tma_load_2d_multicast(a + rank * kBoxBytes, &map_a, bar, depth, row + 64 * rank, kBothCtas);
      }
      load_weights<kGated>(map_b0, map_b1, tile, rank, a + kStageBytesA, bar, depth);
      pipe.advance();
    }
  }
}

// The producer of gathered rows: all four warps. Thread t copies 16-byte chunk t % 8 of rows t / 8 + 16 i, so that
// eight neighbours read one 128-byte line; thread 0 also loads the weights, thread 32 of CTA 0 also claims the next
// tile, once per tile, when the stages ahead are full and hide it. Rows past the expert's count hold a copy of token
// 0, which nobody reads; columns past the depth are zero, because 0 times a stale NaN is no zero.
// What limits it is instruction issue: computing addresses from 32-bit offsets instead of advancing pointers cost 8 %
// of the product, so four steps share one pointer increment and nothing is predicated by row.
template <bool kGated>
__device__ __forceinline__ void produce_gathered(const CUtensorMap& map_b0, const CUtensorMap& map_b1,
                                                 const GemmParams& p, TileQueue queue, int32_t rank,
                                                 uint32_t stage_base, uint32_t full, uint32_t empty) {
  constexpr int kCopies = kBlockM / 16;
  constexpr int kUnroll = 4;
  const int thread = threadIdx.x;
  const int chunk = thread & 7, first = thread >> 3;
  const uint32_t target = stage_base + first * 128 + ((chunk ^ (first & 7)) << 4);  // swizzled; 16 rows on: + 2048
  const bool schedules = thread == 32 && rank == 0;
  const int32_t claim_step = p.k_steps > kUnroll ? kUnroll : 0;  // after the second round of stages
  TileScheduler scheduler(p.blocks, p.num_blocks, p.space, p.counters, queue);
  if (schedules) scheduler.send();
  __syncwarp();
  Pipeline pipe;
  Tile tile;
  while (queue.next<true>(tile, thread & 31)) {
    const int32_t* pairs = p.row_pair + static_cast<int64_t>(tile.block) * kBlockM + first;
    const uint16_t* source[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t pair = first + 16 * i < tile.rows ? pairs[16 * i] : 0;
      source[i] = p.x + static_cast<int64_t>(pair / p.top_k) * p.depth + 8 * chunk;
    }
    for (int32_t k0 = 0; k0 < p.k_steps; k0 += kUnroll) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int32_t k = k0 + j;
        if (k >= p.k_steps) break;
        const uint32_t stage = pipe.stage * kStageBytes;
        const uint32_t bar = full + 8 * pipe.stage;
        mbar_wait(empty + 8 * pipe.stage, pipe.phase ^ 1, "an empty stage, gathering");  // as in produce
        if (thread == 0) {
          mbar_arrive_expect_tx(bar, kStageBytesB);
          load_weights<kGated>(map_b0, map_b1, tile, rank, stage_base + stage + kStageBytesA, bar, k * kBlockK);
        }
        __syncwarp();
        const uint32_t bytes = k * kBlockK + 8 * chunk < p.depth ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kCopies / 2; ++i) {
          copy_async_16(target + stage + i * 2048, source[i] + j * kBlockK, bytes);
        }
        if (tile.rows > 64) {
#pragma unroll
          for (int i = kCopies / 2; i < kCopies; ++i) {
            copy_async_16(target + stage + i * 2048, source[i] + j * kBlockK, bytes);
          }
        }
        copy_async_arrive(bar);
        pipe.advance();
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i) source[i] += kUnroll * kBlockK;
      // The claim waits for the slowest reader of this tile; it needs only stages that were filled before.
      if (schedules && k0 == claim_step) scheduler.claim();
      __syncwarp();
    }
  }
}

// Frees a stage in both CTAs: each holds half of the operand this warp has just finished reading.
__device__ __forceinline__ void release_stage(uint32_t empty, int stage, int lane) {
  if (lane < 2) mbar_arrive_cluster(empty + 8 * stage, lane);
}

// acc = the tile's product for this warpgroup's 64 rows. All stages consumed are released at return.
template <DType kType, bool kGather>
__device__ __forceinline__ void multiply(float (&acc)[128], Pipeline& pipe, int32_t k_steps, int group, int lane,
                                         uint32_t stage_base, uint32_t full, uint32_t empty) {
  // A: K-major, 8-row groups 1024 B apart. B: MN-major, 8-deep groups 1024 B apart, 64-column boxes kBoxBytes
  // apart.
  const uint64_t a_base = smem_descriptor(stage_base + group * kBoxBytes, 16, 1024, 1);
  const uint64_t b_base = smem_descriptor(stage_base + kStageBytesA, kBoxBytes, 1024, 1);
  int previous = 0;
  for (int32_t k = 0; k < k_steps; ++k) {
    mbar_wait(full + 8 * pipe.stage, pipe.phase, "a full stage");
    // cp.async wrote A through the generic proxy; the barrier has shown it to this thread, the fence shows it to the
    // tensor cores' reads that this thread issues next.
    if constexpr (kGather) fence_async_shared();
    const uint64_t offset = static_cast<uint64_t>(pipe.stage * (kStageBytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      // 16 deep: 32 B along a swizzled row of A, two 8-deep groups of B.
      Wgmma<kBlockN, 0, 1, kType>::mma(acc, a_base + offset + step * (32 >> 4), b_base + offset + step * (2048 >> 4),
                                       step == 0 ? k : 1);
    }
    wgmma_commit();
    // The group before this one is complete: its stage can be refilled while this one runs.
    wgmma_wait<1>();
    if (k > 0) release_stage(empty, previous, lane);
    previous = pipe.stage;
    pipe.advance();
  }
  wgmma_wait<0>();
  fence_accumulators(acc);
  release_stage(empty, previous, lane);
}

// A warpgroup without valid rows keeps the barriers in step.
__device__ __forceinline__ void drain(Pipeline& pipe, int32_t k_steps, int lane, uint32_t full, uint32_t empty) {
  for (int32_t k = 0; k < k_steps; ++k) {
    mbar_wait(full + 8 * pipe.stage, pipe.phase, "a full stage, no rows");
    release_stage(empty, pipe.stage, lane);
    pipe.advance();
  }
}

template <DType kType, bool kGather, bool kScatter, bool kGated, bool kActivate, Activation kActivation,
          bool kKeep = false>
__device__ __forceinline__ void grouped_gemm(const CUtensorMap& map_a, const CUtensorMap& map_b0,
                                             const CUtensorMap& map_b1, const CUtensorMap& map_out,
                                             const GemmParams& p) {
  extern __shared__ uint8_t shared[];
  // Swizzled boxes want 1024-byte alignment; the same offset in both CTAs, as multicast needs.
  const uint32_t base = (smem_address(shared) + 1023u) & ~1023u;
  const uint32_t staging = base + kStages * kStageBytes;
  const uint32_t full = staging + 2 * kStagingBytes;
  const uint32_t empty = full + kStages * 8;
  const uint32_t queue_slot = empty + kStages * 8;  // 16-byte aligned, as all before it are
  const uint32_t queue_full = queue_slot + 16, queue_empty = queue_slot + 24;
  const int32_t rank = static_cast<int32_t>(cluster_cta_rank());
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    if constexpr (!kGather) tma_prefetch_map(&map_a);
    tma_prefetch_map(&map_b0);
    if constexpr (kGated) tma_prefetch_map(&map_b1);
    if constexpr (!kScatter) tma_prefetch_map(&map_out);
    for (int s = 0; s < kStages; ++s) {
      // The expect_tx, and one arrival per gathering thread when its copies have landed.
      mbar_init(full + 8 * s, kGather ? 1 + kGatherThreads : 1);
      mbar_init(empty + 8 * s, 16);  // 2 CTAs x 2 warpgroups x 4 warps
    }
    mbar_init(queue_full, 1);  // the scheduler's message
    // Readers of both CTAs: eight math warps, and the TMA thread or the four gathering warps.
    mbar_init(queue_empty, 2 * (8 + (kGather ? kGatherThreads / 32 : 1)));
    fence_mbar_init();
  }
  if (threadIdx.x == 0 && p.resident != nullptr) atomicAdd(p.resident, 1u);  // for speed only: nothing is published
  cluster_sync();           // the peer's barriers exist before anything is multicast to them
  dependent_launch_wait();  // rows and the block table are written by earlier kernels
  if (!p.holds_successor) dependent_launch_trigger();

  const TileQueue queue(queue_slot, queue_full, queue_empty);
  if (warp < 4) {
    registers_decrease<kProducerRegisters>();
    if constexpr (kGather) {
      produce_gathered<kGated>(map_b0, map_b1, p, queue, rank, base, full, empty);
    } else if (warp == 0) {
      if (lane == 0) produce<kGated>(map_a, map_b0, map_b1, p, queue, rank, base, full, empty);
    } else if (warp == 1 && lane == 0 && rank == 0) {
      TileScheduler scheduler(p.blocks, p.num_blocks, p.space, p.counters, queue);
      scheduler.send();
      while (!scheduler.done) scheduler.claim();
    }
  } else {
    registers_increase<kMathRegisters>();
    const int group = (warp >> 2) - 1;
    TileQueue tiles = queue;
    Pipeline pipe;
    Tile tile;
    while (tiles.next<true>(tile, lane)) {
      if (tile.rows <= 64 * group) {
        drain(pipe, p.k_steps, lane, full, empty);
        continue;
      }
      const uint32_t buffers = staging + group * kStagingBytes;
      int32_t pairs[kScatterSteps];
      if constexpr (kScatter || kKeep) load_pairs(pairs, p, tile, group, warp & 3, lane);
      float acc[128];
      multiply<kType, kGather>(acc, pipe, p.k_steps, group, lane, base, full, empty);
      add_biases<kType, kGated>(acc, p, tile, lane);
      if constexpr (kKeep) keep_tile<kType, kGated>(acc, pairs, p, tile, group, warp & 3, lane, buffers);
      if constexpr (kScatter) {
        scatter_tile<kType, kGated, kActivate, kActivation>(acc, pairs, p, tile, warp & 3, lane, buffers);
      } else {
        store_tile<kType, kGated, kActivate, kActivation>(acc, map_out, p, tile, group, warp & 3, lane, buffers);
      }
    }
    // Shared memory must outlive the stores' reads; their writes are complete at the end of the kernel.
    if (!kScatter && (warp & 3) == 0 && lane == 0) tma_store_wait_all();
  }
  // The peer may still arrive at this CTA's barriers or multicast into its stages: leave together.
  __syncwarp();
  cluster_sync();
}

}  // namespace streammoe::sm90
