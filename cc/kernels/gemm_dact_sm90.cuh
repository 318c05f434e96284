// The first product of the backward, with the forward's up product inside: what dy becomes before the activation.
//
// Contract: for 128 rows and 128 of the I columns a tile computes gate and up (as gemm_up, to the bit), dA' = dy
// W_down^T, and from them, in registers, d_gate, d_up, wa = RN(w * a) and each row's share of d_weights in groups of 64
// columns: see backward.h. Rows past an expert's count are written as zeros where a warpgroup has a valid row, not at
// all elsewhere. Shape: gemm_core_sm90.cuh's, with depth H twice: k steps of x with W_gate and W_up, then of dy with
// W_down read along its rows. The two products have accumulators of their own and follow each other without a pause.
// The epilogue goes 8 columns at a time into boxes of 32: a math thread holds 192 accumulators of its 232 registers.
// With kept gate and up the first product falls away, and a thread reads its part of them, 64 registers, instead.
// Trade-off of computing them again: no gate and up in memory. Stored in float32, as the bits ask for (the forward
// rounds only a), they are 8 bytes per element written and read: 0.9 GB at qwen3-30b, 4 GB at mixtral and 2 GB more of
// workspace. The price: dy meets 128 columns at a time and not 256, so that a third of the work needs a third more
// bytes from L2.
#pragma once

#include <type_traits>

#include "kernels/backward_core_sm90.cuh"
#include "kernels/gemm_dact_params.cuh"

namespace streammoe::sm90 {

namespace {

template <bool kGated, bool kKept>
__device__ __forceinline__ void produce_dact(const DactMaps& maps, const DactParams& p, const Frame& f) {
  constexpr int kBoxes = kGated ? 4 : 2;
  TileQueue queue = f.queue();
  Pipeline pipe;
  Tile tile;
  while (queue.next<false>(tile, 0)) {
    const int32_t column = tile.n_tile * kDactColumns;
    for (int32_t k = 0; !kKept && k < p.k_steps; ++k) {
      const uint32_t a = begin_stage(f, pipe, kStageBytesA + kBoxes * kBoxBytes);
      const uint32_t bar = f.full + 8 * pipe.stage;
      load_rows(&maps.x, tile, f.rank, k * kBlockK, a, bar);
      if constexpr (kGated) {
        load_weights<true>(maps.gate, maps.up, tile, f.rank, a + kStageBytesA, bar, k * kBlockK);
      } else {
        load_columns<2, false>(&maps.gate, tile, f.rank, column, k * kBlockK, a + kStageBytesA, bar);
      }
      pipe.advance();
    }
    for (int32_t k = 0; k < p.k_steps; ++k) {
      const uint32_t a = begin_stage(f, pipe, kStageBytesA + 2 * kBoxBytes);
      const uint32_t bar = f.full + 8 * pipe.stage;
      load_rows(&maps.dy, tile, f.rank, k * kBlockK, a, bar);
      load_columns<2, true>(&maps.down, tile, f.rank, column, k * kBlockK, a + kStageBytesA, bar);
      pipe.advance();
    }
  }
}

// The two rows of a thread, lane / 4 and eight below, of the 16 of its warp.
struct RowPair {
  float weight[2];
  bool valid[2];
};

__device__ __forceinline__ RowPair load_row_pair(const DactParams& p, const Tile& tile, int group, const Frame& f) {
  RowPair rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row = 64 * group + 16 * (f.warp & 3) + (f.lane >> 2) + 8 * h;
    rows.valid[h] = row < tile.rows;
    rows.weight[h] = p.row_weight[static_cast<int64_t>(tile.block) * kBlockM + row];
  }
  return rows;
}

// d_gate, d_up and wa of 8 columns as stmatrix takes them, and the thread's part of the columns in its rows' share of
// d_weights, ascending. pre and d_act: the columns' values, up kUpOffset behind gate.
template <DType kType, Activation kActivation, bool kGated, int kUpOffset>
__device__ __forceinline__ void differentiate(uint32_t (&d_gate)[2], uint32_t (&d_up)[2], uint32_t (&wa)[2],
                                              float (&share)[2], const float* pre, const float* d_act,
                                              const RowPair& rows, float limit, bool inside) {
  using Type = Element<kType>;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int e = 2 * h;
    const float w = rows.weight[h];
    const float up0 = kGated ? pre[kUpOffset + e] : 0.0f, up1 = kGated ? pre[kUpOffset + e + 1] : 0.0f;
    const ActivationGradient g0 = activate_backward<kActivation>(pre[e], up0, limit, __fmul_rn(w, d_act[e]));
    const ActivationGradient g1 = activate_backward<kActivation>(pre[e + 1], up1, limit, __fmul_rn(w, d_act[e + 1]));
    const uint32_t a = Type::pack(g0.value, g1.value);
    if (inside) {  // columns past I have zero weights, but a row may hold infinities
      share[h] = __fmaf_rn(d_act[e], Type::low(a), share[h]);
      share[h] = __fmaf_rn(d_act[e + 1], Type::high(a), share[h]);
    }
    const uint32_t keep = rows.valid[h] ? 0xffffffffu : 0u;  // a product with 0 would keep a NaN of the biases
    d_gate[h] = Type::pack(g0.gate, g1.gate) & keep;
    if constexpr (kGated) d_up[h] = Type::pack(g0.up, g1.up) & keep;
    wa[h] = Type::pack(__fmul_rn(w, Type::low(a)), __fmul_rn(w, Type::high(a))) & keep;
  }
}

