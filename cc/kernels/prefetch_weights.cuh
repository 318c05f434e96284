// What a grouped product does while it waits for the kernels before it: it asks for its first weights in L2.
//
// Contract: hints only. Nothing is loaded into the product and nothing is written but a table in shared memory, so this
// is legal before griddepcontrol.wait, whatever the kernels before are still doing: weights that are prefetched are
// loaded again, through the same L2, behind the wait. What is read here to choose the weights may be stale for the same
// reason; it is checked against the number of experts, because a wrong expert costs traffic and an address outside of
// the weights could fault. The first k steps of the tiles that are computed first, in the order of prefetch_order.h,
// box by box as the product loads them. Trade-off: the up product runs beside the plan and so guesses it, a row block
// per expert that has a route, which is right for few rows per expert; the down product finds the block table written.
#pragma once

#include <cuda.h>

#include "device/prefetch_order.h"
#include "device/ptx_sm90.cuh"
#include "device/scheduler.cuh"

namespace streammoe::sm90 {

// What the launch asks for; see GemmArgs::prefetch.
struct PrefetchParams {
  const int32_t* topk_ids;  // up: [num_pairs] ids, of which those of local experts name the weights; nullptr: all do
  int32_t num_pairs, first_expert, num_experts;
  int32_t block_capacity;  // down: entries of the block table
  int32_t rounds;          // k steps per CTA; 0: none
};

// Which part of the product this CTA stands for.
struct PrefetchWork {
  TileSpace space;
  int32_t k_steps, n_size;
  int32_t rank;  // of the cluster's two CTAs
  uint32_t clusters, cluster;
};

// The experts with a route, ascending: a bit each, and as numbers the first ones. First tiles reach no further: a
// cluster has one, and an expert at least one.
inline constexpr int kHitWords = 32;    // kMaxLocalExperts bits
inline constexpr int kHitNumbers = 96;  // at least the clusters of the machine
struct HitExperts {
  uint32_t bits[kHitWords];
  uint16_t numbers[kHitNumbers];
};

// One k step of a tile's weights: the boxes that load_weights loads for it, without their owner in the pair.
template <bool kGated>
__device__ __forceinline__ void prefetch_boxes(const CUtensorMap& map_b0, const CUtensorMap& map_b1,
                                               const PrefetchWork& work, int32_t expert, int32_t n_tile, int32_t k) {
#pragma unroll
  for (int box = 0; box < 4; ++box) {
    const CUtensorMap* map = kGated && box >= 2 ? &map_b1 : &map_b0;
    const int32_t column = kGated ? n_tile * 128 + (box & 1) * 64 : n_tile * 256 + box * 64;
    if (column < work.n_size) tma_prefetch_3d(map, column, k * 64, expert);
  }
}

// Calls visit(tile, k) for the steps of this CTA.
template <class Visit>
__device__ __forceinline__ void for_each_step(const PrefetchWork& work, int32_t rounds, int32_t all_tiles,
                                              Visit visit) {
  const uint32_t tiles = min(static_cast<uint32_t>(max(all_tiles, 0)), work.clusters);
  if (tiles == 0) return;
  for (uint32_t round = 0; round < static_cast<uint32_t>(rounds); ++round) {
    const PrefetchStep step = prefetch_step(round, work.cluster, work.clusters, tiles);
    if (step.k >= static_cast<uint32_t>(work.k_steps)) return;
    visit(static_cast<int32_t>(step.tile), static_cast<int32_t>(step.k));
  }
}

// The number of local experts that the ids name. One warp; the ids are few.
__device__ __forceinline__ int32_t list_hit_experts(const PrefetchParams& p, HitExperts& hit, int lane) {
  hit.bits[lane] = 0;
  __syncwarp();  // shows the zeros to all lanes' additions
  constexpr int kAhead = 4;
  const volatile int32_t* ids = p.topk_ids;
  for (int32_t base = 0; base < p.num_pairs; base += 32 * kAhead) {
    int32_t local[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t pair = base + 32 * i + lane;
      local[i] = pair < p.num_pairs ? ids[pair] - p.first_expert : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (local[i] >= 0 && local[i] < p.num_experts) atomicOr(&hit.bits[local[i] >> 5], 1u << (local[i] & 31));
    }
  }
  __syncwarp();  // shows all lanes' bits to the lane that lists the word
  uint32_t word = hit.bits[lane];
  int32_t end = __popc(word);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, end, step);
    if (lane >= step) end += below;
  }
  for (int32_t at = end - __popc(word); word != 0 && at < kHitNumbers; ++at, word &= word - 1) {
    hit.numbers[at] = static_cast<uint16_t>(32 * lane + __ffs(word) - 1);
  }
  __syncwarp();  // shows the numbers to the lane that prefetches
  return min(__shfl_sync(0xffffffffu, end, 31), kHitNumbers);
}

// Before the plan is there: a row block per expert that has a route. A whole warp.
template <bool kGated>
__device__ __forceinline__ void prefetch_unplanned(const CUtensorMap& map_b0, const CUtensorMap& map_b1,
                                                   const PrefetchParams& p, const PrefetchWork& work, HitExperts& hit,
                                                   int lane) {
  const bool listed = p.topk_ids != nullptr;
  const int32_t experts = listed ? list_hit_experts(p, hit, lane) : p.num_experts;
  if (lane != 0) return;
  for_each_step(work, p.rounds, experts * work.space.half_tiles, [&](int32_t tile, int32_t k) {
    const int32_t at = tile / work.space.half_tiles;
    const int32_t n_tile = 2 * (tile - at * work.space.half_tiles) + work.rank;
    prefetch_boxes<kGated>(map_b0, map_b1, work, listed ? hit.numbers[at] : at, n_tile, k);
  });
}

// With the plan in memory. The product before this one began with it, so it is complete; a table that this SM sees late
// is a wrong hint.
template <bool kGated>
__device__ __forceinline__ void prefetch_planned(const CUtensorMap& map_b0, const CUtensorMap& map_b1,
                                                 const PrefetchParams& p, const PrefetchWork& work,
                                                 const BlockInfo* blocks, const int32_t* num_blocks, int lane) {
  if (lane != 0) return;
  const int32_t used = min(*static_cast<const volatile int32_t*>(num_blocks), p.block_capacity);
  const int32_t all_tiles = used * work.space.half_tiles;
  for_each_step(work, p.rounds, all_tiles, [&](int32_t index, int32_t k) {
    const volatile int4* raw = reinterpret_cast<const volatile int4*>(blocks + index / work.space.half_tiles);
    const BlockInfo info{raw->x, raw->y, raw->z, raw->w};
    Tile tile;
    decode_tile(info, index, work.space, work.rank, tile);
    if (tile.expert < 0 || tile.expert >= p.num_experts || tile.n_tile < 0) return;
    prefetch_boxes<kGated>(map_b0, map_b1, work, tile.expert, tile.n_tile, k);
  });
}

}  // namespace streammoe::sm90
