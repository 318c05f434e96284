// Open, publish, await, close: the kernels of a stream that move no matrix. See stream.h for the contract.
//
// Publishing copies with every SM, because nothing else runs on XLA's stream at that moment, and the last CTA to arrive
// stores the words. Trade-off: one launch per half and chunk, about 3 us each, instead of a copy and a launch for the
// word.
#include <algorithm>
#include <cstdio>

#include "device/ptx_sm90.cuh"
#include "host/events.h"
#include "kernels/launch_dependent.cuh"
#include "kernels/stream.h"
#include "protocol/publish.cuh"

namespace streammoe::sm90 {
namespace {

constexpr int kThreads = 256;

struct Params {
  RingView ring;
  DeviceError* error;
  uint64_t timeout_ns;
};

Params params_of(const DeviceRing& ring) {
  return {make_ring_view(ring.mem, ring.shape, ring.rank), ring.error, static_cast<uint64_t>(ring.timeout_s * 1e9)};
}

// Records the first failure of the call: one line for whoever watches, the record for the host, the state for the
// kernels behind, the abort word for peers.
__device__ __noinline__ void fail(const Params& p, DeviceFailure code, Phase phase, int64_t peer, int64_t slot,
                                  uint64_t wanted, uint64_t seen) {
  auto* failed = reinterpret_cast<unsigned long long*>(&p.ring.call().failed);
  if (atomicCAS(failed, 0ull, static_cast<unsigned long long>(code)) != 0) return;
  printf("jax_streammoe: rank %lld failed (code %d) in phase %d: peer %lld, slot %lld, wanted %llu, seen %llu\n",
         static_cast<long long>(p.ring.rank), static_cast<int>(code), static_cast<int>(phase),
         static_cast<long long>(peer), static_cast<long long>(slot), static_cast<unsigned long long>(wanted),
         static_cast<unsigned long long>(seen));
  DeviceError* e = p.error;
  if (load_acquire(&e->code) == 0) {
    e->rank = p.ring.rank, e->peer = peer, e->slot = slot, e->phase = static_cast<int64_t>(phase);
    e->wanted = wanted, e->seen = seen;
    store_release(&e->code, static_cast<uint64_t>(code));  // publishes the fields to the host
  }
  const auto* peers = reinterpret_cast<uint8_t* const*>(p.ring.mem + p.ring.at.peers);
  for (int64_t r = 0; r < p.ring.shape.num_ranks; ++r) {
    store_release(reinterpret_cast<uint64_t*>(peers[r] + p.ring.at.word(p.ring.at.abort, p.ring.rank, 0, 1)),
                  p.ring.call().call + 1);
  }
}

__global__ void register_ring(const __grid_constant__ Params p) {
  auto* words = reinterpret_cast<uint64_t*>(p.ring.mem);
  for (int64_t i = threadIdx.x; i < p.ring.at.slots / 8; i += blockDim.x) words[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) reinterpret_cast<RingHeader*>(p.ring.mem + p.ring.at.header)->magic = kRingMagic;
}

__global__ void open_call(const __grid_constant__ Params p, CallState plan) {
  dependent_launch_wait();  // the call before, and whatever XLA ran
  dependent_launch_trigger();
  const auto* header = reinterpret_cast<const RingHeader*>(p.ring.mem + p.ring.at.header);
  auto* stats = reinterpret_cast<int32_t*>(p.ring.mem + p.ring.at.stats);
  for (int64_t i = threadIdx.x; i < p.ring.shape.num_experts + 3; i += blockDim.x) stats[i] = 0;
  if (threadIdx.x != 0) return;
  plan.sequence_base = header->sequence_base;
  plan.call = header->call_number;
  plan.macro_base = header->macro_number;
  p.ring.call() = plan;
  if (header->magic != kRingMagic) {
    fail(p, DeviceFailure::kNotARing, Phase::kOpen, p.ring.rank, 0, kRingMagic, header->magic);
  }
}

// Chunks under a traced index must come in the order the host counts them.
__device__ __forceinline__ void check_chunk(const Params& p, Phase phase, int64_t chunk, const int32_t* operand) {
  if (operand == nullptr) return;
  const int32_t seen = *operand;
  if (seen != chunk) {
    fail(p, DeviceFailure::kWrongChunk, phase, p.ring.rank, 0, static_cast<uint64_t>(chunk),
         static_cast<uint64_t>(static_cast<int64_t>(seen)));
  }
}

__global__ void __launch_bounds__(kThreads)
    publish_route(const __grid_constant__ Params p, int64_t chunk, const int32_t* chunk_operand, int64_t num_pairs,
                  const int32_t* topk_ids, const float* topk_weights, int32_t total_experts) {
  __shared__ int32_t counts[2];  // invalid, masked
  dependent_launch_wait();       // topk_ids, by whoever routed
  dependent_launch_trigger();
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  __syncthreads();
  const Slot slot = slot_of(p.ring, chunk);
  int32_t invalid = 0, masked = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < num_pairs; i += gridDim.x * int64_t{kThreads}) {
    const int32_t id = topk_ids[i];
    const bool valid = static_cast<uint32_t>(id) < static_cast<uint32_t>(total_experts);
    masked += id == -1;
    invalid += !valid && id != -1;
    slot.topk_ids[i] = valid ? id : -1;
    slot.topk_weights[i] = topk_weights[i];
  }
  if (invalid != 0) atomicAdd(&counts[0], invalid);
  if (masked != 0) atomicAdd(&counts[1], masked);
  __syncthreads();
  if (threadIdx.x < 2 && counts[threadIdx.x] != 0) {
    auto* stats = reinterpret_cast<int32_t*>(p.ring.mem + p.ring.at.stats);
    atomicAdd(stats + p.ring.shape.num_experts + 1 + threadIdx.x, counts[threadIdx.x]);  // sums, in any order
  }
  if (last_to_arrive(p.ring, Half::kRoute, gridDim.x)) {
    check_chunk(p, Phase::kPublishRoute, chunk, chunk_operand);
    publish(p.ring, Half::kRoute, chunk);
  }
}

__global__ void __launch_bounds__(kThreads)
    publish_layout(const __grid_constant__ Params p, int64_t chunk, const int32_t* chunk_operand, int64_t num_words,
                   const uint4* x) {
  dependent_launch_wait();  // x, by whoever made it
  dependent_launch_trigger();
  constexpr int kVectors = 4;  // loads in flight per thread
  auto* out = static_cast<uint4*>(slot_of(p.ring, chunk).x);
  const int64_t step = gridDim.x * int64_t{kThreads};
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < num_words; i += kVectors * step) {
    uint4 data[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (i + v * step < num_words) data[v] = x[i + v * step];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (i + v * step < num_words) out[i + v * step] = data[v];
    }
  }
  if (last_to_arrive(p.ring, Half::kLayout, gridDim.x)) {
    check_chunk(p, Phase::kPublishLayout, chunk, chunk_operand);
    publish(p.ring, Half::kLayout, chunk);
  }
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// True once the word has reached `wanted`; false, and the call has failed, when a peer aborts or the deadline passes.
__device__ __forceinline__ bool wait_for(const Params& p, const uint64_t* word, uint64_t wanted, uint64_t deadline,
                                         Phase phase, int64_t peer, int64_t slot) {
  const AbortWords aborts{p.ring.mem + p.ring.at.abort, p.ring.shape.num_ranks};
  uint64_t seen = load_acquire(word);
  for (uint32_t round = 0; seen < wanted; seen = load_acquire(word)) {
    __nanosleep(64);
    if (++round % 64 != 0) continue;
    if (const int64_t who = aborts.first(); who >= 0) {
      fail(p, DeviceFailure::kAborted, phase, who, slot, wanted, seen);
      return false;
    }
    if (now_ns() > deadline) {
      fail(p, DeviceFailure::kDeadline, phase, peer, slot, wanted, seen);
      return false;
    }
  }
  return true;
}

// A thread per word. Acquire of every word; the kernel's end shows what they publish to the kernels behind it.
__global__ void __launch_bounds__(kThreads)
    await_chunks(const __grid_constant__ Params p, int64_t first, int64_t last) {
  dependent_launch_wait();
  dependent_launch_trigger();
  const RingView& ring = p.ring;
  const int64_t chunks = last - first, words = 2 * chunks * ring.shape.num_ranks;
  const uint64_t deadline = now_ns() + p.timeout_ns;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    const int64_t chunk = first + i / 2 % chunks, peer = i / 2 / chunks;
    const bool route = i % 2 == 0;
    const uint64_t q = chunk_sequence(ring.call().sequence_base, chunk);
    const int64_t slot = sequence_slot(q, ring.shape.num_slots);
    const auto* word = reinterpret_cast<const uint64_t*>(
        ring.mem + ring.at.word(route ? ring.at.route_ready : ring.at.layout_ready, peer, slot, ring.shape.num_slots));
    if (!wait_for(p, word, q, deadline, Phase::kDispatch, peer, slot)) return;
    const auto* peers = reinterpret_cast<uint8_t* const*>(ring.mem + ring.at.peers);
    const auto* descriptor = reinterpret_cast<const volatile SlotDescriptor*>(
        peers[peer] + ring.at.slot(slot) + (route ? ring.at.slot_route_descriptor : ring.at.slot_layout_descriptor));
    if (descriptor->tag != ring.call().tag || descriptor->call != ring.call().call) {
      fail(p, DeviceFailure::kOtherProgram, Phase::kDispatch, peer, slot, ring.call().tag, descriptor->tag);
    }
  }
}

