// The producer's side of a stream: open, publish, close, and the hand-over to whoever runs the waves.
// The consumer's side is in stream_consume.cc. See stream.h for the contract.
#include "cpu/stream.h"

#include <algorithm>
#include <cstring>

#include "cpu/combine.h"
#include "cpu/ids.h"

namespace streammoe::cpu {

Stream::Stream(Ring* ring, int64_t group, int64_t rank)
    : ring_(ring), group_(group), rank_(rank), at_(ring->layout()), shape_(ring->shape()) {}

Stream::~Stream() { stop_worker(); }

uint8_t* Stream::heap(int64_t of_rank) const { return ring_->base(group_, of_rank); }

uint64_t* Stream::word(int64_t of_rank, int64_t offset) const {
  return reinterpret_cast<uint64_t*>(heap(of_rank) + offset);
}

// Acquire per word: a call that runs may move while it is read.
Status Stream::read_control(std::vector<uint8_t>* out) const {
  out->resize(static_cast<size_t>(at_.slots));
  for (int64_t at = 0; at < at_.slots; at += 8) {
    const uint64_t value = load_acquire(word(rank_, at));
    std::memcpy(out->data() + at, &value, sizeof(value));
  }
  return {};
}

Status Stream::open(const CallSpec& spec, const ExpertWeights& weights) {
  Span span(ring_->name(), group_, rank_, Phase::kOpen);
  if (open_) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(),
                 "': open_stream while the stream of an earlier call ",
                 "was never closed; close every stream that was opened, or make_ring again");
  }
  const auto* header = reinterpret_cast<const RingHeader*>(heap(rank_) + at_.header);
  if (header->magic != kRingMagic) {
    return error(Code::kFailedPrecondition, "ring '", ring_->name(),
                 "': the ring's memory does not hold a ring; it was ",
                 "overwritten, or restored from a checkpoint: call make_ring again");
  }
  STREAMMOE_RETURN_IF_ERROR(spec.check(shape_));
  spec_ = spec, weights_ = weights, tag_ = spec.tag();
  base_ = header->sequence_base, call_ = header->call_number, macro_base_ = header->macro_number;
  published_.reset(spec);
  macros_combined_ = waves_done_ = pool_used_ = 0;
  pending_.clear();
  stats_ = {};
  stats_.expert_rows.assign(static_cast<size_t>(spec.problem.num_experts), 0);
  open_ = true;
  STREAMMOE_RETURN_IF_ERROR(fault(Phase::kOpen));
  if (spec.overlap && !worker_.joinable()) {
    stopping_ = false;
    worker_ = std::thread(&Stream::worker_loop, this);
  }
  return {};
}

// What both halves of a publication check and wait for before the slot may be written.
Status Stream::begin(Phase phase, int64_t chunk, void* y) {
  STREAMMOE_RETURN_IF_ERROR(require_open(ring_->name(), phase_name(phase)));
  if (const Status status = published_.check(spec_, phase, chunk, shape_.num_slots); !status.ok()) {
    return fail(status, true);
  }
  STREAMMOE_RETURN_IF_ERROR(fault(phase));
  STREAMMOE_RETURN_IF_ERROR(finish_macros(spec_.macro_of(chunk), y));
  return wait_slot_free(phase, chunk);
}

Status Stream::wait_slot_free(Phase phase, int64_t chunk) {
  const uint64_t q = chunk_sequence(base_, chunk);
  const uint64_t needed = reuse_sequence(q, shape_.num_slots);
  const int64_t slot = sequence_slot(q, shape_.num_slots);
  for (int64_t reader = 0; reader < shape_.num_ranks; ++reader) {
    const int64_t offset = at_.word(at_.consumed, reader, slot, shape_.num_slots);
    STREAMMOE_RETURN_IF_ERROR(wait(word(rank_, offset), needed, phase, reader, slot));
  }
  return {};
}

// Chunks of macro-chunk `upto` may be published once the rows of all macro-chunks before it have left the pool. Their
// waves are enqueued: check() saw to it.
Status Stream::finish_macros(int64_t upto, void* y) {
  for (; macros_combined_ < upto; ++macros_combined_) {
    STREAMMOE_RETURN_IF_ERROR(drain(spec_.seal_wave(macros_combined_)));
    STREAMMOE_RETURN_IF_ERROR(combine_macro(macros_combined_, y));
  }
  return {};
}

