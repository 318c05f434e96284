// The host half of a stream on a GPU. See stream.h for the contract.
#include "cuda/stream.h"

#include <algorithm>
#include <string>

#include "cuda/status.h"
#include "host/heuristics.h"
#include "kernels/launch.h"

namespace streammoe::cuda {

Stream::Stream(Ring* ring, int64_t group, int64_t rank)
    : ring_(ring), group_(group), rank_(rank), at_(ring->layout()), shape_(ring->shape()) {}

// The error record is left to the process: a kernel of the last call may still be on its way. So is everything after a
// failure.
Stream::~Stream() {
  int before = 0;
  if (device_ < 0 || ring_->failed() || cudaGetDevice(&before) != cudaSuccess) return;
  if (cudaSetDevice(device_) != cudaSuccess) return;
  for (cudaEvent_t event : {fork_, join_, last_}) cudaEventDestroy(event);
  for (cudaStream_t stream : {side_, urgent_}) cudaStreamDestroy(stream);
  (void)cudaSetDevice(before);
}

Status Stream::attach(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  if (device_ >= 0) return error(Code::kFailedPrecondition, "ring '", ring_->name(), "' is registered already");
  STREAMMOE_CUDA(cudaGetDevice(&device_), "make_ring: the device");
  STREAMMOE_CUDA(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device_), "make_ring: its SMs");
  int lowest = 0, highest = 0;
  STREAMMOE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "make_ring: stream priorities");
  STREAMMOE_CUDA(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, highest), "make_ring: a side stream");
  STREAMMOE_CUDA(cudaStreamCreateWithPriority(&urgent_, cudaStreamNonBlocking, highest), "make_ring: a side stream");
  for (cudaEvent_t* event : {&fork_, &join_, &last_}) {
    STREAMMOE_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "make_ring: an event");
  }
  STREAMMOE_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&error_), sizeof(DeviceError),
                               cudaHostAllocPortable | cudaHostAllocMapped),
                 "make_ring: pinned memory");
  *error_ = {};
  STREAMMOE_CUDA(sm90::prepare_device(), "make_ring: loading the kernels for sm_90a");
  const int64_t pool_tokens = shape_.num_ranks * shape_.num_slots * shape_.chunk_tokens;
  if (pool_tokens * shape_.top_k > kMaxPlanPairs) {
    return error(Code::kInvalidArgument, "ring '", ring_->name(),
                 "': num_ranks * num_slots * chunk_tokens * top_k must ", "be at most ", kMaxPlanPairs, ", got ",
                 pool_tokens * shape_.top_k);
  }
  const int64_t needed = static_cast<int64_t>(sm90::plan_bytes(pool_tokens, shape_.top_k, shape_.num_experts, false));
  if (needed > at_.activations - at_.plan) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(), "': a plan needs ", needed,
                 " bytes, the ring has ", at_.activations - at_.plan);
  }
  STREAMMOE_CUDA(sm90::launch_register(device_ring(), stream), "make_ring: writing the control region");
  return cuda_status(cudaStreamSynchronize(stream), "make_ring: writing the control region");
}

Status Stream::connect(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  std::vector<uint8_t*> peers;
  for (int64_t r = 0; r < shape_.num_ranks; ++r) {
    peers.push_back(ring_->base(group_, r));
    if (peers.back() == nullptr) {
      return error(Code::kFailedPrecondition, "ring '", ring_->name(), "': rank ", r, " is not registered");
    }
  }
  STREAMMOE_CUDA(sm90::launch_connect(device_ring(), peers.data(), stream), "make_ring: writing the peers");
  return cuda_status(cudaStreamSynchronize(stream), "make_ring: writing the peers");
}

sm90::DeviceRing Stream::device_ring() const { return {mem(), shape_, rank_, error_, ring_->timeout_s()}; }

