// The passes of the backward that are no product: rows of x and dy with their padding, sums of rows for the biases,
// rows of d_x by route, and the last step of d_weights.
//
// Contract: see backward.h. Sums over rows are one float32 chain per column, rows ascending; a route's d_weights is its
// groups of 64 columns, ascending, then <dy, b_down>, which is a fixed tree over 32 chains. Every row block that has
// rows gets its padding rows zeroed and their weights 0, so that sums over rows may read whole blocks.
// Trade-off: a chain per column keeps a sum over rows sequential; many experts and columns run side by side, but an
// expert with all rows is slow in it: about 0.1 us per row and launch, where a split would change bits.
#include <algorithm>
#include <limits>

#include "device/element.cuh"
#include "device/ptx_sm90.cuh"
#include "kernels/backward.h"
#include "kernels/launch_dependent.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kRowThreads = 256;

struct PadParams {
  const BlockInfo* blocks;
  const int32_t* num_blocks;
  const int32_t* row_pair;
  const float* topk_weights;
  uint4* x;
  uint4* dy;
  float* row_weight;
  int32_t* expert_first;
  int32_t words;  // 16-byte words of a row
};

// A CTA per row block.
__global__ void __launch_bounds__(kRowThreads) pad_rows(PadParams p) {
  dependent_launch_wait();  // the plan
  dependent_launch_trigger();
  const int32_t block = blockIdx.x;
  if (block >= *p.num_blocks) return;
  const BlockInfo info = p.blocks[block];
  const int64_t first = static_cast<int64_t>(block) * kBlockM;
  const int32_t rows = min(kBlockM, info.num_rows - (block - info.first_block) * kBlockM);
  if (threadIdx.x == 0 && block == info.first_block) p.expert_first[info.expert] = static_cast<int32_t>(first);
  for (int32_t r = threadIdx.x; r < kBlockM; r += kRowThreads) {
    p.row_weight[first + r] = r < rows ? p.topk_weights[p.row_pair[first + r]] : 0.0f;
  }
  const int64_t begin = (first + rows) * p.words, end = (first + kBlockM) * p.words;
  for (int64_t i = begin + threadIdx.x; i < end; i += kRowThreads) p.x[i] = p.dy[i] = make_uint4(0, 0, 0, 0);
}

struct SumParams {
  const uint32_t* rows;     // [R, 2 * words] elements
  const float* row_weight;  // [R]; used when kWeighted
  const int32_t* expert_rows;
  const int32_t* expert_first;
  void* out;              // of the rows' type, or float when kWide
  int32_t words;          // pairs of columns
  int64_t expert_stride;  // of out, in pairs
};

constexpr int kSumThreads = 64;  // a thread per pair of columns
constexpr int kSumAhead = 8;     // rows in flight

template <DType kType, bool kWeighted, bool kWide>
__global__ void __launch_bounds__(kSumThreads) sum_rows(SumParams p) {
  dependent_launch_wait();  // rows and the plan
  dependent_launch_trigger();
  const int32_t expert = blockIdx.y;
  const int32_t word = blockIdx.x * kSumThreads + threadIdx.x;
  if (word >= p.words) return;
  const int32_t count = p.expert_rows[expert];
  float low = 0.0f, high = 0.0f;
  const int64_t first = count > 0 ? p.expert_first[expert] : 0;
  const uint32_t* next = p.rows + first * p.words + word;
  for (int32_t row = 0; row < count; row += kSumAhead) {
    uint32_t data[kSumAhead];
    float weight[kSumAhead];
#pragma unroll
    for (int i = 0; i < kSumAhead; ++i) {
      // Rows past the last lie in the expert's last block and are not added.
      data[i] = next[static_cast<int64_t>(i) * p.words];
      if constexpr (kWeighted) weight[i] = p.row_weight[first + row + i];
    }
    next += static_cast<int64_t>(kSumAhead) * p.words;
#pragma unroll
    for (int i = 0; i < kSumAhead; ++i) {
      if (row + i >= count) break;
      float a = Element<kType>::low(data[i]), b = Element<kType>::high(data[i]);
      if constexpr (kWeighted) a = __fmul_rn(weight[i], a), b = __fmul_rn(weight[i], b);
      low = __fadd_rn(low, a);
      high = __fadd_rn(high, b);
    }
  }
  const int64_t place = expert * p.expert_stride + word;
  if constexpr (kWide) {
    static_cast<float2*>(p.out)[place] = make_float2(low, high);
  } else {
    static_cast<uint32_t*>(p.out)[place] = Element<kType>::pack(low, high);
  }
}

