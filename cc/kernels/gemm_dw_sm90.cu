// Gradients of the expert weights: dW[e] = RN(sum over the expert's rows r of left[r, :]^T right[r, :]), or the float32
// sum itself.
//
// Contract: left and right are matrices of sorted rows, [R, M] and [R, N]. One accumulator per element, rows ascending
// from the expert's first in steps of 16: the bits depend on the expert's rows and their order alone. Rows are read in
// steps of 64; those between the expert's last and the end of its step must be zero in both operands. An expert without
// rows gets +0. Shape: that of gemm_core_sm90.cuh, with both operands MN-major and the rows as depth, so a tile's
// length is that of its expert. Tiles never cross an expert: outputs are 3-D maps, whose edges clip.
// Gated: gate and up in one launch, a tile being 128 columns of each, as in the forward; left is then read once for
// both. Trade-off: with 512 rows per expert a tile has 8 steps, too few to hide its epilogue behind; tiles of two
// different experts in flight per CTA would, at the price of a second set of barriers.
#include "device/gradient_tiles.h"
#include "kernels/backward_core_sm90.cuh"
#include "kernels/backward_launch.cuh"

namespace streammoe::sm90 {
namespace {

struct DwMaps {
  CUtensorMap left;      // [R, M]
  CUtensorMap right[2];  // [R, N]; the second is up's
  CUtensorMap out[2];    // [L, M, N]
};

// A float32 gradient, [L, M, N] with its strides in elements.
struct WideGradient {
  float* data;
  int64_t expert_stride, row_stride;
};

struct DwParams {
  const int32_t* expert_rows;   // [L]
  const int32_t* expert_first;  // [L], of experts with rows
  TileCounters* counters;
  GradientSpace space;
  int32_t num_tiles;  // cluster tiles of all experts
  int32_t m_size, n_size;
  WideGradient wide[2];  // instead of the maps of the output; the second is up's
};

// One CTA's part of a cluster tile.
struct DwTile {
  int32_t expert, m, column_tile;  // m: first row of the gradient
  int32_t first_row, steps;        // of the expert
};

// The scheduler's message: index of the cluster tile, first row and number of rows of its expert, and 1; 0 at the end.
__device__ __forceinline__ DwTile decode_dw(const int4& message, const DwParams& p, int32_t rank) {
  const GradientTile tile = gradient_tile(p.space, message.x);
  return {tile.expert, (2 * tile.row_pair + rank) * kBlockM, tile.column_tile, message.y,
          (message.z + kBlockK - 1) / kBlockK};
}

// As TileScheduler: send() once, then claim() once per tile that was sent, until done. One thread of CTA 0.
struct DwScheduler {
  const DwParams& p;
  TileQueue queue;
  int32_t index;
  bool done = false;

  __device__ __forceinline__ DwScheduler(const DwParams& params, const TileQueue& queue_)
      : p(params), queue(queue_), index(blockIdx.x >> 1) {}

  __device__ __forceinline__ void send() {
    const int32_t clusters = static_cast<int32_t>(gridDim.x >> 1);
    int4 message = make_int4(0, 0, 0, 0);
    if (index < p.num_tiles) {
      const int32_t expert = gradient_tile(p.space, index).expert;
      const int32_t rows = p.expert_rows[expert];
      message = make_int4(index, rows > 0 ? p.expert_first[expert] : 0, rows, 1);
    }
    send_async_16(queue.slot, queue.full, 0, message);
    send_async_16(queue.slot, queue.full, 1, message);
    if (message.w != 0) return;
    done = true;
    // The last cluster to run out leaves the counters as it found them, for the next kernel on the stream.
    if (atomicAdd(&p.counters->finished, 1) == clusters - 1) {
      p.counters->claimed = 0;
      p.counters->finished = 0;
    }
  }