inline constexpr int kNarrowBoxBytes = 64 * 32 * 2;

// gate and up of a tile for one thread, as float32 accumulators: two columns of both its rows in each 8 columns.
template <DType kType, bool kGated>
struct ComputedPre {
  static constexpr int kUpOffset = 64;
  float acc[kGated ? 128 : 64];

  __device__ __forceinline__ void add_biases(const DactParams& p, const Tile& tile, int lane) {
    const int32_t column = tile.n_tile * kDactColumns;
    if (p.bias0 != nullptr) {
      add_bias<kType, 0, kDactColumns / 8>(acc, p.bias0 + tile.expert * p.bias0_stride, column, p.width, lane);
    }
    if constexpr (kGated) {
      if (p.bias1 != nullptr) {
        add_bias<kType, kUpOffset, kDactColumns / 8>(acc, p.bias1 + tile.expert * p.bias1_stride, column, p.width,
                                                     lane);
      }
    }
  }
  __device__ __forceinline__ const float* eight(int i, float (&)[8]) const { return acc + 4 * i; }
};

// The same as the forward kept them, rounded, with their biases. They are asked for before the product, which hides the
// way from memory: a thread's 4 bytes of 8 columns, four threads 16 bytes of a row, the other half of the sector in the
// next load. Rows without a route and columns past I are zero.
template <DType kType, bool kGated>
struct KeptPre {
  static constexpr int kUpOffset = 4;
  uint32_t gate[32], up[kGated ? 32 : 1];  // [8 columns][row]

  __device__ __forceinline__ void load(const DactParams& p, const Tile& tile, int group, const Frame& f) {
    const int32_t column = tile.n_tile * kDactColumns;
    const int64_t row_stride = kGated ? 2 * static_cast<int64_t>(p.width) : p.width;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = 64 * group + 16 * (f.warp & 3) + (f.lane >> 2) + 8 * h;
      const bool valid = row < tile.rows;
      const int32_t pair = valid ? p.row_pair[static_cast<int64_t>(tile.block) * kBlockM + row] : 0;
      const uint16_t* source = p.gate_up + pair * row_stride + column + 2 * (f.lane & 3);
#pragma unroll
      for (int i = 0; i < kDactColumns / 8; ++i) {
        const bool inside = valid && column + 8 * i < p.width;
        gate[2 * i + h] = inside ? *reinterpret_cast<const uint32_t*>(source + 8 * i) : 0u;
        if constexpr (kGated) {
          up[2 * i + h] = inside ? *reinterpret_cast<const uint32_t*>(source + p.width + 8 * i) : 0u;
        }
      }
    }
  }
  __device__ __forceinline__ const float* eight(int i, float (&values)[8]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      values[2 * h] = Element<kType>::low(gate[2 * i + h]);
      values[2 * h + 1] = Element<kType>::high(gate[2 * i + h]);
      if constexpr (kGated) {
        values[4 + 2 * h] = Element<kType>::low(up[2 * i + h]);
        values[4 + 2 * h + 1] = Element<kType>::high(up[2 * i + h]);
      }
    }
    return values;
  }
};

