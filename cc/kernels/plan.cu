// The plan: which row of which expert each route becomes, from topk_ids alone.
//
// Contract: stable and deterministic. Rows are ordered by (expert, pair_idx), every expert padded to kBlockM
// rows; ids outside this rank's experts take no row. No atomics between CTAs, no flags, no scratch that needs
// zeroing: kernel 1 counts ids per CTA, kernel 2 has every CTA add up all counts itself (they are small and
// in L2), recount its own pairs per warp and scatter. Inside a warp, __match_any_sync ranks equal ids in pair
// order. Trade-off: the ids are read three times and the counts once per CTA, in exchange for two plain
// kernels of a few microseconds.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "device/ptx_sm90.cuh"
#include "kernels/launch.h"
#include "kernels/launch_dependent.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kPlanThreads = 256;
constexpr int kPlanWarps = kPlanThreads / 32;

struct PlanParams {
  const int32_t* topk_ids;
  int64_t num_pairs;
  int64_t chunk_pairs;  // pairs of one CTA, a multiple of kPlanThreads
  int32_t num_experts, first_expert, total_experts, num_chunks;
};

// Local expert of an id; num_experts for an invalid id (to be counted), num_experts + 1 for one that is not
// ours.
__device__ __forceinline__ int32_t local_expert(int32_t id, const PlanParams& p) {
  if (id < -1 || id >= p.total_experts) return p.num_experts;
  const int32_t local = id - p.first_expert;
  return (id >= 0 && local >= 0 && local < p.num_experts) ? local : p.num_experts + 1;
}

// Adds the warp's slice of the chunk to counts[0 .. L], one lane per distinct id, in pair order.
__device__ __forceinline__ void count_slice(const PlanParams& p, int64_t begin, int64_t end, int lane,
                                            int32_t* counts) {
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t pair = base + lane;
    const int32_t expert = pair < end ? local_expert(p.topk_ids[pair], p) : p.num_experts + 1;
    const uint32_t same = __match_any_sync(0xffffffffu, expert);
    if (expert <= p.num_experts && lane == __ffs(same) - 1) counts[expert] += __popc(same);
    __syncwarp();  // the next step's leader of this expert may be another lane
  }
}

__device__ __forceinline__ void warp_slice(const PlanParams& p, int warp, int64_t& begin, int64_t& end) {
  const int64_t slice = p.chunk_pairs / kPlanWarps;
  begin = min(blockIdx.x * p.chunk_pairs + warp * slice, p.num_pairs);
  end = min(begin + slice, p.num_pairs);
}

__device__ __forceinline__ void clear_counts(int32_t* counts, int32_t size) {
  for (int32_t i = threadIdx.x; i < size; i += kPlanThreads) counts[i] = 0;
  __syncthreads();
}

__global__ void __launch_bounds__(kPlanThreads) plan_count(PlanParams p, int32_t* chunk_counts) {
  extern __shared__ int32_t warp_counts[];  // [warps][L + 1]
  const int32_t width = p.num_experts + 1;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  clear_counts(warp_counts, kPlanWarps * width);
  dependent_launch_wait();  // topk_ids may come from the kernel before
  dependent_launch_trigger();
  int64_t begin, end;
  warp_slice(p, warp, begin, end);
  count_slice(p, begin, end, lane, warp_counts + warp * width);
  __syncthreads();
  for (int32_t e = threadIdx.x; e < width; e += kPlanThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kPlanWarps; ++w) sum += warp_counts[w * width + e];
    chunk_counts[static_cast<int64_t>(blockIdx.x) * width + e] = sum;
  }
}

// Exclusive prefix over experts of the padded row counts; first_row[L] is the total. One warp, 32 experts a
// step.
__device__ __forceinline__ void scan_experts(const int32_t* totals, int32_t num_experts, int32_t* first_row, int lane) {
  int32_t carry = 0;
  for (int32_t base = 0; base < num_experts; base += 32) {
    const int32_t e = base + lane;
    const int32_t padded = e < num_experts ? (totals[e] + kBlockM - 1) / kBlockM * kBlockM : 0;
    int32_t sum = padded;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += below;
    }
    if (e < num_experts) first_row[e] = carry + sum - padded;
    carry += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) first_row[num_experts] = carry;
}