__global__ void await_resident(const __grid_constant__ Params p, uint32_t ctas) {
  const auto* seen = &reinterpret_cast<const volatile RingHeader*>(p.ring.mem + p.ring.at.header)->resident_ctas;
  const uint64_t deadline = now_ns() + 1000000;
  while (static_cast<int32_t>(*seen - ctas) < 0 && now_ns() < deadline) __nanosleep(100);
}

__device__ __forceinline__ uint4 load_peer_16(const void* address) {
  uint4 v;  // volatile: past L1, which knows nothing of what another GPU writes
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// A warp per token of the chunks: its ids come into the pool order, and, if one of them names a local expert and the
// token is another rank's, so does its row. What is read was published before await_chunks ended.
__global__ void __launch_bounds__(kThreads)
    fetch_chunks(const __grid_constant__ Params p, TokenOrder order, int32_t first_row, int32_t last_row) {
  dependent_launch_wait();
  dependent_launch_trigger();
  const RingView& ring = p.ring;
  const int32_t top_k = static_cast<int32_t>(ring.shape.top_k), lane = threadIdx.x & 31;
  const int32_t local = static_cast<int32_t>(ring.shape.num_experts);
  const int32_t first_expert = static_cast<int32_t>(ring.rank) * local;
  const int64_t row_bytes = ring.shape.hidden * ring.shape.itemsize;
  const auto* peers = reinterpret_cast<uint8_t* const*>(ring.mem + ring.at.peers);
  auto* routes = reinterpret_cast<int32_t*>(ring.mem + ring.at.routes);
  constexpr int kVectors = 8;  // loads in flight per lane
  for (int32_t row = first_row + blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5); row < last_row;
       row += gridDim.x * (kThreads / 32)) {
    const TokenOrder::Owner owner = order.owner(row);
    const uint8_t* peer = peers[owner.rank];
    const auto* ids = reinterpret_cast<const volatile int32_t*>(peer + ring.at.combine_ids) +
                      static_cast<int64_t>(owner.token) * top_k;
    bool wanted = false;
    for (int32_t k = lane; k < top_k; k += 32) {
      const int32_t id = ids[k];
      routes[static_cast<int64_t>(row) * top_k + k] = id;
      wanted |= id >= first_expert && id < first_expert + local;
    }
    if (owner.rank == ring.rank || !__any_sync(0xffffffffu, wanted)) continue;
    const uint8_t* from = peer + ring.at.token_pool + row * row_bytes;
    uint8_t* to = ring.mem + ring.at.token_pool + row * row_bytes;
    for (int64_t at = lane * 16; at < row_bytes; at += kVectors * 512) {
      uint4 data[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at + v * 512 < row_bytes) data[v] = load_peer_16(from + at + v * 512);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at + v * 512 < row_bytes) *reinterpret_cast<uint4*>(to + at + v * 512) = data[v];
      }
    }
  }
}