constexpr int kSpreadVectors = 4;  // loads in flight per thread

// out[pair] = rows[pair_row[pair]], or zeros: a warp per piece of 32 x kSpreadVectors 16-byte words of a route.
__global__ void __launch_bounds__(kRowThreads) spread_rows(const uint4* rows, const int32_t* pair_row, uint4* out,
                                                           int64_t num_pairs, int32_t words, int32_t pieces) {
  dependent_launch_wait();  // rows, by gemm_dx
  dependent_launch_trigger();
  const int64_t piece_idx = static_cast<int64_t>(blockIdx.x) * (kRowThreads / 32) + (threadIdx.x >> 5);
  const int64_t pair = piece_idx / pieces;
  if (pair >= num_pairs) return;
  const int32_t word = static_cast<int32_t>(piece_idx - pair * pieces) * (32 * kSpreadVectors) + (threadIdx.x & 31);
  const int32_t row = pair_row[pair];
  uint4 data[kSpreadVectors];
#pragma unroll
  for (int v = 0; v < kSpreadVectors; ++v) {
    data[v] = make_uint4(0, 0, 0, 0);
    if (row >= 0 && word + 32 * v < words) data[v] = rows[static_cast<int64_t>(row) * words + word + 32 * v];
  }
#pragma unroll
  for (int v = 0; v < kSpreadVectors; ++v) {
    if (word + 32 * v < words) out[pair * words + word + 32 * v] = data[v];
  }
}

struct WeightParams {
  const int32_t* pair_row;
  const float* partial;  // [groups][R]
  float* d_weights;
  int64_t num_pairs, row_capacity;
  int32_t groups, top_k;
  RowOwners owners;
  // With b_down:
  const int32_t* topk_ids;
  const uint4* dy;      // [T, H]
  const uint4* b_down;  // [L, H]
  int32_t first_expert, words;
  int64_t bias_stride;  // in words
};

// Over ranks only routes that are taken here are written, at their tokens' owners: the others have ranks of their own.
// The seal's fence publishes them to the owner's take_weight_gradients.
__device__ __forceinline__ void store_weight(const WeightParams& p, int64_t pair, int32_t row, float value) {
  if (p.owners.peers == nullptr) {
    p.d_weights[pair] = row < 0 ? 0.0f : value;
  } else if (row >= 0) {
    const auto token = static_cast<int32_t>(pair / p.top_k);
    const TokenOrder::Owner owner = p.owners.order.owner(token);
    auto* there = reinterpret_cast<float*>(p.owners.peers[owner.rank] + p.owners.offset);
    there[static_cast<int64_t>(owner.token) * p.top_k + (pair - static_cast<int64_t>(token) * p.top_k)] = value;
  }
}

__device__ __forceinline__ float sum_groups(const WeightParams& p, int32_t row) {
  float sum = 0.0f;
#pragma unroll 8
  for (int32_t g = 0; g < p.groups; ++g) sum = __fadd_rn(sum, p.partial[g * p.row_capacity + row]);
  return sum;
}

// A thread per route.
__global__ void __launch_bounds__(kRowThreads) sum_weights(WeightParams p) {
  dependent_launch_wait();  // partial sums, by gemm_dact; pair_row, by the plan
  dependent_launch_trigger();
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (pair >= p.num_pairs) return;
  const int32_t row = p.pair_row[pair];
  store_weight(p, pair, row, row < 0 ? 0.0f : sum_groups(p, row));
}