  __device__ __forceinline__ void claim() {
    mbar_wait(queue.empty, queue.phase, "the readers of a tile");  // every reader has the tile sent last
    queue.phase ^= 1;
    index = static_cast<int32_t>(gridDim.x >> 1) + atomicAdd(&p.counters->claimed, 1);
    send();
  }
};

// Left: this CTA's two boxes of [64 rows][64 m]. Right: four boxes of [64 rows][64 n], of which each CTA loads two for
// both. Gated: rank 0 those of gate, rank 1 those of up.
template <bool kGated>
__device__ __forceinline__ void produce_dw(const DwMaps& maps, const DwParams& p, const Frame& f) {
  TileQueue queue = f.queue();
  Pipeline pipe;
  int4 message;
  while (queue.receive<false>(message, 0)) {
    const DwTile tile = decode_dw(message, p, f.rank);
    const CUtensorMap* right = &maps.right[kGated ? f.rank : 0];
    const int32_t column = kGated ? tile.column_tile * (kBlockN / 2)  //
                                  : tile.column_tile * kBlockN + f.rank * (kBlockN / 2);
    for (int32_t k = 0; k < tile.steps; ++k) {
      const int32_t row = tile.first_row + k * kBlockK;
      const uint32_t a = begin_stage(f, pipe, kStageBytes);
      const uint32_t bar = f.full + 8 * pipe.stage;
      tma_load_2d(a, &maps.left, bar, tile.m, row);
      tma_load_2d(a + kBoxBytes, &maps.left, bar, tile.m + 64, row);
      const uint32_t b = a + kStageBytesA + f.rank * 2 * kBoxBytes;
      tma_load_2d_multicast(b, right, bar, column, row, kBothCtas);
      tma_load_2d_multicast(b + kBoxBytes, right, bar, column + 64, row, kBothCtas);
      pipe.advance();
    }
  }
}

// Rounding, shared memory, TMA store, in boxes of [64 m][64 n] over two buffers.
template <DType kType, bool kGated>
__device__ __forceinline__ void store_gradient(const float (&acc)[128], const DwMaps& maps, const DwParams& p,
                                               const DwTile& tile, int group, int warp, int lane, uint32_t staging) {
  const bool issuer = warp == 0 && lane == 0;
  const int row = warp * 16 + (lane & 15);  // the row whose address this lane gives to stmatrix
#pragma unroll
  for (int box = 0; box < 4; ++box) {
    const uint32_t buffer = staging + (box & 1) * kBoxBytes;
    uint32_t packed[4][4];
    pack_box<kType, false, false, Activation::kSiLU>(packed, acc, box, 0.0f);
    // The store that read this buffer two boxes ago is done reading; the barrier tells the other threads.
    if (issuer) tma_store_wait_read<1>();
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int strip = 0; strip < 4; ++strip) stage_strip(buffer, strip, row, lane, packed[strip]);
    fence_async_shared();  // publishes this thread's stmatrix writes to the TMA store behind the barrier
    named_barrier_sync(1 + group, 128);
    const int32_t column =
        kGated ? tile.column_tile * (kBlockN / 2) + 64 * (box & 1) : tile.column_tile * kBlockN + 64 * box;
    if (issuer && column < p.n_size) {
      tma_store_3d(&maps.out[kGated ? box >> 1 : 0], buffer, column, tile.m + 64 * group, tile.expert);
    }
    if (issuer) tma_store_commit();
  }
}

// The accumulators as they are, straight to memory: a thread has two columns of two rows in each eight columns of the
// tile, so four lanes write the 32 bytes of a sector.
template <bool kGated>
__device__ __forceinline__ void store_wide_gradient(const float (&acc)[128], const DwParams& p, const DwTile& tile,
                                                    int group, int warp, int lane) {
  const int32_t row = tile.m + 64 * group + 16 * warp + (lane >> 2);
#pragma unroll
  for (int which = 0; which < (kGated ? 2 : 1); ++which) {
    constexpr int kEights = kGated ? 16 : 32;
    const WideGradient& out = p.wide[which];
    const int32_t column = tile.column_tile * (8 * kEights) + 2 * (lane & 3);
    float* upper = out.data + tile.expert * out.expert_stride + row * out.row_stride + column;
    float* lower = upper + 8 * out.row_stride;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const float* sums = &acc[4 * (which * kEights + i)];
      if (column + 8 * i >= p.n_size) continue;
      if (row < p.m_size) *reinterpret_cast<float2*>(upper + 8 * i) = make_float2(sums[0], sums[1]);
      if (row + 8 < p.m_size) *reinterpret_cast<float2*>(lower + 8 * i) = make_float2(sums[2], sums[3]);
    }
  }
}

template <DType kType, bool kGated, bool kWide>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_dw_sm90(const __grid_constant__ DwMaps maps, const __grid_constant__ DwParams p) {
  const Frame f = make_frame();
  dependent_launch_wait();  // rows and the plan are written by earlier kernels
  dependent_launch_trigger();
  if (f.warp < 4) {
    registers_decrease<kProducerRegisters>();
    if (f.warp == 0 && f.lane == 0) {
      produce_dw<kGated>(maps, p, f);
    } else if (f.warp == 1 && f.lane == 0 && f.rank == 0) {
      DwScheduler scheduler(p, f.queue());
      scheduler.send();
      while (!scheduler.done) scheduler.claim();
    }
  } else {
    registers_increase<kMathRegisters>();
    const int group = (f.warp >> 2) - 1;
    // Both MN-major: 8-deep groups 1024 B apart. A warpgroup's 64 m are one box; 64-column boxes are kBoxBytes apart.
    const uint64_t a_base = smem_descriptor(f.base + group * kBoxBytes, kBoxBytes, 1024, 1);
    const uint64_t b_base = smem_descriptor(f.base + kStageBytesA, kBoxBytes, 1024, 1);
    TileQueue queue = f.queue();
    Pipeline pipe;
    int4 message;
    while (queue.receive<true>(message, f.lane)) {
      const DwTile tile = decode_dw(message, p, f.rank);
      if (tile.m + 64 * group >= p.m_size) {
        drain(pipe, tile.steps, f.lane, f.full, f.empty);
        continue;
      }
      float acc[128];
      int held = -1;
      multiply_stages<kType, kBlockN, 1, 1>(acc, f, pipe, held, tile.steps, a_base, b_base);
      finish_products(f, held);
      fence_accumulators(acc);
      if (tile.steps == 0) {
#pragma unroll
        for (float& value : acc) value = 0.0f;
      }
      if constexpr (kWide) {
        store_wide_gradient<kGated>(acc, p, tile, group, f.warp & 3, f.lane);
      } else {
        store_gradient<kType, kGated>(acc, maps, p, tile, group, f.warp & 3, f.lane, f.staging + group * kStagingBytes);
      }
    }
    // Shared memory must outlive the stores' reads; their writes are complete at the end of the kernel.
    if (!kWide && (f.warp & 3) == 0 && f.lane == 0) tma_store_wait_all();
  }
  leave_together();
}

