// What becomes of a tile of the grouped GEMM: biases, activation, rounding, and its ways to memory.
//
// Contract: see gemm_core_sm90.cuh. A math warpgroup calls these on the accumulators of its 64 rows; `staging` is its
// own kStagingBytes, two boxes of 64 x 64 elements. store_tile writes rows in sorted order through TMA, padding rows
// with anything; scatter_tile and keep_tile write valid rows only, by their pairs.
// Trade-off: accumulators go through shared memory, 16 KB at a time, so that every store is of whole sectors.
#pragma once

#include <cuda.h>

#include "device/activation.cuh"
#include "device/element.cuh"
#include "device/ptx_sm90.cuh"
#include "kernels/gemm_params_sm90.cuh"

namespace streammoe::sm90 {

// To kGroups times 8 columns from `column` on, whose accumulators begin at kFirst.
template <DType kType, int kFirst, int kGroups, int kCount>
__device__ __forceinline__ void add_bias(float (&acc)[kCount], const uint16_t* bias, int32_t column, int32_t n_size,
                                         int lane) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int32_t c = column + 8 * j + 2 * (lane & 3);
    if (c < n_size) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + c);
      const float low = Element<kType>::low(pair), high = Element<kType>::high(pair);
      float* d = acc + kFirst + 4 * j;
      d[0] = __fadd_rn(d[0], low);
      d[1] = __fadd_rn(d[1], high);
      d[2] = __fadd_rn(d[2], low);
      d[3] = __fadd_rn(d[3], high);
    }
  }
}

// One 16-column strip of a 64 x 64 box, 128-byte swizzled as TMA expects: 16-byte chunk c of row r lies at c
// ^ (r % 8).
__device__ __forceinline__ void stage_strip(uint32_t box, int strip, int row, int lane, const uint32_t (&packed)[4]) {
  const uint32_t chunk = (2 * strip + (lane >> 4)) ^ (row & 7);
  stmatrix_x4(box + row * 128 + chunk * 16, packed[0], packed[1], packed[2], packed[3]);
}

template <DType kType, bool kGated>
__device__ __forceinline__ void add_biases(float (&acc)[128], const GemmParams& p, const Tile& tile, int lane) {
  constexpr int kColumns = kGated ? kBlockN / 2 : kBlockN;
  const int32_t column = tile.n_tile * kColumns;
  if (p.bias0 != nullptr) {
    const uint16_t* bias = p.bias0 + tile.expert * p.bias0_stride;
    add_bias<kType, 0, kColumns / 8>(acc, bias, column, p.n_size, lane);
  }
  if constexpr (kGated) {
    if (p.bias1 != nullptr) {
      const uint16_t* bias = p.bias1 + tile.expert * p.bias1_stride;
      add_bias<kType, 64, kColumns / 8>(acc, bias, column, p.n_size, lane);
    }
  }
}

// Activation (if any) and rounding of 64 columns: four strips of 16 columns as stmatrix takes them.
template <DType kType, bool kGated, bool kActivate, Activation kActivation>
__device__ __forceinline__ void pack_box(uint32_t (&packed)[4][4], const float (&acc)[128], int box, float limit) {
#pragma unroll
  for (int strip = 0; strip < 4; ++strip) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = (box * 4 + strip) * 8 + 2 * i;  // accumulators: strip of two 8-column groups
      if constexpr (kGated) {
        packed[strip][i] = Element<kType>::pack(activate<kActivation>(acc[e], acc[64 + e], limit),
                                                activate<kActivation>(acc[e + 1], acc[64 + e + 1], limit));
      } else if constexpr (kActivate) {
        packed[strip][i] = Element<kType>::pack(activate<kActivation>(acc[e], 0.0f, limit),
                                                activate<kActivation>(acc[e + 1], 0.0f, limit));
      } else {
        packed[strip][i] = Element<kType>::pack(acc[e], acc[e + 1]);
      }
    }
  }
}

