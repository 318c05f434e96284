// The gradient of a row by its token: RN(d_gate W_gate^T + d_up W_up^T), in sorted order, or scattered to the owners of
// the tokens.
//
// Contract: one accumulator per element, k ascending over the columns of gate and then over those of up, so that the
// sum of the two products is rounded once; otherwise as gemm_core_sm90.cuh. Weights [L, H, I] are read along their
// rows: their columns are the depth here. Rows past an expert's count become anything. Trade-off: the depth of each
// product is rounded up to 64, with zeros in both operands: 1.4 % at I = 704, nothing where 64 divides I.
#include "kernels/backward_core_sm90.cuh"
#include "kernels/backward_launch.cuh"

namespace streammoe::sm90 {
namespace {

struct DxMaps {
  CUtensorMap d[2];  // d_gate, d_up [R, I]
  CUtensorMap w[2];  // gate, up [L, H, I]
  CUtensorMap out;   // [R, H]
};

__device__ __forceinline__ void produce_dx(const DxMaps& maps, const GemmParams& p, int32_t products, const Frame& f) {
  TileQueue queue = f.queue();
  Pipeline pipe;
  Tile tile;
  while (queue.next<false>(tile, 0)) {
    for (int32_t product = 0; product < products; ++product) {
      for (int32_t k = 0; k < p.k_steps; ++k) {
        const uint32_t a = begin_stage(f, pipe, kStageBytes);
        const uint32_t bar = f.full + 8 * pipe.stage;
        load_rows(&maps.d[product], tile, f.rank, k * kBlockK, a, bar);
        load_columns<4, true>(&maps.w[product], tile, f.rank, tile.n_tile * kBlockN, k * kBlockK, a + kStageBytesA,
                              bar);
        pipe.advance();
      }
    }
  }
}

// products: 2, or 1 for an ungated layer.
template <DType kType, bool kScatter>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_dx_sm90(const __grid_constant__ DxMaps maps, const __grid_constant__ GemmParams p, int32_t products) {
  const Frame f = make_frame();
  dependent_launch_wait();  // d_gate, d_up and the block table are written by earlier kernels
  dependent_launch_trigger();
  if (f.warp < 4) {
    registers_decrease<kProducerRegisters>();
    if (f.warp == 0 && f.lane == 0) {
      produce_dx(maps, p, products, f);
    } else if (f.warp == 1 && f.lane == 0 && f.rank == 0) {
      TileScheduler scheduler(p.blocks, p.num_blocks, p.space, p.counters, f.queue());
      scheduler.send();
      while (!scheduler.done) scheduler.claim();
    }
  } else {
    registers_increase<kMathRegisters>();
    const int group = (f.warp >> 2) - 1;
    // Both K-major: 8-row groups 1024 B apart, through all boxes of an operand.
    const uint64_t a_base = smem_descriptor(f.base + group * kBoxBytes, 16, 1024, 1);
    const uint64_t b_base = smem_descriptor(f.base + kStageBytesA, 16, 1024, 1);
    const int32_t steps = products * p.k_steps;
    TileQueue queue = f.queue();
    Pipeline pipe;
    Tile tile;
    while (queue.next<true>(tile, f.lane)) {
      if (tile.rows <= 64 * group) {
        drain(pipe, steps, f.lane, f.full, f.empty);
        continue;
      }
      int32_t pairs[kScatterSteps];
      if constexpr (kScatter) load_pairs(pairs, p, tile, group, f.warp & 3, f.lane);
      float acc[128];
      int held = -1;
      multiply_stages<kType, kBlockN, 0, 0>(acc, f, pipe, held, steps, a_base, b_base);
      finish_products(f, held);
      fence_accumulators(acc);
      const uint32_t buffers = f.staging + group * kStagingBytes;
      if constexpr (kScatter) {
        scatter_tile<kType, false, false, Activation::kSiLU>(acc, pairs, p, tile, f.warp & 3, f.lane, buffers);
      } else {
        store_tile<kType, false, false, Activation::kSiLU>(acc, maps.out, p, tile, group, f.warp & 3, f.lane, buffers);
      }
    }
    // Shared memory must outlive the stores' reads; their writes are complete at the end of the kernel.
    if (!kScatter && (f.warp & 3) == 0 && f.lane == 0) tma_store_wait_all();
  }
  leave_together();
}

}  // namespace

cudaError_t prepare_gemm_dx_sm90() {
  for (const auto kernel : {gemm_dx_sm90<DType::kBF16, false>, gemm_dx_sm90<DType::kBF16, true>,
                            gemm_dx_sm90<DType::kF16, false>, gemm_dx_sm90<DType::kF16, true>}) {
    if (cudaError_t e = prepare_frame(kernel); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_dx_sm90(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows, void* out,
                                cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  if (cudaError_t e = check_sizes(args, plan); e != cudaSuccess) return e;
  GemmParams params = {};
  params.blocks = plan.blocks;
  params.num_blocks = plan.totals;
  params.space = tile_space(s.hidden, kBlockN);
  params.counters = plan.counters;
  params.k_steps = static_cast<int32_t>((s.intermediate + kBlockK - 1) / kBlockK);
  params.n_size = static_cast<int32_t>(s.hidden);

  DxMaps maps;
  const void* d[2] = {rows.d_gate, rows.d_up};
  const ExpertMatrix<const void*> w[2] = {args.weights.gate, args.weights.up};
  const int products = s.gated ? 2 : 1;
  for (int i = 0; i < products; ++i) {
    if (cudaError_t e = encode_rows(&maps.d[i], args.dtype, d[i], plan.row_capacity, s.intermediate); e != cudaSuccess)
      return e;
    if (cudaError_t e = encode_matrix(&maps.w[i], args.dtype, w[i], s.num_experts, s.hidden, s.intermediate);
        e != cudaSuccess)
      return e;
  }
  if (products == 1) maps.d[1] = maps.d[0], maps.w[1] = maps.w[0];
  const bool scatter = args.over_ranks();
  if (scatter) {
    params.row_pair = plan.row_pair, params.owners = args.dx_owners, params.top_k = static_cast<int32_t>(s.top_k);
    maps.out = maps.d[0];  // not used
  } else if (cudaError_t e = encode_rows(&maps.out, args.dtype, out, plan.row_capacity, s.hidden); e != cudaSuccess) {
    return e;
  }
  Grid grid;
  if (cudaError_t e = grid_of(plan.block_capacity * params.space.half_tiles, args.num_sms, &grid); e != cudaSuccess)
    return e;
  const auto kernel = args.dtype == DType::kF16
                          ? (scatter ? gemm_dx_sm90<DType::kF16, true> : gemm_dx_sm90<DType::kF16, false>)
                          : (scatter ? gemm_dx_sm90<DType::kBF16, true> : gemm_dx_sm90<DType::kBF16, false>);
  return launch_dependent(kernel, dim3(grid.ctas), kGemmThreads, kGemmSharedBytes, stream, maps, params, products);
}

}  // namespace streammoe::sm90
