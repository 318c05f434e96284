// What crosses between ranks and is no expert row: tokens brought in, gradients of weights taken home. See stream.h.
//
// Contract: fetching follows await_chunks, so all that it reads was published and waited for; loads from a peer pass
// L1, which knows nothing of what another GPU writes. Taking follows the seal, whose acquire shows what the peers left.
// Trade-off: tokens are fetched before the first product starts, not expert by expert behind counters: the products
// then run as on one GPU (docs/expert_parallel.md has the times).
#include "device/ptx_sm90.cuh"
#include "kernels/launch_dependent.cuh"
#include "kernels/ring_view.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 8;  // loads in flight per lane

__device__ __forceinline__ uint4 load_peer_16(const void* address) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// A warp copies a row that lies at the same offset of the peer's ring.
__device__ __forceinline__ void fetch_row(const uint8_t* peer, uint8_t* mem, int64_t offset, int64_t row_bytes,
                                          int lane) {
  for (int64_t at = lane * 16; at < row_bytes; at += kVectors * 512) {
    uint4 data[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (at + v * 512 < row_bytes) data[v] = load_peer_16(peer + offset + at + v * 512);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (at + v * 512 < row_bytes) *reinterpret_cast<uint4*>(mem + offset + at + v * 512) = data[v];
    }
  }
}

// A warp per token of the chunks: its ids come into the pool order, and, if one of them names a local expert and the
// token is another rank's, so does its row. kBackward: also its weights, to `weights`, and the gradient of its y.
template <bool kBackward>
__global__ void __launch_bounds__(kThreads) fetch_chunks(const __grid_constant__ RingView ring, TokenOrder order,
                                                         int32_t first_row, int32_t last_row, float* weights) {
  dependent_launch_wait();
  dependent_launch_trigger();
  if (ring.call().failed != 0) return;
  const int32_t top_k = static_cast<int32_t>(ring.shape.top_k), lane = threadIdx.x & 31;
  const int32_t local = static_cast<int32_t>(ring.shape.num_experts);
  const int32_t first_expert = static_cast<int32_t>(ring.rank) * local;
  const int64_t row_bytes = ring.shape.hidden * ring.shape.itemsize;
  auto* routes = reinterpret_cast<int32_t*>(ring.mem + ring.at.routes);
  for (int32_t row = first_row + blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5); row < last_row;
       row += gridDim.x * (kThreads / 32)) {
    const TokenOrder::Owner owner = order.owner(row);
    const uint8_t* peer = peers_of(ring)[owner.rank];
    const int64_t pair = static_cast<int64_t>(row) * top_k, own_pair = static_cast<int64_t>(owner.token) * top_k;
    const auto* ids = reinterpret_cast<const volatile int32_t*>(peer + ring.at.combine_ids) + own_pair;
    bool wanted = false;
    for (int32_t k = lane; k < top_k; k += 32) {
      const int32_t id = ids[k];
      routes[pair + k] = id;
      wanted |= id >= first_expert && id < first_expert + local;
      if constexpr (kBackward) {
        weights[pair + k] = reinterpret_cast<const volatile float*>(peer + ring.at.combine_weights)[own_pair + k];
      }
    }
    if (owner.rank == ring.rank || !__any_sync(0xffffffffu, wanted)) continue;
    fetch_row(peer, ring.mem, ring.at.token_pool + row * row_bytes, row_bytes, lane);
    if constexpr (kBackward) fetch_row(peer, ring.mem, ring.at.gradient_pool + row * row_bytes, row_bytes, lane);
  }
}

template <bool kBackward>
cudaError_t launch_fetch(const DeviceRing& ring, const CallSpec& spec, int64_t first, int64_t last, float* weights,
                         cudaStream_t stream) {
  const TokenOrder order = spec.token_order(ring.shape.num_ranks, spec.macro_of(first));
  const int64_t start = spec.macro_of(first) * spec.macro_tokens;
  const int64_t first_row = (spec.chunk_bounds(first).first - start) * ring.shape.num_ranks;
  const int64_t last_row = (spec.chunk_bounds(last - 1).second - start) * ring.shape.num_ranks;
  if (first_row == last_row) return cudaSuccess;
  return launch_dependent(fetch_chunks<kBackward>, dim3(grid_for(last_row - first_row, kThreads / 32)), kThreads, 0,
                          stream, view_of(ring), order, static_cast<int32_t>(first_row), static_cast<int32_t>(last_row),
                          weights);
}

// A route that takes no expert has gradient 0, whatever its place holds; in a call that failed everything is NaN.
__global__ void __launch_bounds__(kThreads)
    take_weight_gradients(const __grid_constant__ RingView ring, int64_t num_pairs, int32_t total_experts, float* out) {
  dependent_launch_wait();
  dependent_launch_trigger();
  const auto* ids = reinterpret_cast<const int32_t*>(ring.mem + ring.at.combine_ids);
  const auto* left_here = reinterpret_cast<const float*>(ring.mem + ring.at.weight_gradients);
  const bool failed = ring.call().failed != 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < num_pairs; i += gridDim.x * int64_t{kThreads}) {
    const bool taken = static_cast<uint32_t>(ids[i]) < static_cast<uint32_t>(total_experts);
    out[i] = failed ? __int_as_float(0x7fffffff) : taken ? left_here[i] : 0.0f;
  }
}

// Bits 0x7fff are NaN in bfloat16 and float16.
__global__ void __launch_bounds__(kThreads)
    spoil_if_failed(const __grid_constant__ RingView ring, const __grid_constant__ HalfTensors tensors) {
  dependent_launch_wait();
  dependent_launch_trigger();
  if (ring.call().failed == 0) return;
  for (const HalfTensor& tensor : tensors.of) {
    auto* data = static_cast<uint16_t*>(tensor.data);
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < tensor.num_elements;
         i += gridDim.x * int64_t{kThreads}) {
      data[i] = 0x7fff;
    }
  }
}

}  // namespace

cudaError_t prepare_ring_rows() {
  return load_kernels(fetch_chunks<false>, fetch_chunks<true>, take_weight_gradients, spoil_if_failed);
}

cudaError_t launch_fetch_chunks(const DeviceRing& ring, const CallSpec& spec, int64_t first, int64_t last,
                                cudaStream_t stream) {
  return launch_fetch<false>(ring, spec, first, last, nullptr, stream);
}

cudaError_t launch_fetch_backward(const DeviceRing& ring, const CallSpec& spec, float* weights, cudaStream_t stream) {
  return launch_fetch<true>(ring, spec, 0, spec.num_chunks, weights, stream);
}

cudaError_t launch_take_weight_gradients(const DeviceRing& ring, int64_t num_pairs, float* out, cudaStream_t stream) {
  if (num_pairs == 0) return cudaSuccess;
  const auto total_experts = static_cast<int32_t>(ring.shape.num_experts * ring.shape.num_ranks);
  return launch_dependent(take_weight_gradients, dim3(grid_for(num_pairs, kThreads)), kThreads, 0, stream,
                          view_of(ring), num_pairs, total_experts, out);
}

cudaError_t launch_spoil_if_failed(const DeviceRing& ring, const HalfTensors& tensors, cudaStream_t stream) {
  return launch_dependent(spoil_if_failed, dim3(grid_for(1 << 20, 8 * kThreads)), kThreads, 0, stream, view_of(ring),
                          tensors);
}

}  // namespace streammoe::sm90
