// The kernels of the expert layer on sm_90a, as functions on plain device pointers and a stream.
//
// Contract: nothing is allocated, synchronised or copied to the host; workspaces come from the caller and need no
// initial value. All pointers are 16-byte aligned device memory, all matrices row-major bf16 or f16, H and I multiples
// of 8. Rows of the sorted order beyond an expert's count hold anything and are never read by a result. Every function
// returns its launch's status. Call prepare_device() once per device before the first launch: it sets shared-memory
// limits and loads the kernels, which must not happen beside a waiting peer.
// Trade-off: several small launches instead of one kernel; each may start while the one before drains.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "device/block_info.h"
#include "device/row_owners.h"
#include "host/heuristics.h"
#include "host/problem.h"

namespace streammoe::sm90 {

cudaError_t prepare_device();

// Which positions of an expert's list of routes a plan takes. By default all of them.
struct RowWindow {
  const int32_t* computed = nullptr;  // [L] positions that earlier waves have computed; nullptr: none
  int32_t* computed_after = nullptr;  // [L] written: those that are computed after this wave; not `computed` itself
  int32_t min_rows = 0;  // 0: take every pending row; else only full blocks, from this many pending rows on
  int32_t capacity = std::numeric_limits<int32_t>::max();  // positions from here on are dropped
  const uint64_t* failed = nullptr;                        // when it is not zero, no row is taken
  int32_t* stats = nullptr;    // [L + 1]: the rows taken and, at L, the routes dropped are added
  uint8_t* dropped = nullptr;  // [T * K] set to 1 where a route of these experts is dropped, not written elsewhere
};

// Which routes this rank's experts take: ids [T, K]; local experts are first_expert .. first_expert + num_experts - 1.
struct PlanArgs {
  const int32_t* topk_ids = nullptr;
  int64_t num_tokens = 0;   // T; T * K < 2^31
  int64_t top_k = 0;        // K
  int64_t num_experts = 0;  // L, at most kMaxLocalExperts
  int64_t first_expert = 0;
  int64_t total_experts = 0;  // E; ids outside -1 .. E-1 are counted as invalid
  RowWindow window;
};

// Device tables of a plan. Rows are sorted by (expert, pair_idx), pair_idx = t * K + k, each expert padded to kBlockM.
struct Plan {
  int32_t* row_pair = nullptr;       // [row_capacity] pair_idx of a row, -1 in the padding (up to the last used block)
  int32_t* pair_row = nullptr;       // [T * K] row of a pair, -1 where the route is not taken here; nullptr: not wanted
  BlockInfo* blocks = nullptr;       // [block_capacity]
  int32_t* expert_rows = nullptr;    // [L] rows taken
  int32_t* totals = nullptr;         // [4]: blocks, rows taken, invalid routes, routes beyond the capacity
  TileCounters* counters = nullptr;  // one, of the grouped GEMMs that run on this plan, one after the other
  int32_t* chunk_counts = nullptr;   // scratch [plan_chunks][L + 1]
  int64_t row_capacity = 0;
  int64_t block_capacity = 0;
};

// Without pair_row when `with_pairs` is false: streams find a route's row by its pair.
size_t plan_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts, bool with_pairs = true);
Plan make_plan(void* workspace, int64_t num_tokens, int64_t top_k, int64_t num_experts, bool with_pairs = true);
// Stable: prefix sums, never arrival order. Two kernels; one when a single CTA can do it.
cudaError_t launch_plan(const PlanArgs& args, const Plan& plan, cudaStream_t stream);

// rows[row, :] = x[pair / K, :] for every taken route. x [T, H], rows [row_capacity, H]. Padding is not written.
struct GatherArgs {
  const void* x = nullptr;
  void* rows = nullptr;
  int64_t num_tokens = 0, top_k = 0, hidden = 0;
  void* cleared = nullptr;  // [T, K, cleared_width]: zeroed where a route is not taken; nullptr: nothing is
  int64_t cleared_width = 0;
};
cudaError_t launch_gather_rows(const GatherArgs& args, const Plan& plan, cudaStream_t stream);