Status Stream::publish_route(int64_t chunk, const int32_t* ids, const float* weights, void* y) {
  Span span(ring_->name(), group_, rank_, Phase::kPublishRoute, chunk);
  STREAMMOE_RETURN_IF_ERROR(begin(Phase::kPublishRoute, chunk, y));
  const auto [start, stop] = spec_.chunk_bounds(chunk);
  const auto pairs = static_cast<size_t>((stop - start) * shape_.top_k);
  const int64_t num_experts = spec_.problem.num_experts * shape_.num_ranks;
  if (spec_.checks) {
    const Status status = check_ids({ids, pairs}, shape_.top_k, num_experts, start);
    if (!status.ok()) return fail(error(status.code(), status.message(), " (rank ", rank_, ")"), true);
  }
  uint8_t* slot = heap(rank_) + at_.slot(sequence_slot(chunk_sequence(base_, chunk), shape_.num_slots));
  const IdCounts counts = sanitise_ids({ids, pairs}, num_experts, reinterpret_cast<int32_t*>(slot + at_.slot_topk_ids));
  stats_.invalid += counts.invalid, stats_.masked += counts.masked;
  std::memcpy(slot + at_.slot_topk_weights, weights, pairs * sizeof(float));
  const int64_t first_pair = (start - spec_.macro_of(chunk) * spec_.macro_tokens) * shape_.top_k;
  std::memcpy(heap(rank_) + at_.combine_ids + first_pair * 4, slot + at_.slot_topk_ids, pairs * 4);
  std::memcpy(heap(rank_) + at_.combine_weights + first_pair * 4, weights, pairs * 4);
  published_.mark(Phase::kPublishRoute, chunk);
  STREAMMOE_RETURN_IF_ERROR(announce(at_.route_ready, chunk));
  return advance();
}

Status Stream::publish_layout(int64_t chunk, const void* x, void* y) {
  Span span(ring_->name(), group_, rank_, Phase::kPublishLayout, chunk);
  STREAMMOE_RETURN_IF_ERROR(begin(Phase::kPublishLayout, chunk, y));
  const auto [start, stop] = spec_.chunk_bounds(chunk);
  uint8_t* slot = heap(rank_) + at_.slot(sequence_slot(chunk_sequence(base_, chunk), shape_.num_slots));
  std::memcpy(slot + at_.slot_x, x, static_cast<size_t>((stop - start) * shape_.hidden * shape_.itemsize));
  published_.mark(Phase::kPublishLayout, chunk);
  STREAMMOE_RETURN_IF_ERROR(announce(at_.layout_ready, chunk));
  return advance();
}

// Writes the descriptor of the half, then stores its ready word at every reader. The release store publishes the
// slot's payload and the descriptor to the consumers of all ranks, who acquire the word before they read either.
Status Stream::announce(int64_t table, int64_t chunk) {
  const uint64_t q = chunk_sequence(base_, chunk);
  const int64_t slot = sequence_slot(q, shape_.num_slots);
  const auto [start, stop] = spec_.chunk_bounds(chunk);
  const bool route = table == at_.route_ready;
  auto* descriptor = reinterpret_cast<SlotDescriptor*>(
      heap(rank_) + at_.slot(slot) + (route ? at_.slot_route_descriptor : at_.slot_layout_descriptor));
  *descriptor = {q, call_, tag_, chunk, start - spec_.macro_of(chunk) * spec_.macro_tokens, stop - start};
  PeerAccess access(*ring_);
  if (!access.allowed()) return ring_failed();
  for (int64_t peer = 0; peer < shape_.num_ranks; ++peer) {
    store_release(word(peer, at_.word(table, rank_, slot, shape_.num_slots)), q);
  }
  return {};
}

// Hands over every wave whose chunks are all published here, in order: what makes out-of-order publication safe.
Status Stream::advance() {
  while (const std::optional<int64_t> ready = published_.next_wave(spec_)) {
    const int64_t wave = *ready;
    if (spec_.overlap) {
      std::lock_guard lock(mutex_);
      queue_.push_back(wave);
      changed_.notify_all();
    } else {
      STREAMMOE_RETURN_IF_ERROR(run_wave(wave));
      waves_done_ = wave + 1;
    }
  }
  return {};
}

// Waits until the worker has finished `wave`. Its own waits carry the deadline, so this one needs none.
Status Stream::drain(int64_t wave) {
  if (!spec_.overlap) return {};
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waves_done_ > wave || !worker_status_.ok(); });
  return worker_status_;
}

Status Stream::combine_macro(int64_t macro, void* y) {
  Span span(ring_->name(), group_, rank_, Phase::kCombine, spec_.macro_begin(macro),
            spec_.macro_ends[static_cast<size_t>(macro)] - 1);
  STREAMMOE_RETURN_IF_ERROR(fault(Phase::kCombine));
  const uint8_t* base = heap(rank_);
  const int64_t start = macro * spec_.macro_tokens;
  const int64_t num_tokens = std::min(spec_.num_tokens, start + spec_.macro_tokens) - start;
  const auto* ids = reinterpret_cast<const int32_t*>(base + at_.combine_ids);
  const uint8_t* dropped = spec_.capacity >= 0 ? base + at_.combine_flags : nullptr;
  combine(spec_.problem.dtype, shape_.hidden, shape_.top_k, num_tokens, base + at_.combine_rows, ids,
          reinterpret_cast<const float*>(base + at_.combine_weights), dropped,
          static_cast<uint8_t*>(y) + start * shape_.hidden * shape_.itemsize, spec_.problem.threads);
  for (int64_t pair = 0; dropped != nullptr && pair < num_tokens * shape_.top_k; ++pair) {
    stats_.dropped += ids[pair] >= 0 && dropped[pair] != 0;
  }
  return {};
}

