// One rank's side of a streamed call on the CPU: publish chunks, consume waves, combine, acknowledge.
//
// Contract: the methods are called in the order open, publish_*, close by XLA's threads of one device, one at a
// time. Under `overlap` the waves run on a worker thread of this object, else inside the publishing call. Every
// wait is for a flag of a lower ticket (docs/protocol.md), has the ring's deadline and ends early when a peer
// aborts. Payload is copied in and out of the slots: a chunk's operands may be freed when the publishing call
// returns; the expert weights must live from open to close.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/experts.h"
#include "host/call.h"
#include "host/events.h"
#include "host/problem.h"
#include "host/publications.h"
#include "host/registry.h"
#include "host/status.h"
#include "protocol/descriptor.h"
#include "protocol/sequence.h"

namespace streammoe::cpu {

class Stream : public RankStream {
 public:
  Stream(Ring* ring, int64_t group, int64_t rank);
  ~Stream() override;

  Status open(const CallSpec& spec, const ExpertWeights& weights);
  // y is [T, H]; rows of completed macro-chunks are written to it before the next macro-chunk is published.
  Status publish_route(int64_t chunk, const int32_t* ids, const float* weights, void* y);
  Status publish_layout(int64_t chunk, const void* x, void* y);
  // The experts must be those of open, in the same memory: waves have read them there until now.
  Status close(const ExpertWeights& weights, void* y, CallStats* stats);
  // After an error: makes the ring terminal, tells the peers, and ends the worker, so that nothing of the call touches
  // memory once the error is raised.
  void abort(const Status& why) override;
  const CallSpec& spec() const { return spec_; }
  bool is_open() const override { return open_.load(std::memory_order_acquire); }
  Status read_control(std::vector<uint8_t>* out) const override;

 private:
  // A route whose token is in the pool and whose expert has not computed it yet.
  struct PendingRow {
    int64_t expert;    // local
    int64_t pool_row;  // of the token pool
    int64_t peer;      // owner of the token
    int64_t pair_idx;  // token * K + k, the token counted from the start of its macro-chunk
  };

  // producer side (XLA's thread)
  Status begin(Phase phase, int64_t chunk, void* y);
  Status wait_slot_free(Phase phase, int64_t chunk);
  Status finish_macros(int64_t upto, void* y);
  Status announce(int64_t table, int64_t chunk);
  Status advance();
  Status combine_macro(int64_t macro, void* y);

  // consumer side (worker thread, or XLA's thread under `serial`)
  Status run_wave(int64_t wave);
  Status admit(int64_t chunk);
  Status make_room(const uint8_t* slot, int64_t num_tokens);
  void copy_in(int64_t peer, const uint8_t* slot, const SlotDescriptor& descriptor);
  Status check_descriptor(int64_t peer, int64_t chunk, const SlotDescriptor& seen, const char* half) const;
  void drop_beyond_capacity();
  Status compute(bool partial_blocks, int64_t min_rows);
  Status seal_macro(int64_t macro);

  // both
  Status fault(Phase phase);
  Status wait(const uint64_t* word, uint64_t wanted, Phase phase, int64_t peer, int64_t slot);
  Status fail(const Status& why, bool tell_peers);
  Status ring_failed() const;
  uint64_t* word(int64_t of_rank, int64_t offset) const;
  uint8_t* heap(int64_t of_rank) const;
  Status drain(int64_t wave);
  void worker_loop();
  void stop_worker();

  Ring* const ring_;
  const int64_t group_, rank_;
  const RingLayout& at_;
  const RingShape& shape_;

  std::atomic<bool> open_{false};
  CallSpec spec_;
  ExpertWeights weights_;
  uint64_t tag_ = 0, base_ = 0, call_ = 0, macro_base_ = 0;
  Publications published_;
  int64_t macros_combined_ = 0;  // macro-chunks of this call whose y is written
  CallStats stats_;

  // consumer state, owned by whoever runs the waves
  std::vector<PendingRow> pending_;
  int64_t pool_used_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<int64_t> queue_;  // waves to run
  int64_t waves_done_ = 0;
  bool stopping_ = false;
  Status worker_status_;
  std::thread worker_;
};

}  // namespace streammoe::cpu