Status Stream::open(const CallSpec& spec, const ExpertWeights& weights, cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  Span span(ring_->name(), group_, rank_, Phase::kOpen);
  if (open_) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(),
                 "': open_stream while the stream of an earlier call was never closed; close every stream that was ",
                 "opened, or make_ring again");
  }
  STREAMMOE_RETURN_IF_ERROR(spec.check(shape_));
  if (spec.capacity >= 0 && shape_.num_ranks > 1) {
    return error(Code::kInvalidArgument, "ring '", ring_->name(),
                 "': capacity is for rings of one GPU in this version");
  }
  if (spec.overlap && (spec.producer_sms < 0 || num_sms_ < spec.producer_sms + 2)) {
    return error(Code::kInvalidArgument, "ring '", ring_->name(), "': policy \"overlap\" leaves ", spec.producer_sms,
                 " SMs to the producer and needs 2 more, the device has ", num_sms_, "; use policy \"serial\"");
  }
  spec_ = spec, weights_ = weights;
  published_.reset(spec);
  macros_combined_ = 0;
  open_ = true;
  bool dropped = false;
  STREAMMOE_RETURN_IF_ERROR(Faults::get().hit(ring_->name(), rank_, Phase::kOpen, &dropped));
  return cuda_status(sm90::launch_open(device_ring(), spec_, stream), "open_stream");
}

// What every publication checks and waits for, in stream order, before payload may be written. `dropped`: a fault wants
// this half never to arrive.
Status Stream::begin(Phase phase, int64_t chunk, void* y, cudaStream_t stream, bool* dropped) {
  STREAMMOE_RETURN_IF_ERROR(published_.check(spec_, phase, chunk, shape_.num_slots));
  const Status fault = Faults::get().hit(ring_->name(), rank_, phase, dropped);
  if (!fault.ok() && !*dropped) return fault;
  return finish_macros(spec_.macro_of(chunk), y, stream);
}

Status Stream::publish_route(int64_t chunk, const int32_t* chunk_operand, const int32_t* ids, const float* weights,
                             void* y, cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  Span span(ring_->name(), group_, rank_, Phase::kPublishRoute, chunk);
  bool dropped = false;
  STREAMMOE_RETURN_IF_ERROR(begin(Phase::kPublishRoute, chunk, y, stream, &dropped));
  const auto [start, stop] = spec_.chunk_bounds(chunk);
  if (!dropped) {
    STREAMMOE_CUDA(sm90::launch_publish_route(device_ring(), chunk, chunk_operand, stop - start, ids, weights,
                                              spec_.problem.num_experts * shape_.num_ranks, stream),
                   "publish_route");
  }
  published_.mark(Phase::kPublishRoute, chunk);
  return advance_waves(stream);
}

Status Stream::publish_layout(int64_t chunk, const int32_t* chunk_operand, const void* x, void* y,
                              cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  Span span(ring_->name(), group_, rank_, Phase::kPublishLayout, chunk);
  bool dropped = false;
  STREAMMOE_RETURN_IF_ERROR(begin(Phase::kPublishLayout, chunk, y, stream, &dropped));
  const auto [start, stop] = spec_.chunk_bounds(chunk);
  if (!dropped) {
    STREAMMOE_CUDA(sm90::launch_publish_layout(device_ring(), chunk, chunk_operand, stop - start, x, stream),
                   "publish_layout");
  }
  published_.mark(Phase::kPublishLayout, chunk);
  return advance_waves(stream);
}

Status Stream::publish_external(int64_t chunk, cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  Span span(ring_->name(), group_, rank_, Phase::kPublishRoute, chunk);
  // The kernel has written already: what it overwrote must have been free, so nothing may be left to finish here.
  for (const Phase phase : {Phase::kPublishRoute, Phase::kPublishLayout}) {
    STREAMMOE_RETURN_IF_ERROR(published_.check(spec_, phase, chunk, shape_.num_slots));
  }
  if (spec_.macro_of(chunk) != macros_combined_) {
    return error(Code::kFailedPrecondition, "publish_external: chunk ", chunk, " belongs to macro-chunk ",
                 spec_.macro_of(chunk), ", whose memory is still in use by the one before: a ring whose chunks are ",
                 "published by kernels of yours must hold all tokens of the call, num_slots * chunk_tokens >= ",
                 spec_.num_tokens);
  }
  published_.mark(Phase::kPublishRoute, chunk);
  published_.mark(Phase::kPublishLayout, chunk);
  return advance_waves(stream);
}

Status Stream::advance_waves(cudaStream_t stream) {
  while (const std::optional<int64_t> wave = published_.next_wave(spec_)) {
    STREAMMOE_RETURN_IF_ERROR(run_wave(*wave, stream));
  }
  return {};
}