Status Stream::close(const ExpertWeights& weights, void* y, CallStats* stats) {
  Span span(ring_->name(), group_, rank_, Phase::kClose);
  STREAMMOE_RETURN_IF_ERROR(require_open(ring_->name(), "close_stream"));
  if (weights != weights_) {
    return fail(
        error(Code::kFailedPrecondition, "ring '", ring_->name(), "': XLA moved the experts while the stream was ",
              "open; pass close_stream the experts that open_stream was given"),
        true);
  }
  if (const Status status = published_.complete(spec_); !status.ok()) return fail(status, true);
  STREAMMOE_RETURN_IF_ERROR(fault(Phase::kClose));
  STREAMMOE_RETURN_IF_ERROR(finish_macros(static_cast<int64_t>(spec_.macro_ends.size()), y));
  auto* header = reinterpret_cast<RingHeader*>(heap(rank_) + at_.header);
  header->sequence_base = base_ + static_cast<uint64_t>(spec_.num_chunks);
  header->call_number = call_ + 1;
  header->macro_number = macro_base_ + spec_.macro_ends.size();
  *stats = std::move(stats_);
  open_ = false;
  return {};
}

Status Stream::fault(Phase phase) {
  bool silent = false;
  const Status status = Faults::get().hit(ring_->name(), rank_, phase, &silent);
  if (status.ok()) return status;
  // A silent death: stay away until the peers' deadline has made the ring terminal. Returning at once would let
  // XLA free a heap that peers of this process still read.
  const auto give_up = Clock::now() + std::chrono::duration<double>(4 * ring_->timeout_s());
  while (silent && !ring_->failed() && Clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return fail(status, !silent);
}

Status Stream::wait(const uint64_t* word, uint64_t wanted, Phase phase, int64_t peer, int64_t slot) {
  const auto timeout = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(ring_->timeout_s()));
  const AbortWords aborts{heap(rank_) + at_.abort, shape_.num_ranks};
  const WaitResult result = wait_at_least(word, wanted, aborts, Clock::now() + timeout, ring_->failed_flag());
  if (result.status == WaitStatus::kReached) return {};
  if (result.status == WaitStatus::kAborted && result.peer < 0) return ring_failed();
  if (result.status == WaitStatus::kAborted) {
    std::string text;
    {
      PeerAccess access(*ring_);  // the peer's heap goes when its error is raised
      if (access.allowed()) text = reinterpret_cast<const char*>(heap(result.peer) + at_.error);
    }
    if (text.empty()) text = ring_->failure();
    return fail(error(Code::kAborted, "ring '", ring_->name(), "': rank ", rank_, " stopped in phase ",
                      phase_name(phase), " because rank ", result.peer, " failed: ", text),
                true);
  }
  return fail(
      error(Code::kDeadlineExceeded, "ring '", ring_->name(), "': rank ", rank_, " waited ", ring_->timeout_s(),
            " s for rank ", peer, " in phase ", phase_name(phase), ", slot ", slot, ": sequence wanted ", wanted,
            ", seen ", result.seen,
            "; that rank died, stalls, or runs another program. The ring is unusable: make_ring again on all ranks"),
      true);
}

// Records the failure, tells the peers (error text first, the abort word's release store publishes it), makes the
// ring terminal and stops the worker, so that nothing of this call touches memory after the error is raised.
Status Stream::fail(const Status& why, bool tell_peers) {
  {
    std::lock_guard lock(mutex_);  // the worker and XLA's thread may fail at once: the first text stays
    auto* text = reinterpret_cast<char*>(heap(rank_) + at_.error);
    if (text[0] == 0) std::strncpy(text, why.message().c_str(), kErrorBytes - 1);
  }
  {
    PeerAccess access(*ring_);
    for (int64_t peer = 0; tell_peers && access.allowed() && peer < shape_.num_ranks; ++peer) {
      store_release(word(peer, at_.word(at_.abort, rank_, 0, 1)), call_ + 1);
    }
  }
  store_release(word(rank_, at_.word(at_.abort, rank_, 0, 1)), call_ + 1);
  ring_->fail(why.message());
  return why;
}

Status Stream::ring_failed() const {
  return error(Code::kFailedPrecondition, "ring '", ring_->name(),
               "' is unusable, make_ring again on all ranks; it failed with: ", ring_->failure());
}

void Stream::worker_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const int64_t wave = queue_.front();
    queue_.pop_front();
    lock.unlock();
    Status status = run_wave(wave);
    lock.lock();
    if (status.ok()) {
      waves_done_ = wave + 1;
    } else {
      worker_status_ = status;
    }
    changed_.notify_all();
    if (!status.ok()) return;
  }
}

void Stream::abort(const Status& why) {
  if (!ring_->failed()) (void)fail(why, true);
  stop_worker();
}

void Stream::stop_worker() {
  if (!worker_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  worker_.join();
}

}  // namespace streammoe::cpu