template <DType kType>
__device__ __forceinline__ float dot_word(const uint4& a, const uint4& b, float sum) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __fmaf_rn(Element<kType>::low(left[i]), Element<kType>::low(right[i]), sum);
    sum = __fmaf_rn(Element<kType>::high(left[i]), Element<kType>::high(right[i]), sum);
  }
  return sum;
}

// A warp per route.
template <DType kType>
__global__ void __launch_bounds__(kRowThreads) sum_weights_biased(WeightParams p) {
  dependent_launch_wait();  // as in sum_weights
  dependent_launch_trigger();
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * (kRowThreads / 32) + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (pair >= p.num_pairs) return;
  const int32_t row = p.pair_row[pair];
  float dot = 0.0f;
  if (row >= 0) {  // its id names a local expert
    const uint4* dy = p.dy + pair / p.top_k * p.words;
    const uint4* bias = p.b_down + (p.topk_ids[pair] - p.first_expert) * p.bias_stride;
    for (int32_t w = lane; w < p.words; w += 32) dot = dot_word<kType>(dy[w], bias[w], dot);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffu, dot, step));
  if (lane == 0) store_weight(p, pair, row, row < 0 ? 0.0f : __fadd_rn(sum_groups(p, row), dot));
}

template <bool kWide>
auto sum_kernel(DType dtype, bool weighted) {
  if (dtype == DType::kF16) {
    return weighted ? sum_rows<DType::kF16, true, kWide> : sum_rows<DType::kF16, false, kWide>;
  }
  return weighted ? sum_rows<DType::kBF16, true, kWide> : sum_rows<DType::kBF16, false, kWide>;
}

cudaError_t launch_sum(DType dtype, bool wide, const void* rows, const float* row_weight, const Plan& plan,
                       const int32_t* expert_first, int64_t columns, int64_t experts, const ExpertMatrix<void*>& out,
                       cudaStream_t stream) {
  if (out.data == nullptr) return cudaSuccess;
  if (experts > 65535 || out.expert_stride % 2 != 0) return cudaErrorInvalidValue;
  SumParams p = {};
  p.rows = static_cast<const uint32_t*>(rows);
  p.row_weight = row_weight;
  p.expert_rows = plan.expert_rows;
  p.expert_first = expert_first;
  p.out = out.data;
  p.words = static_cast<int32_t>(columns / 2);
  p.expert_stride = out.expert_stride / 2;
  const dim3 grid(static_cast<uint32_t>((p.words + kSumThreads - 1) / kSumThreads), static_cast<uint32_t>(experts));
  const bool weighted = row_weight != nullptr;
  const auto kernel = wide ? sum_kernel<true>(dtype, weighted) : sum_kernel<false>(dtype, weighted);
  return launch_dependent(kernel, grid, kSumThreads, 0, stream, p);
}

}  // namespace

cudaError_t prepare_backward_rows() {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool weighted : {false, true}) {
      const cudaError_t e = load_kernels(sum_kernel<false>(dtype, weighted), sum_kernel<true>(dtype, weighted));
      if (e != cudaSuccess) return e;
    }
  }
  return load_kernels(pad_rows, spread_rows, sum_weights, sum_weights_biased<DType::kBF16>,
                      sum_weights_biased<DType::kF16>);
}

cudaError_t launch_backward_rows(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                                 cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  const GatherArgs x{args.x, rows.x, s.num_tokens, s.top_k, s.hidden};
  if (cudaError_t e = launch_gather_rows(x, plan, stream); e != cudaSuccess) return e;
  const GatherArgs dy{args.dy, rows.dy, s.num_tokens, s.top_k, s.hidden};
  if (cudaError_t e = launch_gather_rows(dy, plan, stream); e != cudaSuccess) return e;
  PadParams p = {};
  p.blocks = plan.blocks;
  p.num_blocks = plan.totals;
  p.row_pair = plan.row_pair;
  p.topk_weights = args.topk_weights;
  p.x = static_cast<uint4*>(rows.x);
  p.dy = static_cast<uint4*>(rows.dy);
  p.row_weight = rows.row_weight;
  p.expert_first = rows.expert_first;
  p.words = static_cast<int32_t>(s.hidden / 8);
  return launch_dependent(pad_rows, dim3(static_cast<uint32_t>(plan.block_capacity)), kRowThreads, 0, stream, p);
}