// out[row, width] = epilogue(A[row, depth] x b[expert of row] (+ bias)). A is a [row_capacity, depth] in sorted order,
// or, in the up product with row_pair given, gathered: A[row] = a[row_pair[row] / top_k], a [T, depth].
// In the down product row_pair is for `scatter`: valid row r goes to out[row_pair[r]], out [pairs, width]; nothing else
// of out is written. Without it out is [row_capacity, width] in sorted order, padding rows written with anything.
// In the up product with gate_up given, row_pair is for that and A is in sorted order: what enters the activation of
// valid row r, rounded, goes to gate_up[row_pair[r]], gate_up [pairs, 2 width], gate first ([pairs, width], ungated).
struct GemmArgs {
  const void* a = nullptr;
  void* out = nullptr;
  void* gate_up = nullptr;
  const BlockInfo* blocks = nullptr;
  const int32_t* num_blocks = nullptr;
  TileCounters* counters = nullptr;
  const int32_t* row_pair = nullptr;
  bool scatter = false;
  RowOwners owners;            // with scatter: rows go to their tokens' owners instead of `out`
  DType dtype = DType::kBF16;  // of a, b0, b1, the biases and out: kBF16 or kF16
  int64_t top_k = 0;
  int64_t row_capacity = 0;
  int64_t block_capacity = 0;
  int64_t num_experts = 0;
  int64_t depth = 0;                       // K of the product: H for up, I for down
  int64_t width = 0;                       // columns of out: I for up, H for down
  ExpertMatrix<const void*> b0;            // gate, or down: [L, depth, width]
  ExpertMatrix<const void*> b1;            // up: [L, depth, width]; absent when ungated and for down
  ExpertMatrix<const void*> bias0, bias1;  // [L, width] or absent
  Activation activation = Activation::kSwiGLU;
  float limit = std::numeric_limits<float>::infinity();
  int32_t num_sms = 0;  // SMs to run on, rounded down to pairs, at least 2; 0 for all
  // The next kernel gets no SM before this one is done. Without it, a persistent kernel that waits for this one takes
  // the SMs that were left free for somebody else.
  bool holds_successor = false;
  uint32_t* resident = nullptr;  // counts the CTAs that have their SM, over all launches; nullptr: not wanted
};
// `ctas`, if given: the CTAs of the launch.
cudaError_t launch_gemm_up_sm90(const GemmArgs& args, cudaStream_t stream, uint32_t* ctas = nullptr);
cudaError_t launch_gemm_down_sm90(const GemmArgs& args, cudaStream_t stream);

// The two products of the experts on a plan, as the layer, a wave of a stream and the rows of an exchange have them: up
// from `rows` to `activations`, [row_capacity, I], down from there to `out`. Rows are in sorted order, or gathered by
// the plan from tokens, and written in sorted order, or scattered by pair. Callers add what is theirs.
struct ExpertPass {
  ExpertWeights weights;
  int64_t num_experts = 0, hidden = 0, intermediate = 0, top_k = 0;
  DType dtype = DType::kBF16;
  Activation activation = Activation::kSwiGLU;
  float limit = std::numeric_limits<float>::infinity();
  const void* rows = nullptr;
  bool gather = true;
  void* activations = nullptr;
  void* out = nullptr;
  bool scatter = true;
  int32_t num_sms = 0;
};
GemmArgs up_product(const ExpertPass& pass, const Plan& plan);
GemmArgs down_product(const ExpertPass& pass, const Plan& plan);

// y[t] = RN(acc), acc = fmaf(weights[t, k], rows[row of (t, k)], acc) from +0 over ascending k, taken routes only.
struct CombineArgs {
  const void* rows = nullptr;           // [row_capacity, H]
  const float* topk_weights = nullptr;  // [T, K]; nullptr: all 1, as gradients are summed
  void* y = nullptr;                    // [T, H]
  int64_t num_tokens = 0, top_k = 0, hidden = 0;
  DType dtype = DType::kBF16;  // of rows and y: kBF16 or kF16
};
// Row numbers by the plan: pair_row.
cudaError_t launch_combine(const CombineArgs& args, const Plan& plan, cudaStream_t stream);
// Rows in pair order: row t * K + k. A route is taken when its id is one of num_experts and it was not dropped.
struct PairRoutes {
  const int32_t* topk_ids = nullptr;  // [T, K]
  int32_t num_experts = 0;            // E
  const uint8_t* dropped = nullptr;   // [T, K] or nullptr
  const uint64_t* failed = nullptr;   // when it is not zero, y becomes NaN
};
cudaError_t launch_combine_pairs(const CombineArgs& args, const PairRoutes& routes, cudaStream_t stream);

// Where the up product's rows come from: gathered by the product itself, or copied by gather_rows before. Same bits.
enum class Gather : int32_t { kAuto = 0, kFused = 1, kSeparate = 2 };

// The batch-ready layer on one device: plan, gather, up, down, combine.
struct ForwardArgs {
  const void* x = nullptr;
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  void* y = nullptr;
  void* gate_up = nullptr;  // [T, K, 2 I], ungated [T, K, I]; zeros where a route is not taken; nullptr: not kept
  ExpertWeights weights;
  int64_t num_tokens = 0, top_k = 0, hidden = 0, intermediate = 0, num_experts = 0;
  Activation activation = Activation::kSwiGLU;
  float limit = std::numeric_limits<float>::infinity();
  int32_t num_sms = 0;
  Gather gather = Gather::kAuto;
  int32_t capacity = std::numeric_limits<int32_t>::max();  // rows per expert; later routes are dropped
  DType dtype = DType::kBF16;                              // of x, the weights and y: kBF16 or kF16
};
// Plan tables, activations [R, I], expert rows [R, H]; R = row capacity.
size_t forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate, int64_t num_experts);
cudaError_t launch_forward_sm90(const ForwardArgs& args, void* workspace, cudaStream_t stream);

}  // namespace streammoe::sm90