// Enqueues one wave: on the side stream behind everything that XLA's stream has been given so far, or on XLA's stream.
Status Stream::run_wave(int64_t wave, cudaStream_t stream) {
  const int64_t first = spec_.wave_begin(wave), last = spec_.wave_ends[static_cast<size_t>(wave)];
  Span span(ring_->name(), group_, rank_, Phase::kExperts, first, last - 1);
  const cudaStream_t on = spec_.overlap ? side_ : stream;
  if (spec_.overlap) {
    STREAMMOE_CUDA(cudaEventRecord(fork_, stream), "the fork of a wave");
    STREAMMOE_CUDA(cudaStreamWaitEvent(side_, fork_, 0), "the fork of a wave");
  }
  STREAMMOE_CUDA(sm90::launch_await_chunks(device_ring(), first, last, on), "waiting for chunks");
  const int64_t macro = spec_.macro_of(first);
  const int64_t num_tokens = spec_.chunk_bounds(last - 1).second - macro * spec_.macro_tokens;
  const bool beside_producer = spec_.overlap && wave + 1 < static_cast<int64_t>(spec_.wave_ends.size());
  if (num_tokens > 0) {
    if (shape_.num_ranks > 1) {
      STREAMMOE_CUDA(sm90::launch_fetch_chunks(device_ring(), spec_, first, last, on), "fetching tokens");
    }
    STREAMMOE_RETURN_IF_ERROR(run_experts(wave, num_tokens * shape_.num_ranks, beside_producer, on));
    if (beside_producer && shape_.num_ranks == 1) {  // over ranks it would wait for peers
      STREAMMOE_CUDA(sm90::launch_await_resident(device_ring(), resident_ctas_, stream), "letting a wave start");
    }
  }
  // With one rank the order of the streams says it all.
  if (shape_.num_ranks == 1 || wave != spec_.seal_wave(macro)) return {};
  return cuda_status(sm90::launch_seal(device_ring(), spec_, macro, on), "sealing a macro-chunk");
}

// The experts on what is pending of the first num_rows token rows of the pool.
Status Stream::run_experts(int64_t wave, int64_t num_rows, bool beside_producer, cudaStream_t stream) {
  const ExpertProblem& p = spec_.problem;
  const int64_t macro = spec_.macro_of(spec_.wave_begin(wave));
  const bool first = spec_.wave_begin(wave) == spec_.macro_begin(macro), seal = wave == spec_.seal_wave(macro);
  uint8_t* base = mem();
  auto* computed = reinterpret_cast<int32_t*>(base + at_.computed);
  if (spec_.capacity >= 0) {
    STREAMMOE_CUDA(cudaMemsetAsync(base + at_.combine_flags, 0, static_cast<size_t>(num_rows * p.top_k), stream),
                   "clearing the flags of dropped routes");
  }
  const sm90::Plan plan = sm90::make_plan(base + at_.plan, num_rows, p.top_k, p.num_experts, false);
  sm90::PlanArgs args;
  args.topk_ids = reinterpret_cast<const int32_t*>(base + (shape_.num_ranks > 1 ? at_.routes : at_.combine_ids));
  args.num_tokens = num_rows, args.top_k = p.top_k;
  args.num_experts = p.num_experts, args.first_expert = rank_ * p.num_experts;
  args.total_experts = p.num_experts * shape_.num_ranks;
  args.window.computed = first ? nullptr : computed + (wave % 2) * p.num_experts;
  args.window.computed_after = computed + ((wave + 1) % 2) * p.num_experts;
  args.window.min_rows = seal || !spec_.packed ? 0 : static_cast<int32_t>(spec_.min_carry_rows);
  args.window.failed = &reinterpret_cast<const CallState*>(base + at_.call)->failed;
  args.window.stats = reinterpret_cast<int32_t*>(base + at_.stats);
  if (spec_.capacity >= 0) {
    args.window.capacity = static_cast<int32_t>(std::min<int64_t>(spec_.capacity, args.window.capacity));
    args.window.dropped = base + at_.combine_flags;
  }
  STREAMMOE_CUDA(sm90::launch_plan(args, plan, stream), "planning a wave");

  sm90::ExpertPass pass;
  pass.weights = weights_, pass.num_experts = p.num_experts;
  pass.hidden = p.hidden, pass.intermediate = p.intermediate, pass.top_k = p.top_k;
  pass.dtype = p.dtype, pass.activation = p.activation, pass.limit = p.limit;
  // Waves that a producer runs beside leave it some SMs; nothing is left to produce beside the last.
  pass.num_sms = beside_producer ? num_sms_ - spec_.producer_sms : 0;
  pass.rows = base + at_.token_pool, pass.activations = base + at_.activations, pass.out = base + at_.combine_rows;
  sm90::GemmArgs up = sm90::up_product(pass, plan), down = sm90::down_product(pass, plan);
  up.holds_successor = down.holds_successor = beside_producer;
  uint32_t ctas = 0;
  if (beside_producer) up.resident = &reinterpret_cast<RingHeader*>(base + at_.header)->resident_ctas;
  STREAMMOE_CUDA(sm90::launch_gemm_up_sm90(up, stream, &ctas), "the up product of a wave");
  if (beside_producer) resident_ctas_ += ctas;
  if (shape_.num_ranks > 1) {
    down.owners = {reinterpret_cast<uint8_t* const*>(base + at_.peers), at_.combine_rows,
                   spec_.token_order(shape_.num_ranks, macro)};
  }
  return cuda_status(sm90::launch_gemm_down_sm90(down, stream), "the down product of a wave");
}