cudaError_t launch_bias_sums(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                             cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  const ExpertGradients& g = args.gradients;
  if (cudaError_t e = launch_sum(args.dtype, args.wide, rows.d_gate, nullptr, plan, rows.expert_first, s.intermediate,
                                 s.num_experts, g.b_gate, stream);
      e != cudaSuccess)
    return e;
  if (s.gated) {
    if (cudaError_t e = launch_sum(args.dtype, args.wide, rows.d_up, nullptr, plan, rows.expert_first, s.intermediate,
                                   s.num_experts, g.b_up, stream);
        e != cudaSuccess)
      return e;
  }
  return launch_sum(args.dtype, args.wide, rows.dy, rows.row_weight, plan, rows.expert_first, s.hidden, s.num_experts,
                    g.b_down, stream);
}

cudaError_t launch_spread_rows(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                               cudaStream_t stream) {
  const int64_t num_pairs = args.sizes.num_tokens * args.sizes.top_k;
  if (num_pairs == 0) return cudaSuccess;
  const int32_t words = static_cast<int32_t>(args.sizes.hidden / 8);
  const int32_t pieces = (words + 32 * kSpreadVectors - 1) / (32 * kSpreadVectors);
  const int64_t ctas = (num_pairs * pieces + kRowThreads / 32 - 1) / (kRowThreads / 32);
  if (ctas > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  return launch_dependent(spread_rows, dim3(static_cast<uint32_t>(ctas)), kRowThreads, 0, stream,
                          static_cast<const uint4*>(rows.dy), plan.pair_row, static_cast<uint4*>(args.dx_rows),
                          num_pairs, words, pieces);
}

cudaError_t launch_d_weights(const BackwardArgs& args, const Plan& plan, const BackwardRows& rows,
                             cudaStream_t stream) {
  const BackwardSizes& s = args.sizes;
  WeightParams p = {};
  p.pair_row = plan.pair_row;
  p.partial = rows.partial;
  p.d_weights = args.d_weights;
  p.num_pairs = s.num_tokens * s.top_k;
  p.row_capacity = plan.row_capacity;
  p.groups = static_cast<int32_t>((s.intermediate + 63) / 64);
  p.top_k = static_cast<int32_t>(s.top_k);
  p.owners = args.d_weights_owners;
  p.first_expert = static_cast<int32_t>(args.first_expert);
  if (p.num_pairs == 0) return cudaSuccess;
  const bool biased = args.weights.b_down.data != nullptr;
  const int64_t pairs_per_cta = biased ? kRowThreads / 32 : kRowThreads;
  const int64_t ctas = (p.num_pairs + pairs_per_cta - 1) / pairs_per_cta;
  if (ctas > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<uint32_t>(ctas));
  if (!biased) return launch_dependent(sum_weights, grid, kRowThreads, 0, stream, p);
  p.topk_ids = args.topk_ids;
  p.dy = static_cast<const uint4*>(args.dy);
  p.b_down = static_cast<const uint4*>(args.weights.b_down.data);
  p.words = static_cast<int32_t>(s.hidden / 8);
  p.bias_stride = args.weights.b_down.expert_stride / 8;
  const auto kernel = args.dtype == DType::kF16 ? sum_weights_biased<DType::kF16> : sum_weights_biased<DType::kBF16>;
  return launch_dependent(kernel, grid, kRowThreads, 0, stream, p);
}

}  // namespace streammoe::sm90