// A thread per rank. The kernels before this one have ended, so their reads are over and their writes performed; the
// release stores publish the rows they left at the owners, the acquire shows this rank's combine those left here.
__global__ void __launch_bounds__(kThreads)
    seal_macro(const __grid_constant__ Params p, uint64_t macro, uint64_t chunks) {
  dependent_launch_wait();
  dependent_launch_trigger();
  const RingView& ring = p.ring;
  const auto* peers = reinterpret_cast<uint8_t* const*>(ring.mem + ring.at.peers);
  const uint64_t done = ring.call().macro_base + macro + 1, end = ring.call().sequence_base + chunks;
  const int64_t used = min(static_cast<int64_t>(chunks), ring.shape.num_slots);
  for (int64_t peer = threadIdx.x; peer < ring.shape.num_ranks; peer += kThreads) {
    for (int64_t i = 0; i < used; ++i) {
      const int64_t slot = sequence_slot(end - static_cast<uint64_t>(i), ring.shape.num_slots);
      store_release(reinterpret_cast<uint64_t*>(peers[peer] +
                                                ring.at.word(ring.at.consumed, ring.rank, slot, ring.shape.num_slots)),
                    end - static_cast<uint64_t>(i));
    }
    store_release(reinterpret_cast<uint64_t*>(peers[peer] + ring.at.word(ring.at.done, ring.rank, 0, 1)), done);
  }
  const uint64_t deadline = now_ns() + p.timeout_ns;
  for (int64_t peer = threadIdx.x; peer < ring.shape.num_ranks; peer += kThreads) {
    const auto* word = reinterpret_cast<const uint64_t*>(ring.mem + ring.at.word(ring.at.done, peer, 0, 1));
    if (!wait_for(p, word, done, deadline, Phase::kDone, peer, 0)) return;
  }
}

