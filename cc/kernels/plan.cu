// The plan: which row of which expert each route becomes, from topk_ids alone.
//
// Contract: stable and deterministic. Rows are ordered by (expert, pair_idx), every expert padded to kBlockM
// rows; ids outside this rank's experts take no row. No atomics between CTAs, no flags, no scratch that needs
// zeroing: kernel 1 counts ids per CTA, kernel 2 has every CTA add up all counts itself (they are small and
// in L2), recount its own pairs per warp and scatter. Inside a warp, __match_any_sync ranks equal ids in pair
// order. Trade-off: the ids are read three times and the counts once per CTA, in exchange for two plain
// kernels of a few microseconds; few routes take one CTA, which needs no counts from others: one kernel.
// A window leaves out the rows that earlier waves of a stream computed, and the incomplete blocks of a wave that is not
// the last: positions in an expert's list are stable while tokens are appended, so "rows computed so far" per expert is
// all that a stream carries from wave to wave.
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
  RowWindow window;
};

// The rows of an expert that this plan takes: positions begin .. begin + count - 1 of its list.
struct Take {
  int32_t begin, count;
};
__device__ __forceinline__ Take take_rows(const RowWindow& window, int32_t expert, int32_t listed) {
  const int32_t begin = window.computed == nullptr ? 0 : window.computed[expert];
  if (window.failed != nullptr && *window.failed != 0) return {begin, 0};
  const int32_t pending = max(min(listed, window.capacity) - begin, 0);
  if (window.min_rows == 0) return {begin, pending};
  return {begin, pending < window.min_rows ? 0 : pending / kBlockM * kBlockM};
}

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
__device__ __forceinline__ void scan_experts(const int32_t* taken, int32_t num_experts, int32_t* first_row, int lane) {
  int32_t carry = 0;
  for (int32_t base = 0; base < num_experts; base += 32) {
    const int32_t e = base + lane;
    const int32_t padded = e < num_experts ? (taken[e] + kBlockM - 1) / kBlockM * kBlockM : 0;
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

// kSingle: one CTA plans everything, and no plan_count ran before.
template <bool kSingle>
__global__ void __launch_bounds__(kPlanThreads) plan_scatter(PlanParams p, Plan plan) {
  extern __shared__ int32_t shared[];
  const int32_t width = p.num_experts + 1;
  int32_t* warp_counts = shared;                       // [warps][L + 1]: counts, then next position per warp
  int32_t* totals = warp_counts + kPlanWarps * width;  // [L + 1] routes listed, of all CTAs
  int32_t* before = totals + width;                    // [L + 1] those of earlier CTAs
  int32_t* begins = before + width;                    // [L + 1] first position taken
  int32_t* taken = begins + width;                     // [L + 1] rows taken
  int32_t* first_row = taken + width;                  // [L + 1]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  clear_counts(warp_counts, kPlanWarps * width);
  dependent_launch_wait();  // chunk_counts, by plan_count; topk_ids and the window, by whoever came before
  dependent_launch_trigger();

  int64_t begin, end;
  warp_slice(p, warp, begin, end);
  count_slice(p, begin, end, lane, warp_counts + warp * width);
  if constexpr (kSingle) __syncthreads();
  for (int32_t e = threadIdx.x; e < width; e += kPlanThreads) {
    int32_t total = 0, mine = 0;
    if constexpr (kSingle) {
      for (int w = 0; w < kPlanWarps; ++w) total += warp_counts[w * width + e];
    } else {
#pragma unroll 8
      for (int32_t c = 0; c < p.num_chunks; ++c) {
        if (c == static_cast<int32_t>(blockIdx.x)) mine = total;
        total += plan.chunk_counts[static_cast<int64_t>(c) * width + e];
      }
    }
    totals[e] = total;
    before[e] = mine;
    const Take take = e < p.num_experts ? take_rows(p.window, e, total) : Take{0, 0};
    begins[e] = take.begin;
    taken[e] = take.count;
  }
  __syncthreads();
  if (warp == 0) scan_experts(taken, p.num_experts, first_row, lane);
  for (int32_t e = threadIdx.x; e < p.num_experts; e += kPlanThreads) {
    int32_t position = before[e];
    for (int w = 0; w < kPlanWarps; ++w) {
      const int32_t count = warp_counts[w * width + e];
      warp_counts[w * width + e] = position;
      position += count;
    }
  }
  __syncthreads();

  int32_t* next_position = warp_counts + warp * width;
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t pair = base + lane;
    const int32_t expert = pair < end ? local_expert(p.topk_ids[pair], p) : p.num_experts + 1;
    const uint32_t same = __match_any_sync(0xffffffffu, expert);
    const bool ours = expert < p.num_experts;
    int32_t row = -1;
    if (ours) {
      const int32_t position = next_position[expert] + __popc(same & ((1u << lane) - 1));
      const int32_t within = position - begins[expert];
      if (within >= 0 && within < taken[expert]) row = first_row[expert] + within;
      if (p.window.dropped != nullptr && position >= p.window.capacity) p.window.dropped[pair] = 1;
    }
    __syncwarp();  // all lanes have read next_position
    if (ours && lane == __ffs(same) - 1) next_position[expert] += __popc(same);
    __syncwarp();
    if (pair < end && plan.pair_row != nullptr) plan.pair_row[pair] = row;
    if (row >= 0) plan.row_pair[row] = static_cast<int32_t>(pair);
  }

  // Tables: one warp of the grid per expert.
  for (int32_t e = blockIdx.x * kPlanWarps + warp; e < p.num_experts; e += gridDim.x * kPlanWarps) {
    const int32_t rows = taken[e], first = first_row[e], past = first_row[e + 1];
    for (int32_t r = first + rows + lane; r < past; r += 32) plan.row_pair[r] = -1;
    const BlockInfo info{e, first / kBlockM, (past - first) / kBlockM, rows};
    for (int32_t b = lane; b < info.num_blocks; b += 32) plan.blocks[info.first_block + b] = info;
    if (lane == 0) {
      plan.expert_rows[e] = rows;
      if (p.window.computed_after != nullptr) p.window.computed_after[e] = begins[e] + rows;
      if (p.window.stats != nullptr) p.window.stats[e] += rows;
    }
  }
  if (blockIdx.x == 0 && warp == 0) {
    int32_t rows = 0, dropped = 0;
    for (int32_t e = lane; e < p.num_experts; e += 32) {
      rows += taken[e];
      dropped += max(totals[e] - p.window.capacity, 0);
    }
    rows = __reduce_add_sync(0xffffffffu, rows);
    dropped = __reduce_add_sync(0xffffffffu, dropped);
    if (lane == 0) {
      plan.totals[0] = first_row[p.num_experts] / kBlockM;
      plan.totals[1] = rows;
      plan.totals[2] = totals[p.num_experts];
      plan.totals[3] = dropped;
      if (p.window.stats != nullptr) p.window.stats[p.num_experts] += dropped;
      *plan.counters = TileCounters{0, 0};
    }
  }
}

size_t count_bytes(int64_t num_experts) { return kPlanWarps * (num_experts + 1) * sizeof(int32_t); }
size_t scatter_bytes(int64_t num_experts) { return (kPlanWarps + 5) * (num_experts + 1) * sizeof(int32_t); }

constexpr int64_t kAlign = 256;  // table starts: whole sectors, and the alignment of the block table
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The one place that lays out the plan's workspace; base == nullptr only counts bytes.
int64_t layout_plan(char* base, int64_t pairs, int64_t num_experts, bool with_pairs, Plan* plan) {
  const int64_t blocks = most_row_blocks(pairs, num_experts);
  int64_t offset = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    if (base != nullptr) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + offset);
    offset += aligned(count * static_cast<int64_t>(sizeof(*pointer)));
  };
  take(plan->row_pair, blocks * kBlockM);
  if (with_pairs) take(plan->pair_row, std::max<int64_t>(pairs, 1));
  take(plan->blocks, blocks);
  take(plan->expert_rows, num_experts);
  take(plan->totals, 4);
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
  if (cudaError_t e = cudaFuncSetAttribute(plan_scatter<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      e != cudaSuccess)
    return e;
  return cudaFuncSetAttribute(plan_scatter<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

size_t plan_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts, bool with_pairs) {
  Plan plan;
  return static_cast<size_t>(layout_plan(nullptr, num_tokens * top_k, num_experts, with_pairs, &plan));
}

Plan make_plan(void* workspace, int64_t num_tokens, int64_t top_k, int64_t num_experts, bool with_pairs) {
  Plan plan;
  layout_plan(static_cast<char*>(workspace), num_tokens * top_k, num_experts, with_pairs, &plan);
  return plan;
}

cudaError_t launch_plan(const PlanArgs& args, const Plan& plan, cudaStream_t stream) {
  const int64_t pairs = args.num_tokens * args.top_k;
  if (args.num_experts < 1 || args.num_experts > kMaxLocalExperts || args.num_tokens < 0 || args.top_k < 1 ||
      pairs > kMaxPlanPairs)
    return cudaErrorInvalidValue;
  PlanParams p;
  p.topk_ids = args.topk_ids;
  p.num_pairs = pairs;
  p.chunk_pairs = plan_chunk_pairs(pairs);
  p.num_experts = static_cast<int32_t>(args.num_experts);
  p.first_expert = static_cast<int32_t>(args.first_expert);
  p.total_experts = static_cast<int32_t>(args.total_experts);
  p.num_chunks = static_cast<int32_t>(plan_chunks(pairs));
  p.window = args.window;
  const dim3 grid(p.num_chunks);
  if (p.num_chunks == 1) {
    return launch_dependent(plan_scatter<true>, grid, kPlanThreads, scatter_bytes(args.num_experts), stream, p, plan);
  }
  if (cudaError_t e =
          launch_dependent(plan_count, grid, kPlanThreads, count_bytes(args.num_experts), stream, p, plan.chunk_counts);
      e != cudaSuccess)
    return e;
  return launch_dependent(plan_scatter<false>, grid, kPlanThreads, scatter_bytes(args.num_experts), stream, p, plan);
}

}  // namespace streammoe::sm90