// XLA's stream goes on when everything on the side stream is done.
Status Stream::join(cudaStream_t stream) {
  if (!spec_.overlap) return {};
  STREAMMOE_CUDA(cudaEventRecord(join_, side_), "joining the waves");
  return cuda_status(cudaStreamWaitEvent(stream, join_, 0), "joining the waves");
}

// Writes y of the macro-chunks before `upto`: from then on their memory may be published into. Their waves are
// enqueued.
Status Stream::finish_macros(int64_t upto, void* y, cudaStream_t stream) {
  if (macros_combined_ == upto) return {};
  STREAMMOE_RETURN_IF_ERROR(join(stream));
  for (; macros_combined_ < upto; ++macros_combined_) {
    const int64_t macro = macros_combined_, start = macro * spec_.macro_tokens;
    Span span(ring_->name(), group_, rank_, Phase::kCombine, spec_.macro_begin(macro),
              spec_.macro_ends[static_cast<size_t>(macro)] - 1);
    uint8_t* base = mem();
    sm90::CombineArgs args;
    args.dtype = spec_.problem.dtype;
    args.rows = base + at_.combine_rows;
    args.topk_weights = reinterpret_cast<const float*>(base + at_.combine_weights);
    args.y = static_cast<uint8_t*>(y) + start * shape_.hidden * shape_.itemsize;
    args.num_tokens = std::min(spec_.num_tokens, start + spec_.macro_tokens) - start;
    args.top_k = shape_.top_k, args.hidden = shape_.hidden;
    sm90::PairRoutes routes;
    routes.topk_ids = reinterpret_cast<const int32_t*>(base + at_.combine_ids);
    routes.num_experts = static_cast<int32_t>(spec_.problem.num_experts * shape_.num_ranks);
    routes.dropped = spec_.capacity >= 0 ? base + at_.combine_flags : nullptr;
    routes.failed = &reinterpret_cast<const CallState*>(base + at_.call)->failed;
    STREAMMOE_CUDA(sm90::launch_combine_pairs(args, routes, stream), "combine");
  }
  return {};
}

Status Stream::close(const ExpertWeights& weights, void* y, int32_t* expert_rows, int32_t* counts,
                     cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  Span span(ring_->name(), group_, rank_, Phase::kClose);
  if (weights != weights_) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(), "': XLA moved the experts while the stream was ",
                 "open; pass close_stream the experts that open_stream was given");
  }
  STREAMMOE_RETURN_IF_ERROR(published_.complete(spec_));
  bool dropped = false;
  STREAMMOE_RETURN_IF_ERROR(Faults::get().hit(ring_->name(), rank_, Phase::kClose, &dropped));
  STREAMMOE_RETURN_IF_ERROR(finish_macros(static_cast<int64_t>(spec_.macro_ends.size()), y, stream));
  STREAMMOE_CUDA(sm90::launch_close(device_ring(), spec_, expert_rows, counts, stream), "close_stream");
  open_ = false;
  return {};
}

Status Stream::advance(const CallSpec& spec, cudaStream_t stream) {
  const Enqueuing enqueuing(*this, stream);
  STREAMMOE_RETURN_IF_ERROR(enqueuing.status());
  if (open_) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(), "': a batch-ready call while a stream is open");
  }
  return cuda_status(sm90::launch_advance(device_ring(), spec, stream), "advancing the ring");
}

}  // namespace streammoe::cuda