template <DType kType>
auto dw_kernel(bool gated, bool wide) {
  if (wide) return gated ? gemm_dw_sm90<kType, true, true> : gemm_dw_sm90<kType, false, true>;
  return gated ? gemm_dw_sm90<kType, true, false> : gemm_dw_sm90<kType, false, false>;
}

cudaError_t encode_gradient(CUtensorMap* map, DType dtype, const ExpertMatrix<void*>& matrix, int64_t experts,
                            int64_t rows, int64_t columns) {
  return encode_experts(map, dtype, matrix.data, experts, rows, columns, matrix.expert_stride, matrix.row_stride);
}

}  // namespace

cudaError_t prepare_gemm_dw_sm90() {
  for (const bool gated : {false, true}) {
    for (const bool wide : {false, true}) {
      if (cudaError_t e = prepare_frame(dw_kernel<DType::kBF16>(gated, wide)); e != cudaSuccess) return e;
      if (cudaError_t e = prepare_frame(dw_kernel<DType::kF16>(gated, wide)); e != cudaSuccess) return e;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_dw_sm90(bool down, const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                                cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  if (cudaError_t e = check_sizes(args, plan); e != cudaSuccess) return e;
  const bool gated = !down && s.gated;
  const int64_t m_size = down ? s.intermediate : s.hidden, n_size = down ? s.hidden : s.intermediate;
  const int64_t tile_columns = gated ? kBlockN / 2 : kBlockN;
  const void* right[2] = {down ? rows.dy : rows.d_gate, rows.d_up};
  const ExpertMatrix<void*> out[2] = {down ? args.gradients.down : args.gradients.gate, args.gradients.up};

  DwMaps maps;
  DwParams params = {};
  if (cudaError_t e = encode_rows(&maps.left, args.dtype, down ? rows.wa : rows.x, plan.row_capacity, m_size);
      e != cudaSuccess)
    return e;
  for (int i = 0; i < (gated ? 2 : 1); ++i) {
    if (out[i].data == nullptr) return cudaErrorInvalidValue;
    if (cudaError_t e = encode_rows(&maps.right[i], args.dtype, right[i], plan.row_capacity, n_size); e != cudaSuccess)
      return e;
    if (args.wide) {
      params.wide[i] = {static_cast<float*>(out[i].data), out[i].expert_stride, out[i].row_stride};
      maps.out[i] = maps.left;  // not used
    } else if (cudaError_t e = encode_gradient(&maps.out[i], args.dtype, out[i], s.num_experts, m_size, n_size);
               e != cudaSuccess) {
      return e;
    }
  }
  if (!gated) maps.right[1] = maps.right[0], maps.out[1] = maps.out[0];

  params.expert_rows = plan.expert_rows;
  params.expert_first = rows.expert_first;
  params.counters = plan.counters;
  const int64_t row_tiles = (m_size + kBlockM - 1) / kBlockM;
  params.space.row_pairs = static_cast<int32_t>((row_tiles + 1) / 2);
  params.space.column_tiles = static_cast<int32_t>((n_size + tile_columns - 1) / tile_columns);
  params.space.rows_first = gradient_rows_first(params.space.row_pairs, params.space.column_tiles);
  params.m_size = static_cast<int32_t>(m_size);
  params.n_size = static_cast<int32_t>(n_size);
  const int64_t num_tiles = s.num_experts * static_cast<int64_t>(params.space.row_pairs) * params.space.column_tiles;
  Grid grid;
  if (cudaError_t e = grid_of(num_tiles, args.num_sms, &grid); e != cudaSuccess) return e;
  params.num_tiles = static_cast<int32_t>(num_tiles);
  const auto kernel = args.dtype == DType::kF16 ? dw_kernel<DType::kF16>(gated, args.wide)  //
                                                : dw_kernel<DType::kBF16>(gated, args.wide);
  return launch_dependent(kernel, dim3(grid.ctas), kGemmThreads, kGemmSharedBytes, stream, maps, params);
}

}  // namespace streammoe::sm90