// Epilogue in sorted order: activation, rounding, shared memory, TMA store, in boxes of 64 columns over two
// buffers.
template <DType kType, bool kGated, bool kActivate, Activation kActivation>
__device__ __forceinline__ void store_tile(float (&acc)[128], const CUtensorMap& map_out, const GemmParams& p,
                                           const Tile& tile, int group, int warp, int lane, uint32_t staging) {
  constexpr int kColumns = kGated ? kBlockN / 2 : kBlockN;
  const int32_t column = tile.n_tile * kColumns;
  const bool issuer = warp == 0 && lane == 0;
  const int row = warp * 16 + (lane & 15);  // the row whose address this lane gives to stmatrix
#pragma unroll
  for (int box = 0; box < kColumns / 64; ++box) {
    const uint32_t buffer = staging + (box & 1) * kBoxBytes;
    uint32_t packed[4][4];
    pack_box<kType, kGated, kActivate, kActivation>(packed, acc, box, p.limit);
    // The store that read this buffer two boxes ago is done reading; the barrier tells the other threads, and comes
    // after their loads in keep_tile.
    if (issuer) tma_store_wait_read<1>();
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int strip = 0; strip < 4; ++strip) stage_strip(buffer, strip, row, lane, packed[strip]);
    fence_async_shared();  // publishes this thread's stmatrix writes to the TMA store behind the barrier
    named_barrier_sync(1 + group, 128);
    if (issuer && column + 64 * box < p.n_size) {
      tma_store_2d(&map_out, buffer, column + 64 * box, tile.block * kBlockM + 64 * group);
    }
    if (issuer) tma_store_commit();
  }
}

// Where the row of this pair goes: to its place in `out`, or at its owner, which may be another GPU.
__device__ __forceinline__ uint16_t* row_destination(const GemmParams& p, int32_t pair) {
  if (p.owners.peers == nullptr) return p.out + static_cast<int64_t>(pair) * p.n_size;
  const int32_t row = pair / p.top_k;
  const TokenOrder::Owner owner = p.owners.order.owner(row);
  const int64_t place = static_cast<int64_t>(owner.token) * p.top_k + (pair - row * p.top_k);
  return reinterpret_cast<uint16_t*>(p.owners.peers[owner.rank] + p.owners.offset) + place * p.n_size;
}

// The rows that a lane stores when scattering: eight lanes write 128 bytes of one row, a warp's 16 rows are four steps.
inline constexpr int kScatterSteps = 4;
__device__ __forceinline__ int scatter_row(int step, int lane) { return 4 * step + (lane >> 3); }

// Pairs of this lane's rows, -1 for rows that are not written; asked for before the product, which hides the latency.
__device__ __forceinline__ void load_pairs(int32_t (&pairs)[kScatterSteps], const GemmParams& p, const Tile& tile,
                                           int group, int warp, int lane) {
#pragma unroll
  for (int step = 0; step < kScatterSteps; ++step) {
    const int32_t row = 64 * group + 16 * warp + scatter_row(step, lane);
    pairs[step] = row < tile.rows ? p.row_pair[static_cast<int64_t>(tile.block) * kBlockM + row] : -1;
  }
}

// One box of 64 columns, packed, to the rows of a warp: through its own 16 rows of a buffer, in pieces of 16 bytes.
// target: of this lane's rows, at its piece of the box; rows without a pair are not written. The next call must take
// another buffer: its __syncwarp() orders all lanes' reads of this one before the call after it.
__device__ __forceinline__ void scatter_box(const uint32_t (&packed)[4][4], uint16_t* const (&target)[kScatterSteps],
                                            const int32_t (&pairs)[kScatterSteps], int64_t offset, bool inside,
                                            uint32_t buffer, int lane) {
#pragma unroll
  for (int strip = 0; strip < 4; ++strip) stage_strip(buffer, strip, lane & 15, lane, packed[strip]);
  __syncwarp();  // publishes the lanes' stmatrix writes to the loads below
#pragma unroll
  for (int step = 0; step < kScatterSteps; ++step) {
    const int row = scatter_row(step, lane);
    const int4 piece = load_shared_16(buffer + row * 128 + (((lane & 7) ^ (row & 7)) << 4));
    if (inside && pairs[step] >= 0) *reinterpret_cast<int4*>(target[step] + offset) = piece;
  }
}