__global__ void __launch_bounds__(kPlanThreads) plan_scatter(PlanParams p, Plan plan) {
  extern __shared__ int32_t shared[];
  const int32_t width = p.num_experts + 1;
  int32_t* warp_counts = shared;                       // [warps][L + 1]: counts, then next free row per warp
  int32_t* totals = warp_counts + kPlanWarps * width;  // [L + 1]
  int32_t* before = totals + width;                    // [L + 1] rows that earlier CTAs take
  int32_t* first_row = before + width;                 // [L + 1]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  clear_counts(warp_counts, kPlanWarps * width);
  dependent_launch_wait();  // chunk_counts, by plan_count
  dependent_launch_trigger();

  for (int32_t e = threadIdx.x; e < width; e += kPlanThreads) {
    int32_t total = 0, mine = 0;
#pragma unroll 8
    for (int32_t c = 0; c < p.num_chunks; ++c) {
      if (c == static_cast<int32_t>(blockIdx.x)) mine = total;
      total += plan.chunk_counts[static_cast<int64_t>(c) * width + e];
    }
    totals[e] = total;
    before[e] = mine;
  }
  int64_t begin, end;
  warp_slice(p, warp, begin, end);
  count_slice(p, begin, end, lane, warp_counts + warp * width);
  __syncthreads();
  if (warp == 0) scan_experts(totals, p.num_experts, first_row, lane);
  __syncthreads();
  for (int32_t e = threadIdx.x; e < p.num_experts; e += kPlanThreads) {
    int32_t row = first_row[e] + before[e];
    for (int w = 0; w < kPlanWarps; ++w) {
      const int32_t count = warp_counts[w * width + e];
      warp_counts[w * width + e] = row;
      row += count;
    }
  }
  __syncthreads();

  int32_t* next_row = warp_counts + warp * width;
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t pair = base + lane;
    const int32_t expert = pair < end ? local_expert(p.topk_ids[pair], p) : p.num_experts + 1;
    const uint32_t same = __match_any_sync(0xffffffffu, expert);
    const bool taken = expert < p.num_experts;
    const int32_t row = taken ? next_row[expert] + __popc(same & ((1u << lane) - 1)) : -1;
    __syncwarp();  // all lanes have read next_row
    if (taken && lane == __ffs(same) - 1) next_row[expert] += __popc(same);
    __syncwarp();
    if (pair < end) plan.pair_row[pair] = row;
    if (taken) plan.row_pair[row] = static_cast<int32_t>(pair);
  }

  // Tables: one warp of the grid per expert.
  for (int32_t e = blockIdx.x * kPlanWarps + warp; e < p.num_experts; e += gridDim.x * kPlanWarps) {
    const int32_t rows = totals[e], first = first_row[e], past = first_row[e + 1];
    for (int32_t r = first + rows + lane; r < past; r += 32) plan.row_pair[r] = -1;
    const BlockInfo info{e, first / kBlockM, (past - first) / kBlockM, rows};
    for (int32_t b = lane; b < info.num_blocks; b += 32) plan.blocks[info.first_block + b] = info;
    if (lane == 0) plan.expert_rows[e] = rows;
  }
  if (blockIdx.x == 0 && warp == 0) {
    int32_t rows = 0;
    for (int32_t e = lane; e < p.num_experts; e += 32) rows += totals[e];
    rows = __reduce_add_sync(0xffffffffu, rows);
    if (lane == 0) {
      plan.totals[0] = first_row[p.num_experts] / kBlockM;
      plan.totals[1] = rows;
      plan.totals[2] = totals[p.num_experts];
      *plan.counters = TileCounters{0, 0};
    }
  }
}

size_t count_bytes(int64_t num_experts) { return kPlanWarps * (num_experts + 1) * sizeof(int32_t); }
size_t scatter_bytes(int64_t num_experts) { return (kPlanWarps + 3) * (num_experts + 1) * sizeof(int32_t); }

constexpr int64_t kAlign = 256;  // table starts: whole sectors, and the alignment of the block table
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The one place that lays out the plan's workspace; base == nullptr only counts bytes.
int64_t layout_plan(char* base, int64_t pairs, int64_t num_experts, Plan* plan) {
  const int64_t blocks = max_row_blocks(pairs, num_experts);
  int64_t offset = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    if (base != nullptr) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + offset);
    offset += aligned(count * static_cast<int64_t>(sizeof(*pointer)));
  };
  take(plan->row_pair, blocks * kBlockM);
  take(plan->pair_row, std::max<int64_t>(pairs, 1));
  take(plan->blocks, blocks);
  take(plan->expert_rows, num_experts);
  take(plan->totals, 3);
  take(plan->counters, 1);
  take(plan->chunk_counts, plan_chunks(pairs) * (num_experts + 1));
  plan->row_capacity = blocks * kBlockM;
  plan->block_capacity = blocks;
  return offset;
}

}  // namespace

cudaError_t prepare_plan() {
  const int bytes = static_cast<int>(scatter_bytes(kMaxLocalExperts));
  if (cudaError_t e = cudaFuncSetAttribute(plan_count, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      e != cudaSuccess)
    return e;
  return cudaFuncSetAttribute(plan_scatter, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

size_t plan_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts) {
  Plan plan;
  return static_cast<size_t>(layout_plan(nullptr, num_tokens * top_k, num_experts, &plan));
}

Plan make_plan(void* workspace, int64_t num_tokens, int64_t top_k, int64_t num_experts) {
  Plan plan;
  layout_plan(static_cast<char*>(workspace), num_tokens * top_k, num_experts, &plan);
  return plan;
}

cudaError_t launch_plan(const PlanArgs& args, const Plan& plan, cudaStream_t stream) {
  const int64_t pairs = args.num_tokens * args.top_k;
  if (args.num_experts < 1 || args.num_experts > kMaxLocalExperts || args.num_tokens < 0 || args.top_k < 1 ||
      pairs > std::numeric_limits<int32_t>::max() - kBlockM * kMaxLocalExperts)
    return cudaErrorInvalidValue;
  PlanParams p;
  p.topk_ids = args.topk_ids;
  p.num_pairs = pairs;
  p.chunk_pairs = plan_chunk_pairs(pairs);
  p.num_experts = static_cast<int32_t>(args.num_experts);
  p.first_expert = static_cast<int32_t>(args.first_expert);
  p.total_experts = static_cast<int32_t>(args.total_experts);
  p.num_chunks = static_cast<int32_t>(plan_chunks(pairs));
  const dim3 grid(p.num_chunks);
  if (cudaError_t e =
          launch_dependent(plan_count, grid, kPlanThreads, count_bytes(args.num_experts), stream, p, plan.chunk_counts);
      e != cudaSuccess)
    return e;
  return launch_dependent(plan_scatter, grid, kPlanThreads, scatter_bytes(args.num_experts), stream, p, plan);
}

}  // namespace streammoe::sm90
