// Which output tile a cluster of two CTAs works on: the schedule of the persistent grouped GEMMs.
//
// Contract: cluster tiles are numbered by expert, ascending, so that all row blocks of an expert are adjacent in time
// and its weights are read from memory once; clusters claim numbers from a counter in that order. A cluster tile is
// two output tiles that share an operand through multicast: two row blocks with the same weight columns, or, for the
// last block of an expert with an odd number of them, one row block with two column tiles. An expert of m blocks has
// m * half_tiles cluster tiles in both cases together, so block b's share begins at b * half_tiles and one table
// look-up finds the expert. Who computes a tile does not enter its bits. Trade-off: a claim is one atomic per tile,
// hidden behind the tile before; a fixed assignment leaves clusters idle because half-empty blocks cost half.
// With an odd number of column tiles one padding column tile exists: it is skipped, or computed on zeros and dropped.
#pragma once

#include "device/block_info.h"
#include "device/ptx_sm90.cuh"

namespace streammoe::sm90 {

struct TileSpace {
  int32_t n_tiles;     // column tiles of the output
  int32_t half_tiles;  // ceil(n_tiles / 2)
  int32_t raster;      // row pairs that go through all column tiles together before the next ones (L2 window)
};

struct Tile {
  int32_t expert;
  int32_t block;    // row block of this CTA, over all experts
  int32_t n_tile;   // column tile of this CTA
  int32_t rows;     // valid rows of the block, 1..kBlockM; 0: no tile is left
  bool share_rows;  // the pair shares the row block and not the weight columns
};

// Tile `index` for CTA `rank` of its cluster; false for a padding column tile.
__device__ __forceinline__ bool decode_tile(const BlockInfo& info, int32_t index, const TileSpace& space, int32_t rank,
                                            Tile& tile) {
  const int32_t padded_tiles = 2 * space.half_tiles;
  const int32_t local = index - info.first_block * space.half_tiles;
  const int32_t row_pairs = info.num_blocks >> 1;
  const int32_t paired_tiles = row_pairs * padded_tiles;
  int32_t block;
  tile.share_rows = local >= paired_tiles;
  if (!tile.share_rows) {
    const int32_t group = local / (space.raster * padded_tiles);
    const int32_t first_pair = group * space.raster;
    const int32_t size = min(space.raster, row_pairs - first_pair);
    const int32_t within = local - first_pair * padded_tiles;
    tile.n_tile = within / size;
    block = 2 * (first_pair + within - tile.n_tile * size) + rank;
  } else {
    tile.n_tile = 2 * (local - paired_tiles) + rank;
    block = info.num_blocks - 1;
  }
  tile.expert = info.expert;
  tile.block = info.first_block + block;
  tile.rows = min(kBlockM, info.num_rows - block * kBlockM);
  return tile.share_rows || tile.n_tile < space.n_tiles;
}

// The one-entry mailbox of a CTA: written by the scheduler thread of CTA 0 for both CTAs, read by every working warp.
// One entry, because a claim should come late: it is made when the slowest reader has begun the tile before.
struct TileQueue {
  uint32_t slot, full, empty;  // shared addresses; `empty` counts the readers of both CTAs, in CTA 0
  uint32_t phase = 0;

  __device__ __forceinline__ TileQueue(uint32_t slot_, uint32_t full_, uint32_t empty_)
      : slot(slot_), full(full_), empty(empty_) {}

  // The next message, whose last word is 0 when nothing is left. Called by a whole warp (kWarp) or by the one thread
  // that works in it; lane 0 answers for the reader.
  template <bool kWarp>
  __device__ __forceinline__ bool receive(int4& message, int lane) {
    // The message of the scheduler in CTA 0, which completes on this CTA's barrier as multicast boxes do. An acquire at
    // cluster scope would add only an invalidation of L1, where shared memory never is.
    mbar_wait(full, phase, "the next tile");
    phase ^= 1;
    message = load_shared_16(slot);
    if (message.w == 0) return false;
    if constexpr (kWarp) __syncwarp();  // every lane has its copy before lane 0 frees the entry
    if (lane == 0) mbar_arrive_cluster(empty, 0);
    return true;
  }

  template <bool kWarp>
  __device__ __forceinline__ bool next(Tile& tile, int lane) {
    int4 message;
    if (!receive<kWarp>(message, lane)) return false;
    tile = decode(message);
    return true;
  }

  static __device__ __forceinline__ Tile decode(const int4& message) {
    return {message.x, message.y, message.z, message.w & 0xff, (message.w >> 8) != 0};
  }
};

// The scheduler: one thread of CTA 0. send() once, then claim() once per tile that was sent, until done.
struct TileScheduler {
  const BlockInfo* blocks;
  TileSpace space;
  TileCounters* counters;
  uint32_t slot, full, empty;
  int32_t index, total;
  uint32_t phase = 0;
  bool done = false;

  __device__ __forceinline__ TileScheduler(const BlockInfo* blocks_, const int32_t* num_blocks, const TileSpace& space_,
                                           TileCounters* counters_, const TileQueue& queue)
      : blocks(blocks_),
        space(space_),
        counters(counters_),
        slot(queue.slot),
        full(queue.full),
        empty(queue.empty),
        index(blockIdx.x >> 1),
        total(*num_blocks * space_.half_tiles) {}

  __device__ __forceinline__ int32_t num_clusters() const { return static_cast<int32_t>(gridDim.x >> 1); }

  __device__ __forceinline__ void take() { index = num_clusters() + atomicAdd(&counters->claimed, 1); }

  // Tells both CTAs their part of tile `index`, or that nothing is left.
  __device__ __forceinline__ void send() {
    Tile tiles[2];
    bool found = false;
    while (!found && index < total) {
      const int4 raw = *reinterpret_cast<const int4*>(blocks + index / space.half_tiles);
      const BlockInfo info{raw.x, raw.y, raw.z, raw.w};
      found = decode_tile(info, index, space, 0, tiles[0]);
      decode_tile(info, index, space, 1, tiles[1]);
      if (!found) take();
    }
#pragma unroll
    for (int rank = 0; rank < 2; ++rank) {
      const Tile& t = tiles[rank];
      send_async_16(
          slot, full, rank,
          found ? make_int4(t.expert, t.block, t.n_tile, t.rows | (t.share_rows ? 0x100 : 0)) : make_int4(0, 0, 0, 0));
    }
    if (found) return;
    done = true;
    // The last cluster to run out leaves the counters as it found them, for the next kernel on the stream.
    if (atomicAdd(&counters->finished, 1) == num_clusters() - 1) {
      counters->claimed = 0;
      counters->finished = 0;
    }
  }

  __device__ __forceinline__ void claim() {
    mbar_wait(empty, phase, "the readers of a tile");  // every reader has the tile sent last
    phase ^= 1;
    take();
    send();
  }
};

}  // namespace streammoe::sm90