// Where a warp's 16 rows lie in a staging buffer: a multiple of 1024, so row % 8 is that of the box.
__device__ __forceinline__ uint32_t warp_rows(uint32_t staging, int warp) { return staging + warp * 16 * 128; }

// Epilogue with scattered rows: as store_tile, but each warp writes its own 16 rows itself, so warps do not wait for
// each other.
template <DType kType, bool kGated, bool kActivate, Activation kActivation>
__device__ __forceinline__ void scatter_tile(float (&acc)[128], const int32_t (&pairs)[kScatterSteps],
                                             const GemmParams& p, const Tile& tile, int warp, int lane,
                                             uint32_t staging) {
  constexpr int kColumns = kGated ? kBlockN / 2 : kBlockN;
  const int32_t column = tile.n_tile * kColumns + 8 * (lane & 7);
  uint16_t* target[kScatterSteps];
#pragma unroll
  for (int step = 0; step < kScatterSteps; ++step) target[step] = row_destination(p, max(pairs[step], 0)) + column;
#pragma unroll
  for (int box = 0; box < kColumns / 64; ++box) {
    uint32_t packed[4][4];
    pack_box<kType, kGated, kActivate, kActivation>(packed, acc, box, p.limit);
    const uint32_t buffer = warp_rows(staging, warp) + (box & 1) * kBoxBytes;
    scatter_box(packed, target, pairs, 64 * box, column + 64 * box < p.n_size, buffer, lane);
  }
}

// Before the epilogue in sorted order: gate and up as they enter the activation, rounded, to their pairs' rows; in f16
// what exceeds the range is the largest value, because the derivative of an infinity would be NaN. It ends with loads
// from both buffers: store_tile's first barrier is what lets others write there.
template <DType kType, bool kGated>
__device__ __forceinline__ void keep_tile(const float (&acc)[128], const int32_t (&pairs)[kScatterSteps],
                                          const GemmParams& p, const Tile& tile, int group, int warp, int lane,
                                          uint32_t staging) {
  constexpr int kColumns = kGated ? kBlockN / 2 : kBlockN;
  const int32_t column = tile.n_tile * kColumns + 8 * (lane & 7);
  const int64_t width = kGated ? 2 * static_cast<int64_t>(p.n_size) : p.n_size;
  uint16_t* target[kScatterSteps];
#pragma unroll
  for (int step = 0; step < kScatterSteps; ++step) target[step] = p.gate_up + max(pairs[step], 0) * width + column;
  // The stores of the tile before are done reading the buffers; the barrier tells the other threads.
  if (warp == 0 && lane == 0) tma_store_wait_read<0>();
  named_barrier_sync(1 + group, 128);
#pragma unroll
  for (int box = 0; box < 4; ++box) {
    uint32_t packed[4][4];
    pack_box<kType, false, false, Activation::kSiLU>(packed, acc, box, 0.0f);
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i >> 2][i & 3] = Element<kType>::saturate(packed[i >> 2][i & 3]);
    const int32_t first = 64 * (kGated ? box & 1 : box);  // gated: two boxes of gate, two of up
    const int64_t offset = (kGated && box >= 2 ? p.n_size : 0) + first;
    const uint32_t buffer = warp_rows(staging, warp) + (box & 1) * kBoxBytes;
    scatter_box(packed, target, pairs, offset, column + first < p.n_size, buffer, lane);
  }
}

}  // namespace streammoe::sm90