template <DType kType, Activation kActivation, bool kGated, class Pre>
__device__ __forceinline__ void finish_dact_tile(const Pre& pre, float (&d_act)[64], const RowPair& rows,
                                                 const DactMaps& maps, const DactParams& p, const Tile& tile,
                                                 const Frame& f, int group) {
  const int32_t column = tile.n_tile * kDactColumns;
  const int warp = f.warp & 3;
  const uint32_t staging = f.staging + group * kStagingBytes;
  const int32_t box_row = tile.block * kBlockM + 64 * group;
  const bool issuer = warp == 0 && f.lane == 0;
  // The row whose address this lane gives to stmatrix. 64-byte swizzled: chunk c of row r lies at c ^ (r / 2 % 4).
  const int row = warp * 16 + (f.lane & 15);
  const uint32_t row_address = staging + row * 64;
  const uint32_t swizzle = ((row >> 1) & 3) * 16;
  float share[2] = {0.0f, 0.0f};
#pragma unroll
  for (int box = 0; box < kDactColumns / 32; ++box) {
    const int32_t first = column + 32 * box;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float values[8];
      const float* eight = pre.eight(box * 4 + j, values);
      uint32_t d_gate[2], d_up[2], wa[2];
      differentiate<kType, kActivation, kGated, Pre::kUpOffset>(
          d_gate, d_up, wa, share, eight, d_act + (box * 4 + j) * 4, rows, p.limit, first + 8 * j < p.width);
      if (j == 0) {
        // The stores of the box before are done reading; the barrier tells the other threads.
        if (issuer) tma_store_wait_read<0>();
        named_barrier_sync(1 + group, 128);
      }
      const uint32_t at = row_address + (16 * j ^ swizzle);
      stmatrix_x2(at, d_gate[0], d_gate[1]);
      if constexpr (kGated) stmatrix_x2(at + kNarrowBoxBytes, d_up[0], d_up[1]);
      stmatrix_x2(at + 2 * kNarrowBoxBytes, wa[0], wa[1]);
    }
    fence_async_shared();  // publishes this thread's stmatrix writes to the TMA stores behind the barrier
    named_barrier_sync(1 + group, 128);
    if (issuer && first < p.width) {
      tma_store_2d(&maps.d_gate, staging, first, box_row);
      if constexpr (kGated) tma_store_2d(&maps.d_up, staging + kNarrowBoxBytes, first, box_row);
      tma_store_2d(&maps.wa, staging + 2 * kNarrowBoxBytes, first, box_row);
      tma_store_commit();
    }
    if (box % 2 == 0) continue;
    // The sum of 64 columns: four lanes hold a row's; both lanes of an exchange compute the same bits.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      share[h] = __fadd_rn(share[h], __shfl_xor_sync(0xffffffffu, share[h], 1));
      share[h] = __fadd_rn(share[h], __shfl_xor_sync(0xffffffffu, share[h], 2));
      if ((f.lane & 3) == 0 && rows.valid[h] && first - 32 < p.width) {
        const int32_t at = box_row + 16 * warp + (f.lane >> 2) + 8 * h;
        p.partial[static_cast<int64_t>(first / 64) * p.row_capacity + at] = share[h];
      }
      share[h] = 0.0f;
    }
  }
}