__global__ void abort_ring(const __grid_constant__ Params p) {
  const auto* peers = reinterpret_cast<uint8_t* const*>(p.ring.mem + p.ring.at.peers);
  for (int64_t r = threadIdx.x; r < p.ring.shape.num_ranks; r += blockDim.x) {
    if (peers[r] == nullptr) continue;  // it failed while the ring was made
    store_release(reinterpret_cast<uint64_t*>(peers[r] + p.ring.at.word(p.ring.at.abort, p.ring.rank, 0, 1)),
                  p.ring.call().call + 1);
  }
}

__device__ __forceinline__ void advance_header(const Params& p, uint64_t chunks, uint64_t macros) {
  auto* header = reinterpret_cast<RingHeader*>(p.ring.mem + p.ring.at.header);
  header->sequence_base += chunks;
  header->call_number += 1;
  header->macro_number += macros;
}

__global__ void __launch_bounds__(kThreads) close_call(const __grid_constant__ Params p, uint64_t chunks,
                                                       uint64_t macros, int32_t* expert_rows, int32_t* counts) {
  dependent_launch_wait();
  dependent_launch_trigger();
  const RingView& ring = p.ring;
  const auto* stats = reinterpret_cast<const int32_t*>(ring.mem + ring.at.stats);
  for (int64_t i = threadIdx.x; i < ring.shape.num_experts; i += kThreads) expert_rows[i] = stats[i];
  if (threadIdx.x < 3) counts[threadIdx.x] = stats[ring.shape.num_experts + threadIdx.x];
  const uint64_t end = ring.call().sequence_base + chunks;
  const int64_t used = min(static_cast<int64_t>(chunks), ring.shape.num_slots);
  for (int64_t i = threadIdx.x; i < used; i += kThreads) {
    const int64_t slot = sequence_slot(end - static_cast<uint64_t>(i), ring.shape.num_slots);
    store_release(
        reinterpret_cast<uint64_t*>(ring.mem + ring.at.word(ring.at.consumed, ring.rank, slot, ring.shape.num_slots)),
        end - static_cast<uint64_t>(i));
  }
  if (threadIdx.x != 0) return;
  store_release(reinterpret_cast<uint64_t*>(ring.mem + ring.at.word(ring.at.done, ring.rank, 0, 1)),
                ring.call().macro_base + macros);
  advance_header(p, chunks, macros);
}

__global__ void advance_call(const __grid_constant__ Params p, uint64_t chunks, uint64_t macros) {
  dependent_launch_wait();
  dependent_launch_trigger();
  advance_header(p, chunks, macros);
}

// CTAs for `items` of work, each CTA taking `per_cta` at a time: never more than fill the machine.
uint32_t grid_for(int64_t items, int64_t per_cta) {
  return static_cast<uint32_t>(std::clamp<int64_t>((items + per_cta - 1) / per_cta, 1, 132 * 8));
}

}  // namespace

cudaError_t prepare_stream() {
  return load_kernels(register_ring, open_call, publish_route, publish_layout, await_chunks, await_resident,
                      fetch_chunks, seal_macro, abort_ring, close_call, advance_call);
}

