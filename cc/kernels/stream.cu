// Open, publish, await, close: the kernels of a stream that move no matrix. See stream.h for the contract.
//
// Publishing copies with every SM, because nothing else runs on XLA's stream at that moment, and the last CTA to arrive
// stores the words. Trade-off: one launch per half and chunk, about 3 us each, instead of a copy and a launch for the
// word.
#include <cstdio>

#include "device/ptx_sm90.cuh"
#include "host/events.h"
#include "kernels/launch_dependent.cuh"
#include "kernels/ring_view.cuh"
#include "kernels/stream.h"

namespace streammoe::sm90 {
namespace {

constexpr int kThreads = 256;

uint64_t timeout_ns(const DeviceRing& ring) { return static_cast<uint64_t>(ring.timeout_s * 1e9); }

__device__ __forceinline__ RingHeader& header_of(const RingView& ring) {
  return *reinterpret_cast<RingHeader*>(ring.mem + ring.at.header);
}

__device__ __forceinline__ uint64_t* abort_word(const RingView& ring, uint8_t* mem, int64_t rank) {
  return reinterpret_cast<uint64_t*>(mem + ring.at.word(ring.at.abort, rank, 0, 1));
}

struct Failure {
  DeviceFailure code = DeviceFailure::kNone;
  int64_t peer = 0, slot = 0;
  uint64_t wanted = 0, seen = 0;
};

// Records the first failure of the call, if this is one: a line for whoever watches, the record for the host, the state
// for the kernels behind, the abort word for peers. A peer that has failed itself is not told: its memory may be gone.
// Every kernel calls this in one place, since the call takes registers from all that is alive there.
__device__ __noinline__ void fail(const RingView& ring, Phase phase, const Failure& f) {
  auto* failed = reinterpret_cast<unsigned long long*>(&ring.call().failed);
  if (atomicCAS(failed, 0ull, static_cast<unsigned long long>(f.code)) != 0) return;
  auto* e = reinterpret_cast<DeviceError*>(header_of(ring).error_record);
  if (load_acquire(&e->code) == 0) {
    printf("jax_streammoe: rank %lld failed (code %d) in phase %d: peer %lld, slot %lld, wanted %llu, seen %llu\n",
           static_cast<long long>(ring.rank), static_cast<int>(f.code), static_cast<int>(phase),
           static_cast<long long>(f.peer), static_cast<long long>(f.slot), static_cast<unsigned long long>(f.wanted),
           static_cast<unsigned long long>(f.seen));
    e->rank = ring.rank, e->peer = f.peer, e->slot = f.slot, e->phase = static_cast<int64_t>(phase);
    e->wanted = f.wanted, e->seen = f.seen;
    store_release(&e->code, static_cast<uint64_t>(f.code));  // publishes the fields to the host
  }
  for (int64_t r = 0; r < ring.shape.num_ranks; ++r) {
    if (r != ring.rank && load_acquire(abort_word(ring, ring.mem, r)) != 0) continue;
    store_release(abort_word(ring, peers_of(ring)[r], ring.rank), ring.call().call + 1);
  }
}

// A peer that has failed may have told so in its abort word only: its rows are not to be waited for or trusted.
__device__ __forceinline__ Failure aborted(const RingView& ring) {
  const int64_t who = AbortWords{ring.mem + ring.at.abort, ring.shape.num_ranks}.first();
  return who >= 0 ? Failure{DeviceFailure::kAborted, who} : Failure{};
}

__global__ void register_ring(const __grid_constant__ RingView ring, DeviceError* error, uint64_t timeout_ns) {
  auto* words = reinterpret_cast<uint64_t*>(ring.mem);
  for (int64_t i = threadIdx.x; i < ring.at.slots / 8; i += blockDim.x) words[i] = 0;
  __syncthreads();
  if (threadIdx.x != 0) return;
  header_of(ring).magic = kRingMagic;
  header_of(ring).error_record = reinterpret_cast<uint64_t>(error);
  header_of(ring).timeout_ns = timeout_ns;
}

__global__ void open_call(const __grid_constant__ RingView ring, CallState plan, DeviceError* error,
                          uint64_t timeout_ns) {
  dependent_launch_wait();  // the call before, and whatever XLA ran
  dependent_launch_trigger();
  RingHeader& header = header_of(ring);
  auto* stats = reinterpret_cast<int32_t*>(ring.mem + ring.at.stats);
  for (int64_t i = threadIdx.x; i < ring.shape.num_experts + 3; i += blockDim.x) stats[i] = 0;
  if (threadIdx.x != 0) return;
  const uint64_t magic = header.magic;
  if (magic != kRingMagic) {
    // Nothing here can be trusted: all stores of this call stay at home, and the host is told where it says.
    auto* peers = reinterpret_cast<uint8_t**>(ring.mem + ring.at.peers);
    for (int64_t r = 0; r < ring.shape.num_ranks; ++r) peers[r] = ring.mem, *abort_word(ring, ring.mem, r) = 0;
    header = {0, 0, 0, 0, reinterpret_cast<uint64_t>(error), timeout_ns, header.resident_ctas};
  }
  plan.sequence_base = header.sequence_base;
  plan.call = header.call_number;
  plan.macro_base = header.macro_number;
  ring.call() = plan;
  const Failure failure = magic == kRingMagic ? aborted(ring)  // a ring that failed stays so
                                              : Failure{DeviceFailure::kNotARing, ring.rank, 0, kRingMagic, magic};
  if (failure.code != DeviceFailure::kNone) fail(ring, Phase::kOpen, failure);
}

// Chunks under a traced index must come in the order the host counts them.
__device__ __forceinline__ void check_chunk(const RingView& ring, Phase phase, int64_t chunk, const int32_t* operand) {
  if (operand == nullptr || *operand == chunk) return;
  const auto seen = static_cast<uint64_t>(static_cast<int64_t>(*operand));
  fail(ring, phase, {DeviceFailure::kWrongChunk, ring.rank, 0, static_cast<uint64_t>(chunk), seen});
}

__global__ void __launch_bounds__(kThreads)
    publish_route(const __grid_constant__ RingView ring, int64_t chunk, const int32_t* chunk_operand, int64_t num_pairs,
                  const int32_t* topk_ids, const float* topk_weights, int32_t total_experts) {
  __shared__ int32_t counts[2];  // invalid, masked
  dependent_launch_wait();       // topk_ids, by whoever routed
  dependent_launch_trigger();
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  __syncthreads();
  const Slot slot = slot_of(ring, chunk);
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
    auto* stats = reinterpret_cast<int32_t*>(ring.mem + ring.at.stats);
    atomicAdd(stats + ring.shape.num_experts + 1 + threadIdx.x, counts[threadIdx.x]);  // sums, in any order
  }
  if (last_to_arrive(ring, Half::kRoute, gridDim.x)) {
    check_chunk(ring, Phase::kPublishRoute, chunk, chunk_operand);
    publish(ring, Half::kRoute, chunk);
  }
}

__global__ void __launch_bounds__(kThreads)
    publish_layout(const __grid_constant__ RingView ring, int64_t chunk, const int32_t* chunk_operand,
                   int64_t num_words, const uint4* x) {
  dependent_launch_wait();  // x, by whoever made it
  dependent_launch_trigger();
  constexpr int kVectors = 4;  // loads in flight per thread
  auto* out = static_cast<uint4*>(slot_of(ring, chunk).x);
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
  if (last_to_arrive(ring, Half::kLayout, gridDim.x)) {
    check_chunk(ring, Phase::kPublishLayout, chunk, chunk_operand);
    publish(ring, Half::kLayout, chunk);
  }
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Nothing once the word has reached `wanted`; a failure when a peer aborts or the deadline passes.
__device__ __forceinline__ Failure wait_for(const RingView& ring, const uint64_t* word, uint64_t wanted,
                                            uint64_t deadline, int64_t peer, int64_t slot) {
  uint64_t seen = load_acquire(word);
  for (uint32_t round = 0; seen < wanted; seen = load_acquire(word)) {
    __nanosleep(64);
    if (++round % 64 != 0) continue;
    if (Failure f = aborted(ring); f.code != DeviceFailure::kNone) {
      f.slot = slot, f.wanted = wanted, f.seen = seen;
      return f;
    }
    if (now_ns() > deadline) return {DeviceFailure::kDeadline, peer, slot, wanted, seen};
  }
  return {};
}

// A thread per word. Acquire of every word; the kernel's end shows what they publish to the kernels behind it. They may
// not start before: they would hold SMs while this one waits.
__global__ void __launch_bounds__(kThreads)
    await_chunks(const __grid_constant__ RingView ring, int64_t first, int64_t last) {
  dependent_launch_wait();
  if (ring.call().failed != 0) return;
  const int64_t chunks = last - first, words = 2 * chunks * ring.shape.num_ranks;
  const uint64_t deadline = now_ns() + header_of(ring).timeout_ns;
  Failure failure;
  for (int64_t i = threadIdx.x; i < words && failure.code == DeviceFailure::kNone; i += kThreads) {
    const int64_t chunk = first + i / 2 % chunks, peer = i / 2 / chunks;
    const bool route = i % 2 == 0;
    const uint64_t q = chunk_sequence(ring.call().sequence_base, chunk);
    const int64_t slot = sequence_slot(q, ring.shape.num_slots);
    const auto* word = reinterpret_cast<const uint64_t*>(
        ring.mem + ring.at.word(route ? ring.at.route_ready : ring.at.layout_ready, peer, slot, ring.shape.num_slots));
    failure = wait_for(ring, word, q, deadline, peer, slot);
    if (failure.code != DeviceFailure::kNone) break;
    const auto* descriptor = reinterpret_cast<const volatile SlotDescriptor*>(
        peers_of(ring)[peer] + ring.at.slot(slot) +
        (route ? ring.at.slot_route_descriptor : ring.at.slot_layout_descriptor));
    const uint64_t tag = descriptor->tag;
    if (tag != ring.call().tag || descriptor->call != ring.call().call) {
      failure = {DeviceFailure::kOtherProgram, peer, slot, ring.call().tag, tag};
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && failure.code == DeviceFailure::kNone) failure = aborted(ring);
  if (failure.code != DeviceFailure::kNone) fail(ring, Phase::kDispatch, failure);
}

__global__ void await_resident(const __grid_constant__ RingView ring, uint32_t ctas) {
  const auto* seen = &reinterpret_cast<const volatile RingHeader*>(ring.mem + ring.at.header)->resident_ctas;
  const uint64_t deadline = now_ns() + 1000000;
  while (static_cast<int32_t>(*seen - ctas) < 0 && now_ns() < deadline) __nanosleep(100);
}

// A thread per rank. The kernels before this one have ended, so their reads are over and their writes performed; the
// fence publishes the rows they left at the owners. A rank that has failed says nothing: its peers must not take what
// is there for its rows.
__device__ __forceinline__ void tell_done(const RingView& ring, uint64_t done, uint64_t end, uint64_t chunks) {
  const int64_t used = min(static_cast<int64_t>(chunks), ring.shape.num_slots);
  fence_release();
  for (int64_t peer = threadIdx.x; peer < ring.shape.num_ranks; peer += kThreads) {
    uint8_t* mem = peers_of(ring)[peer];
    for (int64_t i = 0; i < used; ++i) {
      const uint64_t q = end - static_cast<uint64_t>(i);
      const int64_t slot = sequence_slot(q, ring.shape.num_slots);
      store_relaxed(
          reinterpret_cast<uint64_t*>(mem + ring.at.word(ring.at.consumed, ring.rank, slot, ring.shape.num_slots)), q);
    }
    store_relaxed(reinterpret_cast<uint64_t*>(mem + ring.at.word(ring.at.done, ring.rank, 0, 1)), done);
  }
}

// A thread per rank. The acquire shows this rank's combine what the others left here.
__device__ __forceinline__ void await_done(const RingView& ring, uint64_t done) {
  const uint64_t deadline = now_ns() + header_of(ring).timeout_ns;
  Failure failure;
  for (int64_t peer = threadIdx.x; peer < ring.shape.num_ranks && failure.code == DeviceFailure::kNone;
       peer += kThreads) {
    const auto* word = reinterpret_cast<const uint64_t*>(ring.mem + ring.at.word(ring.at.done, peer, 0, 1));
    failure = wait_for(ring, word, done, deadline, peer, 0);
  }
  __syncthreads();
  if (threadIdx.x == 0 && failure.code == DeviceFailure::kNone) failure = aborted(ring);
  if (failure.code != DeviceFailure::kNone) fail(ring, Phase::kDone, failure);
}

enum class Seal : int32_t { kTell = 1, kAwait = 2, kBoth = 3 };

template <Seal kPart>
__global__ void __launch_bounds__(kThreads)
    seal_macro(const __grid_constant__ RingView ring, uint64_t macro, uint64_t chunks) {
  dependent_launch_wait();
  // Whoever waits lets no successor take SMs; a kernel behind the telling has nothing to do with the words.
  if constexpr (kPart == Seal::kTell) dependent_launch_trigger();
  if (ring.call().failed != 0) return;
  const uint64_t done = ring.call().macro_base + macro + 1, end = ring.call().sequence_base + chunks;
  if constexpr (kPart != Seal::kAwait) tell_done(ring, done, end, chunks);
  if constexpr (kPart != Seal::kTell) await_done(ring, done);
}

__global__ void abort_ring(const __grid_constant__ RingView ring) {
  for (int64_t r = threadIdx.x; r < ring.shape.num_ranks; r += blockDim.x) {
    uint8_t* mem = peers_of(ring)[r];
    if (mem == nullptr) continue;  // it failed while the ring was made
    if (r != ring.rank && load_acquire(abort_word(ring, ring.mem, r)) != 0) continue;  // as in fail()
    store_release(abort_word(ring, mem, ring.rank), ring.call().call + 1);
  }
}

__device__ __forceinline__ void advance_header(const RingView& ring, uint64_t chunks, uint64_t macros) {
  auto* header = reinterpret_cast<RingHeader*>(ring.mem + ring.at.header);
  header->sequence_base += chunks;
  header->call_number += 1;
  header->macro_number += macros;
}

__global__ void __launch_bounds__(kThreads) close_call(const __grid_constant__ RingView ring, uint64_t chunks,
                                                       uint64_t macros, int32_t* expert_rows, int32_t* counts) {
  dependent_launch_wait();
  dependent_launch_trigger();
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
  advance_header(ring, chunks, macros);
}

__global__ void advance_call(const __grid_constant__ RingView ring, uint64_t chunks, uint64_t macros) {
  dependent_launch_wait();
  dependent_launch_trigger();
  advance_header(ring, chunks, macros);
}

}  // namespace

cudaError_t prepare_stream() {
  return load_kernels(register_ring, open_call, publish_route, publish_layout, await_chunks, await_resident,
                      seal_macro<Seal::kTell>, seal_macro<Seal::kAwait>, seal_macro<Seal::kBoth>, abort_ring,
                      close_call, advance_call);
}

cudaError_t launch_register(const DeviceRing& ring, cudaStream_t stream) {
  return launch_kernel(register_ring, dim3(1), 1024, 0, stream, view_of(ring), ring.error, timeout_ns(ring));
}

cudaError_t launch_connect(const DeviceRing& ring, uint8_t* const* peers, cudaStream_t stream) {
  return cudaMemcpyAsync(ring.mem + make_ring_layout(ring.shape).peers, peers,
                         static_cast<size_t>(ring.shape.num_ranks) * 8, cudaMemcpyHostToDevice, stream);
}

cudaError_t launch_open(const DeviceRing& ring, const CallSpec& spec, cudaStream_t stream) {
  CallState plan = {};
  plan.tag = spec.tag();
  plan.num_tokens = spec.num_tokens, plan.chunk_tokens = spec.chunk_tokens, plan.macro_tokens = spec.macro_tokens;
  plan.chunks_per_macro = spec.macro_ends.front();
  return launch_dependent(open_call, dim3(1), kThreads, 0, stream, view_of(ring), plan, ring.error, timeout_ns(ring));
}

cudaError_t launch_publish_route(const DeviceRing& ring, int64_t chunk, const int32_t* chunk_operand,
                                 int64_t num_tokens, const int32_t* topk_ids, const float* topk_weights,
                                 int64_t total_experts, cudaStream_t stream) {
  const int64_t pairs = num_tokens * ring.shape.top_k;
  return launch_dependent(publish_route, dim3(grid_for(pairs, 4 * kThreads)), kThreads, 0, stream, view_of(ring), chunk,
                          chunk_operand, pairs, topk_ids, topk_weights, static_cast<int32_t>(total_experts));
}

cudaError_t launch_publish_layout(const DeviceRing& ring, int64_t chunk, const int32_t* chunk_operand,
                                  int64_t num_tokens, const void* x, cudaStream_t stream) {
  const int64_t words = num_tokens * ring.shape.hidden * ring.shape.itemsize / 16;
  return launch_dependent(publish_layout, dim3(grid_for(words, 4 * kThreads)), kThreads, 0, stream, view_of(ring),
                          chunk, chunk_operand, words, static_cast<const uint4*>(x));
}

cudaError_t launch_await_chunks(const DeviceRing& ring, int64_t first, int64_t last, cudaStream_t stream) {
  return launch_dependent(await_chunks, dim3(1), kThreads, 0, stream, view_of(ring), first, last);
}

namespace {

template <Seal kPart>
cudaError_t launch_part(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream) {
  return launch_dependent(seal_macro<kPart>, dim3(1), kThreads, 0, stream, view_of(ring), static_cast<uint64_t>(macro),
                          static_cast<uint64_t>(spec.macro_ends[static_cast<size_t>(macro)]));
}

}  // namespace

cudaError_t launch_seal(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream) {
  return launch_part<Seal::kBoth>(ring, spec, macro, stream);
}

cudaError_t launch_tell_done(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream) {
  return launch_part<Seal::kTell>(ring, spec, macro, stream);
}

cudaError_t launch_await_done(const DeviceRing& ring, const CallSpec& spec, int64_t macro, cudaStream_t stream) {
  return launch_part<Seal::kAwait>(ring, spec, macro, stream);
}

cudaError_t launch_abort(const DeviceRing& ring, cudaStream_t stream) {
  return launch_kernel(abort_ring, dim3(1), 128, 0, stream, view_of(ring));
}

cudaError_t launch_await_resident(const DeviceRing& ring, uint32_t ctas, cudaStream_t stream) {
  return launch_kernel(await_resident, dim3(1), 1, 0, stream, view_of(ring), ctas);
}

cudaError_t launch_close(const DeviceRing& ring, const CallSpec& spec, int32_t* expert_rows, int32_t* counts,
                         cudaStream_t stream) {
  return launch_dependent(close_call, dim3(1), kThreads, 0, stream, view_of(ring),
                          static_cast<uint64_t>(spec.num_chunks), static_cast<uint64_t>(spec.macro_ends.size()),
                          expert_rows, counts);
}

cudaError_t launch_advance(const DeviceRing& ring, const CallSpec& spec, cudaStream_t stream) {
  return launch_dependent(advance_call, dim3(1), 1, 0, stream, view_of(ring), static_cast<uint64_t>(spec.num_chunks),
                          static_cast<uint64_t>(spec.macro_ends.size()));
}

}  // namespace streammoe::sm90