template <DType kType, Activation kActivation, bool kGated, bool kKept>
__device__ __forceinline__ void compute_dact(const DactMaps& maps, const DactParams& p, const Frame& f) {
  constexpr int kGatedN = kGated ? 2 * kDactColumns : kDactColumns;
  const int group = (f.warp >> 2) - 1;
  // K-major: 8-row groups 1024 B apart. MN-major: 8-deep groups 1024 B apart, 64-column boxes kBoxBytes apart.
  const uint64_t a_base = smem_descriptor(f.base + group * kBoxBytes, 16, 1024, 1);
  const uint64_t up_base = smem_descriptor(f.base + kStageBytesA, kBoxBytes, 1024, 1);
  const uint64_t down_base = smem_descriptor(f.base + kStageBytesA, 16, 1024, 1);
  TileQueue queue = f.queue();
  Pipeline pipe;
  int4 message;
  while (queue.receive<true>(message, f.lane)) {
    const Tile tile = TileQueue::decode(message);
    if (tile.rows <= 64 * group) {
      drain(pipe, (kKept ? 1 : 2) * p.k_steps, f.lane, f.full, f.empty);
      continue;
    }
    std::conditional_t<kKept, KeptPre<kType, kGated>, ComputedPre<kType, kGated>> pre;
    float d_act[64];
    int held = -1;
    if constexpr (kKept) {
      pre.load(p, tile, group, f);
    } else {
      multiply_stages<kType, kGatedN, 0, 1>(pre.acc, f, pipe, held, p.k_steps, a_base, up_base);
    }
    multiply_stages<kType, kDactColumns, 0, 0>(d_act, f, pipe, held, p.k_steps, a_base, down_base);
    const RowPair rows = load_row_pair(p, tile, group, f);  // while the last products run
    finish_products(f, held);
    if constexpr (!kKept) {
      fence_accumulators(pre.acc);
      pre.add_biases(p, tile, f.lane);
    }
    fence_accumulators(d_act);
    finish_dact_tile<kType, kActivation, kGated>(pre, d_act, rows, maps, p, tile, f, group);
  }
  // Shared memory must outlive the stores' reads; their writes are complete at the end of the kernel.
  if ((f.warp & 3) == 0 && f.lane == 0) tma_store_wait_all();
}

// kGated is a parameter only because device code may not call the host function is_gated.
template <DType kType, Activation kActivation, bool kKept, bool kGated = is_gated(kActivation)>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_dact_sm90(const __grid_constant__ DactMaps maps, const __grid_constant__ DactParams p) {
  const Frame f = make_frame();
  dependent_launch_wait();  // rows, weights of rows and the block table are written by earlier kernels
  dependent_launch_trigger();
  if (f.warp < 4) {
    registers_decrease<kWideProducerRegisters>();
    if (f.warp == 0 && f.lane == 0) {
      produce_dact<kGated, kKept>(maps, p, f);
    } else if (f.warp == 1 && f.lane == 0 && f.rank == 0) {
      TileScheduler scheduler(p.blocks, p.num_blocks, p.space, p.counters, f.queue());
      scheduler.send();
      while (!scheduler.done) scheduler.claim();
    }
  } else {
    registers_increase<kWideMathRegisters>();
    compute_dact<kType, kActivation, kGated, kKept>(maps, p, f);
  }
  leave_together();
}

template <DType kType, Activation kActivation>
DactKernel gemm_dact_of(bool kept) {
  return kept ? gemm_dact_sm90<kType, kActivation, true> : gemm_dact_sm90<kType, kActivation, false>;
}

}  // namespace

template <DType kType>
DactKernel gemm_dact_kernel(Activation activation, bool kept) {
  switch (activation) {
    case Activation::kSwiGLU:
      return gemm_dact_of<kType, Activation::kSwiGLU>(kept);
    case Activation::kSwiGLUOAI:
      return gemm_dact_of<kType, Activation::kSwiGLUOAI>(kept);
    case Activation::kGeGLU:
      return gemm_dact_of<kType, Activation::kGeGLU>(kept);
    case Activation::kSiLU:
      return gemm_dact_of<kType, Activation::kSiLU>(kept);
    case Activation::kGELU:
      return gemm_dact_of<kType, Activation::kGELU>(kept);
    case Activation::kReLU2:
      return gemm_dact_of<kType, Activation::kReLU2>(kept);
  }
  return nullptr;
}

}  // namespace streammoe::sm90