cudaError_t launch_register(const DeviceRing& ring, cudaStream_t stream) {
  const Params p = params_of(ring);
  register_ring<<<1, 1024, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_connect(const DeviceRing& ring, uint8_t* const* peers, cudaStream_t stream) {
  const Params p = params_of(ring);
  return cudaMemcpyAsync(ring.mem + p.ring.at.peers, peers, static_cast<size_t>(ring.shape.num_ranks) * 8,
                         cudaMemcpyHostToDevice, stream);
}

cudaError_t launch_open(const DeviceRing& ring, const CallSpec& spec, cudaStream_t stream) {
  CallState plan = {};
  plan.tag = spec.tag();
  plan.num_tokens = spec.num_tokens, plan.chunk_tokens = spec.chunk_tokens, plan.macro_tokens = spec.macro_tokens;
  plan.chunks_per_macro = spec.macro_ends.front(), plan.num_chunks = spec.num_chunks;
  return launch_dependent(open_call, dim3(1), kThreads, 0, stream, params_of(ring), plan);
}

cudaError_t launch_publish_route(const DeviceRing& ring, int64_t chunk, const int32_t* chunk_operand,
                                 int64_t num_tokens, const int32_t* topk_ids, const float* topk_weights,
                                 int64_t total_experts, cudaStream_t stream) {
  const int64_t pairs = num_tokens * ring.shape.top_k;
  return launch_dependent(publish_route, dim3(grid_for(pairs, 4 * kThreads)), kThreads, 0, stream, params_of(ring),
                          chunk, chunk_operand, pairs, topk_ids, topk_weights, static_cast<int32_t>(total_experts));
}

cudaError_t launch_publish_layout(const DeviceRing& ring, int64_t chunk, const int32_t* chunk_operand,
                                  int64_t num_tokens, const void* x, cudaStream_t stream) {
  const int64_t words = num_tokens * ring.shape.hidden * ring.shape.itemsize / 16;
  return launch_dependent(publish_layout, dim3(grid_for(words, 4 * kThreads)), kThreads, 0, stream, params_of(ring),
                          chunk, chunk_operand, words, static_cast<const uint4*>(x));
}

cudaError_t launch_await_chunks(const DeviceRing& ring, int64_t first, int64_t last, cudaStream_t stream) {
  return launch_dependent(await_chunks, dim3(1), kThreads, 0, stream, params_of(ring), first, last);
}

cudaError_t launch_fetch_chunks(const DeviceRing& ring, const CallSpec& spec, int64_t first, int64_t last,
                                cudaStream_t stream) {
  const TokenOrder order = spec.token_order(ring.shape.num_ranks, spec.macro_of(first));
  const int64_t start = spec.macro_of(first) * spec.macro_tokens;
  const int64_t first_row = (spec.chunk_bounds(first).first - start) * ring.shape.num_ranks;
  const int64_t last_row = (spec.chunk_bounds(last - 1).second - start) * ring.shape.num_ranks;
  if (first_row == last_row) return cudaSuccess;
  return launch_dependent(fetch_chunks, dim3(grid_for(last_row - first_row, kThreads / 32)), kThreads, 0, stream,
                          params_of(ring), order, static_cast<int32_t>(first_row), static_cast<int32_t>(last_row));
}

cudaError_t launch_seal(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream) {
  return launch_dependent(seal_macro, dim3(1), kThreads, 0, stream, params_of(ring), static_cast<uint64_t>(macro),
                          static_cast<uint64_t>(spec.macro_ends[static_cast<size_t>(macro)]));
}

cudaError_t launch_abort(const DeviceRing& ring, cudaStream_t stream) {
  abort_ring<<<1, 128, 0, stream>>>(params_of(ring));
  return cudaGetLastError();
}

cudaError_t launch_await_resident(const DeviceRing& ring, uint32_t ctas, cudaStream_t stream) {
  await_resident<<<1, 1, 0, stream>>>(params_of(ring), ctas);
  return cudaGetLastError();
}

cudaError_t launch_close(const DeviceRing& ring, const CallSpec& spec, int32_t* expert_rows, int32_t* counts,
                         cudaStream_t stream) {
  return launch_dependent(close_call, dim3(1), kThreads, 0, stream, params_of(ring),
                          static_cast<uint64_t>(spec.num_chunks), static_cast<uint64_t>(spec.macro_ends.size()),
                          expert_rows, counts);
}

cudaError_t launch_advance(const DeviceRing& ring, const CallSpec& spec, cudaStream_t stream) {
  return launch_dependent(advance_call, dim3(1), 1, 0, stream, params_of(ring), static_cast<uint64_t>(spec.num_chunks),
                          static_cast<uint64_t>(spec.macro_ends.size()));
}

}  // namespace streammoe::sm90
